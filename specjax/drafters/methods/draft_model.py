"""A smaller model as the drafter (Leviathan et al. 2023, arXiv 2211.17192); where its tokenizer is another one than the
target's, with the tokens that both have (Timor et al. 2025, arXiv 2502.05202)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax import text
from specjax.drafters.base import Committed, Drafter, DraftingReads, RemoteFeatures, check_mesh
from specjax.drafters.cache_schemes import Streaming, check_own_cache
from specjax.drafters.candidates import Vocabulary
from specjax.drafters.expansion import Frontier, expand, read_nodes
from specjax.drafters.shared_vocabulary import Asked, SharedVocabulary, share
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models import config_json, hub
from specjax.models.cache import Cache, Entry, gather_entries
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.quantization import schemes
from specjax.models.transformer import Target
from specjax.sampling import RowSampling

MAX_PADDING = 1024
"""Vocabularies whose sizes differ by fewer ids than this are taken to be one, padded to different widths."""


def check_vocabulary(own: ModelConfig, target: ModelConfig) -> None:
    """Refuse, with an InputError, a draft model that cannot share the target's tokenizer, where nothing translates.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax.drafters import check_vocabulary
        >>> check_vocabulary(replace(config, vocab_size=24), config)  # padded: fits
        >>> check_vocabulary(replace(config, vocab_size=32_000), config)
        Traceback (most recent call last):
        specjax.errors.InputError: drafter has a vocabulary of 32000 tokens and target one of 16: ...
    """
    if abs(own.vocab_size - target.vocab_size) >= MAX_PADDING:
        raise InputError(
            f"drafter has a vocabulary of {own.vocab_size} tokens and target one of {target.vocab_size}: "
            "a draft model must share the target's tokenizer, or both tokenizers must be at hand, to draft the tokens that both"
            " have (DraftModel.from_pretrained(tokenizer=TARGET))"
        )


@struct.dataclass
class DraftedEntries:
    """What a draft model worked out while drafting, from `DraftModel.propose` to `DraftModel.update`.

    Attributes:
        entries: of the nodes that it read, in its own layers.
        places: ``[B, N]`` each node's place among them, from 0; -1 for nodes that were never read, and the root.
    """

    entries: tuple[Entry, ...]
    places: jax.Array


@struct.dataclass
class DraftModelState:
    """Attributes:
    cache: the draft model's own.
    last: ``[B]`` the row's newest token but its root, where ``behind``.
    behind: ``[B]`` bool, ``last`` has never been read: the cache lacks one token more than the root. So it is after full
        acceptance, and wherever the path ends at a leaf.
    drafted: None but between `DraftModel.propose` and `DraftModel.update`.
    """

    cache: Cache
    last: jax.Array
    behind: jax.Array
    drafted: DraftedEntries | None = None


@struct.dataclass
class DraftModel(Drafter[DraftModelState]):
    """Drafts with a second, cheaper model.

    Its vocabulary may be padded to another width than the target's: it drafts no id that the target lacks. Its tokenizer may be
    another one: see ``shared``.

    Attributes:
        model: the draft model.
        draft: the shape of its drafts, any of `specjax.drafts.shapes`.
        cache: what it remembers of a text: the first tokens and the newest, ``budget`` in all (MagicDec's second setting). By
            default all of it.
        budget: with ``cache``, slots of a row in each layer.
        shared: None where the draft model has the target's tokenizer. Else it drafts the tokens that both have, and reads the
            nearest of its own for each of the target's. The text stays the target's, greedy or sampled; a token that it lacks
            is never drafted, and one that it could not read makes the drafts after it worse.

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
            path: a directory or hub id; or the opened files of the checkpoint.
            draft: the shape of its drafts.
            dtype: of its params.
            mesh: the target's.
            weights: as for `Target.from_pretrained`.
            tokenizer: the target's: of transformers, or the directory or hub id of one. Where the draft model has another, it
                drafts the tokens that both have. None takes them to be the same.
            vocabulary: None refuses a pair that shares less than half of the smaller vocabulary; "intersect" does not.

        Raises:
            InputError: something cannot be used; names it, its value and what to give instead.

        Examples:
            >>> drafter = specjax.DraftModel.from_pretrained("embedded:draft", tokenizer="embedded")
            >>> drafter.shared is None  # one tokenizer
            True
        """
        shared = None
        if vocabulary not in (None, "intersect"):
            raise InputError(f'vocabulary={vocabulary!r}: give "intersect", or None')
        if tokenizer is None and vocabulary is not None:
            raise InputError(
                f"vocabulary={vocabulary!r}: give tokenizer=TARGET, the directory or hub id of the target, as well"
            )
        if tokenizer is not None:
            if isinstance(tokenizer, str | Path):
                tokenizer = text.load_tokenizer(hub.locate(tokenizer, weights=False))
            path = hub.open_checkpoint(path, weights=False)
            size = config_json.read_config(path).vocab_size
            shared = share(tokenizer, text.load_tokenizer(path.directory), vocabulary, sizes=(None, size))
        model = Target.from_pretrained(path, dtype=dtype, mesh=mesh, weights=weights)
        return cls(model=model, draft=draft, shared=shared)

    @classmethod
    def init(cls, target: Target, key: jax.Array, draft: DraftShape | int = Chain(4), **sizes: Any) -> "DraftModel":
        """A random draft model that fits ``target``; consumes ``key``.

        ``sizes`` override the fields of its `ModelConfig`; by default it is the target's with a quarter of the layers, and as
        many more as it takes for the last to read the whole text, where any layer does. Of a hybrid that is one with attention.
        """
        count = sizes.get("num_layers", _quarter(target.config))
        linear = sizes.get("linear_layers", target.config.linear_layers)
        if count > 0 and set(range(count)) <= set(linear):
            least = next(layer for layer in range(len(linear) + 1) if layer not in linear) + 1
            raise InputError(
                f"num_layers={count}: all of them would keep a state, as the target's do, and a layer with ordinary attention "
                f"is needed: give {least} or more, or other linear_layers"
            )
        config = target.config.first(count, **sizes)
        return cls(model=Target.init(config, key, target.dtype, target.mesh), draft=draft)

    def quantize(self, weights: schemes.Weights) -> "DraftModel":
        """The same with quantized weights, as `Target.quantize`."""
        return replace(self, model=self.model.quantize(weights))

    narrow = schemes.narrow  # the old name

    def save_pretrained(self, path: str | Path, *, dtype: DTypeLike | None = None) -> None:
        """Write the draft model as a Hugging Face checkpoint. What it shares with a target comes from the two tokenizers."""
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
        return DraftModelState(cache=cache, last=jnp.zeros(batch, jnp.int32), behind=jnp.zeros(batch, bool))

    @property
    def drafts_elsewhere(self) -> bool:
        return True

    def append_remote(self, target: Target, state: DraftModelState, told: RemoteFeatures) -> DraftModelState:
        # A token that the newest draft left unread comes first. Where there is then one too many, the last is left unread.
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
        # The first forward reads two tokens: the one that the newest path ended with, where it is unread, and the root.
        unread = jnp.stack([jnp.where(state.behind, state.last, root), root], axis=1)
        count = jnp.where(active, 1 + state.behind, 0)
        output, cache = self.model.forward(self._known(unread), state.cache, count)
        at_root = state.behind.astype(jnp.int32)[:, None, None]
        logits = jnp.take_along_axis(output.logits, at_root, axis=1)[:, 0]  # by row: a mesh exchanges nothing

        def read(frontier: Frontier, scratch: tuple[Entry, ...]) -> tuple[jax.Array, tuple[Entry, ...]]:
            known = replace(frontier, tokens=self._known(frontier.tokens))
            logits, scratch = read_nodes(self.model, cache, known, scratch)
            return self._offered(logits, target), scratch

        scratch = self.model.new_scratch(root.shape[0], self.draft_shape.read_slots)
        offered, vocabulary = self._offered(logits, target), self._vocabulary(target)
        draft, places, entries = expand(self.draft_shape, read, offered, scratch, root, sampling, keys, active, vocabulary)
        drafted = DraftedEntries(entries, jnp.broadcast_to(places, draft.tokens.shape))
        return draft, replace(state, cache=cache, drafted=drafted)

    def update(
        self, target: Target, state: DraftModelState, draft: Draft, verdict: Verdict, committed: Committed
    ) -> DraftModelState:
        drafted = state.drafted
        if drafted is None:  # the draft is not this model's: of what was accepted it has read nothing
            return self.append_committed(target, state, committed)
        accepted = jnp.maximum(verdict.count - 1, 0)
        end = jnp.take_along_axis(verdict.path, accepted[:, None], axis=1)
        places = jnp.take_along_axis(drafted.places, verdict.path[:, 1:], axis=1)
        behind = (accepted > 0) & (jnp.take_along_axis(drafted.places, end, axis=1)[:, 0] < 0)
        cache = state.cache
        if self.draft_shape.read_slots:
            # A chain's nodes were read in the order of its path.
            path = drafted.entries if draft.is_chain else gather_entries(drafted.entries, places)
            cache = cache.append(path, accepted - behind, after=draft.tokens[:, -1:])
        return DraftModelState(
            cache=cache,
            last=jnp.take_along_axis(draft.tokens, end, axis=1)[:, 0],
            behind=behind,
        )

    def drafting_reads(
        self, target: Target, state: DraftModelState | tuple[()] = (), cache: Sequence[Entry] = ()
    ) -> DraftingReads:
        """A level is a pass of the draft model."""
        return DraftingReads(level=(self.model.weights_of_pass, state))

    def _known(self, tokens: jax.Array) -> jax.Array:
        """``tokens`` as the draft model knows them. Of ids that it lacks it reads another token, and drafts on."""
        if self.shared is not None:
            return self.shared.read(tokens)
        return jnp.where(tokens < self.model.config.vocab_size, tokens, 0)

    def _offered(self, logits: jax.Array, target: Target) -> jax.Array:
        """Of the draft model's ``logits [..., own V]`` those that it may draft by, in `_vocabulary`."""
        return _fit(logits, target.config.vocab_size) if self.shared is None else self.shared.narrow(logits)

    def _vocabulary(self, target: Target) -> Vocabulary | None:
        return None if self.shared is None else self.shared.vocabulary(target.config.vocab_size)


def _quarter(config: ModelConfig) -> int:
    """How many of the first layers a draft model has, unless it is told."""
    least = max(1, config.num_layers // 4)
    not_whole = {*config.windowed_layers, *config.linear_layers}
    whole = [layer + 1 for layer in range(least - 1, config.num_layers) if layer not in not_whole]
    return whole[0] if whole else least


def _fit(logits: jax.Array, vocab: int) -> jax.Array:
    """``logits [..., own]`` cut, or padded with -inf, to the target's vocabulary."""
    missing = vocab - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab]
    return jnp.pad(logits, [(0, 0)] * (logits.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)
