"""specjax: lossless speculative decoding in JAX.

Array letters used in shapes everywhere: B batch, P prompt tokens, T tokens in a call, N nodes of a draft (root included),
D draft depth, S cache capacity, V vocabulary, H hidden size, L layers.
"""

from specjax import serving
from specjax.decoding import Result, generate, stream
from specjax.drafters import (
    MTP,
    CompressedCache,
    DFlash,
    DFlash2,
    DraftModel,
    DSpark,
    Eagle,
    Eagle3,
    EagleWithLayerAttention,
    EarlyExit,
    Gemma4Assistant,
    Medusa,
    MixtureOfAttentions,
    PEagle,
    PromptLookup,
    SnapKV,
    Streaming,
)
from specjax.drafts.published import EAGLE_TREE, MEDUSA_TREE
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree, StaticTree, complete_tree
from specjax.evaluation import conformance
from specjax.models.transformer import Target
from specjax.pipeline import Generation, TextGenerator, load
from specjax.sampling import Sampling
from specjax.sharding import make_mesh

__version__ = "0.1.0"
__all__ = [
    "EAGLE_TREE",
    "MEDUSA_TREE",
    "MTP",
    "Chain",
    "CompressedCache",
    "DFlash",
    "DFlash2",
    "DSpark",
    "DraftModel",
    "DynamicTree",
    "Eagle",
    "Eagle3",
    "EagleWithLayerAttention",
    "EarlyExit",
    "Gemma4Assistant",
    "Generation",
    "Medusa",
    "MixtureOfAttentions",
    "PEagle",
    "PromptLookup",
    "Result",
    "SampledTree",
    "Sampling",
    "SnapKV",
    "StaticTree",
    "Streaming",
    "Target",
    "TextGenerator",
    "complete_tree",
    "conformance",
    "generate",
    "load",
    "make_mesh",
    "serving",
    "stream",
]
