"""Published models' configurations by name, to compute with a model without its files.

The sizes are those of each base model's config.json on the Hugging Face hub. Token ids are left
out.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import jax

from specjax.errors import InputError
from specjax.models import config_json
from specjax.models.config import MLA, Indexer, Layer, LinearAttention, ModelConfig, MoE, Rope
from specjax.models.families import FAMILIES, mimo_v2_flash
from specjax.models.families.ropes import FULL, NO_POSITIONS, WINDOWED
from specjax.models.params import declare


def _sized(
    family: partial[ModelConfig],
    hidden: int,
    mlp: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
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
    """Return a factory of configurations of a model type, with the family's switches."""
    return partial(ModelConfig, model_type=model_type, **FAMILIES[model_type].switches, **fields)


def _by_fields(model_type: str, **fields: Any) -> ModelConfig:
    """Return the configuration that a config.json with these fields has."""
    return config_json.parse_config({"model_type": model_type, **fields})


_llama3_rope = partial(
    Rope,
    theta=5e5,
    kind="llama3",
    original_max_positions=8192,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
)
_LLAMA_2 = _family("llama", vocab_size=32000, max_positions=4096)
_LLAMA_2_32K = partial(
    _LLAMA_2,
    max_positions=32768,
    rope=Rope(kind="linear", factor=8.0, original_max_positions=32768),
)
_LLAMA_3_1 = _family(
    "llama", vocab_size=128256, max_positions=131072, rope=_llama3_rope(factor=8.0)
)
_LLAMA_3_2 = partial(_LLAMA_3_1, rope=_llama3_rope(factor=32.0), tie_embeddings=True)
_QWEN: dict[str, Any] = {"norm_eps": 1e-6, "rope": Rope(theta=1e6)}
_QWEN_2_5 = _family("qwen2", **_QWEN, vocab_size=152064, max_positions=131072)
_QWEN_2_5_SMALL = partial(_QWEN_2_5, vocab_size=151936, max_positions=32768, tie_embeddings=True)
_QWEN_3 = _family("qwen3", **_QWEN, vocab_size=151936, max_positions=40960)
_QWEN_3_SMALL = partial(_QWEN_3, tie_embeddings=True)
_MISTRAL = _family("mistral", vocab_size=32768, max_positions=32768, rope=Rope(theta=1e6))

_128_EXPERTS = MoE(num_experts=128, experts_per_token=8, intermediate_size=768, normalise=True)
_QWEN_3_MOE = _family(
    "qwen3_moe", **_QWEN, vocab_size=151936, max_positions=40960, moe=_128_EXPERTS
)
_QWEN_HYBRID: dict[str, Any] = {
    "norm_eps": 1e-6,
    "rope": Rope(theta=1e7, turned=0.25),
    "max_positions": 262144,
}
_QWEN_3_5 = _family("qwen3_5_text", **_QWEN_HYBRID, vocab_size=248320)
_shared_expert = partial(
    MoE, intermediate_size=512, shared_experts=1, shared_gated=True, normalise=True
)
_QWEN_3_5_MOE = _family(
    "qwen3_5_moe_text",
    **_QWEN_HYBRID,
    vocab_size=248320,
    moe=_shared_expert(num_experts=256, experts_per_token=8),
)
_QWEN_3_NEXT = _family(
    "qwen3_next",
    **_QWEN_HYBRID,
    vocab_size=151936,
    moe=_shared_expert(num_experts=512, experts_per_token=10),
)
_DEEPSEEK_V3_MOE = MoE(
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
)
_DEEPSEEK_V3 = _family(
    "deepseek_v3",
    vocab_size=129280,
    max_positions=163840,
    norm_eps=1e-6,
    rope=Rope(
        kind="yarn", factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0
    ),
    mla=MLA(
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    moe=_DEEPSEEK_V3_MOE,
)
_DEEPSEEK_V3_2 = partial(
    _DEEPSEEK_V3, model_type="deepseek_v32", indexer=Indexer(heads=64, head_dim=128, topk=2048)
)
_GLM_5_2 = partial(
    _DEEPSEEK_V3,
    model_type="glm_moe_dsa",
    vocab_size=154880,
    max_positions=1_048_576,
    norm_eps=1e-5,
    rope=Rope(theta=8e6),
    mla=MLA(
        q_lora_rank=2048,
        kv_lora_rank=512,
        qk_nope_head_dim=192,
        qk_rope_head_dim=64,
        v_head_dim=256,
    ),
    moe=replace(_DEEPSEEK_V3_MOE, groups=1, groups_kept=1),
    indexer=Indexer(
        heads=32,
        head_dim=128,
        topk=2048,
        rope_interleaved=True,
        shared_layers=tuple(layer for layer in range(3, 78) if layer % 4 != 2),
    ),
)

_KIMI_K2 = partial(
    _DEEPSEEK_V3,
    vocab_size=163840,
    max_positions=131072,
    rope=Rope(
        theta=5e4,
        kind="yarn",
        factor=32.0,
        original_max_positions=4096,
        beta_fast=1.0,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    moe=MoE(
        num_experts=384,
        experts_per_token=8,
        intermediate_size=2048,
        shared_experts=1,
        scoring="sigmoid",
        normalise=True,
        scale=2.827,
        corrected=True,
        dense_layers=(0,),
    ),
)
_mixtral_experts = partial(MoE, num_experts=8, experts_per_token=2, normalise=True)
_MIXTRAL = _family("mixtral", vocab_size=32000, max_positions=32768, rope=Rope(theta=1e6))
_MINIMAX_M2 = _family(
    "minimax_m2",
    vocab_size=200064,
    max_positions=196608,
    norm_eps=1e-6,
    rope=Rope(theta=5e6, turned=0.5),
    moe=MoE(
        num_experts=256,
        experts_per_token=8,
        intermediate_size=1536,
        scoring="sigmoid",
        normalise=True,
        corrected=True,
    ),
)
_MIMO_V2_FLASH = _family(
    "mimo_v2_flash",
    vocab_size=152576,
    max_positions=262144,
    rope=Rope(theta=1e4, turned=0.334),
    sliding_window=129,
    sinks=True,
    value_dim=128,
    value_scale=0.707,
    moe=MoE(
        num_experts=256,
        experts_per_token=8,
        intermediate_size=2048,
        scoring="sigmoid",
        normalise=True,
        corrected=True,
        dense_layers=(0,),
    ),
)
_MIMO_V2_FULL = Layer(num_kv_heads=4, rope=Rope(theta=5e6, turned=0.334), sinks=False)

_GEMMA_2 = _family(
    "gemma2",
    vocab_size=256000,
    max_positions=8192,
    norm_eps=1e-6,
    score_cap=50.0,
    logit_cap=30.0,
    tie_embeddings=True,
    sliding_window=4096,
)
_GEMMA_3 = _family("gemma3_text", norm_eps=1e-6, tie_embeddings=True, rope=Rope(theta=1e4))
_GEMMA_3_1B = partial(_GEMMA_3, vocab_size=262144, max_positions=32768, sliding_window=512)
_GEMMA_3_LARGE = partial(_GEMMA_3, vocab_size=262208, max_positions=131072, sliding_window=1024)
_GEMMA_3_1B_FULL = Layer(rope=Rope(theta=1e6))
_GEMMA_3_FULL = Layer(
    rope=Rope(theta=1e6, kind="linear", factor=8.0, original_max_positions=131072)
)
_GEMMA_4 = _family(
    "gemma4_text",
    vocab_size=262144,
    norm_eps=1e-6,
    tie_embeddings=True,
    logit_cap=30.0,
    rope=Rope(theta=1e4),
)
_GEMMA_4_SMALL = partial(
    _GEMMA_4,
    max_positions=131072,
    sliding_window=512,
    per_layer_inputs=256,
    per_layer_vocab_size=262144,
)
_GEMMA_4_LARGE = partial(_GEMMA_4, max_positions=262144, sliding_window=1024)
_GEMMA_4_FULL = Layer(head_dim=512, rope=Rope(theta=1e6, kind="proportional", turned=0.25))

_GPT_OSS = _family(
    "gpt_oss",
    vocab_size=201088,
    max_positions=131072,
    qkv_bias=True,
    output_bias=True,
    sliding_window=128,
    rope=Rope(theta=1.5e5, kind="yarn", factor=32.0, original_max_positions=4096, truncate=False),
)
_gpt_oss_experts = partial(
    MoE, experts_per_token=4, intermediate_size=2880, normalise=True, biased=True, limit=7.0
)

_OLMO_3 = _family(
    "olmo3",
    vocab_size=100278,
    max_positions=65536,
    norm_eps=1e-6,
    rope=Rope(theta=5e5),
    sliding_window=4096,
)
_OLMO_3_ROPE = Rope(
    theta=5e5,
    kind="yarn",
    factor=8.0,
    original_max_positions=8192,
    attention_factor=1.2079441541679836,
)
_PHI_4 = _family("phi3", vocab_size=100352, max_positions=16384, rope=Rope(theta=2.5e5))
_SMOLLM_3 = _family(
    "smollm3",
    vocab_size=128256,
    max_positions=65536,
    norm_eps=1e-6,
    rope=Rope(theta=5e6),
    tie_embeddings=True,
)
_GRANITE_3_3 = _family(
    "granite",
    vocab_size=49159,
    max_positions=131072,
    rope=Rope(theta=1e7),
    tie_embeddings=True,
    embedding_scale=12.0,
    embedding_scale_rounded=False,
    attention_scale=0.0078125,
    residual_scale=0.22,
    logit_divisor=16.0,
)
_MINISTRAL_3 = _family(
    "ministral3",
    vocab_size=131072,
    max_positions=262144,
    rope=Rope(
        theta=1e6,
        kind="yarn",
        factor=16.0,
        original_max_positions=16384,
        mscale=1.0,
        mscale_all_dim=1.0,
        query_growth=0.1,
    ),
)
_SEED_OSS = _family(
    "seed_oss",
    vocab_size=155136,
    max_positions=524288,
    norm_eps=1e-6,
    rope=Rope(theta=1e7),
    qkv_bias=True,
)


def _alternating(
    config: ModelConfig, every: int, full: Layer | None = None, shared: int = 0, **changes: Any
) -> ModelConfig:
    """Return ``config`` with sliding windows in all layers except one of ``every``.

    ``full`` has the fields in which the full layers differ. The last ``shared`` layers attend to
    the entries of the last layer of their kind before them.
    """
    count = config.num_layers
    windowed = tuple(layer for layer in range(count) if (layer + 1) % every)
    num_own = count - shared
    layers = [Layer() if full is None or i in windowed else full for i in range(count)]
    for i in range(num_own, count):
        source = max(j for j in range(num_own) if (j in windowed) == (i in windowed))
        layers[i] = replace(layers[i], entries_of=source)
    differing = tuple(layers) if full is not None else ()
    return replace(config, windowed_layers=windowed, layers=differing, **changes)


def _gemma(
    config: ModelConfig, every: int, full: Layer | None = None, shared: int = 0, **changes: Any
) -> ModelConfig:
    return _alternating(
        config, every, full, shared, embedding_scale=config.hidden_size**0.5, **changes
    )


def _wide(config: ModelConfig) -> ModelConfig:
    """Return ``config`` with doubled MLPs in layers without entries (Gemma 4 E2B)."""
    size = 2 * config.intermediate_size
    layers = [
        layer if layer.entries_of is None else replace(layer, intermediate_size=size)
        for layer in config.layers
    ]
    return replace(config, layers=tuple(layers))


def _first_whole(config: ModelConfig, full: Layer) -> ModelConfig:
    """Return ``config`` with windows in all layers except the first and every sixth (MiMo-V2)."""
    kinds = mimo_v2_flash.kinds_of(config.num_layers)
    windowed = tuple(layer for layer, kind in enumerate(kinds) if kind == WINDOWED)
    layers = tuple(full if kind == FULL else Layer() for kind in kinds)
    return replace(config, windowed_layers=windowed, layers=layers)


def _without_positions(config: ModelConfig, every: int) -> ModelConfig:
    """Return ``config`` without RoPE in one layer of ``every``."""
    turned = [bool((layer + 1) % every) for layer in range(config.num_layers)]
    return replace(
        config,
        layers=tuple(Layer() if has_rope else NO_POSITIONS for has_rope in turned),
    )


def _hybrid(
    config: ModelConfig, value_heads: int = 32, by_key_head: bool = False, **changes: Any
) -> ModelConfig:
    """Return ``config`` with linear attention in three layers of four (Qwen3-Next, Qwen3.5)."""
    sizes = LinearAttention(
        key_heads=16, value_heads=value_heads, key_dim=128, value_dim=128, by_key_head=by_key_head
    )
    linear = tuple(layer for layer in range(config.num_layers) if (layer + 1) % 4)
    return replace(config, linear=sizes, linear_layers=linear, **changes)


def _keys_are_values(kv_heads: int) -> Layer:
    return replace(_GEMMA_4_FULL, num_kv_heads=kv_heads, keys_are_values=True)


_GEMMA_4_EXPERTS = MoE(
    num_experts=128, experts_per_token=8, intermediate_size=704, normalise=True, beside_mlp=True
)

# hidden size, intermediate size, layers, heads, key/value heads, head size
PUBLISHED: dict[str, ModelConfig] = {
    "llama-2-7b": _sized(_LLAMA_2, 4096, 11008, 32, 32, 32, 128),
    "llama-2-7b-32k": _sized(_LLAMA_2_32K, 4096, 11008, 32, 32, 32, 128),
    "llama-2-13b": _sized(_LLAMA_2, 5120, 13824, 40, 40, 40, 128),
    "llama-2-70b": _sized(_LLAMA_2, 8192, 28672, 80, 64, 8, 128),
    "llama-3.1-8b": _sized(_LLAMA_3_1, 4096, 14336, 32, 32, 8, 128),
    "llama-3.1-70b": _sized(_LLAMA_3_1, 8192, 28672, 80, 64, 8, 128),
    "llama-3.1-405b": _sized(_LLAMA_3_1, 16384, 53248, 126, 128, 8, 128),
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
    "qwen3-next-80b-a3b": _hybrid(
        _sized(_QWEN_3_NEXT, 2048, 5120, 48, 16, 2, 256), by_key_head=True
    ),
    "qwen3.5-4b": _hybrid(_sized(_QWEN_3_5, 2560, 9216, 32, 16, 4, 256), tie_embeddings=True),
    "qwen3.5-9b": _hybrid(_sized(_QWEN_3_5, 4096, 12288, 32, 16, 4, 256)),
    "qwen3.5-27b": _hybrid(_sized(_QWEN_3_5, 5120, 17408, 64, 24, 4, 256), value_heads=48),
    "qwen3.5-35b-a3b": _hybrid(_sized(_QWEN_3_5_MOE, 2048, 5632, 40, 16, 2, 256)),
    "deepseek-v3": _sized(_DEEPSEEK_V3, 7168, 18432, 61, 128, 128, 64),
    "deepseek-v3.2": _sized(_DEEPSEEK_V3_2, 7168, 18432, 61, 128, 128, 64),
    "glm-5.2": _sized(_GLM_5_2, 6144, 12288, 78, 64, 64, 64),
    "gemma-2-2b": _gemma(_sized(_GEMMA_2, 2304, 9216, 26, 8, 4, 256), 2, attention_scale=256**-0.5),
    "gemma-2-9b": _gemma(
        _sized(_GEMMA_2, 3584, 14336, 42, 16, 8, 256), 2, attention_scale=256**-0.5
    ),
    "gemma-2-27b": _gemma(
        _sized(_GEMMA_2, 4608, 36864, 46, 32, 16, 128), 2, attention_scale=144**-0.5
    ),
    "gemma-3-1b": _gemma(
        _sized(_GEMMA_3_1B, 1152, 6912, 26, 4, 1, 256),
        6,
        _GEMMA_3_1B_FULL,
        attention_scale=256**-0.5,
    ),
    "gemma-3-4b": _gemma(
        _sized(_GEMMA_3_LARGE, 2560, 10240, 34, 8, 4, 256),
        6,
        _GEMMA_3_FULL,
        attention_scale=256**-0.5,
    ),
    "gemma-3-12b": _gemma(
        _sized(_GEMMA_3_LARGE, 3840, 15360, 48, 16, 8, 256),
        6,
        _GEMMA_3_FULL,
        attention_scale=256**-0.5,
    ),
    "gemma-3-27b": _gemma(
        _sized(_GEMMA_3_LARGE, 5376, 21504, 62, 32, 16, 128),
        6,
        _GEMMA_3_FULL,
        attention_scale=168**-0.5,
    ),
    "gemma-4-e2b": _wide(
        _gemma(_sized(_GEMMA_4_SMALL, 1536, 6144, 35, 8, 1, 256), 5, _GEMMA_4_FULL, shared=20)
    ),
    "gemma-4-e4b": _gemma(
        _sized(_GEMMA_4_SMALL, 2560, 10240, 42, 8, 2, 256), 6, _GEMMA_4_FULL, shared=18
    ),
    "gemma-4-12b": _gemma(
        _sized(_GEMMA_4_LARGE, 3840, 15360, 48, 16, 8, 256), 6, _keys_are_values(kv_heads=1)
    ),
    "gemma-4-26b-a4b": _gemma(
        _sized(_GEMMA_4_LARGE, 2816, 2112, 30, 16, 8, 256),
        6,
        _keys_are_values(kv_heads=2),
        moe=_GEMMA_4_EXPERTS,
    ),
    "gemma-4-31b": _gemma(
        _sized(_GEMMA_4_LARGE, 5376, 21504, 60, 32, 16, 256), 6, _keys_are_values(kv_heads=4)
    ),
    "gpt-oss-20b": _alternating(
        _sized(_GPT_OSS, 2880, 2880, 24, 64, 8, 64), 2, moe=_gpt_oss_experts(32)
    ),
    "gpt-oss-120b": _alternating(
        _sized(_GPT_OSS, 2880, 2880, 36, 64, 8, 64), 2, moe=_gpt_oss_experts(128)
    ),
    "olmo-3-7b": _alternating(
        _sized(_OLMO_3, 4096, 11008, 32, 32, 32, 128), 4, Layer(rope=_OLMO_3_ROPE)
    ),
    "olmo-3-32b": _alternating(
        _sized(_OLMO_3, 5120, 27648, 64, 40, 8, 128), 4, Layer(rope=_OLMO_3_ROPE)
    ),
    "phi-4": _sized(_PHI_4, 5120, 17920, 40, 40, 10, 128),
    "smollm3-3b": _without_positions(_sized(_SMOLLM_3, 2048, 11008, 36, 16, 4, 128), 4),
    "granite-3.3-8b": _sized(_GRANITE_3_3, 4096, 12800, 40, 32, 8, 128),
    "ministral-3-3b": _sized(
        partial(_MINISTRAL_3, tie_embeddings=True), 3072, 9216, 26, 32, 8, 128
    ),
    "ministral-3-8b": _sized(_MINISTRAL_3, 4096, 14336, 34, 32, 8, 128),
    "seed-oss-36b": _sized(_SEED_OSS, 5120, 27648, 64, 80, 8, 128),
    "kimi-k2": _sized(_KIMI_K2, 7168, 18432, 61, 64, 64, 64),
    "mixtral-8x7b": _sized(
        partial(_MIXTRAL, moe=_mixtral_experts(intermediate_size=14336)),
        4096,
        14336,
        32,
        32,
        8,
        128,
    ),
    "minimax-m2.5": _sized(_MINIMAX_M2, 3072, 1536, 62, 48, 8, 128),
    "mimo-v2-flash": _first_whole(
        _sized(_MIMO_V2_FLASH, 4096, 16384, 48, 64, 8, 192), _MIMO_V2_FULL
    ),
    # By the fields of their files, where these differ from the defaults of transformers.
    "glm-4.5-air": _by_fields(
        "glm4_moe",
        vocab_size=151552,
        hidden_size=4096,
        intermediate_size=10944,
        num_hidden_layers=46,
        num_attention_heads=96,
        num_key_value_heads=8,
        head_dim=128,
        attention_bias=True,
        partial_rotary_factor=0.5,
        rope_theta=1e6,
        n_routed_experts=128,
        num_experts_per_tok=8,
        moe_intermediate_size=1408,
        first_k_dense_replace=1,
        routed_scaling_factor=1.0,
    ),
    "nemotron-3-nano-30b-a3b": _by_fields(
        "nemotron_h",
        vocab_size=131072,
        hidden_size=2688,
        intermediate_size=1856,
        hybrid_override_pattern="MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        num_hidden_layers=52,
        num_attention_heads=32,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=262144,
        mamba_num_heads=64,
        mamba_head_dim=64,
        ssm_state_size=128,
        n_groups=8,
        n_routed_experts=128,
        n_shared_experts=1,
        num_experts_per_tok=6,
        moe_intermediate_size=1856,
        moe_shared_expert_intermediate_size=3712,
        routed_scaling_factor=2.5,
    ),
    "lfm2-1.2b": _by_fields(
        "lfm2",
        vocab_size=65536,
        hidden_size=2048,
        block_ff_dim=12288,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        full_attn_idxs=[2, 5, 8, 10, 12, 14],
    ),
    # Its last layer has attention, too.
    "kimi-linear-48b-a3b": _by_fields(
        "kimi_linear",
        layer_types=[
            "full_attention" if layer % 4 == 3 or layer == 26 else "linear_attention"
            for layer in range(27)
        ],
    ),
}
"""The configurations by lower-case name."""


def published(name: str) -> ModelConfig:
    """Return the published configuration of that name, in any case.

    Raises:
        InputError: There is none. The message lists the names.
    """
    try:
        return PUBLISHED[name.lower()]
    except KeyError:
        raise InputError(
            f"{name!r} is not a published model known here; known are {', '.join(PUBLISHED)}"
        ) from None


def parameter_count(config: ModelConfig) -> int:
    """Return the number of scalars in a model; a tied embedding counts once."""
    return sum(math.prod(param.shape) for param in jax.tree.leaves(declare(config)))
