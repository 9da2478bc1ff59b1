"""Tests of what chat templates can do: take tools, and switch the reasoning."""

from copy import copy
from typing import Any

import pytest

from specjax import text
from specjax.errors import InputError
from specjax.templates import takes_tools, thinking_switch
from tests.chat.chats import TOOLS
from tests.chat.published_templates import IN_PACKAGE, TEMPLATES, template
from tests.conftest import ASSETS

SWITCHES = {
    "deepseek_v3_1": "enable_thinking",
    "gemma4": "enable_thinking",
    "granite3_3": "thinking",
    "qwen3": "enable_thinking",
    "qwen3_5": "enable_thinking",
}

# DeepSeek's template writes calls but no declarations. Phi-4-mini's reads them from the system
# message, and Phi-4-reasoning's has none.
WITHOUT_TOOLS = {"deepseek_v3", "deepseek_v3_1", "phi4_mini", "phi4_reasoning"}


@pytest.fixture(scope="module")
def embedded() -> Any:
    return text.load_tokenizer(ASSETS / "target")


def _with(embedded: Any, chat_template: str | None) -> Any:
    tokenizer = copy(embedded)
    tokenizer.chat_template = chat_template
    return tokenizer


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_published_templates_can_do(name, embedded) -> None:
    tokenizer = _with(embedded, template(name))
    assert takes_tools(tokenizer) == (name not in WITHOUT_TOOLS)
    assert thinking_switch(tokenizer) == SWITCHES.get(name)


@pytest.mark.parametrize(
    "chat_template",
    [
        None,
        "{{ messages[0].content }}",
        "{{ raise_exception('no') }}",
        "{% if tools %}x{% endif %}",
    ],
)
def test_other_templates_can_do_nothing(chat_template, embedded) -> None:
    tokenizer = _with(embedded, chat_template)
    assert not takes_tools(tokenizer)
    assert thinking_switch(tokenizer) is None


def test_a_variable_that_changes_nothing_is_no_switch(embedded) -> None:
    tokenizer = _with(embedded, "{% if thinking %}a{% else %}a{% endif %}")
    assert thinking_switch(tokenizer) is None


def test_llamas_templates_are_among_the_downloaded_ones() -> None:
    assert {"llama3_1", "llama3_2", "llama4"} <= IN_PACKAGE.keys()


def test_a_chat_is_encoded_with_its_tools(embedded) -> None:
    tokenizer = _with(embedded, template("qwen3"))
    messages = [{"role": "user", "content": "Weather?"}]
    plain = tokenizer.decode(text.encode_chat(tokenizer, messages))
    with_tools = tokenizer.decode(text.encode_chat(tokenizer, messages, tools=TOOLS))
    assert "get_weather" not in plain
    assert "get_weather" in with_tools and "run-code.v2" in with_tools
    thoughtless = {"enable_thinking": False}
    both = tokenizer.decode(text.encode_chat(tokenizer, messages, thoughtless, tools=TOOLS))
    assert both == with_tools + "<think>\n\n</think>\n\n"


def test_a_template_that_takes_no_tools_says_so(embedded) -> None:
    tokenizer = _with(embedded, template("deepseek_v3_1"))
    messages = [{"role": "user", "content": "Weather?"}]
    with pytest.raises(InputError, match="tools: the model's chat template takes no tools"):
        text.encode_chat(tokenizer, messages, tools=TOOLS)
