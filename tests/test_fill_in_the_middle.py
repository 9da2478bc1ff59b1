"""Prompts that leave a gap for the model to fill."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import AddedToken

import specjax
from specjax.assets import embedded
from specjax.errors import InputError
from specjax.fill_in_the_middle import FAMILIES, encode_gap, gap_end_ids
from specjax.text import encode_continuation, load_tokenizer

PREFIX, SUFFIX = "def f(x):\n    return ", " + 1\n"
PROMPTS = [
    f"<|fim_prefix|>{PREFIX}<|fim_suffix|>{SUFFIX}<|fim_middle|>",
    f"<fim_prefix>{PREFIX}<fim_suffix>{SUFFIX}<fim_middle>",
    f"<｜fim▁begin｜>{PREFIX}<｜fim▁hole｜>{SUFFIX}<｜fim▁end｜>",  # noqa: RUF001
]


def tokenizer_with(*tokens: str, special: bool = True) -> Any:
    tokenizer = load_tokenizer(embedded("target"))
    tokenizer.add_tokens([AddedToken(it, normalized=False, special=special) for it in tokens])
    return tokenizer


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(("tokens", "prompt"), list(zip(FAMILIES, PROMPTS, strict=True)))
def test_the_two_texts_stand_between_their_familys_tokens(tokens, prompt, special) -> None:
    tokenizer = tokenizer_with(*tokens[:3], special=special)
    expected = [tokenizer.bos_token_id, *encode_continuation(tokenizer, prompt)]
    assert encode_gap(tokenizer, PREFIX, SUFFIX) == expected
    assert encode_gap(tokenizer, PREFIX, SUFFIX, add_special_tokens=False) == expected[1:]


@pytest.mark.parametrize("special", [True, False])
def test_text_that_spells_a_special_token_is_text(special) -> None:
    tokens = FAMILIES[0][:3]
    tokenizer = tokenizer_with(*tokens, special=special)
    gap_ids = tokenizer.convert_tokens_to_ids(list(tokens))
    ids = encode_gap(tokenizer, "a<|fim_suffix|>b", f"c{tokenizer.bos_token}d<|fim_middle|>")
    assert [token for token in ids if token in gap_ids] == gap_ids
    assert ids.count(tokenizer.bos_token_id) == 1


def test_text_that_spells_another_added_token_is_that_text() -> None:
    """Check a token like Qwen's tags, which is not special and has a higher id than those."""
    tokenizer = tokenizer_with(*FAMILIES[0][:3], "<|im_start|>")
    tokenizer.add_tokens([AddedToken("<tool_call>", normalized=False, special=False)])
    ids = encode_gap(tokenizer, "a<tool_call>", "b", add_special_tokens=False)
    assert tokenizer.decode(ids) == "<|fim_prefix|>a<tool_call><|fim_suffix|>b<|fim_middle|>"
    assert not {"<|im_start|>", "<tool_call>"} & set(tokenizer.convert_ids_to_tokens(ids))


@pytest.mark.parametrize(("prefix", "suffix"), [("", SUFFIX), (PREFIX, ""), ("", "")])
def test_either_text_may_be_empty(prefix, suffix) -> None:
    tokenizer = tokenizer_with(*FAMILIES[1][:3])
    decoded = tokenizer.decode(encode_gap(tokenizer, prefix, suffix, add_special_tokens=False))
    assert decoded == f"<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>"


def test_a_gap_changes_nothing_for_other_threads() -> None:
    """Check a text with a special token while another thread encodes gaps."""
    tokenizer = tokenizer_with(*FAMILIES[1][:3])
    chat = "<|endoftext|>a<fim_middle>" * 20
    expected, gap = encode_continuation(tokenizer, chat), encode_gap(tokenizer, chat, chat)
    with ThreadPoolExecutor(2) as pool:
        chats = pool.submit(
            lambda: [encode_continuation(tokenizer, chat) == expected for _ in range(400)]
        )
        gaps = pool.submit(lambda: [encode_gap(tokenizer, chat, chat) == gap for _ in range(400)])
        assert all(chats.result()) and all(gaps.result())


def test_a_tokenizer_without_such_tokens_is_refused() -> None:
    tokenizer = tokenizer_with("<fim_prefix>", "<fim_suffix>")  # one is missing
    with pytest.raises(InputError, match="suffix: this model's tokenizer has no tokens"):
        encode_gap(tokenizer, PREFIX, SUFFIX)


def test_the_tokens_that_end_a_middle_are_those_that_the_tokenizer_has() -> None:
    tokenizer = tokenizer_with(*FAMILIES[0][:3], "<|file_sep|>")
    assert gap_end_ids(tokenizer) == (tokenizer.convert_tokens_to_ids("<|file_sep|>"),)


def test_a_tokenizer_that_begins_no_text_with_a_token_gets_none() -> None:
    tokenizer = tokenizer_with(*FAMILIES[1][:3])
    tokenizer.add_bos_token = False
    assert specjax.text.beginning_of_texts(tokenizer) == []
    gap = tokenizer.convert_tokens_to_ids("<fim_prefix>")
    assert encode_gap(tokenizer, PREFIX, SUFFIX)[0] == gap
