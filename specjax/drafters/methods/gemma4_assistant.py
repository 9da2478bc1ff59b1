"""The assistants that Google publishes beside Gemma 4 (``google/gemma-4-*-assistant``): drafters without a memory of their own.

An assistant has a few small layers with queries alone. They attend to the keys and values that the target itself keeps of what
it has read: those of its last layer with a window, and of its last full one. Of the text the assistant remembers nothing but
the target's newest hidden state; while it drafts, its own state goes round in that one's place.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.drafters.base import DraftingReads, check_mesh
from specjax.drafters.expansion import Frontier, expand
from specjax.drafters.trained import LEFT_OVER, CheckpointFormat, NewestStateDrafter, TrainedDrafter
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models import checkpoint, config_json
from specjax.models import params as declarations
from specjax.models.attention import Piece
from specjax.models.cache import Entry, KVCache, PagedCache
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import Layer, ModelConfig
from specjax.models.families import FAMILIES
from specjax.models.fields import check_fields, flag, mapping, whole
from specjax.models.layers import decoder_layer, normed
from specjax.models.params import Param, Params, matrix
from specjax.models.primitives import embedding_logits, linear
from specjax.models.products import product_on_device
from specjax.models.rope import rotations
from specjax.models.transformer import Target
from specjax.sampling import RowSampling

Seen = Callable[[int, int | None], Piece]
"""What the tokens of a call see of the entries that a layer of the target keeps: by its number, and by how many positions back
they see, their own included; None: all the way."""

_NOT_HELD = ("k", "v", "k_bias", "v_bias", "k_norm")
"""Of a layer's parameters those that make keys and values."""

_VOCABULARY = 262_144
"""Tokens of every published Gemma 4. Its assistants' sizes are those of their config.json (`google/gemma-4-*-it-assistant`)."""


@dataclass(frozen=True)
class AssistantConfig:
    """The shape of a `Gemma4Assistant`.

    Attributes:
        model: of its layers: a Gemma 4 without inputs of each layer and without experts. A layer's kind, with a window or full,
            says whose entries it reads.
        target_hidden_size: the target's.
        centroids: clusters of tokens in its head; 0: the head gives every token a logit.
        centroids_kept: the best so many clusters, of whose tokens the logits are worked out.
    """

    model: ModelConfig
    target_hidden_size: int
    centroids: int = 0
    centroids_kept: int = 32

    def __post_init__(self) -> None:
        if self.centroids and (self.model.vocab_size % self.centroids or not 1 <= self.centroids_kept <= self.centroids):
            raise InputError(
                f"num_centroids={self.centroids}, centroid_intermediate_top_k={self.centroids_kept}: the clusters must divide "
                f"the {self.model.vocab_size} tokens, and no more can be kept than there are"
            )
        if self.model.per_layer_inputs or self.model.moe is not None:
            raise InputError("text_config: an assistant's layers have one MLP, and no inputs of their own")


def read_config(stored: CheckpointFiles) -> AssistantConfig:
    """Return the shape of a checkpoint. Raises `CheckpointError`."""
    known = {
        "text_config": mapping(),
        "backbone_hidden_size": whole(1, 1_000_000),
        "use_ordered_embeddings": flag(default=False),
        "num_centroids": whole(1, 10_000_000, default=2048),
        "centroid_intermediate_top_k": whole(1, 10_000_000, default=32),
    }
    fields = check_fields(stored.raw, known, stored.file)
    # All of its layers read the entries of another model's: what it says of layers that share is of no use here.
    text = {**fields["text_config"], "model_type": "gemma4_text", "num_kv_shared_layers": 0}
    model = config_json.parse_drafter_config(text, stored.file)
    stored.check_count("num_hidden_layers", model.num_layers, stored.numbered("model.layers."), "layers")
    centroids = fields["num_centroids"] if fields["use_ordered_embeddings"] else 0
    return AssistantConfig(model, fields["backbone_hidden_size"], centroids, fields["centroid_intermediate_top_k"])


def declare(config: AssistantConfig, layout: str) -> Params:
    """Return ``{"embed", "layers", "norm", "pre", "post", "centroids"?, "order"?}``, where ``embed`` is the head alone."""
    model, own = config.model, (config.model.hidden_size, None)
    declared = declarations.declare(replace(model, tie_embeddings=True))
    layers = [{name: param for name, param in layer.items() if name not in _NOT_HELD} for layer in declared["layers"]]
    tree = declared | {
        "embed": replace(declared["embed"], is_product=False),  # rows of it are multiplied too
        "layers": layers,
        "pre": matrix("pre_projection", (2 * config.target_hidden_size, None), own),
        "post": matrix("post_projection", own, (config.target_hidden_size, None)),
    }
    if config.centroids:
        tree["centroids"] = matrix("masked_embedding.centroids", own, (config.centroids, None))
        name = "masked_embedding.token_ordering"
        tree["order"] = Param((model.vocab_size,), (None,), name, "zeros", dtype="int32", stored_dtype="int64")
    return tree


def _left_over(config: AssistantConfig, stored: CheckpointFiles) -> Collection[str]:
    made = [f"model.layers.*.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    # Its embedding is its head. A stored head that differs would be left out without a word, and is refused instead.
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    both = {head, embedding} <= stored.shapes.keys()
    copy = [head] * (both and checkpoint.have_same_values(stored, embedding, head))
    return (*LEFT_OVER, *copy, *made)


def _format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> dict[str, Any]:
    config, model = drafter.config, drafter.config.model
    text = config_json.format_config(model, dtype) | {"num_kv_shared_layers": model.num_layers}
    raw = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "backbone_hidden_size": config.target_hidden_size,
        "use_ordered_embeddings": bool(config.centroids),
        "centroid_intermediate_top_k": config.centroids_kept,
        "tie_word_embeddings": True,
        "dtype": dtype,
        "text_config": text,
    }
    return raw | ({"num_centroids": config.centroids} if config.centroids else {})


@struct.dataclass
class Gemma4Assistant(NewestStateDrafter):
    """Drafts from the target's own keys and values. All nodes of a draft stand at one position, the root's.

    A node of token t whose parent came to the state s is read as ``pre_projection([embedding of t, s])``, with the target's
    embedding; its own state is ``post_projection`` of what its layers make of that. The root's parent is the newest token that
    the target has read, and its state the target's hidden state there. Checkpoints are in Google's layout.

    Attributes:
        params: see `declare`.
        config: its configuration.
        draft: the shape of its drafts, any of `specjax.drafts.shapes`.
        mesh: where the params live.

    Examples:
        >>> drafter = specjax.Gemma4Assistant.init(target, jax.random.key(1), draft=2)
        >>> drafter.reads(target.config)  # the target's last layer
        (1,)
        >>> result = specjax.generate(target, drafter, prompts, max_new_tokens=8)
        >>> np.array_equal(result.tokens, plain.tokens)  # greedy: the text of plain decoding
        True
    """

    params: Params
    config: AssistantConfig = struct.field(pytree_node=False)
    draft: DraftShape | int = struct.field(pytree_node=False, default=Chain(4))
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    grows_trees: ClassVar[bool] = True

    checkpoint_format: ClassVar[CheckpointFormat] = CheckpointFormat(
        title="a Gemma 4 assistant",
        layouts=("google",),
        recognises=lambda raw, tensors: raw.get("model_type") in ("gemma4_assistant", "gemma4_unified_assistant"),
        read_config=read_config,
        declare=declare,
        axis_units=lambda config: config.model.axis_units,
        format_config=_format_config,
        left_over=_left_over,
    )

    @classmethod
    def usual_sizes(cls, target: Target) -> dict[str, Any]:
        """For a Gemma 4 of a published size those of its own assistant; otherwise nothing."""
        of_target = target.config
        if of_target.model_type != "gemma4_text" or of_target.vocab_size != _VOCABULARY:
            return {}
        if of_target.per_layer_inputs:  # E2B and E4B
            return {"hidden_size": 256, "intermediate_size": 2048, "num_heads": 4, "centroids": 2048, "centroids_kept": 32}
        return {"hidden_size": 1024, "intermediate_size": 8192, "num_heads": of_target.num_heads}

    @classmethod
    def init(
        cls,
        target: Target,
        key: jax.Array,
        draft: DraftShape | int = Chain(4),
        *,
        config: AssistantConfig | None = None,
        **shape: Any,
    ) -> Self:
        """An assistant for ``target``, which need not be a Gemma 4, with random weights; consumes ``key``.

        Args:
            target: with ordinary attention.
            key: of the random weights.
            draft: the shape of its drafts.
            config: its shape; None: that of `config_for`, which ``shape`` is given to.
            shape: see there.
        """
        config = cls.config_for(target.config, **shape) if config is None else config
        params = cls._initialise(config, key, target)
        if config.centroids:  # any order is one: clusters begin as neighbours
            params["order"] = jnp.arange(config.model.vocab_size, dtype=jnp.int32)
        return cls(params=params, config=config, draft=draft, mesh=target.mesh)

    @staticmethod
    def config_for(of_target: ModelConfig, *, centroids: int = 0, centroids_kept: int = 32, **sizes: Any) -> AssistantConfig:
        """The shape of an assistant for a target of that configuration.

        Args:
            of_target: with ordinary attention.
            centroids: clusters of its head; 0: none.
            centroids_kept: of these, those whose tokens have logits.
            sizes: fields of its layers' `ModelConfig`; by default three layers with a window and a full one, or four full ones
                where the target has no windows, a quarter as wide as the target.
        """
        if of_target.mla is not None:
            raise InputError("target: an assistant reads keys and values, and this target keeps latents of them instead")
        windowed, full = _sources(of_target)
        kinds = ([windowed] * 3 + [full]) if windowed is not None else [full] * 4
        count = sizes.pop("num_layers", len(kinds))
        kinds = kinds[-count:]
        hidden = max(of_target.hidden_size // 4 // 8, 1) * 8
        base = of_target.of_layer(full if windowed is None else windowed)
        at_end = of_target.of_layer(full)
        own = Layer(head_dim=at_end.head_dim, rope=at_end.rope)
        if at_end.num_kv_heads != base.num_kv_heads:  # in Gemma's files the two go together
            own = replace(own, num_kv_heads=at_end.num_kv_heads, keys_are_values=True)
        given: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 4 * hidden, "num_heads": at_end.num_heads} | sizes
        model = ModelConfig(
            model_type="gemma4_text",
            **FAMILIES["gemma4_text"].switches,
            vocab_size=of_target.vocab_size,
            num_layers=count,
            num_kv_heads=base.num_kv_heads,
            head_dim=base.head_dim,
            rope=base.rope,
            max_positions=of_target.max_positions,
            norm_eps=of_target.norm_eps,
            tie_embeddings=True,
            embedding_scale=given["hidden_size"] ** 0.5,
            bos_token_id=of_target.bos_token_id,
            eos_token_ids=of_target.eos_token_ids,
            sliding_window=None if windowed is None else of_target.sliding_window,
            windowed_layers=tuple(i for i, kind in enumerate(kinds) if kind == windowed),
            layers=tuple(Layer() if kind == windowed else own for kind in kinds),
            **given,
        )
        return AssistantConfig(model, of_target.hidden_size, centroids, centroids_kept)

    # --- drafting ---

    def check(self, target: Target) -> None:
        own, theirs = self.config, target.config
        if (own.target_hidden_size, own.model.vocab_size) != (theirs.hidden_size, theirs.vocab_size):
            raise InputError(
                f"drafter: this assistant was made for a target of hidden size {own.target_hidden_size} with "
                f"{own.model.vocab_size} tokens, and target has {theirs.hidden_size} and {theirs.vocab_size}: give the target "
                "that it was made for"
            )
        if theirs.mla is not None:
            raise InputError("drafter: an assistant reads keys and values, and this target keeps latents of them instead")
        for layer, source in enumerate(self._read_by(theirs)):
            if source is None:
                raise InputError("drafter: this assistant has layers with a window, and no layer of the target has one")
            mine, read = own.model.of_layer(layer), theirs.of_layer(source)
            if mine.head_dim != read.head_dim or mine.num_heads % read.num_kv_heads:
                raise InputError(
                    f"drafter: layer {layer} of this assistant has {mine.num_heads} heads of {mine.head_dim}, and the target's "
                    f"layer {source} has {read.num_kv_heads} of {read.head_dim}: give the target that it was made for"
                )
        self.draft_shape.check(own.model.vocab_size)
        check_mesh(self.mesh, target)

    def _read_by(self, config: ModelConfig) -> list[int | None]:
        """Of each of its layers, the target's layer whose entries it reads."""
        windowed, full = _sources(config)
        own = self.config.model
        return [windowed if layer in own.windowed_layers else full for layer in range(own.num_layers)]

    def reads(self, config: ModelConfig) -> tuple[int, ...]:
        return tuple(sorted({layer for layer in self._read_by(config) if layer is not None}))

    @property
    def target_hidden_size(self) -> int:
        return self.config.target_hidden_size

    def read(
        self, target: Target, tokens: jax.Array, above: jax.Array, cache: KVCache | PagedCache
    ) -> tuple[jax.Array, jax.Array]:
        """Read nodes that stand directly behind what the target has read.

        Args:
            target: the target model.
            tokens: ``[B, F]``.
            above: ``[B, F, H]`` the state of each one's parent.
            cache: the target's, of the layers that `reads` names.

        Returns:
            ``[B, F, V]`` float32 logits after each, and ``[B, F, H]`` their states.
        """
        reads, positions = self.reads(target.config), jnp.broadcast_to(cache.length[:, None], tokens.shape)

        def seen(layer: int, back: int | None) -> Piece:
            return target.cache_piece(cache, reads.index(layer), positions, back)

        x, states = self.run(target, target.embed(tokens), above, positions, seen)
        return self.logits(x), states

    def run(
        self, target: Target, embedded: jax.Array, above: jax.Array, positions: jax.Array, seen: Seen
    ) -> tuple[jax.Array, jax.Array]:
        """What its layers make of T tokens a row, none of which sees another.

        Args:
            target: the target model.
            embedded: ``[B, T, H]`` the target's embeddings of the tokens.
            above: ``[B, T, H]`` the state of each one's parent.
            positions: ``[B, T]`` the first position behind what the target has read.
            seen: of the target's entries.

        Returns:
            ``[B, T, h]`` what its head reads, and ``[B, T, H]`` the tokens' states.
        """
        model = self.config.model
        x = jnp.concatenate([embedded, above.astype(embedded.dtype)], axis=-1)
        x = linear(self.params, "pre", x.astype(self._dtype))
        for layer, source in enumerate(self._read_by(target.config)):
            assert source is not None
            own = model.of_layer(layer)
            # The window has the newest token that the target has read, and so many before it.
            back = None if (window := model.window_of(layer)) is None else window + 2
            turn = rotations(own.rope, own.head_dim, positions)
            x, _ = decoder_layer(self.params["layers"][layer], own, x, turn, None, [seen(source, back)], self.mesh)
        x = normed(self.params, "norm", model, x)
        return x, linear(self.params, "post", x)

    def logits(self, x: jax.Array) -> jax.Array:
        """``[..., V]`` float32 of its own normed states ``x [..., h]``.

        With centroids: tokens of clusters that are not among the best have one less than the smallest of the others.
        """
        if not self.config.centroids:
            return self.all_logits(x)
        flat, vocab = x.reshape(-1, x.shape[-1]), self.config.model.vocab_size
        best = jax.lax.top_k(linear(self.params, "centroids", flat), self.config.centroids_kept)[1]
        tokens = self.params["order"].reshape(self.config.centroids, -1)[best].reshape(len(flat), -1)
        multiply = partial(jnp.einsum, "rth,rnh->rtn", preferred_element_type=jnp.float32)
        found = product_on_device(multiply, flat[:, None], self.params["embed"][tokens])[:, 0]
        rest = jnp.broadcast_to(found.min(axis=-1, keepdims=True) - 1.0, (len(flat), vocab))
        return rest.at[jnp.arange(len(flat))[:, None], tokens].set(found).reshape(*x.shape[:-1], vocab)

    def all_logits(self, x: jax.Array) -> jax.Array:
        """``[..., V]`` float32, of all tokens, whatever their cluster. Training reads them."""
        return embedding_logits(x, self.params["embed"])

    def propose(
        self,
        target: Target,
        state: jax.Array,
        root: jax.Array,
        sampling: RowSampling,
        keys: jax.Array,
        active: jax.Array,
        cache: KVCache | PagedCache | None = None,
    ) -> tuple[Draft, jax.Array]:
        assert cache is not None
        logits, at_root = self.read(target, root[:, None], state[:, None], cache)

        def read(frontier: Frontier, states: jax.Array) -> tuple[jax.Array, jax.Array]:
            above = jnp.take_along_axis(states, frontier.parents[..., None], axis=1)
            return self.read(target, frontier.tokens, above, cache)

        states = jnp.broadcast_to(at_root, (root.shape[0], self.draft_shape.width, at_root.shape[-1]))
        draft, _, _ = expand(self.draft_shape, read, logits[:, 0], states, root, sampling, keys, active)
        return draft, state

    def drafting_reads(self, target: Target, state: jax.Array | tuple[()] = (), cache: Sequence[Entry] = ()) -> DraftingReads:
        """A level reads its weights, and the target's entries of the layers in question; of a head with centroids those, and
        for each row the tokens that one of its nodes looks at."""
        own, config = dict(self.params), self.config
        if config.centroids:
            embed, size = own["embed"], config.model.vocab_size
            found = config.centroids_kept * (size // config.centroids) * (1 if isinstance(state, tuple) else state.shape[0])
            own["embed"] = jax.ShapeDtypeStruct((min(found, size), embed.shape[1]), embed.dtype, sharding=embed.sharding)
        read = [cache[layer] for layer in self.reads(target.config)] if cache else []
        return DraftingReads(level=(own, read, state))


def _sources(config: ModelConfig) -> tuple[int | None, int]:
    """The target's layers whose entries an assistant reads: those of its last layer with a window, if any has one, and of its
    last full one; of its last layer, if all have windows."""
    windowed = [layer for layer in range(config.num_layers) if layer in config.windowed_layers]
    full = [layer for layer in range(config.num_layers) if layer not in (*config.windowed_layers, *config.linear_layers)]
    if not full:
        return None, config.entries_of(windowed[-1])
    return config.entries_of(windowed[-1]) if windowed else None, config.entries_of(full[-1])
