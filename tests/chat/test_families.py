"""Texts that models write beside the forms of their templates: further channels, missing tags."""

import pytest

from specjax.chat import AnswerParser, ChatAnswer, ToolCall, family_form, family_of
from tests.chat.published_templates import template

F = ToolCall("f", '{"a": 1}')
CALLED = ChatAnswer("", "", (F,))

_FUNCTION = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
_INTEGER = [{"function": {"name": "f", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
_FINAL = "<|start|>assistant<|channel|>final<|message|>Hi"

WRITTEN = {
    "Llama's type before the name": (
        "llama3",
        '{"type": "function", "name": "f", "parameters": {"a": 1}}',
        CALLED,
    ),
    "Llama's tag before a call": (
        "llama3",
        '<|python_tag|>\n{"type": "function", "name": "f", "parameters": {"a": 1}}',
        CALLED,
    ),
    "Llama's JSON of another type": (
        "llama3",
        '{"type": "object", "name": "f"}',
        ChatAnswer('{"type": "object", "name": "f"}'),
    ),
    "Llama's call of a built-in tool": (
        "llama3",
        '<|python_tag|>brave_search.call(query="rain")',
        ChatAnswer('brave_search.call(query="rain")'),
    ),
    "Llama's program": ("llama3", "<|python_tag|>print({1})", ChatAnswer("print({1})")),
    "Llama 4's type before the name": (
        "llama4",
        '<|python_start|>{"type": "function", "name": "f", "parameters": {"a": 1}}<|python_end|>',
        CALLED,
    ),
    "Qwen3-Coder's call without an opening tag": (
        "qwen3_5",
        f"I look.\n{_FUNCTION}\n</tool_call>",
        ChatAnswer("I look.", "", (F,)),
    ),
    "Qwen3-Coder's calls without tags": (
        "qwen3_5",
        f"{_FUNCTION}\n{_FUNCTION}",
        ChatAnswer("", "", (F, F)),
    ),
    "gpt-oss's search": (
        "gpt_oss",
        '<|channel|>analysis to=browser.search code<|message|>{"query": "rain"}<|call|>' + _FINAL,
        ChatAnswer("Hi", '{"query": "rain"}'),
    ),
    "gpt-oss's program": (
        "gpt_oss",
        " to=python<|channel|>analysis code<|message|>print(1)<|call|>" + _FINAL,
        ChatAnswer("Hi", "print(1)"),
    ),
    "gpt-oss's program as a commentary": (
        "gpt_oss",
        "<|channel|>analysis<|message|>I count.<|end|><|start|>assistant to=python"
        "<|channel|>commentary<|message|>print(1)<|call|>" + _FINAL,
        ChatAnswer("Hi", "I count.\nprint(1)"),
    ),
    "gpt-oss's function": (
        "gpt_oss",
        '<|channel|>commentary to=functions.f json<|message|>{"a": 1}<|call|>' + _FINAL,
        ChatAnswer("Hi", "", (F,)),
    ),
    "a thought": ("thoughts", "<think>\n2 + 2\n</think>\n\n4", ChatAnswer("4", "2 + 2")),
}


@pytest.mark.parametrize(("family", "text", "answer"), WRITTEN.values(), ids=WRITTEN)
def test_what_models_write_is_read(family, text, answer) -> None:
    form = family_form(family)
    assert AnswerParser(form, tools=_INTEGER).parse(text) == answer
    parser = AnswerParser(form, tools=_INTEGER)
    events = [event for piece in text for event in parser.feed(piece)] + parser.finish()
    assert ChatAnswer.from_events(events) == answer


@pytest.mark.parametrize(
    "anchor",
    [
        "<|im_start|>assistant\n",
        "<|im_start|>assistant<|im_sep|>",
        "<|assistant|>",
        "[|assistant|]",
        "<\N{FULLWIDTH VERTICAL LINE}Assistant\N{FULLWIDTH VERTICAL LINE}>",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|start_of_role|>assistant<|end_of_role|>",
        "<start_of_turn>model\n",
        "[/INST]",
    ],
)
def test_a_thought_that_the_prompt_began_is_read_after_any_anchor(anchor) -> None:
    parser = AnswerParser(family_form("thoughts"), f"<think> Question {anchor}<think>\n")
    assert parser.parse("2 + 2\n</think>\n\n4") == ChatAnswer("4", "2 + 2")
    assert AnswerParser(family_form("thoughts"), f"<think> {anchor}").parse("4") == ChatAnswer("4")


def test_a_template_with_thoughts_and_calls_is_of_the_family_of_its_calls() -> None:
    class _Tokenizer:
        chat_template = template("deepseek_v3") + "<think></think>"

    family = family_of(_Tokenizer())
    assert family is not None and family.name == "deepseek_v3"
