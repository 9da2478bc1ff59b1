"""Quantized weights that are chosen by what the layers read of a text."""

from collections.abc import Sequence
from dataclasses import replace

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
"""Tokens of a piece of the text, and how many pieces are read."""
_AT_ONCE = 4096
"""Tokens of a pass."""


def calibrate(target: Target, weights: schemes.Weights, tokens: Int[np.ndarray, "W T"]) -> Target:
    """The same model with quantized weights, as of `Target.quantize`, each layer's chosen by what it reads of a text (GPTQ).

    Layers are quantized in order, so that each sees what the quantized ones before it hand on. Embedding and head are rounded
    to the nearest numbers.

    Args:
        target: in floats, whole, and on no mesh.
        weights: a scheme, or the name of one.
        tokens: windows of text, such as `windows` cuts.

    Raises:
        InputError: the target is not as it must be, there is no such scheme, or the text is too short.

    Examples:
        >>> from specjax.models.calibration import calibrate
        >>> rounded, calibrated = target.quantize("int4"), calibrate(target, "int4", np.arange(48).reshape(3, 16) % 16)
        >>> calibrated.params["layers"][0]["down"].values.dtype == rounded.params["layers"][0]["down"].values.dtype
        True
    """
    target.check_whole()
    if target.mesh is not None:
        raise InputError("target: lies on a mesh: calibrate it on one device, save it, and load that on the mesh")
    config, declared = target.config, declarations.declare(target.config)
    form_of = schemes.of_model(schemes.scheme_of(weights).form_of, config.tie_embeddings)
    check_text(config, weights, tokens)

    def quantize(declared: Params, params: Params) -> Params:
        return schemes.quantize_params(declared, params, form_of, None, config.axis_units)

    batches = np.array_split(tokens, min(len(tokens), -(-tokens.size // _AT_ONCE)))
    entering = {0: [target.embed(jnp.asarray(batch)) for batch in batches]}  # by layer, the residual stream there
    firsts, unread = [_first(target, layer) for layer in range(config.num_layers)], 0
    for layer in track(range(config.num_layers), "calibrating layer {}"):
        own, streams = declared["layers"][layer], list(zip(entering[firsts[layer]], batches, strict=True))
        watched = _watch(own, target.params["layers"][layer], form_of)
        for x, batch in streams:
            watched = _add_moments(target, watched, x, batch, (firsts[layer], layer + 1))
        unread += _check_seen(watched, layer)
        target = _with_layer(target, layer, quantize(own, watched))
        after = [_run(target, x, batch, (firsts[layer], layer + 1)) for x, batch in streams]
        entering = {index: entering[index] for index in entering if index in firsts[layer + 1 :]} | {layer + 1: after}
    if unread:
        say(f"{unread} matrices of experts that no token of the text chose are rounded to the nearest numbers", unasked=True)
    rest = {name: value for name, value in target.params.items() if name != "layers"}
    rest = quantize({name: declared[name] for name in rest}, rest)
    return replace(target, params={**target.params, **rest})


def _first(target: Target, layer: int) -> int:
    """Where the shortest slice of layers begins that ends with ``layer``: some read the entries of others before them."""
    first = layer
    while (earlier := min(target.config.entries_of(one) for one in range(first, layer + 1))) < first:
        first = earlier
    return first


def _watch(declared: dict[str, Param], params: Params, form_of: schemes.FormOf) -> Params:
    """The ``params`` of a layer, `Watched` where they are to be quantized."""
    return {
        name: value if isinstance(value, QuantizedMatrix) or form_of(declared[name]) is None else Watched.of(value)
        for name, value in params.items()
    }


def _with_layer(target: Target, layer: int, params: Params) -> Target:
    layers = target.params["layers"]
    return replace(target, params={**target.params, "layers": [*layers[:layer], params, *layers[layer + 1 :]]})


def _run(target: Target, x: jax.Array, tokens: np.ndarray, layers: tuple[int, int]) -> jax.Array:
    # Said to be of one document, layers with a state keep nothing for each token, as in training.
    return target.run(x, tokens=jnp.asarray(tokens), layers=layers, documents=jnp.zeros(tokens.shape, jnp.int32))[0]


def _add_moments(target: Target, watched: Params, x: jax.Array, tokens: np.ndarray, layers: tuple[int, int]) -> Params:
    """The params of the last one of ``layers``, with the moments of what its matrices see of ``x [B, T, H]``, which enters the
    first, added to theirs."""

    def run(moments: dict[str, jax.Array]) -> jax.Array:
        params = watched | {name: watched[name].replace(moments=each) for name, each in moments.items()}
        return _run(_with_layer(target, layers[1] - 1, params), x, tokens, layers).astype(jnp.float32).sum()

    before = {name: value.moments for name, value in watched.items() if isinstance(value, Watched)}
    seen = jax.grad(run)(before)
    return watched | {name: watched[name].replace(moments=before[name] + seen[name]) for name in seen}


def _check_seen(watched: Params, layer: int) -> int:
    """How many matrices of a layer's experts have seen nothing. Refuses a model that overflows."""
    unread = 0
    for value in watched.values():
        if isinstance(value, Watched):
            second = np.asarray(jnp.trace(value.moments, axis1=-2, axis2=-1))
            if not np.isfinite(second).all():
                raise InputError(f"target: what layer {layer} reads is not finite: give it in another data type")
            unread += int((second == 0).sum()) if second.ndim else 0
    return unread


def check_text(config: ModelConfig, weights: schemes.Weights, tokens: Int[np.ndarray, "W T"], argument: str = "tokens") -> None:
    """Refuse, with an InputError that names the ``argument``, a text of fewer tokens than a matrix has inputs: of some sums of
    these it would say nothing."""
    form_of = schemes.scheme_of(weights).form_of
    layers = declarations.declare(config)["layers"]
    widest = max((one.shape[-2] for layer in layers for one in layer.values() if form_of(one) is not None), default=0)
    if tokens.size < max(widest, 1):
        raise InputError(
            f"{argument}: {tokens.size:,} tokens, fewer than the {widest:,} inputs of the widest matrix: give more text"
        )


def windows(texts: Sequence[Sequence[int]]) -> Int[np.ndarray, "W T"]:
    """Windows of the tokens of ``texts``, laid end to end: at most 128 of 512 tokens, evenly spread. Shorter text is one.

    Examples:
        >>> from specjax.models.calibration import windows
        >>> windows([[5, 1, 7], [5, 2]]).tolist()
        [[5, 1, 7, 5, 2]]
        >>> windows([range(100_000)]).shape
        (128, 512)
    """
    joined = np.concatenate([np.zeros(0, np.int32), *(np.asarray(text, np.int32) for text in texts)])
    size = min(WINDOW, len(joined))
    count = min(WINDOWS, len(joined) // max(size, 1))
    starts = np.linspace(0, len(joined) - size, count).astype(int)
    return joined[starts[:, None] + np.arange(size)]
