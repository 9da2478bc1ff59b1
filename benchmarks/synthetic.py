"""Random weights of a published shape with a forced acceptance rate, to measure the costs of steps.

Everything runs as with real weights: drafting, scoring, verification and caches. Only the target's
logits are raised, after they are computed, at the token that is to be accepted.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

import specjax
from specjax.drafters import Drafter, DraftModel, check_vocabulary
from specjax.errors import InputError
from specjax.models.published import published
from specjax.models.transformer import Output, Target


@struct.dataclass
class ForcedTarget(Target):
    """A target that agrees with each token that it reads with probability ``acceptance``.

    Attributes:
        acceptance: the probability. The random number depends on the position and the token.
    """

    acceptance: float = struct.field(pytree_node=False, default=1.0)

    def score(self, tokens: jax.Array, cache: Any = None, **options: Any) -> tuple[Output, Any]:
        """Return the result of `Target.score` with raised logits."""
        output, new = super().score(tokens, cache, **options)
        if tokens.shape[1] == 1:
            return output, new
        start = jnp.zeros(tokens.shape[0], jnp.int32) if cache is None else cache.length
        position = start[:, None] + jnp.arange(tokens.shape[1] - 1)[None]
        seed = jax.random.key(0)

        def coin(position: jax.Array, token: jax.Array) -> jax.Array:
            return jax.random.uniform(jax.random.fold_in(jax.random.fold_in(seed, position), token))

        agrees = jax.vmap(jax.vmap(coin))(position, tokens[:, 1:]) < self.acceptance
        forced_tokens = jnp.where(
            agrees, tokens[:, 1:], (tokens[:, 1:] + 1) % self.config.vocab_size
        )
        rows, nodes = jnp.arange(tokens.shape[0])[:, None], jnp.arange(tokens.shape[1] - 1)[None]
        return output.replace(logits=output.logits.at[rows, nodes, forced_tokens].set(1e4)), new


def models(
    shape: str, draft_shape: str, acceptance: float, dtype: str
) -> tuple[Target, dict[str, Drafter | None]]:
    """Return a forced target of ``shape``, and chains of 2 to 8 drafted by ``draft_shape``.

    The default draft model has a tenth of the layers.
    """
    if not 0 <= acceptance <= 1:
        raise InputError(
            f"synthetic_acceptance={acceptance:g}: an acceptance rate lies between 0 and 1"
        )
    kind = jnp.dtype(dtype)
    config = published(shape)
    if draft_shape:
        check_vocabulary(published(draft_shape), config)  # before gigabytes are made
    plain = Target.init(config, jax.random.key(0), kind)
    target = ForcedTarget(plain.params, config, acceptance=acceptance)
    if draft_shape:
        draft = Target.init(published(draft_shape), jax.random.key(1), kind)
    else:
        draft = DraftModel.init(
            plain, jax.random.key(1), num_layers=max(1, config.num_layers // 10)
        ).model
    chains = {
        f"draft model, chain {n}": DraftModel(draft, draft=specjax.Chain(n)) for n in (2, 4, 8)
    }
    return target, {"plain": None, **chains}
