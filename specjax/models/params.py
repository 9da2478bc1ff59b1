"""Every parameter of a model, declared once.

The declaration (shape, logical axes, initialiser, Hugging Face name) is the only place that lists the parameters: random
init, sharding, import and export are all derived from it.

Matrices are stored ``(in, out)``, the transpose of what a Hugging Face checkpoint holds: XLA's CPU backend multiplies 2 to
16 rows by such a matrix in little more than the time of one, and takes twice as long the other way round
(benchmarks/README.md). The embedding stays ``(vocab, hidden)``, because its rows are looked up.
"""

from collections.abc import Mapping
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
    """One parameter.

    Attributes:
        shape: as it is used.
        axes: logical axes (see `specjax.sharding`).
        name: in a Hugging Face checkpoint.
        init: how a new model starts.
        stddev: of a normal ``init``.
        transposed: the checkpoint holds the transpose.
        dtype: of this parameter, whatever the others' is: an index table is "int32". None: that of the model.
        stored_dtype: in the checkpoint, where it is another one than ``dtype``.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    name: str
    init: Literal["normal", "ones", "zeros"] = "normal"
    stddev: float = 0.02
    transposed: bool = False
    dtype: str | None = None
    stored_dtype: str | None = None

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in the checkpoint."""
        return self.shape[::-1] if self.transposed else self.shape

    def initialise(self, key: jax.Array, dtype: Any) -> jax.Array:
        """A random value of this parameter, in ``dtype`` unless it has its own; consumes ``key``."""
        dtype = self.dtype or dtype
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
        tree["lm_head"] = matrix("lm_head", (config.hidden_size, None), (config.vocab_size, "vocab"))
    return tree


def matrix(name: str, inputs: tuple[int, str | None], outputs: tuple[int, str | None], stddev: float = 0.02) -> Param:
    """The weight ``(in, out)`` of a linear layer, from the size and the logical axis of either side."""
    shape, axes = (inputs[0], outputs[0]), (inputs[1], outputs[1])
    return Param(shape, axes, f"{name}.weight", stddev=stddev, transposed=True)


def declare_layer(config: ModelConfig, prefix: str) -> dict[str, Param]:
    """The parameters of one decoder layer; ``prefix`` starts their Hugging Face names."""
    hidden, mlp = (config.hidden_size, None), (config.intermediate_size, "mlp")
    heads = (config.num_heads * config.head_dim, "heads")
    kv_heads = (config.num_kv_heads * config.head_dim, "kv_heads")
    # Two residual branches a layer: their sum keeps unit scale at depth (GPT-2's initialisation).
    residual_stddev = 0.02 / (2 * config.num_layers) ** 0.5

    def norm(name: str, size: int = config.hidden_size) -> Param:
        return Param((size,), (None,), f"{prefix}{name}.weight", "ones")

    layer = {
        "input_norm": norm("input_layernorm"),
        "q": matrix(f"{prefix}self_attn.q_proj", hidden, heads),
        "k": matrix(f"{prefix}self_attn.k_proj", hidden, kv_heads),
        "v": matrix(f"{prefix}self_attn.v_proj", hidden, kv_heads),
        "o": matrix(f"{prefix}self_attn.o_proj", heads, hidden, residual_stddev),
        "post_norm": norm("post_attention_layernorm"),
        "gate": matrix(f"{prefix}mlp.gate_proj", hidden, mlp),
        "up": matrix(f"{prefix}mlp.up_proj", hidden, mlp),
        "down": matrix(f"{prefix}mlp.down_proj", mlp, hidden, residual_stddev),
    }
    biased = ("q", "k", "v") * config.qkv_bias + ("o",) * config.output_bias + ("gate", "up", "down") * config.mlp_bias
    for weight in biased:
        declared = layer[weight]
        name = declared.name.removesuffix("weight") + "bias"
        layer[f"{weight}_bias"] = Param(declared.shape[1:], declared.axes[1:], name, "zeros")
    if config.qk_norm:
        layer["q_norm"] = norm("self_attn.q_norm", config.head_dim)
        layer["k_norm"] = norm("self_attn.k_norm", config.head_dim)
    return layer


def initialise(
    declared: Any, key: jax.Array, dtype: Any = jnp.float32, mesh: Mesh | None = None, units: Mapping[str, int] | None = None
) -> Any:
    """Random values of whatever is ``declared``, any pytree of `Param`, in its structure; consumes ``key``.

    On a ``mesh`` they lie as declared; ``units`` as in `sharding.partition`.
    """
    params, tree = jax.tree.flatten(declared)
    keys = jax.random.split(key, len(params))
    values = jax.tree.unflatten(tree, [param.initialise(k, dtype) for param, k in zip(params, keys, strict=True)])
    return values if mesh is None else jax.device_put(values, shardings(declared, mesh, units or {}))


def shardings(declared: Any, mesh: Mesh, units: Mapping[str, int]) -> Any:
    """The `NamedSharding` on ``mesh`` of whatever is ``declared``; ``units`` as in `sharding.partition`."""
    return jax.tree.map(lambda param: sharding.named(mesh, param.axes, units), declared)


def count(params: Params) -> int:
    """Number of scalars in ``params``."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
