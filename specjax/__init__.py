"""specjax: lossless speculative decoding in JAX.

The shapes in all docstrings use the same letters: B batch, P prompt tokens, T tokens in a call, N
nodes of a draft (with the root), D draft depth, S cache capacity, V vocabulary, H hidden size, L
layers.
"""

import importlib.util
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specjax.installation import warn_of_mismatches

if TYPE_CHECKING:
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
        Suffix,
        Together,
        TokenRecycling,
    )
    from specjax.drafts.published import EAGLE_TREE, MEDUSA_TREE
    from specjax.drafts.shapes import (
        Chain,
        DynamicTree,
        SampledTree,
        StaticTree,
        UnionTree,
        complete_tree,
    )
    from specjax.evaluation import conformance
    from specjax.grammars import (
        After,
        Choice,
        JsonObject,
        JsonSchema,
        Lark,
        Regex,
        StructuralTag,
        ThinkingBudget,
    )
    from specjax.models.transformer import Target
    from specjax.pipeline import Generation, TextGenerator, load
    from specjax.sampling import Sampling
    from specjax.sampling_params import SamplingParams
    from specjax.sharding import make_mesh

__version__ = "0.1.0"
__all__ = [
    "EAGLE_TREE",
    "MEDUSA_TREE",
    "MTP",
    "After",
    "Chain",
    "Choice",
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
    "JsonObject",
    "JsonSchema",
    "Lark",
    "Medusa",
    "MixtureOfAttentions",
    "PEagle",
    "PromptLookup",
    "Regex",
    "Result",
    "SampledTree",
    "Sampling",
    "SamplingParams",
    "SnapKV",
    "StaticTree",
    "Streaming",
    "StructuralTag",
    "Suffix",
    "Target",
    "TextGenerator",
    "ThinkingBudget",
    "Together",
    "TokenRecycling",
    "UnionTree",
    "complete_tree",
    "conformance",
    "generate",
    "load",
    "make_mesh",
    "serving",
    "stream",
]

# The module of each name of `__all__` that is not itself a module. Names are imported at first use:
# `import specjax` is fast, and `specjax env` works where JAX or another package is broken.
# tests/test_lazy_names.py compares this table with the imports above.
_HOMES = {
    "specjax.decoding": ("Result", "generate", "stream"),
    "specjax.drafters": (
        "MTP",
        "CompressedCache",
        "DFlash",
        "DFlash2",
        "DSpark",
        "DraftModel",
        "Eagle",
        "Eagle3",
        "EagleWithLayerAttention",
        "EarlyExit",
        "Gemma4Assistant",
        "Medusa",
        "MixtureOfAttentions",
        "PEagle",
        "PromptLookup",
        "SnapKV",
        "Streaming",
        "Suffix",
        "Together",
        "TokenRecycling",
    ),
    "specjax.drafts.published": ("EAGLE_TREE", "MEDUSA_TREE"),
    "specjax.drafts.shapes": (
        *("Chain", "DynamicTree", "SampledTree", "StaticTree", "UnionTree", "complete_tree"),
    ),
    "specjax.grammars": (
        *("After", "Choice", "JsonObject", "JsonSchema", "Lark", "Regex", "StructuralTag"),
        "ThinkingBudget",
    ),
    "specjax.models.transformer": ("Target",),
    "specjax.pipeline": ("Generation", "TextGenerator", "load"),
    "specjax.sampling": ("Sampling",),
    "specjax.sampling_params": ("SamplingParams",),
    "specjax.sharding": ("make_mesh",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        value = getattr(importlib.import_module(_HOME_OF[name]), name)
    elif name == "conformance":
        value = importlib.import_module("specjax.evaluation.conformance")
    elif not name.startswith("_") and importlib.util.find_spec(f"specjax.{name}"):
        value = importlib.import_module(f"specjax.{name}")  # a module, such as specjax.processes
    else:
        raise AttributeError(f"module 'specjax' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# `env` reports mismatches itself.
if not (sys.argv[1:2] == ["env"] and Path(sys.argv[0]).name in ("-m", "specjax")):
    warn_of_mismatches()
