"""A mixture's experts on many tokens: sorted by expert, so that an expert runs on its tokens alone.

A token has k of E experts, so this takes k/E of the arithmetic of running all experts on all
tokens. Nothing is dropped, and no number of a token depends on another token:

- The assignments of tokens to experts are sorted by expert. Each expert's assignments are a range.
- The ranges are cut into *blocks* of a fixed number of rows. What is left at the end of a range
  fills a block of its own, with rows of zeros. So every product has the same shape, however many
  tokens an expert has.
- A loop runs one block after the other, with the weights of its expert. The number of its turns
  depends on the tokens, on a GPU only on the shapes. The outputs of a token's experts are then
  added in the order of its own choice.

A TPU runs the forward pass with `jax.lax.ragged_dot` instead, a kernel for sorted rows, unless the
weights are quantized. Other backends implement that operation as masked products with all experts,
and so does a TPU the gradient by the weights.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int

from specjax.models.params import Params
from specjax.models.quantization import is_quantized

Unit = Callable[[Params, jax.Array, jax.Array], jax.Array]
"""Runs an expert: from its parameters, rows ``[m, H]``, and which of them count, bool ``[m]``.

Rows that do not count are zeros; their outputs are ignored.
"""
Inner = Callable[[Callable[[str], jax.Array]], jax.Array]
"""Returns the input of the down projection.

Its argument returns the product of the expert's input with the matrix of a name.
"""

_PIECE = 8192
"""The most tokens that are sorted together. It bounds the memory for the rows of all experts."""


def run_sorted(
    unit: Unit,
    inner: Inner,
    x: Float[Array, "n H"],
    chosen: Int[Array, "n k"],
    weights: Float[Array, "n k"],
    experts: Params,
    mean: float,
) -> Float[Array, "n H"]:
    """Return the weighted sum over each token's experts, in float32.

    The backward pass computes the activations again, block by block.

    Args:
        unit: runs an expert on its rows.
        inner: the part of ``unit`` before its last product.
        x: the hidden states.
        chosen: indices of experts; those that are not in ``experts`` are ignored.
        weights: the weights of the chosen experts, float32.
        experts: the parameters of all experts here, each with the experts as its first axis.
        mean: the expected number of tokens of an expert, for each token's share of all experts.
            The size of the blocks depends on it.
    """
    count = len(x)
    if count > _PIECE:
        return _in_pieces(unit, inner, x, chosen, weights, experts, mean * _PIECE / count)
    quantized = {name: part for name, part in experts.items() if is_quantized(part)}
    floats = {name: part for name, part in experts.items() if name not in quantized}
    return _summed(_Form(unit, inner, mean), x, weights, floats, quantized, chosen)


def _in_pieces(
    unit: Unit,
    inner: Inner,
    x: jax.Array,
    chosen: jax.Array,
    weights: jax.Array,
    experts: Params,
    mean: float,
) -> jax.Array:
    """Run `run_sorted` on one piece of the tokens after the other."""
    missing = -len(x) % _PIECE

    def cut(array: jax.Array, fill: int = 0) -> jax.Array:
        padding = ((0, missing), *[(0, 0)] * (array.ndim - 1))
        return jnp.pad(array, padding, constant_values=fill).reshape(-1, _PIECE, *array.shape[1:])

    def run(piece: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        rows, indices, shares = piece
        return run_sorted(unit, inner, rows, indices, shares, experts, mean)

    outputs = jax.lax.map(run, (cut(x), cut(chosen, fill=-1), cut(weights)))
    return outputs.reshape(-1, x.shape[1])[: len(x)]


@dataclass(frozen=True)
class _Form:
    """The static parts of a call: the experts' functions, and the mean."""

    unit: Unit
    inner: Inner
    mean: float


@struct.dataclass
class _Sorted:
    """The assignments, sorted by expert.

    Attributes:
        order: ``[n k]`` the assignment at each place.
        place: ``[n, k]`` the place of each assignment: the inverse of ``order``.
        expert: ``[n, k]`` the expert of each assignment; E if it is not here.
        starts: ``[E + 1]`` the first place of each expert, and of the assignments to none.
    """

    order: jax.Array
    place: jax.Array
    expert: jax.Array
    starts: jax.Array


def _sort(chosen: jax.Array, count: int) -> _Sorted:
    size = chosen.size
    expert = jnp.where((chosen >= 0) & (chosen < count), chosen, count).astype(jnp.int32)
    flat = expert.reshape(-1)
    places = jnp.arange(size, dtype=jnp.int32)
    if size * (count + 1) < 2**31:
        # One array of keys: XLA's CPU backend takes four times as long to sort pairs.
        keys = jnp.sort(flat * size + places)
        order = keys % size
        starts = jnp.searchsorted(keys, jnp.arange(count + 1, dtype=jnp.int32) * size)
    else:
        order = jnp.argsort(flat, stable=True).astype(jnp.int32)
        starts = jnp.searchsorted(flat[order], jnp.arange(count + 1))
    place = jnp.zeros(size, jnp.int32).at[order].set(places, unique_indices=True)
    return _Sorted(order, place.reshape(chosen.shape), expert, starts.astype(jnp.int32))


# --- the blocks ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _BlockSizes:
    """The sizes of the loop over blocks. They are static, and so depend on no token.

    Attributes:
        rows: the rows of a block.
        together: the number of blocks that a turn of the loop runs.
        is_static: whether the loop has turns for as many blocks as there may be, used or not. A GPU
            otherwise waits for the host at every turn, to know whether it is the last.
    """

    rows: int
    together: int
    is_static: bool = False


def _sizes_on_cpu(form: "_Form", experts: Params) -> _BlockSizes:
    """Return the sizes for a CPU.

    With blocks a little longer than the mean, most experts have one block: their weights are
    rearranged for each product, which takes as long as some ten rows. Small products run together,
    for the time between them. Large ones run one by one, since XLA's CPU backend runs each product
    of several on one thread.
    """
    rows = min(max(16 * round(1.25 * form.mean / 16), 16), 256)
    return _BlockSizes(rows, _together(experts, 2**18, 4))


def _sizes_elsewhere(form: "_Form", experts: Params, is_static: bool) -> _BlockSizes:
    """Return the sizes for an accelerator, whose matrix units take 128 rows at a time."""
    rows = min(max(128 * round(form.mean / 2 / 128), 128), 512)
    return _BlockSizes(rows, _together(experts, 2**24, 8), is_static)


def _together(experts: Params, numbers: int, most: int) -> int:
    """Return how many experts' matrices have that many numbers together, 1 to ``most``."""
    if any(is_quantized(part) for part in experts.values()):
        return 1  # the products of a quantized matrix are written for one
    *_, inputs, outputs = experts["up"].shape
    return min(max(numbers // (inputs * outputs), 1), most)


def _by_device(
    form: "_Form", experts: Params, run: Callable[..., Any], *arguments: Any, **devices: Any
) -> Any:
    """Return ``run(sizes, *arguments)`` with the sizes that suit the device.

    ``devices`` has functions of the arguments for other devices.
    """
    choices: dict[str, Any] = {
        "cpu": partial(run, _sizes_on_cpu(form, experts)),
        "cuda": partial(run, _sizes_elsewhere(form, experts, is_static=True)),
        "default": partial(run, _sizes_elsewhere(form, experts, is_static=False)),
    }
    return jax.lax.platform_dependent(*arguments, **(choices | devices))


@struct.dataclass
class _Blocks:
    """The blocks, in the order of their experts, with the blocks of a turn together.

    Attributes:
        expert: ``[turns, G]`` the expert of each block.
        token: ``[turns, G, rows]`` the token of each row.
        is_filled: ``[turns, G, rows]`` whether a row is a token of its expert.
        slot: ``[n, k]`` the row of each assignment, counted through all blocks.
        is_here: ``[n, k]`` whether it has one: whether its expert is here.
        used: the number of turns that have a row that is filled; they come first.
        is_static: as in `_BlockSizes`.
    """

    expert: jax.Array
    token: jax.Array
    is_filled: jax.Array
    slot: jax.Array
    is_here: jax.Array
    used: jax.Array
    is_static: bool = struct.field(pytree_node=False)

    @property
    def rows(self) -> int:
        """The number of rows of all blocks."""
        return self.token.size

    def run(self, turn: Callable[[Any, jax.Array], Any], carry: Any) -> Any:
        """Return ``carry`` after ``turn(index, carry)`` for all turns."""
        return jax.lax.fori_loop(0, len(self.expert) if self.is_static else self.used, turn, carry)

    def read(self, x: jax.Array, turn: jax.Array) -> jax.Array:
        """Return a turn's rows of ``x``, ``[G, rows, H]``; those that are not filled are zeros.

        An expert may overflow on tokens that are not its own, and 0 times infinity is NaN.
        """
        return jnp.where(self.is_filled[turn][..., None], x[self.token[turn]], 0)

    def write(self, array: jax.Array, rows: jax.Array, turn: jax.Array) -> jax.Array:
        """Write a turn's ``rows [G, rows, ...]`` into an array of the rows of all blocks."""
        flat = rows.reshape(-1, *rows.shape[2:])
        return jax.lax.dynamic_update_slice_in_dim(array, flat, turn * len(flat), 0)

    def summed(self, weights: jax.Array, outputs: jax.Array) -> jax.Array:
        """Return the weighted sum of each token's rows, float32, one expert after the other."""
        total = jnp.zeros((len(weights), outputs.shape[1]), jnp.float32)
        for rank in range(weights.shape[1]):
            row = outputs[self.slot[:, rank]].astype(jnp.float32)
            weighted = weights[:, rank, None] * row
            total = total + jnp.where(self.is_here[:, rank, None], weighted, 0)
        return total


def _cut(order: _Sorted, sizes: _BlockSizes) -> _Blocks:
    """Cut the range of each expert into blocks."""
    assignments, k = order.place.size, order.place.shape[1]
    rows, together = sizes.rows, sizes.together
    counts = jnp.diff(order.starts)
    blocks = -(-counts // rows)
    ends = jnp.cumsum(blocks)
    firsts = ends - blocks
    most = assignments // rows + len(counts)
    turns = -(-most // together)

    index = jnp.arange(turns * together, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(ends, index, side="right"), len(counts) - 1)
    # Negative beyond the last block.
    missing = jnp.where(index < ends[-1], counts[expert] - (index - firsts[expert]) * rows, 0)
    start = order.starts[expert + 1] - missing
    row = jnp.arange(rows, dtype=jnp.int32)
    is_filled = row < missing[:, None]
    token = order.order[jnp.where(is_filled, start[:, None] + row, 0)] // k

    of_assignment = jnp.minimum(order.expert, len(counts) - 1)
    return _Blocks(
        expert=expert.reshape(turns, together),
        token=token.reshape(turns, together, rows),
        is_filled=is_filled.reshape(turns, together, rows),
        slot=firsts[of_assignment] * rows + order.place - order.starts[of_assignment],
        is_here=order.expert < len(counts),
        used=-(-ends[-1] // together),
        is_static=sizes.is_static,
    )


def _experts_of_turn(experts: Params, blocks: _Blocks, turn: jax.Array) -> Params:
    """Return the parameters ``[G, ...]`` of the experts of a turn's blocks."""
    if blocks.expert.shape[1] == 1:
        index = blocks.expert[turn, 0]
        return jax.tree.map(
            lambda leaf: jax.lax.dynamic_index_in_dim(leaf, index, keepdims=True), experts
        )
    return jax.tree.map(lambda leaf: leaf[blocks.expert[turn]], experts)


def _unit_of_turn(unit: Unit, params: Params, rows: jax.Array, is_filled: jax.Array) -> jax.Array:
    """Run `Unit` for several experts; for one without an axis of experts in its products."""
    if len(rows) == 1:
        only = jax.tree.map(lambda leaf: leaf[0], params)
        return unit(only, rows[0], is_filled[0])[None]
    return jax.vmap(unit)(params, rows, is_filled)


# --- forward and backward ------------------------------------------------------------------------


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _summed(
    form: _Form,
    x: jax.Array,
    weights: jax.Array,
    floats: Params,
    quantized: Params,
    chosen: jax.Array,
) -> jax.Array:
    experts = floats | quantized
    order = _sort(chosen, _count(experts))
    devices = {}
    if all(isinstance(part, jax.Array) for part in experts.values()):
        devices["tpu"] = partial(_by_ragged_products, form.inner)
    run = partial(_by_blocks, form.unit)
    return _by_device(form, experts, run, x, weights, experts, order, **devices)


def _by_blocks(
    unit: Unit,
    sizes: _BlockSizes,
    x: jax.Array,
    weights: jax.Array,
    experts: Params,
    order: _Sorted,
) -> jax.Array:
    blocks = _cut(order, sizes)

    def run(turn: jax.Array, outputs: jax.Array) -> jax.Array:
        params = _experts_of_turn(experts, blocks, turn)
        y = _unit_of_turn(unit, params, blocks.read(x, turn), blocks.is_filled[turn])
        return blocks.write(outputs, y, turn)

    outputs = blocks.run(run, jnp.zeros((blocks.rows, x.shape[1]), x.dtype))
    return blocks.summed(weights, outputs)


def _by_ragged_products(
    inner: Inner, x: jax.Array, weights: jax.Array, experts: Params, order: _Sorted
) -> jax.Array:
    """Return the same as `_by_blocks`, by `jax.lax.ragged_dot`, for weights in floats."""
    count, k = _count(experts), order.place.shape[1]
    expert_at = order.expert.reshape(-1)[order.order]
    group_sizes = jnp.diff(order.starts)

    def product(name: str, rows: jax.Array) -> jax.Array:
        y = jax.lax.ragged_dot(rows, experts[name], group_sizes)
        bias = experts.get(f"{name}_bias")
        return y if bias is None else y + bias[jnp.minimum(expert_at, count - 1)]

    rows = x[order.order // k]
    outputs = product("down", inner(lambda name: product(name, rows)))
    total = jnp.zeros(x.shape, jnp.float32)
    for rank in range(k):
        weighted = weights[:, rank, None] * outputs[order.place[:, rank]].astype(jnp.float32)
        # The last rows are in no group.
        total = total + jnp.where(order.expert[:, rank, None] < count, weighted, 0)
    return total


def _count(experts: Params) -> int:
    return experts["up"].shape[0]


def _forward(form: _Form, *arguments: Any) -> tuple[jax.Array, Any]:
    return _summed(form, *arguments), arguments


def _backward(form: _Form, arguments: Any, gradient: jax.Array) -> tuple[Any, ...]:
    x, weights, floats, quantized, chosen = arguments
    experts = floats | quantized
    order = _sort(chosen, _count(experts))
    gradients = _by_device(
        form,
        experts,
        partial(_gradients, form.unit),
        x,
        weights,
        floats,
        quantized,
        order,
        gradient,
    )
    return *gradients, None, None


def _gradients(
    unit: Unit,
    sizes: _BlockSizes,
    x: jax.Array,
    weights: jax.Array,
    floats: Params,
    quantized: Params,
    order: _Sorted,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array, Params]:
    """Return the gradients by the hidden states, by the weights and by the parameters."""
    blocks = _cut(order, sizes)
    weight_of_row = jnp.zeros(blocks.rows, jnp.float32)
    slot = jnp.where(blocks.is_here, blocks.slot, blocks.rows)
    weight_of_row = weight_of_row.at[slot].set(weights, mode="drop").reshape(blocks.token.shape)

    def run(turn: jax.Array, carry: Any) -> Any:
        by_rows, by_weights, by_floats = carry
        is_filled, of_outputs = blocks.is_filled[turn], blocks.read(gradient, turn)
        fixed = _experts_of_turn(quantized, blocks, turn)

        def outputs(rows: jax.Array, params: Params) -> jax.Array:
            return _unit_of_turn(unit, params | fixed, rows, is_filled)

        y, pull = jax.vjp(outputs, blocks.read(x, turn), _experts_of_turn(floats, blocks, turn))
        of_y = weight_of_row[turn][..., None] * of_outputs
        row_gradients, part_gradients = pull(of_y.astype(y.dtype))
        of_weights = jnp.where(is_filled, jnp.sum(of_outputs * y.astype(jnp.float32), axis=-1), 0)
        for block in range(sizes.together):
            by_floats = jax.tree.map(
                partial(_add_at, blocks.expert[turn, block]),
                by_floats,
                jax.tree.map(lambda part, block=block: part[block], part_gradients),
            )
        return (
            blocks.write(by_rows, row_gradients, turn),
            blocks.write(by_weights, of_weights, turn),
            by_floats,
        )

    by_rows, by_weights, by_floats = blocks.run(
        run,
        (
            jnp.zeros((blocks.rows, x.shape[1]), x.dtype),
            jnp.zeros(blocks.rows, jnp.float32),
            jax.tree.map(jnp.zeros_like, floats),
        ),
    )
    by_x = blocks.summed(jnp.ones_like(weights), by_rows).astype(x.dtype)
    return by_x, jnp.where(blocks.is_here, by_weights[blocks.slot], 0), by_floats


def _add_at(index: jax.Array, total: jax.Array, part: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(total, total[index] + part, index, 0)


_summed.defvjp(_forward, _backward)
