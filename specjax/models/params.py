"""Every parameter of a model, declared once.

The declaration (shape, logical axes, initialiser, Hugging Face name) is the only place that lists
the parameters: random init, sharding, import and export are all derived from it.

Matrices are stored ``(in, out)``, the transpose of a Hugging Face checkpoint's: XLA's CPU backend
multiplies 2 to 16 rows by such a matrix in little more than the time of one row, and takes twice as
long the other way round (docs/results/history.md). The embedding stays ``(vocab, hidden)``, because
its rows are looked up.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.typing import DTypeLike

from specjax import sharding
from specjax.models.config import ModelConfig

Params = dict[str, Any]

Init = Literal["normal", "ones", "zeros", "log_rates"]
"""The initial value of a new model's parameter.

``log_rates`` are logarithms of uniform numbers from 0 to 16 (Mamba-2's initialisation).
"""


@dataclass(frozen=True)
class Within:
    """The slice of a stored tensor that a parameter occupies, along one axis.

    It is every ``step``-th index from ``start`` on, as many as the parameter's size along that
    axis.

    Attributes:
        axis: the axis of the stored tensor; of a stacked parameter, the axis of one of its tensors,
            without the stack.
        size: the size of that axis in the stored tensor.
        start: the first index.
        step: the distance between indices.

    Examples:
        Queries in a fused tensor, and the first of two interleaved projections:

        >>> from specjax.models.params import Param, Within
        >>> name = "self_attn.qkv_proj.weight"
        >>> within = Within(axis=0, size=8)
        >>> Param((6, 4), (None, "heads"), name, transposed=True, within=within).stored_shape
        (8, 6)
        >>> within = Within(axis=2, size=6, step=2)
        >>> gate = Param((2, 6, 3), ("experts", None, None), "experts.gate_up_proj", within=within)
        >>> gate.stored_part(np.s_[1:2, :, 1:3])
        (slice(1, 2, 1), slice(0, 6, 1), slice(2, 5, 2))
    """

    axis: int
    size: int
    start: int = 0
    step: int = 1


@dataclass(frozen=True)
class Param:
    """The declaration of one parameter.

    Attributes:
        shape: the shape in use.
        axes: the logical axes (see `specjax.sharding`).
        name: the name in a Hugging Face checkpoint. With ``{}`` there is one tensor for each index
            of the first axis, and its name has the index there: the experts of a layer, which are
            published one by one and used as one array.
        init: the initial value of a new model.
        stddev: the standard deviation of a normal ``init``.
        transposed: whether the checkpoint swaps the last two axes.
        dtype: the type of this parameter, if it is fixed: an index table is "int32". None: the
            model's.
        stored_dtype: the type in the checkpoint, if it differs from ``dtype``.
        units: the number of indivisible units of its sharded axis, if it is specific to this
            parameter: layers may differ in heads. None: as in other parameters.
        within: the slice of the tensor of that name that this parameter is, if several share one.
            None: all of it.
        unit_axes: the number of axes of size 1 that it has in front in the checkpoint.
        is_product: whether it is a matrix that is only used in products of
            `specjax.models.primitives`, so that it may be quantized (see
            `specjax.models.quantization`).
        is_rows: whether such a matrix is ``(out, in)`` and its rows are looked up too: an
            embedding.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    name: str
    init: Init = "normal"
    stddev: float = 0.02
    transposed: bool = False
    dtype: str | None = None
    stored_dtype: str | None = None
    units: int | None = None
    within: Within | None = None
    unit_axes: int = 0
    is_product: bool = False
    is_rows: bool = False

    def __post_init__(self) -> None:
        within = self.within
        if within is not None:
            assert 0 <= within.axis < len(self._turned_shape), (
                f"{self.name}: there is no axis {within.axis}"
            )
            assert within.start >= 0 and within.step >= 1, (
                f"{self.name}: {within} must ascend from 0"
            )
            assert self._places(within).stop - within.step < within.size, (
                f"{self.name}: {within} is too short for {self.shape}"
            )

    @property
    def stacked(self) -> bool:
        """True if it is several tensors in the checkpoint."""
        return "{}" in self.name

    @property
    def stored_names(self) -> tuple[str, ...]:
        """The names of its tensors in the checkpoint, in the order of the first axis."""
        if self.stacked:
            return tuple(self.name.replace("{}", str(i)) for i in range(self.shape[0]))
        return (self.name,)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape of each of its tensors in the checkpoint, whole even if it is only a slice."""
        shape = list(self._turned_shape)
        if self.within is not None:
            shape[self.within.axis] = self.within.size
        return tuple(shape)

    @property
    def _turned_shape(self) -> tuple[int, ...]:
        """The shape in use, without the axis of a stack, with the checkpoint's axes."""
        return self._turned(self.shape[1:] if self.stacked else self.shape, (1,) * self.unit_axes)

    def _turned(self, axes: tuple[Any, ...], units: tuple[Any, ...]) -> tuple[Any, ...]:
        return (*units, *((*axes[:-2], *axes[:-3:-1]) if self.transposed else axes))

    def _places(self, within: Within) -> range:
        """Return the indices of the stored axis that this parameter occupies."""
        return range(
            within.start, within.start + within.step * self._turned_shape[within.axis], within.step
        )

    def stored_part(self, part: tuple[slice, ...]) -> tuple[slice, ...]:
        """Return where a part of this parameter is in its tensor in the checkpoint.

        Args:
            part: a slice of each axis in use, without the first axis if it is stacked.
        """
        places = [range(size) for size in self._turned_shape]
        units = (slice(None),) * self.unit_axes
        if self.within is not None:
            places[self.within.axis] = self._places(self.within)
        ranges = [
            indices[piece] for indices, piece in zip(places, self._turned(part, units), strict=True)
        ]
        return tuple(
            slice(indices.start, indices[-1] + 1 if indices else indices.start, indices.step)
            for indices in ranges
        )

    def place(self, mesh: Mesh, units: Mapping[str, int]) -> NamedSharding:
        """Return the sharding of this parameter on ``mesh``.

        ``units`` are as in `sharding.partition`; this parameter's own take precedence.
        """
        if self.units is None:
            own_units = {}
        else:
            own_units = {axis: self.units for axis in self.axes if axis is not None}
        return sharding.named(mesh, self.axes, {**units, **own_units})

    def initialise(self, key: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Return a random value in ``dtype``, or in the parameter's own; consumes ``key``."""
        dtype = self.dtype or dtype
        if self.init == "normal":
            return (self.stddev * jax.random.normal(key, self.shape, jnp.float32)).astype(dtype)
        if self.init == "log_rates":
            rates = jax.random.uniform(key, self.shape, jnp.float32, 0.01, 16.0)
            return jnp.log(rates).astype(dtype)
        return jnp.full(self.shape, 1.0 if self.init == "ones" else 0.0, dtype)


def declare(config: ModelConfig, layers: tuple[int, int] | None = None) -> Params:
    """Return the tree of declarations: ``{"embed", "layers": [{...}], "norm", "lm_head"?}``.

    With ``layers``, a range from the first index to the one after the last, all others are ``{}``.
    """
    present = range(*(layers or (0, config.num_layers)))
    tree: Params = {
        "embed": _declare_embedding(config),
        "layers": [
            declare_layer(config, f"model.layers.{i}.", i) if i in present else {}
            for i in range(config.num_layers)
        ],
        "norm": norm("model.norm", config.hidden_size, config.norm_offset),
    }
    if not config.tie_embeddings:
        tree["lm_head"] = matrix(
            "lm_head", (config.hidden_size, None), (config.vocab_size, "vocab")
        )
    if config.per_layer_inputs:
        tree |= _declare_per_layer_inputs(config)
    return tree


def _declare_embedding(config: ModelConfig) -> Param:
    shape = (config.vocab_size, config.hidden_size)
    return Param(shape, ("vocab", None), "model.embed_tokens.weight", is_product=True, is_rows=True)


def _declare_per_layer_inputs(config: ModelConfig) -> Params:
    """Declare Gemma 4's inputs of each layer, concatenated for all layers as they are published."""
    vocab, size = config.per_layer_vocab_size, config.num_layers * config.per_layer_inputs
    embed = Param(
        (vocab, size), ("vocab", None), "model.embed_tokens_per_layer.weight", units=vocab
    )
    return {
        "per_layer_embed": embed,
        "per_layer_projection": matrix(
            "model.per_layer_model_projection",
            (config.hidden_size, None),
            (size, None),
            is_product=False,
        ),
        "per_layer_norm": norm(
            "model.per_layer_projection_norm", config.per_layer_inputs, config.norm_offset
        ),
    }


def matrix(
    name: str,
    inputs: tuple[int, str | None],
    outputs: tuple[int, str | None],
    stddev: float = 0.02,
    units: int | None = None,
    is_product: bool = True,
) -> Param:
    """Declare the weight ``(in, out)`` of a linear layer, from size and logical axis of each side.

    ``units`` and ``is_product`` are as in `Param`.
    """
    shape, axes = (inputs[0], outputs[0]), (inputs[1], outputs[1])
    return Param(
        shape,
        axes,
        f"{name}.weight",
        stddev=stddev,
        transposed=True,
        units=units,
        is_product=is_product,
    )


def declare_layer(config: ModelConfig, prefix: str, index: int = 0) -> dict[str, Param]:
    """Declare the parameters of one decoder layer.

    Args:
        config: the model's configuration.
        prefix: the prefix of their Hugging Face names.
        index: the index of the layer in the model, which decides whether it has experts, and how it
            differs from others.
    """
    has_entries = config.entries_of(index) == index
    is_sparse = config.is_sparse(index)
    is_linear = config.is_linear(index)
    config = config.of_layer(index)
    if is_linear:
        attention = _declare_linear_attention(config, f"{prefix}linear_attn.")
    elif config.mla is None:
        attention = _declare_attention(config, f"{prefix}self_attn.")
    else:
        attention = _declare_latent_attention(config, f"{prefix}self_attn.")
    layer = {**_declare_norms(config, prefix), **attention}
    has_both = is_sparse and config.moe is not None and config.moe.beside_mlp
    if is_sparse:
        layer |= _declare_experts(config, f"{prefix}mlp.")
    if has_both:
        layer |= _declare_mixing(config, prefix)
    if has_both or not is_sparse:
        layer |= _declare_mlp(config, f"{prefix}mlp.")
    inputs = ("q", "k", "v") if config.mla is None else ("q_a", "kv_a")
    biased = ("gate", "up", "down") * config.mlp_bias
    if not is_linear:
        biased += inputs * config.qkv_bias + ("o",) * config.output_bias
    for weight in biased:
        if (declared := layer.get(weight)) is not None:
            name = declared.name.removesuffix("weight") + "bias"
            layer[f"{weight}_bias"] = Param(
                declared.shape[1:], declared.axes[1:], name, "zeros", units=declared.units
            )
    if not is_linear:
        layer |= _declare_head_norms(config, f"{prefix}self_attn.")
    layer |= _declare_beside(config, prefix)
    missing = ("v", "v_bias") * config.keys_are_values
    if not has_entries:  # its queries attend to another layer's keys and values
        missing = ("k", "v", "k_bias", "v_bias", "k_norm")
    return {name: param for name, param in layer.items() if name not in missing}


def _declare_head_norms(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """Declare the norms of queries and keys."""
    counts = {"q_norm": config.num_heads, "k_norm": config.num_kv_heads} if config.qk_norm else {}
    sizes = {
        name: config.head_dim * (count if config.qk_norm_over_heads else 1)
        for name, count in counts.items()
    }
    return {name: norm(f"{prefix}{name}", size, config.norm_offset) for name, size in sizes.items()}


def _declare_beside(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """Declare the parameters outside of attention and MLP.

    These are sinks, a scalar, and the projections of the layer's input.
    """
    layer = {}
    if config.sinks:
        layer["sinks"] = Param(
            (config.num_heads,),
            ("heads",),
            f"{prefix}self_attn.sinks",
            stddev=1.0,
            units=config.num_heads,
        )
    if config.layer_scalars:
        layer["scalar"] = Param((1,), (None,), f"{prefix}layer_scalar", "ones")
    if config.per_layer_inputs:
        hidden, input_size = (config.hidden_size, None), (config.per_layer_inputs, None)
        layer["per_layer_gate"] = matrix(f"{prefix}per_layer_input_gate", hidden, input_size)
        layer["per_layer_out"] = matrix(f"{prefix}per_layer_projection", input_size, hidden)
        layer["per_layer_out_norm"] = norm(
            f"{prefix}post_per_layer_input_norm", config.hidden_size, config.norm_offset
        )
    return layer


def norm(name: str, size: int, offset: float = 0.0) -> Param:
    """Declare the weight ``[size]`` of an RMSNorm, to which ``offset`` is added: the sum is 1."""
    return Param((size,), (None,), f"{name}.weight", "zeros" if offset else "ones")


_NORMS = {
    "before": {"input_norm": "input", "post_norm": "post_attention"},
    "after": {"attention_out_norm": "post_attention", "mlp_out_norm": "post_feedforward"},
    "both": {
        "input_norm": "input",
        "attention_out_norm": "post_attention",
        "post_norm": "pre_feedforward",
        "mlp_out_norm": "post_feedforward",
    },
}
"""The norms of a layer by `ModelConfig.norms`, and their names in checkpoints."""


def _declare_norms(config: ModelConfig, prefix: str) -> dict[str, Param]:
    names = _NORMS[config.norms].items()
    return {
        name: norm(f"{prefix}{stored}_layernorm", config.hidden_size, config.norm_offset)
        for name, stored in names
    }


def _residual_stddev(config: ModelConfig) -> float:
    """Return the stddev that keeps the residual stream at unit scale (GPT-2's initialisation).

    A layer has two residual branches.
    """
    return 0.02 / (2 * config.num_layers) ** 0.5


def _declare_attention(config: ModelConfig, prefix: str) -> dict[str, Param]:
    hidden = (config.hidden_size, None)
    count, kv_count = config.num_heads, config.num_kv_heads
    kv_heads = (kv_count * config.head_dim, "kv_heads")
    values, attended = (kv_count * config.value_size, "kv_heads"), count * config.value_size
    queries = (count * config.head_dim * (2 if config.gated_attention else 1), "heads")
    return {
        "q": matrix(f"{prefix}q_proj", hidden, queries, units=count),
        "k": matrix(f"{prefix}k_proj", hidden, kv_heads, units=kv_count),
        "v": matrix(f"{prefix}v_proj", hidden, values, units=kv_count),
        "o": matrix(
            f"{prefix}o_proj", (attended, "heads"), hidden, _residual_stddev(config), units=count
        ),
    }


def _declare_linear_attention(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """Declare Gated DeltaNet's matrices, and the decay of each value head.

    Everything is sharded by key heads, together with the value heads that belong to them.
    """
    sizes = config.linear
    assert sizes is not None
    hidden, units = (config.hidden_size, None), sizes.key_heads
    keys, values = sizes.key_heads * sizes.key_dim, sizes.value_heads * sizes.value_dim

    def projection(name: str, size: int, is_product: bool = True) -> Param:
        return matrix(
            f"{prefix}{name}", hidden, (size, "kv_heads"), units=units, is_product=is_product
        )

    # Decays are products of many factors near 1: kept in float32.
    def per_head(name: str, init: Init) -> Param:
        return Param(
            (sizes.value_heads,),
            ("kv_heads",),
            f"{prefix}{name}",
            init,
            dtype="float32",
            units=units,
        )

    def kernel(name: str, size: int) -> Param:
        shape, axes = (size, 1, sizes.kernel), ("kv_heads", None, None)
        return Param(shape, axes, f"{prefix}conv_{name}.weight", stddev=0.3, units=units)

    if sizes.by_key_head:
        projections = {
            "qkvz": projection("in_proj_qkvz", 2 * (keys + values)),
            "gates": projection("in_proj_ba", 2 * sizes.value_heads, is_product=False),
        }
    else:
        projections = {
            "q": projection("q_proj", keys),
            "k": projection("k_proj", keys),
            "v": projection("v_proj", values),
            "z": projection("in_proj_z", values),
            "beta": projection("in_proj_b", sizes.value_heads, is_product=False),
            "alpha": projection("in_proj_a", sizes.value_heads, is_product=False),
        }
    return projections | {
        "conv_q": kernel("q", keys),
        "conv_k": kernel("k", keys),
        "conv_v": kernel("v", values),
        "log_rate": per_head("A_log", "log_rates"),
        "rate_bias": per_head("dt_bias", "ones"),
        "norm": norm(f"{prefix}norm", sizes.value_dim),
        "o": matrix(
            f"{prefix}out_proj", (values, "kv_heads"), hidden, _residual_stddev(config), units=units
        ),
    }


def _declare_latent_attention(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """Declare DeepSeek's latent attention.

    ``kv_b`` makes each head's key (without the rotated part) and then its value from a latent.
    """
    mla = config.mla
    assert mla is not None
    hidden, latent = (config.hidden_size, None), (mla.kv_lora_rank, None)
    queries = (config.num_heads * mla.qk_head_dim, "heads")
    keys_values = (config.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim), "heads")
    if mla.q_lora_rank is None:
        query = {"q": matrix(f"{prefix}q_proj", hidden, queries)}
    else:
        query = {
            "q_a": matrix(f"{prefix}q_a_proj", hidden, (mla.q_lora_rank, None)),
            "q_a_norm": norm(f"{prefix}q_a_layernorm", mla.q_lora_rank),
            "q_b": matrix(f"{prefix}q_b_proj", (mla.q_lora_rank, None), queries),
        }
    return {
        **query,
        "kv_a": matrix(
            f"{prefix}kv_a_proj_with_mqa", hidden, (mla.kv_lora_rank + mla.qk_rope_head_dim, None)
        ),
        "kv_a_norm": norm(f"{prefix}kv_a_layernorm", mla.kv_lora_rank),
        "kv_b": matrix(f"{prefix}kv_b_proj", latent, keys_values, is_product=False),
        "o": matrix(
            f"{prefix}o_proj",
            (config.num_heads * mla.v_head_dim, "heads"),
            hidden,
            _residual_stddev(config),
        ),
    }


def _declare_mlp(config: ModelConfig, prefix: str) -> dict[str, Param]:
    hidden, mlp = (config.hidden_size, None), (config.intermediate_size, "mlp")
    return {
        "gate": matrix(f"{prefix}gate_proj", hidden, mlp),
        "up": matrix(f"{prefix}up_proj", hidden, mlp),
        "down": matrix(f"{prefix}down_proj", mlp, hidden, _residual_stddev(config)),
    }


def _declare_experts(config: ModelConfig, prefix: str) -> dict[str, Param]:
    moe = config.moe
    assert moe is not None
    hidden, stddev = config.hidden_size, _residual_stddev(config)

    def experts(name: str, inputs: int, outputs: int, stddev: float = 0.02) -> Param:
        name = f"{prefix}experts.{{}}.{name}.weight"
        shape = (moe.num_experts, inputs, outputs)
        return Param(
            shape, ("experts", None, None), name, stddev=stddev, transposed=True, is_product=True
        )

    layer = {
        "router": matrix(
            f"{prefix}gate", (hidden, None), (moe.num_experts, None), is_product=False
        ),
        "experts_gate": experts("gate_proj", hidden, moe.intermediate_size),
        "experts_up": experts("up_proj", hidden, moe.intermediate_size),
        "experts_down": experts("down_proj", moe.intermediate_size, hidden, stddev),
    }
    if moe.biased:
        sizes = {"gate": moe.intermediate_size, "up": moe.intermediate_size, "down": hidden}
        for name, size in sizes.items():
            stored = f"{prefix}experts.{{}}.{name}_proj.bias"
            layer[f"experts_{name}_bias"] = Param(
                (moe.num_experts, size), ("experts", None), stored, "zeros"
            )
        layer["router_bias"] = Param((moe.num_experts,), (None,), f"{prefix}gate.bias", "zeros")
    if moe.corrected:  # small differences decide, so it stays in float32, as published
        name = f"{prefix}gate.e_score_correction_bias"
        layer["correction"] = Param((moe.num_experts,), (None,), name, "zeros", dtype="float32")
    if moe.shared_experts:
        shared = (moe.shared_experts * moe.intermediate_size, "shared_mlp")
        layer["shared_gate"] = matrix(f"{prefix}shared_experts.gate_proj", (hidden, None), shared)
        layer["shared_up"] = matrix(f"{prefix}shared_experts.up_proj", (hidden, None), shared)
        layer["shared_down"] = matrix(
            f"{prefix}shared_experts.down_proj", shared, (hidden, None), stddev
        )
        if moe.shared_gated:
            layer["shared_scale"] = matrix(
                f"{prefix}shared_expert_gate", (hidden, None), (1, None), is_product=False
            )
    return layer


def _declare_mixing(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """Declare the parameters that combine experts with an MLP beside them in Gemma 4.

    These are norms of both, and the router's scales.
    """
    assert config.moe is not None
    names = {
        "mlp_own_norm": "post_feedforward_layernorm_1",
        "mixture_norm": "pre_feedforward_layernorm_2",
        "mixture_out_norm": "post_feedforward_layernorm_2",
    }
    norms = {
        name: norm(f"{prefix}{stored}", config.hidden_size, config.norm_offset)
        for name, stored in names.items()
    }
    return norms | {
        "router_scale": Param((config.hidden_size,), (None,), f"{prefix}router.scale", "ones"),
        "expert_scale": Param(
            (config.moe.num_experts,), (None,), f"{prefix}router.per_expert_scale", "ones"
        ),
    }


def initialise(
    declared: Any,
    key: jax.Array,
    dtype: DTypeLike = jnp.float32,
    mesh: Mesh | None = None,
    units: Mapping[str, int] | None = None,
) -> Any:
    """Return random values for ``declared``, any pytree of `Param`; consumes ``key``.

    On a ``mesh`` they are sharded as declared; ``units`` as in `sharding.partition`.
    """
    params, tree = jax.tree.flatten(declared)
    keys = jax.random.split(key, len(params))
    values = jax.tree.unflatten(
        tree, [param.initialise(k, dtype) for param, k in zip(params, keys, strict=True)]
    )
    return (
        values if mesh is None else jax.device_put(values, shardings(declared, mesh, units or {}))
    )


def shardings(declared: Any, mesh: Mesh, units: Mapping[str, int]) -> Any:
    """Return the `NamedSharding` of each parameter; ``units`` as in `sharding.partition`."""
    return jax.tree.map(lambda param: param.place(mesh, units), declared)


def count(params: Any) -> int:
    """Return the number of scalars in ``params``."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
