"""Map a drafter's reduced vocabulary to the target's.

A drafter with a vocabulary of its own numbers its tokens from 0. Its checkpoint has two tables.
``d2t`` has an offset for each of the drafter's tokens: the target's id is the drafter's id plus the
offset. ``t2d`` has a flag for each of the target's tokens: whether the drafter can draft it. It
follows from ``d2t``, so it is checked when a checkpoint is loaded, and computed when one is saved.
"""

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.drafters.candidates import Vocabulary
from specjax.errors import InputError
from specjax.models.fields import CheckpointError
from specjax.models.params import Param, Params
from specjax.models.transformer import Target

TokenIds = np.ndarray | jax.Array
"""``[Vd]``, the target's ids of the tokens that a drafter can draft, ascending."""


@dataclass(frozen=True)
class DraftVocabulary:
    """The sizes of a reduced vocabulary and of the target's.

    Attributes:
        size: the number of the drafter's tokens, Vd.
        target_size: the number of the target's tokens, V.
    """

    size: int
    target_size: int

    @classmethod
    def of(cls, config: Any) -> "DraftVocabulary | None":
        """Return the reduced vocabulary of an `Eagle3Config` or a `DFlashConfig`.

        It is None if the drafter has the target's vocabulary.
        """
        return cls(config.draft_vocab_size, config.layer.vocab_size) if config.own_ids else None

    def declare_t2d(self) -> Params:
        """Declare the tensor ``t2d``, which a checkpoint has but which is no parameter."""
        return {"t2d": Param((self.target_size,), (None,), "t2d", "zeros", dtype="bool")}

    def compute_t2d(self, params: Params) -> Params:
        """Return the tensor ``t2d`` for ``params``."""
        return {"t2d": jnp.zeros(self.target_size, bool).at[ids_of(params)].set(True)}

    def check_stored(
        self, names: Collection[str], directory: Path, needed: tuple[str, ...] = ("d2t",)
    ) -> None:
        """Raise a CheckpointError if the tensors' ``names`` lack one of the ``needed`` tables."""
        for name in needed:
            if name not in names:
                raise CheckpointError(
                    f"{directory}: {name!r} is missing: it says which of the target's"
                    f" {self.target_size} tokens the drafter's {self.size} tokens are; give a"
                    " checkpoint that has it"
                )

    def check_values(self, params: Params, t2d: jax.Array | None, directory: Path) -> None:
        """Raise a CheckpointError if ``d2t`` has duplicates or if ``t2d`` contradicts it."""
        ids = np.asarray(ids_of(params))
        if not _are_different_tokens(ids, self.target_size):
            raise CheckpointError(
                f"{directory}: 'd2t' must map the drafter's tokens to different tokens of the"
                f" target's {self.target_size}; give an undamaged checkpoint"
            )
        if t2d is not None and not np.array_equal(np.flatnonzero(np.asarray(t2d)), np.sort(ids)):
            raise CheckpointError(
                f"{directory}: 't2d' and 'd2t' name different tokens; give an undamaged checkpoint"
            )


def declare_d2t(size: int) -> Param:
    """Declare the parameter ``d2t`` of a drafter with ``size`` tokens."""
    return Param((size,), (None,), "d2t", "zeros", dtype="int32", stored_dtype="int64")


def ids_of(params: Params) -> jax.Array:
    """Return the target's ids ``[Vd]`` of the drafter's tokens, int32."""
    return jnp.arange(params["d2t"].shape[0], dtype=jnp.int32) + params["d2t"]


def vocabulary_of(params: Params, target: Target) -> Vocabulary | None:
    """Return the tokens that a drafter with ``params`` can draft; None if it can draft all."""
    return (
        Vocabulary(ids=ids_of(params), size=target.config.vocab_size) if "d2t" in params else None
    )


def check_ids(ids: TokenIds | None, target_size: int) -> None:
    """Raise an InputError unless ``ids`` are different token ids of the target.

    The target has ``target_size`` tokens; None stands for all of them.
    """
    if ids is not None and not _are_different_tokens(np.asarray(ids), target_size):
        raise InputError(
            f"ids: they must be different token ids of the target, from 0 to {target_size - 1}"
        )


def initial_params(target: Target, ids: TokenIds | None, own_head: bool) -> Params:
    """Return the parameters of a new drafter that depend on its vocabulary.

    They are ``d2t`` for the ``ids``, and a copy of the target's head if the drafter has a head of
    its own.
    """
    if ids is None:
        params = {}
    else:
        params = {"d2t": jnp.asarray(ids, jnp.int32) - jnp.arange(len(ids), dtype=jnp.int32)}
    if own_head:
        params["lm_head"] = (
            target.head_weights if ids is None else target.head_weights[:, jnp.asarray(ids)]
        )
    return params


def _are_different_tokens(ids: np.ndarray, target_size: int) -> bool:
    # With a duplicate id, q at that token would not be the probability that it is drawn with.
    return bool(ids.min() >= 0 and ids.max() < target_size and len(np.unique(ids)) == len(ids))
