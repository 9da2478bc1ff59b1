"""Prompts that leave a gap for the model to fill."""

from typing import Any

import pytest

import specjax
from specjax.assets import embedded
from specjax.errors import InputError
from specjax.fill_in_the_middle import FAMILIES, encode_gap, marks_of
from specjax.text import load_tokenizer

PREFIX, SUFFIX = "def f(x):\n    return ", " + 1\n"


def tokenizer_with(*marks: str) -> Any:
    tokenizer = load_tokenizer(embedded("target"))
    tokenizer.add_special_tokens({"additional_special_tokens": [mark for mark in marks if mark]})
    return tokenizer


@pytest.mark.parametrize("marks", FAMILIES, ids=lambda marks: marks.before_prefix)
def test_each_familys_tokens_stand_around_the_two_texts(marks) -> None:
    tokenizer = tokenizer_with(*marks[:3])
    assert marks_of(tokenizer) == marks
    before, after = marks.before_prefix + PREFIX, marks.before_suffix + SUFFIX
    order = after + before if marks.is_suffix_first else before + after
    expected = tokenizer.bos_token + order + marks.before_middle
    assert tokenizer.decode(encode_gap(tokenizer, PREFIX, SUFFIX)) == expected


def test_text_that_spells_a_mark_is_text() -> None:
    marks = FAMILIES[0]
    tokenizer = tokenizer_with(*marks[:3])
    ids = set(tokenizer.convert_tokens_to_ids(list(marks[:3])))
    tokens = encode_gap(tokenizer, f"a{marks.before_suffix}b", f"c{tokenizer.bos_token}d")
    assert [token for token in tokens if token in ids] == [
        *tokenizer.convert_tokens_to_ids(list(marks[:3]))
    ]
    assert tokens.count(tokenizer.bos_token_id) == 1


@pytest.mark.parametrize(("prefix", "suffix"), [("", SUFFIX), (PREFIX, ""), ("", "")])
def test_either_text_may_be_empty(prefix, suffix) -> None:
    marks = FAMILIES[1]
    tokenizer = tokenizer_with(*marks[:3])
    decoded = tokenizer.decode(encode_gap(tokenizer, prefix, suffix))
    expected = f"<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>"
    assert decoded == tokenizer.bos_token + expected


def test_a_tokenizer_without_such_tokens_is_refused() -> None:
    tokenizer = tokenizer_with("<fim_prefix>", "<fim_suffix>")  # one is missing
    with pytest.raises(InputError, match="suffix: this model's tokenizer has no tokens"):
        encode_gap(tokenizer, PREFIX, SUFFIX)


def test_a_tokenizer_that_adds_no_begin_token_gets_none() -> None:
    tokenizer = tokenizer_with(*FAMILIES[1][:3])
    tokenizer.add_bos_token = False
    if specjax.text.encode_continuation(tokenizer, "a") != tokenizer("a")["input_ids"]:
        pytest.fail("the tokenizer still adds a token")
    assert encode_gap(tokenizer, PREFIX, SUFFIX)[0] != tokenizer.bos_token_id
