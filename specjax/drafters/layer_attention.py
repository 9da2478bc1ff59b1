"""Layer self-attention: summarise the KV entries of a token in all layers of the target.

It is one part of Mixture of Attentions (Zimmer et al. 2024, arXiv 2410.03804, section 3.1). Each
layer of the target stores keys and values of a token. A block of attention reads them as a sequence
with one element per layer, separately for each token and without a causal mask. The mean over the
layers is projected to the target's hidden size.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax.drafters.trained import layer_like
from specjax.errors import InputError
from specjax.models import params as declarations
from specjax.models.cache import Entry
from specjax.models.config import ModelConfig, Rope
from specjax.models.fields import CheckpointError, JsonObject, check_fields, whole
from specjax.models.layers import decoder_layer, linear
from specjax.models.params import Param, Params, matrix
from specjax.models.quantized_cache import dequantize
from specjax.models.rope import rotations


@dataclass(frozen=True)
class LayerAttention:
    """The sizes of the block, and of the target's KV entries that it reads.

    Attributes:
        block: the configuration of the block. Its ``hidden_size``, E, is the size of a KV entry of
            one target layer.
        target_layers: the number of target layers; None if the checkpoint does not state it. The
            weights do not depend on it.
        target_kv_heads: the number of key/value heads of the target.
        target_head_dim: the size of the target's heads.
    """

    block: ModelConfig
    target_layers: int | None
    target_kv_heads: int
    target_head_dim: int

    @classmethod
    def for_target(cls, target: ModelConfig) -> "LayerAttention":
        """Return a block for ``target``.

        It has the target's numbers of heads, or the largest smaller ones that split E into heads of
        an even size, and an MLP of 1.5 times E. For Llama-3-8B these are the authors' sizes: E is
        2048, with 32 heads, 8 key/value heads and an MLP of 3072.
        """
        reads, size = _sizes_read(target), target.entry_size(0)
        heads = max(count for count in range(1, target.num_heads + 1) if size % (2 * count) == 0)
        kv_heads = max(count for count in range(1, reads[1] + 1) if heads % count == 0)
        return cls(block_like(target, size, heads, kv_heads, size * 3 // 2), *reads)

    def check(self, target: ModelConfig) -> None:
        """Raise an InputError for a target that the block was not made for."""
        target_sizes = _sizes_read(target)
        layers = target.num_layers if self.target_layers is None else self.target_layers
        sizes = (layers, self.target_kv_heads, self.target_head_dim)
        if sizes != target_sizes:
            raise InputError(
                "drafter: its layer self-attention was made for a target with (layers, key/value"
                f" heads, head size) {sizes}, but target has {target_sizes}: give the target that"
                " it was trained with"
            )


def _sizes_read(target: ModelConfig) -> tuple[int, int, int]:
    """Return the numbers of layers and key/value heads of ``target``, and the size of a head.

    Raises:
        InputError: Some layers store no keys and values, or ones of another size.
    """
    if target.mla is not None:
        raise InputError(
            "target: layer self-attention reads keys and values, but this target stores latents"
            " (MLA): give a target with ordinary attention"
        )
    if states := target.layers_with_states:
        raise InputError(
            "target: layer self-attention reads keys and values alone, but layers"
            f" {list(states)} of this target keep a state: give a target whose layers have"
            " attention alone, or a drafter without layer self-attention"
        )
    parts = [target.entry_parts(layer) for layer in range(target.num_layers)]
    if different := [layer for layer, layer_parts in enumerate(parts) if layer_parts != parts[0]]:
        raise InputError(
            "target: layer self-attention reads keys and values of one size, but layer"
            f" {different[0]} has (heads, size) {parts[different[0]]} and layer 0 has {parts[0]}:"
            " give a target whose layers are alike"
        )
    (heads, head_dim), (_, value_size) = parts[0]
    if value_size != head_dim:
        raise InputError(
            "target: layer self-attention reads keys and values of one size, but this target has"
            f" keys of {head_dim} and values of {value_size}: give a target whose heads are alike"
        )
    return target.num_layers, heads, head_dim


def block_like(
    like: ModelConfig, size: int, heads: int, kv_heads: int, intermediate_size: int
) -> ModelConfig:
    """Return the configuration of a block that reads KV entries of ``size`` numbers.

    All else is as in ``like``. Raises `InputError` if ``heads`` does not divide ``size``.
    """
    if size % heads:
        raise InputError(
            f"num_attention_heads={heads}: it must divide {size}, the size of a KV entry of the"
            " target"
        )
    block = layer_like(
        like,
        hidden_size=size,
        head_dim=size // heads,
        num_heads=heads,
        num_kv_heads=kv_heads,
        intermediate_size=intermediate_size,
    )
    # Positions are layer indices, so RoPE is not scaled.
    return replace(block, rope=Rope(theta=block.rope.theta))


_FIELDS = {
    "target_num_hidden_layers": whole(1, 10_000, default=None),
    "target_num_key_value_heads": whole(1, 10_000),
    "target_head_dim": whole(1, 100_000),
    "num_attention_heads": whole(1, 10_000),
    "num_key_value_heads": whole(1, 10_000),
    "intermediate_size": whole(1, 10_000_000),
}


def parse(raw: JsonObject, like: ModelConfig, source: str) -> LayerAttention:
    """Return the sizes from the fields of a config.json; all else is as in ``like``.

    Errors name the file as ``source``.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    layers, kv_heads, head_dim, *block = (
        check_fields(raw, _FIELDS, source)[name] for name in _FIELDS
    )
    try:
        return LayerAttention(
            block_like(like, 2 * kv_heads * head_dim, *block), layers, kv_heads, head_dim
        )
    except InputError as error:
        raise CheckpointError(f"{source}: {error}") from None


def format_fields(lsa: LayerAttention) -> dict[str, int | None]:
    """Return the fields that `parse` reads."""
    reads, block = (lsa.target_layers, lsa.target_kv_heads, lsa.target_head_dim), lsa.block
    return dict(
        zip(
            _FIELDS,
            (*reads, block.num_heads, block.num_kv_heads, block.intermediate_size),
            strict=True,
        )
    )


def declare(lsa: LayerAttention, hidden_size: int) -> Params:
    """Return the `Param` declarations, under the authors' names.

    ``hidden_size`` is the target's.
    """
    return {
        "layer_self_attention": declarations.declare_layer(lsa.block, "layer_self_attention."),
        "ekv2e": matrix("Ekv2E", (lsa.block.hidden_size, None), (hidden_size, None)),
        "ekv2e_bias": Param((hidden_size,), (None,), "Ekv2E.bias", "zeros"),
    }


def weights_of(params: Params) -> Params:
    """Select the weights of layer self-attention from a drafter's ``params``."""
    return {
        name: params[name]
        for name in ("layer_self_attention", "ekv2e", "ekv2e_bias")
        if name in params
    }


def by_token(entries: Sequence[Entry]) -> jax.Array:
    """Arrange the KV entries of T tokens in L target layers token by token, as ``[B, T, L, E]``.

    The E numbers are, head by head, the key and then the value. ``entries`` has the keys and values
    ``[B, kv_heads, T, d]`` of each layer.
    """
    joined = jnp.stack(
        [jnp.concatenate(list(map(dequantize, entry)), axis=-1) for entry in entries], axis=2
    )
    batch, _, layers, count, _ = joined.shape
    return joined.transpose(0, 3, 2, 1, 4).reshape(batch, count, layers, -1)


def mean_over_layers(
    params: Params, lsa: LayerAttention, remembered: jax.Array, mesh: Mesh | None = None
) -> jax.Array:
    """Return the mean over the layers of the block's output, ``[B, T, E]``.

    Args:
        params: the parameters, from `declare`.
        lsa: the sizes.
        remembered: ``[B, T, L, E]``, from `by_token`.
        mesh: the mesh of the parameters.
    """
    batch, count, layers, _ = remembered.shape
    layer = params["layer_self_attention"]
    # The tokens become the batch axis and the layers the sequence axis.
    x = remembered.reshape(batch * count, layers, -1).astype(layer["q"].dtype)
    turn = rotations(lsa.block.rope, lsa.block.head_dim, jnp.arange(layers)[None])
    visible = jnp.ones((1, layers, layers), bool)
    x, *_ = decoder_layer(layer, lsa.block, x, turn, visible, mesh=mesh)
    return jnp.mean(x, axis=1).reshape(batch, count, -1)


def summarise(
    params: Params, lsa: LayerAttention, entries: Sequence[Entry], mesh: Mesh | None = None
) -> jax.Array:
    """Return the summary ``[B, T, H]`` of each token: `mean_over_layers`, projected."""
    return project(params, mean_over_layers(params, lsa, by_token(entries), mesh))


def project(params: Params, mean: jax.Array) -> jax.Array:
    """Project the `mean_over_layers`, ``mean [B, T, E]``, to the summary ``[B, T, H]``."""
    return linear(params, "ekv2e", mean)
