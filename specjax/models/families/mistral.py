"""Mistral (Jiang et al. 2023, arXiv 2310.06825): a Llama whose layers may all have a sliding window."""

from specjax.models.families.base import Family

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={"max_position_embeddings": 131_072, "sliding_window": 4096},
    windows="all",
)
