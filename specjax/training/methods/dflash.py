"""DFlash (z-lab 2025): all tokens of a block from one pass; near tokens have more weight."""

from dataclasses import dataclass
from typing import Literal

from specjax.training.objectives.blocks import TokenMethod


@dataclass(frozen=True)
class DFlashTraining(TokenMethod):
    """The loss of `TokenMethod` at every depth of every block.

    Attributes:
        name: the name of the method.

    Examples:
        >>> from specjax.training.methods import DFlashTraining
        >>> DFlashTraining(target="embedded").check(window=512)
        >>> DFlashTraining().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give ...
    """

    name: Literal["dflash"] = "dflash"
