"""Drafters: the methods, one file each, and what they share."""

from specjax.drafters.base import Drafter, NoDraft
from specjax.drafters.cache_schemes import Scheme, SnapKV, Streaming
from specjax.drafters.methods.compressed_cache import CompressedCache
from specjax.drafters.methods.dflash import DFlash
from specjax.drafters.methods.dflash2 import DFlash2
from specjax.drafters.methods.draft_model import DraftModel, check_vocabulary
from specjax.drafters.methods.dspark import DSpark
from specjax.drafters.methods.eagle import Eagle
from specjax.drafters.methods.eagle3 import Eagle3
from specjax.drafters.methods.eagle_layer_attention import EagleWithLayerAttention
from specjax.drafters.methods.early_exit import EarlyExit
from specjax.drafters.methods.gemma4_assistant import Gemma4Assistant
from specjax.drafters.methods.medusa import Medusa
from specjax.drafters.methods.mixture_of_attentions import MixtureOfAttentions
from specjax.drafters.methods.mtp import MTP
from specjax.drafters.methods.peagle import PEagle
from specjax.drafters.methods.prompt_lookup import PromptLookup
from specjax.drafters.methods.suffix import Suffix
from specjax.drafters.methods.token_recycling import TokenRecycling
from specjax.drafters.together import Together
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
    "Suffix",
    "Together",
    "TokenRecycling",
    "TrainedDrafter",
    "Verdict",
    "WithPrediction",
    "check_vocabulary",
]
