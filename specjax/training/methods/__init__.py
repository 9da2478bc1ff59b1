"""What can be trained, and how: one file a method, named as its paper names it.

A new method is one file here with a `TrainingMethod` (`specjax.training.contract` says what that is), and one more name in
`AnyMethod`: the loop, the configuration files and the command line know it from there. What several methods are made of lies in
`specjax.training.objectives`.
"""

from specjax.training.methods.dflash import DFlashTraining
from specjax.training.methods.dflash2 import DFlash2Training
from specjax.training.methods.distill import Distill
from specjax.training.methods.dspark import DSparkTraining
from specjax.training.methods.eagle1 import Eagle1Training
from specjax.training.methods.eagle3 import Eagle3Training
from specjax.training.methods.gemma4_assistant import Gemma4AssistantTraining
from specjax.training.methods.hass import HassTraining
from specjax.training.methods.jetspec import JetSpecTraining
from specjax.training.methods.lm import Lm
from specjax.training.methods.lm_mtp import LmMTP
from specjax.training.methods.medusa import MedusaTraining
from specjax.training.methods.moa import MoATraining
from specjax.training.methods.mtp import MTPTraining
from specjax.training.methods.peagle import PEagleTraining

AnyMethod = (
    Lm
    | Distill
    | Eagle1Training
    | HassTraining
    | Eagle3Training
    | MTPTraining
    | LmMTP
    | MedusaTraining
    | MoATraining
    | Gemma4AssistantTraining
    | DFlashTraining
    | DFlash2Training
    | JetSpecTraining
    | DSparkTraining
    | PEagleTraining
)
"""The table of methods: what the section ``method`` of a configuration can be, told apart by its ``name``."""

__all__ = [
    "AnyMethod",
    "DFlash2Training",
    "DFlashTraining",
    "DSparkTraining",
    "Distill",
    "Eagle1Training",
    "Eagle3Training",
    "Gemma4AssistantTraining",
    "HassTraining",
    "JetSpecTraining",
    "Lm",
    "LmMTP",
    "MTPTraining",
    "MedusaTraining",
    "MoATraining",
    "PEagleTraining",
]
