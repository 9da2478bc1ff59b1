"""The sampling parameters of a checkpoint's generation_config.json, in commands."""

from collections.abc import Mapping
from typing import Any, Literal

from specjax.models.generation_config import FILE
from specjax.progress import say
from specjax.sampling import Sampling

GenerationConfig = Literal["auto", "none"]
"""Whether a checkpoint's sampling parameters apply where an option or a request gives none."""


def read_choice(choice: GenerationConfig) -> Literal["auto"] | None:
    """Convert an option ``--generation-config`` to the argument of `specjax.load`."""
    return None if choice == "none" else choice


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
