"""The requirements of a training run without running it: shapes, parameters, memory and disk.

No weights are loaded or allocated.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax import sharding
from specjax.drafters.base import Drafter
from specjax.models import config_json, hub, huggingface
from specjax.models.params import count
from specjax.models.published import parameter_count
from specjax.models.transformer import Target
from specjax.training.config import TrainConfig
from specjax.training.contract import StudentInputs
from specjax.training.optimizer import make_optimizer
from specjax.training.step import (
    TrainState,
    abstract_state,
    cast,
    evaluation_rows,
    evaluation_step,
    name_of,
    train_step,
    trainable,
)

Shapes = Any
"""A pytree of `jax.ShapeDtypeStruct`."""


@dataclass(frozen=True)
class Needs:
    """The requirements of a run.

    Attributes:
        student: the shape of every parameter, by path.
        frozen: the paths of the parameters that are not trained.
        batch: the shape of every array of a batch.
        parameters: the number of scalars of the student.
        target_parameters: the number of scalars of the target.
        devices: the number of devices that the memory is divided among.
        memory: the bytes of memory on one device that a run always holds, by purpose.
        inner: the bytes of temporary memory on one device in a step and in an evaluation, by name.
            Only one of them is held at a time.
        disk: the bytes on disk, by purpose.
    """

    student: Mapping[str, tuple[int, ...]]
    frozen: frozenset[str]
    batch: Mapping[str, tuple[int, ...]]
    parameters: int
    target_parameters: int
    devices: int
    memory: Mapping[str, int]
    inner: Mapping[str, int]
    disk: Mapping[str, int]

    @property
    def peak(self) -> int:
        """The most bytes of memory on one device, in a step or in an evaluation."""
        return sum(self.memory.values()) + max(self.inner.values())


@dataclass(frozen=True)
class AbstractRun:
    """The arguments of a training step and of an evaluation step, as shapes.

    Attributes:
        state: the state before the first step.
        batch: a batch of the configured size.
        held_out: the windows that an evaluation reads at once.
        target: the frozen target, or None.
        fixed: the static arguments of the step.
    """

    state: TrainState
    batch: dict[str, Any]
    held_out: dict[str, Any]
    target: Target | None
    fixed: dict[str, Any]

    def lower(self) -> jax.stages.Lowered:
        """Lower the step, so that it can be compiled."""
        return train_step.lower(self.state, self.batch, self.target, **self.fixed)

    def lower_evaluation(self) -> jax.stages.Lowered:
        """Lower a step of an evaluation."""
        return evaluation_step.lower(
            self.state.student,
            self.held_out,
            self.target,
            method=self.fixed["method"],
            compute_dtype=self.fixed["compute_dtype"],
        )


def abstract_run(
    config: TrainConfig,
    mesh: Mesh | None = None,
    target: Target | None = None,
    place: Callable[[Any], Any] = lambda student: student,
) -> AbstractRun:
    """Return a run whose arrays are shapes without data.

    Args:
        config: the configuration of the run.
        mesh: the mesh of the run; None for one device.
        target: the frozen target as shapes on the mesh. None: its config.json is read, for one
            device.
        place: adds shardings on the mesh to the shapes of a student.

    Raises:
        InputError: The configuration is invalid, or the target does not exist.
    """
    config.check()
    method, compute = config.method, jnp.dtype(config.compute_dtype)
    if method.target and target is None:
        target = _stored_target(method.target, compute)
    vocab = config.data.vocab_size if target is None else target.config.vocab_size
    unsharded = None if target is None else replace(target, mesh=None)
    student = cast(
        place(jax.eval_shape(lambda target: _student(config, target, vocab), unsharded)),
        jnp.float32,
    )
    optimizer = make_optimizer(config.optimizer, config.steps)
    state = abstract_state(method, student, optimizer, mesh)
    evaluated = evaluation_rows(config.data.batch, config.accumulate, mesh)
    batch, held_out = (
        _batch(rows, config.data.window, mesh) for rows in (config.data.batch, evaluated)
    )
    fixed = {
        "method": method,
        "optimizer": optimizer,
        "accumulate": config.accumulate,
        "compute_dtype": compute,
    }
    return AbstractRun(state, batch, held_out, target, fixed)


def _stored_target(name: str, dtype: DTypeLike) -> Target:
    """Return a target as shapes for one device, quantized as it is stored."""
    files = hub.open_checkpoint(name, weights=False)
    config_json.check_whole(files)
    shape = config_json.read_config(files)
    params = jax.tree.map(
        lambda param: jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype or dtype)),
        huggingface.declare_stored(files, shape),
    )
    return Target(params, shape)


def _batch(rows: int, width: int, mesh: Mesh | None) -> dict[str, Any]:
    """Return a batch of so many rows as shapes."""
    place = None if mesh is None else sharding.named(mesh, ("batch",), {"batch": rows})
    shape = partial(jax.ShapeDtypeStruct, sharding=place)
    return {
        "tokens": shape((rows, width + 1), np.int32),
        "segments": shape((rows, width + 1), np.int32),
        "loss_mask": shape((rows, width), np.bool_),
        "key": jax.eval_shape(lambda: jax.random.key(0)),
        "progress": jax.ShapeDtypeStruct((), np.float32),
    }


def needs(
    config: TrainConfig,
    mesh: Mesh | None = None,
    target: Target | None = None,
    place: Callable[[Any], Any] = lambda student: student,
) -> Needs:
    """Return the requirements of a run. Weights are not read.

    The arguments are those of `abstract_run`.

    Raises:
        InputError: The configuration is invalid, or the target does not exist.
    """
    run = abstract_run(config, mesh, target, place)
    state, target, student = run.state, run.target, run.state.student
    paths = {
        name_of(path): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(student)
    }
    trained = jax.tree_util.tree_leaves_with_path(trainable(student, config.method))
    exported = count(student) * jnp.dtype(config.export_dtype).itemsize
    return Needs(
        student=paths,
        frozen=frozenset(paths) - {name_of(path) for path, _ in trained},
        batch={name: tuple(leaf.shape) for name, leaf in run.batch.items()},
        parameters=count(student),
        target_parameters=0 if target is None else parameter_count(target.config),
        devices=1 if mesh is None else mesh.size,
        memory={
            "target": _bytes(target),
            "student": _bytes(student),
            "optimiser": _bytes(state.optimizer),
        },
        inner={
            "inner values of a step, gradients among them": _temporary(run.lower()),
            "inner values of an evaluation": _temporary(run.lower_evaluation()),
        },
        disk={
            f"{config.checkpoints} checkpoints": config.checkpoints * _bytes_of_all(state),
            "best and latest student": 2 * exported,
        },
    )


def _student(config: TrainConfig, target: Shapes, vocab: int) -> Any:
    # Do not use add_tokens: before tokenizers 0.23 it takes minutes for 262,144 tokens.
    stand_in = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({str(i): i for i in range(vocab)}, unk_token="0")
    )
    inputs = StudentInputs(stand_in, np.zeros(vocab, int), target, init_from=config.init_from)
    student = config.method.init(jax.random.key(0), inputs)
    # Fail as the run would, if the drafter does not fit the target.
    if isinstance(student, Drafter):
        student.check(target)
    return cast(student, jnp.float32)


def _temporary(lowered: jax.stages.Lowered) -> int:
    """Return the bytes of temporary memory of a program on one device."""
    analysis = lowered.compile().memory_analysis()
    return 0 if analysis is None else int(analysis.temp_size_in_bytes)


def _bytes_of_all(tree: Shapes) -> int:
    return sum(_bytes_of(leaf, leaf.shape) for leaf in jax.tree.leaves(tree))


def _bytes(tree: Shapes) -> int:
    """Return the bytes of a tree's arrays on one device."""
    return sum(
        _bytes_of(
            leaf, leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)
        )
        for leaf in jax.tree.leaves(tree)
    )


def _bytes_of(leaf: jax.ShapeDtypeStruct, shape: tuple[int, ...]) -> int:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return 0
    numbers = math.prod(shape)
    return numbers // 2 if leaf.dtype == jnp.int4 else numbers * leaf.dtype.itemsize
