"""The model types of Hugging Face that can be loaded, one file each."""

from specjax.models.families.base import Family
from specjax.models.families.deepseek_v3 import DEEPSEEK_V3
from specjax.models.families.llama import LLAMA
from specjax.models.families.mistral import MISTRAL
from specjax.models.families.qwen2 import MIMO, QWEN2
from specjax.models.families.qwen3 import QWEN3
from specjax.models.families.qwen3_moe import QWEN3_MOE

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "qwen3_moe": QWEN3_MOE,
    "deepseek_v3": DEEPSEEK_V3,
    "mimo": MIMO,
}
"""By the ``model_type`` of config.json."""

REFUSED: dict[str, str] = {
    "qwen3_next": "its linear-attention layers keep a state that cannot be taken back when a drafted token is rejected",
}
"""Model types that are known and cannot be loaded, and why."""
