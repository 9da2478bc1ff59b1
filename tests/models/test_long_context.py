"""What a long context costs: memory and bytes of compiled programs, which do not grow with it but where they must."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from specjax import decoding
from specjax.decoding import state
from specjax.drafters import NoDraft
from specjax.models.attention import BLOCK, block_width
from specjax.sampling import Sampling
from tests.conftest import tiny_target

B, KV, DIM = 16, 2, 16
TARGET = {
    "hidden_size": 64,
    "num_heads": 4,
    "num_kv_heads": KV,
    "head_dim": DIM,
    "max_positions": 40_000,
}


def temporaries(count: int, slots: int) -> int:
    """Bytes beside arguments and results of a pass over ``count`` tokens a row, with a cache of ``slots``."""
    target = jax.eval_shape(partial(tiny_target, **TARGET))
    cache = jax.eval_shape(lambda: tiny_target(**TARGET).new_cache(B, slots))
    tokens = jax.ShapeDtypeStruct((B, count), jnp.int32)
    compiled = (
        jax.jit(lambda *args: args[0].score(*args[1:])[0].logits)
        .lower(target, tokens, cache)
        .compile()
    )
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("count", [1, 5, 60])
def test_a_pass_takes_no_more_memory_with_a_longer_cache(count) -> None:
    """Beyond a block of scores, ``[B, heads, T, block]``, and its exponentials, nothing is as long as the cache."""
    of_block = (
        4 * B * (4 * count + 2 * KV * DIM) * block_width(64 * BLOCK, BLOCK)
    )  # scores; keys and values
    short, long = temporaries(count, 8 * BLOCK), temporaries(count, 64 * BLOCK)
    assert long == pytest.approx(short, rel=0.01)
    assert long < 4 * of_block
    assert long < 4 * B * 4 * count * 64 * BLOCK  # one array of all scores alone


def test_reading_a_long_prompt_takes_no_more_memory_than_a_short_one() -> None:
    def of_prompt(width: int) -> int:
        shapes = jax.ShapeDtypeStruct((1,), jnp.int32)
        lowered = decoding.prefill.lower(
            jax.eval_shape(partial(tiny_target, **TARGET)),
            NoDraft(),
            jax.ShapeDtypeStruct((1, width), jnp.int32),
            shapes,
            shapes,
            jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1)),
            jax.ShapeDtypeStruct((1, 1), jnp.int32),
            jax.eval_shape(lambda: Sampling(temperature=0.0).rows(1)),
            capacity=width + 64,
        )
        return lowered.compile().memory_analysis().temp_size_in_bytes

    chunk = state.PREFILL_CHUNK
    scores = 4 * 4 * chunk * max(chunk, block_width(32_768, BLOCK))
    tokens = 4 * 2 * 32_768  # of the prompt: cut into chunks
    assert of_prompt(32_768) < of_prompt(4096) + 2 * tokens
    assert of_prompt(32_768) < 6 * scores + 2 * tokens


@pytest.mark.thorough
def test_a_tpu_reads_weights_and_cache_once() -> None:
    """Compiled for a TPU v5e that is not there: bytes over weights and cache, at 8k slots, of 1, 5 and 60 tokens a row."""
    pytest.importorskip(
        "libtpu", reason="needs libtpu, which compiles for TPUs: pip install 'specjax[compile]'"
    )
    script = Path(__file__).with_name("compile_for_tpu.py")
    run = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert run.returncode == 0, run.stderr[-2000:]
    shares = json.loads(run.stdout.splitlines()[-1])
    assert all(share < 1.5 for share in shares.values()), shares
