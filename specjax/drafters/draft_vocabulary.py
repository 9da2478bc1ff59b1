"""Map a drafter's reduced vocabulary to the target's.

A drafter with a vocabulary of its own numbers the tokens in it from 0. Its checkpoint has two tables. ``d2t`` has, for each of
the drafter's tokens, what is added to its number to get the target's id. ``t2d`` has, for each of the target's tokens, whether
the drafter can draft it. It follows from ``d2t``: it is checked when a checkpoint is read and computed when one is written.
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
"""``[Vd]`` the target's ids of the tokens that a drafter can draft, ascending."""


@dataclass(frozen=True)
class DraftVocabulary:
    """The sizes of a reduced vocabulary and of the target's.

    Attributes:
        size: tokens of the drafter, Vd.
        target_size: tokens of the target, V.
    """

    size: int
    target_size: int

    @classmethod
    def of(cls, config: Any) -> "DraftVocabulary | None":
        """Return the one of an `Eagle3Config` or a `DFlashConfig`; None if the drafter has the target's vocabulary."""
        return cls(config.draft_vocab_size, config.layer.vocab_size) if config.own_ids else None

    def declare_t2d(self) -> Params:
        """Declare ``t2d``, which is no parameter."""
        return {"t2d": Param((self.target_size,), (None,), "t2d", "zeros", dtype="bool")}

    def compute_t2d(self, params: Params) -> Params:
        """Return the values of `declare_t2d` that follow from ``params``."""
        return {"t2d": jnp.zeros(self.target_size, bool).at[ids_of(params)].set(True)}

    def check_stored(self, names: Collection[str], directory: Path, needed: tuple[str, ...] = ("d2t",)) -> None:
        """Refuse a checkpoint in ``directory`` whose tensors' ``names`` lack one of the ``needed`` tables."""
        for name in needed:
            if name not in names:
                raise CheckpointError(
                    f"{directory}: {name!r} is missing: it says which of the target's {self.target_size} tokens the "
                    f"{self.size} of the drafter are. Take a checkpoint that has it"
                )

    def check_values(self, params: Params, t2d: jax.Array | None, directory: Path) -> None:
        """Refuse a ``d2t`` that does not give different tokens of the target, and a ``t2d`` that contradicts it."""
        ids = np.asarray(ids_of(params))
        if not _are_different_tokens(ids, self.target_size):
            raise CheckpointError(
                f"{directory}: 'd2t' must give each of the drafter's tokens one of the target's {self.target_size}, "
                "to each another"
            )
        if t2d is not None and not np.array_equal(np.flatnonzero(np.asarray(t2d)), np.sort(ids)):
            raise CheckpointError(f"{directory}: 't2d' and 'd2t' name different tokens: the checkpoint is damaged")


def declare_d2t(size: int) -> Param:
    """Declare the parameter ``d2t`` of a drafter with ``size`` tokens."""
    return Param((size,), (None,), "d2t", "zeros", dtype="int32", stored_dtype="int64")


def ids_of(params: Params) -> jax.Array:
    """Return ``[Vd]`` int32, the target's ids of the drafter's tokens."""
    return jnp.arange(params["d2t"].shape[0], dtype=jnp.int32) + params["d2t"]


def vocabulary_of(params: Params, target: Target) -> Vocabulary | None:
    """Return the tokens that a drafter with these ``params`` can draft; None if it can draft all of the target's."""
    return Vocabulary(ids=ids_of(params), size=target.config.vocab_size) if "d2t" in params else None


def check_ids(ids: TokenIds | None, target_size: int) -> None:
    """Refuse ``ids`` that are not different tokens of a target with ``target_size`` tokens; None stands for all of them."""
    if ids is not None and not _are_different_tokens(np.asarray(ids), target_size):
        raise InputError(f"ids: must name different tokens of the target's {target_size}, from 0 upwards")


def initial_params(target: Target, ids: TokenIds | None, own_head: bool) -> Params:
    """Return what a new drafter has of ``ids`` and, if it has a head of its own, of the target's head."""
    params = {} if ids is None else {"d2t": jnp.asarray(ids, jnp.int32) - jnp.arange(len(ids), dtype=jnp.int32)}
    if own_head:
        params["lm_head"] = target.head_weights if ids is None else target.head_weights[:, jnp.asarray(ids)]
    return params


def _are_different_tokens(ids: np.ndarray, target_size: int) -> bool:
    # If two were alike, the drafter's probabilities would not be those that tokens are drawn with.
    return bool(ids.min() >= 0 and ids.max() < target_size and len(np.unique(ids)) == len(ids))
