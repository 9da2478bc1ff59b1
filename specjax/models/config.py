"""The configuration of a decoder: everything about a model that is not a parameter."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from specjax.errors import InputError

RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional", "none"]
Scoring = Literal["softmax", "sigmoid"]
Activation = Literal["silu", "gelu", "gelu_tanh"]
Norms = Literal["before", "after", "both"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base frequency and how it is stretched to longer contexts.

    Attributes follow Hugging Face's ``rope_parameters``. Which of them are read depends on ``kind``:
    linear reads ``factor``; llama3 the two ``*_freq_factor`` and ``original_max_positions``; yarn all the others. ``none``
    turns nothing: a layer so described does not know positions. ``turned`` is the share of a head's numbers that are turned:
    the first ones, and of the kind ``proportional`` (Gemma 4) the first ones of each half, the slower pairs standing still.
    Where ``query_growth`` is not 0, a query at position p is multiplied by ``1 + query_growth * log(1 + floor(p /
    original_max_positions))``, whatever the kind (Llama 4, Ministral 3).

    Examples:
        >>> from specjax.models.config import Rope
        >>> rope = Rope(theta=5e5, kind="llama3", factor=8.0, original_max_positions=8192)
        >>> rope.low_freq_factor, rope.high_freq_factor
        (1.0, 4.0)
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    turned: float = 1.0
    query_growth: float = 0.0

    def __post_init__(self) -> None:
        if self.query_growth and not self.original_max_positions:
            raise InputError(f"query_growth={self.query_growth}: needs original_max_positions, from which on queries grow")


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): a layer remembers of each token one small
    vector, the latent, from which the keys and values of all heads are made, and one rotated key that all heads share.

    Attributes:
        kv_lora_rank: numbers in the latent.
        qk_nope_head_dim: of a head's query and key, the part that is not rotated.
        qk_rope_head_dim: the part that is rotated; even.
        v_head_dim: of a head's value.
        q_lora_rank: the queries are made from a vector of so many numbers; None: straight from the state.
        rope_interleaved: rotated pairs are neighbours, ``(x_0, x_1)``, not halves of a head, ``(x_0, x_{d/2})``.

    Examples:
        >>> from specjax.models.config import MLA
        >>> MLA(
        ...     kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128
        ... ).qk_head_dim
        192
    """

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None
    rope_interleaved: bool = True

    def __post_init__(self) -> None:
        for name in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"{name}={value}: must be at least 1")

    @property
    def qk_head_dim(self) -> int:
        """Numbers in a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class MoE:
    """Sparse layers: a router sends each token to a few of many MLPs, the experts, and adds what they give (see
    `specjax.models.moe`).

    Attributes:
        num_experts: how many there are, E.
        experts_per_token: how many of them a token goes to, k.
        intermediate_size: of one expert.
        shared_experts: how many more every token goes to; they are stored as one MLP of their sizes together.
        shared_gated: what the shared experts give is multiplied by a gate of each token.
        scoring: what the router's numbers become: a softmax over all experts, or a sigmoid of each.
        normalise: the weights of a token's k experts are divided by their sum.
        scale: and multiplied by this.
        groups: the experts lie in so many groups of equal size.
        groups_kept: a token's experts are all in its so many best groups.
        corrected: a bias of each expert is added to its score for the choice, and not for the weight (DeepSeek-V3's
            balancing without a loss).
        dense_layers: the layers that have an ordinary MLP and no experts, in ascending order.
        biased: router and experts have biases.
        limit: the experts' gated unit is gpt-oss's, its inputs cut at this size (see `specjax.models.moe`). None: it is the
            model's own.
        beside_mlp: a layer has an ordinary MLP as well, and gives what both come to, each normed (Gemma 4). The router then has
            a norm and scales of its own.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax.models.config import MoE
        >>> moe = MoE(
        ...     num_experts=8, experts_per_token=2, intermediate_size=16, dense_layers=(0,)
        ... )
        >>> [replace(config, moe=moe).is_sparse(layer) for layer in (0, 1)]
        [False, True]
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_experts: int = 0
    shared_gated: bool = False
    scoring: Scoring = "softmax"
    normalise: bool = False
    scale: float = 1.0
    groups: int = 1
    groups_kept: int = 1
    corrected: bool = False
    dense_layers: tuple[int, ...] = ()
    biased: bool = False
    limit: float | None = None
    beside_mlp: bool = False

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "intermediate_size", "groups", "groups_kept"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_experts % self.groups:
            raise InputError(f"num_experts={self.num_experts} is no multiple of groups={self.groups}: groups are of equal size")
        size = self.num_experts // self.groups
        if self.groups_kept > self.groups or (self.groups > 1 and size < 2):
            raise InputError(
                f"groups={self.groups} of {size} experts with groups_kept={self.groups_kept}: no more groups can be kept than "
                "there are, and a group, which is judged by its two best experts, needs two"
            )
        if self.experts_per_token > self.groups_kept * size:
            raise InputError(
                f"experts_per_token={self.experts_per_token}: a token can choose among {self.groups_kept * size} experts only "
                f"(num_experts={self.num_experts}, groups={self.groups}, groups_kept={self.groups_kept})"
            )


@dataclass(frozen=True)
class LinearAttention:
    """Layers that do not look back at tokens, but keep a state of fixed size: the gated delta rule (Yang et al. 2024, arXiv
    2412.06464), as Qwen3-Next and Qwen3.5 have it. See `specjax.models.linear_attention`.

    Attributes:
        key_heads: heads of queries and keys.
        value_heads: heads of values, each with a state; as many to every head of keys.
        key_dim: numbers in a head's query and key.
        value_dim: numbers in a head's value.
        kernel: tokens, its own among them, over which the short convolution before the rule goes.
        by_key_head: how the projections are stored. One matrix makes queries, keys, values and output gates, and another the
            two gates of the rule, in both of which lies side by side what belongs to a head of keys (Qwen3-Next). If not, there
            is one for queries, keys and values, one after the other, and one for each of the gates (Qwen3.5).

    Examples:
        >>> from specjax.models.config import LinearAttention
        >>> linear = LinearAttention(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
        >>> linear.state_size, linear.node_bytes(2)  # numbers of a row's state; bytes of a drafted token in bfloat16
        (524288, 41088)
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    by_key_head: bool = False

    def __post_init__(self) -> None:
        for name in ("key_heads", "value_heads", "key_dim", "value_dim"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.kernel < 2:
            raise InputError(f"kernel={self.kernel}: the convolution goes over at least 2 tokens")
        if self.value_heads % self.key_heads:
            raise InputError(
                f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}: each head of keys serves an "
                "equal group of value heads"
            )

    @property
    def group(self) -> int:
        """Value heads to a head of keys."""
        return self.value_heads // self.key_heads

    @property
    def convolved(self) -> tuple[tuple[int, int], ...]:
        """``(heads, dim)`` of what goes through the convolution: queries, keys and values."""
        return ((self.key_heads, self.key_dim), (self.key_heads, self.key_dim), (self.value_heads, self.value_dim))

    @property
    def state_size(self) -> int:
        """Numbers of a row's state, but for the few tokens that the convolution looks back at."""
        return self.value_heads * self.key_dim * self.value_dim

    def state_bytes(self, number_bytes: float) -> float:
        """Bytes of a row's state, with the tokens that the convolution looks back at; ``number_bytes`` are those of a number of
        the activations, and all else is float32."""
        return 4 * self.state_size + (self.kernel - 1) * self._convolved_size * number_bytes

    def node_bytes(self, number_bytes: float) -> float:
        """Bytes of what is remembered of a drafted token, likewise."""
        return 4 * self._update_size + self._convolved_size * number_bytes

    @property
    def _update_size(self) -> int:
        return self.key_heads * self.key_dim + self.value_heads * (self.value_dim + 1)

    @property
    def _convolved_size(self) -> int:
        return sum(heads * dim for heads, dim in self.convolved)


@dataclass(frozen=True)
class Layer:
    """In what one layer differs from what `ModelConfig` says of all layers; None: in nothing.

    Attributes:
        num_heads: of its queries.
        num_kv_heads: of its keys and values.
        head_dim: numbers in each head.
        rope: its rotary embedding.
        intermediate_size: of its MLP.
        keys_are_values: its values are its keys, before these are normed and turned.
        entries_of: the number of an earlier layer. This one has no keys and values of its own, and attends to that layer's.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax.models.config import Layer
        >>> differing = replace(config, layers=(Layer(), Layer(num_kv_heads=1)))
        >>> [differing.of_layer(layer).num_kv_heads for layer in (0, 1)]
        [2, 1]
    """

    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    rope: Rope | None = None
    intermediate_size: int | None = None
    keys_are_values: bool | None = None
    entries_of: int | None = None


@dataclass(frozen=True)
class ModelConfig:
    """A decoder like Llama. The defaults are Llama's; the families differ only in the switches below.

    ``qkv_bias`` Qwen2 (and ``attention_bias`` elsewhere), ``output_bias`` the bias of the attention's output projection,
    ``qk_norm`` Qwen3's RMSNorm over each query and key head. ``max_positions`` is counted in tokens. ``mla`` takes the place of
    ordinary attention; ``head_dim`` is then its ``qk_rope_head_dim``, as `transformers` has it. ``moe`` gives the layers
    experts, but for its ``dense_layers``, whose MLP is of ``intermediate_size``. The ``windowed_layers`` see only the newest
    ``sliding_window`` tokens, their own among them. ``layers`` says, one by one, how layers differ; empty: all are alike.

    Further switches: ``activation`` of the gated MLP. ``norms`` stand before attention and MLP, after them, or both;
    ``norm_offset`` is added to every norm's weight. ``qk_norm_over_heads`` norms all heads of a token together (OLMo), and not
    each; ``value_norm`` norms values, without a weight. ``keys_are_values``: a value is the key, before that is normed and
    turned. ``embedding_scale`` and ``residual_scale`` (of what attention and MLP add) are factors; logits are divided by
    ``logit_divisor``; ``attention_scale`` is the factor of scores, None: ``head_dim ** -0.5``. ``score_cap`` and ``logit_cap``
    bend scores and logits into that range, ``cap * tanh(x / cap)``. With ``sinks`` every query head has a logit that takes part
    in its softmax, and has no value (gpt-oss). With ``layer_scalars`` what a layer gives is multiplied by a number of its own.
    ``per_layer_inputs``: every layer is given so many numbers of each token, from an embedding of ``per_layer_vocab_size``
    tokens (Gemma 4's E2B and E4B); 0: none. ``gated_attention``: what a head of queries finds is multiplied by a gate of its
    own (Qwen3.5). The ``linear_layers`` have ``linear`` attention, which keeps a state, in place of the ordinary one.

    Examples:
        >>> from dataclasses import replace
        >>> config.num_heads, config.num_kv_heads, config.head_dim
        (4, 2, 8)
        >>> replace(config, num_kv_heads=3)
        Traceback (most recent call last):
        specjax.errors.InputError: num_heads=4 is not a multiple of num_kv_heads=3: ...
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_type: str = "llama"
    max_positions: int = 2048
    norm_eps: float = 1e-5
    rope: Rope = Rope()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_over_heads: bool = False
    value_norm: bool = False
    keys_are_values: bool = False
    activation: Activation = "silu"
    norms: Norms = "before"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    attention_scale: float | None = None
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    score_cap: float | None = None
    logit_cap: float | None = None
    sinks: bool = False
    layer_scalars: bool = False
    per_layer_inputs: int = 0
    per_layer_vocab_size: int = 0
    sliding_window: int | None = None
    windowed_layers: tuple[int, ...] = ()
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    mla: MLA | None = None
    moe: MoE | None = None
    layers: tuple[Layer, ...] = ()
    gated_attention: bool = False
    linear: LinearAttention | None = None
    linear_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "each key/value head serves an equal group of query heads"
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim={self.head_dim}: rotary embeddings turn pairs, so it must be even")
        if self.windowed_layers and (self.sliding_window is None or self.sliding_window < 1):
            raise InputError(f"sliding_window={self.sliding_window}: layers with a window need one of at least 1 token")
        if self.mla is not None and (self.head_dim, self.num_kv_heads) != (self.mla.qk_rope_head_dim, self.num_heads):
            raise InputError(
                f"head_dim={self.head_dim}, num_kv_heads={self.num_kv_heads}: with latent attention head_dim is "
                f"qk_rope_head_dim={self.mla.qk_rope_head_dim}, and every one of the num_heads={self.num_heads} query heads "
                "has keys of its own"
            )
        if self.mla is not None and self.rope.query_growth:
            raise InputError(f"rope.query_growth={self.rope.query_growth}: must be 0 with latent attention")
        if self.layers:
            self._check_layers()
        if self.linear_layers:
            self._check_linear()
        if self.per_layer_inputs and self.per_layer_vocab_size < self.vocab_size:
            raise InputError(
                f"per_layer_vocab_size={self.per_layer_vocab_size}: must be at least vocab_size={self.vocab_size}: every token "
                "has inputs for each layer"
            )

    def _check_linear(self) -> None:
        if self.linear is None:
            raise InputError(f"linear_layers={self.linear_layers}: linear must say of what sizes they are")
        if not set(self.linear_layers) < set(range(self.num_layers)):
            raise InputError(
                f"linear_layers={self.linear_layers}: must be some of the num_layers={self.num_layers} layers, from 0, and not "
                "all of them: a layer with ordinary attention is needed"
            )
        if list(self.linear_layers) != sorted(set(self.linear_layers)):
            raise InputError(f"linear_layers={self.linear_layers}: give each once, in ascending order")
        if self.mla is not None or self.layers or set(self.linear_layers) & set(self.windowed_layers):
            raise InputError("linear_layers: cannot be combined with latent attention, layers that differ, or windows of them")

    def _check_layers(self) -> None:
        if self.mla is not None:
            raise InputError("layers: with latent attention all layers are alike: leave them out")
        if len(self.layers) != self.num_layers:
            raise InputError(f"layers: {len(self.layers)} of num_layers={self.num_layers} are described: describe all or none")
        for index, layer in enumerate(self.layers):
            try:
                own = self.of_layer(index)
            except InputError as error:
                raise InputError(f"layers[{index}]: {error}") from None
            if (source := layer.entries_of) is None:
                continue
            if not 0 <= source < index or self.layers[source].entries_of is not None:
                raise InputError(f"layers[{index}]: entries_of={source}: must be an earlier layer that has entries of its own")
            theirs = self.of_layer(source)
            if (own.num_kv_heads, own.head_dim) != (theirs.num_kv_heads, theirs.head_dim):
                raise InputError(
                    f"layers[{index}]: entries_of={source}, which has {theirs.num_kv_heads} key/value heads of "
                    f"{theirs.head_dim}, and this layer is made for {own.num_kv_heads} of {own.head_dim}"
                )

    def of_layer(self, layer: int) -> "ModelConfig":
        """The configuration with what the layer of that number has in place of what is said of all: for whoever works with one
        layer. Where all are alike it is this one."""
        if not self.layers:
            return self
        names = (field.name for field in fields(Layer) if field.name != "entries_of")
        own = {name: value for name in names if (value := getattr(self.layers[layer], name)) is not None}
        return replace(self, **own, layers=())

    def first(self, count: int, **changes: Any) -> "ModelConfig":
        """The configuration of the first ``count`` layers alone, with ``changes`` of its fields."""
        windowed, linear = ([i for i in layers if i < count] for layers in (self.windowed_layers, self.linear_layers))
        kinds: dict[str, Any] = {"windowed_layers": tuple(windowed), "linear_layers": tuple(linear)}
        return replace(self, **{"num_layers": count, "layers": self.layers[:count], **kinds, **changes})

    def window_of(self, layer: int) -> int | None:
        """How many tokens, up to its own, a query of the layer of that number sees; None: all."""
        return self.sliding_window if layer in self.windowed_layers else None

    def is_sparse(self, layer: int) -> bool:
        """Whether the layer of that number has experts."""
        return self.moe is not None and layer not in self.moe.dense_layers

    def entries_of(self, layer: int) -> int:
        """The number of the layer whose entries the layer of that number attends to: its own, or an earlier one's."""
        source = self.layers[layer].entries_of if self.layers else None
        return layer if source is None else source

    def is_linear(self, layer: int) -> bool:
        """Whether the layer of that number has linear attention."""
        return layer in self.linear_layers

    def memory(self, layer: int) -> "tuple[tuple[int, int], ...] | LinearAttention":
        """How the layer of that number remembers: by entries of each token, of which these are the parts, as `entry_parts`; or
        by a state of fixed size, whose sizes these are."""
        return self.linear if self.linear is not None and self.is_linear(layer) else self.entry_parts(layer)

    def entry_parts(self, layer: int) -> tuple[tuple[int, int], ...]:
        """``(heads, dim)`` of each array that the layer of that number remembers of a token (see `specjax.models.cache`): keys
        and values, or the latent and the rotated key; nothing where it reads the entries of another layer, or keeps a state."""
        if self.mla is not None:
            return ((1, self.mla.kv_lora_rank), (1, self.mla.qk_rope_head_dim))
        if self.entries_of(layer) != layer or self.is_linear(layer):
            return ()
        own = self.of_layer(layer)
        return ((own.num_kv_heads, own.head_dim), (own.num_kv_heads, own.head_dim))

    def entry_size(self, layer: int) -> int:
        """Numbers that the layer of that number remembers of a token."""
        return sum(heads * dim for heads, dim in self.entry_parts(layer))

    @property
    def axis_units(self) -> dict[str, int]:
        """How many indivisible units each logical axis has: what a mesh axis must divide to shard it, in every layer."""
        layers = [self.of_layer(layer) for layer in range(len(self.layers))] or [self]
        units = {
            "vocab": self.vocab_size,
            "heads": math.gcd(*(layer.num_heads for layer in layers)),
            "kv_heads": math.gcd(*(layer.num_kv_heads for layer in layers)),
            "mlp": math.gcd(*(layer.intermediate_size for layer in layers)),
        }
        if self.moe is not None:
            units |= {"experts": self.moe.num_experts, "shared_mlp": self.moe.shared_experts * self.moe.intermediate_size}
        return units
