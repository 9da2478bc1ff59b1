"""Calibration: quantized weights that depend on the layers' inputs for a text."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int

from specjax.errors import InputError
from specjax.models import params as declarations
from specjax.models.config import ModelConfig
from specjax.models.params import Param, Params
from specjax.models.quantization import QuantizedMatrix, schemes
from specjax.models.quantization.gptq import Watched
from specjax.models.transformer import Target
from specjax.progress import say, track

WINDOW, WINDOWS = 512, 128
"""The number of tokens of a window, and the maximum number of windows."""
_AT_ONCE = 4096
"""The number of tokens of a pass."""


def calibrate(target: Target, weights: schemes.Weights, tokens: Int[np.ndarray, "W T"]) -> Target:
    """Return the model with weights quantized by GPTQ, from the layers' inputs for a text.

    Layers are quantized in order, so that each sees the outputs of the quantized layers before it.
    Embedding and head are rounded to the nearest numbers. See `Target.quantize` for rounding alone.

    Args:
        target: a whole target in floats, not on a mesh.
        weights: a scheme, or the name of one.
        tokens: windows of text, such as `windows` makes.

    Raises:
        InputError: The target cannot be calibrated, there is no such scheme, or the text is too
            short.

    Examples:
        >>> from specjax.models.calibration import calibrate
        >>> text = np.arange(48).reshape(3, 16) % 16
        >>> rounded, calibrated = target.quantize("int4"), calibrate(target, "int4", text)
        >>> matrices = [model.params["layers"][0]["down"] for model in (rounded, calibrated)]
        >>> matrices[0].values.dtype == matrices[1].values.dtype
        True
    """
    target.check_whole()
    if target.mesh is not None:
        raise InputError(
            "target: it is on a mesh: calibrate it on one device, save it, and load that on the"
            " mesh"
        )
    config, declared = target.config, declarations.declare(target.config)
    form_of = schemes.of_model(schemes.scheme_of(weights).form_of, config.tie_embeddings)
    check_text(config, weights, tokens)

    def quantize(declared: Params, params: Params) -> Params:
        return schemes.quantize_params(declared, params, form_of, None, config.axis_units)

    batches = np.array_split(tokens, min(len(tokens), -(-tokens.size // _AT_ONCE)))
    # The residual stream that enters a layer, by layer, for the layers that are still needed.
    entering = {0: [target.embed(jnp.asarray(batch)) for batch in batches]}
    firsts, unread = [_first(target, layer) for layer in range(config.num_layers)], 0
    for layer in track(range(config.num_layers), "calibrating layer {}"):
        declarations_here = declared["layers"][layer]
        streams = list(zip(entering[firsts[layer]], batches, strict=True))
        watched = _watch(declarations_here, target.params["layers"][layer], form_of)
        for x, batch in streams:
            watched = _add_moments(target, watched, x, batch, (firsts[layer], layer + 1))
        unread += _check_seen(watched, layer)
        target = _with_layer(target, layer, quantize(declarations_here, watched))
        after = [_run(target, x, batch, (firsts[layer], layer + 1)) for x, batch in streams]
        entering = {
            index: entering[index] for index in entering if index in firsts[layer + 1 :]
        } | {layer + 1: after}
    if unread:
        say(
            f"{unread} matrices of experts without a token of the text are rounded to the nearest"
            " numbers",
            unasked=True,
        )
    rest = {name: value for name, value in target.params.items() if name != "layers"}
    rest = quantize({name: declared[name] for name in rest}, rest)
    return replace(target, params={**target.params, **rest})


def _first(target: Target, layer: int) -> int:
    """Return the first layer of the shortest slice that ends with ``layer`` and can run.

    A layer may read the entries of an earlier one.
    """
    first = layer
    while (
        earlier := min(target.config.entries_of(index) for index in range(first, layer + 1))
    ) < first:
        first = earlier
    return first


def _watch(declared: Params, params: Params, form_of: schemes.FormOf) -> Params:
    """Return the params of a layer, with matrices that will be quantized as `Watched`."""

    def watch(param: Param, value: Any) -> Any:
        if isinstance(value, QuantizedMatrix) or form_of(param) is None:
            return value
        return Watched.of(value)

    return jax.tree.map(watch, declared, params)


def _is_watched(value: Any) -> bool:
    return isinstance(value, Watched)


def _with_layer(target: Target, layer: int, params: Params) -> Target:
    layers = target.params["layers"]
    return replace(
        target, params={**target.params, "layers": [*layers[:layer], params, *layers[layer + 1 :]]}
    )


def _run(target: Target, x: jax.Array, tokens: np.ndarray, layers: tuple[int, int]) -> jax.Array:
    # With `documents` layers with a state store nothing for each token, as in training.
    return target.run(
        x, tokens=jnp.asarray(tokens), layers=layers, documents=jnp.zeros(tokens.shape, jnp.int32)
    )[0]


def _add_moments(
    target: Target, watched: Params, x: jax.Array, tokens: np.ndarray, layers: tuple[int, int]
) -> Params:
    """Return the params of the last of ``layers``, with the moments of its inputs added.

    ``x [B, T, H]`` is the residual stream that enters the first of ``layers``.
    """

    # A layer may have layers inside, so its matrices are numbered by their places in the tree.
    leaves, tree = jax.tree.flatten(watched, is_leaf=_is_watched)

    def with_moments(moments: dict[int, jax.Array]) -> Params:
        replaced = (
            leaf.replace(moments=moments[place]) if place in moments else leaf
            for place, leaf in enumerate(leaves)
        )
        return jax.tree.unflatten(tree, replaced)

    def run(moments: dict[int, jax.Array]) -> jax.Array:
        return (
            _run(_with_layer(target, layers[1] - 1, with_moments(moments)), x, tokens, layers)
            .astype(jnp.float32)
            .sum()
        )

    before = {place: leaf.moments for place, leaf in enumerate(leaves) if _is_watched(leaf)}
    new = jax.grad(run)(before)  # not a derivative, but the moments of this batch: see `Watched`
    return with_moments(jax.tree.map(jnp.add, before, new))


def _check_seen(watched: Params, layer: int) -> int:
    """Return how many matrices of a layer's experts had no input; refuse a model that overflows."""
    unread = 0
    for value in jax.tree.leaves(watched, is_leaf=_is_watched):
        if _is_watched(value):
            second = np.asarray(jnp.trace(value.moments, axis1=-2, axis2=-1))
            if not np.isfinite(second).all():
                raise InputError(
                    f"target: the inputs of layer {layer} are not finite: load it in another data"
                    " type"
                )
            unread += int((second == 0).sum()) if second.ndim else 0
    return unread


def check_text(
    config: ModelConfig,
    weights: schemes.Weights,
    tokens: Int[np.ndarray, "W T"],
    argument: str = "tokens",
) -> None:
    """Refuse a text with fewer tokens than a matrix has inputs.

    The second moments of so few would be singular. The error is an `InputError` that names the
    ``argument``.
    """
    form_of = schemes.scheme_of(weights).form_of
    layers = declarations.declare(config)["layers"]
    widest = max(
        (
            param.shape[-2]
            for layer in layers
            for param in jax.tree.leaves(layer)
            if form_of(param) is not None
        ),
        default=0,
    )
    if tokens.size < max(widest, 1):
        raise InputError(
            f"{argument}: {tokens.size:,} tokens, fewer than the {widest:,} inputs of the widest"
            " matrix: give more text"
        )


def windows(texts: Sequence[Sequence[int]]) -> Int[np.ndarray, "W T"]:
    """Return windows of the concatenated tokens of ``texts``.

    They are at most 128 windows of 512 tokens, evenly spread. A shorter text is one window.

    Examples:
        >>> from specjax.models.calibration import windows
        >>> windows([[5, 1, 7], [5, 2]]).tolist()
        [[5, 1, 7, 5, 2]]
        >>> windows([range(100_000)]).shape
        (128, 512)
    """
    joined = np.concatenate(
        [np.zeros(0, np.int32), *(np.asarray(text, np.int32) for text in texts)]
    )
    size = min(WINDOW, len(joined))
    count = min(WINDOWS, len(joined) // max(size, 1))
    starts = np.linspace(0, len(joined) - size, count).astype(int)
    return joined[starts[:, None] + np.arange(size)]
