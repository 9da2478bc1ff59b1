"""Layer self-attention (Zimmer et al. 2024, arXiv 2410.03804, section 3.1): a summary of what a target remembers of a token.

The layers of the target remember keys and values of a token. One block of attention reads these layer by layer, as if they were
the tokens of a short text that all see each other, for each token alone; its mean over the layers is projected to the target's
hidden size.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.drafters.features import layer_like
from specjax.errors import InputError
from specjax.models import params as declarations
from specjax.models.cache import Entry
from specjax.models.config import ModelConfig, Rope
from specjax.models.fields import check_fields, whole
from specjax.models.layers import decoder_layer, linear
from specjax.models.params import Param, Params, matrix
from specjax.models.rope import rotations


def check_attention(target: ModelConfig) -> None:
    """Refuse, with an InputError, a target that remembers no keys and values."""
    if target.mla is not None:
        raise InputError(
            "target: layer self-attention reads keys and values, and this target remembers latents (MLA): give one with "
            "ordinary attention"
        )


def check_target(block: ModelConfig, target: ModelConfig) -> None:
    """Refuse, with an InputError, a target for which ``block`` was not made."""
    check_attention(target)
    if block.hidden_size != entry_size(target):
        raise InputError(
            f"drafter: its layer self-attention is for layers that remember {block.hidden_size} numbers of a token, and "
            f"those of target remember {entry_size(target)}: give the target it was trained with"
        )


def entry_size(target: ModelConfig) -> int:
    """Numbers that a layer of the target remembers of a token, its keys and values: E, the hidden size of the block."""
    return 2 * target.num_kv_heads * target.head_dim


def default_block(target: ModelConfig) -> ModelConfig:
    """The shape of the block for ``target``.

    It has the target's numbers of heads, or as many as divide E into heads of an even size, and an MLP of 1.5 times E. For
    Llama-3-8B that is the authors': 2048 wide, 32 heads, 8 of keys and values, and an MLP of 3072.
    """
    check_attention(target)
    size = entry_size(target)
    heads = max(count for count in range(1, target.num_heads + 1) if size % (2 * count) == 0)
    kv_heads = max(count for count in range(1, target.num_kv_heads + 1) if heads % count == 0)
    return _block(target, size, heads, kv_heads, size * 3 // 2)


def _block(like: ModelConfig, size: int, heads: int, kv_heads: int, intermediate_size: int) -> ModelConfig:
    if size % heads:
        raise InputError(f"layer_self_attention: num_attention_heads={heads} does not divide hidden_size={size}")
    return layer_like(
        like,
        hidden_size=size,
        head_dim=size // heads,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=intermediate_size,
        rope=Rope(theta=like.rope.theta),  # positions are layers: never stretched
    )


def parse(raw: dict[str, Any], like: ModelConfig, source: str) -> ModelConfig:
    """The shape of the block from the fields of a config.json, which ``source`` names; the rest is as in ``like``."""
    known = {
        "hidden_size": whole(2, 1_000_000),
        "intermediate_size": whole(1, 10_000_000),
        "num_attention_heads": whole(1, 10_000),
        "num_key_value_heads": whole(1, 10_000),
    }
    return _block(like, *(check_fields(raw, known, source)[name] for name in _ORDER))


_ORDER = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")


def format_block(block: ModelConfig) -> dict[str, int]:
    """The fields that `parse` reads."""
    values = (block.hidden_size, block.num_heads, block.num_kv_heads, block.intermediate_size)
    return dict(zip(_ORDER, values, strict=True))


def declare(block: ModelConfig, hidden_size: int) -> Params:
    """The `Param` declarations, named as the authors name them; ``hidden_size`` is the target's."""
    return {
        "layer_self_attention": declarations.declare_layer(block, "layer_self_attention."),
        "ekv2e": matrix("Ekv2E", (block.hidden_size, None), (hidden_size, None)),
        "ekv2e_bias": Param((hidden_size,), (None,), "Ekv2E.bias", "zeros"),
    }


def mean_over_layers(params: Params, block: ModelConfig, entries: Sequence[Entry], mesh: Mesh | None = None) -> jax.Array:
    """``[B, T, E]`` the mean over the layers of what the block makes of each token's keys and values.

    Args:
        params: as declared.
        block: its shape.
        entries: what each layer of the target remembers of T tokens, keys and values ``[B, kv_heads, T, d]``.
        mesh: where the params live.
    """
    # By head the key, then the value: [B, kv_heads, T, 2d] of each layer -> [B, T, L, E].
    joined = jnp.stack([jnp.concatenate(entry, axis=-1) for entry in entries], axis=2)
    batch, _, layers, count, _ = joined.shape
    own = params["layer_self_attention"]
    x = joined.transpose(0, 3, 2, 1, 4).reshape(batch * count, layers, -1).astype(own["q"].dtype)
    turn = rotations(block.rope, block.head_dim, jnp.arange(layers)[None])
    x, _ = decoder_layer(own, block, x, turn, jnp.ones((1, layers, layers), bool), mesh=mesh)
    return jnp.mean(x, axis=1).reshape(batch, count, -1)


def summarise(params: Params, block: ModelConfig, entries: Sequence[Entry], mesh: Mesh | None = None) -> jax.Array:
    """``[B, T, H]`` the summary of each token: `mean_over_layers`, projected."""
    return linear(params, "ekv2e", mean_over_layers(params, block, entries, mesh))
