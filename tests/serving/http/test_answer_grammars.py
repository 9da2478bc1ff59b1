"""The grammar that a request gets: its own, behind the thought, or that of its calls of tools."""

import asyncio
from typing import Any

import pytest

from specjax.errors import InputError
from specjax.grammars import CompiledGrammar, Grammar, GrammarCompiler
from specjax.serving.http.errors import RequestError
from specjax.serving.http.requests import TextRequest
from specjax.serving.http.service import AppOptions, Service
from tests.serving.http.interfaces import CALL, chat_engine
from tests.serving.http.test_tools import WEATHER, read

THINKING = "<|im_start|>assistant\n<think>\n"
ANSWERING = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
INTEGER = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}
UNSUPPORTED: dict[str, Any] = {
    "type": "function",
    "function": {"name": "g", "parameters": {"type": "object", "properties": {"a": {"not": {}}}}},
}
STRICT = {"type": "function", "function": UNSUPPORTED["function"] | {"strict": True}}
CALL_OF_G = '<tool_call>\n{"name": "g", "arguments": {"b": [1]}}\n</tool_call>'
OTHER_KEY = CALL.replace('"city"', '"town"')


@pytest.fixture(scope="module")
def service() -> Service:
    engine: Any = chat_engine("")
    compiler = GrammarCompiler(engine.tokenizer, len(engine.tokenizer))
    engine.has_grammars = True
    engine.compiled_grammar = compiler.compiled
    engine.compile_grammar = lambda grammar, megabytes=0.0: compiler.compile(grammar)
    return Service(engine, AppOptions(("tiny",)))


def compiled(service: Service, request: TextRequest, begin: str) -> CompiledGrammar | None:
    prompt = service.engine.tokenizer.encode(begin, add_special_tokens=False)
    regions = service.regions(request, [prompt])
    return asyncio.run(asyncio.wait_for(service.compile_grammar(request, regions), 60))


def is_legal(service: Service, grammar: CompiledGrammar | None, text: str) -> bool:
    assert grammar is not None
    matcher = grammar.matcher(stop_token_ids=(0,))
    tokens = service.engine.tokenizer.encode(text, add_special_tokens=False)
    if matcher.count_legal(tokens) < len(tokens):
        return False
    matcher.append(tokens)
    return matcher.is_complete


NAMED = {"type": "function", "function": {"name": "get_weather"}}


@pytest.mark.parametrize(
    ("fields", "begin", "legal", "not_legal"),
    [
        ({"tool_choice": "required"}, ANSWERING, [CALL, f"{CALL}\n{CALL}"], ["Hi", OTHER_KEY]),
        ({"tool_choice": NAMED}, ANSWERING, [CALL], [f"{CALL}\n{CALL}", CALL_OF_G]),
        (
            {"tool_choice": "required", "parallel_tool_calls": False},
            THINKING,
            [f"Hm.\n</think>\n\n{CALL}"],
            [CALL, f"Hm.\n</think>\n\n{CALL}\n{CALL}"],
        ),
        ({}, ANSWERING, ["Hi", CALL, f"Hi {CALL} and {CALL}"], [f"Hi {OTHER_KEY}", CALL_OF_G]),
        ({"response_format": INTEGER}, THINKING, ["Hm</think>12", f"</think>{CALL}"], ["12"]),
        (
            {"response_format": INTEGER, "tool_choice": "none"},
            THINKING,
            ["Hm</think>12"],
            [f"</think>{CALL}", "</think>a"],
        ),
        ({"response_format": INTEGER, "tool_choice": "none"}, ANSWERING, ["12"], ["a</think>12"]),
        (
            {"response_format": INTEGER, "tool_choice": "none"},
            "<|im_start|>assistant\n",
            ["12", "<think>Hm</think>12"],
            ["Hm</think>12"],
        ),
        ({"response_format": INTEGER, "tool_choice": "required"}, ANSWERING, [CALL], ["12"]),
    ],
)
def test_the_texts_that_a_request_allows(service, fields, begin, legal, not_legal) -> None:
    schema = WEATHER["function"]["parameters"] | {"additionalProperties": False}
    schema |= {"properties": {"city": {"type": "string"}, "n": {"type": "integer"}}}
    tool = {"type": "function", "function": WEATHER["function"] | {"parameters": schema}}
    request = read(service.limits, tools=[tool], **fields)
    grammar = compiled(service, request, begin)
    assert [text for text in legal if not is_legal(service, grammar, text)] == []
    assert [text for text in not_legal if is_legal(service, grammar, text)] == []


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_the_begin_of_a_call_that_a_limit_cuts_is_no_content(service: Service, choice: Any) -> None:
    request = read(service.limits, tools=[WEATHER], tool_choice=choice)
    prompt = service.engine.tokenizer.encode(ANSWERING)
    for end in range(len(CALL)):
        (regions,) = service.regions(request, [prompt])
        regions.push(f"{CALL}\n{CALL[:end]}")
        regions.finish("length")
        assert not regions.content and len(regions.calls) >= 1


def test_a_request_without_tools_and_without_a_format_has_no_grammar(service) -> None:
    assert compiled(service, read(service.limits), THINKING) is None
    request = read(service.limits, tools=[WEATHER], tool_choice="none")
    assert compiled(service, request, THINKING) is None


def test_a_schema_that_is_not_supported(service) -> None:
    request = read(service.limits, tools=[WEATHER, UNSUPPORTED])
    grammar = compiled(service, request, ANSWERING)
    assert is_legal(service, grammar, CALL_OF_G)
    assert not is_legal(service, grammar, CALL.replace('{"city', '[{"city'))
    for fields in (
        {"tools": [WEATHER, STRICT]},
        {"tools": [WEATHER, UNSUPPORTED], "tool_choice": "required"},
    ):
        with pytest.raises(RequestError) as refused:
            compiled(service, read(service.limits, **fields), ANSWERING)
        assert refused.value.message.startswith("tools[1].function.parameters: ")
        assert "not" in refused.value.message and refused.value.status == 400


def test_any_number_of_schemas_may_be_unsupported_where_nothing_is_strict(service) -> None:
    tools = [
        {"type": "function", "function": UNSUPPORTED["function"] | {"name": f"g{index}"}}
        for index in range(12)
    ]
    grammar = compiled(service, read(service.limits, tools=[WEATHER, *tools]), ANSWERING)
    for index in (0, 11):
        text = CALL_OF_G.replace('"g"', f'"g{index}"')
        assert is_legal(service, grammar, text)
    with pytest.raises(RequestError, match=r"tools\[12\]"):
        strict = {"type": "function", "function": tools[11]["function"] | {"strict": True}}
        compiled(service, read(service.limits, tools=[WEATHER, *tools[:11], strict]), ANSWERING)


def test_a_format_that_is_not_supported_beside_tools_is_named(service) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"not": {}}}}
    request = read(service.limits, tools=[WEATHER], response_format=schema)
    with pytest.raises(RequestError, match=r"^response_format: "):
        compiled(service, request, ANSWERING)


def test_a_model_whose_calls_have_no_grammar_cannot_be_made_to_call() -> None:
    engine: Any = chat_engine("")
    engine.tokenizer.response_template = {
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"content": {}},
    }
    engine.has_grammars = True
    service = Service(engine, AppOptions(("tiny",)))
    with pytest.raises(RequestError, match="no grammar for calls"):
        read(service.limits, tools=[WEATHER], tool_choice="required")
    assert not service.answer_grammars.has_calls(read(service.limits, tools=[WEATHER]))


def test_the_largest_schemas_are_left_out_if_all_are_too_large(service, monkeypatch) -> None:
    def tool(name: str, keys: int, **more: bool) -> dict[str, Any]:
        properties = {f"key_{index}": {"type": "integer"} for index in range(keys)}
        parameters = {"type": "object", "properties": properties, "additionalProperties": False}
        return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}

    compile_grammar = service.engine.compile_grammar

    def bounded(grammar: Grammar, megabytes: float = 0.0) -> CompiledGrammar:
        if len(grammar.source) > 8000:
            raise InputError("too large")
        return compile_grammar(grammar, megabytes)

    monkeypatch.setattr(service.engine, "compile_grammar", bounded)
    tools = [tool("small", 1), *(tool(f"large_{index}", 60) for index in range(4))]
    text = '<tool_call>\n{{"name": "{}", "arguments": {{"other": 1}}}}\n</tool_call>'.format
    grammar = compiled(service, read(service.limits, tools=tools), ANSWERING)
    assert is_legal(service, grammar, text("large_1"))
    assert not is_legal(service, grammar, text("small"))
    strict = [*tools[1:], tool("strict", 70, strict=True)]
    grammar = compiled(service, read(service.limits, tools=strict), ANSWERING)
    assert not is_legal(service, grammar, text("strict"))
    with pytest.raises(RequestError, match="too large"):
        compiled(service, read(service.limits, tools=tools, tool_choice="required"), ANSWERING)
