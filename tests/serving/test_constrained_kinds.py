"""Constrained texts in the engine with caches, layers and drafters of every kind.

Each text must be the one that `specjax.generate` writes without a drafter, whose masked steps
`tests/decoding/test_constrained.py` compares with a slow oracle.
"""

from typing import Any

import jax
import numpy as np
import pytest

import specjax
from specjax.drafters import (
    MTP,
    CompressedCache,
    DFlash,
    DraftModel,
    DSpark,
    Eagle,
    Eagle3,
    EarlyExit,
    Medusa,
    MixtureOfAttentions,
    SnapKV,
    Streaming,
)
from specjax.drafts.shapes import Chain, DynamicTree
from specjax.sampling import make_key
from specjax.serving import Engine
from tests.conftest import HYBRID, LAYERED, MIXTURES, tiny_target
from tests.decoding.test_constrained import END, GRAMMARS, VOCABULARY, compiler
from tests.drafters.test_vocabularies import permuted
from tests.grammars.tokenizers_for_tests import small_tokenizer

NEW, CHAIN, TREE = 14, Chain(3), DynamicTree(top_k=2, depth=3, nodes=7)
PROMPTS = np.random.default_rng(2).integers(0, VOCABULARY - 1, (5, 9)).tolist()
TARGETS: dict[str, dict[str, Any]] = {
    "dense": {},
    "hybrid": HYBRID,
    "latents": MIXTURES["deepseek_v3"],
    "windows": {"num_layers": 3, "sliding_window": 4, "windowed_layers": (0, 2)},
    "layers that differ": LAYERED["differing"],
    "layers that share": LAYERED["sharing"],
    "experts": MIXTURES["qwen3_moe"],
    "8-bit cache": {},
}


def small_model(**changes: Any) -> Any:
    return tiny_target(seed=5, num_layers=1, vocab_size=VOCABULARY, **changes)


KEY, IDS = jax.random.key(3), np.arange(0, VOCABULARY, 2)
KINDS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "hybrid, early exit": ("hybrid", lambda t: EarlyExit(layers=2, draft=CHAIN), {}),
    "hybrid, modules": ("hybrid", lambda t: MTP.init(t, KEY, CHAIN), {}),
    "hybrid, a tree": ("hybrid", lambda t: Eagle3.init(t, KEY, TREE), {}),
    "latents, EAGLE-3": ("latents", lambda t: Eagle3.init(t, KEY, CHAIN), {}),
    "latents, early exit": ("latents", lambda t: EarlyExit(layers=1, draft=TREE), {}),
    "windows, a draft model": ("windows", lambda t: DraftModel(small_model(), draft=CHAIN), {}),
    "layers that differ": (
        *("layers that differ", lambda t: EarlyExit(layers=2, draft=CHAIN)),
        {},
    ),
    "layers that share": (
        *("layers that share", lambda t: EarlyExit(layers=2, draft=CHAIN)),
        {},
    ),
    "experts, heads": ("experts", lambda t: Medusa.init(t, KEY, CHAIN), {}),
    "8-bit cache": ("8-bit cache", lambda t: EarlyExit(layers=1, draft=CHAIN), {}),
    "a draft model in a ring": (
        "dense",
        lambda t: DraftModel(small_model(), draft=CHAIN, cache=Streaming(sinks=1), budget=5),
        {},
    ),
    "streaming": (
        *("dense", lambda t: CompressedCache(budget=6, scheme=Streaming(sinks=2), draft=CHAIN)),
        {},
    ),
    "snapkv": (
        *("dense", lambda t: CompressedCache(budget=4, scheme=SnapKV(2, 3), draft=CHAIN)),
        {},
    ),
    "few tokens": ("dense", lambda t: Eagle3.init(t, KEY, CHAIN, ids=IDS), {}),
    "another vocabulary": (
        "dense",
        lambda t: permuted(small_model(), [7, 0, 10, 3, 1, 8, 4, 17, 19], draft=CHAIN),
        {},
    ),
    "a block": ("dense", lambda t: DFlash.init(t, KEY, CHAIN, block_size=4), {}),
    "a Markov head": ("dense", lambda t: DSpark.init(t, KEY, CHAIN, block_size=4), {}),
    "attention over layers": (
        *("dense", lambda t: MixtureOfAttentions.init(t, KEY, CHAIN, tli=1)),
        {},
    ),
    "paused": ("dense", lambda t: Eagle.init(t, KEY, TREE), {"drafts": (None, "chain:2")}),
}


def target_of(name: str) -> Any:
    target = tiny_target(vocab_size=VOCABULARY, **TARGETS[name])
    for number in target.config.linear_layers:  # heads that forget at different paces
        layer = target.params["layers"][number]
        layer["log_rate"] = np.linspace(-4.0, 0.0, layer["log_rate"].shape[0], dtype=np.float32)
    return target.replace(cache_dtype="int8") if name == "8-bit cache" else target


def plain_texts(target: Any) -> list[list[int]]:
    """Return the output of plain constrained decoding, with keys as the engine makes them."""
    keys = [jax.random.fold_in(make_key(seed), np.uint32(0)) for seed in range(len(PROMPTS))]
    result = specjax.generate(
        target,
        None,
        PROMPTS,
        max_new_tokens=NEW,
        sampling=specjax.Sampling(temperature=np.arange(len(PROMPTS)) % 2),
        key=jax.numpy.stack(keys),
        eos_token_ids=(END,),
        grammar=[compiler().compile(grammar) for grammar in GRAMMARS.values()],
    )
    ends = zip(result.tokens, result.lengths, strict=True)
    return [row[len(PROMPTS[0]) : end].tolist() for row, end in ends]


@pytest.mark.full
@pytest.mark.thorough_except("8-bit cache")
@pytest.mark.parametrize("kind", KINDS)
def test_constrained_texts_come_and_go_with_every_kind(kind) -> None:
    """Check five texts in two rows, with pages for a few of them."""
    name, drafter_of, options = KINDS[kind]
    target = target_of(name)
    sizes = {"rows": 2, "widths": (2,), "capacity": 48, "page": 8, "chunk": 8, "pages": 6}
    drafter = drafter_of(target)
    drafts = {"drafts": (drafter.draft_shape,)} | options
    with Engine(
        target, drafter, tokenizer=small_tokenizer(), grammars=True, warm=False, **sizes, **drafts
    ) as served:
        handles = [
            served.submit(
                prompt,
                max_new_tokens=NEW,
                temperature=float(seed % 2),
                seed=seed,
                eos_token_ids=(END,),
                grammar=grammar,
            )
            for seed, (prompt, grammar) in enumerate(zip(PROMPTS, GRAMMARS.values(), strict=True))
        ]
        texts = [list(handle.result(timeout=300).tokens) for handle in handles]
    assert texts == plain_texts(target)
