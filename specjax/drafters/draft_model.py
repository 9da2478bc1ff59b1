"""A smaller model of the same vocabulary as the drafter (Leviathan et al. 2023, arXiv 2211.17192)."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.cache import KVCache
from specjax.drafters.base import Draft, Drafter, Verdict, extend_chain
from specjax.errors import InputError
from specjax.models.config import ModelConfig
from specjax.models.transformer import Output, Target
from specjax.sampling import RowSampling
from specjax.tree import Chain


def check_vocabulary(own: ModelConfig, target: ModelConfig) -> None:
    """Refuse, with an InputError, a draft model that cannot share the target's tokenizer."""
    if own.vocab_size != target.vocab_size:
        raise InputError(
            f"drafter has a vocabulary of {own.vocab_size} tokens and target one of {target.vocab_size}: "
            "a draft model must share the target's tokenizer"
        )


@struct.dataclass
class DraftModelState:
    """Attributes:
    cache: the draft model's own.
    last: ``[B]`` the last token of the row's newest draft.
    behind: ``[B]`` bool, ``last`` was accepted but the draft model has never read it: after full acceptance its cache
        lacks one token more than the root.
    """

    cache: KVCache
    last: jax.Array
    behind: jax.Array


@struct.dataclass
class DraftModel(Drafter):
    """Drafts a chain with a second, cheaper model.

    Attributes:
        model: of the target's vocabulary.
        draft: a `Chain`.
    """

    model: Target
    draft: Chain = struct.field(pytree_node=False, default=Chain(4))

    @classmethod
    def from_pretrained(
        cls, path: str | Path, draft: Chain = Chain(4), dtype: Any = None, mesh: Mesh | None = None
    ) -> "DraftModel":
        """Load the draft model as `Target.from_pretrained` loads a target."""
        return cls(model=Target.from_pretrained(path, dtype, mesh), draft=draft)

    @classmethod
    def init(cls, target: Target, key: jax.Array, draft: Chain = Chain(4), **sizes: Any) -> "DraftModel":
        """A random draft model that fits ``target``; consumes ``key``.

        ``sizes`` override the fields of its `ModelConfig`; by default it is the target's with a quarter of the layers.
        """
        sizes = {"num_layers": max(1, target.config.num_layers // 4)} | sizes
        config = ModelConfig(**(vars(target.config) | sizes))
        return cls(model=Target.init(config, key, target.dtype, target.mesh), draft=draft)

    def save_pretrained(self, path: str | Path, dtype: Any = None) -> None:
        """Write the draft model as a Hugging Face checkpoint."""
        self.model.save_pretrained(path, dtype)

    def check(self, target: Target) -> None:
        check_vocabulary(self.model.config, target.config)
        if self.model.mesh != target.mesh:
            raise InputError(f"drafter is on mesh={self.model.mesh} and target on {target.mesh}: load both with the same mesh")

    def prefill(self, target: Target, tokens: jax.Array, lengths: jax.Array, output: Output, cache: KVCache) -> DraftModelState:
        _, own = self.model.prefill(tokens, lengths, cache.capacity)
        return DraftModelState(cache=own, last=tokens[:, 0], behind=jnp.zeros(tokens.shape[0], bool))

    def propose(
        self, target: Target, state: DraftModelState, root: jax.Array, sampling: RowSampling, keys: jax.Array
    ) -> tuple[Draft, DraftModelState]:
        # The first forward reads two tokens: the one that full acceptance left out, where it did, and the root.
        unread = jnp.stack([jnp.where(state.behind, state.last, root), root], axis=1)
        output, cache = self.model.forward(unread, state.cache)
        assert output.logits is not None and cache is not None
        logits = output.logits[jnp.arange(root.shape[0]), state.behind.astype(jnp.int32)]
        cache = cache.keep(None, 1 + state.behind)
        committed = cache.length
        tokens, q, drafted, cache = extend_chain(self.model, logits, cache, self.draft, sampling, keys)
        draft = Draft.chain(root, tokens, q, drafted)
        last = jnp.take_along_axis(draft.tokens, draft.length[:, None], axis=1)[:, 0]
        return draft, DraftModelState(cache=replace(cache, length=committed), last=last, behind=state.behind)

    def update(
        self,
        target: Target,
        state: DraftModelState,
        draft: Draft,
        verdict: Verdict,
        output: Output,
        cache: KVCache,
    ) -> DraftModelState:
        # Drafting read the root and every token of the row's draft but the last; `length` stands after the root.
        accepted = verdict.count - 1  # -1 where the row has finished: its root is to be read again
        behind = accepted == draft.length
        return DraftModelState(cache=state.cache.keep(None, accepted - behind), last=state.last, behind=behind)
