"""A table of changed config.json files: every field of every family, one at a time.

The table is made from transformers' configuration classes, so that it has the fields that a new
version adds. A field is changed as its type allows. `outcome` compares what transformers' model and
ours make of a changed file. The weights are those of transformers' model of that file.
"""

import ast
import copy
import dataclasses
import functools
import inspect
import json
import logging
import math
import tempfile
import typing
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from specjax.models import config_json
from specjax.models.config import ModelConfig
from specjax.models.fields import CheckpointError
from specjax.models.transformer import Target
from tests.models.families import zoo

LENGTH = 40
"""The length of the text: longer than the windows, and than the original context of a RoPE."""

ABSENT = object()
"""The value of a field that is left out."""

_FULL, _WINDOWED, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_SIZES = zoo.SIZES | {"num_hidden_layers": 2}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_HYBRID = _SIZES | {
    "initializer_range": 0.12,
    "head_dim": 16,
    "layer_types": [_LINEAR, _FULL],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
_MAMBA2 = _SIZES | {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 10}
_DEEPSEEK = zoo.LATENT | zoo.GROUPED_EXPERTS | zoo.FIRST_DENSE | {"num_hidden_layers": 2}
_INDEXED = zoo.INDEXED | zoo.FIRST_DENSE | {"num_hidden_layers": 2}
_NEMOTRON_H = _SIZES | {
    "mamba_num_heads": 6,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 10,
    "time_step_min": 1e-9,
}
_GEMMA4 = _SIZES | {
    "sliding_window": 5,
    "layer_types": [_WINDOWED, _FULL],
    "global_head_dim": 16,
    "hidden_size_per_layer_input": 6,
    "vocab_size_per_layer_input": zoo.VOCABULARY,
    "final_logit_softcapping": 3.0,
}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES),
    "mistral": ("Mistral", _SIZES | {"sliding_window": 9}),
    "ministral3": ("Ministral3", _SIZES | {"sliding_window": 9}),
    "qwen2": (
        "Qwen2",
        _SIZES | {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (
        "Qwen3",
        _SIZES
        | {
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": [_WINDOWED, _FULL],
        },
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        _SIZES
        | _EXPERTS
        | {"use_sliding_window": True, "sliding_window": 9, "mlp_only_layers": [1]},
    ),
    "qwen3_next": (
        "Qwen3Next",
        _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 24, "mlp_only_layers": [1]},
    ),
    "qwen3_5_text": ("Qwen3_5Text", _HYBRID),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeText",
        _HYBRID | _EXPERTS | {"shared_expert_intermediate_size": 24},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        _DEEPSEEK,
    ),
    "deepseek_v32": ("DeepseekV32", _INDEXED),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        _INDEXED | {"indexer_types": ["full", "shared"], "mlp_layer_types": ["dense", "sparse"]},
    ),
    "gemma2": (
        "Gemma2",
        _SIZES
        | {
            "sliding_window": 5,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3_text": (
        "Gemma3Text",
        _SIZES
        | {
            "sliding_window": 5,
            "layer_types": [_WINDOWED, _FULL],
            "query_pre_attn_scalar": 12,
        },
    ),
    "gemma4_text": ("Gemma4Text", _GEMMA4),
    "gemma4_text with experts": (
        "Gemma4Text",
        _GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 12,
        }
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    ),
    "gpt_oss": (
        "GptOss",
        _SIZES
        | {
            "sliding_window": 5,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "swiglu_limit": 1.0,
        },
    ),
    "olmo3": ("Olmo3", _SIZES | {"sliding_window": 5, "layer_types": [_WINDOWED, _FULL]}),
    "phi3": ("Phi3", _SIZES | {"sliding_window": 9}),
    "smollm3": (
        "SmolLM3",
        _SIZES | {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9},
    ),
    "granite": (
        "Granite",
        _SIZES | {"embedding_multiplier": 12.0, "attention_multiplier": 0.2, "logits_scaling": 0.5},
    ),
    "seed_oss": ("SeedOss", _SIZES),
    "llama4_text": (
        "Llama4Text",
        _SIZES
        | {
            "intermediate_size": 24,
            "intermediate_size_mlp": 48,
            "num_local_experts": 6,
            "moe_layers": [1],
            "no_rope_layers": [1, 0],
            "attention_chunk_size": 7,
            "floor_scale": 5,
        },
    ),
    "mixtral": ("Mixtral", _SIZES | {"num_local_experts": 6, "sliding_window": 9}),
    "glm4": ("Glm4", _SIZES),
    "glm4_moe": ("Glm4Moe", _SIZES | zoo.GROUPED_EXPERTS | zoo.FIRST_DENSE | {"use_qk_norm": True}),
    "minimax_m2": ("MiniMaxM2", _SIZES | {"num_local_experts": 6, "num_experts_per_tok": 2}),
    "ernie4_5": ("Ernie4_5", _SIZES),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        _SIZES | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 12},
    ),
    "glm4_moe_lite": (
        "Glm4MoeLite",
        zoo.LATENT | zoo.GROUPED_EXPERTS | {"num_hidden_layers": 2},
    ),
    "hunyuan_v1_dense": ("HunYuanDenseV1", _SIZES),
    "hunyuan_v1_moe": ("HunYuanMoEV1", _SIZES | {"num_experts": 6, "moe_topk": 2}),
    "exaone4": ("Exaone4", _SIZES | {"sliding_window": 5, "layer_types": [_WINDOWED, _FULL]}),
    "mimo_v2_flash": (
        "MiMoV2Flash",
        _SIZES
        | zoo.GROUPED_EXPERTS
        | {
            "head_dim": 12,
            "v_head_dim": 8,
            "num_key_value_heads": 1,
            "sliding_window": 5,
            "layer_types": [_WINDOWED, _FULL],
        },
    ),
    "nemotron_h": (
        "NemotronH",
        _NEMOTRON_H
        | zoo.GROUPED_EXPERTS
        | {
            "layers_block_type": [_LINEAR, "moe", _FULL],
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        _MAMBA2
        | {
            "layer_types": [_LINEAR, _FULL],
            "num_local_experts": 6,
            "intermediate_size": 12,
            "shared_intermediate_size": 24,
            "position_embedding_type": "rope",
        },
    ),
    "bamba": ("Bamba", _MAMBA2 | {"attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", _MAMBA2 | {"mamba_d_ssm": 64}),
    "lfm2": ("Lfm2", _SIZES | {"layer_types": ["conv", _FULL], "block_multiple_of": 20}),
    "lfm2_moe": (
        "Lfm2Moe",
        _SIZES | _EXPERTS | {"layer_types": ["conv", _FULL], "num_dense_layers": 1},
    ),
    "olmo_hybrid": (
        "OlmoHybrid",
        {name: value for name, value in _HYBRID.items() if name != "head_dim"}
        | {"linear_key_head_dim": 12},
    ),
    "kimi_linear": (
        "KimiLinear",
        zoo.LATENT
        | {
            "num_hidden_layers": 2,
            "layer_types": [_LINEAR, _FULL],
            "linear_head_dim": 8,
            "linear_num_heads": 3,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "step3p7": (
        "Step3p7",
        _SIZES
        | {
            "sliding_window": 5,
            "layer_types": [_WINDOWED, _FULL],
            "num_sliding_attention_heads": 6,
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 12,
            "share_expert_dim": 24,
            "mlp_layer_types": ["dense", "sparse"],
            "swiglu_limits": [None, 0.05],
            "swiglu_limits_shared": [0.2, None],
        },
    ),
    "muse_glimmer": (
        "MuseGlimmer",
        _SIZES | {"sliding_window": 5, "layer_types": [_WINDOWED, _FULL]},
    ),
    "qwen3_vl": ("Qwen3VL", _SIZES),
    "qwen3_vl_moe": ("Qwen3VLMoe", _SIZES | _EXPERTS | {"mlp_only_layers": [1]}),
    "kimi_k25": ("Kimi_K25", _DEEPSEEK),
    "gemma4_text with shared entries": (
        "Gemma4Text",
        _GEMMA4
        | {"num_hidden_layers": 4, "layer_types": [_WINDOWED, _FULL] * 2}
        | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True},
    ),
    "exaone4 with a pattern": (
        "Exaone4",
        _SIZES | {"sliding_window": 5, "sliding_window_pattern": 2},
    ),
    "ernie4_5_moe with dense layers": (
        "Ernie4_5_Moe",
        _SIZES
        | {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 12, "hidden_size": 32}
        | {"num_hidden_layers": 4, "moe_layer_interval": 2, "moe_layer_start_index": 1},
    ),
    "nemotron_h with an mlp": (
        "NemotronH",
        _NEMOTRON_H | {"layers_block_type": [_LINEAR, "mlp", _FULL]},
    ),
    "falcon_h1 with norms": ("FalconH1", _MAMBA2 | {"mamba_d_ssm": 64, "mamba_rms_norm": True}),
}
"""Small models by name, as a class and the fields of config.json.

The class is that of transformers' configuration, without "Config".
"""

WITH_ANOTHER_SWITCH = (
    "gemma4_text with shared entries",
    "exaone4 with a pattern",
    "ernie4_5_moe with dense layers",
    "nemotron_h with an mlp",
    "falcon_h1 with norms",
)
"""Models of a family with a switch without which some fields mean nothing. RoPEs are not tried."""

SEEING: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_vl": ("Qwen3VLText", zoo.VISION),
    "qwen3_vl_moe": ("Qwen3VLMoeText", zoo.VISION),
    "step3p7": ("Step3p7Text", zoo.STEP_VISION),
    "muse_glimmer": ("MuseGlimmerText", zoo.MUSE_VISION),
    "kimi_k25": (
        "DeepseekV3",
        {
            "hidden_size": 8,
            "intermediate_size": 8,
            "num_attention_heads": 2,
            "num_hidden_layers": 1,
            "pos_emb_height": 2,
            "pos_emb_width": 2,
        },
    ),
}
"""Models that see as well: the class of the text model's configuration, and the vision tower.

The fields that are changed are those of the text model.
"""

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "mscale": 1.2,
    },
    "yarn whose bounds are cut": {
        "rope_type": "yarn",
        "rope_theta": 10.0,
        "factor": 4.0,
        "original_max_position_embeddings": 100_000,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0, 1.5, 2.0, 3.0],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 16,
    },
    "proportional": {"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
}
"""RoPEs of every type. Their keys are changed one at a time, and others are added."""

_ROPE_VALUES: dict[str, list[Any]] = {
    "rope_theta": [500.0],
    "factor": [2.5, 1.0, None],
    "original_max_position_embeddings": [24, 4, None],  # with 4, yarn's bounds meet
    "low_freq_factor": [2.0],
    "high_freq_factor": [3.0, 1.0],
    "beta_fast": [8, 1, 0],
    "beta_slow": [2, 32, 64],
    "attention_factor": [1.3],
    "mscale": [0.7],
    "mscale_all_dim": [0.6],
    "truncate": [False],
    "partial_rotary_factor": [0.5],
    "short_factor": [[1.0, 1.0, 1.0, 1.5]],
    "long_factor": [[1.0, 1.0, 1.0, 1.5]],
    "mrope_section": [[1, 1, 2]],
    "mrope_interleaved": [True, False],
    "llama_4_scaling_beta": [0.4],
    "max_position_embeddings": [64],
    "type": ["default", "linear", "dynamic", "yarn"],
}
# Fields of older files, which today's classes do not have.
_OLDER: dict[str, list[Any]] = {
    "rope_theta": [500.0],
    "rope_scaling": [
        ROPES["linear"],
        ROPES["llama3"],
        {name: value for name, value in ROPES["yarn"].items() if name != "rope_theta"},
        {"type": "linear", "factor": 4.0},
    ],
    "partial_rotary_factor": [0.5],
    "original_max_position_embeddings": [24],
    "rope_local_base_freq": [500.0],
    "sliding_window_pattern": [2, 1],
    "full_attention_interval": [1, 2],
    "global_head_dim": [8],
    "num_global_key_value_heads": [1, 2],
    "rope_type": ["linear"],
    "attention_bias": [True],
    "mlp_bias": [True],
    "qkv_bias": [True],
    "hidden_act": ["gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "swish"],
    "hidden_activation": ["gelu", "silu", "relu"],
    "head_dim": [16],
    "layer_types": [
        [_FULL, _FULL],
        [_WINDOWED, _WINDOWED],
        [_FULL, _WINDOWED],
        [_WINDOWED, _FULL],
        [_LINEAR, _FULL],
        ["conv", _FULL],
    ],
    "sliding_window": [3, None],
    "mlp_only_layers": [[0], [1], [0, 1]],
    "no_rope_layers": [[0, 1], [1, 1], [0, 0]],
    "scoring_func": ["softmax"],
    "topk_method": ["greedy"],
    "tie_word_embeddings": [True],
    "moe_layer_freq": [2],
}
_OLDER_WITH_INDEXERS: dict[str, list[Any]] = {
    "index_topk_freq": [2],
    "index_topk_pattern": ["FS", ["full", "shared"]],
    "index_skip_topk_offset": [0, 1],
    "num_experts": [16],
}
_TEXTS = ["silu", "gelu", "relu2", "other"]
"""Values of fields with text: activations, and what no field means."""
_LARGE = 0.05
"""An epsilon beside which the mean squares of tiny models are not large: it changes logits."""
_BY_NAME: dict[str, list[Any]] = {
    "mlp_layer_types": [["dense", "sparse"], ["sparse", "dense"], ["dense"] * 2, ["sparse"] * 2],
    "mlp_multipliers": [[0.8, 1.0], [1.0, 0.4]],
    "ssm_multipliers": [[1.0] * i + [0.6] + [1.0] * (4 - i) for i in range(5)],
    "time_step_limit": [[0.0, 0.1], [2.0, 3.0], [0.0, {"__float__": "Infinity"}]],
    "full_attn_idxs": [[0], [1], [0, 1]],
    "layers_block_type": [["attention", "mamba"]],
    "layer_rope_theta": [[0, 0], [1e4, 1e4], [0, 1e4], [500.0, 1e4]],
    "per_layer_config": [{"1": {"head_dim": 12}}, {"0": {"sliding_window": 3}}],
    "moe_norm_min": [0.7],
    "gating": [True, False, "per-head", "other"],
    "moe_latent_size": [20],
    "chunk_size": [16],
    "mamba_chunk_size": [16],
    "rms_norm_eps": [_LARGE],
    "layer_norm_epsilon": [_LARGE],
    "layer_norm_eps": [_LARGE],
    "norm_eps": [_LARGE],
    "post_norm_eps": [_LARGE, 0.5],
    "final_logit_softcapping": [1.0],
    "mamba_norm_before_gate": [False],
    "use_bidirectional_attention": [True, "all", "vision"],
}
"""Values of fields whose types say too little, for the families whose class has the field."""
_RARE_ROPES = ("longrope", "proportional", "yarn whose bounds are cut")
_OWN_ROPES = (("phi3", "longrope"), ("gemma4_text", "proportional"))
"""Rare RoPEs whose keys are changed. In other families these RoPEs are tried as they are."""
_NOT_OF_A_MODEL = {
    "dtype",
    "torch_dtype",
    "architectures",
    "transformers_version",
    "id2label",
    "label2id",
    "rope_parameters",
}
_SMALL_BY_DEFAULT = (
    "num_key_value_heads",
    "sliding_window",
    "max_position_embeddings",
    "max_window_layers",
    "pad_token_id",
)
"""Integers whose default does not make a model large."""
TOLERANCE = 1e-4
"""The largest distance from transformers' logits, as a share of the largest if that is above 1."""
OF_ROUNDING = 2.0
"""An error above TOLERANCE is accepted up to this many times transformers' own.

That is the distance between transformers' logits in float32 and in float64.
"""
LARGEST = 2e-3
"""No error is accepted from here on, whatever transformers' own is."""
EFFECT = 10 * TOLERANCE
"""How far a field must move logits: then an error of a model that ignores it is no rounding."""


@dataclass(frozen=True)
class Case:
    """One changed file.

    Attributes:
        family: a name in `FAMILIES`.
        rope: a name in `ROPES`, for the file that is changed; "": it has no ``rope_parameters``.
        name: the changed field, such as ``sliding_window`` or ``rope_parameters.factor``.
        value: its new value, `ABSENT` or any of JSON.
    """

    family: str
    rope: str
    name: str
    value: Any

    def __str__(self) -> str:
        value = "left out" if self.value is ABSENT else json.dumps(self.value)
        return f"{self.family}{self.rope and f' ({self.rope})'}: {self.name}={value}"

    def file(self) -> dict[str, Any]:
        """Return the fields of the changed config.json."""
        fields = _with_rope(self.family, self.rope)
        parents = [fields]
        name = self.name
        if name.startswith("rope_parameters."):
            name = name.removeprefix("rope_parameters.")
            rope = fields["rope_parameters"]
            parents = [rope[_FULL]] if _FULL in rope else [rope]
        for parent in parents:
            parent.pop(name, None)
            if self.value is not ABSENT:
                parent[name] = copy.deepcopy(self.value)
        return _nested(fields)


def examples_by_class() -> dict[str, list[str]]:
    """Return by class of transformers' configurations the names in `FAMILIES`."""
    examples: dict[str, list[str]] = {}
    for name, (kind, _) in FAMILIES.items():
        examples.setdefault(kind, []).append(name)
    return examples


def fields_read_by_class(kind: str) -> set[str]:
    """Return the `fields_read` of all examples of a class."""
    return set().union(*map(fields_read, examples_by_class()[kind]))


def cases(*families: str) -> list[Case]:
    """Return all cases of families, by default of all, in the same order in every run."""
    by_name = {str(case): case for family in families or FAMILIES for case in cases_of(family)}
    return list(by_name.values())


def cases_of(family: str) -> Iterator[Case]:
    """Yield the cases of a family, some of them twice."""
    for name, values in arguments(family).items():
        yield from (Case(family, "", name, value) for value in values)
    for rope, fields in ROPES.items() if family not in WITH_ANOTHER_SWITCH else ():
        yield Case(family, rope, "rope_theta", ABSENT)  # the file as it is
        if rope in _RARE_ROPES and (family.split(maxsplit=1)[0], rope) not in _OWN_ROPES:
            continue
        for name, values in _ROPE_VALUES.items():
            yield from (Case(family, rope, f"rope_parameters.{name}", value) for value in values)
        yield from (Case(family, rope, f"rope_parameters.{name}", ABSENT) for name in fields)
        for name in (
            "rope_theta",
            "rope_scaling",
            "partial_rotary_factor",
            "original_max_position_embeddings",
        ):
            yield from (Case(family, rope, name, value) for value in _OLDER[name])
        yield Case(family, rope, "max_position_embeddings", 64)


def arguments(family: str) -> dict[str, list[Any]]:
    """Return by name the values of every argument of the family's class.

    Fields of older files and of other families are among them.
    """
    _, fields = FAMILIES[family]
    values = _changed(family)
    older = _OLDER | (_OLDER_WITH_INDEXERS if "index_topk" in fields else {})
    for name, changed in older.items():
        values[name] = values.get(name, []) + [
            value for value in changed if value != fields.get(name, ABSENT)
        ]
    kind = _class(family)
    for name in [name for name in _BY_NAME if name in values or hasattr(kind, name)]:
        stated = [value for value in _BY_NAME[name] if value != fields.get(name, ABSENT)]
        values[name] = values.get(name, []) + stated
    for name, value in fields.items():
        if type(value) is not int or name in _SMALL_BY_DEFAULT:
            values[name] = [*values.get(name, []), ABSENT]
    return values


def _changed(family: str) -> dict[str, list[Any]]:
    """Return by name the values of every argument of the family's class.

    They differ from the value in the file.
    """
    kind = _class(family)
    _, fields = FAMILIES[family]
    changed = {}
    for field in dataclasses.fields(kind):
        if field.name.startswith("_") or field.name in _NOT_OF_A_MODEL:
            continue
        default = field.default if field.default is not dataclasses.MISSING else None
        changed[field.name] = _other_values(fields.get(field.name, default), field.type)
    return changed


def _other_values(value: Any, annotation: Any) -> list[Any]:
    """Return other values of the type of ``value``; if it is None, of the annotation's type."""
    kinds = (annotation,)
    if annotation is not None and type(annotation) is not type:
        kinds = typing.get_args(annotation)
    if value is None:
        examples: dict[Any, list[Any]] = {bool: [True], int: [2], float: [1.5], str: ["other"]}
        if typing.get_origin(annotation) is Literal:
            return list(typing.get_args(annotation))
        return [example for kind in kinds for example in examples.get(kind, _literals(kind))]
    null = [None] if type(None) in kinds else []
    if isinstance(value, bool):
        return [not value, *null]
    if isinstance(value, int):
        return [value + 1, 2 * value, *([value // 2] if value > 1 else []), *null]
    if isinstance(value, float):
        return [1.5 * value if value else 0.5, *null]
    if isinstance(value, list | tuple):
        return [*_other_lists(list(value)), *null]
    if isinstance(value, str):
        return [*(text for text in _TEXTS if text != value), *null]
    return null


def _other_lists(value: list[Any]) -> list[list[Any]]:
    """Return lists of the same length as ``value``: each entry changed, and others in its place."""
    lists = [value[::-1], value[:1] * len(value), value[-1:] * len(value)]
    for index, entry in enumerate(value):
        if type(entry) in (int, float):
            lists.append([*value[:index], 1.5 * entry if entry else 0.5, *value[index + 1 :]])
    return [changed for i, changed in enumerate(lists) if changed not in (value, *lists[:i])]


def _literals(kind: Any) -> list[Any]:
    return list(typing.get_args(kind)) if typing.get_origin(kind) is Literal else []


def _class(family: str) -> Any:
    import transformers

    kind = SEEING[family][0] if family in SEEING else FAMILIES[family][0]
    return getattr(transformers, f"{kind}Config")


def _nested(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of config.json; of a model that sees they are those of the text model."""
    if (name := fields["model_type"]) not in SEEING:
        return fields
    text, vision = SEEING[name]
    return {
        "model_type": name,
        "text_config": {**fields, "model_type": _class_type(text)},
        "vision_config": copy.deepcopy(vision),
        "tie_word_embeddings": fields.get("tie_word_embeddings", False),
    }


def unchanged_file(family: str, rope: str = "") -> dict[str, Any]:
    """Return the fields of config.json of a family's small model with a RoPE."""
    return _nested(_with_rope(family, rope))


def _with_rope(family: str, rope: str) -> dict[str, Any]:
    """Return the text model's fields of `unchanged_file`."""
    fields = {"model_type": family.split(maxsplit=1)[0], **copy.deepcopy(FAMILIES[family][1])}
    if rope:
        full = dict(ROPES[rope])
        by_kind = family.split(maxsplit=1)[0] in (
            "gemma3_text",
            "gemma4_text",
            "olmo3",
            "mimo_v2_flash",
            "step3p7",
        )
        windowed = {"rope_type": "default", "rope_theta": 500_000.0 if family == "olmo3" else 1e4}
        fields["rope_parameters"] = {_FULL: full, _WINDOWED: windowed} if by_kind else full
    return fields


# --- the fields that transformers reads -----------------------------------------------------------


def fields_read(family: str) -> set[str]:
    """Return the fields that the modeling code of a family in transformers reads.

    They are the names of attributes of ``config`` in its source, without private ones and methods.
    Fields of other parts of a model, such as a vision tower, are not among them: the text model's
    configuration does not have them.
    """
    kind = FAMILIES[family][0]
    tree = ast.parse(inspect.getsource(inspect.getmodule(zoo.model_class(kind))))
    names = set(filter(None, map(_name_read, ast.walk(tree))))
    config = _class(family)()
    return {_argument_name(family, name) for name in names if _is_field(config, name)}


def _name_read(node: ast.AST) -> str | None:
    """Return the name of a field, if a node of the source reads it from a configuration."""
    match node:
        case ast.Attribute(value=value, attr=name):
            pass
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(name)), *_]):
            pass
        case _:
            return None
    match value:
        case ast.Name(id="config" | "text_config") | ast.Attribute(attr="config" | "text_config"):
            return name
    return None


def _argument_name(family: str, name: str) -> str:
    """Return the name by which the file states a field: some attributes stand for another."""
    if arguments(family).get(name):
        return name
    return getattr(_class(family), "attribute_map", {}).get(name, name)


def _is_field(config: Any, name: str) -> bool:
    """Return whether a file may state an attribute: it is neither private nor a method."""
    try:
        return not name.startswith("_") and not callable(getattr(config, name))
    except AttributeError:
        return False
    except Exception:  # Gemma 4's configurations refuse what differs between layers
        return True


def changes_logits(family: str, name: str) -> bool:
    """Return whether some value of a field in the table changes transformers' logits."""
    return any(_changes_logits(Case(family, "", name, value)) for value in arguments(family)[name])


def has_effect(family: str, name: str) -> bool:
    """Return whether some case of a field that both sides read changes transformers' logits.

    If they read none, it is enough that one is refused here.
    """
    is_read, is_refused = False, False
    for case in cases_of(family):
        if case.name != name and not case.name.startswith(f"{name}."):
            continue
        if _is_refused(case):
            is_refused = True
        elif (change := _change(case)) is not None:
            if change > EFFECT:
                return True
            is_read = True
    return is_refused and not is_read


def _is_refused(case: Case) -> bool:
    try:
        config_json.parse_config(case.file())
    except CheckpointError:
        return True
    return False


def _changes_logits(case: Case) -> bool:
    """Return whether transformers reads the file, and gives other logits than for the unchanged."""
    change = _change(case)
    return change is not None and change > EFFECT


def _change(case: Case) -> float | None:
    """Return how far transformers' logits are from those of the unchanged file, see `_scale`.

    It is infinite if their number changes, and None if transformers does not read one of the files,
    or gives NaN.
    """
    before, theirs = _base(case.family, case.rope), _read_by_transformers(case.file())
    if before is None or theirs is None or not np.isfinite(theirs.logits).all():
        return None
    if before.shape != theirs.logits.shape:
        return math.inf
    return float(np.abs(before - theirs.logits).max()) / _scale(theirs.logits)


def _scale(logits: np.ndarray) -> float:
    """Return the size of logits: distances are shares of it if it is above 1."""
    return max(1.0, float(np.abs(logits).max()))


# --- the outcome of a case ------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        summary: a few words.
        wrong: whether transformers reads the file, and ours reads it as another model.
        is_rounding: whether the error is above `TOLERANCE`, but near transformers' own.
        compared_tokens: the number of tokens whose logits were compared: those before the first
            for which rounding selects keys.
        is_selected: whether an indexer selects keys.
    """

    summary: str
    wrong: bool = False
    is_rounding: bool = False
    compared_tokens: int = 0
    is_selected: bool = False


def outcome(case: Case) -> Outcome:
    """Compare our model of a case's file with transformers' model.

    Transformers does not run if ours refuses the file. Ours runs only if the change means something
    to one of the two.
    """
    fields = case.file()
    try:
        ours = config_json.parse_config(copy.deepcopy(fields))
    except CheckpointError as error:
        return Outcome(f"refused: {str(error).removeprefix('config.json: ')}")
    if (theirs := _read_by_transformers(fields)) is None:
        return Outcome("transformers refuses it")
    base, expected = _base(case.family, case.rope), theirs.logits
    if not np.isfinite(expected).all():
        return Outcome("transformers gives NaN")
    unchanged = base is not None and np.array_equal(base, expected)
    if unchanged and _numbers(ours) == _read_before(case.family, case.rope):
        return Outcome("no change")
    compared = _COMPARED.setdefault((_numbers(ours), fields["model_type"]), {})
    try:
        if expected.tobytes() not in compared:
            compared[expected.tobytes()] = compare(theirs, fields)
    except CheckpointError as error:
        return Outcome(f"refused: {error}")
    result = compared[expected.tobytes()]
    return replace(result, summary=f"{'no change' if unchanged else 'equal'}, {result.summary}")


_COMPARED: dict[Any, dict[bytes, Outcome]] = {}
"""Comparisons by what ours reads of a file, and by transformers' logits.

Many changed files are the same model, with the same weights.
"""


def compare(theirs: "Theirs", fields: dict[str, Any]) -> Outcome:
    """Return the distance of our logits from transformers', and whether it is too large."""
    expected, logits = theirs.logits, _ours(theirs.model, fields)
    # What rounding selects for a token changes the tokens after it as well.
    selections = zoo.open_selections(theirs.model, theirs.tokens)
    is_open = np.any(selections, axis=(0, 1))
    compared_tokens = int(is_open.argmax()) if is_open.any() else LENGTH
    compared = f" of {compared_tokens} tokens" if compared_tokens < LENGTH else ""
    scale = _scale(expected)
    worst = float(np.abs(logits - expected)[:, :compared_tokens].max()) / scale
    result = Outcome(
        f"error {worst:.1g}{compared}",
        compared_tokens=compared_tokens,
        is_selected=zoo.selected_keys(theirs.model) < LENGTH,
    )
    if worst < TOLERANCE:
        return result
    theirs.model.set_experts_implementation("eager")  # products of groups have no float64
    exact = zoo.logits(theirs.model.double(), theirs.tokens)
    rounding = float(np.abs(exact - expected)[:, :compared_tokens].max()) / scale
    wrong = not worst < min(LARGEST, max(TOLERANCE, OF_ROUNDING * rounding))
    summary = f"{result.summary}, transformers' own {rounding:.1g}"
    return replace(result, summary=summary, wrong=wrong, is_rounding=not wrong)


@functools.cache
def _read_before(family: str, rope: str) -> ModelConfig | None:
    """Return what ours reads of the unchanged file; None if it refuses the file."""
    try:
        return _numbers(config_json.parse_config(unchanged_file(family, rope)))
    except CheckpointError:
        return None


def _numbers(config: ModelConfig) -> ModelConfig:
    """Return ``config`` without the fields that change no logits."""
    rope = config.rope
    if rope.kind == "default" and not rope.query_growth:
        config = replace(config, rope=replace(rope, original_max_positions=None))
    return replace(config, max_positions=1, bos_token_id=None, eos_token_ids=())


@functools.cache
def _base(family: str, rope: str) -> np.ndarray | None:
    """Return the logits of the unchanged file; None if transformers refuses the file."""
    theirs = _read_by_transformers(unchanged_file(family, rope))
    return None if theirs is None else theirs.logits


def text_of(vocabulary: int) -> np.ndarray:
    """Return the tokens ``[1, LENGTH]`` of the text, for models of a vocabulary of that size."""
    return np.random.default_rng(0).integers(0, min(vocabulary, zoo.VOCABULARY), (1, LENGTH))


@dataclass(frozen=True)
class Theirs:
    """Transformers' model of a file, some tokens ``[1, LENGTH]``, and their logits."""

    model: Any
    tokens: np.ndarray
    logits: np.ndarray


def _read_by_transformers(fields: dict[str, Any]) -> Theirs | None:
    """Return transformers' model of a config.json; None if it refuses the file.

    Its weights depend on their shapes alone.
    """
    import transformers

    from tests.with_torch import torch

    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    kind = next(kind for kind, _ in FAMILIES.values() if _class_type(kind) == fields["model_type"])
    try:
        config = getattr(transformers, f"{kind}Config").from_dict(copy.deepcopy(fields))
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        model = zoo.model_class(kind)(config).float().eval()
        zoo.disturb(model)
        tokens = text_of(config.get_text_config().vocab_size)
        return Theirs(model, tokens, zoo.logits(model, tokens))
    # There are dozens of types, from checks of fields to products of matrices that do not fit.
    except Exception:
        return None


@functools.cache
def _class_type(kind: str) -> str:
    import transformers

    return getattr(transformers, f"{kind}Config").model_type


def _name_as_published(file: Path) -> None:
    """Rename layers of a Kimi K2.5, which transformers 5 writes like those of the vision tower."""
    tensors = load_file(file)
    wrong = "language_model.model.blocks."
    if any(name.startswith(wrong) for name in tensors):
        layers = wrong.replace("blocks", "layers")
        save_file({name.replace(wrong, layers): value for name, value in tensors.items()}, file)


def _ours(model: Any, fields: dict[str, Any]) -> np.ndarray:
    """Return the logits of our model of the same file and weights.

    Without jit, because hundreds of shapes would have to be compiled.
    """
    with tempfile.TemporaryDirectory() as directory:
        model.save_pretrained(directory)
        (Path(directory) / "config.json").write_text(json.dumps(fields))
        _name_as_published(Path(directory) / "model.safetensors")
        # It may have a default that is beyond this vocabulary.
        (Path(directory) / "generation_config.json").unlink(missing_ok=True)
        with warnings.catch_warnings():
            # Some of transformers' models, such as Nemotron-H's, do not tie the head although they
            # are told to. Then it is stored, and a warning says that it is used.
            warnings.filterwarnings("ignore", ".*tie_word_embeddings is true, but")
            target = Target.from_pretrained(directory, dtype=np.float32)
    tokens = jnp.asarray(text_of(target.config.vocab_size))
    with jax.disable_jit():
        output, _ = target.forward(tokens)
        return np.asarray(output.logits)
