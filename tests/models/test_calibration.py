"""Calibrated weights: the inputs of each layer, models of every kind, and the gain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.errors import InputError
from specjax.models import primitives
from specjax.models.calibration import WINDOW, WINDOWS, calibrate, windows
from specjax.models.products import product
from specjax.models.quantization import Form, is_quantized
from specjax.models.quantization.gptq import gptq
from specjax.models.quantization.schemes import Scheme
from specjax.models.transformer import Target
from specjax.sharding import make_mesh
from tests.conftest import BESIDE_ATTENTION, HYBRID, LAYERED, MIXTURES, tiny_target
from tests.models.families import zoo

TOKENS = np.random.default_rng(0).integers(0, 16, size=(6, 40))
INT4 = Scheme(Form("int4", group=16), None)


def moments_of(target: Target, tokens: np.ndarray, monkeypatch) -> dict[int, np.ndarray]:
    """Return the moments of all inputs of each matrix, by the matrix's ``id``.

    The model runs operation by operation.
    """
    moments: dict[int, np.ndarray] = {}

    def record(x, weight):
        rows = np.asarray(x, np.float64)
        moments[id(weight)] = moments.get(id(weight), 0) + rows.T @ rows
        return product(x, weight)

    with monkeypatch.context() as patch, jax.disable_jit():
        patch.setattr(primitives, "product", record)
        target.forward(jnp.asarray(tokens))
    return moments


def quantized_up_to(target: Target, quantized: Target, layer: int) -> Target:
    """Return ``target`` with the layers of ``quantized`` before ``layer``."""
    layers = [*quantized.params["layers"][:layer], *target.params["layers"][layer:]]
    return target.replace(params={**target.params, "layers": layers})


@pytest.mark.full
@pytest.mark.thorough_except("False")
@pytest.mark.parametrize("bias", [False, True])
def test_each_layer_sees_what_the_quantized_ones_before_it_hand_on(monkeypatch, bias) -> None:
    target = tiny_target(hidden_size=32, intermediate_size=48, qkv_bias=bias, tie_embeddings=bias)
    quantized = calibrate(target, INT4, TOKENS)
    for layer, params in enumerate(target.params["layers"]):
        moments = moments_of(quantized_up_to(target, quantized, layer), TOKENS, monkeypatch)
        nearest = target.quantize(INT4).params["layers"][layer]
        matrices = {
            name: value
            for name, value in quantized.params["layers"][layer].items()
            if is_quantized(value)
        }
        assert set(matrices) == {"q", "k", "v", "o", "gate", "up", "down"}
        for name, matrix in matrices.items():
            inputs = jnp.asarray(moments[id(params[name])], jnp.float32)
            expected = gptq(params[name], inputs, matrix.form)
            np.testing.assert_allclose(matrix.scales, expected.scales, rtol=1e-4)
            # Sums in float32 have another order. A near tie may be rounded the other way, which
            # changes the rest of its column.
            columns = (np.asarray(matrix.values) == np.asarray(expected.values)).all(axis=(0, 2))
            assert columns.mean() > 0.9, (layer, name)
            assert not np.array_equal(matrix.values, nearest[name].values)


MODELS = {
    "plain": {},
    "tied": {"tie_embeddings": True, "qkv_bias": True},
    "hybrid": HYBRID,
    "beside attention": BESIDE_ATTENTION,
    **LAYERED,
    **MIXTURES,
}


OFTEN = ("hybrid", "beside attention", "sharing", "qwen3_moe")


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name not in OFTEN)) for name in MODELS],
)
def test_models_of_every_kind_come_closer_to_what_they_were_in_floats(name) -> None:
    """The squared error of the hidden states that enter the head is smaller, with 4 bits.

    It is measured on the text of the calibration itself, with random models.
    """
    target = tiny_target(**MODELS[name], hidden_size=32, scale=8.0)
    scheme = Scheme(Form("int4"), None)
    nearest, calibrated = target.quantize(scheme), calibrate(target, scheme, TOKENS)
    assert jax.tree.structure(calibrated) == jax.tree.structure(nearest)
    jax.tree.map(
        lambda a, b: np.testing.assert_equal((a.shape, a.dtype), (b.shape, b.dtype)),
        calibrated,
        nearest,
    )
    tokens = jnp.asarray(TOKENS)
    expected = target.forward(tokens)[0].hidden
    errors = [
        float(jnp.square(model.forward(tokens)[0].hidden - expected).mean())
        for model in (nearest, calibrated)
    ]
    assert errors[1] < errors[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.filterwarnings("ignore:.* matrices of experts without a token")
def test_every_family_comes_closer_to_what_it_was_in_floats(name, tmp_path) -> None:
    """The squared error is smaller for a model of each family, as transformers makes it."""
    zoo.save(name, tmp_path)
    target = Target.from_pretrained(tmp_path, dtype=np.float32)
    tokens = jnp.asarray(TOKENS % zoo.VOCABULARY)
    scheme = Scheme(Form("int4"), None)
    expected = target.forward(tokens)[0].hidden
    nearest, calibrated = (
        float(jnp.square(model.forward(tokens)[0].hidden - expected).mean())
        for model in (target.quantize(scheme), calibrate(target, scheme, np.asarray(tokens)))
    )
    assert calibrated < nearest


def test_windows_are_spread_over_all_texts() -> None:
    texts = [list(range(1000)), list(range(1000, 5 * WINDOW))]
    np.testing.assert_array_equal(windows(texts).reshape(-1), np.arange(5 * WINDOW))
    many = windows([list(range(2 * WINDOWS * WINDOW + 7))])
    assert many.shape == (WINDOWS, WINDOW)
    assert many[0, 0] == 0 and many[-1, -1] == 2 * WINDOWS * WINDOW + 6
    assert (np.diff(many, axis=1) == 1).all() and (np.diff(many[:, 0]) >= 2 * WINDOW).all()
    assert windows([[1, 2], [3]]).tolist() == [[1, 2, 3]]
    assert windows([]).size == 0


@pytest.mark.full
def test_experts_that_no_token_chose_are_said_and_rounded_to_the_nearest_numbers() -> None:
    target = tiny_target(**MIXTURES["qwen3_moe"], hidden_size=32, num_layers=1)
    # With equal scores the first two experts are chosen.
    layer = target.params["layers"][0] | {"router": jnp.zeros((32, 8))}
    target = target.replace(params={**target.params, "layers": [layer]})
    with pytest.warns(UserWarning, match="18 matrices of experts without a token of the text"):
        quantized = calibrate(target, INT4, TOKENS)
    calibrated, nearest = quantized.params["layers"][0], target.quantize(INT4).params["layers"][0]
    for name in ("experts_gate", "experts_up", "experts_down"):
        is_nearest = np.asarray(calibrated[name].values) == np.asarray(nearest[name].values)
        np.testing.assert_array_equal(is_nearest.all(axis=(1, 2, 3)), np.arange(8) >= 2)


@pytest.mark.full
def test_what_cannot_be_calibrated_is_refused() -> None:
    target = tiny_target()
    with pytest.raises(
        InputError, match="tokens: 8 tokens, fewer than the 24 inputs of the widest matrix"
    ):
        calibrate(target, "int4", TOKENS[:1, :8])
    with pytest.raises(InputError, match="weights='int3': must be one of"):
        calibrate(target, "int3", TOKENS)
    with pytest.raises(InputError, match="quantized already"):
        calibrate(target.quantize("int8"), "int4", TOKENS)
    with pytest.raises(InputError, match="is a part of a target"):
        calibrate(target.part((1, 2)), "int4", TOKENS)
    with pytest.raises(InputError, match="target: it is on a mesh"):
        calibrate(target.replace(mesh=make_mesh(1, 2)), "int4", TOKENS)
    first, second = target.params["layers"]
    overflowing = [first, second | {"up": second["up"] * jnp.inf}]
    with pytest.raises(InputError, match="the inputs of layer 1 are not finite"):
        calibrate(target.replace(params={**target.params, "layers": overflowing}), "int4", TOKENS)


@pytest.mark.thorough
@pytest.mark.parametrize("weights", ["int4", "int8", "fp8"])
def test_a_trained_model_loses_less_on_text_that_it_was_not_calibrated_on(weights) -> None:
    import argparse
    import heapq
    import inspect

    from specjax import text
    from specjax.assets import embedded

    target = Target.from_pretrained("embedded", dtype=jnp.float32)
    tokenizer = text.load_tokenizer(embedded("target"))
    calibration, evaluation = (
        np.asarray(text.encode(tokenizer, inspect.getsource(module)))
        for module in (argparse, heapq)
    )
    calibrated = calibrate(target, weights, windows([calibration.tolist()])[:32])
    held_out = jnp.asarray(evaluation[: len(evaluation) // 256 * 256].reshape(-1, 256))

    @jax.jit
    def divergence(quantized: Target) -> jax.Array:
        """Return the divergence of the next token from the model in floats, in nats."""
        log_p, log_q = (
            jax.nn.log_softmax(model.forward(held_out)[0].logits) for model in (target, quantized)
        )
        return jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1))

    assert float(divergence(calibrated)) < float(divergence(target.quantize(weights)))


@pytest.mark.thorough
def test_a_window_may_be_longer_than_a_pass() -> None:
    target = tiny_target(max_positions=8192)
    tokens = np.resize(np.arange(11), (1, 5000))
    assert is_quantized(calibrate(target, "int8", tokens).params["layers"][0]["down"])
