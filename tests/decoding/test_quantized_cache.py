"""Texts of targets with a cache of 8 bits: the same with a drafter, alone and among others."""

import jax
import numpy as np
import pytest

import specjax
from specjax import conformance, decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import (
    CompressedCache,
    DraftModel,
    EarlyExit,
    Gemma4Assistant,
    MixtureOfAttentions,
    SnapKV,
    Streaming,
)
from specjax.models import layers
from specjax.models.attention import by_device
from specjax.models.attention.plain import attend_plainly
from specjax.sampling import Sampling
from specjax.serving import Engine
from tests.conftest import SHAPES, own_programs
from tests.decoding.test_loop import PROMPTS
from tests.evaluation.test_conformance import SMALL, distribution_target, small_drafter
from tests.models.test_quantized_cache import KINDS, in_8_bits, sees_its_own_tokens_unrounded

MORE = ("windows", "caps", "latents", "sharing")
DRAFTERS = {
    "draft model": lambda target, shape: DraftModel(in_8_bits(seed=5, num_layers=1), draft=shape),
    "draft model in a ring": lambda target, shape: DraftModel(
        in_8_bits(seed=5, num_layers=1), draft=shape, cache=Streaming(sinks=1), budget=5
    ),
    "early exit": lambda target, shape: EarlyExit(layers=1, draft=shape),
    "streaming": lambda target, shape: CompressedCache(
        budget=6, scheme=Streaming(sinks=2), draft=shape
    ),
    "snapkv": lambda target, shape: CompressedCache(
        budget=4, scheme=SnapKV(window=2, pool=3), draft=shape
    ),
    "moa": lambda target, shape: MixtureOfAttentions.init(target, jax.random.key(3), shape, tli=1),
    "assistant": lambda target, shape: Gemma4Assistant.init(target, jax.random.key(3), shape),
}
ALL = [(name, shape) for name in DRAFTERS for shape in SHAPES]
GREEDY = [
    ("early exit", "dynamic"),
    ("draft model", "static"),
    ("moa", "chain"),
    ("snapkv", "chain"),
    ("assistant", "chain"),
]


@pytest.mark.full
@pytest.mark.thorough_except("early exit-dynamic")
@pytest.mark.parametrize(("name", "shape"), GREEDY)
def test_drafted_text_is_plain_text(name, shape) -> None:
    target = in_8_bits()
    conformance.check_greedy(target, DRAFTERS[name](target, SHAPES[shape]), new_tokens=12)


@pytest.mark.full
def test_every_text_of_a_batch_is_that_of_its_row_alone() -> None:
    conformance.check_rows(in_8_bits(), EarlyExit(layers=1, draft=SHAPES["chain"]), new_tokens=12)


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "shape"), ALL)
def test_every_drafter_that_has_or_reads_such_a_cache(name, shape) -> None:
    """Check greedy and coupled texts, in batches and alone.

    Chains are also checked in rows that come and go, in pages.
    """
    target = in_8_bits()
    conformance.check(
        target, DRAFTERS[name](target, SHAPES[shape]), new_tokens=12, come_and_go=shape == "chain"
    )


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["sinks", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in MORE)]
)
def test_greedy_text_of_every_kind_of_layers(kind) -> None:
    target = in_8_bits(**KINDS[kind])
    conformance.check_greedy(
        target, DraftModel.init(target, jax.random.key(3), SHAPES["dynamic"]), new_tokens=12
    )


@pytest.mark.full
@pytest.mark.thorough_except("early exit")
@pytest.mark.parametrize("name", ["early exit", "draft model"])
def test_sampled_text_is_coupled_to_its_key(name) -> None:
    target = in_8_bits()
    options = {
        "max_new_tokens": 24,
        "sampling": Sampling(temperature=0.8),
        "rule": "coupled",
        "key": jax.random.key(7),
    }
    plain = specjax.generate(target, None, PROMPTS, **options)
    drafted = specjax.generate(target, DRAFTERS[name](target, SHAPES["chain"]), PROMPTS, **options)
    np.testing.assert_array_equal(plain.tokens, drafted.tokens)


@pytest.mark.thorough
@pytest.mark.parametrize("draws", [25_000, 500_000])
@pytest.mark.parametrize(
    ("method", "shape"),
    [("draft model", "chain"), ("early exit", "sampled")],
)
def test_generated_tokens_have_its_exact_distribution(method, shape, draws) -> None:
    target = distribution_target().replace(cache_dtype="int8")
    conformance.check_distribution(target, small_drafter(method, SMALL[shape]), draws=draws)


@pytest.mark.thorough
def test_a_target_that_sees_its_own_tokens_unrounded_fails(monkeypatch) -> None:
    """Check that the text with a draft then differs from plain decoding's."""

    # Kernels take no entries of two kinds.
    def plainly(q, pieces, sinks=None, *, values_part, kernel, cap=None):
        return attend_plainly(q, pieces, sinks, values_part=values_part, block=16, cap=cap)

    right = layers.attention
    target, prompts = (
        in_8_bits(seed=3, num_layers=1),
        np.random.default_rng(1).integers(0, 11, (32, 6)),
    )

    def texts(drafter) -> np.ndarray:
        return np.asarray(specjax.generate(target, drafter, prompts, max_new_tokens=40).tokens)

    drafter = DraftModel(target, draft=SHAPES["chain"])
    np.testing.assert_array_equal(texts(None), texts(drafter))
    with own_programs():
        monkeypatch.setattr(by_device, "_attend_by_kernel", plainly)
        monkeypatch.setattr(
            layers, "attention", lambda *arguments: sees_its_own_tokens_unrounded(right, *arguments)
        )
        assert np.any(texts(None) != texts(drafter))


@pytest.mark.thorough
def test_an_engine_gives_the_text_of_each_request_alone() -> None:
    target = in_8_bits()
    prompts = [[1, 4, 2, 4, 9], [3, 5], [7, 7, 1, 9, 1, 2, 3, 4, 5, 6, 7, 8, 9]]
    options = {"max_new_tokens": 20, "rule": "coupled", "eos_token_ids": ()}
    with Engine(
        target,
        EarlyExit(layers=1),
        drafts=("chain:3",),
        rows=2,
        widths=(2,),
        pages=16,
        page=8,
        chunk=8,
        capacity=48,
    ) as engine:
        handles = [
            engine.submit(prompt, max_new_tokens=20, temperature=0.8, seed=i, eos_token_ids=())
            for i, prompt in enumerate(prompts)
        ]
        texts = [list(handle.result(60).tokens) for handle in handles]
    for i, prompt in enumerate(prompts):
        key = jax.random.fold_in(specjax.sampling.make_key(i), 0)[None]
        alone = specjax.generate(
            target, None, np.array([prompt]), sampling=Sampling(temperature=0.8), key=key, **options
        )
        assert texts[i] == alone.tokens[0, len(prompt) :].tolist()


@pytest.mark.full
def test_the_loop_updates_it_in_place() -> None:
    """Check that no array of a cache's shape is copied, neither numbers nor scales."""
    target = in_8_bits(num_heads=8, num_kv_heads=4, head_dim=32)
    _, state = decoding.start(
        target, None, PROMPTS[:1], options=GenerationOptions(max_new_tokens=450)
    )
    compiled = decoding.decode.lower(target, specjax.drafters.NoDraft(), state, 5).compile()
    numbers, scales = (part for part in jax.tree.leaves(state.cache.layers[0])[:2])
    names = [
        f"{name}[{','.join(map(str, part.shape))}]"
        for name, part in (("s8", numbers), ("f32", scales))
    ]
    program = compiled.as_text().splitlines()
    assert all(any(name in line for line in program) for name in names)
    copies = [line for line in program if " copy(" in line]
    assert [line for line in copies if any(name in line for name in names)] == []
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(
        part.nbytes for part in jax.tree.leaves(state.cache)
    )
