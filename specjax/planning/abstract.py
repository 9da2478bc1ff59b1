"""Models and drafters without weights: shapes that say where on a mesh they lie, to compile with."""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import sharding
from specjax.drafters import (
    MTP,
    CompressedCache,
    DraftModel,
    Eagle,
    Eagle3,
    EarlyExit,
    Medusa,
    MixtureOfAttentions,
    NoDraft,
    PromptLookup,
    eagle,
    eagle3_checkpoint,
    medusa,
    mixture_of_attentions,
    mtp,
)
from specjax.drafters.base import Drafter
from specjax.drafters.registry import load_drafter
from specjax.models import params
from specjax.models.config import ModelConfig
from specjax.models.shapes import PUBLISHED, published
from specjax.models.transformer import Target
from specjax.tree import Shape

USUAL_DRAFT_VOCABULARY = 32_000
"""Tokens that published EAGLE-3 drafters of large vocabularies can draft."""

_DECLARED: Mapping[type, Callable[[Any], tuple[Any, Mapping[str, int]]]] = {
    Eagle: lambda config: (eagle.declare(config), config.layer.axis_units),
    Eagle3: lambda config: (eagle3_checkpoint.declare(config), eagle3_checkpoint.units(config)),
    MTP: lambda config: (mtp.declare(config), config.layer.axis_units),
    Medusa: lambda config: (medusa.declare(config), config.axis_units),
    MixtureOfAttentions: lambda config: (mixture_of_attentions.declare(config), config.layer.axis_units),
}
"""Of drafters with weights of their own: how a configuration's are declared, and the units of their axes."""

TRAINED: Mapping[str, type] = {
    "eagle": Eagle,
    "eagle3": Eagle3,
    "mtp": MTP,
    "medusa": Medusa,
    "moa": MixtureOfAttentions,
}
"""Drafters that are trained for a target, by the name of their method."""


def abstract_model(config: ModelConfig, mesh: Mesh, dtype: Any = jnp.bfloat16) -> Target:
    """A model of that shape on ``mesh``, whose params are shapes."""
    declared = params.declare(config)
    return Target(_placed(declared, mesh, config.axis_units, dtype), config, mesh)


def _placed(declared: Any, mesh: Mesh, units: Mapping[str, int], dtype: Any) -> Any:
    def shape(param: params.Param, place: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype or dtype), sharding=place)

    return jax.tree.map(shape, declared, params.shardings(declared, mesh, units))


def abstract_drafter(name: str, draft: Shape | None, target: Target) -> Drafter:
    """The drafter called ``name``, whose params are shapes, for an abstract ``target``.

    Args:
        name: ``none``; the name of a method that is trained for its target, such as ``eagle3``, for one of the usual size; a
            published shape, for a draft model; or as on every other command line, for that checkpoint.
        draft: the shape of its drafts; None is the drafter's own.
        target: what it drafts for.

    Raises:
        InputError: there is no such drafter, or it does not fit the target.
    """
    mesh = target.mesh
    assert mesh is not None
    if draft is not None:
        draft.check(target.config.vocab_size)
    if name == "none":
        return NoDraft()
    if name.lower() in PUBLISHED:
        model = abstract_model(published(name), mesh)
        drafter = DraftModel(model) if draft is None else DraftModel(model, draft=draft)
        drafter.check(target)
        return drafter
    if name in TRAINED:
        return _usual(TRAINED[name], {} if draft is None else {"draft": draft}, target)
    loaded = load_drafter(name, draft, target.config, jnp.bfloat16)
    loaded.check(replace(target, mesh=None))
    return place_model(loaded, mesh)


def _usual(kind: Any, shape: Mapping[str, Any], target: Target) -> Drafter:
    """One as its method trains it: with what its ``init`` takes for granted."""
    sizes = {}
    if kind is Eagle3 and target.config.vocab_size > USUAL_DRAFT_VOCABULARY:
        sizes["ids"] = np.arange(USUAL_DRAFT_VOCABULARY)
    alone = replace(target, mesh=None)

    def make(target: Target) -> Any:
        drafter = kind.init(target, jax.random.key(0), **shape, **sizes)
        if kind is not Eagle3:  # which looks at its ids, and has none here
            drafter.check(target)
        return drafter

    return place_model(jax.eval_shape(make, alone), target.mesh)


def place_model(model: Any, mesh: Mesh | None, dtype: Any = jnp.bfloat16) -> Any:
    """A model or a drafter, or what holds some of them, with shapes on ``mesh`` in place of its params."""
    assert mesh is not None
    if isinstance(model, Target):
        return abstract_model(model.config, mesh, dtype)
    if type(model) in _DECLARED:
        declared, units = _DECLARED[type(model)](model.config)
        return replace(model, params=_placed(declared, mesh, units, dtype), mesh=mesh)
    parts = {field.name: getattr(model, field.name) for field in fields(model)}
    held = {name: part for name, part in parts.items() if isinstance(part, Target) or type(part) in _DECLARED}
    return replace(model, **{name: place_model(part, mesh, dtype) for name, part in held.items()})


def rows(mesh: Mesh, batch: int, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """An array of a batch on ``mesh``: its rows are split over ``data`` where it has rows and they can be."""
    axes = ("batch", *(None,) * (len(shape) - 1)) if shape[:1] == (batch,) else (None,) * len(shape)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.named(mesh, axes, {"batch": batch}))


def everywhere(mesh: Mesh, leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape of ``leaf``, which every device of ``mesh`` has."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def bytes_of_one(tree: Any) -> int:
    """Bytes that one device holds of the arrays of ``tree``."""

    def held(leaf: Any) -> int:
        return int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) * leaf.dtype.itemsize

    return sum(held(leaf) for leaf in jax.tree.leaves(tree) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


# --- the least that a step must read ---------------------------------------------------------------------------------


def bytes_of_pass(target: Target, cache: Any) -> int:
    """Bytes that one device must read for a pass: its part of all matrices, all experts among them, and of the whole cache."""
    weights = {name: value for name, value in target.params.items() if name != "embed" or target.config.tie_embeddings}
    return bytes_of_one(weights) + bytes_of_one(cache)


def bytes_of_draft(drafter: Drafter, target: Target, state: Any = (), cache: Any = ()) -> int:
    """Bytes that one device must read to draft once: for every level the weights that it is worked out with, and what the
    drafter remembers.

    Args:
        drafter: the drafter.
        target: abstract, likewise.
        state: the drafter's; without it the weights alone count.
        cache: the target's entries, by layer; likewise.
    """
    depth, held = drafter.draft.depth, bytes_of_one(state)
    head = bytes_of_one(target.params["lm_head" if "lm_head" in target.params else "embed"])
    if isinstance(drafter, NoDraft | PromptLookup):
        return 0
    if isinstance(drafter, CompressedCache):
        return depth * bytes_of_pass(target, state)
    if isinstance(drafter, EarlyExit):
        return depth * (bytes_of_one((target.params["layers"][: drafter.layers], cache[: drafter.layers])) + head)
    if isinstance(drafter, DraftModel):
        return depth * bytes_of_pass(drafter.model, state)
    own = {name: value for name, value in drafter.params.items() if name != "embed"}  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(drafter, Medusa):  # all levels at once
        return bytes_of_one(own)
    if isinstance(drafter, MTP):  # a level runs one of the modules
        return depth * (bytes_of_one(own) // drafter.modules + head + held // drafter.modules)
    if isinstance(drafter, Eagle3):  # `fc` reads the target's layers, once a step
        level = bytes_of_one({name: own[name] for name in ("layers", "norm", "lm_head")})
        return depth * (level + held) + bytes_of_one(own) - level
    return depth * (bytes_of_one(own) + held + head)
