"""Models and drafters without weights: shapes that say where on a mesh they lie, to compile with."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from specjax import sharding
from specjax.drafters import registry
from specjax.drafters.base import Drafter, NoDraft
from specjax.drafters.methods.draft_model import DraftModel
from specjax.drafters.trained import TrainedDrafter
from specjax.drafts.names import as_shape
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError
from specjax.models import params
from specjax.models.cache import KVCache, PagedCache, groups_of
from specjax.models.config import ModelConfig
from specjax.models.published import PUBLISHED, published
from specjax.models.quantization import schemes
from specjax.models.states import State
from specjax.models.transformer import Target


def abstract_model(config: ModelConfig, mesh: Mesh, dtype: DTypeLike = jnp.bfloat16, weights: str = schemes.FLOATS) -> Target:
    """A model so configured on ``mesh``, whose params are shapes; ``weights`` as in `Target.from_pretrained`."""
    declared = params.declare(config)
    if weights != schemes.FLOATS:
        declared = schemes.declare(declared, schemes.of_model(schemes.scheme_of(weights).form_of, config.tie_embeddings), mesh)
    return Target(_placed(declared, mesh, config.axis_units, dtype), config, mesh)


def _placed(declared: Any, mesh: Mesh, units: Mapping[str, int], dtype: DTypeLike) -> Any:
    def shape(param: params.Param, place: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype or dtype), sharding=place)

    return jax.tree.map(shape, declared, params.shardings(declared, mesh, units))


def abstract_drafter(name: str, draft: DraftShape | int | None, target: Target, weights: str = schemes.FLOATS) -> Drafter:
    """The drafter called ``name``, whose params are shapes, for an abstract ``target``.

    Args:
        name: ``none``; the name of a method that is trained for its target, such as ``eagle3``, for one of the usual size; a
            published model, for a draft model; or as on every other command line, for that checkpoint.
        draft: the shape of its drafts; None is the drafter's own.
        target: what it drafts for.
        weights: of a published draft model, as in `abstract_model`; other drafters' are floats.

    Raises:
        InputError: there is no such drafter, or it does not fit the target.
    """
    mesh = target.mesh
    assert mesh is not None
    if draft is not None:
        as_shape(draft).check(target.config.vocab_size)
    if name == "none":
        return NoDraft()
    if name.lower() in PUBLISHED:
        model = abstract_model(published(name), mesh, weights=weights)
        drafter = DraftModel(model) if draft is None else DraftModel(model, draft=draft)
        drafter.check(target)
        return drafter
    method = registry.METHODS.get(name)
    if method is not None and method.trained is not None:
        return _usual(method.trained, {} if draft is None else {"draft": draft}, target)
    loaded = registry.load_drafter(name, draft, target.config, jnp.bfloat16)
    loaded.check(replace(target, mesh=None))
    return place_model(loaded, mesh)


def stored_drafter(name: str, target: Target) -> TrainedDrafter:
    """The drafter called ``name``, one that was trained for its target, as `place_model` has it. Of its checkpoint no more is
    read than `TrainedDrafter.abstract_from` reads.

    Raises:
        InputError: there is no such drafter, it is of another kind, or it does not fit the target.
    """
    method, where, files = registry.find(name)
    if method.trained is None:
        raise InputError(f"drafter={name!r}: is no drafter that is trained for its target")
    drafter = method.trained.abstract_from(files or where, dtype=jnp.bfloat16, **dict(method.settings))
    alone = replace(target, mesh=None)
    jax.eval_shape(lambda drafter, target: drafter.check(target), drafter, alone)  # it may compute with its params
    return place_model(drafter, target.mesh)


def _usual(kind: type[TrainedDrafter], shape: Mapping[str, Any], target: Target) -> Drafter:
    """One as its method trains it: with what its ``init`` takes for granted."""
    alone, sizes = replace(target, mesh=None), kind.usual_sizes(target)

    def make(target: Target) -> Any:
        drafter = kind.init(target, jax.random.key(0), **shape, **sizes)
        drafter.check(target)
        return drafter

    return place_model(jax.eval_shape(make, alone), target.mesh)


def place_model(model: Any, mesh: Mesh | None, dtype: DTypeLike = jnp.bfloat16) -> Any:
    """A model or a drafter, or what holds some of them, with shapes on ``mesh`` in place of its params."""
    assert mesh is not None
    if isinstance(model, Target):
        return abstract_model(model.config, mesh, dtype)
    if isinstance(model, TrainedDrafter):
        placed: Any = model  # a dataclass
        return replace(placed, params=_placed(model.declared, mesh, model.units, dtype), mesh=mesh)
    parts = {field.name: getattr(model, field.name) for field in fields(model)}
    held = {name: part for name, part in parts.items() if isinstance(part, Target | TrainedDrafter)}
    return replace(model, **{name: place_model(part, mesh, dtype) for name, part in held.items()})


def rows(mesh: Mesh, batch: int, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """An array of a batch on ``mesh``: its rows are split over ``data`` where it has rows and they can be."""
    axes = ("batch", *(None,) * (len(shape) - 1)) if shape[:1] == (batch,) else (None,) * len(shape)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.named(mesh, axes, {"batch": batch}))


def everywhere(mesh: Mesh, leaf: Any) -> jax.ShapeDtypeStruct:
    """The shape of ``leaf``, which every device of ``mesh`` has."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec()))


def with_shardings(tree: Any, shardings: Any) -> Any:
    """The shapes of ``tree``, each with that of ``shardings`` in its place."""
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, shardings)


def states_in(tree: Any) -> list[State]:
    """The states of layers with linear attention that ``tree`` holds."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, State))
    return [leaf for leaf in leaves if isinstance(leaf, State)]


def in_pages(state: Any, page: int, mesh: Mesh) -> Any:
    """``state``, of shapes on ``mesh``, with a `PagedCache` in place of every `KVCache`.

    Each has as many pages of ``page`` tokens as its rows together can fill: as large a pool as what it takes the place of.
    """

    def paged(node: Any) -> Any:
        if not isinstance(node, KVCache):
            return node
        pages = node.length.shape[0] // groups_of(mesh) * -(-node.capacity // page)
        cache = jax.eval_shape(lambda: PagedCache.like(node, pages=pages, page=page, mesh=mesh))
        places = replace(cache, layers=node.layers, table=node.length, length=node.length)  # whose first axes lie alike
        return with_shardings(cache, jax.tree.map(lambda place: place.sharding, places))

    return jax.tree.map(paged, state, is_leaf=lambda node: isinstance(node, KVCache))


def bytes_of_one(tree: Any) -> int:
    """Bytes that one device holds of the arrays of ``tree``."""

    def held(leaf: Any) -> int:
        numbers = int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64))
        return numbers // 2 if leaf.dtype == jnp.int4 else numbers * leaf.dtype.itemsize

    return sum(held(leaf) for leaf in jax.tree.leaves(tree) if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def numbers_of_one(tree: Any) -> int:
    """Numbers that one device holds of the arrays of ``tree``."""
    return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64)) for leaf in jax.tree.leaves(tree))


# --- the least that a step must read ---------------------------------------------------------------------------------


def bytes_of_pass(target: Target, cache: Any) -> int:
    """Bytes that one device must read for a pass: its part of all matrices, all experts among them, and of the whole ``cache``,
    its states among it."""
    return bytes_of_one(target.weights_of_pass) + bytes_of_one(cache)


def bytes_of_draft(drafter: Drafter, target: Target, state: Any = (), cache: Sequence[Any] = ()) -> int:
    """Bytes that one device must read to draft once: for every level the weights that it is worked out with, and what the
    drafter remembers. Arguments as in `Drafter.drafting_reads`.
    """
    reads = drafter.drafting_reads(target, state, cache)
    return drafter.draft_shape.depth * bytes_of_one(reads.level) + bytes_of_one(reads.step)
