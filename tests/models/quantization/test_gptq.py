"""GPTQ against a slow version of itself, and the moments of the inputs of matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.products import product
from specjax.models.quantization import Form, QuantizedMatrix
from specjax.models.quantization.gptq import DAMPING, Watched, gptq
from specjax.models.quantization.weights import dequantize_matrix, quantize_matrix, rounded

FORMS = [Form("int8"), Form("int8", 16), Form("int4"), Form("int4", 16), Form("fp8")]
INPUTS, OUTPUTS = 48, 24


def weights(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_t(3, size=(INPUTS, OUTPUTS)).astype(np.float32)


def rows(seed: int = 1, count: int = 400) -> np.ndarray:
    """Return inputs that depend on each other, as those of a layer do.

    They are sums of a third as many numbers, with a little noise.
    """
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(count, INPUTS // 3)) @ rng.normal(size=(INPUTS // 3, INPUTS))
    return (common + 0.3 * rng.normal(size=(count, INPUTS))).astype(np.float32)


def moments(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x.T @ x)


def lost(x: np.ndarray, floats: np.ndarray, quantized: QuantizedMatrix) -> float:
    error = floats - np.asarray(dequantize_matrix(quantized), np.float64)
    return float(np.square(x.astype(np.float64) @ error).sum())


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_number_is_the_nearest_after_what_those_before_it_lost(form) -> None:
    """The reference is Optimal Brain Surgeon (GPTQ's equations 2 and 3).

    The later weights make up for an error by the inverse of their moments, which is computed anew
    for every input. The reference takes GPTQ's choices, so that a near tie does not lead the two
    apart.
    """
    floats, x = weights(), rows()
    quantized = gptq(jnp.asarray(floats), moments(x), form)
    size = form.group or INPUTS
    by_group = np.asarray(quantized.values.astype(jnp.float32), np.float64)
    values = by_group.swapaxes(1, 2).reshape(INPUTS, OUTPUTS)
    scales = np.repeat(np.asarray(quantized.scales, np.float64), size, axis=0)
    second = x.T.astype(np.float64) @ x
    second += DAMPING * second.trace() / INPUTS * np.eye(INPUTS)
    rest = floats.astype(np.float64)
    for row in range(INPUTS):
        if row % size == 0:
            expected = quantize_matrix(
                rest[row : row + size].astype(np.float32), Form(form.kind)
            ).scales[0]
            np.testing.assert_allclose(scales[row], expected, rtol=1e-4)
        exact = rest[row] / scales[row]
        # float32 has 24 bits, and the numbers of a column are sums of up to 48 products.
        low, high = (
            np.asarray(rounded((exact + shift)[:, None], np.ones(OUTPUTS), form)[:, 0], np.float64)
            for shift in (-1e-3, 1e-3)
        )
        assert ((low <= values[row]) & (values[row] <= high)).all(), row
        inverse = np.linalg.inv(second[row:, row:])
        error = rest[row] - values[row] * scales[row]
        rest[row:] -= np.outer(inverse[:, 0], error / inverse[0, 0])


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_change_less_than_with_the_nearest_numbers(form) -> None:
    x = rows(count=800)
    calibration, held_out = x[:400], x[400:]
    floats = weights()
    by_gptq = gptq(jnp.asarray(floats), moments(calibration), form)
    nearest = quantize_matrix(floats, form)
    assert by_gptq.form == nearest.form and by_gptq.values.shape == nearest.values.shape
    for inputs in (calibration, held_out):
        assert lost(inputs, floats, by_gptq) < lost(inputs, floats, nearest)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_where_nothing_was_seen_numbers_are_the_nearest(form) -> None:
    floats = weights()
    expected = quantize_matrix(floats, form)
    quantized = gptq(jnp.asarray(floats), jnp.zeros((INPUTS, INPUTS)), form)
    np.testing.assert_allclose(quantized.scales, expected.scales, rtol=1e-6)
    exact = floats / np.repeat(expected.scales, form.group or INPUTS, axis=0)
    values = (
        np.asarray(quantized.values.astype(jnp.float32)).swapaxes(1, 2).reshape(INPUTS, OUTPUTS)
    )
    low, high = (
        np.asarray(rounded(exact + shift, np.ones(INPUTS, np.float32), form), np.float32)
        for shift in (-1e-4, 1e-4)
    )
    assert ((low <= values) & (values <= high)).all()


def test_several_matrices_are_each_as_alone() -> None:
    form, seeds = Form("int4", 16), [0, 1, 2]
    all_moments = jnp.stack([moments(rows(seed)) for seed in seeds])
    together = gptq(jnp.stack([weights(seed) for seed in seeds]), all_moments, form)
    for seed in seeds:
        alone = gptq(jnp.asarray(weights(seed)), all_moments[seed], form)
        from_stack = jax.tree.map(lambda part, seed=seed: part[seed], together)
        assert jax.tree.all(jax.tree.map(np.array_equal, from_stack, alone))


def test_an_input_that_is_always_zero_changes_nothing_for_others() -> None:
    form, floats, x = Form("int4"), weights(), rows()
    x[:, 5] = 0
    quantized = gptq(jnp.asarray(floats), moments(x), form)
    assert np.isfinite(np.asarray(dequantize_matrix(quantized))).all()
    floats[5] = -floats[5]  # of the same size, so that scales stay
    changed = gptq(jnp.asarray(floats), moments(x), form)
    np.testing.assert_array_equal(
        np.delete(dequantize_matrix(quantized), 5, axis=0),
        np.delete(dequantize_matrix(changed), 5, axis=0),
    )


def test_moments_come_out_of_scans_and_from_behind_each_other() -> None:
    """Two products follow each other in a compiled scan over stacked matrices, as for experts.

    The products are of float32 and of bfloat16.
    """
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(3, 4, 5)), rng.normal(size=(3, 5, 2))
    x = rng.normal(size=(7, 4))

    def total(first_moments: jax.Array, second_moments: jax.Array, dtype) -> jax.Array:
        def add(sums, matrices):
            inner = jnp.tanh(product(jnp.asarray(x, dtype), matrices[0]))
            return sums + product(inner, matrices[1]).sum().astype(jnp.float32), None

        stacks = [
            Watched(jnp.asarray(first, dtype), first_moments),
            Watched(jnp.asarray(second, dtype), second_moments),
        ]
        return jax.lax.scan(add, jnp.float32(0), stacks)[0]

    empty = [Watched.of(jnp.asarray(stack)).moments for stack in (first, second)]
    for dtype, bound in ((jnp.float32, 1e-5), (jnp.bfloat16, 2**-6)):
        result = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=2)(*empty, dtype)
        inner = [np.tanh(x @ matrix) for matrix in first]
        expected = np.stack([x.T @ x] * 3), np.stack([states.T @ states for states in inner])
        for ours, theirs in zip(result, expected, strict=True):
            assert ours.dtype == jnp.float32
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound * np.abs(theirs).max())
