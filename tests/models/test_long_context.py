"""The memory and the bytes moved by compiled programs with a long context."""

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
    """Return the temporary bytes of a pass over ``count`` tokens a row.

    Its arguments and results are not counted. The cache has ``slots`` slots.
    """
    target = jax.eval_shape(partial(tiny_target, **TARGET))
    cache = jax.eval_shape(lambda: tiny_target(**TARGET).new_cache(B, slots))
    tokens = jax.ShapeDtypeStruct((B, count), jnp.int32)
    compiled = (
        jax.jit(lambda *args: args[0].score(*args[1:])[0].logits)
        .lower(target, tokens, cache)
        .compile()
    )
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 5, 60])
def test_a_pass_takes_no_more_memory_with_a_longer_cache(count) -> None:
    """A pass has no temporary array that is as long as the cache.

    It needs a block of scores, ``[B, heads, T, block]``, and its exponentials.
    """
    # The scores of a block, and its keys and values.
    block_bytes = 4 * B * (4 * count + 2 * KV * DIM) * block_width(64 * BLOCK, BLOCK)
    short, long = temporaries(count, 8 * BLOCK), temporaries(count, 64 * BLOCK)
    assert long == pytest.approx(short, rel=0.01)
    assert long < 4 * block_bytes
    assert long < 4 * B * 4 * count * 64 * BLOCK  # an array of all scores


@pytest.mark.full
def test_reading_a_long_prompt_takes_no_more_memory_than_a_short_one() -> None:
    def prefill_bytes(width: int) -> int:
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
    tokens = 4 * 2 * 32_768  # the prompt, cut into chunks
    assert prefill_bytes(32_768) < prefill_bytes(4096) + 2 * tokens
    assert prefill_bytes(32_768) < 6 * scores + 2 * tokens


@pytest.mark.thorough
def test_a_tpu_reads_weights_and_cache_once() -> None:
    """A pass moves hardly more bytes than those of weights and cache.

    It is compiled for a TPU v5e that is not there, for 1, 5 and 60 tokens a row and 8k slots.
    """
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
