"""The options that ``generate`` and ``serve`` share: models and sampling parameters."""

from collections.abc import Mapping
from typing import Any, Literal

import jax

from specjax.models.generation_config import FILE
from specjax.progress import say
from specjax.sampling import Sampling
from specjax.sharding import mesh_for

GenerationConfig = Literal["auto", "none"]
"""Whether a checkpoint's sampling parameters apply where an option or a request gives none."""


def loading_options(config: Any) -> dict[str, Any]:
    """Return the arguments of `specjax.load` that ``generate`` and ``serve`` have as options.

    Also sets the precision of products on the device.
    """
    if config.precision != "default":
        jax.config.update("jax_default_matmul_precision", config.precision)
    return {
        "mesh": mesh_for(config.mesh),
        "dtype": config.dtype or None,
        "weights": config.weights,
        "cache_dtype": config.cache_dtype,
        "chat_template": config.chat_template,
        "chat_template_kwargs": config.chat_template_kwargs,
        "corpus": config.corpus,
        "generation_config": None if config.generation_config == "none" else "auto",
    }


def say_defaults(
    default_sampling: Sampling | None, otherwise: str, stated: Mapping[str, Any] | None = None
) -> None:
    """Print which of a checkpoint's sampling parameters apply; print nothing if there are none.

    Args:
        default_sampling: the checkpoint's sampling parameters; None if it has none.
        otherwise: what applies with ``--generation-config none``, in words.
        stated: the parameters of the command, by name, which override the others; None is a
            parameter that was not given.
    """
    if default_sampling is None:
        return
    stated = {name: value for name, value in (stated or {}).items() if value is not None}
    merged, neutral = default_sampling.with_explicit(**stated), vars(Sampling())
    in_force = [
        f"{name} {value:g}"
        for name, value in vars(merged).items()
        if name not in stated and (name == "temperature" or value != neutral[name])
    ]
    if in_force:
        say(f"{', '.join(in_force)} from {FILE}; --generation-config none for {otherwise}")
