"""Mixture of Attentions (Zimmer et al. 2024, arXiv 2410.03804): drafts from all that the target remembers of a text.

Of each token that the target has read, its layers remember keys and values. *Layer self-attention* (LSA) makes one summary of
them, once for each token. While it drafts, the drafter reads its own tokens with *self-attention* (SA), and looks at the
summaries with *cross-attention* (CA). So it needs nothing new from the target, however long it drafts, and it is trained on
just what it will see. With *target layer inference* (TLI) the target's own last layers finish what it has begun.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from specjax.draft import Draft
from specjax.drafters import layer_attention
from specjax.drafters.base import Drafter, Seen, check_mesh
from specjax.drafters.expansion import Frontier, expand
from specjax.drafters.features import layer_like
from specjax.drafters.layer_attention import LayerAttention
from specjax.errors import InputError
from specjax.models import checkpoint, huggingface
from specjax.models import params as declarations
from specjax.models.attention import Filled, Piece, attend
from specjax.models.cache import Entry, KVCache, empty_entries, place_entries
from specjax.models.config import ModelConfig, Rope
from specjax.models.fields import CheckpointError, check_fields, mapping, read_json, whole
from specjax.models.layers import decoder_layer, keys_values, linear, mlp, queries, rms_norm
from specjax.models.params import Params
from specjax.models.rope import rotations
from specjax.models.transformer import Output, Target, default_dtype
from specjax.sampling import RowSampling
from specjax.tree import DynamicTree, Shape

DEFAULT_DRAFT = DynamicTree(top_k=8, depth=6, nodes=63)
"""The authors' tree: 62 drafted nodes, and the root."""


@dataclass(frozen=True)
class MoAConfig:
    """The shape of a `MixtureOfAttentions`.

    Attributes:
        layer: of the blocks of self-attention and cross-attention; ``vocab_size`` and ``hidden_size`` are the target's.
        target_layers: layers of the target.
        lsa: layer self-attention. None: there is none, and the summary of a token is the target's last hidden state.
        tli: how many of the target's last layers finish a prediction.
    """

    layer: ModelConfig
    target_layers: int
    lsa: LayerAttention | None
    tli: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.tli < self.target_layers:
            raise InputError(f"tli={self.tli}: the target has {self.target_layers} layers; give 0 to one less")

    @property
    def cross_layer(self) -> ModelConfig:
        """The block of cross-attention: as ``layer``, but its positions are never stretched."""
        return replace(self.layer, rope=Rope(theta=self.layer.rope.theta))

    @property
    def tli_layers(self) -> tuple[int, int]:
        """The target's layers that finish a prediction, as `Target.run` takes them."""
        return self.target_layers - self.tli, self.target_layers


def declare(config: MoAConfig) -> Params:
    """The `Param` declarations, named as the authors name them."""
    tree: Params = {
        "self_attention": declarations.declare_layer(config.layer, "self_attention."),
        "cross_attention": declarations.declare_layer(config.cross_layer, "cross_attention."),
    }
    if config.lsa is not None:
        tree |= layer_attention.declare(config.lsa, config.layer.hidden_size)
    return tree


def is_moa(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is that of a `MixtureOfAttentions`."""
    return "moa_config" in raw


_FIELDS = {
    "target_layer_inference": whole(0, 10_000),
    "target_num_hidden_layers": whole(1, 10_000),
    "layer_self_attention": mapping(default=None),
}


def _read_config(directory: Path) -> MoAConfig:
    file = directory / "config.json"
    raw = read_json(file)
    outer = check_fields(raw, {"moa_config": mapping()}, str(file))["moa_config"]
    fields = check_fields(outer, _FIELDS, f"{file}: moa_config")
    layer = huggingface.with_switches(
        huggingface.parse_config(raw, str(file)), checkpoint.stored_names(directory), "self_attention."
    )
    own = fields["layer_self_attention"]
    lsa = None if own is None else layer_attention.parse(own, layer, f"{file}: layer_self_attention")
    try:
        return MoAConfig(layer, fields["target_num_hidden_layers"], lsa, fields["target_layer_inference"])
    except InputError as error:
        raise CheckpointError(f"{file}: {error}") from None


def _default_sizes(target: ModelConfig) -> dict[str, int]:
    """Of self-attention and cross-attention: half of the target's key and value heads, and 3/7 of its MLP, in whole eights. For
    Llama-3-8B that is the authors': 4 and 6144."""
    kv_heads = max(count for count in range(1, max(target.num_kv_heads // 2, 1) + 1) if target.num_heads % count == 0)
    return {"num_kv_heads": kv_heads, "intermediate_size": max(target.intermediate_size * 3 // 7 // 8, 1) * 8}


@struct.dataclass
class MixtureOfAttentions(Drafter):
    """Self-attention to all tokens, and cross-attention to summaries of the verified ones, which layer self-attention makes.

    The token at position i is predicted from the one at i - 1; EAGLE reads pairs of two positions, and this does not. The
    newest token, a draft's root, has not been read by the target yet: every prediction sees the summaries of the tokens before
    the root, and of the root and what is drafted below it the embeddings alone.

    Attributes:
        params: its own parameters (see `declare`). Embedding, final norm and head are the target's.
        config: its shape.
        draft: the shape of its drafts.
        mesh: where the params live.
        reads_cache: for target layer inference, whose layers go on behind what they remember; nothing else reads it.
    """

    params: Params
    config: MoAConfig = struct.field(pytree_node=False)
    draft: Shape = struct.field(pytree_node=False, default=DEFAULT_DRAFT)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    grows_trees: ClassVar[bool] = True
    reads_cache: ClassVar[bool] = True

    @classmethod
    def from_pretrained(
        cls, path: str | Path, draft: Shape = DEFAULT_DRAFT, dtype: Any = None, mesh: Mesh | None = None
    ) -> "MixtureOfAttentions":
        """Load what ``save_pretrained`` wrote; the tensors have the authors' names.

        Args:
            path: directory, or hub id, with config.json and safetensors.
            draft: the shape of its drafts.
            dtype: of the params; the default is that of `Target.from_pretrained`. It should be the target's.
            mesh: the target's.

        Raises:
            CheckpointError: a file, a field or a tensor is not as it must be.
        """
        directory = huggingface.locate(path)
        config = _read_config(directory)
        params = checkpoint.read(
            directory,
            declare(config),
            dtype or default_dtype(),
            what="a Mixture of Attentions drafter with this config.json",
            ignored=("*rotary_emb.inv_freq",),
            mesh=mesh,
            units=config.layer.axis_units,
        )
        return cls(params=params, config=config, draft=draft, mesh=mesh)

    @classmethod
    def init(
        cls,
        target: Target,
        key: jax.Array,
        draft: Shape = DEFAULT_DRAFT,
        *,
        tli: int = 0,
        lsa: bool = True,
        **sizes: Any,
    ) -> "MixtureOfAttentions":
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
        config = MoAConfig(layer, of_target.num_layers, LayerAttention.for_target(of_target) if lsa else None, tli)
        params = declarations.initialise(declare(config), key, target.dtype, target.mesh, layer.axis_units)
        return cls(params=params, config=config, draft=draft, mesh=target.mesh)

    def save_pretrained(self, path: str | Path, dtype: Any = None) -> None:
        """Write its own parameters, in ``dtype`` (by default their own). All of it or nothing."""
        config = self.config
        own: dict[str, Any] = {
            "target_layer_inference": config.tli,
            "target_num_hidden_layers": config.target_layers,
        }
        if config.lsa is not None:
            own["layer_self_attention"] = layer_attention.format_fields(config.lsa)
        content = huggingface.format_config(config.layer, checkpoint.float_type(dtype or self._dtype).name)
        content |= {"architectures": ["MixtureOfAttentionsDrafter"], "moa_config": own}
        checkpoint.write(Path(path), declare(config), self.params, {"config.json": content}, dtype)

    def check(self, target: Target) -> None:
        own = (self.config.layer.vocab_size, self.config.layer.hidden_size, self.config.target_layers)
        theirs = (target.config.vocab_size, target.config.hidden_size, target.config.num_layers)
        if own != theirs:
            raise InputError(
                f"drafter: this Mixture of Attentions was made for a target with (vocabulary, hidden size, layers) {own}, and "
                f"target has {theirs}: give the target that it was trained with"
            )
        if self.config.lsa is not None:
            self.config.lsa.check(target.config)
        if windowed := set(range(*self.config.tli_layers)) & set(target.config.windowed_layers):
            raise InputError(
                f"drafter: target layer inference (tli={self.config.tli}) runs layers {sorted(windowed)}, which have a sliding "
                "window, and it was not made for those: give one with tli=0"
            )
        self.draft.check(self.config.layer.vocab_size)
        check_mesh(self.mesh, target)

    # --- its parts ---

    def summarise(self, output: Output, entries: Sequence[Entry]) -> jax.Array:
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
        return self._remember(self.config.layer, "self_attention", embedded, positions)

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
        layer = self.config.layer
        turn = rotations(layer.rope, layer.head_dim, positions)
        return decoder_layer(self.params["self_attention"], layer, embedded, turn, mask, past, self.mesh)

    def cross_attend(self, x: jax.Array, positions: jax.Array, summaries: Piece) -> jax.Array:
        """``[B, T, H]`` the states ``x`` after cross-attention.

        Args:
            x: ``[B, T, H]``.
            positions: ``[B, T]``.
            summaries: what `remember_summaries` gave, and which of it each state sees: none, at the beginning of a text.
        """
        config, own, eps = self.config.cross_layer, self.params["cross_attention"], self.config.layer.norm_eps
        turn = rotations(config.rope, config.head_dim, positions)
        x = x + linear(own, "o", attend(queries(own, config, rms_norm(x, own["input_norm"], eps), turn), [summaries]))
        return x + mlp(own, rms_norm(x, own["post_norm"], eps))

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
        layers = self.config.tli_layers
        x, _, new = target.run(x, cache, layers=layers, positions=positions, mask=mask, scratch=scratch)
        return target.norm(x), new

    # --- the contract ---

    def start(self, target: Target, batch: int, capacity: int) -> KVCache:
        """What self-attention and cross-attention remember of the tokens that the target has read."""
        parts = self.config.layer.entry_parts
        return KVCache.create(parts, layers=2, batch=batch, capacity=capacity, dtype=self._dtype, mesh=self.mesh)

    def absorb(self, target: Target, state: KVCache, seen: Seen) -> KVCache:
        positions = state.length[:, None] + jnp.arange(seen.tokens.shape[1])[None]
        summaries = self.summarise(seen.output, seen.entries)
        of_tokens = self.remember_tokens(target.embed(seen.tokens), positions)
        return state.append((of_tokens, self.remember_summaries(summaries, positions)), seen.count, after=summaries)

    def propose(
        self,
        target: Target,
        state: KVCache,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
        cache: KVCache | None = None,
    ) -> tuple[Draft, KVCache]:
        assert cache is not None
        tokens_read, summaries = (Filled(entry, state.filled, mesh=self.mesh) for entry in state.layers)
        verified = cache.of_layers(*self.config.tli_layers)

        def read(
            tokens: jax.Array, depth: Any, seen: jax.Array, scratch: tuple[Entry, ...]
        ) -> tuple[jax.Array, tuple[Entry, ...]]:
            """Tokens ``[B, F]`` of one depth: the target's last states of each, and the new entries."""
            positions = jnp.broadcast_to(state.length[:, None] + depth, tokens.shape)
            past = [tokens_read, (scratch[0], seen)]
            x, own = self.self_attend(target.embed(tokens), positions, None, past)
            x = self.cross_attend(x, positions, summaries)
            alone = np.eye(tokens.shape[1], dtype=bool)[None]
            hidden, new = self.finish(target, x, positions, alone, cache=verified, scratch=[(scratch[1:], seen)])
            return hidden, (own, *new)

        def read_frontier(frontier: Frontier, scratch: tuple[Entry, ...]) -> tuple[jax.Array, tuple[Entry, ...]]:
            below_root = jnp.pad(frontier.seen, ((0, 0), (0, 0), (1, 0)), constant_values=True)
            hidden, new = read(frontier.tokens, frontier.depth, below_root, scratch)
            return target.head(hidden), place_entries(scratch, new, 1 + frontier.offset, after=hidden)

        # The root has the first slot of the scratch.
        batch, slots = root.shape[0], 1 + self.draft.read_slots
        own = empty_entries(
            self.config.layer.entry_parts, layers=1, batch=batch, slots=slots, dtype=self._dtype, mesh=self.mesh
        )
        scratch = own + target.new_scratch(batch, slots, self.config.tli_layers)
        hidden, new = read(root[:, None], 0, jnp.zeros((batch, 1, slots), bool), scratch)
        scratch = place_entries(scratch, new, 0, after=hidden)
        draft, _, _ = expand(self.draft, read_frontier, target.head(hidden)[:, 0], scratch, root, sampling, keys, active)
        return draft, state

    @property
    def _dtype(self) -> Any:
        return self.params["self_attention"]["input_norm"].dtype
