"""Shrunken copies of published config.json files: the same fields, with small sizes.

``python -m tests.models.families.shrunken FOLDER`` writes `PATH`, the copies of those files in
``FOLDER`` that are accepted. A copy has the ratios that decide what is computed, such as query
heads for each key head, and as many layers as it takes to have one of every kind. Every other field
has its published value.
"""

import copy
import json
import logging
import sys
from pathlib import Path
from typing import Any

from tests.models.families import every_field, hub_files, zoo

PATH = Path(__file__).with_suffix(".json")
"""The copies by the names of the models, a line for each."""

Raw = dict[str, Any]

VOCABULARY = 64
WINDOW = 8
"""The size of windows, and how many keys an indexer selects: fewer than the texts of tests have."""

_NOT_OF_THE_MODEL = ("quantization_config", "auto_map", "transformers_version", "_name_or_path")
_HEAD_SIZES = (
    *("head_dim", "v_head_dim", "global_head_dim", "swa_head_dim", "swa_v_head_dim"),
    *("qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "rotary_dim", "index_head_dim"),
    *("linear_key_head_dim", "linear_value_head_dim", "mamba_head_dim", "ssm_state_size"),
)
"""Sizes within a head. All of a file are divided by the same number, so that shares stay."""
_RANKS = ("q_lora_rank", "kv_lora_rank", "moe_latent_size")
_MLP_SIZES = (
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size"),
    *("moe_shared_expert_intermediate_size", "share_expert_dim", "shared_intermediate_size"),
)
_GROUPS_OF_HEADS = (
    ("num_key_value_heads", "num_attention_heads"),
    ("swa_num_key_value_heads", "swa_num_attention_heads"),
    ("num_global_key_value_heads", "num_attention_heads"),
)
_GROUPS_OF_STATES = (
    ("linear_num_key_heads", "linear_num_value_heads"),
    ("n_groups", "mamba_num_heads"),
)
_LARGEST = {
    "vocab_size": VOCABULARY,
    "vocab_size_per_layer_input": VOCABULARY,
    "sliding_window": WINDOW,
    "sliding_window_size": WINDOW,
    "attention_chunk_size": WINDOW,
    "index_topk": WINDOW,
    "index_n_heads": 9,
    "n_routed_experts": 16,
    "num_experts": 16,
    "num_local_experts": 16,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "top_k_experts": 4,
    "chunk_size": 16,
}
"""The largest values of fields that need no others beside them."""
_OF_VISION = {
    **dict.fromkeys(("num_hidden_layers", "vt_num_hidden_layers"), 1),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads"), 2),
    "vt_num_attention_heads": 2,
    **dict.fromkeys(("head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("hidden_size", "vt_hidden_size", "mm_hidden_size"), 16),
    **dict.fromkeys(("intermediate_size", "vt_intermediate_size"), 16),
    **dict.fromkeys(("num_position_embeddings", "position_embedding_size"), 16),
    **dict.fromkeys(("init_pos_emb_height", "init_pos_emb_width"), 2),
}
"""Sizes of a vision tower, which no text needs."""


def shrunken(raw: Raw) -> Raw:
    """Return the fields of a config.json with small sizes.

    Fields that say how the file is stored or read, such as ``quantization_config``, are left out.
    """
    raw = copy.deepcopy({name: raw[name] for name in raw if name not in _NOT_OF_THE_MODEL})
    text = raw.get("text_config", raw)
    for name in _NOT_OF_THE_MODEL:
        text.pop(name, None)
    _shrink_sizes(text)
    _cut_layers(text)
    if isinstance(vision := raw.get("vision_config"), dict):
        _shrink_vision(vision, text["hidden_size"])
    _move_tokens(raw)
    return raw


def _shrink_sizes(text: Raw) -> None:
    """Replace the sizes of a text model, and keep the ratios between them."""
    sized_by_heads = not {"head_dim", "kv_lora_rank", "attention_head_dim"} & text.keys()
    head_dim = text["hidden_size"] // text["num_attention_heads"]
    unit = text.get("moe_intermediate_size", text.get("intermediate_size"))
    for kv_heads, heads in _GROUPS_OF_HEADS:
        if text.get(kv_heads, 0) > 2:
            is_grouped = text[kv_heads] < text[heads]
            text[kv_heads] = text[kv_heads] // 2 if is_grouped else 4
    text["num_attention_heads"] = 4 if "kv_lora_rank" in text else 8
    if "swa_num_attention_heads" in text:
        text["swa_num_attention_heads"] = text["num_attention_heads"]
    for keys, values in _GROUPS_OF_STATES:
        if keys in text:
            text[keys], text[values] = 2, 2 * min(text[values] // text[keys], 4)
    for name in set(_HEAD_SIZES) & text.keys():
        # Of few angles YaRN interpolates the same ones, whatever its bounds are.
        text[name] //= 2 if "kv_lora_rank" in text else 8
    for name in set(_RANKS) & text.keys():
        text[name] //= 64
    for name in set(_MLP_SIZES) & text.keys():
        text[name] = min(text[name], 20 if text[name] <= unit else 40)
    for name in _LARGEST.keys() & text.keys():
        text[name] = None if text[name] is None else min(text[name], _LARGEST[name])
    if text.get("n_group", 1) > 4:
        text["n_group"], text["topk_group"] = 4, 4 * text["topk_group"] // text["n_group"]
    for rope in (text.get("rope_parameters"), text.get("rope_scaling")):
        if rope and "mrope_section" in rope:
            rope["mrope_section"] = _sections(rope["mrope_section"])
    # A file with a head_dim would be read in the same way without it if this were their product.
    text["hidden_size"] = text["num_attention_heads"] * head_dim // 8 if sized_by_heads else 48


def _sections(sections: list[int]) -> list[int]:
    """Return the sections of a head's angles, of an eighth of their number."""
    smaller = [section // 8 for section in sections]
    for i in range(sum(sections) // 8 - sum(smaller)):
        smaller[i] += 1
    return smaller


def _cut_layers(text: Raw) -> None:
    """Leave out the layers after those that have every kind of layer, and at least two."""
    kinds = text.get("layers_block_type")
    count = text["num_hidden_layers"] if kinds is None else len(kinds)
    by_layer = [
        name
        for name, value in text.items()
        if isinstance(value, list | str) and len(value) == count
    ]
    dense = text.get("first_k_dense_replace", 0)
    layers = [(layer < dense, *(text[name][layer] for name in by_layer)) for layer in range(count)]
    smaller = max(2, 1 + max(map(layers.index, layers)))
    for name in by_layer:
        text[name] = text[name][:smaller]
    if "num_hidden_layers" in text:
        text["num_hidden_layers"] = smaller
    if "max_window_layers" in text:
        text["max_window_layers"] = smaller - (text["max_window_layers"] < count)


def _shrink_vision(vision: Raw, hidden_size: int) -> None:
    for name in _OF_VISION.keys() & vision.keys():
        vision[name] = _OF_VISION[name]
    for name in {"out_hidden_size", "text_hidden_size"} & vision.keys():
        vision[name] = hidden_size
    if "depth" in vision:
        vision["depth"] = max(1, len(vision["deepstack_visual_indexes"]))
        vision["deepstack_visual_indexes"] = list(range(len(vision["deepstack_visual_indexes"])))


def _move_tokens(raw: Raw) -> None:
    """Move the ids of tokens beyond the first few to the end of the vocabulary, in their order."""
    objects = [raw, *(raw[name] for name in ("text_config", "vision_config") if name in raw)]
    places = [
        (fields, name)
        for fields in objects
        for name in fields
        if name.endswith(("_token_id", "_token_index")) and fields[name] is not None
    ]
    tokens = set()
    for fields, name in places:
        value = fields[name]
        tokens |= set(value if isinstance(value, list) else [value])
    last = sorted(token for token in tokens if token >= WINDOW)
    moved = {token: VOCABULARY - len(last) + i for i, token in enumerate(last)}
    for fields, name in places:
        value = fields[name]
        if isinstance(value, list):
            fields[name] = [moved.get(token, token) for token in value]
        else:
            fields[name] = moved.get(value, value)


def shrink_folder(folder: Path) -> dict[str, Raw]:
    """Return by name the shrunken copies of the accepted files in a folder."""
    copies = {}
    for name, raw in hub_files.files(folder).items():
        in_floats = {field: raw[field] for field in raw if field != "quantization_config"}
        if hub_files.outcome(in_floats)[0] is not None:
            copies[name] = shrunken(raw)
    return copies


def stored_copies() -> dict[str, Raw]:
    """Return by name the copies in `PATH`."""
    return json.loads(PATH.read_text())


def by_transformers(raw: Raw) -> every_field.Theirs:
    """Return transformers' model of a shrunken copy, a text and its logits.

    The weights are larger than new models' are, so that all layers change the logits, and those of
    the embedding smaller than the others, so that the epsilon of norms does.
    """
    import transformers

    from tests.with_torch import torch

    transformers.logging.set_verbosity(logging.CRITICAL)
    transformers.logging.disable_progress_bar()
    raw = hub_files.of_transformers(raw)
    if raw["model_type"] == "step3p7":
        raw["vision_config"] = zoo.STEP_VISION
    if raw["model_type"] == "kimi_k25":  # the published names of these sizes are not read
        raw["vision_config"] = every_field.SEEING["kimi_k25"][1]
    if raw["model_type"] == "nemotron_h":
        # Steps are raised to it in prompts, but neither in decoding nor by the kernels of
        # NVIDIA's own code.
        raw["time_step_min"] = every_field.FAMILIES["nemotron_h"][1]["time_step_min"]
    config = transformers.AutoConfig.for_model(**copy.deepcopy(raw))
    config.initializer_range = config.get_text_config().initializer_range = 0.2
    # With some other seeds, rounding decides which keys an indexer selects.
    torch.manual_seed(2)
    model = (
        hub_files.model_class(raw)
        .from_config(config, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
    zoo.disturb(model)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(0.3)
        if "swiglu_limit" in raw:  # gates have to be beyond it
            for layer in model.get_decoder().layers:
                layer.mlp.experts.gate_up_proj.mul_(3)
    text = every_field.text_of(VOCABULARY)
    return every_field.Theirs(model, text, zoo.logits(model, text))


def main(folder: Path) -> None:
    """Write `PATH`."""
    lines = [
        f"{json.dumps(name)}: {json.dumps(raw)}" for name, raw in shrink_folder(folder).items()
    ]
    PATH.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
