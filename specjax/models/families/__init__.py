"""The model types of Hugging Face that can be loaded, one file each."""

from dataclasses import replace

from specjax.models.families.bamba import BAMBA
from specjax.models.families.base import Family
from specjax.models.families.deepseek_v3 import DEEPSEEK_V3, KIMI_K25
from specjax.models.families.deepseek_v32 import DEEPSEEK_V32
from specjax.models.families.ernie4_5 import ERNIE4_5, ERNIE4_5_MOE
from specjax.models.families.exaone4 import EXAONE4
from specjax.models.families.falcon_h1 import FALCON_H1
from specjax.models.families.gemma2 import GEMMA2
from specjax.models.families.gemma3 import GEMMA3, GEMMA3_TEXT
from specjax.models.families.gemma4 import GEMMA4, GEMMA4_TEXT
from specjax.models.families.glm4 import GLM4
from specjax.models.families.glm4_moe import GLM4_MOE
from specjax.models.families.glm4_moe_lite import GLM4_MOE_LITE
from specjax.models.families.glm_moe_dsa import GLM_MOE_DSA
from specjax.models.families.gpt_oss import GPT_OSS
from specjax.models.families.granite import GRANITE
from specjax.models.families.granitemoehybrid import GRANITEMOEHYBRID
from specjax.models.families.hunyuan import HUNYUAN_V1_DENSE, HUNYUAN_V1_MOE
from specjax.models.families.kimi_linear import KIMI_LINEAR
from specjax.models.families.lfm2 import LFM2
from specjax.models.families.lfm2_moe import LFM2_MOE
from specjax.models.families.llama import LLAMA
from specjax.models.families.llama4 import LLAMA4, LLAMA4_TEXT
from specjax.models.families.mimo_v2_flash import MIMO_V2_FLASH
from specjax.models.families.minimax_m2 import MINIMAX_M2
from specjax.models.families.ministral3 import MINISTRAL3, MISTRAL3
from specjax.models.families.mistral import MISTRAL, MISTRAL_THAT_SEES
from specjax.models.families.mixtral import MIXTRAL
from specjax.models.families.muse_glimmer import MUSE_GLIMMER, MUSE_GLIMMER_TEXT
from specjax.models.families.nemotron_h import NEMOTRON_H
from specjax.models.families.olmo3 import OLMO3
from specjax.models.families.olmo_hybrid import OLMO_HYBRID
from specjax.models.families.phi3 import PHI3
from specjax.models.families.qwen2 import MIMO, QWEN2
from specjax.models.families.qwen3 import QWEN3, QWEN3_VL
from specjax.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from specjax.models.families.qwen3_moe import QWEN3_MOE, QWEN3_VL_MOE
from specjax.models.families.qwen3_next import QWEN3_NEXT
from specjax.models.families.seed_oss import SEED_OSS
from specjax.models.families.smollm3 import SMOLLM3
from specjax.models.families.step3p5 import STEP3P5, STEP3P7

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "llama4_text": LLAMA4_TEXT,
    "llama4": LLAMA4,
    "mistral": MISTRAL,
    "mixtral": MIXTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_vl": QWEN3_VL,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_vl_moe": QWEN3_VL_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    "qwen3_5_moe": QWEN3_5_MOE,
    "deepseek_v3": DEEPSEEK_V3,
    "deepseek_v32": DEEPSEEK_V32,
    "kimi_k2": replace(DEEPSEEK_V3, title=KIMI_K25.title, models=""),
    "kimi_k25": KIMI_K25,
    "mimo": MIMO,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA3_TEXT,
    "gemma3": GEMMA3,
    "gemma4_text": GEMMA4_TEXT,
    "gemma4": GEMMA4,
    "gemma4_unified_text": GEMMA4_TEXT,
    "gemma4_unified": GEMMA4,
    "gpt_oss": GPT_OSS,
    "olmo3": OLMO3,
    "phi3": PHI3,
    "smollm3": SMOLLM3,
    "granite": GRANITE,
    "ministral3": MINISTRAL3,
    "mistral3": replace(MISTRAL3, by_inner_type={"mistral": MISTRAL_THAT_SEES}),
    "seed_oss": SEED_OSS,
    "glm4": GLM4,
    "glm4_moe": GLM4_MOE,
    "glm4_moe_lite": GLM4_MOE_LITE,
    "glm_moe_dsa": GLM_MOE_DSA,
    "minimax_m2": MINIMAX_M2,
    "mimo_v2_flash": MIMO_V2_FLASH,
    "ernie4_5": ERNIE4_5,
    "ernie4_5_moe": ERNIE4_5_MOE,
    "hunyuan_v1_dense": HUNYUAN_V1_DENSE,
    "hunyuan_v1_moe": HUNYUAN_V1_MOE,
    "exaone4": EXAONE4,
    "nemotron_h": NEMOTRON_H,
    "granitemoehybrid": GRANITEMOEHYBRID,
    "bamba": BAMBA,
    "falcon_h1": FALCON_H1,
    "lfm2": LFM2,
    "lfm2_moe": LFM2_MOE,
    "olmo_hybrid": OLMO_HYBRID,
    "kimi_linear": KIMI_LINEAR,
    "step3p5": STEP3P5,
    "step3p7": STEP3P7,
    "muse_glimmer_text": MUSE_GLIMMER_TEXT,
    "muse_glimmer": MUSE_GLIMMER,
}
"""The families by the ``model_type`` of config.json."""

_KEEPS_A_STATE = "its layers keep a state of a kind that is not implemented"
_HAS_NO_ATTENTION = "no layer has attention, which is not implemented"
_MIXES_STREAMS = "its residual streams (AltUp) and low-rank residual (LAuReL) are not implemented"
_OTHER_EXPERTS = "its experts are routed or stored in a way that is not implemented"

REFUSED: dict[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba", "rwkv"), _HAS_NO_ATTENTION),
    **dict.fromkeys(("jamba", "zamba2", "recurrent_gemma"), _KEEPS_A_STATE),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _MIXES_STREAMS),
    **dict.fromkeys(
        ("deepseek_v4", "deepseek_ref"),
        "its residual streams (hc_mult) and compressed keys (compress_ratios) are not implemented",
    ),
    "kimi_k3": "its residuals (attn_res_block_size) and its activation (situ) are not implemented",
    "nemotron-nas": "its layers are described one by one (block_configs), which is not implemented",
    **dict.fromkeys(
        ("granitemoe", "phimoe", "deepseek_v2"),
        _OTHER_EXPERTS,
    ),
}
"""The known model types that cannot be loaded, and the reason."""
