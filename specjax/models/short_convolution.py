"""The gated short convolution of LFM2 (Liquid AI, 2025, arXiv 2511.23404).

Three projections make two gates and a value of each token. The value times the first gate goes
through a causal convolution over a few tokens, each channel by itself, and the result times the
second gate is projected::

    y = W_o (c * conv(b * x))

The memory of such a layer is the convolution's inputs ``b * x`` of the newest tokens, and nothing
else. The entry of a drafted token is its own input. In a tree a node reads the inputs of its
nearest ancestors, and those of the state if it has too few.
"""

import jax

from specjax.models.config import ModelConfig
from specjax.models.linear_attention import Context, sums_of_newest
from specjax.models.memory import ShortConvolution
from specjax.models.params import Params
from specjax.models.primitives import apart, linear, products_in_turn
from specjax.models.states import State


def short_convolution(
    params: Params, config: ModelConfig, x: jax.Array, context: Context
) -> tuple[jax.Array, tuple[jax.Array, ...] | State]:
    """Return the output ``[B, T, H]`` of one layer for normed hidden states ``x [B, T, H]``.

    The second result is the entry of the call's own tokens, or the state after them.
    """
    sizes = config.linear
    assert isinstance(sizes, ShortConvolution)
    batch, count = x.shape[:2]
    gate_in, gate_out, value, _ = products_in_turn(params, ("gate_in", "gate_out", "value"), x)
    inputs = apart(gate_in * value).reshape(batch, count, *sizes.convolved[0]).transpose(0, 2, 1, 3)
    (mixed,) = sums_of_newest(params, ("value",), (inputs,), context)
    mixed = mixed.transpose(0, 2, 1, 3).reshape(batch, count, -1).astype(x.dtype)
    return linear(params, "o", gate_out * mixed), _memory(inputs, context)


def _memory(inputs: jax.Array, context: Context) -> tuple[jax.Array, ...] | State:
    if context.ancestry.documents is not None:
        return ()
    if context.count is None:
        return (inputs,)
    return context.state.after(None, (inputs,), context.count)
