"""Check the benchmarks that compile kernels for an H100 that is not there."""

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import pytest

from benchmarks import gpu_kernels, mosaic_gpu
from benchmarks.gpu_kernels import CASES, Case, MissingError, blocks_of, compile_case, needed_bytes
from specjax.lowering import topologies
from specjax.sharding import make_mesh

needs_cuda = pytest.mark.skipif(
    not topologies.cuda_directory(), reason="needs pip install 'specjax[compile-cuda]'"
)


def test_what_must_be_read_is_counted() -> None:
    case = Case("small", queries=3, dim=16, batch=2, slots=100, heads=4, kv_heads=2)
    keys_and_values, queries_and_result = 2 * 2 * 2 * 103 * 16, 2 * 2 * 3 * 4 * 16
    assert needed_bytes(case) == 2 * (keys_and_values + queries_and_result)
    assert (
        needed_bytes(replace(case, int8=True))
        == keys_and_values // 16 * (16 + 4) + 2 * queries_and_result
    )
    assert needed_bytes(replace(case, is_training=True)) == 2 * (
        2 * 2 * 2 * 3 * 16 + queries_and_result
    )


def test_turns_of_plain_attention_are_counted_as_it_reads_the_cache() -> None:
    assert blocks_of(Case("side by side", slots=2048)) == 4
    assert blocks_of(Case("long", slots=8192)) == 8
    assert blocks_of(Case("in pages", slots=8192, page=256)) == 32


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (MissingError("no argument for sinks"), "no argument for sinks"),
        (ValueError("too large\nby far"), "ValueError: too large"),
        (AssertionError(), "AssertionError: AssertionError()"),
    ],
)
def test_a_kernel_that_cannot_be_made_is_an_outcome(error, failure, monkeypatch) -> None:
    def fail(case, shapes):
        raise error

    monkeypatch.setitem(gpu_kernels.KERNELS, "broken", fail)
    outcome = compile_case(CASES[0], "broken", make_mesh(1, 1))
    assert outcome.moved is None and outcome.failure == failure


def run(module: str, *options: str) -> str:
    """Return the output of a benchmark, which runs in a process of its own.

    Before anything else it sets up JAX for a GPU that is not there.
    """
    command = [sys.executable, "-m", f"benchmarks.{module}", *options]
    environment = os.environ | {"XLA_FLAGS": "", "COLUMNS": "160"}
    return subprocess.run(
        command, capture_output=True, text=True, check=True, env=environment
    ).stdout


@needs_cuda
@pytest.mark.thorough
def test_our_kernel_reads_a_cache_once_and_plain_attention_more_often(tmp_path) -> None:
    output = tmp_path / "kernels.json"
    printed = run(
        "gpu_kernels", "--cases", "chain of 4", "training, gradients", "--output", str(output)
    )
    outcomes = {
        (outcome["case"], outcome["kernel"]): outcome
        for outcome in json.loads(output.read_text())["outcomes"]
    }
    ours, plain = (outcomes["chain of 4", f"specjax, {name}"] for name in ("Triton", "plain JAX"))
    assert 1 <= ours["moved"] / ours["needed"] < 1.05
    assert plain["moved"] > 3 * ours["moved"] and plain["kernels"] > 10 * ours["kernels"]
    assert outcomes["training, gradients", "specjax, Triton"]["failure"].startswith(
        "has no gradients"
    )
    assert "chain of 4" in printed


@needs_cuda
@pytest.mark.thorough
@pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="the sketch is written for Mosaic GPU as JAX 0.12 has it"
)
def test_the_sketch_for_mosaic_gpu_compiles() -> None:
    assert run("mosaic_gpu").count("lowers, and compiles to 1 call of mosaic_gpu_v2") == len(
        mosaic_gpu.CASES
    )
