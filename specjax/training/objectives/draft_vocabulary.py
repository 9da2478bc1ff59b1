"""Drafters with a smaller vocabulary than the target: its tokens, and the labels and loss."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from specjax.config import ConfigError
from specjax.drafters.methods.eagle3 import Eagle3
from specjax.models.transformer import Target
from specjax.sampling import argmax
from specjax.shape_checks import shape_checked
from specjax.training import losses
from specjax.training.contract import Batch, StudentInputs
from specjax.training.objectives.acceptance import (
    AcceptanceLoss,
    acceptance_loss,
    acceptance_values,
    check_loss,
)
from specjax.training.objectives.chunks import by_chunks
from specjax.training.objectives.unrolling import FeatureMethod, layer_sizes
from specjax.training.objectives.windows import read


@dataclass(frozen=True)
class Eagle3Method(FeatureMethod):
    """A method that trains `Eagle3` or a drafter derived from it.

    Attributes:
        target: directory or hub id of the target.
        draft_vocab_size: the number of tokens that the drafter can draft, the most frequent ones of
            the training data; 0 for all.
        intermediate_size: the size of the drafter's MLPs; 0 for the target's.
        layers: the number of layers of the drafter.
        taps: the target layers whose input the drafter reads; empty for a low, a middle and a high
            one.
        norm_before_residual: see `Eagle3Config`, also for the next two fields.
        norm_before_fc: whether to use one norm over all taps.
        fc_norm: whether to use a norm for each tap (EAGLE-3.1).
        freeze_head: whether to freeze the head, which starts as the target's rows of tokens that
            can be drafted.
        loss: the loss of a token: the cross entropy, as published, or a loss of acceptance (arXiv
            2602.23881).
        eta: the parameter of the hybrid loss, see `losses.hybrid`.
        remat: whether to recompute activations for the gradient, to save memory.

    Examples:
        >>> from specjax.training.objectives.draft_vocabulary import Eagle3Method
        >>> Eagle3Method(target="embedded", layers=0).check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.layers=0: must be at least 1
    """

    target: str = ""
    draft_vocab_size: int = 0
    intermediate_size: int = 0
    layers: int = 1
    taps: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    freeze_head: bool = False
    loss: Literal["cross_entropy"] | AcceptanceLoss = "cross_entropy"
    eta: float = 3.0
    remat: bool = False

    def check(self, window: int) -> None:
        super().check(window)
        self.check_minimum(1, "layers")
        # 0 is as many as the target has.
        self.check_minimum(0, "draft_vocab_size", "intermediate_size")
        check_loss(self.loss, "cross_entropy", self.eta)

    def options(self, inputs: StudentInputs, **variant: bool) -> dict[str, Any]:
        """Return options of the drafter's ``init``; ``variant`` has more fields of its config."""
        names = ("norm_before_residual", "norm_before_fc", "fc_norm")
        size = self.draft_vocab_size
        return {
            "ids": most_frequent(inputs.counts, size) if size else None,
            "taps": self.taps or None,
            "variant": {name: getattr(self, name) for name in names} | variant,
            "num_layers": self.layers,
            **layer_sizes(self.intermediate_size),
        }

    def frozen(self, path: str) -> bool:
        return self.freeze_head and path == "params.lm_head"


@dataclass(frozen=True)
class DraftLabels:
    """The labels of a drafter with a smaller vocabulary, from the target.

    Attributes:
        features: ``[B, T, H]`` the drafter's features.
        hidden: ``[B, T, H]`` the target's hidden states.
        log_total: ``[B, T]`` the log-sum-exp of all of the target's logits.
        can_be_drafted: ``[B, T]`` bool whether the target's likeliest token can be drafted.
        logits: returns the target's logits ``[..., Vd]`` of the tokens that can be drafted, from
            its hidden states.
    """

    features: jax.Array
    hidden: jax.Array
    log_total: jax.Array
    can_be_drafted: jax.Array
    logits: Callable[[jax.Array], jax.Array]

    @classmethod
    def of(cls, student: Eagle3, target: Target, batch: Batch) -> "DraftLabels":
        """Read the windows of a batch with the target."""
        output, _ = read(target, batch, student.taps(target.config))
        vocabulary = student.vocabulary(target)

        def summarise(hidden: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = target.head(hidden)
            return jax.nn.logsumexp(logits, axis=-1), argmax(logits)

        log_total, likeliest = by_chunks(
            summarise, (output.hidden,), numbers=target.config.vocab_size, mesh=target.mesh
        )
        if vocabulary is None:
            can_be_drafted, logits = jnp.ones(likeliest.shape, bool), target.head
        else:
            table = jnp.zeros(target.config.vocab_size, bool).at[vocabulary.ids].set(True)
            can_be_drafted = table[likeliest]
            logits = partial(student.drafted_logits, target, head=student.drafted_head(target))
        return cls(student.features(output), output.hidden, log_total, can_be_drafted, logits)


@shape_checked
def token_values(
    loss: Literal["cross_entropy"] | AcceptanceLoss,
    theirs: Float[Array, "B T Vd"],
    log_total: Float[Array, "B T"],
    logits: Float[Array, "B T Vd"],
) -> dict[str, Float[Array, "B T"]]:
    """Return what a loss needs to know of each prediction.

    For the cross entropy, the target's distribution is restricted to the draft vocabulary and
    scaled to a sum of 1. For the losses of acceptance it is not scaled, because a token is accepted
    with its probability among all tokens.

    Args:
        loss: the name of the loss.
        theirs: the target's logits over the draft vocabulary, see `DraftLabels`.
        log_total: the log-sum-exp of all of the target's logits.
        logits: the drafter's logits.
    """
    if loss == "cross_entropy":
        return {"cross_entropy": losses.soft_cross_entropy(theirs, logits)}
    return acceptance_values(loss, theirs - log_total[..., None], logits)


@shape_checked
def token_loss(
    loss: Literal["cross_entropy"] | AcceptanceLoss,
    values: dict[str, Float[Array, "B T"]],
    mask: Bool[Array, "B T"],
    eta: float,
) -> Float[Array, "B T"]:
    """Return the loss of each prediction of one depth.

    Args:
        loss: the name of the loss.
        values: the `token_values` of all predictions of that depth.
        mask: the predictions that count.
        eta: see `losses.hybrid`.
    """
    if loss == "cross_entropy":
        return values["cross_entropy"]
    return acceptance_loss(loss, values, mask, eta)


def most_frequent(counts: np.ndarray, size: int) -> np.ndarray:
    """Return the ids of the most frequent tokens, ascending; the lower ids among equal counts.

    Args:
        counts: ``[V]`` the count of each token.
        size: the number of ids to return.

    Raises:
        ConfigError: The vocabulary has fewer tokens.
    """
    if size > len(counts):
        raise ConfigError(
            f"method.draft_vocab_size={size}: the target has {len(counts)} tokens; give 0 for all"
            " of them"
        )
    return np.sort(np.argsort(-counts, kind="stable")[:size])
