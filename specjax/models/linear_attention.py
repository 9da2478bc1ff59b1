"""Layers that keep a state in place of keys and values: Gated DeltaNet (Yang et al. 2024, arXiv 2412.06464), as Qwen3-Next and
Qwen3.5 have it.

Queries, keys and values go through a short convolution over the newest tokens of the path, and then through the
`specjax.models.delta_rule`; what it comes to is normed, gated and projected.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from specjax.models.config import LinearAttention, ModelConfig
from specjax.models.delta_rule import DeltaRuleInputs, Node, read_chain, read_documents, read_tree
from specjax.models.params import Params
from specjax.models.primitives import apart, linear, products_in_turn, rms_norm
from specjax.models.states import State


@struct.dataclass
class Ancestry:
    """Which tokens stand on the path of each of T tokens that a pass reads. It is one for all layers.

    Attributes:
        own: ``[B|1, T, T]`` bool, which of the call's own, itself among them. None: itself alone.
        drafted: ``[B|1, T, R]`` bool, which of the tokens that were drafted before. None: there are none.
        newest: ``[B|1, T, kernel_size - 1]`` the places of the newest tokens before it on its path, the newest last, among: the
            kernel_size - 1 of the state, the R, the T. None in a chain.
        documents: ``[B, T]`` the number of each token's document. It has those before it of its own on its path, and no state
            is given. None: all are of one.
        is_chain: static. Each token has all others before it on its path, but those of other documents, and nothing was drafted
            before.
    """

    own: jax.Array | None
    drafted: jax.Array | None
    newest: jax.Array | None
    documents: jax.Array | None = None
    is_chain: bool = struct.field(pytree_node=False, default=False)

    @classmethod
    def of(cls, mask: jax.Array | np.ndarray, drafted: Sequence[jax.Array | None], kernel_size: int) -> "Ancestry":
        """Of a call's ``mask [B|1, T, T]`` and of what it sees of each piece of scratch, as `Target.run` is given them."""
        count = mask.shape[1]
        alone = np.eye(count, dtype=bool)[None]

        def is_known_as(kind: np.ndarray) -> bool:
            return isinstance(mask, np.ndarray) and np.array_equal(mask, np.broadcast_to(kind, mask.shape))

        if not drafted and is_known_as(np.tril(np.ones((count, count), bool))):
            return cls(None, None, None, is_chain=True)
        seen = [jnp.asarray(alone if visible is None else visible) for visible in drafted]
        rows = max([mask.shape[0], *(visible.shape[0] for visible in seen)])
        above, own = ([jnp.broadcast_to(x, (rows, *x.shape[1:])) for x in xs] for xs in (seen, [jnp.asarray(mask)]))
        joined = jnp.concatenate(above, axis=2) if above else None
        past = jnp.ones((rows, count, kernel_size - 1), bool)
        before = jnp.concatenate([past, *above, own[0] & ~alone], axis=2)
        indices = jnp.where(before, jnp.arange(before.shape[2]), -1)
        newest = jax.lax.top_k(indices, kernel_size - 1)[0][..., ::-1]
        return cls(None if is_known_as(alone) else own[0], joined, newest)


@struct.dataclass
class Context:
    """What a layer with linear attention is given beside the states of the tokens.

    Attributes:
        state: of the committed tokens.
        drafted: the entries of tokens that were drafted before.
        ancestry: which of all these tokens stand on whose path.
        count: ``[B]`` so many of the call's own tokens are committed by the layer itself, which then gives the state after
            them; None: it gives their entries.
    """

    state: State
    drafted: Sequence[Sequence[Any]]
    ancestry: Ancestry
    count: jax.Array | None = None


def linear_attention(
    params: Params, config: ModelConfig, x: jax.Array, context: Context
) -> tuple[jax.Array, tuple[jax.Array, ...] | State]:
    """``[B, T, H]`` what one layer makes of normed states ``x [B, T, H]``; and the call's own entry, or the state after it."""
    sizes = config.linear
    assert sizes is not None
    *given, z, b, a = _projections(params, sizes, x)
    own = tuple(part.transpose(0, 2, 1, 3) for part in given)
    past = [
        jnp.concatenate([old, *(entry[3 + i] for entry in context.drafted)], 2) for i, old in enumerate(context.state.newest)
    ]
    q, k, v = (
        _convolved(params[f"conv_{name}"], old, new, context.ancestry) for name, old, new in zip("qkv", past, own, strict=True)
    )
    tokens = DeltaRuleInputs(_unit(q) * sizes.key_dim**-0.5, _unit(k), v, *_gates(params, b, a))
    y, kept = _follow(tokens, context, own)
    y = rms_norm(y.transpose(0, 2, 1, 3).astype(x.dtype), params["norm"], config.norm_eps)
    gated = y.astype(jnp.float32) * jax.nn.silu(z.astype(jnp.float32))
    return linear(params, "o", gated.astype(x.dtype).reshape(*x.shape[:2], -1)), kept


def _follow(
    tokens: DeltaRuleInputs, context: Context, convolved: tuple[jax.Array, ...]
) -> tuple[jax.Array, tuple[jax.Array, ...] | State]:
    """What the rule comes to, and the entry or the state that stays."""
    state, ancestry = context.state, context.ancestry
    if ancestry.documents is not None:
        return read_documents(tokens, ancestry.documents), ()
    if ancestry.is_chain:
        y, node, table = read_chain(state.table, tokens, context.count)
        if context.count is None:
            return y, (*node, *convolved)
        return y, State(table, state.newest_after(convolved, context.count))
    before = None
    if ancestry.drafted is not None:
        joined = [jnp.concatenate(parts, axis=2) for parts in zip(*(entry[:3] for entry in context.drafted), strict=True)]
        before = Node(*joined), ancestry.drafted
    y, node = read_tree(state.table, tokens, ancestry.own, before)
    return y, (*node, *convolved)


def _projections(params: Params, sizes: LinearAttention, x: jax.Array) -> tuple[jax.Array, ...]:
    """Queries, keys, values and output gates ``[B, T, heads, dim]``, and both gates of the rule ``[B, T, value_heads]``."""

    def heads(values: jax.Array, count: int) -> jax.Array:
        return values.reshape(*x.shape[:2], count, -1)

    if not sizes.by_key_head:
        counts = {"q": sizes.key_heads, "k": sizes.key_heads, "v": sizes.value_heads, "z": sizes.value_heads}
        *given, x = products_in_turn(params, tuple(counts), x)
        parts = [heads(apart(values), count) for values, count in zip(given, counts.values(), strict=True)]
        return (*parts, linear(params, "beta", x), linear(params, "alpha", x))
    joined = heads(linear(params, "qkvz", x), sizes.key_heads)
    ends = np.cumsum([sizes.key_dim, sizes.key_dim, sizes.group * sizes.value_dim])
    q, k, v, z = jnp.split(joined, ends, axis=-1)
    b, a = jnp.split(heads(linear(params, "gates", x), sizes.key_heads), 2, axis=-1)
    flat = (part.reshape(*x.shape[:2], -1) for part in (b, a))
    return (q, k, heads(v, sizes.value_heads), heads(z, sizes.value_heads), *flat)


def _gates(params: Params, b: jax.Array, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Beta, and the logarithm of alpha, ``[B, value_heads, T]`` float32."""
    b, a = (gate.astype(jnp.float32).transpose(0, 2, 1) for gate in (b, a))
    rate = jnp.exp(params["log_rate"].astype(jnp.float32))[:, None]
    return jax.nn.sigmoid(b), -rate * jax.nn.softplus(a + params["rate_bias"].astype(jnp.float32)[:, None])


def _convolved(weight: jax.Array, past: jax.Array, own: jax.Array, ancestry: Ancestry) -> jax.Array:
    """``[B, heads, T, dim]`` float32: SiLU of a weighted sum of each of the call's tokens and the newest before it on its path.

    Args:
        weight: ``[heads * dim, 1, kernel_size]``, the newest last.
        past: ``[B, heads, kernel_size - 1 + R, dim]`` what stands before the call: of the state, and drafted.
        own: ``[B, heads, T, dim]`` of the call.
        ancestry: of the tokens.
    """
    (batch, heads, count, dim), earlier = own.shape, weight.shape[-1] - 1
    slots = jnp.concatenate([past.astype(own.dtype), own], axis=2)
    if ancestry.newest is None:
        before = [slots[:, :, start : start + count] for start in range(earlier)]
        if (documents := ancestry.documents) is not None:
            shifted = [jnp.pad(documents, ((0, 0), (earlier - start, 0)))[:, :count] for start in range(earlier)]
            same = [(other == documents)[:, None, :, None] for other in shifted]
            before = [jnp.where(is_own, token, 0.0) for is_own, token in zip(same, before, strict=True)]
    else:
        at = jnp.broadcast_to(ancestry.newest, (batch, count, earlier)).reshape(batch, 1, -1, 1)
        found = jnp.take_along_axis(slots, at, axis=2).reshape(batch, heads, count, earlier, dim)
        before = [found[:, :, :, i] for i in range(earlier)]
    kernels = weight.astype(jnp.float32).reshape(heads, dim, -1)
    shares = [kernels[:, None, :, i] * token.astype(jnp.float32) for i, token in enumerate((*before, own))]
    return jax.nn.silu(sum(shares[1:], shares[0]))


def _unit(x: jax.Array) -> jax.Array:
    """``x`` divided by its length; zeros stay such."""
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + 1e-6)
