"""The configuration of a decoder: everything about a model that is not a parameter."""

import math
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from specjax.errors import InputError, check_minimum
from specjax.models.memory import LayerMemory, LinearAttention, StateSizes

__all__ = [
    "MLA",
    "Activation",
    "Indexer",
    "Layer",
    "LayerFactors",
    "LinearAttention",
    "MoE",
    "ModelConfig",
    "Rope",
]

RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional", "none"]
Scoring = Literal["softmax", "sigmoid"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu2"]
Norms = Literal["before", "after", "both"]


@dataclass(frozen=True)
class Rope:
    """A rotary position embedding: its base frequency, and its scaling for longer contexts.

    The attributes follow Hugging Face's ``rope_parameters``. The ``kind`` decides which of them are
    used: linear uses ``factor``; llama3 the two ``*_freq_factor`` and ``original_max_positions``;
    yarn all others. ``none`` rotates nothing: such a layer has no positions. ``turned`` is the
    share of a head's numbers that are rotated: the first ones; for the kind ``proportional`` (Gemma
    4) the first ones of each half, which leaves out the slower pairs. If ``query_growth`` is not 0,
    a query at position p is multiplied by
    ``1 + query_growth * log(1 + floor((p + growth_offset) / original_max_positions))``, for any
    kind (Llama 4, Ministral 3).

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
    growth_offset: int = 0

    def __post_init__(self) -> None:
        if self.query_growth and not self.original_max_positions:
            raise InputError(
                f"query_growth={self.query_growth}: it needs original_max_positions, where the"
                " growth starts"
            )


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    A layer stores one small vector for each token, the latent, from which the keys and values of
    all heads are computed, and one rotated key that all heads share.

    Attributes:
        kv_lora_rank: the size of the latent.
        qk_nope_head_dim: the size of the part of a head's query and key that is not rotated.
        qk_rope_head_dim: the size of the part that is rotated; even.
        v_head_dim: the size of a head's value.
        q_lora_rank: the size of the latent of the queries; None: queries are computed from the
            hidden state directly.
        rope_interleaved: whether rotated pairs are neighbours, ``(x_0, x_1)``; otherwise halves of
            a head, ``(x_0, x_{d/2})``.

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
        for name in (
            "kv_lora_rank",
            "qk_nope_head_dim",
            "qk_rope_head_dim",
            "v_head_dim",
            "q_lora_rank",
        ):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"{name}={value}: must be at least 1")

    @property
    def qk_head_dim(self) -> int:
        """The size of a head's query and key."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class Indexer:
    """Sparse attention: an indexer selects the keys of each query (arXiv 2512.02556, section 2.1).

    DeepSeek-V3.2 and GLM-5 have it. See `specjax.models.sparse_attention`. It needs latent
    attention, with a latent of the queries.

    Attributes:
        heads: the number of the indexer's query heads. They share one key.
        head_dim: the size of a head's query, and of the key that is stored for each token.
        topk: the number of keys that a query attends to, if it sees that many.
        rope_interleaved: whether rotated pairs of the indexer are neighbours (GLM-5); otherwise
            halves of the rotated part.
        shared_layers: the layers without an indexer, which attend to the keys that the layer before
            them attends to (GLM-5.2), in ascending order and never the first layer.

    Examples:
        >>> from specjax.models.config import Indexer
        >>> indexer = Indexer(heads=32, head_dim=128, topk=2048, shared_layers=(3, 4, 5))
        >>> indexer.head_dim, indexer.rope_interleaved
        (128, False)
    """

    heads: int
    head_dim: int
    topk: int
    rope_interleaved: bool = False
    shared_layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_minimum(1, self, ("heads", "head_dim", "topk"))
        if list(self.shared_layers) != sorted(set(self.shared_layers) - {0}):
            raise InputError(
                f"shared_layers={self.shared_layers}: give each once, in ascending order, without"
                " layer 0: it has no layer before it whose keys it could take"
            )


@dataclass(frozen=True)
class MoE:
    """Sparse layers: a router sends each token to a few of many MLPs, the experts.

    Their outputs are summed. See `specjax.models.moe`.

    Attributes:
        num_experts: the number of experts, E.
        experts_per_token: the number of experts of a token, k.
        intermediate_size: the intermediate size of an expert.
        shared_experts: the number of further experts that every token goes to; they are stored as
            one MLP of their total size.
        shared_gated: whether the output of the shared experts is multiplied by a gate of each
            token.
        scoring: how the router's logits become scores: a softmax over all experts, or a sigmoid of
            each.
        normalise: whether the weights of a token's k experts are divided by their sum.
        scale: the factor of the weights after that.
        groups: the number of groups of equal size that the experts are divided into.
        groups_kept: the number of best groups that all of a token's experts are in.
        corrected: whether a bias of each expert is added to its score for the selection, but not
            for the weight (DeepSeek-V3's balancing without a loss).
        dense_layers: the layers with an ordinary MLP and no experts, in ascending order.
        biased: whether router and experts have biases.
        limit: the limit of gpt-oss's gated unit, which clamps its inputs (see
            `specjax.models.moe`); None: the experts have the model's own unit.
        scales_inputs: whether the weight of a token's one expert multiplies its input, not its
            output (Llama 4).
        beside_mlp: whether a layer has an ordinary MLP as well, and sums both outputs, each normed
            (Gemma 4). The router then has a norm and scales of its own.
        latent_size: the size of a projection of the hidden state that the experts read, and from
            which a second projection makes the sum of their outputs (Nemotron 3 Super); None: they
            read the hidden state. The router and the shared experts always read that.
        added_to_sum: the number that is added to the sum by which weights are divided; sigmoids may
            all be 0.

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
    scales_inputs: bool = False
    beside_mlp: bool = False
    latent_size: int | None = None
    added_to_sum: float = 1e-20

    def __post_init__(self) -> None:
        if self.scales_inputs and self.experts_per_token != 1:
            raise InputError(
                f"experts_per_token={self.experts_per_token}: must be 1 with scales_inputs"
            )
        names = ("num_experts", "experts_per_token", "intermediate_size", "groups", "groups_kept")
        check_minimum(1, self, names)
        if self.num_experts % self.groups:
            raise InputError(
                f"num_experts={self.num_experts} is no multiple of groups={self.groups}: groups are"
                " of equal size"
            )
        size = self.num_experts // self.groups
        if self.groups_kept > self.groups or (self.groups > 1 and size < 2):
            raise InputError(
                f"groups={self.groups} of {size} experts with groups_kept={self.groups_kept}:"
                " groups_kept must be at most groups, and a group needs two experts, since its"
                " score is that of its two best"
            )
        if self.experts_per_token > self.groups_kept * size:
            raise InputError(
                f"experts_per_token={self.experts_per_token}: a token can only choose from"
                f" {self.groups_kept * size} experts (num_experts={self.num_experts},"
                f" groups={self.groups}, groups_kept={self.groups_kept})"
            )


@dataclass(frozen=True)
class Layer:
    """The fields of one layer that differ from `ModelConfig`; None: they do not.

    Attributes:
        num_heads: the number of its query heads.
        num_kv_heads: the number of its key and value heads.
        head_dim: the size of a head.
        rope: its rotary embedding.
        intermediate_size: the intermediate size of its MLP.
        keys_are_values: whether its values are its keys before norm and rotation.
        sinks: whether its softmax has sinks.
        norms: the places of its norms.
        mlp_limit: the limit of the gated unit of its MLP and its shared experts.
        experts_limit: the limit of the gated unit of its experts.
        entries_of: the index of an earlier layer. This layer has no keys and values, and attends to
            that layer's.

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
    sinks: bool | None = None
    norms: Norms | None = None
    mlp_limit: float | None = None
    experts_limit: float | None = None
    entries_of: int | None = None


@dataclass(frozen=True)
class LayerFactors:
    """The constant factors inside every layer of Falcon-H1 (Technology Innovation Institute, 2025).

    Attributes:
        attention_in: the factor of attention's input.
        attention_out: the factor of attention's output.
        key: the factor of keys before rotation.
        state_in: the factor of Mamba-2's input.
        state_out: the factor of Mamba-2's output.
        state_parts: the factors of Mamba-2's projections: gate, x, B, C and step.
        gate: the factor of the MLP's gate before its activation.
        down: the factor of the MLP's output.

    Examples:
        >>> from specjax.models.config import LayerFactors
        >>> LayerFactors(key=0.5).key, LayerFactors().state_parts
        (0.5, (1.0, 1.0, 1.0, 1.0, 1.0))
    """

    attention_in: float = 1.0
    attention_out: float = 1.0
    key: float = 1.0
    state_in: float = 1.0
    state_out: float = 1.0
    state_parts: tuple[float, ...] = (1.0,) * 5
    gate: float = 1.0
    down: float = 1.0


@dataclass(frozen=True)
class ModelConfig:
    """The configuration of a decoder like Llama. The defaults are Llama's; families set switches.

    ``qkv_bias`` is Qwen2's (and ``attention_bias`` elsewhere), ``output_bias`` the bias of the
    attention's output projection, ``qk_norm`` Qwen3's RMSNorm over each query and key head.
    ``max_positions`` is in tokens. ``mla`` replaces ordinary attention; ``head_dim`` is then its
    ``qk_rope_head_dim``, as in `transformers`. ``moe`` gives the layers experts, except its
    ``dense_layers``, whose MLP is of ``intermediate_size``. The ``windowed_layers`` see only the
    newest ``sliding_window`` tokens, their own included. ``layers`` describes how layers differ,
    one by one; empty: all are alike.

    Further switches: ``activation`` of the gated MLP; with ``gated_mlp`` False the MLP and experts
    have no gate, and are ``down(activation(up(x)))`` (Nemotron-H). ``norms`` are before attention
    and MLP, after them, or both; ``norm_offset`` is added to every norm's weight.
    ``qk_norm_over_heads`` norms all heads of a token together (OLMo), not each; ``value_norm``
    norms values, without a weight. ``keys_are_values``: a value is the key before norm and
    rotation. ``embedding_scale`` and ``residual_scale`` (of the outputs of attention and MLP) are
    factors; with ``embedding_scale_rounded`` the former is rounded to the type of the embeddings
    before the product (Gemma), and not otherwise (Granite, Falcon-H1). Logits are divided by
    ``logit_divisor``; ``attention_scale`` is the factor of scores, None for ``head_dim ** -0.5``.
    ``score_cap`` and ``logit_cap`` are soft caps of scores and logits, ``cap * tanh(x / cap)``.
    With ``sinks`` every query head has a logit without a value that takes part in its softmax
    (gpt-oss). With ``layer_scalars`` each layer's output is multiplied by a number.
    ``per_layer_inputs``: the size of an input of every layer for each token, from an embedding of
    ``per_layer_vocab_size`` tokens (Gemma 4's E2B and E4B); 0 for none. ``gated_attention``: the
    output of each query head is multiplied by a gate (Qwen3.5). The ``linear_layers`` have
    ``linear`` attention, Mamba-2 or a short convolution, which keep a state, in place of ordinary
    attention; ``linear`` has its sizes. If ``mlp_layers`` are given, every layer has one block with
    one norm: these have an MLP or experts alone, and remember nothing; the others have no MLP
    (Nemotron-H). With ``rope_interleaved`` rotated pairs of ordinary attention are neighbours
    (GLM-4), otherwise halves of a head. With ``qk_norm_after_rope`` queries and keys are rotated
    before their norms (Hunyuan). ``value_dim`` is the size of a head's value, None for
    ``head_dim``, and ``value_scale`` a factor of values (MiMo-V2). With
    ``qk_unit_norm_in_rope_layers`` queries and keys of layers with RoPE are normed after it,
    without a weight, and with ``windows_aligned`` a window begins at a multiple of its size: a
    query sees the chunk that it is in (Llama 4). ``factors`` are constant factors inside every
    layer (Falcon-H1). With ``gated_heads`` the output of each query head is multiplied by one gate,
    with a projection of its own. ``mlp_limit`` clamps a gated unit: the gate after its activation
    from above, and the other input on both sides; ``experts_limit`` does so in experts (Step-3.5).
    With an ``indexer`` latent attention attends to selected keys alone (DeepSeek-V3.2, GLM-5).
    With ``embedding_normed`` embeddings are normed, without a weight. ``post_norm_eps`` is the
    epsilon of the norms after attention and MLP, and ``final_norm_offset`` what is added to the
    weight of the last norm; None for ``norm_eps`` and ``norm_offset``. With
    ``qk_unit_norm_in_all_layers`` queries and keys of all layers are normed, without a weight. With
    ``gated_values`` every number of the attention output is multiplied by a gate of its own
    projection (Muse Glimmer).

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
    gated_mlp: bool = True
    norms: Norms = "before"
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    embedding_scale_rounded: bool = True
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
    value_dim: int | None = None
    value_scale: float = 1.0
    rope_interleaved: bool = False
    qk_norm_after_rope: bool = False
    qk_unit_norm_in_rope_layers: bool = False
    windows_aligned: bool = False
    linear: StateSizes | None = None
    linear_layers: tuple[int, ...] = ()
    mlp_layers: tuple[int, ...] | None = None
    factors: LayerFactors | None = None
    gated_heads: bool = False
    mlp_limit: float | None = None
    experts_limit: float | None = None
    indexer: Indexer | None = None
    embedding_normed: bool = False
    post_norm_eps: float | None = None
    final_norm_offset: float | None = None
    qk_unit_norm_in_all_layers: bool = False
    gated_values: bool = False

    def __post_init__(self) -> None:
        names = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
        )
        check_minimum(1, self, names)
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}:"
                " each key/value head serves an equal group of query heads"
            )
        if self.head_dim % 2:
            raise InputError(
                f"head_dim={self.head_dim}: must be even, since rotary embeddings rotate pairs"
            )
        if self.windowed_layers and (self.sliding_window is None or self.sliding_window < 1):
            raise InputError(
                f"sliding_window={self.sliding_window}: must be at least 1 token for"
                " windowed_layers"
            )
        if self.mla is not None:
            self._check_latent(self.mla)
        if self.indexer is not None:
            self._check_indexer(self.indexer)
        self._check_gates()
        if self.qk_norm_after_rope and (self.rope_interleaved or self.qk_norm_over_heads):
            raise InputError(
                "qk_norm_after_rope: cannot be combined with rope_interleaved or qk_norm_over_heads"
            )
        if self.value_size != self.head_dim and (self.gated_attention or self.keys_are_values):
            raise InputError(
                f"value_dim={self.value_dim}: must be head_dim={self.head_dim} with gated_attention"
                " or keys_are_values"
            )
        if self.layers:
            self._check_layers()
        if self.linear_layers:
            self._check_linear()
        if self.mlp_layers is not None:
            self._check_blocks(self.mlp_layers)
        if self.moe is not None:
            self._check_experts(self.moe)
        if self.per_layer_inputs and self.per_layer_vocab_size < self.vocab_size:
            raise InputError(
                f"per_layer_vocab_size={self.per_layer_vocab_size}: must be at least"
                f" vocab_size={self.vocab_size}: every token needs an input for each layer"
            )

    def _check_latent(self, mla: MLA) -> None:
        if (self.head_dim, self.num_kv_heads) != (mla.qk_rope_head_dim, self.num_heads):
            raise InputError(
                f"head_dim={self.head_dim}, num_kv_heads={self.num_kv_heads}: with latent attention"
                f" head_dim is qk_rope_head_dim={mla.qk_rope_head_dim}, and num_kv_heads is"
                f" num_heads={self.num_heads}"
            )
        if self.rope.query_growth:
            raise InputError(
                f"rope.query_growth={self.rope.query_growth}: must be 0 with latent attention"
            )

    def _check_linear(self) -> None:
        if self.linear is None:
            raise InputError(f"linear_layers={self.linear_layers}: linear must give their sizes")
        layers = set(range(self.num_layers))
        may_be_all = self.linear.beside_attention and set(self.linear_layers) == layers
        if not (may_be_all or set(self.linear_layers) < layers):
            raise InputError(
                f"linear_layers={self.linear_layers}: must be some of the"
                f" num_layers={self.num_layers} layers, from 0, and not all of them: at least one"
                " layer must have ordinary attention"
            )
        if list(self.linear_layers) != sorted(set(self.linear_layers)):
            raise InputError(
                f"linear_layers={self.linear_layers}: give each once, in ascending order"
            )
        if set(self.linear_layers) & set(self.windowed_layers):
            raise InputError("linear_layers: cannot be combined with windows of them")

    def _check_gates(self) -> None:
        gates = [
            name
            for name in ("gated_heads", "gated_values", "gated_attention")
            if getattr(self, name)
        ]
        if len(gates) > 1:
            raise InputError(f"{gates[0]}: cannot be combined with {' and '.join(gates[1:])}")
        if self.mla is not None and (self.gated_heads or self.gated_values):
            raise InputError(f"{gates[0]}: cannot be combined with latent attention (mla)")
        if self.qk_unit_norm_in_rope_layers and self.qk_unit_norm_in_all_layers:
            raise InputError(
                "qk_unit_norm_in_rope_layers: cannot be combined with qk_unit_norm_in_all_layers,"
                " which norms the queries and keys of all layers: give one of them"
            )
        for name in ("mlp_limit", "experts_limit"):
            if (limit := getattr(self, name)) is not None and limit <= 0:
                raise InputError(f"{name}={limit}: must be above 0, or None for no limit")

    def _check_indexer(self, indexer: Indexer) -> None:
        if self.mla is None or self.mla.q_lora_rank is None:
            raise InputError(
                "indexer: it reads the latents of queries: give mla with a q_lora_rank, or leave"
                " indexer out"
            )
        if indexer.head_dim < self.mla.qk_rope_head_dim:
            raise InputError(
                f"indexer.head_dim={indexer.head_dim}: must be at least"
                f" mla.qk_rope_head_dim={self.mla.qk_rope_head_dim}, the numbers that are rotated"
            )
        if self.windowed_layers or self.linear_layers:
            raise InputError("indexer: cannot be combined with windowed_layers or linear_layers")
        if max(indexer.shared_layers, default=0) >= self.num_layers:
            raise InputError(
                f"indexer.shared_layers={indexer.shared_layers}: the model has {self.num_layers}"
                " layers"
            )

    def _check_blocks(self, mlp_layers: tuple[int, ...]) -> None:
        with_attention = {*self.linear_layers, *self.windowed_layers}
        if list(mlp_layers) != sorted(
            set(mlp_layers) & set(range(self.num_layers)) - with_attention
        ):
            raise InputError(
                f"mlp_layers={mlp_layers}: must be layers of the num_layers={self.num_layers}, each"
                " once and in ascending order, and not among linear_layers or windowed_layers"
            )
        if len({*mlp_layers, *self.linear_layers}) == self.num_layers:
            raise InputError(
                f"mlp_layers={mlp_layers}, linear_layers={self.linear_layers}: at least one layer"
                " must have ordinary attention"
            )
        if self.mla is not None or self.layers or self.norms != "before":
            raise InputError(
                "mlp_layers: cannot be combined with latent attention, layers that differ, or norms"
                " after a block"
            )

    def _check_experts(self, moe: MoE) -> None:
        if moe.biased and moe.latent_size is not None:
            raise InputError(
                f"moe.latent_size={moe.latent_size}: must be None with moe.biased: experts that"
                " read a projection have no biases"
            )
        if moe.limit is not None and not self.gated_mlp:
            raise InputError(
                f"moe.limit={moe.limit}: must be None with gated_mlp=False: it limits the inputs of"
                " a gated unit"
            )

    def _check_layers(self) -> None:
        if self.mla is not None:
            raise InputError("layers: all layers are alike with latent attention: leave layers out")
        if len(self.layers) != self.num_layers:
            raise InputError(
                f"layers: {len(self.layers)} of num_layers={self.num_layers} are described:"
                " describe all or none"
            )
        for index, layer in enumerate(self.layers):
            try:
                config = self.of_layer(index)
            except InputError as error:
                raise InputError(f"layers[{index}]: {error}") from None
            if (source := layer.entries_of) is None:
                continue
            if not 0 <= source < index or self.layers[source].entries_of is not None:
                raise InputError(
                    f"layers[{index}]: entries_of={source}: must be an earlier layer that has"
                    " entries of its own"
                )
            source_config = self.of_layer(source)
            if (config.num_kv_heads, config.head_dim) != (
                source_config.num_kv_heads,
                source_config.head_dim,
            ):
                raise InputError(
                    f"layers[{index}]: entries_of={source}, which has {source_config.num_kv_heads}"
                    f" key/value heads of {source_config.head_dim}, but this layer needs"
                    f" {config.num_kv_heads} of {config.head_dim}"
                )

    def of_layer(self, layer: int) -> "ModelConfig":
        """Return the configuration with the fields of one layer in place of the model's.

        It is for code that works with one layer. If all layers are alike it is this configuration.
        """
        if not self.layers:
            return self
        names = (field.name for field in fields(Layer) if field.name != "entries_of")
        differing = {
            name: value
            for name in names
            if (value := getattr(self.layers[layer], name)) is not None
        }
        return replace(self, **differing, layers=())

    def first(self, count: int, **changes: Any) -> "ModelConfig":
        """Return the configuration of the first ``count`` layers, with ``changes`` of fields.

        Raises:
            InputError: none of these layers would attend to entries.
        """
        self._check_attends(count, changes)
        windowed, linear = (
            [i for i in layers if i < count]
            for layers in (self.windowed_layers, self.linear_layers)
        )
        kinds: dict[str, Any] = {"windowed_layers": tuple(windowed), "linear_layers": tuple(linear)}
        if self.mlp_layers is not None:
            kinds["mlp_layers"] = tuple(i for i in self.mlp_layers if i < count)
        if self.indexer is not None:
            shared = tuple(i for i in self.indexer.shared_layers if i < count)
            kinds["indexer"] = replace(self.indexer, shared_layers=shared)
        return replace(
            self, **{"num_layers": count, "layers": self.layers[:count], **kinds, **changes}
        )

    def _check_attends(self, count: int, changes: dict[str, Any]) -> None:
        """Raise an InputError if none of the first ``count`` layers attends to entries."""
        names = ("linear", "linear_layers", "mlp_layers", "windowed_layers")
        kinds = {name: changes[name] for name in names if name in changes}
        whole = replace(self, num_layers=max(count, self.num_layers), **kinds)
        if 0 < count <= (first := whole.layers_with_entries[0]):
            causes = {"linear_layers": whole.linear_layers, "mlp_layers": whole.mlp_layers or ()}
            causing = (name for name, layers in causes.items() if set(layers) & set(range(count)))
            raise InputError(
                f"num_layers={count}: none of them would have attention, but one layer needs it:"
                f" give {first + 1} or more, or other {' and '.join(causing)}"
            )

    def window_of(self, layer: int) -> int | None:
        """Return how many tokens a query of a layer sees, its own included; None for all."""
        return self.sliding_window if layer in self.windowed_layers else None

    def is_sparse(self, layer: int) -> bool:
        """Return True if a layer has experts."""
        return self.moe is not None and self.has_mlp(layer) and layer not in self.moe.dense_layers

    def entries_of(self, layer: int) -> int:
        """Return the index of the layer whose entries a layer attends to.

        It is the layer itself, or an earlier one.
        """
        source = self.layers[layer].entries_of if self.layers else None
        return layer if source is None else source

    def has_indexer(self, layer: int) -> bool:
        """Return True if a layer selects keys with an indexer of its own."""
        return self.indexer is not None and layer not in self.indexer.shared_layers

    def is_linear(self, layer: int) -> bool:
        """Return True if a layer has linear attention, Mamba-2 or a short convolution."""
        return layer in self.linear_layers

    def has_mixer(self, layer: int) -> bool:
        """Return True if a layer has attention of any kind, or a state: tokens are mixed in it."""
        return self.mlp_layers is None or layer not in self.mlp_layers

    def has_mlp(self, layer: int) -> bool:
        """Return True if a layer has an MLP or experts."""
        return self.mlp_layers is None or layer in self.mlp_layers

    def memory(self, layer: int) -> LayerMemory:
        """Return the memory of a layer: the parts of its entries, the sizes of its state, or both.

        The parts are those of `entry_parts`.
        """
        return LayerMemory(self.entry_parts(layer), self.linear if self.is_linear(layer) else None)

    def entry_parts(self, layer: int) -> tuple[tuple[int, int], ...]:
        """Return the ``(heads, dim)`` of each array that a layer stores for a token.

        These are keys and values, or the latent and the rotated key (see `specjax.models.cache`),
        and after these the key of the layer's indexer. It is empty for a layer that reads the
        entries of another layer, keeps a state, or has no attention.
        """
        if not self.has_mixer(layer):
            return ()
        state = self.linear if self.is_linear(layer) else None
        if self.entries_of(layer) != layer or (state is not None and not state.beside_attention):
            return ()
        if self.mla is not None:
            parts = ((1, self.mla.kv_lora_rank), (1, self.mla.qk_rope_head_dim))
            if self.indexer is not None and self.has_indexer(layer):
                parts += ((1, self.indexer.head_dim),)
            return parts
        config = self.of_layer(layer)
        return ((config.num_kv_heads, config.head_dim), (config.num_kv_heads, config.value_size))

    @property
    def layers_with_entries(self) -> tuple[int, ...]:
        """The layers that attend to entries of tokens: their own, or those of an earlier layer."""
        return tuple(
            layer for layer in range(self.num_layers) if self.memory(self.entries_of(layer)).parts
        )

    @property
    def layers_with_states(self) -> tuple[int, ...]:
        """The layers that keep a state of the whole text; some may have entries as well."""
        return tuple(
            layer for layer in range(self.num_layers) if self.memory(layer).state is not None
        )

    @property
    def last_norm_offset(self) -> float:
        """The number that is added to the weight of the norm after the last layer."""
        return self.norm_offset if self.final_norm_offset is None else self.final_norm_offset

    @property
    def value_size(self) -> int:
        """The size of a head's value in ordinary attention."""
        return self.head_dim if self.value_dim is None else self.value_dim

    def entry_size(self, layer: int) -> int:
        """Return how many numbers a layer stores for a token."""
        return sum(heads * dim for heads, dim in self.entry_parts(layer))

    @property
    def axis_units(self) -> dict[str, int]:
        """The number of indivisible units of each logical axis.

        A mesh axis can shard a logical axis only if it divides this number, in every layer.
        """
        layers = [self.of_layer(layer) for layer in range(len(self.layers))] or [self]
        units = {
            "vocab": self.vocab_size,
            "heads": math.gcd(*(layer.num_heads for layer in layers)),
            "kv_heads": math.gcd(*(layer.num_kv_heads for layer in layers)),
            "mlp": math.gcd(*(layer.intermediate_size for layer in layers)),
        }
        if self.moe is not None:
            units |= {
                "experts": self.moe.num_experts,
                "shared_mlp": self.moe.shared_experts * self.moe.intermediate_size,
            }
        return units
