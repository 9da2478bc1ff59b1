"""Answers as tokens: special tokens that are tags, and characters that tokens cut."""

import random
from typing import Any

import pytest

from specjax import text
from specjax.chat import (
    AnswerParser,
    AnswerText,
    ChatAnswer,
    ResponseForm,
    family_form,
    prompt_text,
)
from tests.chat.chats import ANSWERS, PUBLISHED, TOOLS
from tests.conftest import ASSETS
from tests.grammars.published_tokenizers import or_skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Return the embedded tokenizer with the special tokens of Mistral."""
    tokenizer = text.load_tokenizer(ASSETS / "target")
    names = ["[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]", "[/INST]"]
    tokenizer.add_special_tokens({"additional_special_tokens": names})
    return tokenizer


def _parsed(
    tokenizer: Any, form: ResponseForm, prompt: list[int], tokens: list[int], rng: random.Random
) -> ChatAnswer:
    stream = AnswerText(tokenizer, form, prompt)
    parser = AnswerParser(form, prompt_text(tokenizer, prompt), TOOLS)
    events, position = [], 0
    while position < len(tokens):
        count = rng.randint(1, 4)
        events += parser.feed(stream.push(tokens[position : position + count]))
        position += count
    events += parser.feed(stream.push([], last=True)) + parser.finish()
    return ChatAnswer.from_events(events)


def _check(tokenizer: Any, templates: tuple[str, ...], seed: int, repeats: int) -> None:
    rng = random.Random(seed)
    for published in (published for published in PUBLISHED if published.template in templates):
        form = published.chat_family().form
        for name in published.cases:
            prompt, answer = published.written(ANSWERS[name])
            prompt_tokens = text.encode_continuation(tokenizer, prompt)
            tokens = text.encode_continuation(tokenizer, answer)
            if tokenizer.eos_token_id is not None:
                tokens.append(tokenizer.eos_token_id)
            for _ in range(repeats):
                parsed = _parsed(tokenizer, form, prompt_tokens, tokens, rng)
                assert parsed == AnswerParser(form, prompt, TOOLS).parse(answer)


def test_answers_in_tokens_are_read_as_their_text(tokenizer) -> None:
    _check(tokenizer, ("mistral_small_3_2", "ministral_3", "mistral_nemo"), seed=0, repeats=3)


def test_answers_of_families_without_special_tokens_are_read_too(tokenizer) -> None:
    _check(tokenizer, ("qwen3", "qwen3_5"), seed=1, repeats=2)


@pytest.mark.full
@pytest.mark.thorough_except("qwen3-templates0", "deepseek-templates1")
@pytest.mark.parametrize(
    ("name", "templates"),
    [
        ("qwen3", ("qwen2_5", "qwen3", "qwen3_5", "qwen3_coder")),
        ("deepseek", ("deepseek_v3", "deepseek_v3_1")),
        ("llama3_1", ("llama3_1", "llama3_2")),
        ("gptoss", ("gpt_oss",)),
    ],
)
def test_answers_in_the_tokens_of_published_tokenizers(name, templates) -> None:
    _check(or_skip(name), templates, seed=2, repeats=5)


def test_special_tokens_that_are_no_tags_have_no_text(tokenizer) -> None:
    form = family_form("mistral_named")
    tokens = tokenizer.encode("a[INST]b[ARGS]c", add_special_tokens=False)
    assert AnswerText(tokenizer, form, []).push(tokens, last=True) == "ab[ARGS]c"


def test_a_tag_ends_a_character_that_is_not_whole(tokenizer) -> None:
    form = family_form("mistral_named")
    (mark,) = tokenizer.encode("[THINK]", add_special_tokens=False)
    cut = text.encode_continuation(tokenizer, "x🎉")[:-1]
    stream = AnswerText(tokenizer, form, [])
    pieces = [stream.push([token]) for token in [*cut, mark, *cut]]
    assert "".join(pieces) + stream.push([], last=True) == "x\ufffd[THINK]x\ufffd"


def test_a_decoder_that_drops_tags_is_noticed(tokenizer, monkeypatch) -> None:
    monkeypatch.setattr(ResponseForm, "marks", lambda self, tokens: frozenset())
    with pytest.raises(AssertionError):
        test_answers_in_tokens_are_read_as_their_text(tokenizer)
