"""Inflate a small model to a realistic size without changing what it computes.

Speed must be measured at a realistic cost *and* a realistic acceptance rate. Random weights of a
realistic size accept nothing, and small trained models cost nothing. A small trained model that is
padded with zeros has both: the memory traffic and arithmetic of the large model, and the logits and
acceptance of the small one.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import InputError
from specjax.models import params as declarations
from specjax.models.config import Layer
from specjax.models.params import Param
from specjax.models.quantization import matrices_in
from specjax.models.transformer import Target


def inflate(target: Target, *, hidden_size: int, intermediate_size: int, num_layers: int) -> Target:
    """Return the target with more hidden units, heads, MLP units and layers that add nothing.

    Heads are added in whole groups of query heads with their key/value head, as many as
    fit ``hidden_size``. RMSNorm averages over the hidden axis, so the added zeros reduce
    the mean square by the ratio of old to new size. Its epsilon is reduced by this ratio,
    and its weights by the square root. The logits stay the same up to rounding. With q/k
    norm, whose axis does not grow, they also change by the effect of the reduced epsilon.

    Raises:
        InputError: a size is below the target's own, or the target has latent attention, experts or
            layers that differ in more than their rotary embeddings and windows.
    """
    config = target.config
    differs = config.mla is not None or config.moe is not None
    differs = differs or any(replace(layer, rope=None) != Layer() for layer in config.layers)
    # Norms whose weights are offsets, norms over an axis that grows, and layers that are not the
    # identity when all their weights are 0.
    differs = (
        differs
        or config.norm_offset
        or config.qk_norm_over_heads
        or config.per_layer_inputs
        or config.layer_scalars
    )
    if differs:
        raise InputError(
            f"a model of type {config.model_type!r} cannot be inflated: give one with Llama's"
            " norms, ordinary attention, no experts, and layers that differ at most in their rotary"
            " embeddings and windows"
        )
    if matrices_in(target.params):
        raise InputError(
            "target: its weights are quantized: load it with weights='float', inflate it, then"
            " quantize it"
        )
    sizes = {
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
        "num_layers": num_layers,
    }
    for name, size in sizes.items():
        if size < getattr(config, name):
            raise InputError(
                f"{name}={size}: a model can only be inflated, and the target has"
                f" {getattr(config, name)}"
            )
    group = config.num_heads // config.num_kv_heads
    kv_heads = max(hidden_size // config.head_dim // group, config.num_kv_heads)
    share = config.hidden_size / hidden_size
    inflated = replace(
        config,
        **sizes,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        norm_eps=config.norm_eps if share == 1 else config.norm_eps * share,
        layers=config.layers and config.layers + (Layer(),) * (num_layers - config.num_layers),
    )

    def pad(
        param: Param, small: jax.Array | np.ndarray
    ) -> jax.Array:  # on the host: no program per shape
        scale = share**0.5 if param.shape == (hidden_size,) and param.init == "ones" else 1.0
        padded = np.zeros(param.shape, small.dtype)
        padded[tuple(slice(0, size) for size in small.shape)] = np.asarray(small) * scale
        return jnp.asarray(padded)

    declared = declarations.declare(inflated)
    silent = jax.tree.map(np.zeros_like, target.params["layers"][0])
    layers = target.params["layers"] + [silent] * (num_layers - config.num_layers)
    params = jax.tree.map(pad, declared, target.params | {"layers": layers})
    if target.mesh is not None:
        params = jax.device_put(
            params, declarations.shardings(declared, target.mesh, inflated.axis_units)
        )
    return replace(target, params=params, config=inflated)
