"""Render an answer with a published template, and parse it back."""

import pytest

from specjax.chat import AnswerParser, ChatAnswer, ToolCall, family_form, family_of
from tests.chat.chats import ANSWERS, PUBLISHED, TOOLS, Published
from tests.chat.published_templates import TEMPLATES, template

CASES = [
    pytest.param(published, name, id=f"{published.template}: {name}")
    for published in PUBLISHED
    for name in published.cases
]


class WithTemplate:
    """A tokenizer that has a chat template and nothing else."""

    def __init__(self, chat_template: str) -> None:
        self.chat_template = chat_template


def test_every_template_is_tested() -> None:
    assert {published.template for published in PUBLISHED} == set(TEMPLATES)


@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.template)
def test_a_template_is_recognized(published: Published) -> None:
    family = family_of(WithTemplate(template(published.template)))
    assert family is not None and family.name == published.family


@pytest.mark.parametrize(("published", "name"), CASES)
def test_an_answer_is_read_back(published: Published, name: str) -> None:
    answer = ANSWERS[name]
    prompt, text = published.written(answer)
    parsed = AnswerParser(published.chat_family().form, prompt, TOOLS).parse(text)
    assert parsed.content == answer.content
    assert parsed.reasoning == answer.reasoning
    assert [call.name for call in parsed.tool_calls] == [call.name for call in answer.tool_calls]
    assert [call.values() for call in parsed.tool_calls] == [
        call.values() for call in answer.tool_calls
    ]


MISTRAL_COMMON = {
    "v3, SentencePiece": (
        "mistral_list",
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Zürich 🎉"}, "id":'
        ' "call00000"}, {"name": "run-code_v2", "arguments": {}, "id": "call00001"}]',
    ),
    "v3 and v7, Tekken": (
        "mistral_list",
        '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Zürich 🎉"}, "id":'
        ' "call00000"}, {"name": "run-code_v2", "arguments": {}, "id": "call00001"}]',
    ),
    "v11": (
        "mistral_named",
        '[TOOL_CALLS]get_weather[CALL_ID]call00000[ARGS]{"city": "Zürich 🎉"}'
        "[TOOL_CALLS]run-code_v2[CALL_ID]call00001[ARGS]{}",
    ),
    "v13": (
        "mistral_named",
        '[TOOL_CALLS]get_weather[ARGS]{"city": "Zürich 🎉"}[TOOL_CALLS]run-code_v2[ARGS]{}',
    ),
}
"""Two calls as the package mistral-common 1.13.1 encodes them, by the version of the tokenizer.

That of SentencePiece differs by the space that its decoder writes behind a special token.
"""


@pytest.mark.parametrize(("family", "text"), MISTRAL_COMMON.values(), ids=MISTRAL_COMMON)
def test_the_calls_of_mistral_common_are_read(family, text) -> None:
    calls = (ToolCall("get_weather", '{"city": "Zürich 🎉"}'), ToolCall("run-code_v2", "{}"))
    assert AnswerParser(family_form(family)).parse(text) == ChatAnswer("", "", calls)


DESCRIBED = {
    "granite3": ["<|tool_call|>[{CALL}, {CALL}]", "<|tool_call|> [{CALL}, {CALL}]"],
    "phi4_mini": [
        "functools[{CALL}, {CALL}]",
        "<|tool_call|>[{CALL}, {CALL}]<|/tool_call|>",
        "<|tool_call|>{CALL}<|/tool_call|>\n<|tool_call|>{CALL}</|tool_call|>",
    ],
}
"""Two calls in the forms that are described and that no published template writes."""


@pytest.mark.parametrize(
    ("family", "text"), [(family, text) for family, texts in DESCRIBED.items() for text in texts]
)
def test_calls_in_a_described_form_are_read(family, text) -> None:
    text = text.replace("{CALL}", '{"name": "f", "arguments": {"a": 1}}')
    calls = (ToolCall("f", '{"a": 1}'),) * 2
    assert AnswerParser(family_form(family)).parse(text) == ChatAnswer("", "", calls)
