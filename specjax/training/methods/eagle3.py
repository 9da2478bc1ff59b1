"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): a loss of tokens alone, over several draft steps."""

from dataclasses import dataclass
from typing import Literal

import jax

from specjax.config import ConfigError
from specjax.drafters.methods.eagle3 import Eagle3
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.contract import Batch, Loss, StudentInputs
from specjax.training.objectives.acceptance import AcceptanceLoss, check_loss
from specjax.training.objectives.ahead import decayed
from specjax.training.objectives.draft_vocabulary import draft_labels, most_frequent, token_loss
from specjax.training.objectives.unrolling import FeatureMethod, layer_sizes, unroll
from specjax.training.objectives.windows import forward


@dataclass(frozen=True)
class Eagle3Training(FeatureMethod):
    """Training-time test: the sum over steps k of ``decay ** k`` times the loss of step k.

    Attributes:
        name: the name of the method.
        target: directory or hub id of the target.
        draft_vocab_size: the number of tokens that the drafter can draft, the most frequent ones of
            the training data; 0 for all.
        intermediate_size: the size of the drafter's MLP; 0 for the target's.
        layers: the number of layers of the drafter.
        taps: the target layers whose input the drafter reads; empty for a low, a middle and a high
            one.
        norm_before_residual: see `Eagle3Config`, also for the next three fields.
        norm_before_fc: whether to use one norm over all taps.
        fc_norm: whether to use a norm for each tap (EAGLE-3.1).
        norm_output: whether to feed back the normed state (EAGLE-3.1).
        freeze_head: whether to freeze the head, which starts as the target's rows of tokens that
            can be drafted.
        steps: the number of steps of the training-time test.
        decay: the factor of the weight from one step to the next.
        loss: the loss of a token: the cross entropy, as published, or a loss of acceptance (arXiv
            2602.23881).
        eta: the parameter of the hybrid loss, see `losses.hybrid`.
        remat: whether to recompute activations for the gradient, to save memory.

    Examples:
        >>> from specjax.training.methods import Eagle3Training
        >>> Eagle3Training(target="embedded").check(window=512)
        >>> Eagle3Training().check(window=512)
        Traceback (most recent call last):
        specjax.config.ConfigError: method.target='': this method learns from a target; give ...
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
            raise ConfigError(
                f"method.steps={self.steps}, method.layers={self.layers}: must be at least 1"
            )
        if self.draft_vocab_size < 0 or self.intermediate_size < 0:
            raise ConfigError(
                f"method.draft_vocab_size={self.draft_vocab_size},"
                f" method.intermediate_size={self.intermediate_size}: must be at least 0, which is"
                " as many as the target has"
            )
        self.check_window(window, "steps")
        check_loss(self.loss, "cross_entropy", self.eta)

    def init(self, key: jax.Array, inputs: StudentInputs) -> Eagle3:
        target = inputs.frozen_target
        names = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
        return Eagle3.init(
            target,
            key,
            ids=(
                most_frequent(inputs.counts, self.draft_vocab_size)
                if self.draft_vocab_size
                else None
            ),
            taps=self.taps or None,
            variant={name: getattr(self, name) for name in names},
            **layer_sizes(self.intermediate_size),
            num_layers=self.layers,
        )

    def objective(self, student: Eagle3, batch: Batch, target: Target) -> Loss:
        """Return the loss, and the metrics.

        Positions at which the target's likeliest token cannot be drafted do not count.
        """
        output = forward(target, batch, student.taps(target.config))
        target_logits, can_be_drafted = draft_labels(student, target, output)
        log_total = jax.nn.logsumexp(output.logits, axis=-1)

        def loss_of(states: jax.Array, mask: jax.Array) -> jax.Array:
            logits = student.logits(target, states)
            loss_of_token = token_loss(self.loss, target_logits, log_total, logits, mask, self.eta)
            return losses.mean_over_positions(loss_of_token, mask)

        loss_of = jax.checkpoint(loss_of) if self.remat else loss_of
        features = student.features(output)
        steps = unroll(student, batch, target, features, self.steps, detach=False, remat=self.remat)
        return decayed(batch, steps, loss_of, self.decay, can_be_drafted)

    def frozen(self, path: str) -> bool:
        return self.freeze_head and path == "params.lm_head"
