"""Reading the windows of a batch with a model.

Documents do not attend to each other, and each has the positions that it has alone: from 0 on.
"""

from collections.abc import Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from specjax.models.attention.plain import SCORES_BYTES
from specjax.models.cache import Entries
from specjax.models.transformer import Output, States, Target
from specjax.shape_checks import shape_checked
from specjax.training.contract import Batch


@shape_checked
def document_mask(segments: Int[Array, "B T"]) -> Bool[Array, "B T T"]:
    """Return the mask by which a token attends to itself and earlier tokens of its document."""
    count = segments.shape[1]
    return jnp.tril(jnp.ones((count, count), bool)) & (segments[:, :, None] == segments[:, None, :])


@shape_checked
def first_tokens(segments: Int[Array, "B T"]) -> Bool[Array, "B T"]:
    """Return which tokens are the first of their document in the window."""
    return jnp.pad(segments[:, 1:] != segments[:, :-1], ((0, 0), (1, 0)), constant_values=True)


@shape_checked
def positions(segments: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Return each token's distance from the first token of its document in the window."""
    index = jnp.arange(segments.shape[1])
    return index - jax.lax.cummax(jnp.where(first_tokens(segments), index, 0), axis=1)


def read(model: Target, batch: Batch, taps: Sequence[int] = ()) -> tuple[States, Entries]:
    """Return a model's states at the T inputs of a batch, without logits, and the KV of its layers.

    Long windows are read a few rows at a time, so that the scores of a layer's attention stay
    within `SCORES_BYTES` on each device, or are those of a single row. ``taps`` are those of
    `Target.run`.
    """
    inputs = batch["tokens"][:, :-1], batch["segments"][:, :-1]
    rows, count = inputs[0].shape
    parts = _number_of_parts(model, rows, count)

    def read_rows(inputs: tuple[jax.Array, jax.Array]) -> tuple[States, Entries]:
        tokens, documents = inputs
        return model.read(tokens, documents=documents, positions=positions(documents), taps=taps)

    def join(array: jax.Array) -> jax.Array:
        return jnp.moveaxis(array, 0, 1).reshape(rows, *array.shape[2:])

    if parts == 1:
        return read_rows(inputs)
    split = tuple(split_rows(array, parts) for array in inputs)
    return jax.tree.map(join, jax.lax.map(read_rows, split))


def split_rows(array: jax.Array, parts: int) -> jax.Array:
    """Split ``[B, ...]`` into ``[parts, B / parts, ...]``.

    A part has every ``parts``-th row, so that it has rows of every device.
    """
    return jnp.moveaxis(array.reshape(-1, parts, *array.shape[1:]), 1, 0)


def _number_of_parts(model: Target, rows: int, count: int) -> int:
    """Return the number of equal parts in which rows of ``count`` tokens are read."""
    mesh = model.mesh
    data, heads = (1, 1) if mesh is None else (mesh.shape["data"], mesh.shape["model"])
    bytes_of_row = 4 * model.config.num_heads * count**2 / heads
    return next(
        (
            parts
            for parts in range(1, rows + 1)
            if rows % (parts * data) == 0 and bytes_of_row * rows / (parts * data) <= SCORES_BYTES
        ),
        max(rows // data, 1),
    )


def read_student(model: Target, batch: Batch, remat: bool) -> jax.Array:
    """Return the hidden states ``[B, T, H]`` of a whole model that is trained, as `read`.

    With ``remat``, the activations of each layer are recomputed for the gradient. Layers that share
    a selection are recomputed together.
    """
    if not remat:
        return read(model, batch)[0].hidden
    tokens, documents = batch["tokens"][:, :-1], batch["segments"][:, :-1]
    place = positions(documents)

    def run_layers(model: Target, x: jax.Array, layers: tuple[int, int]) -> jax.Array:
        return model.run(x, tokens=tokens, positions=place, documents=documents, layers=layers)[0]

    x, config = model.embed(tokens), model.config
    # Layers that share the selection of an indexer are computed with the layer that has it.
    shared = () if config.indexer is None else config.indexer.shared_layers
    begins = [layer for layer in range(config.num_layers) if layer not in shared]
    for layers in pairwise([*begins, config.num_layers]):
        x = jax.checkpoint(run_layers, static_argnums=2)(model, x, layers)
    return model.norm(x)


def score(model: Target, batch: Batch, taps: Sequence[int] = ()) -> tuple[Output, Entries]:
    """Return a model's output at the T inputs of a batch, and the KV of its layers.

    ``taps`` are those of `Target.run`.
    """
    tokens, documents = batch["tokens"][:, :-1], batch["segments"][:, :-1]
    return model.score(tokens, documents=documents, positions=positions(documents), taps=taps)


def forward(model: Target, batch: Batch, taps: Sequence[int] = ()) -> Output:
    """Return a model's output at the T inputs of a batch. ``taps`` are those of `Target.run`."""
    return score(model, batch, taps)[0]
