"""GPTQ beside what it should do, written down slowly, and the moments of what a matrix is multiplied with."""

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
    """Inputs that follow from each other, as those of a layer do: sums of a third as many, and a little of their own."""
    rng = np.random.default_rng(seed)
    common = rng.normal(size=(count, INPUTS // 3)) @ rng.normal(size=(INPUTS // 3, INPUTS))
    return (common + 0.3 * rng.normal(size=(count, INPUTS))).astype(np.float32)


def moments(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x.T @ x)


def lost(x: np.ndarray, floats: np.ndarray, quantized: QuantizedMatrix) -> float:
    return float(
        np.square(
            x.astype(np.float64) @ (floats - np.asarray(dequantize_matrix(quantized), np.float64))
        ).sum()
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_number_is_the_nearest_after_what_those_before_it_lost(form) -> None:
    """Optimal Brain Surgeon (GPTQ's equations 2 and 3): the rest makes up for an error by the inverse of its own moments, found
    anew for every input. Its choices are GPTQ's, so that one near tie does not lead the two apart.
    """
    floats, x = weights(), rows()
    quantized = gptq(jnp.asarray(floats), moments(x), form)
    size = form.group or INPUTS
    values = (
        np.asarray(quantized.values.astype(jnp.float32), np.float64)
        .swapaxes(1, 2)
        .reshape(INPUTS, OUTPUTS)
    )
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
        wanted = rest[row] / scales[row]
        # float32 has 24 bits, and the numbers of a column are sums of up to 48 products
        near = [
            rounded((wanted + shift)[:, None], np.ones(OUTPUTS), form)[:, 0]
            for shift in (-1e-3, 1e-3)
        ]
        low, high = (np.asarray(each, np.float64) for each in near)
        assert ((low <= values[row]) & (values[row] <= high)).all(), row
        inverse = np.linalg.inv(second[row:, row:])
        rest[row:] -= np.outer(
            inverse[:, 0], (rest[row] - values[row] * scales[row]) / inverse[0, 0]
        )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_products_change_less_than_with_the_nearest_numbers(form) -> None:
    x = rows(count=800)
    seen, others = x[:400], x[400:]
    floats = weights()
    by_gptq, nearest = gptq(jnp.asarray(floats), moments(seen), form), quantize_matrix(floats, form)
    assert by_gptq.form == nearest.form and by_gptq.values.shape == nearest.values.shape
    for each in (seen, others):  # what it was chosen by, and more of the same kind
        assert lost(each, floats, by_gptq) < lost(each, floats, nearest)


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_where_nothing_was_seen_numbers_are_the_nearest(form) -> None:
    floats = weights()
    expected = quantize_matrix(floats, form)
    found = gptq(jnp.asarray(floats), jnp.zeros((INPUTS, INPUTS)), form)
    np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-6)
    exact = floats / np.repeat(expected.scales, form.group or INPUTS, axis=0)
    values = np.asarray(found.values.astype(jnp.float32)).swapaxes(1, 2).reshape(INPUTS, OUTPUTS)
    low, high = (
        np.asarray(rounded(exact + shift, np.ones(INPUTS, np.float32), form), np.float32)
        for shift in (-1e-4, 1e-4)
    )
    assert ((low <= values) & (values <= high)).all()


def test_several_matrices_are_each_as_alone() -> None:
    form, many = Form("int4", 16), [0, 1, 2]
    seen = jnp.stack([moments(rows(seed)) for seed in many])
    together = gptq(jnp.stack([weights(seed) for seed in many]), seen, form)
    for seed in many:
        alone = gptq(jnp.asarray(weights(seed)), seen[seed], form)
        assert jax.tree.all(
            jax.tree.map(
                lambda one, other, seed=seed: np.array_equal(one[seed], other), together, alone
            )
        )


def test_an_input_that_is_always_zero_changes_nothing_for_others() -> None:
    form, floats, x = Form("int4"), weights(), rows()
    x[:, 5] = 0
    quantized = gptq(jnp.asarray(floats), moments(x), form)
    assert np.isfinite(np.asarray(dequantize_matrix(quantized))).all()
    floats[5] = -floats[5]  # of the same size, so that scales stay
    other = gptq(jnp.asarray(floats), moments(x), form)
    np.testing.assert_array_equal(
        np.delete(dequantize_matrix(quantized), 5, axis=0),
        np.delete(dequantize_matrix(other), 5, axis=0),
    )


def test_moments_come_out_of_scans_and_from_behind_each_other() -> None:
    """Two products in a row inside of a compiled scan over stacked matrices, as experts are run; of bfloat16 too."""
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(3, 4, 5)), rng.normal(size=(3, 5, 2))
    x = rng.normal(size=(7, 4))

    def total(of_first: jax.Array, of_second: jax.Array, dtype) -> jax.Array:
        def add(sums, both):
            inner = jnp.tanh(product(jnp.asarray(x, dtype), both[0]))
            return sums + product(inner, both[1]).sum().astype(jnp.float32), None

        stacks = [
            Watched(jnp.asarray(each, dtype), seen)
            for each, seen in ((first, of_first), (second, of_second))
        ]
        return jax.lax.scan(add, jnp.float32(0), stacks)[0]

    none = [Watched.of(jnp.asarray(each)).moments for each in (first, second)]
    for dtype, bound in ((jnp.float32, 1e-5), (jnp.bfloat16, 2**-6)):
        found = jax.jit(jax.grad(total, argnums=(0, 1)), static_argnums=2)(*none, dtype)
        inner = [np.tanh(x @ each) for each in first]
        expected = np.stack([x.T @ x] * 3), np.stack([each.T @ each for each in inner])
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == jnp.float32
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=bound * np.abs(theirs).max())
