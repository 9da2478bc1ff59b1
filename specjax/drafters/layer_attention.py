"""Layer self-attention (Zimmer et al. 2024, arXiv 2410.03804, section 3.1): a summary of what a target remembers of a token.

The layers of the target remember keys and values of a token. One block of attention reads these layer by layer, as if they were
the tokens of a short text that all see each other, for each token alone; its mean over the layers is projected to the target's
hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.drafters.trained import layer_like
from specjax.errors import InputError
from specjax.models import params as declarations
from specjax.models.cache import Entry
from specjax.models.config import ModelConfig, Rope
from specjax.models.fields import CheckpointError, check_fields, whole
from specjax.models.layers import decoder_layer, linear
from specjax.models.params import Param, Params, matrix
from specjax.models.quantized_cache import dequantize
from specjax.models.rope import rotations


@dataclass(frozen=True)
class LayerAttention:
    """The shape of the block, and of what it reads.

    Attributes:
        block: of the block; its ``hidden_size``, E, is the numbers that a layer of the target remembers of a token.
        target_layers: layers of the target; None: a checkpoint did not say, and it does not matter to the weights.
        target_kv_heads: heads of their keys, and of their values.
        target_head_dim: numbers in each.
    """

    block: ModelConfig
    target_layers: int | None
    target_kv_heads: int
    target_head_dim: int

    @classmethod
    def for_target(cls, target: ModelConfig) -> "LayerAttention":
        """A block for ``target``.

        It has the target's numbers of heads, or as many as divide E into heads of an even size, and an MLP of 1.5 times E. For
        Llama-3-8B that is the authors': 2048 wide, 32 heads, 8 of keys and values, and an MLP of 3072.
        """
        reads, size = _sizes_read(target), target.entry_size(0)
        heads = max(count for count in range(1, target.num_heads + 1) if size % (2 * count) == 0)
        kv_heads = max(count for count in range(1, reads[1] + 1) if heads % count == 0)
        return cls(block_like(target, size, heads, kv_heads, size * 3 // 2), *reads)

    def check(self, target: ModelConfig) -> None:
        """Refuse, with an InputError, a target that it was not made for."""
        theirs = _sizes_read(target)
        layers = target.num_layers if self.target_layers is None else self.target_layers
        own = (layers, self.target_kv_heads, self.target_head_dim)
        if own != theirs:
            raise InputError(
                f"drafter: its layer self-attention was made for a target with (layers, key/value heads, head size) {own}, and "
                f"target has {theirs}: give the target that it was trained with"
            )


def _sizes_read(target: ModelConfig) -> tuple[int, int, int]:
    """Layers of ``target``, heads of the keys that each of them remembers, and numbers in a head; of the values likewise.

    Raises:
        InputError: its layers do not all remember keys and values of one size.
    """
    if target.mla is not None:
        raise InputError(
            "target: layer self-attention reads keys and values, and this target remembers latents (MLA): give one with "
            "ordinary attention"
        )
    if target.linear_layers:
        raise InputError(
            "target: layer self-attention reads the keys and values of all layers, and some of this target keep a state in "
            "their place: give a target with ordinary attention, or a drafter without layer self-attention"
        )
    parts = [target.entry_parts(layer) for layer in range(target.num_layers)]
    if other := [layer for layer, own in enumerate(parts) if own != parts[0]]:
        raise InputError(
            f"target: layer self-attention reads keys and values of one size, and layer {other[0]} remembers (heads, size) "
            f"{parts[other[0]]}, layer 0 {parts[0]}: give a target whose layers are alike"
        )
    (heads, head_dim), _ = parts[0]
    return target.num_layers, heads, head_dim


def block_like(like: ModelConfig, size: int, heads: int, kv_heads: int, intermediate_size: int) -> ModelConfig:
    """The shape of a block that reads ``size`` numbers of each layer; the rest is as in ``like``. Raises `InputError`."""
    if size % heads:
        raise InputError(f"num_attention_heads={heads} does not divide {size}, what a layer of the target remembers of a token")
    block = layer_like(
        like,
        hidden_size=size,
        head_dim=size // heads,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=intermediate_size,
    )
    return replace(block, rope=Rope(theta=block.rope.theta))  # positions are layers: never stretched


_FIELDS = {
    "target_num_hidden_layers": whole(1, 10_000, default=None),
    "target_num_key_value_heads": whole(1, 10_000),
    "target_head_dim": whole(1, 100_000),
    "num_attention_heads": whole(1, 10_000),
    "num_key_value_heads": whole(1, 10_000),
    "intermediate_size": whole(1, 10_000_000),
}


def parse(raw: dict[str, Any], like: ModelConfig, source: str) -> LayerAttention:
    """The shape from the fields of a config.json, which ``source`` names; the rest is as in ``like``.

    Raises:
        CheckpointError: a field is missing, or not as it must be.
    """
    layers, kv_heads, head_dim, *block = (check_fields(raw, _FIELDS, source)[name] for name in _FIELDS)
    try:
        return LayerAttention(block_like(like, 2 * kv_heads * head_dim, *block), layers, kv_heads, head_dim)
    except InputError as error:
        raise CheckpointError(f"{source}: {error}") from None


def format_fields(lsa: LayerAttention) -> dict[str, int | None]:
    """The fields that `parse` reads."""
    reads, block = (lsa.target_layers, lsa.target_kv_heads, lsa.target_head_dim), lsa.block
    return dict(zip(_FIELDS, (*reads, block.num_heads, block.num_kv_heads, block.intermediate_size), strict=True))


def declare(lsa: LayerAttention, hidden_size: int) -> Params:
    """The `Param` declarations, named as the authors name them; ``hidden_size`` is the target's."""
    return {
        "layer_self_attention": declarations.declare_layer(lsa.block, "layer_self_attention."),
        "ekv2e": matrix("Ekv2E", (lsa.block.hidden_size, None), (hidden_size, None)),
        "ekv2e_bias": Param((hidden_size,), (None,), "Ekv2E.bias", "zeros"),
    }


def weights_of(params: Params) -> Params:
    """Those of a drafter's ``params`` that make summaries."""
    return {name: params[name] for name in ("layer_self_attention", "ekv2e", "ekv2e_bias") if name in params}


def by_token(entries: Sequence[Entry]) -> jax.Array:
    """``[B, T, L, E]`` what each of the L layers of the target remembers of T tokens: by head the key, then the value.

    ``entries`` are keys and values ``[B, kv_heads, T, d]`` of each layer.
    """
    joined = jnp.stack([jnp.concatenate(list(map(dequantize, entry)), axis=-1) for entry in entries], axis=2)
    batch, _, layers, count, _ = joined.shape
    return joined.transpose(0, 3, 2, 1, 4).reshape(batch, count, layers, -1)


def mean_over_layers(params: Params, lsa: LayerAttention, remembered: jax.Array, mesh: Mesh | None = None) -> jax.Array:
    """``[B, T, E]`` the mean over the layers of what the block makes of each token's keys and values.

    Args:
        params: as declared.
        lsa: the shape.
        remembered: ``[B, T, L, E]``, from `by_token`.
        mesh: where the params live.
    """
    batch, count, layers, _ = remembered.shape
    own = params["layer_self_attention"]
    x = remembered.reshape(batch * count, layers, -1).astype(own["q"].dtype)
    turn = rotations(lsa.block.rope, lsa.block.head_dim, jnp.arange(layers)[None])
    x, _ = decoder_layer(own, lsa.block, x, turn, jnp.ones((1, layers, layers), bool), mesh=mesh)
    return jnp.mean(x, axis=1).reshape(batch, count, -1)


def summarise(params: Params, lsa: LayerAttention, entries: Sequence[Entry], mesh: Mesh | None = None) -> jax.Array:
    """``[B, T, H]`` the summary of each token: `mean_over_layers`, projected."""
    return project(params, mean_over_layers(params, lsa, by_token(entries), mesh))


def project(params: Params, mean: jax.Array) -> jax.Array:
    """``[B, T, H]`` the summary of each token, of which ``mean [B, T, E]`` is the `mean_over_layers`."""
    return linear(params, "ekv2e", mean)
