"""Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), as in Qwen3-Next and Qwen3.5.

Such layers keep a state in place of keys and values. Queries, keys and values go through a short
convolution over the newest tokens of the path, and then through the `specjax.models.delta_rule`.
Its output is normed, gated and projected.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.models.config import ModelConfig
from specjax.models.delta_rule import DeltaRuleInputs, Node, read_chain, read_documents, read_tree
from specjax.models.memory import LinearAttention
from specjax.models.params import Params
from specjax.models.primitives import apart, linear, products_in_turn, rms_norm
from specjax.models.states import State


@struct.dataclass
class Ancestry:
    """The paths of the T tokens of a pass; all layers share it.

    Attributes:
        own: ``[B|1, T, T]`` bool, which tokens of the call are on the path of each, itself
            included. None: itself alone.
        drafted: ``[B|1, T, R]`` bool, which of the tokens that were drafted before are on its path.
            None: there are none.
        newest: ``[B|1, T, kernel_size - 1]`` the indices of the newest tokens before it on its
            path, the newest last. They index the concatenation of the kernel_size - 1 tokens of the
            state, the R drafted and the T of the call. None in a chain.
        documents: ``[B, T]`` the index of each token's document. The path of a token has the
            earlier tokens of its document alone, and there is no state. None: all tokens are of one
            document.
        is_chain: static. The path of each token has all tokens before it, except those of other
            documents, and nothing was drafted before.
    """

    own: jax.Array | None
    drafted: jax.Array | None
    newest: jax.Array | None
    documents: jax.Array | None = None
    is_chain: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def of(
        cls, mask: jax.Array | np.ndarray, drafted: Sequence[jax.Array | None], kernel_size: int
    ) -> "Ancestry":
        """Return the paths, from a call's ``mask [B|1, T, T]`` and its masks of drafted tokens.

        See `Target.run`.
        """
        count = mask.shape[1]
        alone = np.eye(count, dtype=bool)[None]

        def is_mask(kind: np.ndarray) -> bool:
            return isinstance(mask, np.ndarray) and np.array_equal(
                mask, np.broadcast_to(kind, mask.shape)
            )

        if not drafted and is_mask(np.tril(np.ones((count, count), bool))):
            return cls(None, None, None, is_chain=True)
        # A None mask means that each token sees one drafted token: the one with its own index.
        masks = [jnp.asarray(alone if visible is None else visible) for visible in (*drafted, mask)]
        rows = max(visible.shape[0] for visible in masks)
        *above, own_mask = (
            jnp.broadcast_to(visible, (rows, *visible.shape[1:])) for visible in masks
        )
        joined = jnp.concatenate(above, axis=2) if above else None
        past = jnp.ones((rows, count, kernel_size - 1), bool)
        before = jnp.concatenate([past, *above, own_mask & ~alone], axis=2)
        # The largest visible indices are the newest tokens, since ancestors come first.
        indices = jnp.where(before, jnp.arange(before.shape[2]), -1)
        newest = jax.lax.top_k(indices, kernel_size - 1)[0][..., ::-1]
        return cls(None if is_mask(alone) else own_mask, joined, newest)


@struct.dataclass
class Context:
    """The inputs of a layer with a state, besides the hidden states.

    Attributes:
        state: the state after the committed tokens.
        drafted: the entries of tokens that were drafted before.
        ancestry: the paths of all these tokens.
        count: ``[B]`` the number of tokens of the call that the layer commits itself: it then
            returns the state after them. None: it returns the entries of the call's tokens.
    """

    state: State
    drafted: Sequence[Sequence[Any]]
    ancestry: Ancestry
    count: jax.Array | None = None


def linear_attention(
    params: Params, config: ModelConfig, x: jax.Array, context: Context
) -> tuple[jax.Array, tuple[jax.Array, ...] | State]:
    """Return the output ``[B, T, H]`` of one layer for normed hidden states ``x [B, T, H]``.

    The second result is the entry of the call's own tokens, or the state after them.
    """
    sizes = config.linear
    assert isinstance(sizes, LinearAttention)
    *projected, z, b, a = _projections(params, sizes, x)
    convolved = tuple(part.transpose(0, 2, 1, 3) for part in projected)
    q, k, v = convolve(params, "qkv", convolved, context)
    tokens = DeltaRuleInputs(
        unit(q) * sizes.key_dim**-0.5, unit(k), v, *_gates(params, sizes, b, a)
    )
    y, memory = follow(tokens, context, convolved)
    eps = config.norm_eps if sizes.norm_eps is None else sizes.norm_eps
    y = rms_norm(y.transpose(0, 2, 1, 3).astype(x.dtype), params["norm"], eps)
    gated = y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
    return linear(params, "o", gated.astype(x.dtype).reshape(*x.shape[:2], -1)), memory


def follow(
    tokens: DeltaRuleInputs, context: Context, convolved: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...] | State]:
    """Return the outputs ``[B, h, T, dv]`` of the rule, and the entry or the state to store.

    ``convolved`` are the inputs of the convolution, ``[B, heads, T, dim]`` each.
    """
    state, ancestry = context.state, context.ancestry
    assert state.table is not None
    if ancestry.documents is not None:
        return read_documents(tokens, ancestry.documents), ()
    if ancestry.is_chain:
        y, node, table = read_chain(state.table, tokens, context.count)
        if context.count is None:
            return y, (*node.parts, *convolved)
        return y, state.after(table, convolved, context.count)
    before = None
    if ancestry.drafted is not None:
        joined = [
            jnp.concatenate(parts, axis=2)
            for parts in zip(*(state.split(entry)[0] for entry in context.drafted), strict=True)
        ]
        before = Node(*joined), ancestry.drafted
    y, node = read_tree(state.table, tokens, ancestry.own, before)
    return y, (*node.parts, *convolved)


def _projections(params: Params, sizes: LinearAttention, x: jax.Array) -> tuple[jax.Array, ...]:
    """Return queries, keys, values, output gates, and the two gates of the rule.

    The first four are ``[B, T, heads, dim]``; the gates of the rule are ``[B, T, value_heads]``.
    """

    def heads(values: jax.Array, count: int) -> jax.Array:
        return values.reshape(*x.shape[:2], count, -1)

    if not sizes.by_key_head:
        counts = {
            "q": sizes.key_heads,
            "k": sizes.key_heads,
            "v": sizes.value_heads,
            "z": sizes.value_heads,
        }
        *projected, x = products_in_turn(params, tuple(counts), x)
        parts = [
            heads(apart(values), count)
            for values, count in zip(projected, counts.values(), strict=True)
        ]
        return (*parts, linear(params, "beta", x), linear(params, "alpha", x))
    joined = heads(linear(params, "qkvz", x), sizes.key_heads)
    ends = np.cumsum([sizes.key_dim, sizes.key_dim, sizes.group * sizes.value_dim])
    q, k, v, z = jnp.split(joined, ends, axis=-1)
    b, a = jnp.split(heads(linear(params, "gates", x), sizes.key_heads), 2, axis=-1)
    flat = (part.reshape(*x.shape[:2], -1) for part in (b, a))
    return (q, k, heads(v, sizes.value_heads), heads(z, sizes.value_heads), *flat)


def _gates(
    params: Params, sizes: LinearAttention, b: jax.Array, a: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return beta, and the logarithm of alpha, ``[B, value_heads, T]`` float32."""
    b, a = (gate.astype(jnp.float32).transpose(0, 2, 1) for gate in (b, a))
    rate = jnp.exp(params["log_rate"].astype(jnp.float32))[:, None]
    return sizes.largest_share * jax.nn.sigmoid(b), -rate * jax.nn.softplus(
        a + params["rate_bias"].astype(jnp.float32)[:, None]
    )


def convolve(
    params: Params, names: Sequence[str], convolved: tuple[jax.Array, ...], context: Context
) -> list[jax.Array]:
    """Return SiLU of the short convolution of each of a layer's inputs, as `sums_of_newest`."""
    return list(map(jax.nn.silu, sums_of_newest(params, names, convolved, context)))


def sums_of_newest(
    params: Params, names: Sequence[str], convolved: tuple[jax.Array, ...], context: Context
) -> list[jax.Array]:
    """Return the short convolution of each of a layer's inputs, as `_convolved`.

    Args:
        params: the parameters of the layer.
        names: the name of each input; that of its weight is ``conv_`` and the name.
        convolved: the inputs from the tokens of the call, ``[B, heads, T, dim]`` each.
        context: the tokens before.
    """
    past = [
        jnp.concatenate([old, *(context.state.split(entry)[1][i] for entry in context.drafted)], 2)
        for i, old in enumerate(context.state.newest)
    ]
    return [
        _convolved(
            params[f"conv_{name}"], params.get(f"conv_{name}_bias"), old, new, context.ancestry
        )
        for name, old, new in zip(names, past, convolved, strict=True)
    ]


def _convolved(
    weight: jax.Array,
    bias: jax.Array | None,
    past: jax.Array,
    new: jax.Array,
    ancestry: Ancestry,
) -> jax.Array:
    """Return the short convolution ``[B, heads, T, dim]`` float32: a weighted sum.

    The sum is over each token of the call and the newest tokens before it on its path.

    Args:
        weight: ``[heads * dim, 1, kernel_size]``, the weight of the newest token last.
        bias: ``[heads * dim]``, added to the sum; None for none.
        past: ``[B, heads, kernel_size - 1 + R, dim]`` the tokens before the call: those of the
            state, and drafted ones.
        new: ``[B, heads, T, dim]`` the tokens of the call.
        ancestry: the paths of the tokens.
    """
    (batch, heads, count, dim), earlier = new.shape, weight.shape[-1] - 1
    slots = jnp.concatenate([past.astype(new.dtype), new], axis=2)
    if ancestry.newest is None:  # a chain: shifted copies are cheaper than a gather
        before = [slots[:, :, start : start + count] for start in range(earlier)]
        if (documents := ancestry.documents) is not None:
            shifted = [
                jnp.pad(documents, ((0, 0), (earlier - start, 0)))[:, :count]
                for start in range(earlier)
            ]
            same = [
                (earlier_documents == documents)[:, None, :, None] for earlier_documents in shifted
            ]
            before = [
                jnp.where(is_same, token, 0.0) for is_same, token in zip(same, before, strict=True)
            ]
    else:
        at = jnp.broadcast_to(ancestry.newest, (batch, count, earlier)).reshape(batch, 1, -1, 1)
        ancestors = jnp.take_along_axis(slots, at, axis=2)
        ancestors = ancestors.reshape(batch, heads, count, earlier, dim)
        before = [ancestors[:, :, :, i] for i in range(earlier)]
    kernels = weight.astype(jnp.float32).reshape(heads, dim, -1)
    shares = [
        kernels[:, None, :, i] * token.astype(jnp.float32) for i, token in enumerate((*before, new))
    ]
    total = sum(shares[1:], shares[0])
    if bias is not None:
        total = total + bias.astype(jnp.float32).reshape(heads, 1, dim)
    return total


def unit(x: jax.Array) -> jax.Array:
    """Return ``x`` divided by its length; vectors of zeros stay zeros."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
