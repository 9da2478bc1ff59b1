"""Checks of options that several ``specjax plan`` commands share, and the model of a name."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
from rich.console import Console

from specjax.errors import InputError
from specjax.models import config_json, hub
from specjax.models.config import ModelConfig
from specjax.models.published import PUBLISHED, published
from specjax.reports import pictures

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MAX_ROWS, _LONGEST_CHAIN = 2**20, 256


def check_batch(batch: Sequence[int]) -> None:
    """Refuse invalid numbers of rows."""
    if min(batch, default=0) < 1:
        raise InputError(
            f"batch={min(batch, default=())}: give at least one number of rows, each at least 1"
        )
    if max(batch) > _MAX_ROWS:
        raise InputError(f"batch={max(batch)}: give at most {_MAX_ROWS} rows")


def check_longest(longest: int) -> None:
    """Refuse an invalid maximum chain length."""
    if not 1 <= longest <= _LONGEST_CHAIN:
        raise InputError(f"longest={longest}: must be at least 1 and at most {_LONGEST_CHAIN}")


def check_plot(plot: str) -> None:
    """Refuse a picture that could not be written, before anything is computed."""
    if plot:
        pictures.check_path("plot", plot)


def compute_on_the_cpu() -> None:
    """Let JAX compute on the CPU in this process, unless a platform was chosen.

    The variable JAX_PLATFORMS chooses one, or JAX's option ``jax_platforms``. A command that only
    compiles needs no other device. Where libtpu is installed, JAX would look for a TPU, and could
    then load no compiler for GPUs.
    """
    if not jax.config.jax_platforms:  # pyright: ignore[reportAttributeAccessIssue]
        jax.config.update("jax_platforms", "cpu")


def new_console() -> Console:
    """Return the console for tables, which prints names and numbers without markup."""
    return Console(highlight=False, markup=False, emoji=False)


def save_plot(console: Console, figure: "Figure", plot: str) -> None:
    """Write the picture to the path of the option, and print the path."""
    pictures.save(figure, "plot", Path(plot))
    console.out(f"picture: {plot}")


def is_checkpoint(name: str) -> bool:
    """Return True if a name is a checkpoint, alone or after a method, and not a published model."""
    is_place = (
        name == "embedded" or ":" in name or "/" in name or os.path.isdir(os.path.expanduser(name))
    )
    return is_place and name.lower() not in PUBLISHED


def find_model(argument: str, name: str) -> ModelConfig:
    """Return the configuration of a published model, or of a directory or hub id."""
    if is_checkpoint(name):
        return config_json.read_config(hub.open_checkpoint(name, weights=False))
    try:
        return published(name)
    except InputError as error:
        raise InputError(
            f"{argument}: {error}; or give a directory or a hub id owner/name"
        ) from None
