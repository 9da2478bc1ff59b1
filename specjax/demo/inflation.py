"""Inflate a small model to a realistic size without changing what it computes.

Speed has to be measured at a realistic cost *and* a realistic acceptance rate. Random weights of a realistic size accept
nothing, and small trained models cost nothing. Padding a small trained model with zeros gives both: memory traffic and
arithmetic of the large one, logits and acceptance of the small one.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from specjax.errors import InputError
from specjax.models import params as declarations
from specjax.models.params import Param
from specjax.models.quantization import matrices_in
from specjax.models.transformer import Target


def inflate(target: Target, *, hidden_size: int, intermediate_size: int, num_layers: int) -> Target:
    """``target`` with more hidden units, heads, MLP units and layers, all of which contribute exactly nothing.

    Heads are added in whole groups of query heads and their key/value head, as many as fit ``hidden_size``. RMSNorm averages
    over the hidden axis, so zeros added there shrink the mean square by old over new size: its epsilon shrinks as much, and its
    weights by the square root. The logits stay the same but for rounding; with q/k norm, whose axis does not grow but whose
    epsilon is the same number, but for that epsilon too.

    Raises:
        InputError: a size is below the target's own, or the target has latent attention, experts or layers that differ.
    """
    config = target.config
    differs = config.mla is not None or config.moe is not None or config.layers
    # Weights of norms that do not begin as 1, norms over an axis that grows, and layers that give nothing when they are all 0.
    differs = differs or config.norm_offset or config.qk_norm_over_heads or config.per_layer_inputs or config.layer_scalars
    if differs:
        raise InputError(
            f"a model of type {config.model_type!r} cannot be inflated: give one with Llama's norms, ordinary attention, no "
            "experts, and layers that are alike"
        )
    if matrices_in(target.params):
        raise InputError("target: has quantized weights: load it with weights='float', inflate it, and quantize it then")
    sizes = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_layers": num_layers}
    for name, size in sizes.items():
        if size < getattr(config, name):
            raise InputError(f"{name}={size}: a model can only be inflated, and the target has {getattr(config, name)}")
    group = config.num_heads // config.num_kv_heads
    kv_heads = max(hidden_size // config.head_dim // group, config.num_kv_heads)
    share = config.hidden_size / hidden_size
    inflated = replace(
        config,
        **sizes,
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        norm_eps=config.norm_eps if share == 1 else config.norm_eps * share,
    )

    def pad(param: Param, small: jax.Array | np.ndarray) -> jax.Array:  # on the host: every shape would be a program of its own
        scale = share**0.5 if param.shape == (hidden_size,) and param.init == "ones" else 1.0
        padded = np.zeros(param.shape, small.dtype)
        padded[tuple(slice(0, size) for size in small.shape)] = np.asarray(small) * scale
        return jnp.asarray(padded)

    declared = declarations.declare(inflated)
    silent = jax.tree.map(np.zeros_like, target.params["layers"][0])
    layers = target.params["layers"] + [silent] * (num_layers - config.num_layers)
    params = jax.tree.map(pad, declared, target.params | {"layers": layers})
    if target.mesh is not None:
        params = jax.device_put(params, declarations.shardings(declared, target.mesh, inflated.axis_units))
    return replace(target, params=params, config=inflated)
