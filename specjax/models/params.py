"""Every parameter of a model, declared once.

The declaration (shape, logical axes, initialiser, Hugging Face name) is the only place that lists
the parameters: random init, sharding, import and export are all derived from it.

Matrices are stored ``(in, out)``, the transpose of a Hugging Face checkpoint's: XLA's CPU backend
multiplies 2 to 16 rows by such a matrix in little more than the time of one row, and takes twice as
long the other way round (docs/results/history.md). The embedding stays ``(vocab, hidden)``, because
its rows are looked up.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax.models.config import ModelConfig
from specjax.models.param import Param, Params, Within, matrix, norm

__all__ = [
    "Param",
    "Params",
    "Within",
    "count",
    "declare",
    "declare_layer",
    "initialise",
    "matrix",
    "norm",
    "shardings",
]


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
        "norm": norm("model.norm", config.hidden_size, config.last_norm_offset),
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
    state = config.memory(index).state
    config = config.of_layer(index)
    beside: Params = {}
    if state is not None and state.beside_attention:
        beside = {"state": state.declare(prefix, config.hidden_size, _residual_stddev(config))}
        state = None
    if state is not None:
        attention = state.declare(prefix, config.hidden_size, _residual_stddev(config))
    elif config.mla is None:
        attention = _declare_attention(config, f"{prefix}self_attn.")
    else:
        attention = _declare_latent_attention(config, f"{prefix}self_attn.")
        if config.has_indexer(index):
            beside = {"indexer": _declare_indexer(config, f"{prefix}self_attn.indexer.")}
    layer = {**_declare_norms(config, prefix), **attention}
    if config.has_mlp(index):
        layer |= _declare_mlps(config, prefix, is_sparse)
    inputs = ("q", "k", "v") if config.mla is None else ("q_a", "kv_a")
    biased = ("gate", "up", "down") * config.mlp_bias
    if state is None:
        biased += inputs * config.qkv_bias + ("o",) * config.output_bias
    for weight in biased:
        if (declared := layer.get(weight)) is not None:
            name = declared.name.removesuffix("weight") + "bias"
            layer[f"{weight}_bias"] = Param(
                declared.shape[1:], declared.axes[1:], name, "zeros", units=declared.units
            )
    if state is None:
        layer |= _declare_head_norms(config, f"{prefix}self_attn.")
    layer |= _declare_beside(config, prefix)
    missing = _missing(config, index, has_entries)
    return beside | {name: param for name, param in layer.items() if name not in missing}


def _declare_mlps(config: ModelConfig, prefix: str, is_sparse: bool) -> dict[str, Param]:
    """Declare a layer's MLP, or its experts, or both."""
    if not is_sparse:
        return _declare_mlp(config, f"{prefix}mlp.")
    layer = _declare_experts(config, f"{prefix}mlp.")
    if config.moe is not None and config.moe.beside_mlp:
        layer |= _declare_mixing(config, prefix) | _declare_mlp(config, f"{prefix}mlp.")
    return layer


_MIXER = ("input_norm", "head_gate", "value_gate", "q", "k", "v", "o", "q_norm", "k_norm", "sinks")
_KEYS = ("k", "v", "k_norm")
_GATES = ("gate", "experts_gate", "shared_gate")


def _missing(config: ModelConfig, index: int, has_entries: bool) -> set[str]:
    """Return names of parameters that a layer does not have, though others do."""
    missing = ("v",) * config.keys_are_values
    if not has_entries:  # its queries attend to another layer's keys and values
        missing += _KEYS
    if not config.has_mixer(index):
        missing += _MIXER
    if not config.has_mlp(index):
        missing += ("post_norm",)
    if not config.gated_mlp:
        missing += _GATES
    return {*missing, *(f"{name}_bias" for name in missing)}


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
    gates = {}
    if config.gated_heads:
        gates["head_gate"] = matrix(
            f"{prefix}g_proj", hidden, (count, "heads"), units=count, is_product=False
        )
    if config.gated_values:
        gates["value_gate"] = matrix(f"{prefix}gate_proj", hidden, (attended, "heads"), units=count)
    return gates | {
        "q": matrix(f"{prefix}q_proj", hidden, queries, units=count),
        "k": matrix(f"{prefix}k_proj", hidden, kv_heads, units=kv_count),
        "v": matrix(f"{prefix}v_proj", hidden, values, units=kv_count),
        "o": matrix(
            f"{prefix}o_proj", (attended, "heads"), hidden, _residual_stddev(config), units=count
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


def _declare_indexer(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """Declare the indexer of a layer.

    Every device has all of it: a mesh that split its heads would have to sum the scores of all keys
    over the devices.
    """
    indexer, mla = config.indexer, config.mla
    assert indexer is not None and mla is not None and mla.q_lora_rank is not None
    hidden, key = (config.hidden_size, None), (indexer.head_dim, None)
    queries = (indexer.heads * indexer.head_dim, None)
    # The weights of heads are few numbers that decide the selection: kept in float32.
    weights = matrix(f"{prefix}weights_proj", hidden, (indexer.heads, None), is_product=False)
    return {
        "q": matrix(f"{prefix}wq_b", (mla.q_lora_rank, None), queries),
        "k": matrix(f"{prefix}wk", hidden, key),
        "k_norm": norm(f"{prefix}k_norm", indexer.head_dim),
        "k_norm_bias": Param((indexer.head_dim,), (None,), f"{prefix}k_norm.bias", "zeros"),
        "weights": replace(weights, dtype="float32"),
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

    inputs = moe.latent_size or hidden
    layer = {
        "router": matrix(
            f"{prefix}gate", (hidden, None), (moe.num_experts, None), is_product=False
        ),
        "experts_gate": experts("gate_proj", inputs, moe.intermediate_size),
        "experts_up": experts("up_proj", inputs, moe.intermediate_size),
        "experts_down": experts("down_proj", moe.intermediate_size, inputs, stddev),
    }
    if moe.latent_size:
        layer["latent_in"] = matrix(f"{prefix}latent_in", (hidden, None), (inputs, None))
        layer["latent_out"] = matrix(f"{prefix}latent_out", (inputs, None), (hidden, None))
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
