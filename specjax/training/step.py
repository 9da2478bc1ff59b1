"""One step of training, for whatever pytree a `TrainingMethod` trains, and where its arrays lie on a mesh."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax import sharding
from specjax.models.transformer import Target
from specjax.training.contract import Batch, Metrics, TrainingMethod

_EVALUATION_WINDOWS = 64


@struct.dataclass
class TrainState:
    """What the next step needs.

    Attributes:
        student: the pytree that is trained, frozen parameters included.
        optimizer: the optimiser's state; it holds nothing for frozen parameters.
        step: number of steps taken.
        places: static, where each leaf lies on the mesh, so that a step leaves it there; None without a mesh.
    """

    student: Any
    optimizer: optax.OptState
    step: jax.Array
    places: tuple[NamedSharding, ...] | None = struct.field(pytree_node=False, default=None)


def initial_state(
    method: TrainingMethod, student: Any, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> TrainState:
    """The state before the first step."""
    # Steps donate the state's arrays, and a student may share some with the frozen target: it gets its own.
    student = jax.tree.map(jnp.copy, student)
    state = _first_state(method, student, optimizer)
    if mesh is None:
        return state
    state = jax.tree.map(partial(_onto, mesh), state)
    return replace(state, places=tuple(leaf.sharding for leaf in jax.tree.leaves(state)))


def _first_state(method: TrainingMethod, student: Any, optimizer: optax.GradientTransformation) -> TrainState:
    return TrainState(student, optimizer.init(trainable(student, method)), jnp.zeros((), jnp.int32))


def abstract_state(
    method: TrainingMethod, student: Any, optimizer: optax.GradientTransformation, mesh: Mesh | None = None
) -> TrainState:
    """`initial_state` of a ``student`` of shapes: shapes, which say where they lie where the student's do."""

    state = jax.eval_shape(lambda student: _first_state(method, student, optimizer), student)
    if mesh is None:
        return state
    places = {name_of(path): leaf.sharding for path, leaf in jax.tree_util.tree_leaves_with_path(student)}

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:  # the optimiser's lie as their parameters do
        own = next((place for name, place in places.items() if f".{name_of(path)}".endswith(f".{name}")), None)
        shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_place_of(mesh, shape))

    state = jax.tree_util.tree_map_with_path(place, state)
    return replace(state, places=tuple(leaf.sharding for leaf in jax.tree.leaves(state)))


def _onto(mesh: Mesh, leaf: jax.Array) -> jax.Array:
    """``leaf`` spread over ``mesh``."""
    return sharding.put(leaf, _place_of(mesh, leaf))


def _place_of(mesh: Mesh, leaf: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
    """As ``leaf`` lies over ``model`` already, and of matrices the longest other axis over ``data``.

    Every device keeps a part of the weights and of the optimiser's state, and is lent the rest for a step (FSDP).
    """
    place = leaf.sharding
    spec = place.spec if isinstance(place, NamedSharding) and place.mesh == mesh else ()
    axes = [*spec, *(None,) * (leaf.ndim - len(spec))]
    devices = mesh.shape["data"]
    free = [axis for axis, size in enumerate(leaf.shape) if axes[axis] is None and size % devices == 0]
    if leaf.ndim > 1 and devices > 1 and free:
        axes[max(free, key=lambda axis: leaf.shape[axis])] = "data"
    return NamedSharding(mesh, PartitionSpec(*axes))


def make_batch(windows: dict[str, np.ndarray], key: jax.Array, progress: float, mesh: Mesh | None = None) -> Batch:
    """The `Batch` of packed ``windows``; on a ``mesh`` its rows are split over ``data``."""
    batch: Batch = {**windows, "key": key, "progress": np.float32(progress)}  # pyright: ignore[reportAssignmentType]
    if mesh is None:
        return batch
    units = {"batch": len(windows["tokens"])}

    def place(name: str) -> NamedSharding:
        return sharding.named(mesh, ("batch",) if name in windows else (), units)

    return {name: sharding.put(value, place(name)) for name, value in batch.items()}


@partial(jax.jit, static_argnames=("method", "optimizer", "accumulate", "compute_dtype"), donate_argnames="state")
def train_step(
    state: TrainState,
    batch: Batch,
    target: Target | None,
    *,
    method: TrainingMethod,
    optimizer: optax.GradientTransformation,
    accumulate: int = 1,
    compute_dtype: Any = jnp.float32,
) -> tuple[TrainState, Metrics]:
    """One optimiser step.

    Args:
        state: is donated.
        batch: of B rows.
        target: the frozen one, or None.
        method: what is minimised.
        optimizer: as the state was made with.
        accumulate: parts of the batch, which are worked out one after another; their gradients are averaged. Divides B.
        compute_dtype: what the student's weights are turned into for the products.
    """
    trained = trainable(state.student, method)

    def loss(trained: Any, part: Batch) -> tuple[jax.Array, Metrics]:
        return method.objective(cast(_with(trained, state.student), compute_dtype), part, target)

    def add(sums: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, jax.grad(loss, has_aux=True)(trained, part)), None

    if accumulate == 1:
        gradients, metrics = jax.grad(loss, has_aux=True)(trained, batch)
    else:
        parts = _parts(batch, accumulate)
        shapes = jax.eval_shape(jax.grad(loss, has_aux=True), trained, jax.tree.map(lambda leaf: leaf[0], parts))
        sums, _ = jax.lax.scan(add, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), parts)
        gradients, metrics = jax.tree.map(lambda leaf: leaf / accumulate, sums)
    metrics = {**metrics, "gradient_norm": optax.tree.norm(gradients)}
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, trained)
    student = _with(optax.apply_updates(trained, updates), state.student)
    following = replace(state, student=student, optimizer=optimizer_state, step=state.step + 1)
    if state.places is not None:
        places = jax.tree.unflatten(jax.tree.structure(state), state.places)
        following = jax.lax.with_sharding_constraint(following, places)
        # Whole on every device, so that each process can fetch them without the others.
        metrics = jax.lax.with_sharding_constraint(metrics, NamedSharding(state.places[0].mesh, PartitionSpec()))
    return following, metrics


def _parts(batch: Batch, count: int) -> Batch:
    """``batch`` as ``count`` batches, on a new first axis: each has every ``count``-th row, and so rows of every device."""

    def split(name: str, value: jax.Array) -> jax.Array:
        if name == "key":
            return jax.random.split(value, count)
        if jnp.ndim(value) == 0:
            return jnp.broadcast_to(value, (count,))
        return jnp.moveaxis(value.reshape(-1, count, *value.shape[1:]), 1, 0)

    return {name: split(name, value) for name, value in batch.items()}


def cast(student: Any, dtype: Any) -> Any:
    """``student``, of arrays or of shapes, with its floating-point leaves in ``dtype``."""

    def change(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        is_shape = isinstance(leaf, jax.ShapeDtypeStruct)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding) if is_shape else leaf.astype(dtype)

    return jax.tree.map(change, student)


def flops_of_step(state: TrainState, batch: Batch, target: Target | None, **fixed: Any) -> float:
    """Operations of a `train_step`, on all devices together, as XLA counts them; loops count once."""
    analysis = train_step.lower(state, batch, target, **fixed).cost_analysis()
    return float(analysis.get("flops", 0.0)) * fixed.get("accumulate", 1) if isinstance(analysis, dict) else 0.0


def trainable(student: Any, method: TrainingMethod) -> Any:
    """``student`` without what is frozen: `optax.MaskedNode` stands there, as under optax's own masks.

    Neither gradients nor the optimiser see those leaves, so that they cost no memory and stay the same bits (an update of
    0 would turn -0.0 into 0.0), and may be whole numbers.
    """

    def keep(path: Any, leaf: jax.Array) -> Any:
        name = name_of(path)
        trained = jnp.issubdtype(leaf.dtype, jnp.inexact) and not method.frozen(name)
        return leaf if trained else optax.MaskedNode()

    return jax.tree_util.tree_map_with_path(keep, student)


def name_of(path: Any) -> str:
    """A leaf's path in a pytree, such as ``params.layers.0.q``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _with(trained: Any, student: Any) -> Any:
    """``student`` with the leaves of ``trained`` in place of its own."""

    def is_hole(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    return jax.tree.map(lambda new, old: old if is_hole(new) else new, trained, student, is_leaf=is_hole)


@partial(jax.jit, static_argnames="method")
def _evaluate_batch(student: Any, batch: Batch, target: Target | None, *, method: TrainingMethod) -> Metrics:
    return method.evaluation(student, batch, target)


def evaluate(
    student: Any,
    packed: dict[str, np.ndarray],
    batch: int,
    target: Target | None,
    method: TrainingMethod,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """Mean metrics over the first held-out windows (at most 64, a whole number of batches)."""
    windows = min(_EVALUATION_WINDOWS, len(packed["tokens"]))
    starts = range(0, windows - batch + 1, batch) or range(1)
    parts = [{name: array[i : i + batch] for name, array in packed.items()} for i in starts]
    batches = [make_batch(part, jax.random.key(0), 1.0, mesh) for part in parts]
    totals = [sharding.to_host(_evaluate_batch(student, part, target, method=method), mesh) for part in batches]
    return {name: float(np.mean([total[name] for total in totals])) for name in totals[0]}
