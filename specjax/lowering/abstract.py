"""Models and drafters whose params are shapes with shardings, for compilation without weights."""

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
from specjax.models import config_json, huggingface, params
from specjax.models.cache import KVCache, PagedCache, groups_of
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.published import PUBLISHED, published
from specjax.models.quantization import schemes
from specjax.models.states import State
from specjax.models.transformer import Target


def abstract_model(
    config: ModelConfig, mesh: Mesh, dtype: DTypeLike = jnp.bfloat16, weights: str = schemes.FLOATS
) -> Target:
    """Return a model on a mesh whose params are shapes.

    ``weights`` is the quantization, as in `Target.from_pretrained`.
    """
    declared = params.declare(config)
    if weights != schemes.FLOATS:
        declared = schemes.declare(
            declared,
            schemes.of_model(schemes.scheme_of(weights).form_of, config.tie_embeddings),
            mesh,
        )
    return Target(_placed(declared, mesh, config.axis_units, dtype), config, mesh)


def stored_model(files: CheckpointFiles, mesh: Mesh, dtype: DTypeLike = jnp.bfloat16) -> Target:
    """Return a model of a checkpoint on a mesh, whose params are shapes, quantized as stored."""
    config = config_json.read_config(files)
    declared = huggingface.declare_stored(files, config, mesh)
    return Target(_placed(declared, mesh, config.axis_units, dtype), config, mesh)


def _placed(declared: Any, mesh: Mesh, units: Mapping[str, int], dtype: DTypeLike) -> Any:
    def shape(param: params.Param, place: NamedSharding) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype or dtype), sharding=place)

    return jax.tree.map(shape, declared, params.shardings(declared, mesh, units))


def abstract_drafter(
    name: str, draft: DraftShape | int | None, target: Target, weights: str = schemes.FLOATS
) -> Drafter:
    """Return a drafter for an abstract target whose params are shapes.

    Args:
        name: ``none``; the name of a method such as ``eagle3``, for a trained drafter with default
            sizes; the name of a published model, for a draft model; or the name of a checkpoint, as
            in `specjax.load`.
        draft: the shape of the drafts; None for the drafter's own.
        target: the target.
        weights: the quantization of a published draft model, as in `abstract_model`. All other
            drafters have floats.

    Raises:
        InputError: There is no such drafter, or it does not fit the target.
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
    """Return a trained drafter of a checkpoint, whose params are shapes.

    Only that part of the checkpoint is read which `TrainedDrafter.abstract_from` reads.

    Raises:
        InputError: There is no such drafter, it is not trained for a target, or it does not fit
            this target.
    """
    method, where, files = registry.find(name)
    if method.trained is None:
        raise InputError(
            f"drafter={name!r}: it is not a drafter that is trained for its target; give such a one"
        )
    drafter = method.trained.abstract_from(
        files or where, dtype=jnp.bfloat16, **dict(method.settings)
    )
    unsharded = replace(target, mesh=None)
    # eval_shape, because `check` may compute with the params, which are shapes here.
    jax.eval_shape(lambda drafter, target: drafter.check(target), drafter, unsharded)
    return place_model(drafter, target.mesh)


def _usual(kind: type[TrainedDrafter], shape: Mapping[str, Any], target: Target) -> Drafter:
    """Return a drafter with the default sizes of its method."""
    unsharded, sizes = replace(target, mesh=None), kind.usual_sizes(target)

    def make(target: Target) -> Any:
        drafter = kind.init(target, jax.random.key(0), **shape, **sizes)
        drafter.check(target)
        return drafter

    return place_model(jax.eval_shape(make, unsharded), target.mesh)


def place_model(model: Any, mesh: Mesh | None, dtype: DTypeLike = jnp.bfloat16) -> Any:
    """Replace the params of a model, a drafter, or an object that has some, by shapes on a mesh."""
    assert mesh is not None
    if isinstance(model, Target):
        return abstract_model(model.config, mesh, dtype)
    if isinstance(model, TrainedDrafter):
        placed: Any = model  # a dataclass
        return replace(placed, params=_placed(model.declared, mesh, model.units, dtype), mesh=mesh)
    parts = {field.name: getattr(model, field.name) for field in fields(model)}
    models = {
        name: part for name, part in parts.items() if isinstance(part, Target | TrainedDrafter)
    }
    return replace(model, **{name: place_model(part, mesh, dtype) for name, part in models.items()})


def rows(mesh: Mesh, batch: int, shape: tuple[int, ...], dtype: DTypeLike) -> jax.ShapeDtypeStruct:
    """Return the shape of an array of a batch. Rows, if it has any, are sharded over ``data``."""
    axes = ("batch", *(None,) * (len(shape) - 1)) if shape[:1] == (batch,) else (None,) * len(shape)
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.named(mesh, axes, {"batch": batch}))


def everywhere(mesh: Mesh, leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape of a leaf that is replicated over a mesh."""
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, PartitionSpec())
    )


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Return the shapes of a tree with these shardings."""
    return jax.tree.map(
        lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, shardings
    )


def states_in(tree: Any) -> list[State]:
    """Return the linear-attention states of a tree."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, State))
    return [leaf for leaf in leaves if isinstance(leaf, State)]


def in_pages(state: Any, page: int, mesh: Mesh) -> Any:
    """Replace every `KVCache` of a state of shapes by a `PagedCache` of the same size.

    It has as many pages of ``page`` tokens as all rows together can fill.
    """

    def paged(node: Any) -> Any:
        if not isinstance(node, KVCache):
            return node
        pages = node.length.shape[0] // groups_of(mesh) * -(-node.capacity // page)
        cache = jax.eval_shape(lambda: PagedCache.like(node, pages=pages, page=page, mesh=mesh))
        # The first axes of these arrays are sharded like those of the paged cache.
        places = replace(cache, layers=node.layers, table=node.length, length=node.length)
        return with_shardings(cache, jax.tree.map(lambda place: place.sharding, places))

    return jax.tree.map(paged, state, is_leaf=lambda node: isinstance(node, KVCache))


def bytes_of_one(tree: Any) -> int:
    """Return the bytes of a tree's arrays on one device."""

    def shard_bytes(leaf: Any) -> int:
        numbers = int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64))
        return numbers // 2 if leaf.dtype == jnp.int4 else numbers * leaf.dtype.itemsize

    return sum(
        shard_bytes(leaf)
        for leaf in jax.tree.leaves(tree)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    )


def numbers_of_one(tree: Any) -> int:
    """Return how many numbers a tree's arrays have on one device."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape), dtype=np.int64))
        for leaf in jax.tree.leaves(tree)
    )


# --- the least that a step must read --------------------------------------------------------------


def bytes_of_pass(target: Target, cache: Any) -> int:
    """Return the bytes that one device must read for a pass.

    They are its shards of all matrices, with all experts, and of ``cache``: the entries that the
    pass reads, and states.
    """
    return bytes_of_one(target.weights_of_pass) + bytes_of_one(cache)


def bytes_of_draft(
    drafter: Drafter, target: Target, state: Any = (), cache: Sequence[Any] = ()
) -> int:
    """Return the bytes that one device must read to draft once.

    They are the weights and the caches that each level reads. The arguments are those of
    `Drafter.drafting_reads`.
    """
    reads = drafter.drafting_reads(target, state, cache)
    return drafter.draft_shape.depth * bytes_of_one(reads.level) + bytes_of_one(reads.step)
