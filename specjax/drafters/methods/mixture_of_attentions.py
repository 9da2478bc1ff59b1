"""Mixture of Attentions (Zimmer et al. 2024, arXiv 2410.03804): drafts from all that the target remembers of a text.

Of each token that the target has read, its layers remember keys and values. *Layer self-attention* (LSA) makes one summary of
them, once for each token. While it drafts, the drafter reads its own tokens with *self-attention* (SA), and looks at the
summaries with *cross-attention* (CA). So it needs nothing new from the target, however long it drafts, and it is trained on
just what it will see. With *target layer inference* (TLI) the target's own last layers finish what it has begun.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax.drafters import layer_attention
from specjax.drafters.base import Drafter, DraftingReads, RemoteFeatures, check_mesh, remote_entry_arrays
from specjax.drafters.checkpoints import moa as moa_checkpoint
from specjax.drafters.checkpoints.moa import MoAConfig
from specjax.drafters.expansion import Frontier, expand
from specjax.drafters.layer_attention import LayerAttention
from specjax.drafters.trained import CheckpointFormat, TrainedDrafter, layer_like
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import DraftShape, DynamicTree
from specjax.errors import InputError
from specjax.models.attention import Filled, Piece, attend
from specjax.models.cache import Entry, KVCache, empty_entries, place_entries
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.layers import decoder_layer, keys_values, linear, mlp, queries, rms_norm
from specjax.models.params import Params
from specjax.models.quantization import schemes
from specjax.models.rope import rotations
from specjax.models.transformer import States, Target
from specjax.sampling import RowSampling

DEFAULT_DRAFT = DynamicTree(top_k=8, depth=6, nodes=63)
"""The authors' tree: 62 drafted nodes, and the root."""


def _default_sizes(target: ModelConfig) -> dict[str, int]:
    """Of self-attention and cross-attention: half of the target's key and value heads, and 3/7 of its MLP, in whole eights. For
    Llama-3-8B that is the authors': 4 and 6144."""
    kv_heads = max(count for count in range(1, max(target.num_kv_heads // 2, 1) + 1) if target.num_heads % count == 0)
    return {"num_kv_heads": kv_heads, "intermediate_size": max(target.intermediate_size * 3 // 7 // 8, 1) * 8}


@struct.dataclass
class MixtureState:
    """What the two blocks remember. Their caches differ in length where tokens are assumed, of which there are no summaries.

    Attributes:
        tokens: what self-attention remembers of all tokens.
        summaries: what cross-attention remembers of the summaries of tokens that the target has read.
    """

    tokens: KVCache
    summaries: KVCache


@struct.dataclass
class MixtureOfAttentions(TrainedDrafter[MixtureState]):
    """Self-attention to all tokens, and cross-attention to summaries of the verified ones, which layer self-attention makes.

    The token at position i is predicted from the one at i - 1; EAGLE reads pairs of two positions, and this does not. The
    newest token, a draft's root, has not been read by the target yet: every prediction sees the summaries of the tokens before
    the root, and of the root and what is drafted below it the embeddings alone. Checkpoints are our own, or as the authors
    publish them (see `moa_checkpoint`).

    Attributes:
        params: its own parameters (see `moa_checkpoint.declare`). Embedding, final norm and head are the target's.
        config: its configuration.
        draft: the shape of its drafts.
        mesh: where the params live.
        told: what it is told of each token where it drafts on another machine than the target's: "summaries", which are made
            where the target is, or "entries", what all of the target's layers remember, of which it makes them itself.

    Examples:
        >>> drafter = specjax.MixtureOfAttentions.init(target, jax.random.key(1), tli=1)
        >>> drafter.tli_layers(target)  # the target's last layer finishes a prediction
        (1, 2)
    """

    params: Params
    config: MoAConfig = struct.field(pytree_node=False)
    draft: DraftShape | int = struct.field(pytree_node=False, default=DEFAULT_DRAFT)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    told: Literal["summaries", "entries"] = struct.field(pytree_node=False, default="summaries")
    grows_trees: ClassVar[bool] = True

    checkpoint_format: ClassVar[CheckpointFormat] = moa_checkpoint.FORMAT

    # --- its checkpoints ---

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | CheckpointFiles,
        *,
        draft: DraftShape | int | None = None,
        dtype: DTypeLike | None = None,
        mesh: Mesh | None = None,
        weights: schemes.Weights = schemes.AS_STORED,
        tli: int | None = None,
    ) -> Self:
        """Load a checkpoint of our own or of the authors, recognised by its config.json.

        Args:
            path: directory, or hub id, with config.json and safetensors.
            draft: the shape of its drafts; None: `DEFAULT_DRAFT`.
            dtype: of the params; the default is that of `Target.from_pretrained`. It should be the target's.
            mesh: the target's.
            weights: as for `Target.from_pretrained`.
            tli: how many of the target's last layers finish a prediction. A published checkpoint does not say: None is 0. Our
                own does, and ``tli`` must agree with it. By name it is ``moa,tli=1:WHERE``.

        Raises:
            CheckpointError: a file, a field or a tensor is not as it must be, or ``tli`` is not.
        """
        return super().from_pretrained(path, draft=draft, dtype=dtype, mesh=mesh, weights=weights, tli=tli)

    @classmethod
    def init(
        cls,
        target: Target,
        key: jax.Array,
        draft: DraftShape | int = DEFAULT_DRAFT,
        *,
        tli: int = 0,
        lsa: bool = True,
        **sizes: Any,
    ) -> Self:
        """A drafter for ``target`` with random weights; consumes ``key``.

        Args:
            target: with ordinary attention, unless ``lsa`` is False.
            key: of the random weights.
            draft: the shape of its drafts.
            tli: how many of the target's last layers finish a prediction.
            lsa: whether it has layer self-attention; without it the target's last hidden state is the summary.
            sizes: fields of the `ModelConfig` of its two blocks.
        """
        of_target = target.config
        layer = layer_like(of_target, **(_default_sizes(of_target) | sizes))
        config = MoAConfig(
            self_layer=layer,
            cross_layer=moa_checkpoint.cross_like(layer),
            target_layers=of_target.num_layers,
            lsa=LayerAttention.for_target(of_target) if lsa else None,
            tli=tli,
            target=of_target,
        )
        return cls(params=cls._initialise(config, key, target), config=config, draft=draft, mesh=target.mesh)

    def check(self, target: Target) -> None:
        config, layers = self.config, target.config.num_layers
        made_for = layers if config.target_layers is None else config.target_layers
        own = (config.self_layer.vocab_size, config.self_layer.hidden_size, made_for)
        theirs = (target.config.vocab_size, target.config.hidden_size, layers)
        if own != theirs:
            raise InputError(
                f"drafter: this Mixture of Attentions was made for a target with (vocabulary, hidden size, layers) {own}, and "
                f"target has {theirs}: give the target that it was trained with"
            )
        if config.lsa is not None:
            config.lsa.check(target.config)
        first, last = self.tli_layers(target)
        if windowed := set(range(first, last)) & set(target.config.windowed_layers):
            raise InputError(
                f"drafter: target layer inference (tli={config.tli}) runs layers {sorted(windowed)}, which have a sliding "
                "window, and it was not made for those: give one with tli=0"
            )
        if states := set(range(first, last)) & set(target.config.linear_layers):
            raise InputError(
                f"drafter: target layer inference (tli={config.tli}) runs layers {sorted(states)}, which keep a state of what "
                "the target made of the text, and it has states of its own: give one with tli=0"
            )
        if outside := [layer for layer in range(first, last) if target.config.entries_of(layer) < first]:
            raise InputError(
                f"drafter: target layer inference (tli={config.tli}) runs layers {outside}, which read the entries "
                f"of layers before layer {first}: give one with tli=0"
            )
        if config.tli and target.config.per_layer_inputs:
            raise InputError(
                f"drafter: target layer inference (tli={config.tli}) gives the target's last layers states that are of no "
                "token, and this target's layers are given inputs of each token: give one with tli=0"
            )
        self.draft_shape.check(config.self_layer.vocab_size)
        check_mesh(self.mesh, target)

    # --- its parts ---

    def summarise(self, output: States, entries: Sequence[Entry]) -> jax.Array:
        """``[B, T, H]`` a summary of each token that the target has read.

        Args:
            output: the target's at the T tokens.
            entries: what each of its layers remembers of them, ``[B, kv_heads, T, d]`` each part.
        """
        if self.config.lsa is None:
            return output.hidden
        return layer_attention.summarise(self.params, self.config.lsa, entries, self.mesh)

    def remember_tokens(self, embedded: jax.Array, positions: jax.Array) -> Entry:
        """What self-attention remembers of tokens with embeddings ``[B, T, H]`` at ``positions [B, T]``."""
        return self._remember(self.config.self_layer, "self_attention", embedded, positions)

    def remember_summaries(self, summaries: jax.Array, positions: jax.Array) -> Entry:
        """What cross-attention remembers of summaries ``[B, T, H]`` at ``positions [B, T]``."""
        return self._remember(self.config.cross_layer, "cross_attention", summaries, positions)

    def _remember(self, config: ModelConfig, name: str, x: jax.Array, positions: jax.Array) -> Entry:
        own, turn = self.params[name], rotations(config.rope, config.head_dim, positions)
        return keys_values(own, config, rms_norm(x, own["input_norm"], config.norm_eps), turn)

    def self_attend(
        self, embedded: jax.Array, positions: jax.Array, mask: jax.Array | None, past: Sequence[Piece] = ()
    ) -> tuple[jax.Array, Entry]:
        """Self-attention over embedded tokens: the states ``[B, T, H]``, and what is to be remembered; see `decoder_layer`."""
        layer = self.config.self_layer
        turn = rotations(layer.rope, layer.head_dim, positions)
        return decoder_layer(self.params["self_attention"], layer, embedded, turn, mask, past, self.mesh)

    def cross_attend(self, x: jax.Array, positions: jax.Array, summaries: Piece) -> jax.Array:
        """``[B, T, H]`` the states ``x`` after cross-attention.

        Args:
            x: ``[B, T, H]``.
            positions: ``[B, T]``.
            summaries: what `remember_summaries` gave, and which of it each state sees: none, at the beginning of a text.
        """
        config, own, eps = self.config.cross_layer, self.params["cross_attention"], self.config.cross_layer.norm_eps
        turn = rotations(config.rope, config.head_dim, positions)
        x = x + linear(own, "o", attend(queries(own, config, rms_norm(x, own["input_norm"], eps), turn), [summaries]))
        return x + mlp(own, rms_norm(x, own["post_norm"], eps), activation=config.activation)

    def tli_layers(self, target: Target) -> tuple[int, int]:
        """The target's layers that finish a prediction, as `Target.run` takes them."""
        return self.config.tli_layers_of(target.config.num_layers)

    def finish(
        self,
        target: Target,
        x: jax.Array,
        positions: jax.Array,
        mask: Any,
        *,
        cache: KVCache | None = None,
        scratch: Sequence[tuple[Sequence[Entry], jax.Array | None]] = (),
    ) -> tuple[jax.Array, tuple[Entry, ...]]:
        """The target's last layers on the states ``x [B, T, H]`` that cross-attention gave; without TLI the states themselves.

        Args:
            target: the target.
            x: the states.
            positions: ``[B, T]``.
            mask: which of the T tokens see each other, as in `Target.run`.
            cache: of the target's last layers: what they remember of the verified tokens. Or these stand in ``scratch``.
            scratch: what was read beside, and which of it each token sees, as in `Target.run`.

        Returns:
            ``[B, T, H]`` what the target's head reads, and the layers' entries of the T tokens.
        """
        if not self.config.tli:
            return x, ()
        layers = self.tli_layers(target)
        x, _, new = target.run(x, cache, layers=layers, positions=positions, mask=mask, scratch=scratch)
        return target.norm(x), new

    # --- the contract ---

    def reads(self, config: ModelConfig) -> tuple[int, ...]:
        return tuple(range(*self.config.tli_layers_of(config.num_layers)))  # these go on behind what they remember

    def start(self, target: Target, batch: int, capacity: int) -> MixtureState:
        """What self-attention and cross-attention remember of the tokens that the target has read."""

        def empty(block: ModelConfig) -> KVCache:
            return KVCache.create([block.entry_parts(0)], batch=batch, capacity=capacity, dtype=self._dtype, mesh=self.mesh)

        return MixtureState(tokens=empty(self.config.self_layer), summaries=empty(self.config.cross_layer))

    @property
    def drafts_elsewhere(self) -> bool:
        return True

    def remote_inputs(self, target: Target, output: States, entries: Sequence[Entry]) -> dict[str, jax.Array]:
        """A `layer_attention.mean_over_layers`, which is smaller than a summary, or all that it is made of."""
        of_layers = remote_entry_arrays(entries, self.reads(target.config))
        if self.config.lsa is None:
            return {"hidden": output.hidden, **of_layers}
        remembered = layer_attention.by_token(entries)
        if self.told == "entries":
            return {"entries": remembered}  # those of the layers that it reads among them
        means = layer_attention.mean_over_layers(self.params, self.config.lsa, remembered, self.mesh)
        return {"means": means, **of_layers}

    def remote_entries(self, target: Target, arrays: Mapping[str, jax.Array]) -> tuple[Entry, ...]:
        if self.config.lsa is None or self.told == "summaries":
            return super().remote_entries(target, arrays)
        (heads, dim), _ = target.config.entry_parts(0)
        by_head = arrays["entries"].reshape(*arrays["entries"].shape[:3], heads, 2 * dim)
        layers = [jnp.swapaxes(by_head[:, :, layer], 1, 2) for layer in self.reads(target.config)]
        return tuple((both[..., :dim], both[..., dim:]) for both in layers)

    def append_remote(self, target: Target, state: MixtureState, told: RemoteFeatures) -> MixtureState:
        positions = state.tokens.length[:, None] + jnp.arange(told.tokens.shape[1])[None]
        summaries = self._summaries(told.arrays)
        of_tokens = self.remember_tokens(target.embed(told.tokens), positions)
        of_summaries = self.remember_summaries(summaries, positions)
        return MixtureState(
            tokens=state.tokens.append((of_tokens,), told.count, after=summaries),
            summaries=state.summaries.append((of_summaries,), told.count, after=summaries),
        )

    def _summaries(self, told: Mapping[str, jax.Array]) -> jax.Array:
        """``[B, T, H]`` of what `remote_inputs` gave."""
        if self.config.lsa is None:
            return told["hidden"].astype(self._dtype)
        if self.told == "entries":
            means = layer_attention.mean_over_layers(self.params, self.config.lsa, told["entries"], self.mesh)
        else:
            means = told["means"].astype(self._dtype)
        return layer_attention.project(self.params, means)

    def append_unverified(
        self,
        target: Target,
        state: MixtureState,
        tokens: jax.Array,
        following: jax.Array,
        count: jax.Array,
        cache: KVCache | None = None,
    ) -> tuple[MixtureState, tuple[Entry, ...]]:
        """As while drafting, it sees the tokens and no summaries of them."""
        positions = state.tokens.length[:, None] + jnp.arange(tokens.shape[1])[None]
        causal = np.tril(np.ones((1, tokens.shape[1], tokens.shape[1]), bool))
        past = [Filled.of(state.tokens, 0, mesh=self.mesh)]
        x, of_tokens = self.self_attend(target.embed(tokens), positions, jnp.asarray(causal), past)
        entries: tuple[Entry, ...] = ()
        if self.config.tli:
            x = self.cross_attend(x, positions, Filled.of(state.summaries, 0, mesh=self.mesh))
            _, entries = self.finish(target, x, positions, causal, cache=cache)
        return replace(state, tokens=state.tokens.append((of_tokens,), count, after=x)), entries

    def propose(
        self,
        target: Target,
        state: MixtureState,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
        cache: KVCache | None = None,
    ) -> tuple[Draft, MixtureState]:
        tokens_read, summaries = (Filled.of(each, 0, mesh=self.mesh) for each in (state.tokens, state.summaries))

        def read(
            tokens: jax.Array, depth: Any, visible: jax.Array, scratch: tuple[Entry, ...]
        ) -> tuple[jax.Array, tuple[Entry, ...]]:
            """Tokens ``[B, F]`` of one depth: the target's last states of each, and the new entries."""
            positions = jnp.broadcast_to(state.tokens.length[:, None] + depth, tokens.shape)
            past = [tokens_read, (scratch[0], visible)]
            x, own = self.self_attend(target.embed(tokens), positions, None, past)
            x = self.cross_attend(x, positions, summaries)
            alone = np.eye(tokens.shape[1], dtype=bool)[None]
            hidden, new = self.finish(target, x, positions, alone, cache=cache, scratch=[(scratch[1:], visible)])
            return hidden, (own, *new)

        def read_frontier(frontier: Frontier, scratch: tuple[Entry, ...]) -> tuple[jax.Array, tuple[Entry, ...]]:
            below_root = jnp.pad(frontier.visible, ((0, 0), (0, 0), (1, 0)), constant_values=True)
            hidden, new = read(frontier.tokens, frontier.depth, below_root, scratch)
            return target.head(hidden), place_entries(scratch, new, 1 + frontier.offset, after=hidden)

        # The root has the first slot of the scratch.
        batch, slots = root.shape[0], 1 + self.draft_shape.read_slots
        own = empty_entries(
            [self.config.self_layer.entry_parts(0)], batch=batch, slots=slots, dtype=self._dtype, mesh=self.mesh
        )
        scratch = own + target.new_scratch(batch, slots, self.tli_layers(target))
        hidden, new = read(root[:, None], 0, jnp.zeros((batch, 1, slots), bool), scratch)
        scratch = place_entries(scratch, new, 0, after=hidden)
        draft, _, _ = expand(self.draft_shape, read_frontier, target.head(hidden)[:, 0], scratch, root, sampling, keys, active)
        return draft, state

    def drafting_reads(
        self, target: Target, state: MixtureState | tuple[()] = (), cache: Sequence[Entry] = ()
    ) -> DraftingReads:
        """Summaries are made once a step. A level is self-attention, cross-attention, the target's last layers over what they
        remember where these finish a prediction, and its head."""
        of_summaries = layer_attention.weights_of(self.params)
        blocks = {name: value for name, value in self.params.items() if name not in of_summaries}
        first, _ = self.tli_layers(target)
        of_target = (target.params["layers"][first:], cache[first:], target.head_as_stored)
        return DraftingReads(level=(blocks, state, of_target), step=of_summaries)


def with_told(drafter: Drafter, told: Literal["summaries", "entries"]) -> Drafter:
    """``drafter`` as one that is ``told`` so; see `MixtureOfAttentions`.

    Raises:
        InputError: it is no Mixture of Attentions.
    """
    if not isinstance(drafter, MixtureOfAttentions):
        raise InputError(f"told={told!r}: is of Mixture of Attentions, and drafter is {type(drafter).__name__}; leave it out")
    return drafter.replace(told=told)  # pyright: ignore[reportAttributeAccessIssue]
