"""The sampling parameters of a checkpoint's generation_config.json, as commands speak of them."""

from collections.abc import Mapping
from typing import Any, Literal

from specjax.models.generation_config import FILE
from specjax.progress import say
from specjax.sampling import Sampling

GenerationConfig = Literal["auto", "none"]
"""Whether a checkpoint's own sampling parameters stand where an option, or a request, states none."""


def read_choice(choice: GenerationConfig) -> Literal["auto"] | None:
    """Return what `specjax.load` is given for an option ``--generation-config``."""
    return None if choice == "none" else choice


def say_defaults(default_sampling: Sampling | None, otherwise: str, stated: Mapping[str, Any] | None = None) -> None:
    """Say in a line which of a checkpoint's sampling parameters are in force; nothing where none is.

    Args:
        default_sampling: those of the checkpoint; None: it has none.
        otherwise: what is in force with ``--generation-config none``, in words.
        stated: the command's own, by name, which go over them; None is one that is left out.
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
