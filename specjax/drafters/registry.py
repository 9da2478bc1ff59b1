"""Drafters and shapes of drafts by name, as command lines give them."""

from typing import Any

from jax.sharding import Mesh

from specjax.drafters.base import Drafter
from specjax.drafters.draft_model import DraftModel, check_vocabulary
from specjax.drafters.early_exit import EarlyExit
from specjax.drafters.prompt_lookup import PromptLookup
from specjax.errors import InputError
from specjax.models import huggingface
from specjax.models.config import ModelConfig
from specjax.tree import EAGLE_TREE, MEDUSA_TREE, Chain, DynamicTree, SampledTree, Shape, StaticTree, complete_tree

SHAPES = "chain:LENGTH, chain:LENGTH,STOP_BELOW, eagle, medusa, complete:WIDTH,WIDTH,…, sampled:WIDTH,WIDTH,…, dynamic or "
SHAPES += "dynamic:TOP_K,DEPTH,NODES"


def parse_shape(name: str) -> Shape:
    """The shape called ``name``, such as ``chain:4`` or ``dynamic:10,7,60``.

    Raises:
        InputError: there is none of that name, or its numbers do not make one.
    """
    kind, _, rest = name.partition(":")
    words = rest.split(",") if rest else []
    try:
        match kind, len(words):
            case "chain", 1 | 2:
                return Chain(int(words[0]), *map(float, words[1:]))
            case "complete", count if count:
                return StaticTree(complete_tree(tuple(map(int, words))))
            case "sampled", count if count:
                return SampledTree(tuple(map(int, words)))
            case "dynamic", 0 | 3:
                return DynamicTree(*map(int, words))
            case "eagle", 0:
                return StaticTree(EAGLE_TREE)
            case "medusa", 0:
                return StaticTree(MEDUSA_TREE)
    except InputError:
        raise
    except ValueError:  # a word is no number: as wrong as another name
        pass
    raise InputError(f"draft={name!r}: must be {SHAPES}")


def load_drafter(name: str, draft: Shape, target: ModelConfig, dtype: Any = None, mesh: Mesh | None = None) -> Drafter:
    """The drafter called ``name``: "prompt-lookup", "early-exit:LAYERS", or the directory or hub id of a draft model.

    Raises:
        InputError: it cannot be, or its vocabulary is not that of a ``target`` so configured; says so before weights are read.
    """
    kind, _, layers = name.partition(":")
    if kind == "early-exit":
        if not layers.isdecimal():
            raise InputError(f"drafter={name!r}: write early-exit:LAYERS, such as early-exit:4")
        return EarlyExit(layers=int(layers), draft=draft)
    if kind == "prompt-lookup":
        drafter = PromptLookup(draft=draft)  # pyright: ignore[reportArgumentType]
        drafter.check_draft()
        return drafter
    draft.check(target.vocab_size)
    check_vocabulary(huggingface.read_config(huggingface.locate(name, weights=False)), target)
    return DraftModel.from_pretrained(name, draft=draft, dtype=dtype, mesh=mesh)
