"""Published models' configurations by name, to compute with a model without its files.

The sizes are those of each base model's config.json on the Hugging Face hub. Token ids are left out.
"""

import math
from functools import partial
from typing import Any

import jax

from specjax.errors import InputError
from specjax.models.config import MLA, ModelConfig, MoE, Rope
from specjax.models.families import FAMILIES
from specjax.models.params import declare


def _sized(
    family: partial[ModelConfig], hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, head_dim: int
) -> ModelConfig:
    return family(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
    )


def _family(model_type: str, **fields: Any) -> partial[ModelConfig]:
    """Models of that type, with the switches that all of them have."""
    return partial(ModelConfig, model_type=model_type, **FAMILIES[model_type].switches, **fields)


_llama3_rope = partial(Rope, theta=5e5, kind="llama3", original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0)
_LLAMA_2 = _family("llama", vocab_size=32000, max_positions=4096)
_LLAMA_2_32K = partial(_LLAMA_2, max_positions=32768, rope=Rope(kind="linear", factor=8.0, original_max_positions=32768))
_LLAMA_3_1 = _family("llama", vocab_size=128256, max_positions=131072, rope=_llama3_rope(factor=8.0))
_LLAMA_3_2 = partial(_LLAMA_3_1, rope=_llama3_rope(factor=32.0), tie_embeddings=True)
_QWEN: dict[str, Any] = {"norm_eps": 1e-6, "rope": Rope(theta=1e6)}
_QWEN_2_5 = _family("qwen2", **_QWEN, vocab_size=152064, max_positions=131072)
_QWEN_2_5_SMALL = partial(_QWEN_2_5, vocab_size=151936, max_positions=32768, tie_embeddings=True)
_QWEN_3 = _family("qwen3", **_QWEN, vocab_size=151936, max_positions=40960)
_QWEN_3_SMALL = partial(_QWEN_3, tie_embeddings=True)
_MISTRAL = _family("mistral", vocab_size=32768, max_positions=32768, rope=Rope(theta=1e6))

_128_EXPERTS = MoE(num_experts=128, experts_per_token=8, intermediate_size=768, normalise=True)
_QWEN_3_MOE = _family("qwen3_moe", **_QWEN, vocab_size=151936, max_positions=40960, moe=_128_EXPERTS)
_DEEPSEEK_V3 = _family(
    "deepseek_v3",
    vocab_size=129280,
    max_positions=163840,
    norm_eps=1e-6,
    rope=Rope(kind="yarn", factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0),
    mla=MLA(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128),
    moe=MoE(
        num_experts=256,
        experts_per_token=8,
        intermediate_size=2048,
        shared_experts=1,
        scoring="sigmoid",
        normalise=True,
        scale=2.5,
        groups=8,
        groups_kept=4,
        corrected=True,
        dense_layers=(0, 1, 2),
    ),
)

# hidden size, intermediate size, layers, heads, key/value heads, head size
PUBLISHED: dict[str, ModelConfig] = {
    "llama-2-7b": _sized(_LLAMA_2, 4096, 11008, 32, 32, 32, 128),
    "llama-2-7b-32k": _sized(_LLAMA_2_32K, 4096, 11008, 32, 32, 32, 128),
    "llama-2-13b": _sized(_LLAMA_2, 5120, 13824, 40, 40, 40, 128),
    "llama-2-70b": _sized(_LLAMA_2, 8192, 28672, 80, 64, 8, 128),
    "llama-3.1-8b": _sized(_LLAMA_3_1, 4096, 14336, 32, 32, 8, 128),
    "llama-3.1-70b": _sized(_LLAMA_3_1, 8192, 28672, 80, 64, 8, 128),
    "llama-3.2-1b": _sized(_LLAMA_3_2, 2048, 8192, 16, 32, 8, 64),
    "llama-3.2-3b": _sized(_LLAMA_3_2, 3072, 8192, 28, 24, 8, 128),
    "mistral-7b-v0.3": _sized(_MISTRAL, 4096, 14336, 32, 32, 8, 128),
    "qwen2.5-0.5b": _sized(_QWEN_2_5_SMALL, 896, 4864, 24, 14, 2, 64),
    "qwen2.5-7b": _sized(_QWEN_2_5, 3584, 18944, 28, 28, 4, 128),
    "qwen3-0.6b": _sized(_QWEN_3_SMALL, 1024, 3072, 28, 16, 8, 128),
    "qwen3-1.7b": _sized(_QWEN_3_SMALL, 2048, 6144, 28, 16, 8, 128),
    "qwen3-4b": _sized(_QWEN_3_SMALL, 2560, 9728, 36, 32, 8, 128),
    "qwen3-8b": _sized(_QWEN_3, 4096, 12288, 36, 32, 8, 128),
    "qwen3-14b": _sized(_QWEN_3, 5120, 17408, 40, 40, 8, 128),
    "qwen3-32b": _sized(_QWEN_3, 5120, 25600, 64, 64, 8, 128),
    "qwen3-30b-a3b": _sized(_QWEN_3_MOE, 2048, 6144, 48, 32, 4, 128),
    "deepseek-v3": _sized(_DEEPSEEK_V3, 7168, 18432, 61, 128, 128, 64),
}
"""The configurations by lower-case name."""


def published(name: str) -> ModelConfig:
    """The published configuration of that name, in whatever case. Raises `InputError`, which lists the names, when there is
    none."""
    try:
        return PUBLISHED[name.lower()]
    except KeyError:
        raise InputError(f"{name!r} is not a published model known here; known are {', '.join(PUBLISHED)}") from None


def parameter_count(config: ModelConfig) -> int:
    """Number of scalars in a model so configured; an embedding that is also the head counts once."""
    return sum(math.prod(param.shape) for param in jax.tree.leaves(declare(config)))
