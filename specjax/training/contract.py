"""What a training method is: the contract between the loop and what it trains."""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import jax
import numpy as np
import tokenizers
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax.config import ConfigError
from specjax.models.transformer import Target

Batch = dict[str, jax.Array]
"""What one step learns from:

- ``tokens [B, T+1]``: inputs are the first T, labels the last T;
- ``segments [B, T+1]``: the number of the document that each token belongs to;
- ``loss_mask [B, T]`` bool: which labels count;
- ``key``: a random key of this step's own, for methods that add noise; the same one in every evaluation;
- ``progress``: share of the training that is done, for methods whose loss changes on the way; 1 in an evaluation.

Examples:
    >>> batch = {
    ...     "tokens": jnp.asarray(prompts),
    ...     "segments": jnp.zeros((2, 6), int),
    ...     "loss_mask": jnp.ones((2, 5), bool),
    ...     "key": jax.random.key(0),
    ...     "progress": jnp.array(0.5),
    ... }
"""

Metrics = dict[str, jax.Array]


@dataclass(frozen=True)
class StudentInputs:
    """What a student is made for.

    Attributes:
        tokenizer: of the text.
        counts: ``[V]`` how often each token is a label that counts, in the windows to train on.
        target: the frozen one, or None.
        mesh: where the student is to lie; None is the default device.
        init_from: directory or hub id of an earlier student, whose weights will take the place of the random ones; "" if there
            is none. Students that come in more shapes than their method has options for read their shape there.

    Examples:
        >>> from specjax.training.contract import StudentInputs
        >>> from specjax.training.tokenizer import train_tokenizer
        >>> tokenizer = train_tokenizer(["import os"], vocab_size=264)
        >>> given = StudentInputs(tokenizer, counts=np.ones(16), target=target)
        >>> given.frozen_target is target
        True
    """

    tokenizer: tokenizers.Tokenizer
    counts: np.ndarray
    target: Target | None = None
    mesh: Mesh | None = None
    init_from: str = ""

    @property
    def frozen_target(self) -> Target:
        """The target, for methods that need one."""
        assert self.target is not None
        return self.target


class Student(Protocol):
    """What is trained: any pytree (a ``flax.struct.dataclass`` with its params as leaves and its config static) that can
    write itself. A `Target` is one, and so is a drafter with weights.

    Examples:
        >>> from specjax.training.contract import Student
        >>> student: Student = specjax.Medusa.init(target, jax.random.key(1), heads=2)
        >>> student.save_pretrained("medusa", dtype=jnp.bfloat16)
    """

    def save_pretrained(self, path: str | Path, *, dtype: DTypeLike | None = None) -> None:
        """Write a directory that ``from_pretrained`` reads, in ``dtype`` (by default the params' own)."""


class TrainingMethod:
    """How one kind of student is trained. Subclass it as a frozen dataclass.

    Its fields are the method's section of a configuration file. One of them is the tag that chooses it there:
    ``name: Literal["lm"] = "lm"``. Whatever it computes follows from its fields and arguments alone: two equal methods share
    one compiled step.

    Attributes:
        target: directory or hub id of the frozen target; a field of every method that learns from one.
        needs_target: whether it learns from one.
        whole_model: whether the student is a `Target`, or has one, so that a tokenizer is written beside it.
        best_by: the held-out metric by which the best of several checkpoints is told; of a loss the smallest is best.

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
        ...     def init(self, key, given):
        ...         return specjax.Medusa.init(given.frozen_target, key, heads=1)
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
        """Refuse, with a ConfigError, fields out of range, before anything is read; ``window`` is the length T."""
        if self.needs_target and not self.target:
            raise ConfigError("method.target='': this method learns from a target; give its directory or hub id")

    def init(self, key: jax.Array, given: StudentInputs) -> Student:
        """A student with random weights; consumes ``key``.

        On a mesh its params lie as they are declared; arrays that lie elsewhere are copied to every device afterwards. It may
        hold arrays of the target.
        """
        raise NotImplementedError

    def objective(self, student: Any, batch: Batch, target: Target | None) -> tuple[jax.Array, Metrics]:
        """What a step minimises, and what it reports. Pure; ``target`` gets no gradient.

        The loss divides by all B*T positions (`losses.mean_over_positions`), the other metrics by the labels that count
        (`losses.mean_over_labels`). The metrics hold the loss itself as ``loss``.
        """
        raise NotImplementedError

    def evaluation(self, student: Any, batch: Batch, target: Target | None) -> Metrics:
        """What is reported of held-out windows: by default the metrics of the objective."""
        return self.objective(student, batch, target)[1]

    def goodness(self, value: float) -> float:
        """``value`` of the metric ``best_by``, turned so that larger is better."""
        return -value if self.best_by == "loss" else value

    def frozen(self, path: str) -> bool:
        """Whether the student's parameter at ``path`` ("params.layers.0.q") stays as it is. Whole numbers always do."""
        return False


def __getattr__(name: str) -> Any:
    if name == "Given":
        warnings.warn(f"{__name__}.Given has a new name: StudentInputs", DeprecationWarning, stacklevel=2)
        return StudentInputs
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
