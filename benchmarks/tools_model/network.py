"""The model: its configuration, and a forward pass for long texts.

Six layers of SmolLM3's kind. Four have a window, the first two of them RoPE. Two have full
attention without positions, which works at all lengths.
"""

from typing import Any

import jax
import jax.numpy as jnp

from specjax.models.config import Layer, ModelConfig, Rope
from specjax.models.layers import keys_values, normed, queries
from specjax.models.params import Params
from specjax.models.primitives import linear, mlp
from specjax.models.rope import rotations

WINDOW = 512
FULL = (2, 4)
"""The layers with full attention."""
TURNED = (0, 1)
"""The layers with RoPE. The others have no positions."""
BLOCK = 1024
"""The number of queries whose scores are computed together in a layer with full attention."""


def make_config(
    tokenizer: Any,
    hidden_size: int = 544,
    intermediate_size: int = 384,
    num_layers: int = 6,
    num_heads: int = 4,
    head_dim: int = 80,
) -> ModelConfig:
    """Return the configuration. All layers have a window, but those in `FULL`."""
    windowed = tuple(layer for layer in range(num_layers) if layer not in FULL)
    layers = tuple(
        Layer() if layer in TURNED else Layer(rope=Rope(kind="none")) for layer in range(num_layers)
    )
    return ModelConfig(
        model_type="smollm3",
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_positions=32_768,
        tie_embeddings=False,
        sliding_window=WINDOW,
        windowed_layers=windowed,
        layers=layers,
        bos_token_id=None,
        eos_token_ids=(tokenizer.eos_token_id,),
    )


def hidden_states(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    """Return the states ``[B, T, H]`` after the final norm, for tokens ``[B, T]``.

    The same as `Target.read`, whose attention would need memory for T * T scores in every layer.
    T is at most the window, or a multiple of it.
    """
    return read_out(params, config, before_readout(params, config, tokens))


def before_readout(
    params: Params, config: ModelConfig, tokens: jax.Array, has_mlps: bool = True
) -> jax.Array:
    """Return the states ``[B, T, H]`` before the last MLP.

    ``has_mlps=False`` skips all MLPs, where they add nothing.
    """
    x = params["embed"][tokens]
    for index, layer in enumerate(params["layers"]):
        x = attention_states(layer, x, config, index)
        if has_mlps and index + 1 < config.num_layers:
            x = _mlp_states(layer, x, config)
    return x


def read_out(params: Params, config: ModelConfig, x: jax.Array) -> jax.Array:
    """Return the states after the last MLP and the final norm, for those of `before_readout`."""
    return normed(params, "norm", config, _mlp_states(params["layers"][-1], x, config))


def layer_states(params: Params, x: jax.Array, config: ModelConfig, index: int) -> jax.Array:
    """Return the states ``[B, T, H]`` after a layer, for those before it."""
    return _mlp_states(params, attention_states(params, x, config, index), config)


def _mlp_states(params: Params, x: jax.Array, config: ModelConfig) -> jax.Array:
    return x + mlp(params, normed(params, "post_norm", config, x), activation=config.activation)


def attention_states(params: Params, x: jax.Array, config: ModelConfig, index: int) -> jax.Array:
    """Return the states ``[B, T, H]`` after a layer's attention, for those before the layer."""
    window = config.sliding_window if index in config.windowed_layers else None
    config = config.of_layer(index)
    positions = jnp.arange(x.shape[1])[None]
    entering = normed(params, "input_norm", config, x)
    turns = rotations(config.rope, config.head_dim, positions)
    q = queries(params, config, entering, turns).transpose(0, 2, 1, 3)
    k, v = keys_values(params, config, entering, turns)
    q = q * config.head_dim**-0.5
    if window is None or x.shape[1] <= window:
        attended = _full(q, k, v)
    else:
        attended = _windowed(q, k, v, window)
    attended = attended.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[1], -1)
    return x + linear(params, "o", attended)


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    scores = jnp.where(mask, jnp.einsum("...td,...sd->...ts", q, k), -1e30)
    return jnp.einsum("...ts,...sd->...td", jax.nn.softmax(scores, axis=-1), v)


def _full(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Return causal attention ``[B, N, T, d]``, a block of queries after the other."""
    count, blocks = q.shape[2], []
    for start in range(0, count, BLOCK):
        end = min(start + BLOCK, count)
        mask = jnp.arange(start, end)[:, None] >= jnp.arange(end)[None]
        blocks.append(_attend(q[:, :, start:end], k[:, :, :end], v[:, :, :end], mask))
    return jnp.concatenate(blocks, axis=2)


def _windowed(q: jax.Array, k: jax.Array, v: jax.Array, window: int) -> jax.Array:
    """Return attention ``[B, N, T, d]`` to the newest ``window`` tokens.

    A block of as many queries attends to its own block and to the one before.
    """
    batch, heads, count, size = q.shape
    blocks = (batch, heads, count // window, window, size)
    q, k, v = (part.reshape(blocks) for part in (q, k, v))

    def with_previous(part: jax.Array) -> jax.Array:
        previous = jnp.pad(part, ((0, 0), (0, 0), (1, 0), (0, 0), (0, 0)))[:, :, :-1]
        return jnp.concatenate([previous, part], axis=3)

    distance = jnp.arange(window)[:, None] + window - jnp.arange(2 * window)[None]
    mask = (distance >= 0) & (distance < window)
    # The first block has none before it.
    is_there = (jnp.arange(count // window) > 0)[:, None, None] | (jnp.arange(2 * window) >= window)
    attended = _attend(q, with_previous(k), with_previous(v), mask & is_there)
    return attended.reshape(batch, heads, count, size)
