"""The optimizer that an `OptimizerConfig` describes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from specjax.training.config import OptimizerConfig


@functools.cache
def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Make the optimizer of a configuration. Weight decay applies to matrices, not norms or biases.

    Equal arguments give the same object, so that JAX reuses a compiled step.
    """
    schedule = _schedule(config, steps)

    def matrices(params: Any) -> Any:
        return jax.tree_util.tree_map_with_path(_decays, params)

    descent = optax.adamw(
        schedule, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=matrices
    )
    if config.method == "muon":
        # consistent_rms scales orthogonalized updates to the size of AdamW's.
        muon = optax.contrib.muon(schedule, consistent_rms=0.2, weight_decay=config.weight_decay)
        descent = optax.multi_transform({"adamw": descent, "muon": muon}, _label_parameters)
    return optax.chain(optax.clip_by_global_norm(config.clip), descent)


def learning_rates(config: OptimizerConfig, steps: int) -> np.ndarray:
    """Return the learning rate of each step of a run, ``[steps]``.

    Examples:
        >>> from specjax.training.config import OptimizerConfig
        >>> from specjax.training.optimizer import learning_rates
        >>> config = OptimizerConfig(learning_rate=0.1, warmup_steps=2, final_share=0.5)
        >>> [round(float(rate), 3) for rate in learning_rates(config, 6)]
        [0.0, 0.05, 0.1, 0.093, 0.075, 0.057]
    """
    return np.asarray(jax.vmap(_schedule(config, steps))(jnp.arange(steps)))


def _schedule(config: OptimizerConfig, steps: int) -> optax.Schedule:
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(config.warmup_steps, steps // 2),
        decay_steps=steps,
        end_value=config.final_share * config.learning_rate,
    )


def _decays(path: Any, leaf: jax.Array) -> bool:
    """Return whether weight decay applies to a parameter.

    It does not apply to norms and biases, nor to DFlash2's convolution kernels, whose neutral value
    is 1.
    """
    is_kernel = jax.tree_util.keystr(path, simple=True, separator=".").endswith("_conv_base")
    return leaf.ndim > 1 and not is_kernel


def _label_parameters(params: Any) -> Any:
    """Label parameters "muon" or "adamw".

    Muon gets the matrices under ``layers`` and ``fc``, which joins a drafter's inputs. AdamW gets
    embeddings, which are tables of vectors and not linear maps, and heads, their transposes.
    """

    def label(path: Any, leaf: jax.Array) -> str:
        keys = jax.tree_util.keystr(path, simple=True, separator=".").split(".")
        return "muon" if leaf.ndim == 2 and ("layers" in keys or keys[-1] == "fc") else "adamw"

    return jax.tree_util.tree_map_with_path(label, params)
