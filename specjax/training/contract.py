"""The contract between the training loop and a training method."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax.config import ConfigError
from specjax.errors import check_minimum
from specjax.models.transformer import Target

Batch = dict[str, jax.Array]
"""The data of one training step:

- ``tokens [B, T+1]``: token ids; the first T are the inputs, the last T are the labels;
- ``segments [B, T+1]``: the index of the document that each token belongs to; -1 in rows that fill
  up a batch of an evaluation, and belong to no window;
- ``loss_mask [B, T]`` bool: the labels that count in the loss;
- ``key``: the random key of this step, for methods that add noise (`row_keys`); evaluations all use
  the same;
- ``progress``: the share of the training that is done, for methods whose loss changes over the
  training; 1 in an evaluation.

Examples:
    >>> batch = {
    ...     "tokens": jnp.asarray(prompts),
    ...     "segments": jnp.zeros((2, 6), int),
    ...     "loss_mask": jnp.ones((2, 5), bool),
    ...     "key": jax.random.key(0),
    ...     "progress": jnp.array(0.5),
    ... }
"""


def row_keys(batch: Batch) -> jax.Array:
    """Return a random key for each row of a batch, ``[B]``. The batch's key is consumed.

    A part of a batch (``accumulate``) has the keys that its rows have in the whole batch, as its
    entry ``row_keys``. So noise that is drawn for each row does not depend on the number of parts.

    Examples:
        >>> from specjax.training.contract import row_keys
        >>> batch = {"tokens": jnp.zeros((2, 6), int), "key": jax.random.key(0)}
        >>> jax.vmap(lambda key: jax.random.uniform(key, (5, 8)))(row_keys(batch)).shape
        (2, 5, 8)
    """
    keys = batch.get("row_keys")
    return jax.random.split(batch["key"], len(batch["tokens"])) if keys is None else keys


Metrics = dict[str, jax.Array]

Loss = tuple[jax.Array, Metrics]
"""The loss of a step, and its metrics."""


@struct.dataclass
class Mean:
    """The mean of a held-out metric, as a sum and a count, which add up over parts of the text.

    So the result does not depend on how many rows an evaluation reads at once.

    Attributes:
        total: the sum of the values.
        count: the number of the values.
        base: static, a constant to add to the mean.

    Examples:
        >>> from specjax.training.contract import Mean
        >>> values, mask = jnp.array([[3.0, 1.0]]), jnp.array([[True, False]])
        >>> float(Mean.over_labels(values, mask).value)
        3.0
    """

    total: jax.Array
    count: jax.Array
    base: float = struct.field(pytree_node=False, default=0.0)

    @classmethod
    def over_labels(cls, values: jax.Array, mask: jax.Array, base: float = 0.0) -> "Mean":
        """Return the mean of ``values`` under ``mask``; 0 plus ``base`` if it is empty."""
        return cls(jnp.sum(jnp.where(mask, values, 0), dtype=jnp.float32), jnp.sum(mask), base)

    @classmethod
    def over_positions(cls, values: jax.Array, mask: jax.Array, batch: Batch) -> "Mean":
        """Return the sum of ``values`` under ``mask``, divided by the positions of all windows.

        It is `losses.mean_over_positions` without the rows that fill up a batch.
        """
        return cls(jnp.sum(jnp.where(mask, values, 0), dtype=jnp.float32), _positions(batch))

    @property
    def value(self) -> Any:
        """The mean itself."""
        return self.base + self.total / (self.count + (self.count == 0))


def _positions(batch: Batch) -> jax.Array:
    return jnp.sum(jnp.asarray(batch["segments"])[:, :-1] >= 0)


def as_mean(name: str, value: jax.Array | Mean, batch: Batch) -> Mean:
    """Return a metric of a batch as a `Mean`, if it is not one already.

    The metric ``loss`` is a mean over all positions, the others are means over the labels under the
    loss mask.
    """
    if isinstance(value, Mean):
        return value
    mask = batch["loss_mask"]
    if name == "loss":
        return Mean(value * mask.size, _positions(batch))
    labels = jnp.sum(mask)
    return Mean(value * labels, labels)


Windows = dict[str, np.ndarray]
"""Packed windows: the arrays of a `Batch` that come from the data, with all rows."""


@dataclass(frozen=True)
class StudentInputs:
    """The inputs from which a method makes a student.

    Attributes:
        tokenizer: the tokenizer of the text.
        counts: ``[V]`` how often each token is a label that counts, in the training windows.
        target: the frozen target, or None.
        mesh: the mesh for the student; None for the default device.
        init_from: the directory or hub id of an earlier student; "" for none. Its weights will
            replace the random ones. If the options of a method do not fix the shape of its student,
            the shape is read from there.

    Examples:
        >>> from specjax.training.contract import StudentInputs
        >>> from specjax.training.tokenizer import train_tokenizer
        >>> tokenizer = train_tokenizer(["import os"], vocab_size=264)
        >>> inputs = StudentInputs(tokenizer, counts=np.ones(16), target=target)
        >>> inputs.frozen_target is target
        True
    """

    tokenizer: tokenizers.Tokenizer
    counts: np.ndarray
    target: Target | None = None
    mesh: Mesh | None = None
    init_from: str = ""

    @property
    def frozen_target(self) -> Target:
        """The target, for methods that require one."""
        assert self.target is not None
        return self.target


class Student(Protocol):
    """The model or drafter that is trained: a pytree that can save itself.

    Usually it is a ``flax.struct.dataclass`` whose params are leaves and whose config is static. A
    `Target` is a student, and so is a drafter with weights.

    Examples:
        >>> from specjax.training.contract import Student
        >>> student: Student = specjax.Medusa.init(target, jax.random.key(1), heads=2)
        >>> student.save_pretrained("medusa", dtype=jnp.bfloat16)
    """

    def save_pretrained(self, path: str | Path, *, dtype: DTypeLike | None = None) -> None:
        """Save to a directory that ``from_pretrained`` reads; ``dtype`` None keeps all types."""


class TrainingMethod:
    """The training of one kind of student. Subclass it as a frozen dataclass.

    The fields are the section ``method`` of a configuration file. The field ``name``, such as
    ``name: Literal["lm"] = "lm"``, selects the method there. All results must depend on the fields
    and arguments alone, because two equal methods share one compiled step.

    Attributes:
        target: the directory or hub id of the frozen target. Every method that learns from a target
            has this field.
        needs_target: whether the method learns from a target.
        whole_model: whether the student is or contains a `Target`, so that a tokenizer is saved
            beside it.
        best_by: the held-out metric that selects the best checkpoint. For "loss" the smallest value
            is best, otherwise the largest.

    Examples:
        >>> from dataclasses import dataclass
        >>> from typing import Literal
        >>> from specjax.training import losses
        >>> from specjax.training.contract import TrainingMethod
        >>> @dataclass(frozen=True)
        ... class FirstHead(TrainingMethod):
        ...     name: Literal["first-head"] = "first-head"
        ...     target: str = ""
        ...
        ...     def init(self, key, inputs):
        ...         return specjax.Medusa.init(inputs.frozen_target, key, heads=1)
        ...
        ...     def objective(self, student, batch, target):
        ...         states, _ = target.read(batch["tokens"][:, :-2])
        ...         labels, mask = batch["tokens"][:, 2:], batch["loss_mask"][:, 1:]
        ...         logits = student.head(0, states.hidden)
        ...         loss = losses.next_token(logits, labels, mask)
        ...         return loss, {"loss": loss}
        >>> student = specjax.Medusa.init(target, jax.random.key(1), heads=1)
        >>> batch = {"tokens": jnp.asarray(prompts), "loss_mask": jnp.ones((2, 5), bool)}
        >>> loss, _ = FirstHead(target="embedded").objective(student, batch, target)
        >>> loss.shape
        ()
    """

    target: str = ""
    needs_target: ClassVar[bool] = True
    whole_model: ClassVar[bool] = False
    best_by: ClassVar[str] = "loss"

    def check(self, window: int) -> None:
        """Raise ConfigError for fields out of range, before any data is read.

        ``window`` is the number of inputs T of a window.
        """
        if self.needs_target and not self.target:
            raise ConfigError(
                "method.target='': this method learns from a target; give its directory or hub id"
            )

    def check_minimum(self, minimum: int, *names: str) -> None:
        """Raise ConfigError for the first of the named fields that is below the minimum."""
        check_minimum(minimum, self, names, "method.", ConfigError)

    def check_window(self, window: int, name: str, further: int = 2) -> None:
        """Raise ConfigError if a window has no label as many tokens ahead as a field says.

        Args:
            window: the number of inputs T of a window.
            name: the name of the field.
            further: the number of tokens that a window needs in addition to the field.
        """
        if (value := getattr(self, name)) + further > window:
            raise ConfigError(
                f"method.{name}={value}: data.window={window} is too short; give at least"
                f" {name} + {further}"
            )

    def init(self, key: jax.Array, inputs: StudentInputs) -> Student:
        """Return a student with random weights. ``key`` is consumed.

        On a mesh, its params are sharded as they are declared. Arrays that are not on the mesh are
        replicated afterwards. The student may share arrays with the target.
        """
        raise NotImplementedError

    def objective(self, student: Any, batch: Batch, target: Any) -> Loss:
        """Return the loss of a step, and its metrics.

        ``target`` is the frozen `Target`; it is None if the method does not learn from one.

        It must be a pure function. The target gets no gradient. The loss divides by all B*T
        positions (`losses.mean_over_positions`), the other metrics divide by the number of labels
        that count (`losses.mean_over_labels`). The metric ``loss`` is the loss itself.
        """
        raise NotImplementedError

    def evaluation(self, student: Any, batch: Batch, target: Any) -> Mapping[str, Mean]:
        """Return the metrics of held-out windows, by default those of the objective.

        They are computed for some rows at a time and added up. Rows that fill up a batch have empty
        masks, and their segments are -1. Numbers are accepted, too: the ``loss`` is then taken for
        a mean over all positions, and the others for means over the labels under the loss mask.
        """
        metrics = self.objective(student, batch, target)[1]
        return {name: as_mean(name, value, batch) for name, value in metrics.items()}

    def goodness(self, value: float) -> float:
        """Return the metric `best_by`, negated if it is a loss, so that larger is better."""
        return -value if self.best_by == "loss" else value

    def frozen(self, path: str) -> bool:
        """Return whether the parameter at ``path`` ("params.layers.0.q") is not trained.

        Parameters that are integers are never trained.
        """
        return False


def __getattr__(name: str) -> Any:
    if name == "Given":
        warnings.warn(
            f"{__name__}.Given has a new name: StudentInputs", DeprecationWarning, stacklevel=2
        )
        return StudentInputs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
