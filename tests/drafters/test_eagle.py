"""Compare EAGLE-1 with a slow version of its description in NumPy, and test its checkpoints."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from specjax.drafters import Eagle
from specjax.drafts.shapes import Chain
from specjax.models.fields import CheckpointError
from specjax.training.objectives.unrolling import unroll
from tests.conftest import tiny_target


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return weight * x / np.sqrt(np.mean(x * x) + 1e-5)


def turned(x: np.ndarray, position: int) -> np.ndarray:
    """Return heads ``x [heads, d]`` with RoPE of theta 10000 at ``position``."""
    half = x.shape[-1] // 2
    angle = position / 10000 ** (np.arange(half) / half)
    first, second = x[:, :half], x[:, half:]
    return np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            second * np.cos(angle) + first * np.sin(angle),
        ],
        axis=1,
    )


def slow_states(
    tensors: dict[str, np.ndarray], states: np.ndarray, embedded: np.ndarray
) -> np.ndarray:
    """Return the state at each pair, by a Python loop over positions and heads.

    ``tensors`` are the ones of a published checkpoint.
    """
    layer = {
        name.removeprefix("layers.0."): array.astype(np.float64) for name, array in tensors.items()
    }
    keys, values, results = [], [], []
    for t in range(len(states)):
        x = layer["fc.weight"] @ np.concatenate([embedded[t], states[t]]) + layer.get("fc.bias", 0)
        q = turned((layer["self_attn.q_proj.weight"] @ x).reshape(4, 4), t)
        keys.append(turned((layer["self_attn.k_proj.weight"] @ x).reshape(2, 4), t))
        values.append((layer["self_attn.v_proj.weight"] @ x).reshape(2, 4))
        heads = []
        for head in range(4):
            # 2 is the square root of head_dim.
            scores = np.array([q[head] @ key[head // 2] for key in keys]) / 2
            weights = np.exp(scores - scores.max())
            heads.append(
                sum(w * v[head // 2] for w, v in zip(weights / weights.sum(), values, strict=True))
            )
        x = x + layer["self_attn.o_proj.weight"] @ np.concatenate(heads)
        normed = norm(x, layer["post_attention_layernorm.weight"])
        gate, up = layer["mlp.gate_proj.weight"] @ normed, layer["mlp.up_proj.weight"] @ normed
        x = x + layer["mlp.down_proj.weight"] @ (gate / (1 + np.exp(-gate)) * up)
        results.append(x)
    return np.stack(results)


def random_drafter() -> Eagle:
    drafter = Eagle.init(tiny_target(), jax.random.key(0), Chain(3))
    keys = iter(jax.random.split(jax.random.key(1), 99))
    return drafter.replace(
        params=jax.tree.map(
            lambda x: x + 0.3 * jax.random.normal(next(keys), x.shape), drafter.params
        )
    )


@pytest.mark.full
@pytest.mark.parametrize("bias", [True, False])
def test_states_are_those_of_the_description(bias, tmp_path) -> None:
    random_drafter().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    if not bias:
        del tensors["fc.bias"]
        save_file(tensors, tmp_path / "model.safetensors")
    drafter, target = Eagle.from_pretrained(tmp_path, dtype=np.float32), tiny_target()
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 11, (1, 9)))
    features = target.forward(tokens[:, :-1])[0].hidden
    batch = {"tokens": tokens, "segments": jnp.zeros_like(tokens)}
    (states,) = unroll(drafter, batch, target, features, 1, detach=True)
    expected = slow_states(
        tensors, np.asarray(features[0], np.float64), np.asarray(target.embed(tokens[:, 1:])[0])
    )
    np.testing.assert_allclose(states[0], expected, atol=1e-4, rtol=1e-4)


def test_a_checkpoint_is_read_back_bit_for_bit(tmp_path) -> None:
    saved = random_drafter()
    saved.save_pretrained(tmp_path / "once")
    read = Eagle.from_pretrained(tmp_path / "once", draft=Chain(3), dtype=np.float32)
    assert read.config == saved.config
    jax.tree.map(np.testing.assert_array_equal, read.params, saved.params)
    read.save_pretrained(tmp_path / "twice")
    for file in (tmp_path / "once").iterdir():
        assert file.read_bytes() == (tmp_path / "twice" / file.name).read_bytes()


def test_what_is_in_a_checkpoint_decides(tmp_path) -> None:
    """Check that tensors decide whether there are biases and an embedding of its own.

    Unknown tensors and more than one layer are refused.
    """
    random_drafter().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["embed_tokens.weight"] = np.ones((11, 16), np.float32)
    tensors["layers.0.self_attn.q_proj.bias"] = np.ones(16, np.float32)
    for name in "kv":
        tensors[f"layers.0.self_attn.{name}_proj.bias"] = np.ones(8, np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    read = Eagle.from_pretrained(tmp_path, dtype=np.float32)
    assert read.config.own_embedding
    assert read.config.layer.qkv_bias
    assert np.all(read.embed(tiny_target(), np.zeros((1, 1), int)) == 1)
    save_file(
        {**tensors, "layers.0.input_layernorm.weight": np.ones(16, np.float32)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(
        CheckpointError,
        match=r"'layers\.0\.input_layernorm\.weight' is no part of an EAGLE drafter",
    ):
        Eagle.from_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "num_hidden_layers": 2}))
    with pytest.raises(
        CheckpointError, match="num_hidden_layers=2: an EAGLE drafter has one layer"
    ):
        Eagle.from_pretrained(tmp_path)
