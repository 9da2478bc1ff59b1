"""What EAGLE-1 and HASS share: a drafter that predicts features, and its loss, to which HASS adds steps and a term."""

import jax
import jax.numpy as jnp

from specjax.drafters.methods.eagle import Eagle
from specjax.drafters.methods.eagle_layer_attention import EagleWithLayerAttention
from specjax.models.transformer import Target
from specjax.sampling import likeliest
from specjax.training import losses
from specjax.training.contract import Batch, Metrics, StudentInputs
from specjax.training.objectives.ahead import counted, expected
from specjax.training.objectives.unrolling import FeatureMethod, layer_sizes, unroll
from specjax.training.objectives.windows import score


class EagleMethod(FeatureMethod):
    """A method that trains EAGLE-1's drafter.

    Attributes:
        lsa: whether the drafter reads the layers' keys and values through layer self-attention; a field of every such method.
        intermediate_size: of its MLP, 0 is the target's; likewise.
    """

    lsa: bool = False
    intermediate_size: int = 0

    def init(self, key: jax.Array, given: StudentInputs) -> Eagle:
        """A drafter with random weights."""
        kind = EagleWithLayerAttention if self.lsa else Eagle
        return kind.init(given.frozen_target, key, **layer_sizes(self.intermediate_size))


def feature_loss(
    student: Eagle,
    batch: Batch,
    target: Target,
    *,
    steps: int = 1,
    token_weight: float = 0.1,
    top_k: int = 10,
    top_k_weight: float = 0.0,
    noise: float = 0.0,
    remat: bool = False,
) -> tuple[jax.Array, Metrics]:
    """SmoothL1 of the feature, and cross entropies of the tokens that the target expects there; the mean over the steps.

    Args:
        student: the drafter.
        batch: the windows.
        target: whose features are predicted.
        steps: see `unroll`; states are detached between them.
        token_weight: of the cross entropy to the target's distribution.
        top_k: how many of the target's likeliest tokens the last term is over.
        top_k_weight: of the same cross entropy over those tokens alone, their probabilities as they are (HASS, equation 3).
        noise: width of the uniform noise on the features that are read, in a window of 512 tokens; it shrinks as 1 / T.
            Summaries of layers, which are learnt, are left as they are.
        remat: as in `unroll`.
    """
    output, entries = score(target, batch)
    summarise = jax.checkpoint(type(student).features) if remat else type(student).features
    features = summarise(student, output, entries)
    count = features.shape[1]
    if noise and not isinstance(student, EagleWithLayerAttention):
        width = noise * 512 / count
        features = features + jax.random.uniform(batch["key"], features.shape, features.dtype, -width / 2, width / 2)
    total, metrics = jnp.zeros(()), {}
    for step, states in enumerate(unroll(student, batch, target, features, steps, detach=True, remat=remat)):
        mask = counted(batch, step)
        wanted, theirs = expected(output, step)
        ours = student.logits(target, states)
        of_feature = losses.mean_over_positions(losses.smooth_l1(states, wanted), mask)
        of_token = losses.mean_over_positions(losses.soft_cross_entropy(theirs, ours), mask)
        loss = of_feature + token_weight * of_token
        if top_k_weight:
            best, tokens = likeliest(jax.nn.softmax(theirs), top_k)
            over_best = -jnp.sum(best * jnp.take_along_axis(jax.nn.log_softmax(ours), tokens, axis=-1), axis=-1)
            loss += top_k_weight * losses.mean_over_positions(over_best, mask)
        total += loss / steps
        metrics |= {f"feature_loss_{step}": of_feature, f"token_loss_{step}": of_token}
    return total, {"loss": total, **metrics}
