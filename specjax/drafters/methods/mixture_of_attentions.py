"""Mixture of Attentions (Zimmer et al. 2024, arXiv 2410.03804): draft from the whole KV cache.

The layers of the target store keys and values of each token that it has read. *Layer
self-attention* (LSA) makes one summary of them, once for each token. While drafting, the drafter
reads its own tokens with *self-attention* (SA), and attends to the summaries with *cross-attention*
(CA). So it needs nothing new from the target, however many tokens it drafts, and it is trained on
exactly what it sees while drafting. With *target layer inference* (TLI) the last layers of the
target itself complete the prediction.
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
from specjax.drafters.base import (
    Drafter,
    DraftingReads,
    RemoteFeatures,
    check_mesh,
    remote_entry_arrays,
)
from specjax.drafters.checkpoints import moa as moa_checkpoint
from specjax.drafters.checkpoints.moa import MoAConfig
from specjax.drafters.expansion import Frontier, expand
from specjax.drafters.layer_attention import LayerAttention
from specjax.drafters.trained import CheckpointFormat, TrainedDrafter, layer_like
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import DraftShape, DynamicTree
from specjax.errors import InputError
from specjax.models.attention import Filled, Piece, attend
from specjax.models.cache import Entries, Entry, KVCache, empty_entries, place_entries
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.layers import decoder_layer, keys_values, linear, mlp, queries, rms_norm
from specjax.models.params import Params
from specjax.models.quantization import schemes
from specjax.models.rope import rotations
from specjax.models.transformer import States, Target
from specjax.sampling import RowSampling

DEFAULT_DRAFT = DynamicTree(top_k=8, depth=6, nodes=63)
"""The authors' tree: 62 drafted nodes and the root."""


def _default_sizes(target: ModelConfig) -> dict[str, int]:
    """Return the sizes of self-attention and cross-attention for a target.

    They have at most half of the target's key/value heads (the largest such number that divides its
    heads), and 3/7 of its MLP, rounded down to a multiple of 8. For Llama-3-8B these are the
    authors' sizes, 4 and 6144.
    """
    kv_heads = max(
        count
        for count in range(1, max(target.num_kv_heads // 2, 1) + 1)
        if target.num_heads % count == 0
    )
    return {
        "num_kv_heads": kv_heads,
        "intermediate_size": max(target.intermediate_size * 3 // 7 // 8, 1) * 8,
    }


@struct.dataclass
class MixtureState:
    """The caches of the two attention blocks.

    Their lengths differ after `MixtureOfAttentions.append_unverified`, because unverified tokens
    have no summaries.

    Attributes:
        tokens: the cache of self-attention, over all tokens.
        summaries: the cache of cross-attention, over the summaries of the tokens that the target
            has read.
    """

    tokens: KVCache
    summaries: KVCache


@struct.dataclass
class MixtureOfAttentions(TrainedDrafter[MixtureState]):
    """A drafter with self-attention to all tokens and cross-attention to summaries.

    Layer self-attention makes the summaries. They exist for verified tokens only. To predict the
    token at position i, the drafter reads the embedding of the token at i - 1. (EAGLE combines it
    with the target's state one position earlier.) Self-attention covers the text, the root and the
    drafted tokens. Cross-attention ends before the root, because the target has not read the root.
    Checkpoints are our own, or in the form that the authors publish (see `moa_checkpoint`).

    Attributes:
        params: the parameters (see `moa_checkpoint.declare`). The embedding and the head are the
            target's, and with TLI the final norm is, too.
        config: the configuration.
        draft: the shape of the drafts.
        mesh: the mesh of the parameters.
        told: what the server sends for each token to a drafter on another machine. "summaries": the
            mean of layer self-attention over the layers, which the client projects to the summary.
            "entries": the KV entries of all target layers, from which the client computes the
            summary. Without layer self-attention, the target's last hidden state is sent instead.

    Examples:
        >>> drafter = specjax.MixtureOfAttentions.init(target, jax.random.key(1), tli=1)
        >>> drafter.tli_layers(target)  # the target's last layer completes a prediction
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
        """Load a checkpoint, our own or the authors'; its config.json says which.

        Args:
            path: a directory or a hub id, with config.json and safetensors.
            draft: the shape of the drafts; None is `DEFAULT_DRAFT`.
            dtype: the data type of the parameters, which should be the target's. The default is
                that of `Target.from_pretrained`.
            mesh: the mesh of the target.
            weights: the quantization of the weights, as for `Target.from_pretrained`.
            tli: the number of the target's last layers that complete a prediction. The authors'
                checkpoints do not state it: None is 0. Our own state it: leave it out, or give the
                same number. In a drafter's name it is ``moa,tli=1:WHERE``.

        Raises:
            CheckpointError: A file, a field, a tensor or ``tli`` is invalid.
        """
        return super().from_pretrained(
            path, draft=draft, dtype=dtype, mesh=mesh, weights=weights, tli=tli
        )

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
        """Return a drafter for ``target`` with random weights.

        Args:
            target: the target model, with ordinary attention unless ``lsa`` is False.
            key: the random key for the weights. It is consumed.
            draft: the shape of the drafts.
            tli: the number of the target's last layers that complete a prediction.
            lsa: whether to use layer self-attention. Without it the target's last hidden state is
                the summary.
            sizes: fields of the `ModelConfig` of the two blocks.
        """
        target_config = target.config
        layer = layer_like(target_config, **(_default_sizes(target_config) | sizes))
        config = MoAConfig(
            self_layer=layer,
            cross_layer=moa_checkpoint.cross_like(layer),
            target_layers=target_config.num_layers,
            lsa=LayerAttention.for_target(target_config) if lsa else None,
            tli=tli,
            target=target_config,
        )
        return cls(
            params=cls._initialise(config, key, target),
            config=config,
            draft=draft,
            mesh=target.mesh,
        )

    def check(self, target: Target) -> None:
        config, layers = self.config, target.config.num_layers
        trained_layers = layers if config.target_layers is None else config.target_layers
        sizes = (config.self_layer.vocab_size, config.self_layer.hidden_size, trained_layers)
        target_sizes = (target.config.vocab_size, target.config.hidden_size, layers)
        if sizes != target_sizes:
            raise InputError(
                "drafter: this Mixture of Attentions was made for a target with (vocabulary,"
                f" hidden size, layers) {sizes}, but target has {target_sizes}: give the target"
                " that it was trained with"
            )
        if config.lsa is not None:
            config.lsa.check(target.config)
        first, stop = self.tli_layers(target)
        if windowed := set(range(first, stop)) & set(target.config.windowed_layers):
            raise InputError(
                f"drafter: target layer inference (tli={config.tli}) runs layers"
                f" {sorted(windowed)}, which have a sliding window, but it supports full layers"
                " only: give a drafter with tli=0"
            )
        if states := set(range(first, stop)) & set(target.config.layers_with_states):
            raise InputError(
                f"drafter: target layer inference (tli={config.tli}) runs layers {sorted(states)},"
                " which keep a state, but it supports layers with KV entries alone: give a drafter"
                " with tli=0"
            )
        if config.tli and not set(range(first, stop)) & set(target.config.layers_with_entries):
            raise InputError(
                f"drafter: target layer inference (tli={config.tli}) runs layers"
                f" {list(range(first, stop))}, which have an MLP alone, but at least one must have"
                " attention: give a drafter with tli=0"
            )
        if with_earlier_entries := [
            layer for layer in range(first, stop) if target.config.entries_of(layer) < first
        ]:
            raise InputError(
                f"drafter: target layer inference (tli={config.tli}) runs layers"
                f" {with_earlier_entries}, which read the entries of layers before layer {first}:"
                " give a drafter with tli=0"
            )
        if config.tli and target.config.per_layer_inputs:
            raise InputError(
                f"drafter: target layer inference (tli={config.tli}) runs the target's last layers"
                " on states that belong to no token (the drafter's), but this target's layers"
                " also need an embedding of each token (per-layer inputs): give a drafter with"
                " tli=0"
            )
        self.draft_shape.check(config.self_layer.vocab_size)
        check_mesh(self.mesh, target)

    # --- its parts ---

    def summarise(self, output: States, entries: Sequence[Entry]) -> jax.Array:
        """Return a summary ``[B, T, H]`` of each token that the target has read.

        Args:
            output: the target's states at the T tokens.
            entries: the KV entries of the tokens in each target layer, each part
                ``[B, kv_heads, T, d]``.
        """
        if self.config.lsa is None:
            return output.hidden
        return layer_attention.summarise(self.params, self.config.lsa, entries, self.mesh)

    def self_attention_entries(self, embedded: jax.Array, positions: jax.Array) -> Entry:
        """Return self-attention's KV entries of tokens with embeddings ``[B, T, H]``.

        ``positions`` are ``[B, T]``.
        """
        return self._entries_of(self.config.self_layer, "self_attention", embedded, positions)

    def cross_attention_entries(self, summaries: jax.Array, positions: jax.Array) -> Entry:
        """Return cross-attention's KV entries of summaries ``[B, T, H]``.

        ``positions`` are ``[B, T]``.
        """
        return self._entries_of(self.config.cross_layer, "cross_attention", summaries, positions)

    def _entries_of(
        self, config: ModelConfig, name: str, x: jax.Array, positions: jax.Array
    ) -> Entry:
        params, rotation = self.params[name], rotations(config.rope, config.head_dim, positions)
        return keys_values(
            params, config, rms_norm(x, params["input_norm"], config.norm_eps), rotation
        )

    def self_attend(
        self,
        embedded: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        past: Sequence[Piece] = (),
    ) -> tuple[jax.Array, Entry]:
        """Run self-attention on embedded tokens.

        Return the states ``[B, T, H]`` and the KV entries; see `decoder_layer`.
        """
        layer = self.config.self_layer
        rotation = rotations(layer.rope, layer.head_dim, positions)
        return decoder_layer(
            self.params["self_attention"], layer, embedded, rotation, mask, past, self.mesh
        )[:2]

    def cross_attend(self, x: jax.Array, positions: jax.Array, summaries: Piece) -> jax.Array:
        """Return the states ``[B, T, H]`` after cross-attention.

        Args:
            x: ``[B, T, H]``, the states after self-attention.
            positions: ``[B, T]``.
            summaries: the entries of `cross_attention_entries`, and which of them each state sees
                (none at the beginning of a text).
        """
        config, params = self.config.cross_layer, self.params["cross_attention"]
        eps = config.norm_eps
        rotation = rotations(config.rope, config.head_dim, positions)
        q = queries(params, config, rms_norm(x, params["input_norm"], eps), rotation)
        x = x + linear(params, "o", attend(q, [summaries]))
        return x + mlp(params, rms_norm(x, params["post_norm"], eps), activation=config.activation)

    def tli_layers(self, target: Target) -> tuple[int, int]:
        """Return the range ``(first, stop)`` of the target's layers that TLI runs."""
        return self.config.tli_layers_of(target.config.num_layers)

    def run_tli_layers(
        self,
        target: Target,
        x: jax.Array,
        positions: jax.Array,
        mask: Any,
        *,
        cache: KVCache | None = None,
        scratch: Sequence[tuple[Sequence[Entry], jax.Array | None]] = (),
    ) -> tuple[jax.Array, Entries]:
        """Run the target's last layers, and its final norm, on the states after cross-attention.

        Without TLI the states are returned as they are, without the norm.

        Args:
            target: the target model.
            x: ``[B, T, H]``, the states.
            positions: ``[B, T]``.
            mask: which of the T tokens see each other, as in `Target.run`.
            cache: the target's cache of these layers; None if the verified tokens are in
                ``scratch``.
            scratch: further entries, and which of them each token sees, as in `Target.run`.

        Returns:
            The states ``[B, T, H]`` that the target's head reads, and the KV entries of the T
            tokens in these layers.
        """
        if not self.config.tli:
            return x, ()
        layers = self.tli_layers(target)
        x, _, new = target.run(
            x, cache, layers=layers, positions=positions, mask=mask, scratch=scratch
        )
        return target.norm(x), new

    # --- the contract ---

    def reads(self, config: ModelConfig) -> tuple[int, ...]:
        # These layers run while it drafts, with the target's cache.
        return tuple(range(*self.config.tli_layers_of(config.num_layers)))

    def start(self, target: Target, batch: int, capacity: int) -> MixtureState:
        """Return empty caches of self-attention and cross-attention."""

        def empty(block: ModelConfig) -> KVCache:
            return KVCache.create(
                [block.entry_parts(0)],
                batch=batch,
                capacity=capacity,
                dtype=self._dtype,
                mesh=self.mesh,
            )

        return MixtureState(
            tokens=empty(self.config.self_layer), summaries=empty(self.config.cross_layer)
        )

    @property
    def drafts_elsewhere(self) -> bool:
        return True

    def remote_inputs(
        self, target: Target, output: States, entries: Sequence[Entry]
    ) -> dict[str, jax.Array]:
        """Return the means over the layers, all KV entries, or the target's last hidden state.

        These are sent with ``told="summaries"``, with ``told="entries"``, and without layer
        self-attention. A mean (see `layer_attention.mean_over_layers`) has the size of the KV entry
        of one layer, which is less than that of a summary if the target has few key/value heads.
        With TLI, the KV entries of the TLI layers are sent as well, unless all KV entries are.
        """
        layer_entries = remote_entry_arrays(entries, self.reads(target.config))
        if self.config.lsa is None:
            return {"hidden": output.hidden, **layer_entries}
        entries_by_token = layer_attention.by_token(entries)
        if self.told == "entries":
            return {"entries": entries_by_token}  # they include the layers that it reads
        means = layer_attention.mean_over_layers(
            self.params, self.config.lsa, entries_by_token, self.mesh
        )
        return {"means": means, **layer_entries}

    def remote_entries(self, target: Target, arrays: Mapping[str, jax.Array]) -> Entries:
        if self.config.lsa is None or self.told == "summaries":
            return super().remote_entries(target, arrays)
        (heads, dim), _ = target.config.entry_parts(0)
        by_head = arrays["entries"].reshape(*arrays["entries"].shape[:3], heads, 2 * dim)
        layers = [jnp.swapaxes(by_head[:, :, layer], 1, 2) for layer in self.reads(target.config)]
        return tuple((entry[..., :dim], entry[..., dim:]) for entry in layers)

    def append_remote(
        self, target: Target, state: MixtureState, told: RemoteFeatures
    ) -> MixtureState:
        positions = state.tokens.length[:, None] + jnp.arange(told.tokens.shape[1])[None]
        summaries = self._summaries(told.arrays)
        token_entry = self.self_attention_entries(target.embed(told.tokens), positions)
        summary_entry = self.cross_attention_entries(summaries, positions)
        return MixtureState(
            tokens=state.tokens.append((token_entry,), told.count, after=summaries),
            summaries=state.summaries.append((summary_entry,), told.count, after=summaries),
        )

    def _summaries(self, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """Return the summaries ``[B, T, H]`` from the arrays of `remote_inputs`."""
        if self.config.lsa is None:
            return arrays["hidden"].astype(self._dtype)
        if self.told == "entries":
            means = layer_attention.mean_over_layers(
                self.params, self.config.lsa, arrays["entries"], self.mesh
            )
        else:
            means = arrays["means"].astype(self._dtype)
        return layer_attention.project(self.params, means)

    def append_unverified(
        self,
        target: Target,
        state: MixtureState,
        tokens: jax.Array,
        following: jax.Array,
        count: jax.Array,
        cache: KVCache | None = None,
    ) -> tuple[MixtureState, Entries]:
        """Append tokens to the cache of self-attention only, as while drafting.

        They get no summary, because the target has not read them.
        """
        positions = state.tokens.length[:, None] + jnp.arange(tokens.shape[1])[None]
        causal = np.tril(np.ones((1, tokens.shape[1], tokens.shape[1]), bool))
        past = [Filled.of(state.tokens, 0, mesh=self.mesh)]
        x, token_entry = self.self_attend(
            target.embed(tokens), positions, jnp.asarray(causal), past
        )
        entries: Entries = ()
        # Only KV entries are needed here, no logits. Self-attention's are computed above; the rest
        # is needed only for the entries of the TLI layers.
        if self.config.tli:
            x = self.cross_attend(x, positions, Filled.of(state.summaries, 0, mesh=self.mesh))
            _, entries = self.run_tli_layers(target, x, positions, causal, cache=cache)
        return replace(state, tokens=state.tokens.append((token_entry,), count, after=x)), entries

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
        tokens_read, summaries = (
            Filled.of(store, 0, mesh=self.mesh) for store in (state.tokens, state.summaries)
        )

        def read(
            tokens: jax.Array, depth: Any, visible: jax.Array, scratch: Entries
        ) -> tuple[jax.Array, Entries]:
            """Read tokens ``[B, F]`` of one depth.

            Return the states that the target's head reads, and the new KV entries.
            """
            positions = jnp.broadcast_to(state.tokens.length[:, None] + depth, tokens.shape)
            token_scratch, *tli_scratch = scratch
            past = [tokens_read, (token_scratch, visible)]
            x, token_entry = self.self_attend(target.embed(tokens), positions, None, past)
            x = self.cross_attend(x, positions, summaries)
            # The nodes of one level are siblings or cousins: none is an ancestor of another.
            self_only = np.eye(tokens.shape[1], dtype=bool)[None]
            hidden, new = self.run_tli_layers(
                target, x, positions, self_only, cache=cache, scratch=[(tli_scratch, visible)]
            )
            return hidden, (token_entry, *new)

        def read_frontier(frontier: Frontier, scratch: Entries) -> tuple[jax.Array, Entries]:
            below_root = jnp.pad(frontier.visible, ((0, 0), (0, 0), (1, 0)), constant_values=True)
            hidden, new = read(frontier.tokens, frontier.depth, below_root, scratch)
            return target.head(hidden), place_entries(
                scratch, new, 1 + frontier.offset, after=hidden
            )

        # The root takes the first slot of the scratch; the nodes follow it.
        batch, slots = root.shape[0], 1 + self.draft_shape.read_slots
        scratch_of_tokens = empty_entries(
            [self.config.self_layer.entry_parts(0)],
            batch=batch,
            slots=slots,
            dtype=self._dtype,
            mesh=self.mesh,
        )
        scratch = scratch_of_tokens + target.new_scratch(batch, slots, self.tli_layers(target))
        # The root sees nothing in the scratch, which is still empty.
        hidden, new = read(root[:, None], 0, jnp.zeros((batch, 1, slots), bool), scratch)
        scratch = place_entries(scratch, new, 0, after=hidden)
        draft, _, _ = expand(
            self.draft_shape,
            read_frontier,
            target.head(hidden)[:, 0],
            scratch,
            root,
            sampling,
            keys,
            active,
        )
        return draft, state

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return what a level reads, and the weights of summaries, which are read once per step.

        A level runs self-attention, cross-attention, with TLI the target's last layers with their
        cache, and the target's head.
        """
        summary_weights = layer_attention.weights_of(self.params)
        blocks = {name: value for name, value in self.params.items() if name not in summary_weights}
        first, _ = self.tli_layers(target)
        target_reads = (target.params["layers"][first:], cache[first:], target.head_as_stored)
        return DraftingReads(level=(blocks, state, target_reads), step=summary_weights)


def with_told(drafter: Drafter, told: Literal["summaries", "entries"]) -> Drafter:
    """Return ``drafter`` with another value of ``told``; see `MixtureOfAttentions`.

    Raises:
        InputError: The drafter is no Mixture of Attentions.
    """
    if not isinstance(drafter, MixtureOfAttentions):
        raise InputError(
            f"told={told!r}: needs Mixture of Attentions, and drafter is {type(drafter).__name__};"
            " leave it out"
        )
    return drafter.replace(told=told)  # pyright: ignore[reportAttributeAccessIssue]
