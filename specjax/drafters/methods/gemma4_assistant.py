"""The assistants of Gemma 4 (``google/gemma-4-*-assistant``): drafters without a cache.

An assistant has a few small layers that compute only queries. They attend to the keys and values in
the target's cache: those of its last layer with a window and of its last full layer. The
assistant's only memory of the text is the target's newest hidden state. While it drafts, its own
state takes the place of that state.
"""

from collections.abc import Callable, Collection
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
from specjax.models.cache import KVCache, PagedCache
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import Layer, ModelConfig
from specjax.models.families import FAMILIES
from specjax.models.fields import JsonObject, check_fields, flag, mapping, whole
from specjax.models.layers import decoder_layer, normed
from specjax.models.params import Param, Params, matrix
from specjax.models.primitives import embedding_logits, linear
from specjax.models.products import product_on_device
from specjax.models.rope import rotations
from specjax.models.transformer import Target
from specjax.sampling import RowSampling

Seen = Callable[[int, int | None], Piece]
"""The type of a function that returns what tokens attend to in a layer of the target.

It takes the index of the layer, and the number of visible positions, the token's own included; None
makes all visible.
"""

_NOT_HELD = ("k", "v", "k_bias", "v_bias", "k_norm")
"""The parameters of a layer that compute keys and values, which an assistant lacks."""

_VOCABULARY = 262_144
"""The vocabulary size of every published Gemma 4.

The sizes of its assistants are those of their config.json (`google/gemma-4-*-it-assistant`).
"""


@dataclass(frozen=True)
class AssistantConfig:
    """The configuration of a `Gemma4Assistant`.

    Attributes:
        model: the configuration of its layers: a Gemma 4 without per-layer inputs and without
            experts. A layer with a window reads the entries of a target layer with a window, and a
            full layer those of a full one.
        target_hidden_size: the hidden size of the target.
        centroids: the number of clusters of tokens in its head; 0 if the head has a logit for every
            token.
        centroids_kept: the number of best clusters whose tokens get logits.
    """

    model: ModelConfig
    target_hidden_size: int
    centroids: int = 0
    centroids_kept: int = 32

    def __post_init__(self) -> None:
        if self.centroids and (
            self.model.vocab_size % self.centroids or not 1 <= self.centroids_kept <= self.centroids
        ):
            raise InputError(
                f"num_centroids={self.centroids},"
                f" centroid_intermediate_top_k={self.centroids_kept}: the clusters must divide the"
                f" {self.model.vocab_size} tokens, and centroid_intermediate_top_k must be from 1"
                " to num_centroids"
            )
        if self.model.per_layer_inputs or self.model.moe is not None:
            raise InputError(
                "text_config: an assistant's layers have one MLP, and no inputs of their own"
            )


def read_config(stored: CheckpointFiles) -> AssistantConfig:
    """Return the configuration of a checkpoint. Raises `CheckpointError`."""
    rules = {
        "text_config": mapping(),
        "backbone_hidden_size": whole(1, 1_000_000),
        "use_ordered_embeddings": flag(default=False),
        "num_centroids": whole(1, 10_000_000, default=2048),
        "centroid_intermediate_top_k": whole(1, 10_000_000, default=32),
    }
    fields = check_fields(stored.raw, rules, stored.file)
    # All layers read the cache of another model, so the field about shared layers has no meaning.
    text = {**fields["text_config"], "model_type": "gemma4_text", "num_kv_shared_layers": 0}
    model = config_json.parse_drafter_config(text, stored.file)
    stored.check_count(
        "num_hidden_layers", model.num_layers, stored.numbered("model.layers."), "layers"
    )
    centroids = fields["num_centroids"] if fields["use_ordered_embeddings"] else 0
    return AssistantConfig(
        model, fields["backbone_hidden_size"], centroids, fields["centroid_intermediate_top_k"]
    )


def declare(config: AssistantConfig, layout: str) -> Params:
    """Return the `Param` declarations; ``embed`` is the head and is not used as an embedding.

    They are ``{"embed", "layers", "norm", "pre", "post", "centroids"?, "order"?}``.
    """
    model, hidden = config.model, (config.model.hidden_size, None)
    declared = declarations.declare(replace(model, tie_embeddings=True))
    layers = [
        {name: param for name, param in layer.items() if name not in _NOT_HELD}
        for layer in declared["layers"]
    ]
    tree = declared | {
        "embed": replace(
            declared["embed"], is_product=False
        ),  # with centroids, selected rows are multiplied as well
        "layers": layers,
        "pre": matrix("pre_projection", (2 * config.target_hidden_size, None), hidden),
        "post": matrix("post_projection", hidden, (config.target_hidden_size, None)),
    }
    if config.centroids:
        tree["centroids"] = matrix("masked_embedding.centroids", hidden, (config.centroids, None))
        name = "masked_embedding.token_ordering"
        tree["order"] = Param(
            (model.vocab_size,), (None,), name, "zeros", dtype="int32", stored_dtype="int64"
        )
    return tree


def _left_over(config: AssistantConfig, stored: CheckpointFiles) -> Collection[str]:
    unused = [f"model.layers.*.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    # The embedding is the head. A stored copy is ignored; a head that differs must be an error.
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    has_both = {head, embedding} <= stored.shapes.keys()
    copy = [head] * (has_both and checkpoint.have_same_values(stored, embedding, head))
    return (*LEFT_OVER, *copy, *unused)


def _format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> JsonObject:
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
    """A drafter that attends to the target's own keys and values.

    All nodes of a draft have the same position, that of the root. A node with token t, whose parent
    has the state s, is read as ``pre_projection([embedding of t, s])``, with the target's
    embedding. Its own state is ``post_projection`` of the output of its layers. The parent of the
    root is the newest token that the target has read, and its state is the target's hidden state
    there. Checkpoints are in Google's layout.

    Attributes:
        params: the parameters, see `declare`.
        config: the configuration.
        draft: the shape of the drafts, any of `specjax.drafts.shapes`.
        mesh: the mesh of the parameters.

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
        recognises=lambda raw, tensors: (
            raw.get("model_type") in ("gemma4_assistant", "gemma4_unified_assistant")
        ),
        read_config=read_config,
        declare=declare,
        axis_units=lambda config: config.model.axis_units,
        format_config=_format_config,
        left_over=_left_over,
    )

    @classmethod
    def usual_sizes(cls, target: Target) -> dict[str, Any]:
        """Return the sizes of the published assistant, if the target is a published Gemma 4."""
        target_config = target.config
        if target_config.model_type != "gemma4_text" or target_config.vocab_size != _VOCABULARY:
            return {}
        if target_config.per_layer_inputs:  # E2B and E4B
            return {
                "hidden_size": 256,
                "intermediate_size": 2048,
                "num_heads": 4,
                "centroids": 2048,
                "centroids_kept": 32,
            }
        return {
            "hidden_size": 1024,
            "intermediate_size": 8192,
            "num_heads": target_config.num_heads,
        }

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
        """Return an assistant with random weights for ``target``, which need not be a Gemma 4.

        Args:
            target: a target with ordinary attention.
            key: the random key for the weights. It is consumed.
            draft: the shape of the drafts.
            config: the configuration; None is that of `config_for` with the arguments ``shape``.
            shape: arguments of `config_for`.
        """
        config = cls.config_for(target.config, **shape) if config is None else config
        params = cls._initialise(config, key, target)
        if config.centroids:  # any order is valid: neighbouring ids form a cluster
            params["order"] = jnp.arange(config.model.vocab_size, dtype=jnp.int32)
        return cls(params=params, config=config, draft=draft, mesh=target.mesh)

    @staticmethod
    def config_for(
        of_target: ModelConfig, *, centroids: int = 0, centroids_kept: int = 32, **sizes: Any
    ) -> AssistantConfig:
        """Return the configuration of an assistant for a target.

        Args:
            of_target: the configuration of the target, with ordinary attention.
            centroids: the number of clusters of the head; 0 for none.
            centroids_kept: the number of clusters whose tokens get logits.
            sizes: fields of the layers' `ModelConfig`. By default there are three layers with a
                window and a full one, or four full layers if the target has no windows, a quarter
                as wide as the target.
        """
        if of_target.mla is not None:
            raise InputError(
                "target: an assistant reads keys and values, but this target stores latents (MLA)"
            )
        windowed, full = _sources(of_target)
        kinds = ([windowed] * 3 + [full]) if windowed is not None else [full] * 4
        count = sizes.pop("num_layers", len(kinds))
        kinds = kinds[-count:]
        hidden = max(of_target.hidden_size // 4 // 8, 1) * 8
        base = of_target.of_layer(full if windowed is None else windowed)
        last = of_target.of_layer(full)
        full_layer = Layer(head_dim=last.head_dim, rope=last.rope)
        if last.num_kv_heads != base.num_kv_heads:  # in Gemma's files the two come together
            full_layer = replace(full_layer, num_kv_heads=last.num_kv_heads, keys_are_values=True)
        fields: dict[str, Any] = {
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_heads": last.num_heads,
        } | sizes
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
            embedding_scale=fields["hidden_size"] ** 0.5,
            bos_token_id=of_target.bos_token_id,
            eos_token_ids=of_target.eos_token_ids,
            sliding_window=None if windowed is None else of_target.sliding_window,
            windowed_layers=tuple(i for i, kind in enumerate(kinds) if kind == windowed),
            layers=tuple(Layer() if kind == windowed else full_layer for kind in kinds),
            **fields,
        )
        return AssistantConfig(model, of_target.hidden_size, centroids, centroids_kept)

    # --- drafting ---

    def check(self, target: Target) -> None:
        config, target_config = self.config, target.config
        if (config.target_hidden_size, config.model.vocab_size) != (
            target_config.hidden_size,
            target_config.vocab_size,
        ):
            raise InputError(
                "drafter: this assistant was made for a target of hidden size"
                f" {config.target_hidden_size} with {config.model.vocab_size} tokens, but target"
                f" has {target_config.hidden_size} and {target_config.vocab_size}: give the target"
                " that it was made for"
            )
        if target_config.mla is not None:
            raise InputError(
                "drafter: an assistant reads keys and values, but this target stores latents (MLA)"
            )
        for layer, source in enumerate(self._read_by(target_config)):
            if source is None:
                raise InputError(
                    "drafter: this assistant has layers with a window, but no layer of the target"
                    " has one"
                )
            reader, owner = config.model.of_layer(layer), target_config.of_layer(source)
            if reader.head_dim != owner.head_dim or reader.num_heads % owner.num_kv_heads:
                raise InputError(
                    f"drafter: layer {layer} of this assistant has {reader.num_heads} heads of"
                    f" {reader.head_dim}, but the target's layer {source} has {owner.num_kv_heads}"
                    f" of {owner.head_dim}: give its own target"
                )
        self.draft_shape.check(config.model.vocab_size)
        check_mesh(self.mesh, target)

    def _read_by(self, config: ModelConfig) -> list[int | None]:
        """Return the target layer whose entries each layer of the assistant reads."""
        windowed, full = _sources(config)
        model = self.config.model
        return [
            windowed if layer in model.windowed_layers else full
            for layer in range(model.num_layers)
        ]

    def reads(self, config: ModelConfig) -> tuple[int, ...]:
        return tuple(sorted({layer for layer in self._read_by(config) if layer is not None}))

    def read(
        self, target: Target, tokens: jax.Array, above: jax.Array, cache: KVCache | PagedCache
    ) -> tuple[jax.Array, jax.Array]:
        """Read nodes that all have the first position that the target has not read.

        Args:
            target: the target model.
            tokens: ``[B, F]``, the token ids.
            above: ``[B, F, H]``, the state of each node's parent.
            cache: the target's cache of the layers that `reads` names.

        Returns:
            The float32 logits ``[B, F, V]`` after each node, and the nodes' states ``[B, F, H]``.
        """
        reads = self.reads(target.config)
        # All nodes have one position, that of the root, whatever their depth.
        positions = jnp.broadcast_to(cache.length[:, None], tokens.shape)

        def attends_to(layer: int, back: int | None) -> Piece:
            return target.cache_piece(cache, reads.index(layer), positions, back)

        x, states = self.run(target, target.embed(tokens), above, positions, attends_to)
        return self.logits(x), states

    def run(
        self,
        target: Target,
        embedded: jax.Array,
        above: jax.Array,
        positions: jax.Array,
        attends_to: Seen,
    ) -> tuple[jax.Array, jax.Array]:
        """Run the layers on T tokens per row, none of which sees another.

        Args:
            target: the target model.
            embedded: ``[B, T, H]``, the target's embeddings of the tokens.
            above: ``[B, T, H]``, the state of each token's parent.
            positions: ``[B, T]``, the first position that the target has not read.
            attends_to: what the tokens attend to in each layer of the target.

        Returns:
            The states that the head reads, ``[B, T, h]``, and those that are fed back,
            ``[B, T, H]``.
        """
        model = self.config.model
        x = jnp.concatenate([embedded, above.astype(embedded.dtype)], axis=-1)
        x = linear(self.params, "pre", x.astype(self._dtype))
        for layer, source in enumerate(self._read_by(target.config)):
            assert source is not None
            config = model.of_layer(layer)
            # The window has the newest token that the target has read, and `window` tokens before
            # it. The token's own position, which counts too, makes it `window + 2`.
            back = None if (window := model.window_of(layer)) is None else window + 2
            turn = rotations(config.rope, config.head_dim, positions)
            x, *_ = decoder_layer(
                self.params["layers"][layer],
                config,
                x,
                turn,
                None,
                [attends_to(source, back)],
                self.mesh,
            )
        x = normed(self.params, "norm", model, x)
        return x, linear(self.params, "post", x)

    def logits(self, x: jax.Array) -> jax.Array:
        """Return the float32 logits ``[..., V]`` for the normed states ``x [..., h]``.

        With centroids, only tokens of the best clusters get logits. All other tokens get the
        smallest of these minus 1.
        """
        if not self.config.centroids:
            return self.all_logits(x)
        flat, vocab = x.reshape(-1, x.shape[-1]), self.config.model.vocab_size
        best = jax.lax.top_k(linear(self.params, "centroids", flat), self.config.centroids_kept)[1]
        clusters = self.params["order"].reshape(self.config.centroids, -1)
        tokens = clusters[best].reshape(len(flat), -1)
        multiply = partial(jnp.einsum, "rth,rnh->rtn", preferred_element_type=jnp.float32)
        best_logits = product_on_device(multiply, flat[:, None], self.params["embed"][tokens])[:, 0]
        below_best = best_logits.min(axis=-1, keepdims=True) - 1.0
        logits = jnp.broadcast_to(below_best, (len(flat), vocab))
        logits = logits.at[jnp.arange(len(flat))[:, None], tokens].set(best_logits)
        return logits.reshape(*x.shape[:-1], vocab)

    def all_logits(self, x: jax.Array) -> jax.Array:
        """Return the float32 logits ``[..., V]`` of all tokens, in any cluster, for training."""
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
        logits, root_states = self.read(target, root[:, None], state[:, None], cache)

        def read(frontier: Frontier, states: jax.Array) -> tuple[jax.Array, jax.Array]:
            above = jnp.take_along_axis(states, frontier.parents[..., None], axis=1)
            return self.read(target, frontier.tokens, above, cache)

        states = jnp.broadcast_to(
            root_states, (root.shape[0], self.draft_shape.width, root_states.shape[-1])
        )
        draft, _, _ = expand(
            self.draft_shape, read, logits[:, 0], states, root, sampling, keys, active
        )
        return draft, state

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return the arrays of a level: the weights, and the target's cache of the layers it reads.

        Of a head with centroids they are the centroids, and for each row the tokens of one node's
        best clusters.
        """
        params, config = dict(self.params), self.config
        if config.centroids:
            embed, size = params["embed"], config.model.vocab_size
            rows = 1 if isinstance(state, tuple) else state.shape[0]
            tokens = rows * config.centroids_kept * (size // config.centroids)
            params["embed"] = jax.ShapeDtypeStruct(
                (min(tokens, size), embed.shape[1]), embed.dtype, sharding=embed.sharding
            )
        entries = [cache[layer] for layer in self.reads(target.config)] if cache else []
        return DraftingReads(level=(params, entries, state))


def _sources(config: ModelConfig) -> tuple[int | None, int]:
    """Return the target layers whose entries an assistant reads.

    The first is the last layer with a window, or None if no layer has one. The second is the last
    full layer. If all layers have windows, it is the last layer, and the first is None.
    """
    attending = config.layers_with_entries
    windowed = [layer for layer in attending if layer in config.windowed_layers]
    full = [layer for layer in attending if layer not in config.windowed_layers]
    if not full:
        return None, config.entries_of(windowed[-1])
    return config.entries_of(windowed[-1]) if windowed else None, config.entries_of(full[-1])
