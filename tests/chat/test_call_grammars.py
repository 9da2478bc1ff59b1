"""Grammars of calls: what a template writes is legal, and what is legal is read as a call."""

import contextlib
import json
import random
import re
import time
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

import specjax
from specjax.chat import (
    AfterThought,
    AnswerParser,
    AnswerSyntax,
    ChatFamily,
    ThoughtSyntax,
    ToolCalls,
    families,
)
from specjax.errors import InputError
from specjax.grammars import Grammar, GrammarCompiler, Matcher
from specjax.text import load_tokenizer
from tests.chat.chats import ANSWERS, PUBLISHED, Published
from tests.chat.published_templates import template

WITH_CALLS = [family for family in families() if family.syntax.calls is not None]
ROOT = Path(__file__).parents[2]
_BAR = "\N{FULLWIDTH VERTICAL LINE}"
_LIST, _LIST_END = f"<{_BAR}tool▁calls▁begin{_BAR}>", f"<{_BAR}tool▁calls▁end{_BAR}>"
TAGS = (
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]"),
    *("<|tool_call|>", "<|/tool_call|>", "<|channel|>", "<|message|>", "<|constrain|>"),
    *("<|start|>", "<|end|>", _LIST, _LIST_END, "<|tool_call>", "<tool_call|>", '<|"|>'),
    *(f"<{_BAR}tool▁{name}{_BAR}>" for name in ("call▁begin", "sep", "call▁end")),
)
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 5},
        "days": {"type": "integer", "minimum": -9, "maximum": 99},
        "kind": {"enum": ["a b", "c", None, 7]},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "limits": {"$ref": "#/$defs/limits"},
        "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city", "days", "kind"],
    "additionalProperties": False,
    "$defs": {
        "limits": {
            "type": "object",
            "properties": {"low": {"type": "integer", "minimum": 0, "maximum": 9}},
            "additionalProperties": False,
        }
    },
}
SHORT: dict[str, Any] = {
    "type": "object",
    "properties": {"is_fast": {"type": "boolean"}},
    "required": ["is_fast"],
    "additionalProperties": False,
}
DEEP: dict[str, Any] = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "hours": {"type": "array", "items": {"type": "number"}, "minItems": 1},
        "is_short": {"type": ["boolean", "null"]},
        "limits": {
            "type": "object",
            "properties": {
                "low": {"type": "number"},
                "nested": {"properties": {"keys": {"type": "array"}, "more": {}}},
            },
            "required": ["nested"],
        },
    }
}
SCHEMAS = {"get_weather": SCHEMA, "run-code.v2": SHORT}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema}}
    for name, schema in SCHEMAS.items()
]


@pytest.fixture(scope="module", params=["tags are text", "tags are tokens"])
def tokenizer(request: pytest.FixtureRequest) -> Any:
    loaded = load_tokenizer(specjax.assets.embedded("target"))
    if request.param == "tags are tokens":
        loaded.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in TAGS])
    return loaded


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer))


def matcher_of(compiler: GrammarCompiler, grammar: Grammar) -> Matcher:
    return compiler.compile(grammar).matcher(stop_token_ids=(0,))


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def walk(tokenizer: Any, matcher: Matcher, rng: random.Random, most: int = 600) -> str | None:
    """Return the text of random legal tokens up to the end; None if it does not come."""
    tokens: list[int] = []
    while len(tokens) < most:
        bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
        legal = [int(token) for token in np.flatnonzero(bits)]
        if 0 in legal and (len(legal) < 3 or rng.random() < 0.2):
            return tokenizer.decode(tokens, skip_special_tokens=False)
        # What ends something is likelier than chance has it.
        ends = [token for token in ending(tokenizer) if bits[token]] if len(legal) > 40 else []
        pool = ends if ends and rng.random() < 0.3 else [token for token in legal if token != 0]
        tokens.append(rng.choice(pool))
        matcher.append(tokens[-1:])
    return None


@cache
def ending(tokenizer: Any) -> tuple[int, ...]:
    """Return the tokens that end a string, an object or a tag."""
    texts = ('"', "}", "\n", "<", "</", "]", *TAGS)
    return tuple(token for token in range(len(tokenizer)) if tokenizer.decode([token]) in texts)


@pytest.mark.full
@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda family: family.name)
def test_random_calls_are_read_and_valid(family: ChatFamily, tokenizer, compiler) -> None:
    syntax, rng = family.syntax.calls, random.Random(3)
    assert syntax is not None
    count = 0
    for _ in range(12):
        several = rng.random() < 0.5
        matcher = matcher_of(compiler, ToolCalls(syntax, SCHEMAS, several=several))
        text = walk(tokenizer, matcher, rng)
        if text is None:
            continue
        answer = AnswerParser(family.form, "", TOOLS).parse(text)
        assert not answer.content.strip() and answer.tool_calls, text
        assert several or len(answer.tool_calls) == 1
        for call in answer.tool_calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        count += 1
    assert count >= 4


CASES = [
    pytest.param(published, name, id=f"{published.template}: {name}")
    for published in PUBLISHED
    if published.chat_family().syntax.calls is not None
    for name in published.cases
    if ANSWERS[name].tool_calls and not ANSWERS[name].content
]


def as_models_write(published: Published, text: str) -> str:
    """Return a template's text of an answer as a model writes it, without what a server adds.

    Mistral's templates write the ids of calls, which servers make. The template of gpt-oss writes
    the tool before the channel; harmony's documentation says that the model writes it behind.
    DeepSeek-V3's leaves out the end of a list of one call.
    """
    text = re.sub(r', "id": "call\d+"|\[CALL_ID\]call\d+', "", text)
    text = text.removeprefix("<|python_start|><|python_end|>")
    if text.startswith(_LIST) and not text.endswith(_LIST_END):
        text += _LIST_END
    return re.sub(
        r" (to=functions\.[\w.-]+)<\|channel\|>commentary json",
        r"<|channel|>commentary \1 <|constrain|>json",
        text,
    )


@pytest.mark.full
@pytest.mark.parametrize(("published", "name"), CASES)
@pytest.mark.parametrize("required", [True, False])
def test_what_a_template_writes_is_legal(
    published: Published, name: str, required: bool, tokenizer, compiler
) -> None:
    answer, family = ANSWERS[name], published.chat_family()
    assert family.syntax.calls is not None
    if not required and not family.syntax.calls.trigger:
        pytest.skip("calls of this family are not told from text")
    prompt, text = published.written(answer)
    text = as_models_write(published, text)
    begin = family.form.after_anchor(prompt)
    thought = family.syntax.thought_after(begin, template(published.template))
    # Any arguments have few levels in Gemma's notation.
    schemas = {"get_weather": DEEP} if family.name == "gemma4" else {}
    tools = {call.name: schemas.get(call.name) for call in answer.tool_calls}
    grammar = ToolCalls(family.syntax.calls, tools, thought, required=required)
    tokens, matcher = ids_of(tokenizer, text), matcher_of(compiler, grammar)
    count = matcher.count_legal(tokens)
    assert count == len(tokens), tokenizer.decode(tokens[:count])
    matcher.append(tokens)
    assert matcher.is_complete


def legal_count(compiler: Any, tokenizer: Any, grammar: Grammar, text: str) -> tuple[bool, bool]:
    """Return whether a text is legal, and whether it may end there."""
    matcher, tokens = matcher_of(compiler, grammar), ids_of(tokenizer, text)
    if matcher.count_legal(tokens) < len(tokens):
        return False, False
    matcher.append(tokens)
    return True, matcher.is_complete


QWEN: Any = next(family.syntax.calls for family in families() if family.name == "qwen3")
CALL = '<tool_call>\n{"name": "run-code.v2", "arguments": {"is_fast": true}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "thought", "options", "expected"),
    [
        (CALL, None, {}, (True, True)),
        (f"{CALL}\n{CALL}", None, {}, (True, True)),
        (f"{CALL}\n", None, {"several": False}, (False, False)),
        ("Hello", None, {}, (False, False)),
        (f"Hm.</think>\n\n{CALL}", "open", {}, (True, True)),
        (f"Hm. <tool_call> {CALL}</think>\n\n{CALL}", "open", {}, (True, True)),
        (CALL, "open", {}, (True, False)),
        (f"<think>Hm.</think>\n\n{CALL}", "may", {}, (True, True)),
        (CALL, "may", {}, (True, True)),
        ("Hello, I <b>look</b>.", None, {"required": False}, (True, True)),
        (f"Hello\n{CALL} and\n{CALL}.", None, {"required": False}, (True, True)),
        ("Hello <tool_call>\n{", None, {"required": False}, (True, False)),
        ("Hello <tool_call>a", None, {"required": False}, (False, False)),
        (CALL.replace("true", "1"), None, {"required": False}, (False, False)),
        (CALL.replace("run-code.v2", "rm"), None, {"required": False}, (False, False)),
        (f"{CALL}a", None, {"required": False, "several": False}, (False, False)),
        ("Hm <tool_call>a", "open", {"required": False}, (True, True)),
        ("Hm </think>ok <tool_call>a", "open", {"required": False}, (False, False)),
        (f"Hm </think>ok {CALL}", "open", {"required": False}, (True, True)),
        (f"<think>a <tool_call> b</think>\n{CALL}", "may", {"required": False}, (True, True)),
    ],
)
def test_legal_texts(text, thought, options, expected, tokenizer, compiler) -> None:
    thoughts = {
        None: None,
        "open": ThoughtSyntax("<think>", "</think>", is_open=True),
        "may": ThoughtSyntax("<think>", "</think>"),
    }
    grammar = ToolCalls(QWEN, SCHEMAS, thoughts[thought], **options)
    if "a <tool_call> b" in text and len(ids_of(tokenizer, "<tool_call>")) > 1:
        expected = (False, False)  # two free texts are told apart by tokens, and not by text
    assert legal_count(compiler, tokenizer, grammar, text) == expected


@pytest.mark.parametrize(
    ("schema", "is_legal"),
    [
        ({"properties": {"a": {"type": "integer"}}}, False),
        ({"type": "object", "properties": {}, "description": "nothing"}, False),
        ({"properties": {"a": {}}, "additionalProperties": True}, True),
        ({"anyOf": [{"properties": {"b": {"type": "integer"}}}]}, True),
        (None, True),
    ],
)
def test_a_tool_has_the_arguments_that_it_declares(schema, is_legal, tokenizer, compiler) -> None:
    text = '<tool_call>\n{"name": "f", "arguments": {"b": 1}}\n</tool_call>'
    grammar = ToolCalls(QWEN, {"f": schema})
    assert legal_count(compiler, tokenizer, grammar, text) == (is_legal, is_legal)


def test_content_follows_a_thought_in_its_channel(tokenizer, compiler) -> None:
    (syntax,) = (family.syntax for family in families() if family.name == "gpt_oss")
    grammar = AfterThought(
        syntax.thought, specjax.JsonSchema({"type": "integer"}), content=syntax.content
    )
    final = "<|channel|>final<|message|>12"
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    for text in (final, thought + final):
        assert legal_count(compiler, tokenizer, grammar, text) == (True, True)
    assert legal_count(compiler, tokenizer, grammar, "12") == (False, False)


@pytest.mark.parametrize(
    ("begin", "template", "is_open"),
    [
        ("", "{{ '<think>' }}", False),
        ("<think>\n", "", True),
        ("<think>\n\n</think>\n\n", "{{ '<think>' }}", None),
        ("Hello", "{{ '<think>' }}", None),
        ("", "no tags", None),
    ],
)
def test_where_a_thought_may_come(begin: str, template: str, is_open: bool | None) -> None:
    syntax = AnswerSyntax(thought=ThoughtSyntax("<think>", "</think>"))
    thought = syntax.thought_after(begin, template)
    assert (None if thought is None else thought.is_open) == is_open


GEMMA: Any = next(family.syntax.calls for family in families() if family.name == "gemma4")


@pytest.mark.parametrize(
    ("text", "is_legal"),
    [
        ("{}", False),
        ("{b:1}", True),
        ('{a:<|"|>x y<|"|>,b:1}', True),
        ('{a:<|"|>x y z<|"|>,b:1}', False),
        ('{b:1,c:[<|"|>p<|"|>,null]}', True),
        ('{b:1,c:[<|"|>q<|"|>]}', False),
        ("{b:1,c:[]}", True),
        ("{b:1,c:[null,null,null]}", False),
        ("{b:1,a:1}", False),
        ('{b:1,d:{x:[true,<|"|><|"|>]}}', True),
        ('{b:1,e:<|"|>\n</code> "quoted"\n<|"|>}', True),
        ('{b:1,e:<|"|><tool_call|><|"|>}', False),
        ("{b:1,}", False),
    ],
)
def test_arguments_in_gemma_s_notation(text: str, is_legal: bool, tokenizer, compiler) -> None:
    words = {"enum": ["p", None]}
    schema = {
        "properties": {
            "a": {"type": "string", "maxLength": 3},
            "b": {"anyOf": [{"type": "integer"}, {"type": "boolean"}]},
            "c": {"type": "array", "items": words, "maxItems": 2},
            "d": {"type": "object"},
            "e": {"type": "string", "nullable": True},
        },
        "required": ["b"],
    }
    whole = f"<|tool_call>call:f{text}<tool_call|>"
    grammar = ToolCalls(GEMMA, {"f": schema})
    assert legal_count(compiler, tokenizer, grammar, whole) == (is_legal, is_legal)


TAGGED: Any = next(family.syntax.calls for family in families() if family.name == "qwen3_5")


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "properties.a.pattern"),
        ({"properties": {"a": {"not": {}}}}, "not"),
        ({"properties": {"a>": {}}}, "cannot be written as a tag"),
        ({"anyOf": []}, "schema.anyOf: not supported"),
        ({"properties": [], "type": "object"}, "schema.properties=\\[\\]: give an object"),
        ({"properties": {"a": {}}, "required": [{}]}, "schema.required="),
        ({"properties": {"a": {"type": "string", "minLength": "x"}}}, "a.minLength='x'"),
        ({"properties": {"a": {"type": "string", "maxLength": 2.5}}}, "a.maxLength=2.5"),
        ({"properties": {"a": {"type": "string", "maxLength": True}}}, "a.maxLength=True"),
        ({"properties": {"a": {"$ref": "#/$defs/none"}}}, r"\\$ref='#/\\$defs/none'|type is not"),
        ({"properties": {"a": {"minimum": 3}}}, "its type is not stated"),
        ({"properties": {"a": {"type": ["string", "integer"], "maximum": 3}}}, "restricted values"),
        (
            {"properties": {"a": {"anyOf": [{"type": "string"}, {"enum": [1, 2]}]}}},
            "restricted values",
        ),
        ({"properties": {"a": {"enum": ["5", 7]}}}, "'5' would be read as another type"),
        (
            {"properties": {}, "additionalProperties": {"type": "string"}},
            "schema.additionalProperties",
        ),
        (
            {"properties": {"a": {"allOf": [{"type": "string"}, {"minLength": 1}]}}},
            "whose type is not clear",
        ),
        ({"properties": {}, "required": ["a"]}, "'a' is not in properties"),
        ({"type": "array"}, "schema.type='array'"),
        ({"properties": {"a": {"enum": ["</parameter>"]}}}, "would end the call"),
    ],
)
def test_a_schema_that_tags_cannot_hold_is_refused(schema, message, compiler) -> None:
    with pytest.raises(InputError, match=message):
        compiler.compile(ToolCalls(TAGGED, {"f": schema}))


UNIONS: dict[str, Any] = {
    f"n{i}": {"anyOf": [{"$ref": f"#/$defs/n{i + 1}"}] * 4} for i in range(12)
}
LOOPS: dict[str, Any] = {"n0": {"anyOf": [{"$ref": "#/$defs/n0"}, {"type": "array"}]}}


@pytest.mark.parametrize("definitions", [UNIONS | {"n12": {"type": "string"}}, LOOPS])
@pytest.mark.parametrize("family", ["qwen3_5", "gemma4"])
def test_unions_and_references_take_bounded_time(definitions, family) -> None:
    (syntax,) = (it.syntax.calls for it in families() if it.name == family)
    schema = {"properties": {"a": {"$ref": "#/$defs/n0"}}, "$defs": definitions}
    assert syntax is not None
    start = time.process_time()
    with contextlib.suppress(InputError):
        ToolCalls(syntax, {"f": schema})
    assert time.process_time() - start < 1


@pytest.mark.full
@pytest.mark.parametrize("family", WITH_CALLS, ids=lambda family: family.name)
def test_a_schema_that_is_wrong_is_refused_and_no_other_error(family: ChatFamily) -> None:
    """Replace parts of a schema by values of other types."""
    rng = random.Random(4)
    wrong: list[Any] = [None, True, -1, 2.5, 1e400, "x", [], [1], {}, {"a": 1}, ["string"], [{}]]
    refused = 0
    for _ in range(400):
        schema = json.loads(json.dumps(SCHEMA))
        place = schema
        while True:
            key = rng.choice([*place] if isinstance(place, dict) else [*range(len(place))])
            deeper = place[key]
            if not isinstance(deeper, dict | list) or not deeper or rng.random() < 0.4:
                place[key] = rng.choice(wrong)
                break
            place = deeper
        try:
            assert family.syntax.calls is not None
            ToolCalls(family.syntax.calls, {"f": schema})
        except InputError:
            refused += 1
    assert refused > 0


def read_calls(family: str, tokenizer: Any, compiler: Any, schema: Any, text: str) -> list[Any]:
    """Return the arguments of the calls of a text that its grammar allows as a whole."""
    (chosen,) = (it for it in families() if it.name == family)
    assert chosen.syntax.calls is not None
    grammar = ToolCalls(chosen.syntax.calls, {"f": schema})
    if legal_count(compiler, tokenizer, grammar, text) != (True, True):
        return []
    tool = {"type": "function", "function": {"name": "f", "parameters": schema or {}}}
    answer = AnswerParser(chosen.form, "", [tool]).parse(text)
    assert answer.tool_calls and not answer.content, "what is legal is read"
    return [call.values() for call in answer.tool_calls]


def qwen(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'


def tagged(values: str) -> str:
    return f"<tool_call>\n<function=f>\n{values}</function>\n</tool_call>"


TEXT = {"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}
OPEN = {"properties": {"a": {"type": "object"}}}
COLOR = {
    "properties": {"a": {"allOf": [{"$ref": "#/$defs/color"}], "default": "red"}},
    "$defs": {"color": {"enum": ["red", "blue"]}},
}


@pytest.mark.parametrize(
    ("family", "schema", "text", "is_legal"),
    [
        ("qwen3", OPEN, qwen('{"a": {"x": 1, "x": 2}}'), True),
        ("qwen3", None, qwen('{"a": 1, "a": 2}'), True),
        ("qwen3", {"type": "object"}, qwen('{"a": 1}'), True),
        ("qwen3", OPEN | {"nullable": True}, qwen("null"), False),
        ("qwen3_5", OPEN, tagged('<parameter=a>\n{"x": 1, "x": 2}\n</parameter>\n'), True),
        ("qwen3_5", None, tagged("<parameter=a>\n1\n</parameter>\n" * 2), True),
        ("qwen3_5", TEXT, tagged("<parameter=a>\nx</parameter>\n"), True),
        ("qwen3_5", TEXT, tagged("<parameter=a>\n</parameter></parameter>\n"), False),
        (
            *("qwen3_5", TEXT),
            tagged("<parameter=a>\nx</parameter> <parameter=b>\nnope\n</parameter>\n"),
            False,
        ),
        (
            *("qwen3_5", TEXT),
            tagged("<parameter=a>\nx</parameter><parameter=z>\ny\n</parameter>\n"),
            False,
        ),
        ("qwen3_5", COLOR, tagged("<parameter=a>\nred\n</parameter>\n"), True),
        ("qwen3_5", COLOR, tagged('<parameter=a>\n"red"\n</parameter>\n'), False),
    ],
)
def test_what_is_legal_is_read_and_valid(
    family, schema, text, is_legal, tokenizer, compiler
) -> None:
    calls = read_calls(family, tokenizer, compiler, schema, text)
    assert bool(calls) is is_legal
    for arguments in calls:
        jsonschema.validate(arguments, schema or {})


def test_a_thought_of_gpt_oss_has_no_other_channel(tokenizer, compiler) -> None:
    (syntax,) = (family.syntax for family in families() if family.name == "gpt_oss")
    call = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 1}'
    assert syntax.calls is not None
    grammar = ToolCalls(syntax.calls, {"f": None}, syntax.thought)
    thought = "<|channel|>analysis<|message|>Hm{}<|end|><|start|>assistant"
    for inside, is_legal in (("", True), (call, False), ("<|channel|>final<|message|>x", False)):
        text = thought.format("").replace("Hm", f"Hm{inside}") + call
        assert legal_count(compiler, tokenizer, grammar, text) == (is_legal, is_legal)


@pytest.mark.parametrize(
    ("text", "is_legal"),
    [
        ("<parameter=a>\nif x:\n    <b>\n</parameter>\n", True),
        ("<parameter=a>\n</tool_call>", False),
        ("<parameter=b>\n123\n</parameter>\n", True),
        ("<parameter=b>\n1234", False),
        ("<parameter=b>\n</parameter>", False),
        ("<parameter=c>\nnull\n</parameter>\n", True),
        ("<parameter=c>\nnone", False),
        ("<parameter=a>\nx\n</parameter>\n<parameter=c>\ny z\n</parameter>\n", True),
        ("<parameter=c>\ny z\n</parameter>\n<parameter=a>", False),
    ],
)
def test_arguments_in_tags(text: str, is_legal: bool, tokenizer, compiler) -> None:
    schema = {
        "properties": {
            "a": {"type": "string", "description": "any"},
            "b": {"type": "string", "minLength": 1, "maxLength": 3},
            "c": {"enum": ["y z", None]},
        }
    }
    whole = f"<tool_call>\n<function=f>\n{text}"
    grammar = ToolCalls(TAGGED, {"f": schema})
    assert legal_count(compiler, tokenizer, grammar, whole)[0] is is_legal


def test_the_table_of_the_documentation_says_what_the_data_say() -> None:
    page = (ROOT / "docs" / "concepts" / "chat-answers.md").read_text()
    _, _, table = page.partition(
        "| File | Calls in text | Required calls | Several calls |\n|---|---|---|---|\n"
    )
    stated = {}
    for line in table.partition("\n\n")[0].splitlines():
        names, in_text, required, several = (cell.strip() for cell in line.strip("|").split("|"))
        for name in re.findall(r"`(\w+)`", names):
            stated[name] = (in_text == "yes", required == "yes", several.startswith("yes"))
    recorded = {}
    for family in families():
        calls = family.syntax.calls
        if family.name != "thoughts":
            recorded[family.name] = (
                (bool(calls.trigger), True, calls.between is not None)
                if calls is not None
                else (False, False, False)
            )
    assert stated == recorded
