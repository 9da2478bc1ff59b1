import math
from dataclasses import replace
from itertools import pairwise

import jax
import pytest

from specjax.chips import CHIPS, Chip, find_chip
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.lowering import abstract
from specjax.models import sparse_attention
from specjax.models.config import ModelConfig
from specjax.models.layers import WITH_STATE
from specjax.models.memory import (
    KimiDeltaAttention,
    LinearAttention,
    Mamba2,
    ShortConvolution,
    StateSizes,
)
from specjax.models.published import PUBLISHED, parameter_count
from specjax.planning import roofline, theory, work
from specjax.planning.roofline import Pair, Trained
from specjax.sharding import make_mesh
from tests.conftest import LAYERED, tiny_config

LLAMA = PUBLISHED["llama-3.1-8b"]
SMALL = PUBLISHED["llama-3.2-1b"]
SELF = Pair(LLAMA, CHIPS["a100"], draft_cache=512)
"""MagicDec's own setting: Llama-3.1-8B drafts for itself with 512 entries of its cache."""
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)

SHAPE = tiny_config(
    vocab_size=1000,
    hidden_size=64,
    intermediate_size=256,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
TOY = Chip("toy", flops=1e9, bandwidth=1e8, memory=1e6, source="made up")


# --- one forward pass, by hand --------------------------------------------------------------------

LAYER = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 256
WEIGHTS = 2 * LAYER + 64 * 1000  # the head; the embedding is looked up
CACHE_BYTES = 2 * 2 * 2 * 16 * 2  # layers, key and value, heads, their size, bytes


def test_work_by_hand() -> None:
    assert WEIGHTS == 186_880
    products = work.product_work(SHAPE, rows=12)
    assert (products.flops, products.bytes) == (2 * WEIGHTS * 12, 2 * WEIGHTS)
    attention = work.attention_work(SHAPE, batch=3, tokens=4, context=100)
    assert attention.flops == 4 * 3 * 4 * 100 * 4 * 16 * 2
    assert attention.bytes == 3 * 100 * CACHE_BYTES
    assert work.cache_bytes(SHAPE) == CACHE_BYTES


def test_a_tied_head_is_multiplied_and_biases_and_norms_are_not() -> None:
    changed = replace(SHAPE, tie_embeddings=True, qkv_bias=True, qk_norm=True)
    assert work.product_work(changed, rows=12) == work.product_work(SHAPE, rows=12)


def test_experts_and_latents_by_hand() -> None:
    """Count DeepSeek-V3's work by hand.

    A token takes 37 billion parameters (the abstract of its report), and 512 + 64 numbers in each
    layer's cache.
    """
    config = PUBLISHED["deepseek-v3"]
    one_row, many_rows = work.product_work(config, rows=1), work.product_work(config, rows=10_000)
    experts = 58 * 256 * 3 * 7168 * 2048
    assert one_row.flops / 2 == pytest.approx(37e9, rel=0.02)
    assert many_rows.flops == pytest.approx(10_000 * one_row.flops)
    assert (one_row.bytes, many_rows.bytes) == pytest.approx(
        (one_row.flops, 2 * (one_row.flops / 2 + experts * 31 / 32))
    )
    assert work.cache_bytes(config) == 61 * (512 + 64) * 2
    attention = work.attention_work(config, batch=1, tokens=3, context=100)
    assert attention.flops == 2 * 3 * 100 * 128 * (512 + 64 + 512) * 61
    assert attention.bytes == 100 * 61 * 576 * 2


def test_index_keys_are_stored_and_read() -> None:
    """GLM-5.2 has an indexer of 32 heads of 128 in 21 of its 78 layers."""
    config = PUBLISHED["glm-5.2"]
    full = [layer for layer in range(78) if config.has_indexer(layer)]
    assert full == [0, 1, *range(2, 78, 4)]
    numbers = 78 * (512 + 64) + 21 * 128
    assert work.cache_bytes(config) == 2 * numbers
    attention = work.attention_work(config, batch=1, tokens=3, context=100)
    products = 78 * 64 * (512 + 64 + 512) + 21 * 32 * 128
    assert attention == work.Work(2 * 3 * 100 * products, 2 * 100 * numbers)


@pytest.mark.parametrize(("tokens", "whole"), [(1, 6_144), (2, 12_288), (60, 12_288)])
def test_selected_entries_of_long_texts_are_copied(tokens, whole) -> None:
    """Count GLM-5.2 with 64 heads, of which two take the time of reading an entry.

    A copy of an entry is read, written and read again.
    """
    config = PUBLISHED["glm-5.2"]
    for context, copied in ((whole, False), (whole + 1, True), (131_072, True)):
        multiplied, moved = (2048, 3 * tokens * 2048) if copied else (context, context)
        products = 78 * 64 * (512 + 64 + 512) * multiplied + 21 * 32 * 128 * context
        numbers = 78 * (512 + 64) * moved + 21 * 128 * context
        attention = work.attention_work(config, batch=2, tokens=tokens, context=context)
        assert attention == work.Work(2 * 2 * tokens * products, 2 * 2 * numbers)


@pytest.mark.parametrize("tokens", [1, 4, 60])
@pytest.mark.parametrize("name", ["deepseek-v3.2", "glm-5.2"])
def test_copies_are_made_where_they_take_less_time(name, tokens) -> None:
    """The chip does 240 operations in the time of reading a byte, as a v5e does."""
    config, chip = PUBLISHED[name], CHIPS["tpu-v5e"]
    border = sparse_attention.reach(config, tokens)
    every, copies = (
        work.attention_work(config, 1, tokens, context).seconds(chip)
        for context in (border, border + 1)
    )
    assert copies == pytest.approx(every, rel=0.15)


def test_layers_that_differ_by_hand() -> None:
    """Count the work of layers that share entries.

    Layers 2 and 3 store nothing, and read the entries of layers 0 and 1: 2 x 2 heads of 4 for the 5
    newest tokens, and 2 x 1 head of 8 for all tokens.
    """
    config = tiny_config(**LAYERED["sharing"])
    assert work.cache_bytes(config) == (16 + 16) * 2
    attention = work.attention_work(config, batch=3, tokens=4, context=100)
    products = 5 * (4 * 2 * 4 + 2 * 2 * 4) + 100 * (4 * 2 * 8 + 4 * 2 * 8)
    assert attention.flops == 2 * 3 * 4 * products
    assert attention.bytes == 3 * 2 * (5 * 16 + 100 * 16) * 2


def test_forward_time_by_hand() -> None:
    """Count the time of four tokens per row, and of one.

    With four the products wait for arithmetic (4.49 ms) and attention for memory (0.77 ms). With
    one both wait for memory.
    """
    assert work.forward_time(SHAPE, TOY, 3, 4, 100) == pytest.approx(
        2 * WEIGHTS * 12 / 1e9 + 3 * 100 * CACHE_BYTES / 1e8
    )
    assert work.forward_time(SHAPE, TOY, 3, 4, 100) == pytest.approx(5.25312e-3)
    assert work.forward_time(SHAPE, TOY, 3, 1, 100) == pytest.approx(
        2 * WEIGHTS / 1e8 + 3 * 100 * CACHE_BYTES / 1e8
    )
    assert work.forward_time(SHAPE, TOY, 3, 1, 100) == pytest.approx(4.5056e-3)
    eight_bits = work.forward_time(SHAPE, TOY, 3, 1, 100, weight_bytes=1, kv_bytes=1)
    assert eight_bits == pytest.approx(4.5056e-3 / 2)
    # With 40 tokens per row each key has enough queries that attention waits for arithmetic too.
    many = work.forward_time(SHAPE, TOY, 3, 40, 100)
    assert many == pytest.approx((2 * WEIGHTS * 120 + 4 * 3 * 40 * 100 * 4 * 16 * 2) / 1e9)


def test_a_known_model_on_a_known_chip() -> None:
    """Check Llama-3.1-8B on an H100: 15.0 GB of weights and 0.13 GB of cache at 3.35 TB/s."""
    assert work.forward_time(LLAMA, CHIPS["h100"], 1, 1, 1024) == pytest.approx(
        (15.009e9 + 0.1342e9) / 3.35e12, rel=1e-4
    )


@pytest.mark.parametrize("name", CHIPS)
def test_chips(name) -> None:
    chip = find_chip(name.upper())
    assert chip is CHIPS[name]
    assert chip.source.startswith("https://")
    # Operations per byte: a wrong power of ten in either number would show.
    assert 100 < chip.flops / chip.bandwidth < 600
    assert 15e9 <= chip.memory <= 100e9


# --- the three times ------------------------------------------------------------------------------


def test_the_three_times_by_hand() -> None:
    # Seconds of reading all weights, and the entries of one token of context.
    weights, cache = 2 * WEIGHTS / 1e8, 3 * CACHE_BYTES / 1e8
    pair = Pair(SHAPE, TOY, draft_cache=40, selection=0.5)
    assert pair.target_time(3, 100) == pytest.approx(weights + 100 * cache)
    assert pair.verify_time(3, 100, gamma=3) == pytest.approx(5.25312e-3)
    assert pair.verify_time(3, 100, gamma=0) == pair.target_time(3, 100)
    assert pair.draft_time(3, 100) == pytest.approx(weights + 40 * cache + 0.5 * 100 * cache)
    # All 40 entries fit into the draft cache, so nothing is selected.
    assert pair.draft_time(3, 40) == pytest.approx(weights + 40 * cache)
    assert replace(pair, selection=0.0).draft_time(3, 100) == pytest.approx(weights + 40 * cache)
    assert replace(pair, draft_cache=None).draft_time(3, 100) == pytest.approx(
        weights + 100 * cache
    )


def test_speedup_is_magicdecs_equation_2() -> None:
    pair, gamma, alpha = Pair(LLAMA, CHIPS["h100"], SMALL), 3, 0.7
    target, draft = pair.target_time(8, 4000), pair.draft_time(8, 4000)
    slowdown = (gamma * draft / target + pair.verify_time(8, 4000, gamma) / target) / (
        1 + 0.7 + 0.7**2 + 0.7**3
    )
    assert roofline.chain_speedup(pair, 8, 4000, gamma, alpha) == pytest.approx(1 / slowdown)
    assert roofline.chain_speedup(pair, 8, 4000, 0, alpha) == 1


def test_memory_by_hand() -> None:
    parameters = WEIGHTS + 64 * 1000 + 5 * 64  # with the embedding and five norms
    drafter = replace(SHAPE, num_layers=1)
    draft = parameters - LAYER - 2 * 64
    assert Pair(SHAPE, TOY).memory(3, 100) == 2 * parameters + 3 * 100 * CACHE_BYTES
    assert Pair(SHAPE, TOY, draft_cache=40).memory(3, 100) == 2 * parameters + 3 * 140 * CACHE_BYTES
    pair = Pair(SHAPE, TOY, drafter)
    assert pair.memory(3, 100) == 2 * (parameters + draft) + 3 * 100 * (
        CACHE_BYTES + CACHE_BYTES / 2
    )
    full = next(rows for rows in range(1, 1000) if not pair.fits(rows, 100))
    assert pair.memory(full - 1, 100) <= TOY.memory < pair.memory(full, 100)


# --- what the papers found ------------------------------------------------------------------------


def rising(values: list[float]) -> bool:
    return all(a < b for a, b in pairwise(values))


def test_times_grow_with_context_and_with_batch() -> None:
    for chip in CHIPS.values():
        pair = Pair(LLAMA, chip, SMALL)
        assert rising([pair.target_time(4, s) for s in (1, 100, 1000, 10_000, 100_000)])
        assert rising([pair.target_time(b, 1000) for b in BATCHES])
        assert rising([pair.draft_time(4, s) for s in (1, 100, 1000, 10_000, 100_000)])
        assert rising([pair.verify_time(64, 1000, g) for g in (4, 8, 16)])


@pytest.mark.parametrize("chip", ["a100", "h100"])
def test_with_a_short_context_a_larger_batch_gains_less(chip) -> None:
    pair = Pair(LLAMA, CHIPS[chip], SMALL)
    assert rising([-roofline.chain_speedup(pair, rows, 256, 3, 0.8) for rows in BATCHES])
    assert roofline.chain_speedup(pair, 1, 256, 3, 0.8) > 1.9
    assert roofline.chain_speedup(pair, 256, 256, 3, 0.8) < 1


@pytest.mark.parametrize("chip", ["a100", "h100"])
@pytest.mark.parametrize("context", [8000, 32_000, 100_000])
def test_with_a_long_context_and_a_compressed_draft_cache_a_larger_batch_gains_more(
    chip, context
) -> None:
    pair = replace(SELF, chip=CHIPS[chip])
    assert rising([roofline.chain_speedup(pair, rows, context, 3, 0.8) for rows in BATCHES])
    assert roofline.chain_speedup(pair, 1, context, 3, 0.8) < 1.2
    assert roofline.chain_speedup(pair, 256, context, 3, 0.8) > 1.7


def test_magicdecs_critical_length_lies_where_the_paper_puts_it() -> None:
    """Check figure 2c: a larger batch gains less below 4,000 tokens, and more above.

    The figure is of Llama-3.1-8B on A100 with gamma = 3.
    """
    large = (64, 128, 256)
    assert rising([-roofline.chain_speedup(SELF, rows, 2000, 3, 0.8) for rows in large])
    assert rising([roofline.chain_speedup(SELF, rows, 4500, 3, 0.8) for rows in large])


def test_a_draft_model_with_its_whole_cache_gains_less_from_length_than_one_with_a_part_of_it() -> (
    None
):
    whole = Pair(LLAMA, CHIPS["h100"], SMALL)
    part = Pair(LLAMA, CHIPS["h100"], SMALL, draft_cache=512)
    assert roofline.chain_speedup(whole, 64, 32_000, 3, 0.8) < roofline.chain_speedup(
        whole, 64, 1000, 3, 0.8
    )
    assert roofline.chain_speedup(part, 64, 32_000, 3, 0.8) > roofline.chain_speedup(
        part, 64, 1000, 3, 0.8
    )


# MagicDec, tables 1 and 2: target, K, rows, context, gamma, tokens per step, and the speed-up
# measured on H100.
MEASURED = [
    ("llama-3.1-8b", 512, 32, 32_000, 3, 2.82, 1.42),
    ("llama-2-7b-32k", 512, 32, 8000, 3, 2.98, 1.44),
    ("llama-2-7b-32k", 512, 64, 8000, 4, 3.37, 1.68),
    ("llama-3.1-8b", 2049, 41, 100_000, 7, 5.61, 2.29),
    ("llama-3.1-8b", 2049, 64, 64_000, 6, 5.41, 2.21),
]


@pytest.mark.parametrize(
    ("target", "entries", "rows", "context", "gamma", "tokens", "measured"), MEASURED
)
def test_measured_speedups_stay_below_the_roofline(
    target, entries, rows, context, gamma, tokens, measured
) -> None:
    pair = Pair(PUBLISHED[target], CHIPS["h100"], draft_cache=entries)
    times = (
        pair.target_time(rows, context),
        pair.draft_time(rows, context),
        pair.verify_time(rows, context, gamma),
    )
    assert measured < theory.speedup_from_times(*times, gamma, tokens) < 2 * measured


# --- searches -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 16, 256])
@pytest.mark.parametrize("alpha", [0.3, 0.8, 1.0])
def test_best_gamma_is_the_best_of_all(rows, alpha) -> None:
    pair = Pair(LLAMA, CHIPS["h100"], SMALL)
    factors = [roofline.chain_speedup(pair, rows, 1000, gamma, alpha) for gamma in range(13)]
    assert roofline.best_gamma(pair, rows, 1000, alpha, 12) == theory.GammaChoice(
        factors.index(max(factors)), max(factors)
    )
    forced = roofline.best_gamma(pair, rows, 1000, alpha, 12, shortest=1)
    assert forced == theory.GammaChoice(factors.index(max(factors[1:])), max(factors[1:]))


PAIRS = {
    "self": SELF,
    "self with selection": replace(SELF, selection=0.25),
    "draft model": Pair(LLAMA, CHIPS["a100"], SMALL),
    "draft model with selection": Pair(
        LLAMA, CHIPS["a100"], SMALL, draft_cache=4096, selection=1.0
    ),  # at 128 rows it pays in two ranges of contexts
    "draft model with a part of its cache": Pair(LLAMA, CHIPS["tpu-v5e"], SMALL, draft_cache=256),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@pytest.mark.parametrize("alpha", [0.4, 0.8])
def test_break_even_is_the_crossing(pair, alpha) -> None:
    crossings = 0
    for rows in (1, 4, 16, 64, 128, 1024):
        break_even = roofline.break_even_context(pair, rows, alpha, longest=6)

        def gains(context: int, rows: int = rows) -> bool:
            return roofline.best_gamma(pair, rows, context, alpha, longest=6, shortest=1).factor > 1

        if break_even is None:
            assert not any(gains(context) for context in range(1, pair.longest_context, 4999))
        else:
            assert gains(break_even)
            shorter = {*range(1, break_even, max(break_even // 20, 1)), break_even - 1} - {0}
            assert not any(gains(context) for context in shorter)
            crossings += break_even > 1
    assert crossings >= 1


def test_break_even_at_the_ends() -> None:
    assert roofline.break_even_context(Pair(LLAMA, CHIPS["h100"], SMALL), 1, 0.8) == 1
    assert roofline.break_even_context(SELF, 1, 0.1) is None
    assert roofline.break_even_context(replace(SELF, draft_cache=None), 64, 0.99) is None
    break_even = roofline.break_even_context(SELF, 64, 0.8)
    assert roofline.break_even_context(SELF, 64, 0.8, longest=1) == break_even


def test_best_cache_is_the_best_of_all() -> None:
    """Compare the best cache with a search of all sizes and chains.

    Acceptance rises with K, and so does the cost. So the best K lies inside the range, and rises
    with the context.
    """
    alphas = {64: 0.55, 256: 0.75, 1024: 0.85, 4096: 0.9}
    for rows, context in ((16, 8000), (64, 32_000), (256, 100_000)):
        choice = roofline.best_cache(SELF, rows, context, alphas, longest=10)
        grid = {
            (entries, gamma): roofline.chain_speedup(
                replace(SELF, draft_cache=entries), rows, context, gamma, alpha
            )
            for entries, alpha in alphas.items()
            for gamma in range(11)
        }
        assert grid[choice.draft_cache, choice.gamma] == choice.factor == max(grid.values())
    assert (
        roofline.best_cache(SELF, 64, 4000, alphas).draft_cache
        < roofline.best_cache(SELF, 64, 100_000, alphas).draft_cache
    )


FAULTS = [
    (
        lambda: find_chip("h900"),
        "chip='h900': this chip is unknown; give one of h100, a100, tpu-v4",
    ),
    (lambda: work.forward_time(LLAMA, TOY, 0, 1, 1), "batch=0"),
    (lambda: work.forward_time(LLAMA, TOY, 1, 0, 1), "tokens=0"),
    (lambda: SELF.target_time(1, 0), "context=0"),
    (lambda: Pair(LLAMA, TOY, draft_cache=0), "draft_cache=0"),
    (lambda: Pair(LLAMA, TOY, selection=1.5), "selection=1.5"),
    (lambda: roofline.chain_speedup(SELF, 1, 1, 3, 1.5), "alpha=1.5"),
    (lambda: roofline.best_gamma(SELF, 1, 1, 0.5, longest=-1), "shortest=0, longest=-1"),
    (lambda: roofline.best_cache(SELF, 1, 1, {}), "alphas={}"),
]


@pytest.mark.parametrize(("call", "message"), FAULTS, ids=[message for _, message in FAULTS])
def test_bad_input_is_named(call, message) -> None:
    with pytest.raises(InputError) as caught:
        call()
    assert str(caught.value).startswith(message)


def test_embeddings_that_are_looked_up_are_not_read() -> None:
    config = PUBLISHED["gemma-4-e2b"]
    read = work.product_work(config, rows=1, weight_bytes=1.0).bytes
    assert read / 1e9 == pytest.approx(2.28, rel=0.01)  # it has 4.63 billion parameters
    of_experts = work.product_work(PUBLISHED["gpt-oss-20b"], rows=1, weight_bytes=1.0).bytes
    # The active parameters on its model card, which include the head.
    assert of_experts / 1e9 == pytest.approx(3.6, rel=0.01)


def test_layers_with_a_window_read_no_more_than_that() -> None:
    config, context = PUBLISHED["gpt-oss-20b"], 8192
    attention = work.attention_work(config, batch=3, tokens=1, context=context, kv_bytes=1.0)
    entry = 2 * 8 * 64
    assert attention.bytes == 3 * entry * 12 * (context + 128)
    assert attention.flops == 3 * 4 * 64 * 64 * 12 * (context + 128)


def test_layers_that_share_entries_read_them_and_keep_none() -> None:
    config, context = PUBLISHED["gemma-4-e2b"], 8192
    assert work.cache_bytes(config, 1.0) == 2 * (12 * 256 + 3 * 512)
    assert work.attention_work(config, 1, 1, context, 1.0).bytes == 2 * (
        28 * 256 * 512 + 7 * 512 * context
    )


# --- drafters that are trained for their target ---------------------------------------------------


def trained(name: str, target: str) -> Trained:
    model = abstract.abstract_model(PUBLISHED[target], make_mesh(1, 1))
    return Trained(abstract.abstract_drafter(name, Chain(4), model), model)


# Parameters in millions, as the model cards and files count them.
ASSISTANTS = {
    "gemma-4-e2b": 78.0,
    "gemma-4-e4b": 78.8,
    "gemma-4-26b-a4b": 420,
    "gemma-4-31b": 470,
}


@pytest.mark.parametrize("target", ASSISTANTS)
def test_assistants_have_their_published_sizes(target) -> None:
    assert trained("gemma4-assistant", target).parameters / 1e6 == pytest.approx(
        ASSISTANTS[target], rel=0.003
    )


@pytest.mark.parametrize(("name", "longest"), [("dflash", 15), ("dspark", 7)])
def test_drafters_of_blocks_have_their_published_sizes(name, longest) -> None:
    """Check that they have five layers, and blocks of 16 and of 7 tokens."""
    model = abstract.abstract_model(PUBLISHED["qwen3-8b"], make_mesh(1, 1))
    drafter = abstract.abstract_drafter(name, None, model)
    assert (drafter.config.layer.num_layers, drafter.draft_shape) == (5, Chain(longest))
    assert Trained(drafter, model).longest_chain(16) == longest
    assert trained("eagle3", "qwen3-8b").longest_chain(16) == 16


def test_a_level_of_an_assistant_by_hand() -> None:
    """Count a level of E2B's assistant by hand.

    It has four layers of size 256, with heads of 256 and 512. It reads 4,096 tokens of its head. Of
    the target's entries its layers with a window read only the tokens in the window.
    """
    assistant, fast = trained("gemma4-assistant", "gemma-4-e2b"), replace(TOY, flops=1e30)
    rows, context = 8, 4096
    queries, mlps = 2 * (3 * 256 * 4 * 256 + 256 * 4 * 512), 4 * 3 * 256 * 2048
    projections = (2 * 1536 + 1536) * 256 + 2048 * 256
    norms = 4 * (4 * 256 + 1) + 3 * 256 + 512 + 256 + 262_144  # and the order of the tokens
    entries = 2 * 256 * 512 + 2 * 512 * context
    weights = queries + mlps + projections + norms + 4096 * 256
    of_rows = rows * (entries + 1536) + (rows - 1) * 4096 * 256
    assert assistant.level_time(fast, rows, context) == pytest.approx(
        2 * (weights + of_rows) / fast.bandwidth
    )
    assert assistant.step_time(fast, rows, context, 4) == 0
    assert assistant.kept(rows, context) == rows * 1536


def test_eagle3_reads_its_layer_in_every_level_and_what_fuses_once() -> None:
    eagle, slow = trained("eagle3", "gpt-oss-20b"), replace(TOY, flops=1.0)
    hidden = 2880
    fuses = 3 * hidden * hidden  # it fuses the states of three layers
    assert eagle.step_time(slow, batch=1, context=1, gamma=4) == pytest.approx(2 * fuses, rel=0.1)
    head = 32_000 * hidden
    assert 2 * head < eagle.level_time(slow, batch=1, context=1) < 2 * (eagle.parameters - fuses)
    assert eagle.kept(2, 100) >= 2 * 100 * 2 * 8 * 64


def test_a_block_is_multiplied_whole_and_its_weights_are_read_once() -> None:
    """Compare DFlash, JetSpec and P-EAGLE.

    DFlash computes all tokens of a block, JetSpec only those of the chain, and P-EAGLE one position
    per token.
    """
    model = abstract.abstract_model(PUBLISHED["qwen3-8b"], make_mesh(1, 1))
    busy, slow = replace(TOY, bandwidth=1e30), replace(TOY, flops=1e30)

    def times(drafter, gamma: int) -> tuple[float, float]:
        trained_drafter = Trained(drafter, model)
        assert not trained_drafter.has_levels and trained_drafter.level_time(busy, 1, 1) == 0
        return trained_drafter.step_time(busy, 2, 1, gamma) * busy.flops, trained_drafter.step_time(
            slow, 2, 1, gamma
        )

    dflash = abstract.abstract_drafter("dflash", None, model)
    head = 151_936 * 4096
    weights = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(dflash.params)) + head
    assert times(dflash, 4)[0] == times(dflash, 9)[0] == pytest.approx(2 * weights * 2 * 16)
    causal = replace(dflash, config=replace(dflash.config, causal=True))
    assert times(causal, 4)[0] == pytest.approx(2 * weights * 2 * 5)
    peagle = abstract.abstract_drafter("peagle", None, model)
    assert times(peagle, 6)[0] == pytest.approx(1.5 * times(peagle, 4)[0])
    assert times(dflash, 4)[1] == times(causal, 9)[1] > 2 * weights / slow.bandwidth


def test_a_chain_that_is_drafted_at_once_is_paid_once() -> None:
    pair = Pair(PUBLISHED["qwen3-8b"], CHIPS["h100"], trained("dflash", "qwen3-8b"))
    step = pair.verify_time(8, 1024, 4) + pair.once_time(8, 1024, 4)
    expected = theory.expected_tokens(0.8, 4) * pair.target_time(8, 1024) / step
    assert roofline.chain_speedup(pair, 8, 1024, 4, 0.8) == pytest.approx(expected)
    assert roofline.chain_speedup(pair, 8, 1024, 0, 0.8) == pytest.approx(1)


@pytest.mark.parametrize(
    ("target", "name"), [("gemma-4-e2b", "gemma4-assistant"), ("gpt-oss-20b", "eagle3")]
)
def test_a_trained_drafter_is_cheaper_than_its_target_and_its_step_counts(target, name) -> None:
    pair = Pair(PUBLISHED[target], CHIPS["h100"], trained(name, target))
    level, once = pair.draft_time(1, 1024), pair.once_time(1, 1024)
    assert 0 < level < 0.2 * pair.target_time(1, 1024)
    gain = (
        theory.expected_tokens(0.8, 4)
        * pair.target_time(1, 1024)
        / (4 * level + once + pair.verify_time(1, 1024, 4))
    )
    assert roofline.chain_speedup(pair, 1, 1024, 4, 0.8) == pytest.approx(gain)
    assert pair.memory(1, 1024) > Pair(PUBLISHED[target], CHIPS["h100"]).memory(1, 1024)
    assert pair.longest_context == 131_072


def test_a_trained_drafter_has_no_cache_to_cut() -> None:
    with pytest.raises(InputError, match="draft_cache=64: a drafter trained"):
        Pair(LLAMA, TOY, trained("eagle3", "llama-3.1-8b"), draft_cache=64)


# --- models with states ---------------------------------------------------------------------------

MAMBA2 = Mamba2(key_heads=2, value_heads=4, key_dim=8, value_dim=6)
# By kind of layer: its sizes, and by hand the weights of its matrices, the bytes of its state and
# of a drafted token's entry, and the numbers of its table. The hidden states have 64 numbers.
STATES: dict[str, tuple[StateSizes, int, int, int, int]] = {
    "mamba2": (
        MAMBA2,
        64 * (24 + 24 + 16 + 16 + 4) + 24 * 64,  # z, x, B, C, steps; and the output
        4 * 4 * 8 * 6 + 3 * (24 + 16 + 16) * 2,  # the tables, and x, B and C of three tokens
        (16 + 24) * 2 + 4 * (4 + 4) + (24 + 16 + 16) * 2,  # B, x, decays, steps; x, B and C
        4 * 8 * 6,
    ),
    "gated delta rule": (
        LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=6),
        64 * (16 + 16 + 24 + 24 + 4 + 4) + 24 * 64,  # q, k, v, z, both gates; and the output
        4 * 4 * 8 * 6 + 3 * (16 + 16 + 24) * 2,
        4 * (16 + 24 + 4) + (16 + 16 + 24) * 2,  # k, u and decays in float32; q, k and v
        4 * 8 * 6,
    ),
    "kimi delta attention": (
        KimiDeltaAttention(key_heads=2, key_dim=8),
        # q, k, v, gates, decays and output gates through 8 numbers, rates; and the output
        64 * (3 * 16 + 2) + 2 * (64 * 8 + 8 * 16) + 2 + 16 * 64,
        4 * 2 * 8 * 8 + 3 * 48 * 2,
        4 * 3 * 16 + 48 * 2,
        2 * 8 * 8,
    ),
    "short convolution": (
        ShortConvolution(channels=64),
        64 * 64 * 4,
        2 * 64 * 2,
        64 * 2,
        0,
    ),
    "beside attention": (replace(MAMBA2, beside_attention=True), 0, 0, 0, 0),  # added below
}
STATES["beside attention"] = (STATES["beside attention"][0], *STATES["mamba2"][1:])
ATTENTION = 64 * 64 + 2 * 64 * 32 + 64 * 64
MLP = 3 * 64 * 256
ENTRY = CACHE_BYTES // 2  # of one layer


def with_states(kind: str) -> ModelConfig:
    """Return a model whose layers 0 and 2 have a state; layer 1 has attention."""
    return replace(SHAPE, num_layers=3, linear=STATES[kind][0], linear_layers=(0, 2))


def sizes_by_hand(config: ModelConfig, kind: str | None) -> tuple[int, int, int, int, int]:
    """Return the sizes of a model, as those of a layer in `STATES`.

    After the weights of its products are the bytes of a token in the cache.
    """
    if kind is None:
        return WEIGHTS, CACHE_BYTES, 0, 0, 0
    _, weights, state, node, table = STATES[kind]
    with_attention = 3 if kind == "beside attention" else 1
    products = 3 * MLP + with_attention * ATTENTION + 2 * weights + 64 * 1000
    return products, with_attention * ENTRY, 2 * state, 2 * node, 2 * table


@pytest.mark.parametrize("drafter", [None, *STATES])
@pytest.mark.parametrize("target", [None, *STATES])
def test_the_bytes_of_models_with_states_by_hand(target, drafter) -> None:
    """Count a step of three rows, with 100 tokens of context and a chain of 4.

    A pass reads each state once. A commit reads it, and writes it. The entries of all tokens of the
    pass are written, and read by the commit.
    """
    models = [SHAPE if kind is None else with_states(kind) for kind in (target, drafter)]
    fast = replace(TOY, flops=1e30)
    pair = Pair(models[0], fast, models[1])
    weights, entry, state, node, _ = sizes_by_hand(models[0], target)
    passed = 2 * weights + 3 * (100 * entry + state)
    assert pair.target_time(3, 100) * fast.bandwidth == pytest.approx(
        passed + 3 * (2 * state + 2 * node)
    )
    assert pair.verify_time(3, 100, gamma=4) * fast.bandwidth == pytest.approx(
        passed + 3 * (2 * state + 2 * 5 * node)
    )
    draft_weights, draft_entry, draft_state, draft_node, _ = sizes_by_hand(models[1], drafter)
    level = 2 * draft_weights + 3 * (100 * draft_entry + draft_state)
    assert pair.draft_time(3, 100) * fast.bandwidth == pytest.approx(level)
    # The pass over the root writes the states. The last token of a chain is not read.
    once = 3 * (draft_state + 2 * draft_state + 2 * 3 * draft_node)
    assert pair.once_time(3, 100, gamma=4) * fast.bandwidth == pytest.approx(once)
    assert pair.once_time(3, 100, gamma=1) * fast.bandwidth == pytest.approx(3 * draft_state)
    parameters = sum(map(parameter_count, models))
    caches = 3 * (100 * (entry + draft_entry) + state + draft_state)
    assert pair.memory(3, 100) == 2 * parameters + caches
    gain = (
        theory.expected_tokens(0.8, 4)
        * pair.target_time(3, 100)
        / (pair.verify_time(3, 100, 4) + (4 * level + once) / fast.bandwidth)
    )
    assert roofline.chain_speedup(pair, 3, 100, 4, 0.8) == pytest.approx(gain)


@pytest.mark.parametrize("kind", STATES)
def test_the_arithmetic_of_models_with_states_by_hand(kind) -> None:
    """A token multiplies its key and its query with a table, and its product is added to it."""
    slow = replace(TOY, bandwidth=1e30)
    model = with_states(kind)
    weights, entry, _, _, table = sizes_by_hand(model, kind)
    pair = Pair(SHAPE, slow, model)
    attention = 4 * 100 * 4 * 16 * (entry // ENTRY)
    level = 3 * (2 * weights + attention + 2 * 2 * table)
    assert pair.draft_time(3, 100) * slow.flops == pytest.approx(level)
    assert pair.once_time(3, 100, gamma=4) * slow.flops == pytest.approx(3 * 2 * (1 + 3) * table)
    assert pair.once_time(3, 100, gamma=1) * slow.flops == pytest.approx(3 * 2 * table)


def test_a_kind_of_layer_with_a_state_that_is_not_counted_by_hand_is_missing_here() -> None:
    assert {type(sizes) for sizes, *_ in STATES.values()} == set(WITH_STATE)
