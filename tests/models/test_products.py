"""Products with quantized weights, against integers added up one by one, and floats."""

import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.lowering.topologies import compiler_options, cuda_directory, find_mesh
from specjax.models import products
from specjax.models.primitives import embedding_logits, linear, vocabulary_logits
from specjax.models.quantization import Form, QuantizedMatrix
from specjax.models.quantization.weights import dequantize_matrix, quantize_matrix, rows_of

FORMS = {
    "int8": Form("int8"),
    "w8a8": Form("int8", activations=8),
    "int8 in groups": Form("int8", group=16),
    "int4": Form("int4", group=16),
    "int4, w4a8": Form("int4", group=32, activations=8),
    "int4 in large groups": Form("int4", group=128),
}

SIZES = [(1, 64, 33), (2, 96, 1), (3, 1, 5), (5, 33, 7), (17, 257, 31)]
SIZES += [(1, 288, 1152), (2, 288, 1152), (1, 288, 1025), (5, 1056, 260), (1, 256, 2304)]
"""Rows, inputs and outputs of products.

On a CPU a group of 2^18 weights and more is the left operand. Several outputs are joined into one
if rows and outputs allow it.
"""


def matrix(form: Form, inputs: int, outputs: int, seed: int = 0) -> QuantizedMatrix:
    weights = np.random.default_rng(seed).normal(size=(inputs, outputs)).astype(np.float32)
    return jax.tree.map(jnp.asarray, quantize_matrix(weights, form.fitting(inputs)))


def states(rows: int, inputs: int, seed: int = 1) -> jax.Array:
    x = np.random.default_rng(seed).normal(size=(rows, inputs)).astype(np.float32)
    return jnp.asarray(x * np.exp2(np.random.default_rng(2).integers(-9, 9, size=(rows, 1))))


def by_hand(x: jax.Array, weight: QuantizedMatrix) -> np.ndarray:
    """Return the product, output by output and group by group.

    Sums are integers of any size. The scales are applied in float64.
    """
    values, scales = np.asarray(weight.values, np.int64), np.asarray(weight.scales, np.float64)
    zeros = np.zeros_like(scales, np.int64)
    if weight.zeros is not None:
        zeros = np.asarray(weight.zeros, np.int64)
    x = x if weight.order is None else x[:, weight.order]
    limbs, steps = jax.jit(products._limbs, static_argnums=1)(x, weight.activations)
    numbers = np.asarray(limbs, np.int64)
    if weight.activations == 16:
        numbers = numbers[: len(x)] * 256 + numbers[len(x) :]
    groups, outputs, size = values.shape
    result = np.zeros((len(x), outputs))
    for group in range(groups):
        inputs = numbers[:, group * size : (group + 1) * size]
        for output in range(outputs):
            weights = values[group, output] - zeros[group, output]
            result[:, output] += inputs @ weights * scales[group, output]
    return result * np.asarray(steps, np.float64)


@pytest.mark.parametrize("bits", [8, 16])
def test_rows_are_rounded_to_the_nearest_step_of_their_own(bits: int) -> None:
    x = states(9, 33)
    limbs, steps = (np.asarray(array, np.float64) for array in products._limbs(x, bits))
    numbers = limbs if bits == 8 else limbs[:9] * 256 + limbs[9:]
    largest = 127 if bits == 8 else 127 * 256 + 127
    np.testing.assert_array_equal(np.abs(numbers).max(axis=1), largest)
    np.testing.assert_allclose(numbers * steps, x, rtol=0, atol=float((steps / 2).max()) * 1.001)
    assert (np.abs(numbers * steps - x) <= steps / 2 * 1.001).all()


@pytest.mark.full
@pytest.mark.thorough_except(
    "1-64-33-int8",
    "1-64-33-w8a8",
    "1-64-33-int8 in groups",
    "1-64-33-int4",
    "1-64-33-int4, w4a8",
    "1-64-33-int4 in large groups",
    "2-96-1-int8",
    "2-96-1-w8a8",
    "3-1-5-int8 in groups",
    "5-33-7-int4",
    "17-257-31-int4, w4a8",
    "1-288-1152-int4 in large groups",
    "1-288-1025-int8",
    "5-1056-260-int8",
    "1-256-2304-int8",
)
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(("rows", "inputs", "outputs"), SIZES)
def test_sums_are_those_of_whole_numbers(form: Form, rows: int, inputs: int, outputs: int) -> None:
    weight, x = matrix(form, inputs, outputs), states(rows, inputs)
    result = np.asarray(jax.jit(products.quantized_product)(x, weight))
    expected = by_hand(x, weight)
    largest = np.abs(expected).max(axis=-1, keepdims=True)
    np.testing.assert_allclose(result / largest, expected / largest, rtol=0, atol=1e-6)


@pytest.mark.full
def test_with_zeros_and_an_order() -> None:
    rng = np.random.default_rng(3)
    weight = QuantizedMatrix(
        values=jnp.asarray(rng.integers(-8, 8, size=(4, 9, 8)), jnp.int8),
        scales=jnp.asarray(rng.uniform(0.01, 0.1, size=(4, 9)), jnp.float32),
        zeros=jnp.asarray(rng.integers(-8, 8, size=(4, 9)), jnp.int8),
        order=jnp.asarray(rng.permutation(32), jnp.int32),
        bits=4,
    )
    x = states(6, 32)
    np.testing.assert_allclose(
        products.quantized_product(x, weight), by_hand(x, weight), rtol=1e-5, atol=1e-4
    )
    np.testing.assert_allclose(
        products.quantized_product(x, weight), x @ dequantize_matrix(weight), rtol=1e-3, atol=0.05
    )


@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize(
    ("inputs", "outputs"), [(192, 512), (129, 65), (257, 1152), (1056, 260), (256, 2304)]
)
def test_a_row_gives_the_same_bits_among_any_number_of_rows(
    form: Form, inputs: int, outputs: int
) -> None:
    weight, x = matrix(form, inputs, outputs), states(64, inputs)
    bias = jnp.asarray(np.random.default_rng(4).normal(size=outputs), jnp.float32)
    run = jax.jit(lambda x: linear({"w": weight, "w_bias": bias}, "w", x))
    whole = np.asarray(run(x))
    for rows in range(1, 64) if inputs in (129, 192) else (1, 2, 3, 4, 5, 8, 31):
        np.testing.assert_array_equal(
            np.asarray(run(x[:rows])), whole[:rows], err_msg=f"{rows} rows"
        )
        np.testing.assert_array_equal(
            np.asarray(run(x[rows:])), whole[rows:], err_msg=f"the last {64 - rows} rows"
        )


def test_floats_do_not_give_the_same_bits() -> None:
    """The test above can fail: with weights in floats it would."""
    weight = jnp.asarray(np.random.default_rng(0).normal(size=(192, 512)), jnp.float32)
    x = states(64, 192)
    run = jax.jit(lambda x: linear({"w": weight}, "w", x))
    assert any(
        (np.asarray(run(x[:rows])) != np.asarray(run(x))[:rows]).any() for rows in range(1, 64)
    )


@pytest.mark.full
@pytest.mark.parametrize(("bits", "bound"), [(8, 2e-2), (16, 1e-4)])
def test_two_limbs_round_hardly_anything(bits: int, bound: float) -> None:
    weight, x = matrix(Form("int8", activations=bits), 512, 256), states(4, 512)
    exact = np.asarray(x, np.float64) @ np.asarray(dequantize_matrix(weight), np.float64)
    error = np.asarray(products.quantized_product(x, weight)) - exact
    assert np.sqrt(np.mean(error**2) / np.mean(exact**2)) < bound
    assert np.sqrt(np.mean(error**2) / np.mean(exact**2)) > bound / 100


def test_a_row_of_zeros_and_one_that_is_not_finite() -> None:
    weight = matrix(Form("int8"), 16, 8)
    x = jnp.zeros((2, 16)).at[1, 3].set(jnp.nan)
    result = np.asarray(products.quantized_product(x, weight))
    np.testing.assert_array_equal(result[0], 0)
    assert np.isnan(result[1]).all()


@pytest.mark.full
@pytest.mark.parametrize("form", [*FORMS.values(), Form("fp8")], ids=[*FORMS, "fp8"])
def test_where_the_device_converts_weights(form: Form) -> None:
    """TPUs and GPUs multiply in this way; here a CPU does."""
    weight, x = matrix(form, 64, 33), states(3, 64)
    for rows in (1, 3):
        result = products._by_converted(x[:rows], weight)
        np.testing.assert_allclose(
            result, x[:rows] @ dequantize_matrix(weight), rtol=1e-5, atol=1e-3
        )


@pytest.mark.parametrize("has_zeros", [False, True])
def test_sums_of_many_groups_are_added_up_in_pieces(monkeypatch, has_zeros: bool) -> None:
    weight, x = matrix(Form("int8", group=16), 15 * 16, 256), states(256, 15 * 16)
    if has_zeros:
        zeros = np.random.default_rng(3).integers(-8, 8, size=(15, 256))
        weight = replace(weight, zeros=jnp.asarray(zeros, jnp.int8))
    of_one = 256 * 256 * 4

    def run(limit: int) -> tuple[np.ndarray, int, dict[str, float]]:
        """Return the product, the temporary bytes, and the groups of the largest sums."""
        monkeypatch.setattr(products, "_SUMS_LIMIT", limit)
        traced = jax.jit(partial(products._by_converted)).trace(x, weight)
        compiled = traced.lower().compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        groups = {}
        for platform in ("cuda", "tpu"):
            lowered = traced.lower(lowering_platforms=(platform,)).as_text()
            shapes = re.findall(r"-> tensor<([\dx]+)xf32>", lowered)
            sizes = [np.prod([int(length) for length in shape.split("x")]) for shape in shapes]
            groups[platform] = max(sizes) * 4 / of_one
        return np.asarray(compiled(x, weight)), memory.temp_size_in_bytes, groups

    whole, _, groups = run(15 * of_one)
    assert groups == {"cuda": 15, "tpu": 15}
    # Pieces of 5, of 3 and of 1: neither 4 nor 2 divides 15, and one group is the least.
    for limit, together in ((5 * of_one, 5), (5 * of_one - 1, 3), (1, 1)):
        result, memory, groups = run(limit)
        np.testing.assert_allclose(result, whole, rtol=0, atol=1e-6 * np.abs(whole).max())
        assert groups == {"cuda": together, "tpu": 15}
        assert memory < (together + 3) * of_one


@pytest.mark.thorough
@pytest.mark.skipif(not cuda_directory(), reason="needs pip install 'specjax[compile-cuda]'")
def test_a_gpu_reserves_little_for_the_sums_of_many_groups(monkeypatch) -> None:
    """The compiler's figures for 512 rows and a matrix of 5120 x 17408 in groups of 16."""
    mesh, _ = find_mesh("h100", 1, 1)
    place = jax.sharding.NamedSharding(mesh, jax.P())
    shapes = jax.tree.map(
        lambda part: jax.ShapeDtypeStruct(*part, sharding=place),
        (
            ((512, 5120), jnp.bfloat16),
            QuantizedMatrix(((320, 17408, 16), jnp.int8), ((320, 17408), jnp.float32)),
        ),
        is_leaf=lambda part: type(part) is tuple and type(part[0][0]) is int,
    )

    def temporary_bytes() -> int:
        lowered = jax.jit(partial(products._by_converted)).lower(*shapes)
        memory = lowered.compile(dict(compiler_options(mesh))).memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    assert temporary_bytes() < 0.3e9
    monkeypatch.setattr(products, "_SUMS_LIMIT", 2**40)
    assert temporary_bytes() > 11e9


@pytest.mark.full
def test_the_derivative_is_that_of_floats() -> None:
    weight, x = matrix(Form("int8"), 32, 16), states(3, 32)
    output_gradient = jnp.asarray(np.random.default_rng(5).normal(size=(3, 16)), jnp.float32)
    gradient = jax.grad(lambda x: jnp.sum(linear({"w": weight}, "w", x) * output_gradient))(x)
    np.testing.assert_allclose(
        gradient, output_gradient @ dequantize_matrix(weight).T, rtol=1e-5, atol=1e-5
    )


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_embedding_is_looked_up_and_multiplied_with(form: Form) -> None:
    rng = np.random.default_rng(6)
    floats = rng.normal(size=(24, 64)).astype(np.float32)
    table = jax.tree.map(jnp.asarray, quantize_matrix(floats.T, form.fitting(64)))
    groups = table.values.shape[0]
    zeros = jnp.asarray(rng.integers(-3, 3, size=(groups, 24)), jnp.int8)
    order = jnp.asarray(rng.permutation(64), jnp.int32)
    for embedding in (table, replace(table, zeros=zeros), replace(table, zeros=zeros, order=order)):
        dequantized = np.asarray(dequantize_matrix(embedding)).T
        np.testing.assert_allclose(
            rows_of(embedding, jnp.array([[3, 5]]), jnp.float32), dequantized[[[3, 5]]], rtol=1e-6
        )
        x = states(2, 64)[:, None]
        np.testing.assert_array_equal(
            embedding_logits(x, embedding), vocabulary_logits(x, embedding)
        )
        if form.activations == 16:
            np.testing.assert_allclose(
                embedding_logits(x, embedding),
                x @ dequantized.T,
                rtol=1e-3,
                atol=2e-2 * float(jnp.abs(x).max()),
            )


def test_weights_that_are_not_finite_stay_so() -> None:
    floats = np.ones((32, 3), np.float32)
    floats[4, 1] = np.nan
    for form in (Form("int8"), Form("int4", group=16), Form("fp8")):
        quantized = jax.tree.map(jnp.asarray, quantize_matrix(floats, form))
        dequantized = np.asarray(dequantize_matrix(quantized))
        assert np.isnan(dequantized[4, 1]) and np.isfinite(dequantized[:, [0, 2]]).all()


@pytest.mark.parametrize(
    ("inputs", "outputs", "sums"), [(256, 512, "s32[2,512]"), (768, 2304, "s32[1152,4]")]
)
def test_a_cpu_converts_no_weights(inputs: int, outputs: int, sums: str) -> None:
    """The compiled program has no floats of the size of the weights."""
    weight = matrix(Form("int8"), inputs, outputs)
    lowered = jax.jit(products.quantized_product).lower(states(1, inputs), weight)
    compiled = lowered.compile().as_text()
    sizes = [
        np.prod([int(length) for length in shape.split(",")])
        for shape in re.findall(r"f32\[([\d,]+)\]", compiled)
    ]
    assert sizes and max(sizes) < inputs * outputs
    assert sums in compiled


@pytest.mark.parametrize(
    ("sharded", "outputs"), [("inputs", 512), ("outputs", 512), ("outputs", 514), ("outputs", 516)]
)
def test_joined_outputs_are_cut_where_the_weights_are(sharded: str, outputs: int) -> None:
    """Devices of a mesh of CPUs do not exchange weights, and the sums are the same."""
    mesh = jax.make_mesh((2,), ("model",), axis_types=(jax.sharding.AxisType.Auto,))
    rng = np.random.default_rng(0)
    rows = rng.integers(-127, 128, (1, 1024), np.int8)
    values = rng.integers(-127, 128, (outputs, 1024), np.int8)
    spec = jax.P(None, "model") if sharded == "inputs" else jax.P("model", None)
    placed = jax.device_put(values, jax.sharding.NamedSharding(mesh, spec))
    compiled = jax.jit(products._sums_on_cpu).lower(rows, placed).compile()
    np.testing.assert_array_equal(compiled(rows, placed), rows.astype(int) @ values.T.astype(int))
    collectives = [
        line
        for line in compiled.as_text().splitlines()
        if "all-" in line or "collective-permute" in line
    ]
    assert not [line for line in collectives if "s8[" in line]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_weights_are_read_where_they_lie(rows: int) -> None:
    """The compiled program rearranges no array as large as the weights.

    It did before, and took five times as long.
    """
    x, weights = jnp.zeros((rows, 768), jnp.int8), jnp.zeros((2304, 768), jnp.int8)
    compiled = jax.jit(products._sums_on_cpu).lower(x, weights).compile().as_text() or ""
    arrays = [
        line.split(" = ")[1]
        for line in compiled[compiled.index("ENTRY") :].splitlines()
        if " = s8[" in line
    ]
    shapes = [line[3 : line.index("]")].split(",") for line in arrays]
    large = [
        line
        for line, shape in zip(arrays, shapes, strict=True)
        if np.prod([int(length) for length in shape]) >= weights.size
    ]
    assert large
    assert all("parameter(" in line or " bitcast(" in line for line in large)
    # The weights stand on the left. For three rows that needs the barrier.
    assert {1: "s32[576,4]", 2: "s32[1152,4]", 3: "s32[2304,3]"}[rows] in compiled
