"""A smaller model as the drafter (Leviathan et al. 2023, arXiv 2211.17192).

If its tokenizer differs from the target's, it drafts the tokens that both have (Timor et al. 2025,
arXiv 2502.05202).
"""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax import text
from specjax.drafters.base import (
    Committed,
    Drafter,
    DraftingReads,
    RemoteFeatures,
    check_mesh,
    tokens_at,
    zeros_of,
)
from specjax.drafters.cache_schemes import Streaming, check_own_cache
from specjax.drafters.candidates import Vocabulary
from specjax.drafters.expansion import Frontier, expand, read_nodes
from specjax.drafters.shared_vocabulary import Asked, SharedVocabulary, share
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models import config_json, hub
from specjax.models.cache import Cache, Entries, gather_entries
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.quantization import schemes
from specjax.models.sparse_attention import entries_read
from specjax.models.transformer import Target
from specjax.sampling import RowSampling

MAX_PADDING = 1024
"""The difference in vocabulary size up to which two vocabularies count as equal, with padding."""


def check_vocabulary(own: ModelConfig, target: ModelConfig) -> None:
    """Raise an InputError if a draft model cannot use the target's tokenizer.

    A draft model with a `SharedVocabulary` needs no such check.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax.drafters import check_vocabulary
        >>> check_vocabulary(replace(config, vocab_size=24), config)  # padded: fits
        >>> check_vocabulary(replace(config, vocab_size=32_000), config)
        Traceback (most recent call last):
        specjax.errors.InputError: drafter has a vocabulary of 32000 tokens and target one of 16...
    """
    if abs(own.vocab_size - target.vocab_size) >= MAX_PADDING:
        raise InputError(
            f"drafter has a vocabulary of {own.vocab_size} tokens and target one of"
            f" {target.vocab_size}: a draft model must share the target's tokenizer, or both"
            " tokenizers must be at hand, to draft the tokens that both have"
            " (DraftModel.from_pretrained(tokenizer=TARGET))"
        )


@struct.dataclass
class DraftedEntries:
    """The results of drafting, which `DraftModel.propose` passes to `DraftModel.update`.

    Attributes:
        entries: the KV entries of the nodes that were read, in the draft model's layers.
        places: ``[B, N]``, the index of each node among the nodes that were read, or -1 for the
            root and for nodes that were never read.
        is_merged: whether the nodes are those of a merged draft, some of which come from other
            drafters; static.
    """

    entries: Entries
    places: jax.Array
    is_merged: bool = struct.field(pytree_node=False, default=False)


@struct.dataclass
class DraftModelState:
    """The memory of a draft model.

    Attributes:
        cache: the cache of the draft model.
        last: ``[B]``, the newest token of each row before its root; it matters in rows that are
            ``behind``.
        behind: ``[B]`` bool, whether the draft model has not read ``last``. The cache then lacks
            one token more than the root. That is so after full acceptance, and whenever the
            accepted path ends at a leaf.
        drafted: the results of drafting, between `DraftModel.propose` and `DraftModel.update`;
            otherwise None.
    """

    cache: Cache
    last: jax.Array
    behind: jax.Array
    drafted: DraftedEntries | None = None


@struct.dataclass
class DraftModel(Drafter[DraftModelState]):
    """A drafter that is a second, cheaper model.

    Its vocabulary may be padded to another width than the target's; it drafts no id that the target
    lacks. Its tokenizer may differ from the target's, see ``shared``.

    Attributes:
        model: the draft model.
        draft: the shape of the drafts, any of `specjax.drafts.shapes`.
        cache: the scheme of the cache. By default it has the whole text. `Streaming` keeps the
            first tokens and the newest, ``budget`` in all (the second setting of MagicDec).
        budget: with ``cache``, the number of slots of a row in each layer.
        shared: None if the draft model has the target's tokenizer. Otherwise it drafts the tokens
            that both have, and reads for each of the target's tokens the nearest of its own. The
            output is still the target's, greedy or sampled. A token that the draft model lacks is
            never drafted, and one that it cannot read makes the drafts after it worse.

    Examples:
        >>> drafter = specjax.DraftModel.init(
        ...     target, jax.random.key(1), draft=2, num_layers=1
        ... )
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
        >>> drafter = specjax.DraftModel.from_pretrained("embedded:draft")
        >>> drafter.model.config.num_layers
        2
    """

    model: Target
    draft: DraftShape | int = struct.field(pytree_node=False, default=Chain(4))
    cache: Streaming | None = struct.field(pytree_node=False, default=None)
    budget: int = struct.field(pytree_node=False, default=256)
    shared: SharedVocabulary | None = None
    grows_trees: ClassVar[bool] = True

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | CheckpointFiles,
        *,
        draft: DraftShape | int = Chain(4),
        dtype: DTypeLike | None = None,
        mesh: Mesh | None = None,
        weights: schemes.Weights = schemes.AS_STORED,
        tokenizer: Any = None,
        vocabulary: Asked | None = None,
    ) -> "DraftModel":
        """Load the draft model as `Target.from_pretrained` loads a target.

        Args:
            path: a directory or a hub id; or the opened files of the checkpoint.
            draft: the shape of the drafts.
            dtype: the data type of the parameters.
            mesh: the mesh of the target.
            weights: the quantization of the weights, as for `Target.from_pretrained`.
            tokenizer: the target's tokenizer: of transformers, or its directory or hub id. If the
                draft model has another one, it drafts the tokens that both have. None assumes that
                they are the same.
            vocabulary: None requires that they share half of the smaller vocabulary; "intersect"
                allows any overlap.

        Raises:
            InputError: An argument is invalid. The message names it, its value and the remedy.

        Examples:
            >>> drafter = specjax.DraftModel.from_pretrained("embedded:draft", tokenizer="embedded")
            >>> drafter.shared is None  # equal tokenizers
            True
        """
        shared = None
        if vocabulary not in (None, "intersect"):
            raise InputError(f'vocabulary={vocabulary!r}: give "intersect", or None')
        if tokenizer is None and vocabulary is not None:
            raise InputError(
                f"vocabulary={vocabulary!r}: give tokenizer=TARGET, the directory or hub id of the"
                " target, as well"
            )
        if tokenizer is not None:
            if isinstance(tokenizer, str | Path):
                tokenizer = text.load_tokenizer(hub.locate(tokenizer, weights=False))
            path = hub.open_checkpoint(path, weights=False)
            size = config_json.read_config(path).vocab_size
            shared = share(
                tokenizer, text.load_tokenizer(path.directory), vocabulary, sizes=(None, size)
            )
        model = Target.from_pretrained(path, dtype=dtype, mesh=mesh, weights=weights)
        return cls(model=model, draft=draft, shared=shared)

    @classmethod
    def init(
        cls, target: Target, key: jax.Array, draft: DraftShape | int = Chain(4), **sizes: Any
    ) -> "DraftModel":
        """Return a draft model with random weights that fits ``target``.

        Args:
            target: the target model.
            key: the random key for the weights. It is consumed.
            draft: the shape of the drafts.
            sizes: fields of the `ModelConfig`. By default it is the target's with a quarter of the
                layers, or with more if that is needed for the last one to be a full-attention
                layer.
        """
        count = sizes.get("num_layers", _quarter(target.config))
        config = target.config.first(count, **sizes)
        return cls(model=Target.init(config, key, target.dtype, target.mesh), draft=draft)

    def quantize(self, weights: schemes.Weights) -> "DraftModel":
        """Return the same drafter with quantized weights, as `Target.quantize`."""
        return replace(self, model=self.model.quantize(weights))

    narrow = schemes.narrow  # the old name

    def save_pretrained(self, path: str | Path, *, dtype: DTypeLike | None = None) -> None:
        """Write the draft model as a Hugging Face checkpoint.

        The shared vocabulary is not stored, because it follows from the two tokenizers.
        """
        self.model.save_pretrained(path, dtype=dtype)

    def check(self, target: Target) -> None:
        self.model.check_whole()
        if self.shared is None:
            check_vocabulary(self.model.config, target.config)
            self.draft_shape.check(min(self.model.config.vocab_size, target.config.vocab_size))
        else:
            self.shared.check(self.model.config, target.config)
            self.draft_shape.check(self.shared.ids.shape[0])
        check_mesh(self.model.mesh, target)
        check_own_cache("DraftModel", self.cache, self.budget)

    @property
    def max_positions(self) -> int:
        return self.model.config.max_positions

    def start(self, target: Target, batch: int, capacity: int) -> DraftModelState:
        if self.cache is None:
            cache = self.model.new_cache(batch, capacity)
        else:
            cache = self.model.new_ring(batch, self.budget, self.cache.kept(self.budget))
        return DraftModelState(
            cache=cache, last=jnp.zeros(batch, jnp.int32), behind=jnp.zeros(batch, bool)
        )

    @property
    def drafts_elsewhere(self) -> bool:
        return True

    def append_remote(
        self, target: Target, state: DraftModelState, told: RemoteFeatures
    ) -> DraftModelState:
        # The token that a row has not read yet comes first. If there is no room for all tokens
        # then, the last one stays unread.
        before = jnp.concatenate([state.last[:, None], told.tokens[:, :-1]], axis=1)
        tokens = jnp.where(state.behind[:, None], before, told.tokens)
        unread, room = told.count + state.behind, tokens.shape[1]
        _, cache = self.model.commit(self._known(tokens), state.cache, jnp.minimum(unread, room))
        return DraftModelState(cache=cache, last=told.tokens[:, -1], behind=unread > room)

    def propose(
        self,
        target: Target,
        state: DraftModelState,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
    ) -> tuple[Draft, DraftModelState]:
        # The first forward reads up to two tokens: the end of the newest path, if it is unread, and
        # the root.
        # If the end is read, the root comes first, and the second token is padding.
        unread = jnp.stack([jnp.where(state.behind, state.last, root), root], axis=1)
        count = jnp.where(active, 1 + state.behind, 0)
        output, cache = self.model.forward(self._known(unread), state.cache, count)
        root_index = state.behind.astype(jnp.int32)[:, None, None]
        # The index is within each row, so that a mesh exchanges nothing.
        logits = jnp.take_along_axis(output.logits, root_index, axis=1)[:, 0]

        def read(frontier: Frontier, scratch: Entries) -> tuple[jax.Array, Entries]:
            translated = replace(frontier, tokens=self._known(frontier.tokens))
            logits, scratch = read_nodes(self.model, cache, translated, scratch)
            return self._offered(logits, target), scratch

        scratch = self.model.new_scratch(root.shape[0], self.draft_shape.read_slots)
        root_logits, vocabulary = self._offered(logits, target), self._vocabulary(target)
        draft, places, entries = expand(
            self.draft_shape, read, root_logits, scratch, root, sampling, keys, active, vocabulary
        )
        drafted = DraftedEntries(entries, jnp.broadcast_to(places, draft.tokens.shape))
        return draft, replace(state, cache=cache, drafted=drafted)

    def update(
        self,
        target: Target,
        state: DraftModelState,
        draft: Draft,
        verdict: Verdict,
        committed: Committed,
    ) -> DraftModelState:
        drafted = state.drafted
        if drafted is None:  # another drafter's draft, of which this model has read nothing
            return self.append_committed(target, state, committed)
        accepted = jnp.maximum(verdict.count - 1, 0)
        end = jnp.take_along_axis(verdict.path, accepted[:, None], axis=1)
        places = jnp.take_along_axis(drafted.places, verdict.path[:, 1:], axis=1)
        # The last accepted node was never read if it is a leaf. Of a merged draft, no node was read
        # from the first one on that another drafter alone has drafted.
        is_accepted = jnp.arange(places.shape[1]) < accepted[:, None]
        was_read = jnp.cumprod(is_accepted & (places >= 0), axis=1, dtype=jnp.int32)
        unread = accepted - jnp.sum(was_read, axis=1, dtype=jnp.int32)
        cache = state.cache
        if self.draft_shape.read_slots:
            # The nodes of a chain were read in the order of its path: nothing has to be gathered.
            path = drafted.entries if draft.is_chain else gather_entries(drafted.entries, places)
            # The pass of `propose` has stored the root already, so only accepted nodes are
            # appended.
            cache = cache.append(path, accepted - unread, after=draft.tokens[:, -1:])
        if drafted.is_merged:
            cache, unread = self._with_unread(cache, committed.tokens[:, 1:], accepted, unread)
        last = jnp.take_along_axis(draft.tokens, end, axis=1)[:, 0]
        return DraftModelState(cache=cache, last=last, behind=unread > 0)

    def _with_unread(
        self, cache: Cache, tokens: jax.Array, accepted: jax.Array, unread: jax.Array
    ) -> tuple[Cache, jax.Array]:
        """Read the accepted tokens that the model has not read, if a row has two or more of them.

        One is left for the next `propose`, which reads it together with the root.

        Args:
            cache: the cache without these tokens.
            tokens: ``[B, D]``, the accepted path without the root.
            accepted: ``[B]``, the number of valid tokens.
            unread: ``[B]``, the number of these, at the end of the path, that were not read.

        Returns:
            The cache, and the number of tokens that are unread now, at most one in each row.
        """
        if tokens.shape[1] < 2:
            return cache, unread
        missing = tokens_at(tokens, (accepted - unread)[:, None] + jnp.arange(tokens.shape[1]))

        def read() -> tuple[jax.Array, Entries]:
            states, entries = self.model.read(self._known(missing), cache)
            return states.hidden, entries

        # The cache is written outside of the conditional, which would copy it.
        must_read = jnp.any(unread > 1)
        hidden, entries = jax.lax.cond(must_read, read, partial(zeros_of, read))
        count = jnp.where(must_read, unread, 0)
        cache = cache.append(entries, count, after=hidden)
        return cache, unread - count

    def after_merge(
        self, before: DraftModelState, proposed: DraftModelState, nodes: jax.Array
    ) -> DraftModelState:
        """Keep the KV entries of the drafter's own nodes."""
        drafted = proposed.drafted
        if drafted is None:
            return before
        places = jnp.take_along_axis(drafted.places, jnp.maximum(nodes, 0), axis=1)
        places = jnp.where(nodes < 0, -1, places)
        return replace(proposed, drafted=DraftedEntries(drafted.entries, places, is_merged=True))

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return the arrays of a level: the draft model's weights and its cache."""
        if state:
            layers = entries_read(self.model.config, state.cache.layers, self.model.mesh)
            state = replace(state, cache=replace(state.cache, layers=layers))
        return DraftingReads(level=(self.model.weights_of_pass, state))

    def _known(self, tokens: jax.Array) -> jax.Array:
        """Return ``tokens`` as ids of the draft model.

        Another token replaces an id that it lacks.
        """
        if self.shared is not None:
            return self.shared.read(tokens)
        return jnp.where(tokens < self.model.config.vocab_size, tokens, 0)

    def _offered(self, logits: jax.Array, target: Target) -> jax.Array:
        """Return the logits of the draft model over `_vocabulary`."""
        if self.shared is None:
            return _fit(logits, target.config.vocab_size)
        return self.shared.narrow(logits)

    def _vocabulary(self, target: Target) -> Vocabulary | None:
        return None if self.shared is None else self.shared.vocabulary(target.config.vocab_size)


def _quarter(config: ModelConfig) -> int:
    """Return the default number of layers of a draft model."""
    least = max(1, config.num_layers // 4)
    full = (
        layer + 1 for layer in config.layers_with_entries if layer not in config.windowed_layers
    )
    return next((count for count in full if count >= least), least)


def _fit(logits: jax.Array, vocab: int) -> jax.Array:
    """Cut ``logits [..., own V]`` to the target's vocabulary, or pad them with -inf."""
    missing = vocab - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab]
    # -inf, so that a token which the draft model lacks is never drafted.
    return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)
