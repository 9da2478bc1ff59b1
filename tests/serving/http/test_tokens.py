"""Tests of the texts of single tokens, in all ways in which vocabularies write a space."""

import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specjax.serving.http.tokens import TokenTexts

BLOCK = "\N{LOWER ONE EIGHTH BLOCK}"
WORDS = {
    "a": "a",
    f"{BLOCK}os": " os",
    BLOCK: " ",
    BLOCK * 2: "  ",
    BLOCK * 16: " " * 16,
    f"{BLOCK * 3}x": "   x",
    f"a{BLOCK}b": "a b",
    f"x{BLOCK}": "x ",
}
BYTES = {"<0x0A>": "\n", "<0x20>": " ", "<0x41>": "A"}


def of_words(decoder: decoders.Decoder) -> tuple[PreTrainedTokenizerFast, dict[str, int]]:
    vocabulary = {word: number for number, word in enumerate(("<unk>", *WORDS, *BYTES))}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"), vocabulary


KEPT = decoders.Sequence([decoders.Replace(BLOCK, " "), decoders.ByteFallback(), decoders.Fuse()])
STRIPPED = decoders.Sequence([KEPT, decoders.Strip(content=" ", left=1, right=0)])


@pytest.mark.parametrize(
    "decoder", [KEPT, STRIPPED, decoders.Metaspace()], ids=["kept", "stripped", "metaspace"]
)
def test_every_space_of_a_token_is_said(decoder: decoders.Decoder) -> None:
    tokenizer, vocabulary = of_words(decoder)
    texts = TokenTexts(tokenizer)
    for word, text in WORDS.items():
        assert texts.text(vocabulary[word]) == text
        assert texts.bytes_of(vocabulary[word]) == text.encode()
    # The joined texts of tokens are the decoded text, except for a space at its beginning.
    together = [vocabulary[word] for word in ("a", *WORDS)]
    assert "".join(map(texts.text, together)) == texts.decode(together)
