"""Check that every step of decoding lowers for TPUs and for NVIDIA's GPUs.

The tests need neither these devices nor their compilers.
"""

from contextlib import nullcontext
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import decoding, sharding
from specjax.models import cache, primitives, products
from specjax.models.attention import Filled, attend
from specjax.models.cache import KVCache
from specjax.models.quantized_cache import quantize
from specjax.sampling import Sampling
from tests.conftest import SHAPES, own_programs
from tests.evaluation.test_conformance import CASES, METHODS

B, P = 2, 4


@pytest.fixture(scope="module", autouse=True)
def _own_programs():
    """Keep the programs of these tests apart: the tests pretend that they are not on a CPU."""
    with own_programs():
        yield


DEVICES = {
    "cuda": jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"),
    "tpu": jax.sharding.AbstractDevice("TPU v5 lite", num_cores=1, platform="tpu"),
}
KERNELS = {"tpu": "tpu_custom_call", "cuda": "__gpu$xla.gpu.triton"}
"""The name by which a program calls a kernel of attention, by platform."""


def lower(function, platform: str, *arguments) -> str:
    """Lower a function for a platform, with its device named.

    From JAX 0.11 on a kernel for a GPU has to know its device. A kernel for a TPU has to know it if
    the kernel divides, as it does for pages.
    """
    mesh = jax.sharding.AbstractMesh((), (), abstract_device=DEVICES.get(platform))
    with jax.sharding.use_abstract_mesh(mesh) if platform in DEVICES else nullcontext():
        return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def lowered(target, drafter, platform: str, sampling: Sampling) -> str:
    shapes = jax.ShapeDtypeStruct((B,), jnp.int32)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), B))
    stop_token_ids, tokens = (
        jax.ShapeDtypeStruct((B, 1), jnp.int32),
        jax.ShapeDtypeStruct((B, P), jnp.int32),
    )
    arguments = (
        target,
        drafter,
        tokens,
        shapes,
        shapes,
        keys,
        stop_token_ids,
        jax.eval_shape(lambda: sampling.rows(B)),
    )
    state = jax.eval_shape(partial(decoding.prefill, capacity=40), *arguments)
    return lower(decoding.step, platform, target, drafter, state)


@pytest.mark.full_except("dflash-static")
@pytest.mark.thorough_except("plain-chain", "early exit-sampled", "eagle3-dynamic")
@pytest.mark.parametrize(("method", "shape"), CASES)
@pytest.mark.represents("lowering for TPUs")
def test_every_drafter_with_every_shape_lowers(target, method, shape, monkeypatch) -> None:
    monkeypatch.setattr(sharding, "is_on_cpu", lambda mesh: False)
    drafter = METHODS[method](SHAPES[shape])
    sampling = Sampling(temperature=0.7, top_p=0.9)
    text = {platform: lowered(target, drafter, platform, sampling) for platform in ("tpu", "cuda")}
    for platform, kernel in KERNELS.items():
        assert {kernel for kernel in KERNELS.values() if kernel in text[platform]} == {kernel}


@pytest.mark.full
@pytest.mark.thorough_except("early exit", "draft model")
@pytest.mark.parametrize("method", ["early exit", "draft model", "moa"])
def test_decoding_with_a_cache_in_8_bits_lowers(target, method, monkeypatch) -> None:
    monkeypatch.setattr(sharding, "is_on_cpu", lambda mesh: False)
    small, drafter = target.replace(cache_dtype="int8"), METHODS[method](SHAPES["dynamic"])
    for platform, kernel in KERNELS.items():
        assert kernel in lowered(small, drafter, platform, Sampling(temperature=0.7, top_p=0.9))


@pytest.mark.full
@pytest.mark.thorough_except(
    "float32-dims0-1-None-tpu",
    "float32-dims0-1-None-cuda",
    "float32-dims0-1-64-tpu",
    "float32-dims0-1-64-cuda",
    "float32-dims0-60-None-tpu",
    "float32-dims0-60-None-cuda",
    "float32-dims0-60-64-tpu",
    "float32-dims0-60-64-cuda",
    "float32-dims1-1-None-tpu",
    "float32-dims1-1-None-cuda",
    "float32-dims2-1-None-tpu",
    "bfloat16-dims1-60-64-cuda",
)
@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize("count", [1, 60])
@pytest.mark.parametrize("dims", [(64,), (80,), (512, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_in_8_bits_lowers(dims, count, page, dtype, platform) -> None:
    parts = dims if len(dims) > 1 else dims * 2
    q = tuple(jnp.zeros((1, count, 4, d), dtype) for d in dims)
    nodes, cached = (
        tuple(quantize(jnp.zeros((rows, 2, n, d))) for d in parts)
        for rows, n in ((1, count), ((page and 9) or 1, page or 100))
    )
    table = jnp.arange(5)[None] if page else None
    pieces = [
        Filled(cached, jnp.array([70]), table=table),
        (nodes, jnp.ones((1, count, count), bool)),
    ]
    assert KERNELS[platform] in lower(
        partial(attend, values_part=2 - len(dims)), platform, q, pieces
    )


@pytest.mark.full
@pytest.mark.thorough_except(
    "float32-dims0-None",
    "float32-dims2-None",
    "float32-dims3-None",
    "float32-dims4-None",
    "float32-dims5-None",
    "bfloat16-dims1-64",
)
@pytest.mark.parametrize(
    "page", [None, 64, *(pytest.param(page, marks=pytest.mark.thorough) for page in (16, 256))]
)
@pytest.mark.parametrize("dims", [(4,), (8,), (80,), (192,), (320,), (512, 64)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_lowers_for_gpus_whatever_its_sizes(dims, dtype, page) -> None:
    """Check all sizes, also with queries in another dtype than the cache's, and with pages.

    The pages are smaller or larger than a block that the kernel reads at a time.
    """
    parts = dims if len(dims) > 1 else dims * 2
    q = tuple(jnp.zeros((1, 60, 4, d)) for d in dims)
    nodes, cached = (
        (tuple(jnp.zeros((rows, 2, n, d), dtype) for d in parts))
        for rows, n in ((1, 60), ((page and 9) or 1, page or 100))
    )
    table = jnp.arange(5)[None] if page else None
    pieces = [Filled(cached, jnp.array([70]), table=table), (nodes, jnp.ones((1, 60, 60), bool))]
    assert KERNELS["cuda"] in lower(partial(attend, values_part=2 - len(dims)), "cuda", q, pieces)


@pytest.mark.full
@pytest.mark.thorough_except(
    "8-8-dims0-1-None-tpu",
    "8-8-dims0-1-None-cuda",
    "8-8-dims0-1-64-tpu",
    "8-8-dims0-1-64-cuda",
    "8-8-dims0-60-None-tpu",
    "8-8-dims0-60-None-cuda",
    "4-2-dims1-60-64-cuda",
    "4-8-dims2-1-None-tpu",
    "8-7-dims3-1-None-tpu",
    "1-16-dims4-1-None-tpu",
)
@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize("count", [1, 60])
@pytest.mark.parametrize(
    ("kv_heads", "group", "dims"),
    [
        (8, 8, (64,)),  # gpt-oss
        (4, 2, (256,)),  # Gemma 2
        (4, 8, (512,)),  # Gemma 4
        (8, 7, (128,)),  # no power of two
        (1, 16, (512, 64)),  # latent attention
    ],
)
def test_attention_with_sinks_and_a_cap_lowers(
    kv_heads, group, dims, count, page, platform
) -> None:
    parts = dims if len(dims) > 1 else dims * 2
    q = tuple(jnp.zeros((1, count, kv_heads * group, d), "bfloat16") for d in dims)
    nodes, cached = (
        (tuple(jnp.zeros((rows, kv_heads, n, d), "bfloat16") for d in parts))
        for rows, n in ((1, count), ((page and 9) or 1, page or 100))
    )
    table = jnp.arange(5)[None] if page else None
    pieces = [
        Filled(cached, jnp.array([70]), table=table),
        (nodes, jnp.ones((1, count, count), bool)),
    ]

    def run(q, pieces, sinks):
        return attend(q, pieces, values_part=2 - len(dims), sinks=sinks, cap=50.0)

    assert KERNELS[platform] in lower(
        run, platform, q, pieces, jnp.zeros(kv_heads * group, "bfloat16")
    )


def test_a_product_of_one_row_is_one_of_two_on_a_gpu() -> None:
    x, params = jnp.arange(8.0)[None], {"w": jnp.ones((8, 4))}
    rows = {
        platform: lower(partial(primitives.linear, params, "w"), platform, x)
        for platform in ("cuda", "cpu")
    }
    assert "tensor<2x4xf32>" in rows["cuda"] and "tensor<2x4xf32>" not in rows["cpu"]
    np.testing.assert_array_equal(products._of_two_rows(x, params["w"]), x @ params["w"])


@pytest.mark.parametrize("head", [None, primitives.vocabulary_logits, primitives.embedding_logits])
def test_a_product_of_one_row_is_one_of_eight_on_a_tpu(head) -> None:
    x, weight = jnp.arange(6.0)[None], jnp.arange(24.0).reshape(6, 4)
    stored = weight.T if head is primitives.embedding_logits else weight
    run = (
        partial(primitives.linear, {"w": weight}, "w")
        if head is None
        else lambda x: head(x, stored)
    )
    rows = {platform: lower(run, platform, x) for platform in ("tpu", "cpu")}
    assert "tensor<8x4xf32>" in rows["tpu"] and "tensor<8x4xf32>" not in rows["cpu"]
    # A product of several rows stays as it is.
    assert "tensor<8x4xf32>" not in lower(run, "tpu", jnp.ones((3, 6)))
    np.testing.assert_array_equal(products._of_eight_rows(jnp.matmul, x, weight), x @ weight)


def test_heads_are_written_to_a_cache_one_by_one_on_a_tpu() -> None:
    """Check that each head has its own update.

    If heads share an update, XLA chooses a layout of the cache that suits the update and not
    attention.
    """
    entry = tuple(jnp.zeros((2, 3, 16, 8)) for _ in range(2))
    new = tuple(jnp.ones((2, 3, 4, 8)) for _ in range(2))

    def append(length, count):
        return (
            KVCache(layers=(entry,), length=length)
            .append((new,), count, after=jnp.ones((2, 1)))
            .layers
        )

    arguments = jnp.array([3, 14]), jnp.array([2, 4])
    by_head = "scatter_indices_batching_dims = [0, 1]"
    assert by_head in lower(append, "tpu", *arguments) and by_head not in lower(
        append, "cpu", *arguments
    )


def test_a_cache_is_the_same_however_its_heads_are_written() -> None:
    buffer, values = (
        jnp.arange(2 * 3 * 6 * 2.0).reshape(2, 3, 6, 2),
        -jnp.arange(1, 2 * 3 * 3 * 2 + 1.0).reshape(2, 3, 3, 2),
    )
    slots = jnp.array([[4, 5, 6], [0, 6, 6]])  # 6 is out of range, and dropped
    by_head = cache._set_by_head(buffer, slots, values)
    np.testing.assert_array_equal(by_head, cache._set_by_row(buffer, slots, values))
    np.testing.assert_array_equal(by_head[0, :, 4:], values[0, :, :2])
    np.testing.assert_array_equal(by_head[1, :, 1:], buffer[1, :, 1:])
