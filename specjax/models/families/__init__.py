"""The model types of Hugging Face that can be loaded, one file each."""

from dataclasses import replace

from specjax.models.families.base import Family
from specjax.models.families.deepseek_v3 import DEEPSEEK_V3
from specjax.models.families.gemma2 import GEMMA2
from specjax.models.families.gemma3 import GEMMA3, GEMMA3_TEXT
from specjax.models.families.gemma4 import GEMMA4, GEMMA4_TEXT
from specjax.models.families.gpt_oss import GPT_OSS
from specjax.models.families.granite import GRANITE
from specjax.models.families.llama import LLAMA
from specjax.models.families.ministral3 import MINISTRAL3, MISTRAL3
from specjax.models.families.mistral import MISTRAL, MISTRAL_THAT_SEES
from specjax.models.families.olmo3 import OLMO3
from specjax.models.families.phi3 import PHI3
from specjax.models.families.qwen2 import MIMO, QWEN2
from specjax.models.families.qwen3 import QWEN3
from specjax.models.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from specjax.models.families.qwen3_moe import QWEN3_MOE
from specjax.models.families.qwen3_next import QWEN3_NEXT
from specjax.models.families.seed_oss import SEED_OSS
from specjax.models.families.smollm3 import SMOLLM3

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_5_text": QWEN3_5_TEXT,
    "qwen3_5": QWEN3_5,
    "qwen3_5_moe_text": QWEN3_5_MOE_TEXT,
    "qwen3_5_moe": QWEN3_5_MOE,
    "deepseek_v3": DEEPSEEK_V3,
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
}
"""The families by the ``model_type`` of config.json."""

_KEEPS_A_STATE = "its layers keep a state of another kind than Qwen3.5's"
_MIXES_STREAMS = "its residual streams (AltUp) and low-rank residual (LAuReL) are not implemented"
_OTHER_EXPERTS = "its experts are routed or stored in a way that is not implemented"

REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "jamba", "bamba", "zamba2", "nemotron_h"),
        _KEEPS_A_STATE,
    ),
    **dict.fromkeys(
        ("granitemoehybrid", "lfm2", "lfm2_moe", "recurrent_gemma", "kimi_linear", "rwkv"),
        _KEEPS_A_STATE,
    ),
    **dict.fromkeys(("gemma3n", "gemma3n_text"), _MIXES_STREAMS),
    **dict.fromkeys(
        ("llama4", "llama4_text", "mixtral", "granitemoe", "phimoe", "glm4_moe", "deepseek_v2"),
        _OTHER_EXPERTS,
    ),
}
"""The known model types that cannot be loaded, and the reason."""
