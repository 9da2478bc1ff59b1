"""The requirements of a training run without running it: shapes, parameters, memory and disk.

No weights are loaded or allocated.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.sharding import Mesh

from specjax import sharding
from specjax.drafters.base import Drafter
from specjax.models import config_json, hub
from specjax.models.params import count
from specjax.models.transformer import Target
from specjax.training.config import TrainConfig
from specjax.training.contract import StudentInputs
from specjax.training.optimizer import make_optimizer
from specjax.training.step import TrainState, abstract_state, cast, name_of, train_step, trainable

Shapes = Any
"""A pytree of `jax.ShapeDtypeStruct`."""


@dataclass(frozen=True)
class Needs:
    """The requirements of a run on a single device. A mesh divides most of them by its devices.

    Attributes:
        student: the shape of every parameter, by path.
        frozen: the paths of the parameters that are not trained.
        batch: the shape of every array of a batch.
        parameters: the number of scalars of the student.
        target_parameters: the number of scalars of the target.
        memory: the bytes of device memory, by purpose.
        disk: the bytes on disk, by purpose.
    """

    student: Mapping[str, tuple[int, ...]]
    frozen: frozenset[str]
    batch: Mapping[str, tuple[int, ...]]
    parameters: int
    target_parameters: int
    memory: Mapping[str, int]
    disk: Mapping[str, int]


@dataclass(frozen=True)
class AbstractRun:
    """The arguments of a training step, as shapes.

    Attributes:
        state: the state before the first step.
        batch: a batch of the configured size.
        target: the frozen target, or None.
        fixed: the static arguments of the step.
    """

    state: TrainState
    batch: dict[str, Any]
    target: Target | None
    fixed: dict[str, Any]

    def lower(self) -> jax.stages.Lowered:
        """Lower the step, so that it can be compiled."""
        return train_step.lower(self.state, self.batch, self.target, **self.fixed)


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
        files = hub.open_checkpoint(method.target, weights=False)
        config_json.check_whole(files)
        shape = config_json.read_config(files)
        target = jax.eval_shape(lambda: Target.init(shape, jax.random.key(0), compute))
    vocab = config.data.vocab_size if target is None else target.config.vocab_size
    unsharded = None if target is None else replace(target, mesh=None)
    student = cast(
        place(jax.eval_shape(lambda target: _student(config, target, vocab), unsharded)),
        jnp.float32,
    )
    optimizer = make_optimizer(config.optimizer, config.steps)
    state = abstract_state(method, student, optimizer, mesh)
    rows, width = config.data.batch, config.data.window
    windows = {
        "tokens": jax.ShapeDtypeStruct((rows, width + 1), np.int32),
        "segments": jax.ShapeDtypeStruct((rows, width + 1), np.int32),
        "loss_mask": jax.ShapeDtypeStruct((rows, width), np.bool_),
    }
    if mesh is not None:
        split = sharding.named(mesh, ("batch",), {"batch": rows})
        windows = {
            name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split)
            for name, leaf in windows.items()
        }
    rest = {
        "key": jax.eval_shape(lambda: jax.random.key(0)),
        "progress": jax.ShapeDtypeStruct((), np.float32),
    }
    fixed = {
        "method": method,
        "optimizer": optimizer,
        "accumulate": config.accumulate,
        "compute_dtype": compute,
    }
    return AbstractRun(state, {**windows, **rest}, target, fixed)


def needs(config: TrainConfig) -> Needs:
    """Return the requirements of a run. Only the config.json of its target is read.

    Raises:
        InputError: The configuration is invalid, or the target does not exist.
    """
    run = abstract_run(config)
    state, target, student = run.state, run.target, run.state.student
    analysis = run.lower().compile().memory_analysis()
    temporary = int(analysis.temp_size_in_bytes) if analysis is not None else 0
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
        target_parameters=count(target),
        memory={
            "target": _bytes(target),
            "student": _bytes(student),
            "optimiser": _bytes(state.optimizer),
            "inner values of a step, gradients among them, as compiled for"
            f" {jax.default_backend()}": temporary,
        },
        disk={"two checkpoints": 2 * _bytes(state), "best and latest student": 2 * exported},
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


def _bytes(tree: Shapes) -> int:
    leaves = [
        leaf
        for leaf in jax.tree.leaves(tree)
        if not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    ]
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
