"""Drafters: one file a method."""

from specjax.drafters.base import Drafter, NoDraft
from specjax.drafters.cache_schemes import Scheme, SnapKV, Streaming
from specjax.drafters.compressed_cache import CompressedCache
from specjax.drafters.dflash import DFlash
from specjax.drafters.dflash2 import DFlash2
from specjax.drafters.draft_model import DraftModel, check_vocabulary
from specjax.drafters.dspark import DSpark
from specjax.drafters.eagle import Eagle
from specjax.drafters.eagle3 import Eagle3
from specjax.drafters.eagle_layer_attention import EagleWithLayerAttention
from specjax.drafters.early_exit import EarlyExit
from specjax.drafters.gemma4_assistant import Gemma4Assistant
from specjax.drafters.medusa import Medusa
from specjax.drafters.mixture_of_attentions import MixtureOfAttentions
from specjax.drafters.mtp import MTP
from specjax.drafters.peagle import PEagle
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.drafters.trained import CheckpointFormat, TrainedDrafter
from specjax.drafters.with_prediction import WithPrediction
from specjax.drafts.draft import Draft, Verdict

__all__ = [
    "MTP",
    "CheckpointFormat",
    "CompressedCache",
    "DFlash",
    "DFlash2",
    "DSpark",
    "Draft",
    "DraftModel",
    "Drafter",
    "Eagle",
    "Eagle3",
    "EagleWithLayerAttention",
    "EarlyExit",
    "Gemma4Assistant",
    "Medusa",
    "MixtureOfAttentions",
    "NoDraft",
    "PEagle",
    "PromptLookup",
    "Scheme",
    "SnapKV",
    "Streaming",
    "TrainedDrafter",
    "Verdict",
    "WithPrediction",
    "check_vocabulary",
]
