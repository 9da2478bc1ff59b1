"""Small random models of every family, made by transformers.

They are the oracle of what a family computes and of how it is stored.
"""

import copy
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 37
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
_WINDOWED, _FULL = "sliding_attention", "full_attention"
_YARN = {
    "rope_type": "yarn",
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 16,
}
_GEMMA4 = SIZES | {
    "sliding_window": 5,
    "num_hidden_layers": 6,
    "layer_types": [_WINDOWED, _WINDOWED, _FULL] * 2,
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
}

_HYBRID = SIZES | {
    "initializer_range": 0.12,
    "max_position_embeddings": 1024,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_OLMO_HYBRID = {name: value for name, value in _HYBRID.items() if name != "head_dim"} | {
    "layer_types": ["linear_attention", _FULL] * 2,
    # transformers splits the convolution's tensor into three equal ones when it saves a model.
    "linear_key_head_dim": 12,
}
_SHARED_EXPERT = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 24,
}

_MAMBA2 = SIZES | {
    "max_position_embeddings": 1024,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 10,
}
_MAMBA2_ALONE = {name: SIZES[name] for name in SIZES if name != "num_hidden_layers"} | {
    "max_position_embeddings": 1024,
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 10,
    "time_step_min": 1e-9,  # transformers raises smaller steps to it in prompts alone
}
_CONVOLUTIONS = SIZES | {
    "max_position_embeddings": 1024,
    "layer_types": ["conv", _FULL, "conv", "conv"],
}
GROUPED_EXPERTS = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
FIRST_DENSE = {"n_shared_experts": 1, "first_k_dense_replace": 1}
LATENT = {name: value for name, value in SIZES.items() if name != "head_dim"} | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 6,
    "q_lora_rank": 10,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
INDEXED = (
    LATENT
    | GROUPED_EXPERTS
    | {"index_n_heads": 9, "index_head_dim": 12, "index_topk": 8, "pad_token_id": None}
)
"""Layers whose indexer selects keys, fewer than the texts of tests have.

A padding token would have an embedding of zeros, and so equal scores of all keys.
"""
VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
"""A vision tower that no text meets."""

STEP_VISION: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 14,
}
"""The vision tower of a Step-3.7."""

MUSE_VISION: dict[str, Any] = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
"""The vision tower of a Muse Glimmer."""

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2",
        SIZES
        | {
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        SIZES
        | {
            "sliding_window": 5,
            "layer_types": [_WINDOWED, _WINDOWED, _FULL, _WINDOWED],
            "query_pre_attn_scalar": 12,
            "rope_parameters": {
                _FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                _WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "gemma4": ("Gemma4Text", _GEMMA4),
    "gemma4 E2B": (
        "Gemma4Text",
        _GEMMA4
        | {
            "hidden_size_per_layer_input": 6,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
        },
    ),
    "gemma4 31B": (
        "Gemma4Text",
        _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gemma4 26B-A4B": (
        "Gemma4Text",
        _GEMMA4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
        },
    ),
    "gpt_oss": (
        "GptOss",
        SIZES
        | {
            "sliding_window": 5,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,
            "rope_parameters": _YARN | {"rope_theta": 150_000.0, "truncate": False},
        },
    ),
    "olmo3": (
        "Olmo3",
        SIZES
        | {
            "sliding_window": 5,
            "layer_types": [_WINDOWED, _WINDOWED, _FULL, _WINDOWED],
            "rope_parameters": {
                _FULL: _YARN | {"rope_theta": 500_000.0, "attention_factor": 1.2},
                _WINDOWED: {"rope_type": "default", "rope_theta": 500_000.0},
            },
        },
    ),
    "phi3": ("Phi3", SIZES | {"sliding_window": 9}),
    "phi3 turned in part": (
        "Phi3",
        SIZES
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 250_000.0,
                "partial_rotary_factor": 0.75,
            }
        },
    ),
    "smollm3": (
        "SmolLM3",
        SIZES
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
            "no_rope_layer_interval": 4,
        },
    ),
    "smollm3 with windows": (
        "SmolLM3",
        SIZES
        | {
            "no_rope_layers": [1, 0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "mlp_bias": True,
        },
    ),
    "granite": (
        "Granite",
        SIZES
        | {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 0.5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "ministral3": (
        "Ministral3",
        SIZES
        | {
            "rope_parameters": (
                _YARN
                | {
                    "rope_theta": 1e6,
                    "mscale": 1.0,
                    "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.5,
                }
            )
        },
    ),
    "qwen3_5": ("Qwen3_5Text", _HYBRID),
    "qwen3_5 with biases": (
        "Qwen3_5Text",
        _HYBRID
        | {
            "attention_bias": True,
            "layer_types": ["linear_attention", _FULL] * 2,
            "linear_conv_kernel_dim": 3,
        },
    ),
    "qwen3_5_moe": ("Qwen3_5MoeText", _HYBRID | _SHARED_EXPERT),
    "qwen3_next": ("Qwen3Next", _HYBRID | _SHARED_EXPERT | {"mlp_only_layers": [1]}),
    "seed_oss": ("SeedOss", SIZES),
    "seed_oss with other biases": (
        "SeedOss",
        SIZES | {"attention_bias": False, "attention_out_bias": True, "mlp_bias": True},
    ),
    "kimi_k2": (
        "DeepseekV3",
        LATENT
        | GROUPED_EXPERTS
        | FIRST_DENSE
        | {
            "n_group": 1,
            "topk_group": 1,
            "rope_parameters": _YARN
            | {"rope_theta": 50_000.0, "beta_fast": 1.0, "mscale": 1.0}
            | {"mscale_all_dim": 1.0},
        },
    ),
    "mixtral": ("Mixtral", SIZES | {"num_local_experts": 6, "sliding_window": 9}),
    "glm4": (
        "Glm4",
        SIZES
        | {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
            }
        },
    ),
    "glm4_moe": ("Glm4Moe", SIZES | GROUPED_EXPERTS | FIRST_DENSE | {"use_qk_norm": True}),
    "glm4_moe with biases": (
        "Glm4Moe",
        SIZES
        | GROUPED_EXPERTS
        | FIRST_DENSE
        | {"attention_bias": True, "n_group": 1, "topk_group": 1},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {
            "text_config": SIZES
            | {"rope_parameters": {"rope_theta": 5e6, "mrope_section": [1, 2, 1]}},
            "vision_config": VISION,
        },
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "text_config": SIZES
            | {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
            "vision_config": VISION,
        },
    ),
    "minimax_m2": (
        "MiniMaxM2",
        SIZES | {"num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 4},
    ),
    "ernie4_5": ("Ernie4_5", SIZES | {"use_bias": True}),
    "hunyuan_v1_dense": (
        "HunYuanDenseV1",
        SIZES
        | {
            "rope_parameters": {
                "rope_type": "dynamic",
                "alpha": 50.0,
                "factor": 1.0,
                "rope_theta": 1e4,
            }
        },
    ),
    "hunyuan_v1_moe": (
        "HunYuanMoEV1",
        SIZES | {"num_experts": 6, "moe_topk": 2, "attention_bias": True},
    ),
    "exaone4": ("Exaone4", SIZES | {"sliding_window": 5}),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        SIZES
        | {
            "moe_num_experts": 6,
            "moe_k": 2,
            "moe_intermediate_size": 12,
            "moe_layer_interval": 2,
            "hidden_size": 32,
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        LATENT
        | GROUPED_EXPERTS
        | {"mlp_layer_types": ["dense", "sparse", "dense", "sparse"], "attention_bias": True},
    ),
    "deepseek_v32": (
        "DeepseekV32",
        INDEXED
        | {"first_k_dense_replace": 1, "num_hidden_layers": 3}
        | {
            "rope_parameters": _YARN
            | {"rope_theta": 1e4, "beta_fast": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0}
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        INDEXED
        | {
            "mlp_layer_types": ["dense", "sparse", "dense", "sparse"],
            "indexer_types": ["full", "shared", "full", "shared"],
            "attention_bias": True,
        },
    ),
    "llama4": (
        "Llama4Text",
        SIZES
        | {
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "num_local_experts": 6,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 1, 0, 1],
            "attention_chunk_size": 7,
            "floor_scale": 5,
            "attn_scale": 0.5,
        },
    ),
    "bamba": (
        "Bamba",
        _MAMBA2
        | {"attn_layer_indices": [1, 3], "mlp_bias": True, "mamba_n_groups": 2}
        | {"mamba_proj_bias": True},
    ),
    "falcon_h1": (
        "FalconH1",
        _MAMBA2
        | {
            "mamba_d_ssm": 64,
            "mamba_n_groups": 2,
            "mamba_rms_norm": True,
            "mamba_norm_before_gate": False,
            "mamba_proj_bias": True,
            "embedding_multiplier": 5.0,
            "lm_head_multiplier": 1.9,
            "attention_in_multiplier": 1.5,
            "attention_out_multiplier": 0.9,
            "key_multiplier": 0.7,
            "ssm_in_multiplier": 1.25,
            "ssm_out_multiplier": 0.3,
            "ssm_multipliers": [0.9, 0.8, 0.7, 0.6, 0.5],
            "mlp_multipliers": [0.8, 0.4],
        },
    ),
    "falcon_h1 with other norms": (
        "FalconH1",
        _MAMBA2
        | {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 64,
            "mamba_rms_norm": True,
            "projectors_bias": True,
            "attention_bias": True,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        _MAMBA2
        | {
            "embedding_multiplier": 12.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.22,
            "logits_scaling": 0.5,
            "layer_types": ["linear_attention", _FULL, "linear_attention", _FULL],
            "num_local_experts": 6,
            "intermediate_size": 12,
            "shared_intermediate_size": 24,
            "attention_bias": True,
        },
    ),
    "granitemoehybrid without experts": (
        "GraniteMoeHybrid",
        _MAMBA2
        | {
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", _FULL],
            "num_local_experts": 0,
            "shared_intermediate_size": 24,
            "position_embedding_type": "rope",
        },
    ),
    "nemotron_h": (
        "NemotronH",
        _MAMBA2_ALONE | {"layers_block_type": ["linear_attention", "mlp", _FULL, "mlp"]},
    ),
    "nemotron_h with experts": (
        "NemotronH",
        _MAMBA2_ALONE
        | GROUPED_EXPERTS
        | {
            "layers_block_type": ["linear_attention", "moe", _FULL, "linear_attention", "mlp"],
            "moe_shared_expert_intermediate_size": 24,
            "moe_latent_size": 20,
            "use_bias": True,
            "use_conv_bias": False,
        },
    ),
    "lfm2": (
        "Lfm2",
        _CONVOLUTIONS | {"block_multiple_of": 20, "block_ffn_dim_multiplier": 1.3},
    ),
    "lfm2 with biases": (
        "Lfm2",
        _CONVOLUTIONS
        | {"conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False}
        | {"tie_word_embeddings": False},
    ),
    "lfm2_moe": (
        "Lfm2Moe",
        _CONVOLUTIONS
        | {
            "num_dense_layers": 1,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "routed_scaling_factor": 2.5,
        },
    ),
    "olmo_hybrid": ("OlmoHybrid", _OLMO_HYBRID),
    "olmo_hybrid without positions": (
        "OlmoHybrid",
        _OLMO_HYBRID
        | {
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "linear_allow_neg_eigval": False,
            "attention_bias": True,
        },
    ),
    "kimi_linear": (
        "KimiLinear",
        LATENT
        | {
            "max_position_embeddings": 1024,
            "layer_types": ["linear_attention", _FULL, "linear_attention", _FULL],
            "linear_head_dim": 8,
            "linear_num_heads": 3,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "step3p7": (
        "Step3p7",
        {
            "text_config": SIZES
            | {
                "sliding_window": 5,
                "layer_types": [_FULL, _WINDOWED, _WINDOWED, _FULL],
                "num_sliding_attention_heads": 6,
                "n_routed_experts": 6,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 12,
                "share_expert_dim": 24,
                "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
                "moe_router_scaling_factor": 2.5,
                "swiglu_limits": [0.0, 0.05, None, 0.0],
                "swiglu_limits_shared": [0.4, 0.2, None, 0.0],
                "rope_parameters": {
                    _FULL: {
                        "rope_type": "llama3",
                        "rope_theta": 5e6,
                        "partial_rotary_factor": 0.5,
                        "factor": 2.0,
                        "low_freq_factor": 1.0,
                        "high_freq_factor": 32.0,
                        "original_max_position_embeddings": 64,
                    },
                    _WINDOWED: {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            "vision_config": STEP_VISION,
        },
    ),
    "muse_glimmer": (
        "MuseGlimmer",
        {
            "text_config": SIZES
            | {
                "sliding_window": 5,
                "num_hidden_layers": 5,
                "final_logit_softcapping": 3.0,
                "qk_scale_factor": 1.5,
                "output_multiplier": 0.4,
                "post_norm_eps": 1e-3,
                "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
            },
            "vision_config": MUSE_VISION,
        },
    ),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        {name: value for name, value in SIZES.items() if name != "head_dim"}
        | GROUPED_EXPERTS
        | {
            "head_dim": 12,
            "v_head_dim": 8,
            "num_key_value_heads": 1,
            "sliding_window": 5,
            "num_hidden_layers": 6,
        },
    ),
}
"""Models by name, as the name of the configuration's class, without "Config", and its fields."""

FULL_ALONE = (
    "kimi_k2",
    "mixtral",
    "glm4_moe",
    "glm4_moe with biases",
    "qwen3_vl",
    "qwen3_vl_moe",
    "ernie4_5",
    "hunyuan_v1_moe",
    "ernie4_5_moe",
    "glm4_moe_lite",
    "glm_moe_dsa",
    "exaone4",
    "granitemoehybrid",
    "muse_glimmer",
    "nemotron_h with experts",
    "falcon_h1",
    "lfm2_moe",
    "step3p7",
    "olmo_hybrid",
    "kimi_linear",
)
"""Models whose kinds of layers are those of others: `make test` leaves them out."""


ONE_OF_EACH_KIND = (
    *("gemma2", "gemma4 E2B", "gpt_oss", "olmo3", "qwen3_5", "qwen3_next", "kimi_k2", "mixtral"),
    *("glm4", "glm4_moe_lite", "qwen3_vl_moe", "minimax_m2", "hunyuan_v1_dense", "deepseek_v32"),
    *("glm_moe_dsa", "granitemoehybrid", "falcon_h1", "nemotron_h with experts", "lfm2_moe"),
    *("olmo_hybrid", "kimi_linear", "step3p7", "mimo_v2_flash", "muse_glimmer"),
)
"""One model of each kind of layer. In some tests the others are thorough."""

THOROUGH_ALONE = (
    "olmo_hybrid without positions",
    "lfm2 with biases",
    "granitemoehybrid without experts",
    "bamba",
    "falcon_h1 with other norms",
)
"""Models that differ from others of `FULL_ALONE` in the names and switches of their files alone."""


def case(values: Any, name: str) -> Any:
    """Return a case of a parametrized test, in the tier of the model of ``name``."""
    import pytest

    values = values if isinstance(values, tuple) else (values,)
    marks = [pytest.mark.full] * (name in FULL_ALONE)
    marks += [pytest.mark.thorough] * (name in THOROUGH_ALONE)
    return pytest.param(*values, marks=marks)


def cases(*fast: str) -> list[Any]:
    """Return the names of all models, to parametrize tests.

    Some are in the full tier alone, but none of ``fast`` is.
    """
    return [name if name in fast else case(name, name) for name in MODELS]


def model_type(name: str) -> str:
    """Return the ``model_type`` in the config.json of the model of that name."""
    import transformers

    return getattr(transformers, f"{MODELS[name][0]}Config").model_type


def make(name: str, seed: int = 0) -> Any:
    """Return the model of that name in float32, whose norms, biases and scales are random."""
    return build(*MODELS[name], seed)


def build(kind: str, fields: dict[str, Any], seed: int = 0) -> Any:
    """Return a model of the class that begins with ``kind``, with these fields."""
    import transformers

    from tests.with_torch import torch

    # A copy, because transformers writes to the fields.
    config = getattr(transformers, f"{kind}Config")(**copy.deepcopy(fields))
    config._attn_implementation = "eager"
    # GLM-4's default would be beyond the vocabulary.
    config.eos_token_id = fields.get("eos_token_id")
    torch.manual_seed(seed)
    model = model_class(kind)(config).eval()
    disturb(model)
    return model


def model_class(kind: str) -> Any:
    """Return the class of text models of that name; if there is none, the one that sees as well."""
    import transformers

    causal = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM", None)
    return causal or getattr(transformers, f"{kind}ForConditionalGeneration")


def disturb(model: Any) -> None:
    """Move norms, biases and scales away from their initial values."""
    from tests.with_torch import torch

    parts = (
        "norm",
        "bias",
        "A_log",
        ".D",
        "router.scale",
        "per_expert_scale",
        "layer_scalar",
        "sinks",
    )
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            if any(part in name for part in parts):
                value.add_(torch.randn_like(value) * 0.3)


def save(name: str, directory: Path, seed: int = 0) -> Any:
    """Make the model, save it to ``directory``, and return it."""
    model = make(name, seed)
    model.save_pretrained(directory)
    return model


def logits(model: Any, tokens: Any) -> Any:
    """Return the model's logits ``[B, T, V]`` after each of ``tokens [B, T]``, in numpy."""
    from tests.with_torch import torch

    with torch.no_grad():
        return model(torch.tensor(tokens)).logits.numpy()


CLOSE = 1e-5
"""The distance of the last selected score and the next one below which rounding decides."""


def selected_keys(model: Any) -> int:
    """Return how many keys an indexer selects; more than any text has if a model has none."""
    return getattr(model.config.get_text_config(), "index_topk", sys.maxsize)


def open_selections(model: Any, tokens: Any) -> list[Any]:
    """Return for each indexer of a model ``[B, T]`` bool: for which tokens rounding selects keys.

    The last selected score and the next one are then nearly equal, or equal, as zeros often are.
    """
    import numpy as np
    import pytest

    from tests.with_torch import torch

    length, selections, select = len(tokens[0]), [], torch.Tensor.topk
    topk = selected_keys(model)

    def recording(scores: Any, count: int, *args: Any, **options: Any) -> Any:
        # Routers select as well, among experts.
        if scores.shape[1:] == (length, length) and count == topk:
            best = select(scores, count + 1, *args, **options).values.numpy()
            sees_more = np.arange(length) >= topk
            selections.append((best[..., -2] - best[..., -1] < CLOSE) & sees_more)
        return select(scores, count, *args, **options)

    if topk >= length:
        return [np.zeros((len(tokens), length), bool)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "topk", recording)
        logits(model, tokens)
    return selections
