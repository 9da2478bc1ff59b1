"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): tokens alone, over all the steps that the drafter will take."""

from dataclasses import dataclass
from typing import Literal

import jax

from specjax.config import ConfigError
from specjax.drafters.methods.eagle3 import Eagle3
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.contract import Batch, Metrics, StudentInputs
from specjax.training.objectives.acceptance import AcceptanceLoss, check_loss
from specjax.training.objectives.ahead import decayed
from specjax.training.objectives.draft_vocabulary import most_frequent, token_loss, wanted
from specjax.training.objectives.unrolling import FeatureMethod, layer_sizes, unroll
from specjax.training.objectives.windows import forward


@dataclass(frozen=True)
class Eagle3Training(FeatureMethod):
    """Training-time test: the sum over steps k of ``decay ** k`` times the cross entropy to the target's distribution.

    Attributes:
        name: the method.
        target: directory or hub id of the target.
        draft_vocab_size: tokens that the drafter can draft, the most frequent of those it is trained on; 0 is all.
        intermediate_size: of the drafter's MLP; 0 is the target's.
        layers: of the drafter.
        taps: layers of the target whose input it reads; empty: low, middle and high.
        norm_before_residual: see `Eagle3Config`, as the next three.
        norm_before_fc: one norm over all taps.
        fc_norm: a norm for each tap (EAGLE-3.1).
        norm_output: feed the normed state back (EAGLE-3.1).
        freeze_head: leave the head as it begins, the target's own of the tokens that can be drafted.
        steps: of the training-time test.
        decay: of the later steps' weight.
        loss: of a token: the cross entropy, as published, or one of the losses of acceptance (arXiv 2602.23881).
        eta: of the hybrid one, see `losses.hybrid`.
        remat: work inner values out again for the gradient, and keep fewer.

    Examples:
        >>> from specjax.training.methods import Eagle3Training
        >>> Eagle3Training(target="embedded").check(window=512)
        >>> Eagle3Training().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give its directory or hub id
    """

    name: Literal["eagle3"] = "eagle3"
    target: str = ""
    draft_vocab_size: int = 0
    intermediate_size: int = 0
    layers: int = 1
    taps: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    freeze_head: bool = False
    steps: int = 7
    decay: float = 0.8
    loss: Literal["cross_entropy"] | AcceptanceLoss = "cross_entropy"
    eta: float = 3.0
    remat: bool = False

    def check(self, window: int) -> None:
        super().check(window)
        if self.steps < 1 or self.layers < 1:
            raise ConfigError(f"method.steps={self.steps}, method.layers={self.layers}: must be at least 1")
        if self.draft_vocab_size < 0 or self.intermediate_size < 0:
            raise ConfigError(
                f"method.draft_vocab_size={self.draft_vocab_size}, method.intermediate_size={self.intermediate_size}: must be "
                "at least 0, which is as many as the target has"
            )
        if self.steps + 1 >= window:
            raise ConfigError(f"method.steps={self.steps}: data.window={window} is too short; give at least steps + 2")
        check_loss(self.loss, "cross_entropy", self.eta)

    def init(self, key: jax.Array, given: StudentInputs) -> Eagle3:
        target = given.frozen_target
        names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        return Eagle3.init(
            target,
            key,
            ids=most_frequent(given.counts, self.draft_vocab_size) if self.draft_vocab_size else None,
            taps=self.taps or None,
            variant={name: getattr(self, name) for name in names},
            **layer_sizes(self.intermediate_size),
            num_layers=self.layers,
        )

    def objective(self, student: Eagle3, batch: Batch, target: Target | None) -> tuple[jax.Array, Metrics]:
        """In nats, or as the loss comes. Positions at which the target's likeliest token cannot be drafted do not count."""
        assert target is not None
        output = forward(target, batch, student.taps(target.config))
        theirs, can_be_drafted = wanted(student, target, output)
        log_total = jax.nn.logsumexp(output.logits, axis=-1)

        def loss_of(states: jax.Array, mask: jax.Array) -> jax.Array:
            each = token_loss(self.loss, theirs, log_total, student.logits(target, states), mask, self.eta)
            return losses.mean_over_positions(each, mask)

        loss_of = jax.checkpoint(loss_of) if self.remat else loss_of
        features = student.features(output)
        steps = unroll(student, batch, target, features, self.steps, detach=False, remat=self.remat)
        return decayed(batch, steps, loss_of, self.decay, can_be_drafted)

    def frozen(self, path: str) -> bool:
        return self.freeze_head and path == "params.lm_head"
