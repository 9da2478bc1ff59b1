"""Mistral (Jiang et al. 2023, arXiv 2310.06825): Llama whose layers may have a sliding window."""

from dataclasses import replace

from specjax.models.families.base import Family

MISTRAL = Family(
    title="Mistral",
    models="Mistral 7B, with or without its sliding window",
    model_type="mistral",
    architecture="MistralForCausalLM",
    defaults={"max_position_embeddings": 131_072, "sliding_window": 4096},
    windows="all",
)

MISTRAL_THAT_SEES = replace(
    MISTRAL, nested="text_config", prefixes=("model.language_model.", "language_model.model.")
)
"""The text model of Mistral Small 3.1 and 3.2, whose files are of type ``mistral3``.

The vision tower is not read.
"""
