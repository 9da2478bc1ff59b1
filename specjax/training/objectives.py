"""What a training step minimises: functions ``(model, batch, teacher) -> (loss, metrics)``.

A batch is ``{"tokens": [B, T+1], "segments": [B, T+1]}``: inputs are the first T tokens, labels the last T.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from specjax.evaluation.metrics import overlap
from specjax.models.transformer import Target
from specjax.training import losses

Batch = dict[str, jax.Array]
Objective = Callable[[Target, Batch, Target | None], tuple[jax.Array, dict[str, jax.Array]]]


def document_mask(segments: jax.Array) -> jax.Array:
    """``[B, T, T]``: a token sees itself and what precedes it in its own document, never another document."""
    count = segments.shape[1]
    return jnp.tril(jnp.ones((count, count), bool)) & (segments[:, :, None] == segments[:, None, :])


def _logits(model: Target, batch: Batch) -> jax.Array:
    output, _ = model.forward(batch["tokens"][:, :-1], mask=document_mask(batch["segments"][:, :-1]))
    assert output.logits is not None
    return output.logits


def lm(model: Target, batch: Batch, teacher: Target | None = None) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Cross entropy of the next token, in nats. The end of a document is predicted like any other token."""
    del teacher
    labels = batch["tokens"][:, 1:]
    logits = _logits(model, batch)
    loss = jnp.mean(losses.cross_entropy(logits, labels))
    return loss, {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == labels)}


def distill(model: Target, batch: Batch, teacher: Target | None) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Forward KL to the teacher's distribution, in nats.

    ``acceptance`` is beta = sum min(p, q), the chance that rejection sampling keeps a token drawn from the student
    (Leviathan et al. 2023, Definition 3.1 and Theorem 3.5); ``agreement`` is its greedy counterpart.
    """
    assert teacher is not None
    target = jax.lax.stop_gradient(_logits(teacher, batch))
    logits = _logits(model, batch)
    loss = jnp.mean(losses.forward_kl(target, logits))
    return loss, {
        "loss": loss,
        "acceptance": jnp.mean(overlap(jax.nn.softmax(target), jax.nn.softmax(logits))),
        "agreement": jnp.mean(jnp.argmax(logits, -1) == jnp.argmax(target, -1)),
    }


OBJECTIVES: dict[str, Objective] = {"lm": lm, "distill": distill}
