"""Quantized weights by what the layers read: what is seen, by which layers, in models of every kind, and what it gains."""

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
from tests.conftest import HYBRID, LAYERED, MIXTURES, tiny_target
from tests.models.families import zoo

TOKENS = np.random.default_rng(0).integers(0, 16, size=(6, 40))
INT4 = Scheme(Form("int4", group=16), None)


def moments_of(target: Target, tokens: np.ndarray, monkeypatch) -> dict[int, np.ndarray]:
    """By the identity of a matrix, the moments of all that it is multiplied with, as the model runs operation by operation."""
    found: dict[int, np.ndarray] = {}

    def record(x, weight):
        rows = np.asarray(x, np.float64)
        found[id(weight)] = found.get(id(weight), 0) + rows.T @ rows
        return product(x, weight)

    with monkeypatch.context() as patch, jax.disable_jit():
        patch.setattr(primitives, "product", record)
        target.forward(jnp.asarray(tokens))
    return found


def quantized_up_to(target: Target, quantized: Target, layer: int) -> Target:
    """The layers before ``layer`` are those of ``quantized``."""
    layers = [*quantized.params["layers"][:layer], *target.params["layers"][layer:]]
    return target.replace(params={**target.params, "layers": layers})


@pytest.mark.full
@pytest.mark.parametrize("bias", [False, True])
def test_each_layer_sees_what_the_quantized_ones_before_it_hand_on(monkeypatch, bias) -> None:
    target = tiny_target(hidden_size=32, intermediate_size=48, qkv_bias=bias, tie_embeddings=bias)
    quantized = calibrate(target, INT4, TOKENS)
    for layer, params in enumerate(target.params["layers"]):
        seen = moments_of(quantized_up_to(target, quantized, layer), TOKENS, monkeypatch)
        matrices = {
            name: value
            for name, value in quantized.params["layers"][layer].items()
            if is_quantized(value)
        }
        assert set(matrices) == {"q", "k", "v", "o", "gate", "up", "down"}
        for name, found in matrices.items():
            expected = gptq(
                params[name], jnp.asarray(seen[id(params[name])], jnp.float32), found.form
            )
            np.testing.assert_allclose(found.scales, expected.scales, rtol=1e-4)
            # sums of float32 in another order: a near tie may part, and then what follows from it in its column
            columns = (np.asarray(found.values) == np.asarray(expected.values)).all(axis=(0, 2))
            assert columns.mean() > 0.9, (layer, name)
            assert not np.array_equal(
                found.values, target.quantize(INT4).params["layers"][layer][name].values
            )


MODELS = {
    "plain": {},
    "tied": {"tie_embeddings": True, "qkv_bias": True},
    "hybrid": HYBRID,
    **LAYERED,
    **MIXTURES,
}


OFTEN = ("hybrid", "sharing", "qwen3_moe")


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.thorough] * (name not in OFTEN)) for name in MODELS],
)
def test_models_of_every_kind_come_closer_to_what_they_were_in_floats(name) -> None:
    """On the text itself, of random models: the squared error of what enters the head, with 4 bits."""
    target = tiny_target(**MODELS[name], hidden_size=32, scale=8.0)
    scheme = Scheme(Form("int4"), None)
    nearest, calibrated = target.quantize(scheme), calibrate(target, scheme, TOKENS)
    assert jax.tree.structure(calibrated) == jax.tree.structure(nearest)
    jax.tree.map(
        lambda one, other: np.testing.assert_equal(
            (one.shape, one.dtype), (other.shape, other.dtype)
        ),
        calibrated,
        nearest,
    )
    tokens = jnp.asarray(TOKENS)
    expected = target.forward(tokens)[0].hidden
    errors = [
        float(jnp.square(each.forward(tokens)[0].hidden - expected).mean())
        for each in (nearest, calibrated)
    ]
    assert errors[1] < errors[0]


@pytest.mark.thorough
@pytest.mark.parametrize("name", zoo.MODELS)
@pytest.mark.filterwarnings("ignore:.* matrices of experts without a token")
def test_every_family_comes_closer_to_what_it_was_in_floats(name, tmp_path) -> None:
    """As above, one model of each, such as transformers makes it."""
    zoo.save(name, tmp_path)
    target, tokens = (
        Target.from_pretrained(tmp_path, dtype=np.float32),
        jnp.asarray(TOKENS % zoo.VOCABULARY),
    )
    scheme = Scheme(Form("int4"), None)
    expected = target.forward(tokens)[0].hidden
    nearest, calibrated = (
        float(jnp.square(each.forward(tokens)[0].hidden - expected).mean())
        for each in (target.quantize(scheme), calibrate(target, scheme, np.asarray(tokens)))
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
    alike = target.params["layers"][0] | {
        "router": jnp.zeros((32, 8))
    }  # so the first two are chosen
    target = target.replace(params={**target.params, "layers": [alike]})
    with pytest.warns(UserWarning, match="18 matrices of experts without a token of the text"):
        quantized = calibrate(target, INT4, TOKENS)
    found, nearest = quantized.params["layers"][0], target.quantize(INT4).params["layers"][0]
    for name in ("experts_gate", "experts_up", "experts_down"):
        same = (np.asarray(found[name].values) == np.asarray(nearest[name].values)).all(
            axis=(1, 2, 3)
        )
        np.testing.assert_array_equal(same, np.arange(8) >= 2)


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
    of_text, others = (
        np.asarray(text.encode(tokenizer, inspect.getsource(each))) for each in (argparse, heapq)
    )
    calibrated = calibrate(target, weights, windows([of_text.tolist()])[:32])
    held = jnp.asarray(others[: len(others) // 256 * 256].reshape(-1, 256))

    @jax.jit
    def divergence(quantized: Target) -> jax.Array:
        """From the model in floats, of the next token, in nats."""
        floats, found = (
            jax.nn.log_softmax(each.forward(held)[0].logits) for each in (target, quantized)
        )
        return jnp.mean(jnp.sum(jnp.exp(floats) * (floats - found), axis=-1))

    assert float(divergence(calibrated)) < float(divergence(target.quantize(weights)))


@pytest.mark.full
def test_a_window_may_be_longer_than_a_pass() -> None:
    target = tiny_target(max_positions=8192)
    tokens = np.resize(np.arange(11), (1, 5000))
    assert is_quantized(calibrate(target, "int8", tokens).params["layers"][0]["down"])
