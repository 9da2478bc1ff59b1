"""Quantizing floats: against qwix, the range of the numbers, and the error."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwix._src.core import qarray

from specjax.models.params import Param, Within
from specjax.models.quantization import Form
from specjax.models.quantization.weights import dequantize_matrix, quantize_matrix, rows_of

FORMS = [
    Form("int8"),
    Form("int8", 16),
    Form("int4"),
    Form("int4", 16),
    Form("fp8"),
    Form("fp8", 16),
]
LARGEST = {"int8": 127, "int4": 7, "fp8": 448}


def weights(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_t(3, size=shape).astype(np.float32)


@pytest.mark.parametrize("group", [0, 16])
def test_numbers_and_scales_are_those_of_qwix(group) -> None:
    matrix = weights(64, 24)
    settings = qarray.HowToQuantize(
        qtype=jnp.int8,
        channelwise_axes=(1,),
        tiled_axes={0: group} if group else {},
        calibration_method="absmax",
    )
    theirs = qarray.quantize(jnp.asarray(matrix), settings)
    ours = quantize_matrix(matrix, Form("int8", group))
    assert theirs.zero_point is None and ours.zeros is None
    # qwix divides by 127.5, so that the largest weight is rounded to 128 and cut off at 127.
    np.testing.assert_allclose(
        np.asarray(theirs.scale) * 127.5 / 127, np.asarray(ours.scales), rtol=1e-6
    )
    values = np.moveaxis(ours.values, -1, 1).reshape(64, 24)
    exact = matrix / np.repeat(np.asarray(ours.scales), 64 // len(ours.scales), axis=0)
    assert np.abs(values - np.asarray(theirs.qvalue, np.int32)).max() <= 1
    np.testing.assert_array_equal(values, np.rint(exact))
    np.testing.assert_allclose(
        dequantize_matrix(ours),
        qarray.dequantize(theirs),
        rtol=0,
        atol=float(np.asarray(theirs.scale).max()),
    )


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_numbers_are_in_range_and_weights_change_little(form) -> None:
    matrix = weights(3, 64, 24)
    matrix[1, :, 5] = 0  # a column of zeros
    matrix[2, :, 7] *= 1e-30
    quantized = quantize_matrix(matrix, form)
    assert quantized.shape == matrix.shape and quantized.form == form
    groups = 64 // (form.group or 64)
    assert quantized.values.shape == (3, groups, 24, 64 // groups)
    assert quantized.scales.shape == (3, groups, 24)
    values = np.asarray(quantized.values).astype(np.float32)
    assert np.abs(values).max() == LARGEST[form.kind] and (np.asarray(quantized.scales) > 0).all()
    result = np.asarray(dequantize_matrix(quantized))
    assert not result[1, :, 5].any()
    error = np.abs(result - matrix)
    size = form.group or 64
    largest = np.repeat(np.abs(matrix).reshape(3, groups, size, 24).max(axis=2), size, axis=1)
    match form.kind:
        case "int8":  # half a step
            assert (error <= largest / 127 * 0.5001).all()
        case "int4":  # scales may be 30% smaller, so that the largest weights are cut off
            assert (error <= largest * 0.3001).all()
            plain = np.rint(matrix / np.where(largest, largest / 7, 1)) * largest / 7
            assert np.square(error).sum() < 0.95 * np.square(plain - matrix).sum()
        case "fp8":  # 3 bits behind the point, and below 2 ** -6 steps of 2 ** -9
            assert (error <= np.abs(matrix) / 16 + largest / 448 * 2**-10).all()


def test_weights_in_another_order_come_back_in_their_own() -> None:
    matrix = weights(2, 32, 8)
    rng = np.random.default_rng(1)
    order = np.stack([rng.permutation(32), rng.permutation(32)]).astype(np.int32)
    ordered = np.take_along_axis(matrix, order[..., None], axis=1)
    quantized = quantize_matrix(ordered, Form("int8", 8)).replace(order=order)
    assert quantized.form.is_ordered
    assert float(jnp.abs(dequantize_matrix(quantized) - matrix).max()) < np.abs(matrix).max() / 127
    second = jax.tree.map(lambda part: part[1], quantized)
    np.testing.assert_array_equal(dequantize_matrix(second), dequantize_matrix(quantized)[1])


def test_rows_of_an_embedding_are_its_outputs() -> None:
    table = weights(20, 16)
    quantized = quantize_matrix(table.T, Form("int8"))
    tokens = jnp.array([[3, 0], [19, 3]])
    np.testing.assert_array_equal(
        rows_of(quantized, tokens, jnp.float32), dequantize_matrix(quantized).T[tokens]
    )


@pytest.mark.parametrize(
    ("group", "inputs", "expected"),
    [(128, 256, 128), (128, 96, 32), (128, 36, 0), (128, 9, 0), (0, 9, 0)],
)
def test_groups_fit_the_inputs(group, inputs, expected) -> None:
    assert Form("int4", group).fitting(inputs).group == expected


def test_the_parts_of_a_matrix_are_declared_after_it() -> None:
    form = Form("int4", 16, has_zeros=True, is_ordered=True)
    param = Param(
        (4, 64, 8), ("experts", None, "mlp"), "up", is_product=True, within=Within(2, 16, 1, 2)
    )
    declared = form.declare(param)
    assert declared.form == form and declared.shape == (4, 64, 8)
    shapes = {
        role: getattr(declared, role).shape for role in ("values", "scales", "zeros", "order")
    }
    assert shapes == {
        "values": (4, 4, 8, 16),
        "scales": (4, 4, 8),
        "zeros": (4, 4, 8),
        "order": (4, 64),
    }
    assert declared.values.stored_shape == (4, 4, 16, 16)
    assert declared.zeros.stored_shape == (4, 4, 16)
    assert declared.values.axes == ("experts", None, "mlp", None)
    assert declared.order.axes == ("experts", None)
    whole = Form("int8").declare(
        Param((64, 8), ("heads", None), "o.weight", transposed=True, units=4, is_product=True)
    )
    assert whole.values.axes == (None, None, "heads") and whole.values.units == 4
    grouped = Form("int8", 8).declare(
        Param((64, 8), ("heads", None), "o.weight", transposed=True, units=4, is_product=True)
    )
    assert grouped.values.axes == ("heads", None, None) and grouped.values.units == 4


def test_zeros_are_taken_off_before_the_scale() -> None:
    quantized = quantize_matrix(weights(32, 8), Form("int8", 16))
    zeros = np.random.default_rng(1).integers(-3, 4, quantized.scales.shape).astype(np.int8)
    shifted = dequantize_matrix(quantized.replace(zeros=zeros))
    # [in, out]: a group is 16 neighbouring inputs.
    difference = np.repeat(zeros * np.asarray(quantized.scales), 16, axis=0)
    np.testing.assert_allclose(
        shifted, dequantize_matrix(quantized) - difference, rtol=1e-5, atol=1e-6
    )
