"""The forward pass against transformers, and against itself with a cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models import huggingface
from specjax.models.transformer import Target
from tests.conftest import tiny_target

SIZES = {
    "vocab_size": 37,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,  # ten times the usual: every part of the model shows in the logits
    "rms_norm_eps": 1e-5,
}
FAMILIES = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "llama biased": {"attention_bias": True, "mlp_bias": True},
    "llama head_dim": {"head_dim": 16},
    "mistral": {"sliding_window": None},
    "qwen2": {},
    "qwen2 tied": {"tie_word_embeddings": True},
    "qwen3": {"head_dim": 12},
    "mistral windows": {"sliding_window": 7},
    "qwen2 windows from a layer": {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    "qwen3 alternating": {
        "head_dim": 12,
        "use_sliding_window": True,
        "sliding_window": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "qwen3 biased": {"head_dim": 8, "attention_bias": True},
}
ROPES = {
    "default": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
        "rope_theta": 10000.0,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 10000.0},
    "yarn mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 16,
        "rope_theta": 10000.0,
        "beta_fast": 8.0,
        "beta_slow": 2.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.2,
        "truncate": False,
    },
    "yarn attention_factor": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "attention_factor": 1.3,
        "rope_theta": 10000.0,
    },
}
forward = jax.jit(Target.forward, static_argnames=("taps", "layers"))

CASES = [(family, "default") for family in FAMILIES] + [
    (family, rope) for family in ("llama", "mistral", "qwen2", "qwen3") for rope in ROPES if rope != "default"
]


def reference(family: str, rope: str, path):
    """A random transformers model with random biases and norms, saved to ``path``."""
    import torch
    import transformers

    name = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family.split(maxsplit=1)[0]]
    settings = SIZES | FAMILIES[family] | {"rope_parameters": ROPES[rope]}
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**settings)
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, param in model.named_parameters():
            if "norm" in key or "bias" in key:
                param.add_(torch.randn_like(param) * 0.3)
    model.save_pretrained(path)
    return model


@pytest.mark.parametrize(("family", "rope"), CASES)
def test_logits_equal_transformers(tmp_path, family, rope) -> None:
    import torch

    model = reference(family, rope, tmp_path)
    tokens = np.random.default_rng(0).integers(0, 37, (2, 100))
    with torch.no_grad():
        expected = model(torch.tensor(tokens)).logits.numpy()
    target = Target.from_pretrained(tmp_path, np.float32)
    output, _ = target.forward(jnp.asarray(tokens))
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(output.logits, expected, atol=1e-4)
    target.save_pretrained(tmp_path / "again")
    assert huggingface.read_config(tmp_path / "again") == target.config


@pytest.mark.parametrize("windows", [{}, {"sliding_window": 6, "windowed_layers": (1,)}])
def test_pieces_with_a_cache_equal_the_whole(windows) -> None:
    target = tiny_target(**windows)
    tokens = np.random.default_rng(0).integers(0, 11, (2, 20))
    whole, _ = forward(target, tokens, taps=(0, 1, 2))
    cache = target.new_cache(2, 24)
    pieces = []
    for start, stop in ((0, 7), (7, 8), (8, 20)):
        output, cache = forward(target, tokens[:, start:stop], cache, taps=(0, 1, 2))
        pieces.append(output)
    joined = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *pieces)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), joined, whole)


def test_rejected_entries_are_never_seen() -> None:
    """Two drafts after one prefix, the first of them rejected: rollback is only a length."""
    target = tiny_target()
    prefix, wrong, right = jnp.array([[1, 2, 3]]), jnp.array([[9, 9, 9, 9]]), jnp.array([[4, 5]])
    _, cache = forward(target, prefix, target.new_cache(1, 16))
    _, longer = forward(target, wrong, cache)
    cache = longer.replace(length=cache.length)
    output, _ = forward(target, right, cache)
    whole, _ = forward(target, jnp.concatenate([prefix, right], axis=1))
    np.testing.assert_allclose(output.logits, whole.logits[:, 3:], atol=1e-4)


def test_taps_are_what_enters_a_layer() -> None:
    target = tiny_target()
    output, _ = forward(target, jnp.array([[1, 2, 3]]), taps=(0, 1))
    np.testing.assert_array_equal(output.taps[:, :, 0], target.params["embed"][jnp.array([[1, 2, 3]])])
    shorter, _ = forward(target, jnp.array([[1, 2, 3]]), taps=(1,), layers=(0, 1))
    np.testing.assert_array_equal(output.taps[:, :, 1], shorter.taps[:, :, 0])


def test_a_mask_decides_what_tokens_of_a_call_see() -> None:
    """Two branches below one root, side by side, equal each branch alone."""
    target = tiny_target()
    mask = jnp.array([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], bool)
    positions = jnp.array([[0, 1, 1, 2]])
    tree, _ = forward(target, jnp.array([[5, 6, 7, 8]]), target.new_cache(1, 8), positions=positions, mask=mask)
    left, _ = forward(target, jnp.array([[5, 6]]))
    right, _ = forward(target, jnp.array([[5, 7, 8]]))
    np.testing.assert_allclose(tree.logits[:, 1], left.logits[:, 1], atol=1e-4)
    np.testing.assert_allclose(tree.logits[:, 2:], right.logits[:, 1:], atol=1e-4)
