"""Every parameter of a model, declared once.

The declaration (shape, logical axes, initialiser, Hugging Face name) is the only place that lists the parameters: random
init, sharding, import and export are all derived from it.

Weights are stored ``(out, in)``, as Hugging Face stores them: import needs no transpose, and XLA's CPU backend multiplies
a few rows by such a matrix up to 1.5 times as fast as by its transpose.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax import sharding
from specjax.models.config import ModelConfig

Params = dict[str, Any]


@dataclass(frozen=True)
class Param:
    """One parameter: ``shape``, logical ``axes`` (see `specjax.sharding`), Hugging Face ``name``, initialiser."""

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    name: str
    init: Literal["normal", "ones", "zeros"] = "normal"
    stddev: float = 0.02

    def initialise(self, key: jax.Array, dtype: Any) -> jax.Array:
        """A random value of this parameter; consumes ``key``."""
        if self.init == "normal":
            return (self.stddev * jax.random.normal(key, self.shape, jnp.float32)).astype(dtype)
        return jnp.full(self.shape, 1.0 if self.init == "ones" else 0.0, dtype)


def declare(config: ModelConfig) -> Params:
    """The tree of `Param` declarations of a model: ``{"embed", "layers": [{...}], "norm", "lm_head"?}``."""
    tree: Params = {
        "embed": Param((config.vocab_size, config.hidden_size), ("vocab", None), "model.embed_tokens.weight"),
        "layers": [declare_layer(config, f"model.layers.{i}.") for i in range(config.num_layers)],
        "norm": Param((config.hidden_size,), (None,), "model.norm.weight", "ones"),
    }
    if not config.tie_embeddings:
        tree["lm_head"] = Param((config.vocab_size, config.hidden_size), ("vocab", None), "lm_head.weight")
    return tree


def declare_layer(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """The parameters of one decoder layer; ``prefix`` starts their Hugging Face names."""
    hidden, mlp = config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    # Two residual branches a layer: their sum keeps unit scale at depth (GPT-2's initialisation).
    residual_stddev = 0.02 / (2 * config.num_layers) ** 0.5

    def norm(name: str, size: int = hidden) -> Param:
        return Param((size,), (None,), f"{prefix}{name}.weight", "ones")

    layer = {
        "input_norm": norm("input_layernorm"),
        "q": Param((heads, hidden), ("heads", None), f"{prefix}self_attn.q_proj.weight"),
        "k": Param((kv_heads, hidden), ("kv_heads", None), f"{prefix}self_attn.k_proj.weight"),
        "v": Param((kv_heads, hidden), ("kv_heads", None), f"{prefix}self_attn.v_proj.weight"),
        "o": Param((hidden, heads), (None, "heads"), f"{prefix}self_attn.o_proj.weight", stddev=residual_stddev),
        "post_norm": norm("post_attention_layernorm"),
        "gate": Param((mlp, hidden), ("mlp", None), f"{prefix}mlp.gate_proj.weight"),
        "up": Param((mlp, hidden), ("mlp", None), f"{prefix}mlp.up_proj.weight"),
        "down": Param((hidden, mlp), (None, "mlp"), f"{prefix}mlp.down_proj.weight", stddev=residual_stddev),
    }
    biased = ("q", "k", "v") * config.qkv_bias + ("o",) * config.output_bias + ("gate", "up", "down") * config.mlp_bias
    for weight in biased:
        declared = layer[weight]
        name = declared.name.removesuffix("weight") + "bias"
        layer[f"{weight}_bias"] = Param(declared.shape[:1], declared.axes[:1], name, "zeros")
    if config.qk_norm:
        layer["q_norm"] = norm("self_attn.q_norm", config.head_dim)
        layer["k_norm"] = norm("self_attn.k_norm", config.head_dim)
    return layer


def init(config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random parameters of ``config``; consumes ``key``."""
    declared, tree = jax.tree.flatten(declare(config))
    keys = jax.random.split(key, len(declared))
    return jax.tree.unflatten(tree, [param.initialise(k, dtype) for param, k in zip(declared, keys, strict=True)])


def shardings(config: ModelConfig, mesh: Mesh) -> Params:
    """The `NamedSharding` of every parameter on ``mesh``."""
    return jax.tree.map(lambda param: sharding.named(mesh, param.axes, config.axis_units), declare(config))


def count(params: Params) -> int:
    """Number of scalars in ``params``."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
