"""The training methods, one file each, with the names of their papers.

To add a method, add a file with a `TrainingMethod` (see `specjax.training.contract`), and its name
to `AnyMethod`. The loop, configuration files and the command line use that list. Parts that several
methods share are in `specjax.training.objectives`.
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
"""All methods. The ``name`` in the section ``method`` of a configuration selects one."""

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
