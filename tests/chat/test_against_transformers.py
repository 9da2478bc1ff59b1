"""The parser beside transformers' parser of response templates.

Both read the same template and the same text. For three groups of families the templates are those
of transformers' own server; the rest are ours.
"""

import json
import random
from typing import Any

import pytest

from specjax.chat import AnswerParser, ResponseForm, families
from specjax.chat import calls as calls_module
from tests.chat.chats import ANSWERS, PUBLISHED, TOOLS, Published

chat_parsing = pytest.importorskip(
    "transformers.utils.chat_parsing", reason="NOT TESTED: transformers is older than 5.13"
)

_REASONING = ("reasoning_content", "thinking", "reasoning")


def _templates_of_the_server() -> dict[str, dict[str, Any]]:
    """Return the server's template of each model type, from its source: its imports need torch."""
    import ast
    from importlib.util import find_spec
    from pathlib import Path

    spec = find_spec("transformers")
    assert spec is not None and spec.origin is not None
    source = (Path(spec.origin).parent / "cli" / "serving" / "utils.py").read_text()
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and "RESPONSE_TEMPLATE_FALLBACKS" in ast.dump(
            node.targets[0]
        ):
            groups = ast.literal_eval(node.value)
            return {name: template for names, template in groups.items() for name in names}
    raise AssertionError("transformers' server has no response templates")


def _data(name: str) -> dict[str, Any]:
    from importlib.resources import files

    text = (files("specjax.chat") / "response_templates" / f"{name}.json").read_text(
        encoding="utf-8"
    )
    return json.loads(text)["response_template"]


def _theirs(template: dict[str, Any], prompt: str, text: str) -> dict[str, Any] | None:
    """Return the content, reasoning and calls of transformers' parser; None if it raises."""
    parts: dict[str, Any] = {"content": "", "reasoning": "", "calls": []}
    try:
        parser = chat_parsing.ResponseParser(template, prefix=prompt, tools=TOOLS)
        events = parser.feed(text)
        events += parser.finalize()[1]
    except (ValueError, KeyError):
        return None
    for event in events:
        field = event["field"]
        if event["type"] == "region_close" and field == "tool_calls":
            value = event["value"]
            for call in value if isinstance(value, list) else [value]:
                function = call["function"]
                if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                    return None
                if not isinstance(function.get("arguments"), dict):
                    return None
                parts["calls"].append((function["name"], function["arguments"]))
        elif event["type"] == "region_chunk" and field != "tool_calls":
            parts["reasoning" if field in _REASONING else "content"] += event["text"]
    return parts


def _ours(form: ResponseForm, prompt: str, text: str) -> dict[str, Any]:
    answer = AnswerParser(form, prompt, TOOLS).parse(text)
    calls = [(call.name, call.values()) for call in answer.tool_calls]
    return {"content": answer.content, "reasoning": answer.reasoning, "calls": calls}


def _without_space(parts: dict[str, Any]) -> dict[str, Any]:
    return {
        name: "".join(part.split()) if isinstance(part, str) else part
        for name, part in parts.items()
    }


SERVER = {
    "qwen2_5": "qwen2",
    "qwen3": "qwen3",
    "qwen3_5": "qwen3_5",
    "qwen3_coder": "qwen3_5",
    "gemma4": "gemma4",
}
"""The model type whose template transformers' server would take."""

# The calls of the remaining families have no closing tag, and there ours ends a call with its JSON.
WITH_TAGS = ("qwen3", "qwen3_5", "granite4", "deepseek_v3_1", "gpt_oss", "gemma4")


_FRAGMENTS = ("<", "<tool", "\n\n", " a ", "</think>", "{", "<|", "é🎉", "</", "[/THINK]")


def _compare(
    template: dict[str, Any],
    form: ResponseForm,
    texts: list[tuple[str, str]],
    count: int,
    seed: str,
) -> int:
    """Compare both parsers on answers and on mixtures of answers, and count those that were."""
    rng, compared = random.Random(seed), 0
    for index in range(count):
        prompt, text = texts[index % len(texts)]
        if index >= len(texts):
            text = "".join(
                rng.choice([*(text for _, text in texts), *_FRAGMENTS]) for _ in range(5)
            )
        theirs = _theirs(template, prompt, text)
        if theirs is None:
            continue  # what it raises for becomes content here
        assert _without_space(_ours(form, prompt, text)) == _without_space(theirs), text
        compared += 1
    return compared


def _published(name: str) -> Published:
    return next(published for published in PUBLISHED if published.template == name)


def _texts(published: Published) -> list[tuple[str, str]]:
    # The server's template of Qwen3.5 loses the indentation of code, and that of Gemma 4 reads a
    # name up to its first hyphen.
    names = [
        name
        for name in published.cases
        if published.family == "qwen3"
        or all(call.name != "run-code.v2" for call in ANSWERS[name].tool_calls)
    ]
    return [published.written(ANSWERS[name]) for name in names]


@pytest.mark.full
@pytest.mark.thorough_except("qwen2_5", "qwen3")
@pytest.mark.parametrize("name", SERVER)
def test_the_servers_templates_are_read_as_transformers_reads_them(name) -> None:
    template = _templates_of_the_server()[SERVER[name]]
    texts = _texts(_published(name))
    form = ResponseForm.from_template(template)
    assert _compare(template, form, texts, 120, name) >= 30


@pytest.mark.parametrize("name", SERVER)
def test_the_servers_templates_and_ours_read_the_same_answers(name) -> None:
    published = _published(name)
    template = _templates_of_the_server()[SERVER[name]]
    for prompt, text in _texts(published):
        theirs = _theirs(template, prompt, text)
        assert theirs is not None
        ours = _ours(published.chat_family().form, prompt, text)
        assert _without_space(ours) == _without_space(theirs)


@pytest.mark.full
@pytest.mark.thorough_except("qwen2_5", "qwen3", "qwen3_5", "qwen3_coder")
@pytest.mark.parametrize(
    "published",
    [published for published in PUBLISHED if published.family in WITH_TAGS],
    ids=lambda published: published.template,
)
def test_our_templates_are_read_as_transformers_reads_them(published) -> None:
    texts = [published.written(ANSWERS[name]) for name in published.cases]
    template = _data(published.family)
    form = ResponseForm.from_template(template)
    assert _compare(template, form, texts, 120, published.template) >= 30


def test_every_template_of_ours_is_valid_for_transformers() -> None:
    from transformers.utils.chat_parsing.response_templates import load_response_template

    for family in families():
        load_response_template(_data(family.name))


def test_another_reading_of_arguments_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(calls_module, "typed_value", lambda text, types: text)
    with pytest.raises(AssertionError):
        test_the_servers_templates_and_ours_read_the_same_answers("qwen3_5")
