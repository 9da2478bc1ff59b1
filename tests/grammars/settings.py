"""The settings whose pairs are tested: tokenizers, targets, drafters and shapes of drafts."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import specjax
from specjax.drafters import (
    MTP,
    CompressedCache,
    DFlash,
    DFlash2,
    Drafter,
    DraftModel,
    DSpark,
    Eagle,
    Eagle3,
    EagleWithLayerAttention,
    EarlyExit,
    Gemma4Assistant,
    Medusa,
    MixtureOfAttentions,
    PEagle,
    PromptLookup,
    SnapKV,
    Streaming,
    TokenRecycling,
)
from specjax.drafters.shared_vocabulary import SharedVocabulary
from specjax.drafts.shapes import DraftShape
from specjax.grammars import GrammarCompiler
from specjax.models.transformer import Target
from specjax.vocabularies import VocabularyTokens
from tests.conftest import ASSETS, HYBRID, MIXTURES, SHAPES, tiny_target
from tests.drafters.test_dflash2 import lively
from tests.grammars.published_tokenizers import published_tokenizer

PADDING = 21
"""The number of ids of a random target that its tokenizer does not know."""

KEY = 3


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """A tokenizer, and grammars compiled for it.

    Attributes:
        tokenizer: the tokenizer.
        size: the number of its tokens.
        end_id: the token that ends a text.
    """

    tokenizer: Any
    size: int
    end_id: int

    def compiler(self, vocab_size: int) -> GrammarCompiler:
        """Return the compiler for targets of this many tokens."""
        return _compiler(self, vocab_size)


@cache
def _compiler(vocabulary: Vocabulary, vocab_size: int) -> GrammarCompiler:
    return GrammarCompiler(vocabulary.tokenizer, vocab_size)


TOKENIZERS = ("embedded", "deepseek", "gemma3", "qwen3")


@cache
def vocabulary(name: str) -> Vocabulary:
    """Return one of `TOKENIZERS`. A published one may be unavailable."""
    tokenizer = (
        specjax.load("embedded").tokenizer if name == "embedded" else published_tokenizer(name)
    )
    return Vocabulary(tokenizer, len(tokenizer), tokenizer.eos_token_id)


TRAINED = "embedded"
"""The target that is not random. It has a tokenizer of its own."""

TARGETS: dict[str, Callable[[int], Target]] = {
    "dense": lambda size: tiny_target(vocab_size=size),
    "hybrid": lambda size: tiny_target(vocab_size=size, **HYBRID),
    "MLA and experts": lambda size: tiny_target(vocab_size=size, **MIXTURES["deepseek_v3"]),
    "experts": lambda size: tiny_target(vocab_size=size, **MIXTURES["qwen3_moe"]),
    "windows": lambda size: tiny_target(
        vocab_size=size, num_layers=3, sliding_window=4, windowed_layers=(0, 1)
    ),
    "8-bit weights": lambda size: tiny_target(vocab_size=size).quantize("int8"),
    "4-bit weights": lambda size: tiny_target(vocab_size=size).quantize("int4"),
    "8-bit cache": lambda size: tiny_target(vocab_size=size).replace(cache_dtype="int8"),
    TRAINED: lambda size: Target.from_pretrained(ASSETS / "target", dtype=np.float32),
}


@cache
def target(name: str, tokenizer: str) -> Target:
    """Return a target for a tokenizer."""
    return TARGETS[name](vocabulary(tokenizer).size + PADDING)


def _similar(model: Target) -> Target:
    """Return a draft model that often agrees with a target: its weights with 3% noise."""
    if model.config.model_type != "llama" or model.cache_dtype != "float":
        return tiny_target(seed=5, num_layers=1, vocab_size=model.config.vocab_size)
    leaves, structure = jax.tree.flatten(model.params)
    keys = jax.random.split(jax.random.key(KEY), len(leaves))
    noisy = [
        leaf * (1 + 0.03 * jax.random.normal(key, leaf.shape))
        if jnp.issubdtype(leaf.dtype, jnp.floating)
        else leaf
        for leaf, key in zip(leaves, keys, strict=True)
    ]
    return model.replace(params=jax.tree.unflatten(structure, noisy))


def _other_vocabulary(model: Target, shape: DraftShape) -> DraftModel:
    """Return a draft model that has every second token of the target, in another order."""
    size = model.config.vocab_size
    ids = np.random.default_rng(KEY).permutation(size)[: size // 2]
    draft = tiny_target(num_layers=1, vocab_size=len(ids))
    texts = {i: f"token {i}".encode() for i in range(size)}
    shared = SharedVocabulary.of(
        VocabularyTokens(texts, {}),
        VocabularyTokens({i: texts[int(token)] for i, token in enumerate(ids)}, {}),
    )
    return DraftModel(draft, draft=shape, shared=shared)


def _of(kind: Any, **options: Any) -> Callable[[Target, DraftShape], Drafter]:
    return lambda model, shape: kind.init(model, jax.random.key(KEY), shape, **options)


def _some_tokens(kind: Any) -> Callable[[Target, DraftShape], Drafter]:
    """Return a drafter that drafts two thirds of the target's tokens."""

    def make(model: Target, shape: DraftShape) -> Drafter:
        ids = np.flatnonzero(np.arange(model.config.vocab_size) % 3)
        return kind.init(model, jax.random.key(KEY), shape, ids=ids)

    return make


DRAFTERS: dict[str, Callable[[Target, DraftShape], Drafter | None]] = {
    "none": lambda model, shape: None,
    "prompt lookup": lambda model, shape: PromptLookup(draft=shape),
    "token recycling": lambda model, shape: TokenRecycling(draft=shape),
    "draft model": lambda model, shape: DraftModel(_similar(model), draft=shape),
    "draft model in a ring": lambda model, shape: DraftModel(
        _similar(model), draft=shape, cache=Streaming(sinks=1), budget=5
    ),
    "draft model of other tokens": _other_vocabulary,
    "early exit": lambda model, shape: EarlyExit(layers=1, draft=shape),
    "EAGLE": _of(Eagle),
    "EAGLE with layer attention": _of(EagleWithLayerAttention),
    "EAGLE-3 of some tokens": _some_tokens(Eagle3),
    "P-EAGLE of some tokens": _some_tokens(PEagle),
    "MTP": _of(MTP, modules=2),
    "Medusa": _of(Medusa),
    "mixture of attentions": _of(MixtureOfAttentions, tli=1),
    "streaming cache": lambda model, shape: CompressedCache(
        budget=6, scheme=Streaming(sinks=2), draft=shape
    ),
    "SnapKV": lambda model, shape: CompressedCache(
        budget=4, scheme=SnapKV(window=2, pool=3), draft=shape
    ),
    "assistant": _of(Gemma4Assistant),
    "DFlash": _of(DFlash, block_size=4),
    "JetSpec": _of(DFlash, block_size=5, variant={"causal": True}),
    "DFlash in a ring": lambda model, shape: DFlash.init(
        model,
        jax.random.key(KEY),
        shape,
        block_size=4,
        num_layers=2,
        sliding_window=3,
        windowed_layers=(1,),
    ).replace(cache=Streaming(sinks=1), budget=5),
    "DSpark": _of(DSpark, block_size=4, markov_rank=4, markov="rnn"),
    "DFlash 2": lambda model, shape: lively(
        DFlash2.init(
            model,
            jax.random.key(KEY),
            shape,
            block_size=4,
            conv_group_size=8,
            selector_rank=4,
            selector_top_k=4,
        )
    ),
    "embedded draft model": lambda model, shape: DraftModel.from_pretrained(
        ASSETS / "draft", draft=shape, dtype=np.float32
    ),
    "embedded EAGLE-3": lambda model, shape: Eagle3.from_pretrained(
        ASSETS / "eagle3", draft=shape, dtype=np.float32
    ),
    "embedded MTP": lambda model, shape: MTP.from_pretrained(
        ASSETS / "mtp", draft=shape, dtype=np.float32
    ),
}
"""Drafters of every kind by name. Each takes the target and the shape of its drafts."""

SHAPE_NAMES = tuple(SHAPES)


def drafter(name: str, model: Target, shape: str, tokenizer: str) -> Drafter | None:
    """Return a drafter for a target with one of `TOKENIZERS`.

    The embedded draft model drafts the tokens that both tokenizers have.

    Raises:
        InputError: the target does not support it, or it does not support the shape.
    """
    if name == "embedded draft model" and tokenizer != "embedded":
        return DraftModel.from_pretrained(
            ASSETS / "draft",
            draft=SHAPES[shape],
            dtype=np.float32,
            tokenizer=vocabulary(tokenizer).tokenizer,
            vocabulary="intersect",
        )
    built = DRAFTERS[name](model, SHAPES[shape])
    if built is not None:
        built.check(model)
    return built


TRUNCATIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "top_k and top_p": {"top_k": 40, "top_p": 0.9},
    "top_k and min_p": {"top_k": 20, "min_p": 0.02},
    "top_p and min_p": {"top_p": 0.95, "min_p": 0.01},
    "all": {"top_k": 30, "top_p": 0.97, "min_p": 0.005},
}

TEMPERATURES = (0.0, 0.7, 1.5)
