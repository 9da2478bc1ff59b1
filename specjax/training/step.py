"""One training step for any `TrainingMethod`, and the sharding of its arrays on a mesh."""

from collections.abc import Iterable, Iterator
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
from specjax.training.arithmetic import count_flops
from specjax.training.contract import (
    Batch,
    Loss,
    Mean,
    Metrics,
    TrainingMethod,
    Windows,
    as_mean,
    row_keys,
)
from specjax.training.objectives.windows import split_rows

_EVALUATION_WINDOWS = 64


@struct.dataclass
class TrainState:
    """The state of a training.

    Attributes:
        student: the pytree that is trained, with its frozen parameters.
        optimizer: the state of the optimizer; it holds nothing for frozen parameters.
        step: the number of steps done.
        places: the sharding of each leaf on the mesh, which a step keeps; None without a mesh. It
            is static.
    """

    student: Any
    optimizer: optax.OptState
    step: jax.Array
    places: tuple[NamedSharding, ...] | None = struct.field(pytree_node=False, default=None)


def initial_state(
    method: TrainingMethod,
    student: Any,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
) -> TrainState:
    """Return the state before the first step."""
    # Copy all arrays: a step donates those of the state, and the student may share some with the
    # frozen target, which must stay valid.
    student = jax.tree.map(jnp.copy, student)
    state = _first_state(method, student, optimizer)
    if mesh is None:
        return state
    return _with_places(jax.tree.map(lambda leaf: sharding.put(leaf, _place_of(mesh, leaf)), state))


def _first_state(
    method: TrainingMethod, student: Any, optimizer: optax.GradientTransformation
) -> TrainState:
    return TrainState(student, optimizer.init(trainable(student, method)), jnp.zeros((), jnp.int32))


def abstract_state(
    method: TrainingMethod,
    student: Any,
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None = None,
) -> TrainState:
    """Return the `initial_state` as shapes, for a student of shapes.

    The shapes have shardings if those of the student have.
    """
    state = jax.eval_shape(lambda student: _first_state(method, student, optimizer), student)
    if mesh is None:
        return state
    places = {
        name_of(path): leaf.sharding for path, leaf in jax.tree_util.tree_leaves_with_path(student)
    }

    def place(path: Any, leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        # A leaf of the optimizer's state ends with the path of its parameter, and is sharded alike.
        parameter_place = next(
            (place for name, place in places.items() if f".{name_of(path)}".endswith(f".{name}")),
            None,
        )
        shape = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=parameter_place)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_place_of(mesh, shape))

    return _with_places(jax.tree_util.tree_map_with_path(place, state))


def _with_places(state: TrainState) -> TrainState:
    """Return a sharded state that notes its shardings."""
    return replace(state, places=tuple(leaf.sharding for leaf in jax.tree.leaves(state)))


def _place_of(mesh: Mesh, leaf: jax.Array | jax.ShapeDtypeStruct) -> NamedSharding:
    """Return the FSDP sharding of a leaf.

    It keeps the leaf's sharding over ``model``, and shards the longest other axis of a matrix over
    ``data``. So each device stores a part of the weights and of the optimizer's state, and gathers
    the rest during a step.
    """
    place = leaf.sharding
    spec = place.spec if isinstance(place, NamedSharding) and place.mesh == mesh else ()
    axes = [*spec, *(None,) * (leaf.ndim - len(spec))]
    devices = mesh.shape["data"]
    free = [
        axis for axis, size in enumerate(leaf.shape) if axes[axis] is None and size % devices == 0
    ]
    if leaf.ndim > 1 and devices > 1 and free:
        axes[max(free, key=lambda axis: leaf.shape[axis])] = "data"
    return NamedSharding(mesh, PartitionSpec(*axes))


def make_batch(
    windows: Windows, key: jax.Array, progress: float, mesh: Mesh | None = None
) -> Batch:
    """Return the `Batch` of packed windows. On a mesh its rows are sharded over ``data``."""
    batch: Batch = {**windows, "key": key, "progress": np.float32(progress)}  # pyright: ignore[reportAssignmentType]
    if mesh is None:
        return batch
    units = {"batch": len(windows["tokens"])}

    def place(name: str) -> NamedSharding:
        return sharding.named(mesh, ("batch",) if name in windows else (), units)

    return {name: sharding.put(value, place(name)) for name, value in batch.items()}


# The state is donated, so that the weights and the optimizer's state exist once in memory.
@partial(
    jax.jit,
    static_argnames=("method", "optimizer", "accumulate", "compute_dtype"),
    donate_argnames="state",
)
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
    """Do one optimizer step, and return the new state and the metrics.

    Args:
        state: the state. Its arrays are donated.
        batch: a batch of B rows.
        target: the frozen target, or None.
        method: the training method.
        optimizer: the optimizer that the state was made with.
        accumulate: the number of parts of the batch that are computed one after the other. Their
            gradients are averaged. It must divide B.
        compute_dtype: the type to which the student's weights are cast for matrix products.
    """
    trained = trainable(state.student, method)

    def loss(trained: Any, part: Batch) -> Loss:
        # The cast is differentiated, too, so that the gradients have the weights' own type.
        student = cast(_with(trained, state.student), compute_dtype)
        return method.objective(student, part, target)

    def add(sums: Any, part: Batch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, sums, jax.grad(loss, has_aux=True)(trained, part)), None

    if accumulate == 1:
        gradients, metrics = jax.grad(loss, has_aux=True)(trained, batch)
    else:
        parts = _parts(batch, accumulate)
        shapes = jax.eval_shape(
            jax.grad(loss, has_aux=True), trained, jax.tree.map(lambda leaf: leaf[0], parts)
        )
        sums, _ = jax.lax.scan(
            add, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes), parts
        )
        gradients, metrics = jax.tree.map(lambda leaf: leaf / accumulate, sums)
    metrics = {**metrics, "gradient_norm": optax.tree.norm(gradients)}
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, trained)
    student = _with(optax.apply_updates(trained, updates), state.student)
    next_state = replace(state, student=student, optimizer=optimizer_state, step=state.step + 1)
    if state.places is not None:
        # Otherwise XLA might shard the results differently, and compile the next step again.
        places = jax.tree.unflatten(jax.tree.structure(state), state.places)
        next_state = jax.lax.with_sharding_constraint(next_state, places)
        # Replicate the metrics, so that each process can fetch them without the others.
        metrics = jax.lax.with_sharding_constraint(
            metrics, NamedSharding(state.places[0].mesh, PartitionSpec())
        )
    return next_state, metrics


def _parts(batch: Batch, count: int) -> Batch:
    """Split a batch into ``count`` batches on a new first axis, as `split_rows`.

    Each row keeps its random key.
    """
    batch = {**batch, "row_keys": row_keys(batch)}

    def split(name: str, value: jax.Array) -> jax.Array:
        if name == "key":
            return jax.random.split(value, count)
        if jnp.ndim(value) == 0:
            return jnp.broadcast_to(value, (count,))
        return split_rows(value, count)

    return {name: split(name, value) for name, value in batch.items()}


def cast(student: Any, dtype: Any) -> Any:
    """Cast the floating-point leaves of a student, which may be arrays or shapes."""

    def cast_leaf(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=leaf.sharding)
        return leaf.astype(dtype)

    return jax.tree.map(cast_leaf, student)


def flops_of_step(state: TrainState, batch: Batch, target: Target | None, **fixed: Any) -> float:
    """Return the floating-point operations of a `train_step` on all devices (`count_flops`)."""
    return count_flops(train_step.trace(state, batch, target, **fixed).jaxpr)


def trainable(student: Any, method: TrainingMethod) -> Any:
    """Replace the frozen leaves of a student by `optax.MaskedNode`, as optax's own masks do.

    Neither gradients nor the optimizer see these leaves. So they cost no memory there, may be
    integers, and keep their exact bits. (An update of 0 would turn -0.0 into 0.0.)
    """

    def keep(path: Any, leaf: jax.Array) -> Any:
        name = name_of(path)
        trained = jnp.issubdtype(leaf.dtype, jnp.inexact) and not method.frozen(name)
        return leaf if trained else optax.MaskedNode()

    return jax.tree_util.tree_map_with_path(keep, student)


@jax.jit
def is_finite(state: TrainState) -> jax.Array:
    """Return whether the optimizer's state and the student's parameters are finite.

    A frozen parameter counts, too, because it is saved with the student.
    """
    leaves = [
        leaf
        for leaf in jax.tree.leaves((state.student, state.optimizer))
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    ]
    return jnp.all(jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in leaves]))


def name_of(path: Any) -> str:
    """Return the name of a path in a pytree, such as ``params.layers.0.q``."""
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _with(trained: Any, student: Any) -> Any:
    """Return the student with its trained leaves replaced by those of ``trained``."""

    def is_hole(node: Any) -> bool:
        return isinstance(node, optax.MaskedNode)

    return jax.tree.map(
        lambda new, old: old if is_hole(new) else new, trained, student, is_leaf=is_hole
    )


@partial(jax.jit, static_argnames=("method", "compute_dtype"))
def evaluation_step(
    student: Any,
    batch: Batch,
    target: Target | None,
    *,
    method: TrainingMethod,
    compute_dtype: Any = jnp.float32,
) -> dict[str, Mean]:
    """Return the metrics of some held-out windows, as sums and counts.

    The arguments are those of `train_step`.
    """
    metrics = method.evaluation(cast(student, compute_dtype), batch, target)
    return {name: as_mean(name, metric, batch) for name, metric in metrics.items()}


def evaluation_rows(batch: int, accumulate: int, mesh: Mesh | None = None) -> int:
    """Return the number of rows that an evaluation reads at once.

    It is that of a part of a training batch, but at least one for each device that rows are split
    over.
    """
    devices = 1 if mesh is None else mesh.shape["data"]
    return -(-(batch // accumulate) // devices) * devices


def evaluation_batches(windows: Windows, rows: int, mesh: Mesh | None = None) -> Iterator[Batch]:
    """Yield the first held-out windows, at most 64, as batches of so many rows.

    The last one is filled up with rows that do not count: their loss masks are empty, and their
    segments are -1.
    """
    count = min(_EVALUATION_WINDOWS, len(windows["tokens"]))
    padding = {"tokens": 0, "segments": -1, "loss_mask": False}
    for start in range(0, count, rows):
        part = {name: array[start : min(start + rows, count)] for name, array in windows.items()}
        missing = rows - len(part["tokens"])
        filled = {
            name: np.pad(array, ((0, missing), (0, 0)), constant_values=padding[name])
            for name, array in part.items()
        }
        # The same key in every evaluation, so that two of them differ by the student alone.
        yield make_batch(filled, jax.random.key(0), 1.0, mesh)


def evaluate(
    student: Any,
    batches: Iterable[Batch],
    target: Target | None,
    method: TrainingMethod,
    *,
    compute_dtype: Any = jnp.float32,
    mesh: Mesh | None = None,
) -> dict[str, float]:
    """Return the mean metrics of `evaluation_batches`.

    A number depends on how many rows are read at once, and on the mesh, by rounding errors alone.
    """
    # One at a time, so that the device holds the arrays of one.
    parts = [
        sharding.to_host(
            evaluation_step(student, batch, target, method=method, compute_dtype=compute_dtype),
            mesh,
        )
        for batch in batches
    ]
    sums = jax.tree.map(lambda *values: np.sum(values, dtype=np.float64), *parts)
    return {name: float(mean.value) for name, mean in sums.items()}
