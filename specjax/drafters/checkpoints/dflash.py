"""Read and write the published checkpoint layouts of DFlash, DFlash2, DSpark and JetSpec.

``dflash`` is z-lab's layout. Its config.json is that of a Qwen3 model, with ``block_size`` and
``dflash_config``. JetSpec's drafters have this layout too, and DFlash2's, whose additional fields
are all in ``dflash_config``. ``speculators`` is the layout of the speculators package and vLLM; the
sizes of the layers are in ``transformer_layer_config``. ``deepspec`` is DeepSeek's layout: a Qwen3
model's config.json with additional fields at the top, and with embedding and head in the tensor
file. ``muse_glimmer`` is transformers' layout for the assistant of Muse Glimmer. It is read, and
never written.

The layouts number the target's layers in two ways. Here a tap is the index of a layer whose *input*
is read, as in speculators. The other layouts name the layer before it, whose *output* that is.
"""

from dataclasses import replace
from typing import Any, Literal, get_args

from specjax.drafters.checkpoints import speculators
from specjax.drafters.checkpoints.dflash_config import DFlashConfig, Markov, declare, default_taps
from specjax.drafters.draft_vocabulary import DraftVocabulary
from specjax.drafters.trained import LEFT_OVER, CheckpointFormat, TrainedDrafter, architectures_of
from specjax.errors import InputError
from specjax.models import config_json
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.fields import (
    CheckpointError,
    Field,
    Fields,
    FieldTable,
    JsonObject,
    check_fields,
    flag,
    mapping,
    number,
    text,
    whole,
)

Kind = Literal["dflash", "dspark", "dflash2"]
"""The kind of drafter of a checkpoint."""


# --- reading --------------------------------------------------------------------------------------


def layout_of(raw: Fields) -> str | None:
    """Return the layout of a config.json; None if it belongs to no such drafter."""
    if raw.get("speculators_model_type") in get_args(Kind):
        return "speculators"
    if raw.get("model_type") == "muse_glimmer_assistant":
        return "muse_glimmer"
    architectures = architectures_of(raw)
    if "DFlashDraftModel" in architectures or "DFlash2DraftModel" in architectures:
        return "dflash"
    return "deepspec" if "Qwen3DSparkModel" in architectures else None


def kind_of(raw: Fields) -> Kind | None:
    """Return the kind of drafter that a config.json describes; None if it is none of these.

    DeepSpec writes its DFlash drafters as DSpark drafters without heads.
    """
    layout = layout_of(raw)
    if layout == "speculators":
        return raw["speculators_model_type"]
    if layout == "deepspec":
        return "dspark" if raw.get("markov_rank") or raw.get("enable_confidence_head") else "dflash"
    if layout == "muse_glimmer":
        return "dflash"
    if layout == "dflash":
        return "dflash2" if "DFlash2DraftModel" in raw["architectures"] else "dflash"
    return None


_HEADS: FieldTable = {
    "markov_rank": whole(0, 1_000_000, default=0),
    "markov_head_type": text(*get_args(Markov), default="vanilla"),
    "enable_confidence_head": flag(default=False),
    "confidence_head_with_markov": flag(default=False),
}
_OF_DFLASH2: FieldTable = {
    "conv_kernel_size": whole(1, 4096),
    "conv_group_size": whole(1, 1_000_000),
    "selector_rank": whole(1, 1_000_000),
    "selector_top_k": whole(1, 10_000_000),
}
_PUBLISHED = {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
}
_FIELDS: dict[str, FieldTable] = {
    "dflash": {
        "block_size": whole(1, 4096, default=None),
        "is_causal": flag(default=None),
        "num_target_layers": whole(1, 10_000, default=None),
        "dflash_config": mapping(),
    },
    "speculators": {
        "block_size": whole(1, 4096, default=8),
        "draft_vocab_size": whole(1, 10_000_000, default=32_000),
        "target_hidden_size": whole(1, 1_000_000, default=None),
        "aux_hidden_state_layer_ids": speculators.layer_numbers(0),
        "mask_token_id": whole(0, 10_000_000),
        "transformer_layer_config": mapping(),
    },
    "deepspec": {
        "block_size": whole(1, 4096),
        "mask_token_id": whole(0, 10_000_000),
        "target_layer_ids": speculators.layer_numbers(-1),
        "num_target_layers": whole(1, 10_000, default=None),
        **_HEADS,
    },
    "muse_glimmer": {
        "block_size": whole(2, 4096, default=16),
        "mask_token_id": whole(0, 10_000_000, default=201_818),
        "target_layer_ids": speculators.layer_numbers(-1),
        "sliding_window": whole(1, 1_000_000_000, default=2048),
    },
}
_MUSE_GLIMMER: JsonObject = {
    # config.json does not state the vocabulary, which is the target's.
    "vocab_size": 202_048,
    "hidden_size": 6656,
    "intermediate_size": 19_968,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131_072,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e5},
}
"""The fields that transformers uses if the config.json of an assistant leaves them out."""

_NESTED: FieldTable = {  # the fields in dflash_config
    "mask_token_id": whole(0, 10_000_000),
    "target_layer_ids": speculators.layer_numbers(-1),
    "block_size": whole(1, 4096, default=None),  # newer files have it here
    "causal_head": flag(default=None),
    "causal": flag(default=None),
    "target_hidden_size": whole(1, 1_000_000, default=None),
    "embedding_normed": flag(default=True),  # ours alone
}
_FACTORS: FieldTable = {  # z-lab's code looks for them in dflash_config first, then beside it
    "input_embedding_scale": number(1e-6, 1e6, default=None),
    "output_multiplier": number(1e-6, 1e6, default=None),
    "final_logit_softcapping": Field(
        "null, 0 or a number from 1e-06 to 1e+06",
        lambda value: type(value) in (int, float) and _is_cap(value),
        None,
    ),
}
_NO_FACTORS: FieldTable = {  # for layouts whose own code does not read these fields
    "input_embedding_scale": Field("1 in this layout", lambda value: value == 1, None),
    "output_multiplier": Field("1 in this layout", lambda value: value == 1, None),
    "final_logit_softcapping": Field("null or 0 in this layout", lambda value: value == 0, None),
}


def _is_cap(value: float) -> bool:
    return value == 0 or 1e-6 <= value <= 1e6  # in z-lab's code 0 means no bound


def read_config(stored: CheckpointFiles) -> DFlashConfig:
    """Return the configuration of a checkpoint in any layout.

    Raises:
        CheckpointError: A field is invalid, a count does not match the tensors, or a part is
            incomplete.
    """
    layout = layout_of(stored.raw)
    if layout is None:
        raise CheckpointError(
            f"{stored.file}: it names no architecture of a DFlash drafter: give the checkpoint"
            " of one"
        )
    fields = check_fields(stored.raw, _FIELDS[layout], stored.file)
    if layout == "speculators":
        config_fields = _read_speculators(fields, stored)
    elif layout == "muse_glimmer":
        config_fields = _read_muse_glimmer(fields, stored)
    else:
        config_fields = _read_qwen3(fields, stored, layout)
    if layout == "dflash":
        config_fields |= _read_factors(stored)
    else:
        check_fields(stored.raw, _NO_FACTORS, stored.file)
    layer: ModelConfig = config_fields["layer"]
    stored.check_count("num_hidden_layers", layer.num_layers, stored.numbered("layers."), "layers")
    windows = {"sliding_window": layer.sliding_window, "windowed_layers": layer.windowed_layers}
    config_fields["layer"] = replace(
        config_json.with_switches(layer, stored.shapes, "layers.0."), **windows
    )
    _check_parts(config_fields, stored)
    config = DFlashConfig(
        **config_fields,
        own_ids="d2t" in stored.shapes,
        own_embedding="embed_tokens.weight" in stored.shapes,
        own_head="lm_head.weight" in stored.shapes,
    )
    encoder = "encoder." * (layout == "muse_glimmer")
    width, hidden = stored.shapes.get(f"{encoder}fc.weight", (0, 0))[-1], config.layer.hidden_size
    if width != len(config.taps) * hidden:
        raise CheckpointError(
            f"{stored.file}: fc.weight reads {width} numbers, but {len(config.taps)} layers of the"
            f" target with {hidden} each are {len(config.taps) * hidden}: give the configuration"
            " and the weights of one model, of the target's hidden size"
        )
    if config.draft_vocab_size != config.layer.vocab_size:
        DraftVocabulary(config.draft_vocab_size, config.layer.vocab_size).check_stored(
            stored.shapes, stored.directory
        )
    return config


def _read_qwen3(fields: Fields, stored: CheckpointFiles, layout: str) -> dict[str, Any]:
    """Return the configuration's fields for the layouts of z-lab and DeepSpec."""
    layer = config_json.parse_drafter_config(dict(stored.raw), stored.file)
    layout_fields = (
        _read_zlab(fields, layer, stored) if layout == "dflash" else _read_deepspec(fields, stored)
    )
    return {
        "layer": layer,
        "draft_vocab_size": layer.vocab_size,
        "target_layers": fields["num_target_layers"],
        **layout_fields,
    }


def _read_zlab(fields: Fields, layer: ModelConfig, stored: CheckpointFiles) -> dict[str, Any]:
    is_dflash2 = kind_of(stored.raw) == "dflash2"
    nested = check_fields(
        fields["dflash_config"],
        _NESTED | (_OF_DFLASH2 if is_dflash2 else {}),
        stored.file,
        "dflash_config.",
    )
    _check_hidden(nested["target_hidden_size"], layer, stored)
    size, layer_ids = fields["block_size"] or nested["block_size"], nested["target_layer_ids"]
    if size is None:
        raise CheckpointError(
            f"{stored.file}: block_size is missing: give the number of tokens in a block"
        )
    if layer_ids is None and fields["num_target_layers"] is None:
        raise CheckpointError(
            f"{stored.file}: dflash_config.target_layer_ids is missing, and so is"
            " num_target_layers: give one of the two"
        )
    causal_flags = [
        value
        for value in (fields["is_causal"], nested["causal"], nested["causal_head"])
        if value is not None
    ]
    return {
        "block_size": size,
        "mask_token_id": nested["mask_token_id"],
        "taps": (
            default_taps(fields["num_target_layers"], layer.num_layers)
            if layer_ids is None
            else _taps(layer_ids)
        ),
        "causal": any(causal_flags),
        "embedding_normed": nested["embedding_normed"],
        "causal_in_window": (
            not causal_flags and bool(layer.windowed_layers)
        ),  # the default of z-lab's code
        **{name: nested[name] for name in _OF_DFLASH2 if is_dflash2},
    }


def _read_factors(stored: CheckpointFiles) -> dict[str, float | None]:
    """Return the factors of embeddings and logits.

    A field in dflash_config has priority over the field of the same name at the top.
    """
    nested = stored.raw["dflash_config"]
    inner = {name: field for name, field in _FACTORS.items() if name in nested}
    outer = {name: field for name, field in _FACTORS.items() if name not in nested}
    values = check_fields(nested, inner, stored.file, "dflash_config.") | check_fields(
        stored.raw, outer, stored.file
    )
    return {
        "input_embedding_scale": float(values["input_embedding_scale"] or 1.0),
        "output_multiplier": float(values["output_multiplier"] or 1.0),
        "final_logit_softcapping": float(values["final_logit_softcapping"] or 0.0) or None,
    }


def _read_deepspec(fields: Fields, stored: CheckpointFiles) -> dict[str, Any]:
    if fields["target_layer_ids"] is None:
        raise CheckpointError(
            f"{stored.file}: target_layer_ids is missing: give the target's layers that are read"
        )
    config_fields = {
        "block_size": fields["block_size"],
        "mask_token_id": fields["mask_token_id"],
        "from_anchor": True,
    }
    return config_fields | {"taps": _taps(fields["target_layer_ids"])} | _read_heads(fields)


def _read_muse_glimmer(fields: Fields, stored: CheckpointFiles) -> dict[str, Any]:
    """Return the configuration's fields for the assistant of Muse Glimmer.

    Its window is a distance: a token sees as many tokens before it, and itself.
    """
    window, size = fields["sliding_window"], fields["block_size"]
    if size - 1 > window:
        raise CheckpointError(
            f"{stored.file}: sliding_window={window}: must be at least block_size - 1 = {size - 1}:"
            " windows within a block are not implemented"
        )
    raw = _MUSE_GLIMMER | {name: value for name, value in stored.raw.items() if value is not None}
    count = raw["num_hidden_layers"]
    kinds = raw.get("layer_types") or ["sliding_attention"] * (count if type(count) is int else 0)
    raw |= {
        "model_type": "qwen3",
        "layer_types": kinds,
        "use_sliding_window": True,
        "sliding_window": window + 1,
    }
    layer_ids = fields["target_layer_ids"]
    layer = config_json.parse_drafter_config(raw, stored.file)
    return {
        "layer": layer,
        "block_size": size,
        "mask_token_id": fields["mask_token_id"],
        "taps": _taps([1, 13, 25, 37, 49] if layer_ids is None else layer_ids),
        "draft_vocab_size": layer.vocab_size,
        "embedding_normed": False,
    }


def _taps(outputs: list[int]) -> tuple[int, ...]:
    """Return the layers whose input is the output of the layers ``outputs``."""
    return tuple(number + 1 for number in outputs)


def _read_speculators(fields: Fields, stored: CheckpointFiles) -> dict[str, Any]:
    layer_fields = fields["transformer_layer_config"]
    raw = _with_windows(
        {**speculators.LAYER_DEFAULTS["qwen3"], "model_type": "qwen3", **layer_fields}
    )
    layer = config_json.parse_drafter_config(raw, f"{stored.file}: transformer_layer_config")
    kind = kind_of(stored.raw)
    _check_hidden(fields["target_hidden_size"], layer, stored)
    if fields["aux_hidden_state_layer_ids"] is None:
        raise CheckpointError(
            f"{stored.file}: aux_hidden_state_layer_ids is missing: give the target's layers that"
            " are read"
        )
    by_kind = check_fields(stored.raw, _speculators_fields(kind), stored.file)
    return {
        "layer": layer,
        "block_size": fields["block_size"],
        "mask_token_id": fields["mask_token_id"],
        "taps": tuple(fields["aux_hidden_state_layer_ids"]),
        "draft_vocab_size": fields["draft_vocab_size"],
        "from_anchor": by_kind["sample_from_anchor"],
        "window_of_block": bool(layer.windowed_layers),
        "causal_in_window": (
            bool(layer.windowed_layers) and not by_kind["sliding_window_non_causal"]
        ),
        **(_read_heads(by_kind) if kind == "dspark" else {}),
        **({name: by_kind[name] for name in _OF_DFLASH2} if kind == "dflash2" else {}),
    }


def _speculators_fields(kind: Kind | None) -> FieldTable:
    """Return the fields whose defaults depend on the kind of drafter."""
    fields = {
        "sample_from_anchor": flag(kind == "dspark"),
        "sliding_window_non_causal": flag(kind == "dflash2"),
    }
    if kind == "dspark":
        ranks = {"markov_rank": whole(0, 1_000_000, default=256)}
        fields |= (
            _HEADS
            | ranks
            | {
                name: flag(True)
                for name in ("enable_confidence_head", "confidence_head_with_markov")
            }
        )
    if kind == "dflash2":
        fields |= {
            name: replace(field, default=_PUBLISHED[name]) for name, field in _OF_DFLASH2.items()
        }
    return fields


def _with_windows(raw: JsonObject) -> JsonObject:
    """Return ``raw`` with the windows that ``layer_types`` names, as speculators reads it.

    All other fields about windows are ignored. A window that is longer than any text still makes
    blocks causal, so it stays, cut to the length of the longest text.
    """
    kinds = raw.get("layer_types")
    window = raw.get("sliding_window")
    longest = raw.get("max_position_embeddings", 32_768)
    if not isinstance(kinds, list) or "sliding_attention" not in kinds:
        return raw
    if type(window) is int and type(longest) is int:
        window = min(window, longest - 1)  # counted from an anchor behind at most this many tokens
    return raw | {"use_sliding_window": True, "sliding_window": window}


def _read_heads(fields: Fields) -> dict[str, Any]:
    return {
        "markov_rank": fields["markov_rank"],
        "markov": fields["markov_head_type"],
        "confidence": fields["enable_confidence_head"],
        "confidence_of_token": (
            fields["enable_confidence_head"] and fields["confidence_head_with_markov"]
        ),
    }


def _check_hidden(size: int | None, layer: ModelConfig, stored: CheckpointFiles) -> None:
    if size not in (None, layer.hidden_size):
        raise CheckpointError(
            f"{stored.file}: target_hidden_size={size}, but the drafter's hidden_size is"
            f" {layer.hidden_size}: give a drafter of its target's hidden size, whose embedding and"
            " head it can use"
        )


def _check_parts(config_fields: Fields, stored: CheckpointFiles) -> None:
    """Raise a CheckpointError if config.json and the tensors disagree about a part of the drafter.

    Without this check the part would be ignored silently.
    """
    for field, what, part, is_declared in (
        ("markov_rank", "head", "markov_head.", config_fields.get("markov_rank", 0) > 0),
        (
            "enable_confidence_head",
            "head",
            "confidence_head.",
            config_fields.get("confidence", False),
        ),
        ("selector_rank", "selector", "candidate_selector.", "selector_rank" in config_fields),
        ("conv_kernel_size", "convolution", "attention_conv.", "conv_kernel_size" in config_fields),
        ("conv_kernel_size", "convolution", "mlp_conv.", "conv_kernel_size" in config_fields),
    ):
        tensors = sorted(
            name for name in stored.shapes if name.startswith(part) or f".{part}" in name
        )
        if tensors and not is_declared:
            raise CheckpointError(
                f"{stored.file}: it declares no {what} ({field}), but there are tensors"
                f" {', '.join(tensors)}: give the configuration and the weights of one model"
            )
        if is_declared and not tensors:
            raise CheckpointError(
                f"{stored.directory}: there are no tensors {part}*, but {field} in config.json"
                f" declares a {what}: give the configuration and the weights of one model"
            )


def _read_dflash(stored: CheckpointFiles) -> DFlashConfig:
    config = read_config(stored)
    if config.has_selector:
        raise CheckpointError(
            f"{stored.file}: it describes a DFlash2, and a DFlash has no convolutions: load it as a"
            " DFlash2"
        )
    return config


def _read_dflash2(stored: CheckpointFiles) -> DFlashConfig:
    config = read_config(stored)
    if not config.has_selector:
        raise CheckpointError(
            f"{stored.file}: it has neither convolutions nor a selector: load it as a DFlash"
        )
    return config


def _read_dspark(stored: CheckpointFiles) -> DFlashConfig:
    config = read_config(stored)
    if not config.has_heads:
        raise CheckpointError(
            f"{stored.file}: it has neither a Markov head nor a confidence head: load it as a"
            " DFlash"
        )
    return config


# --- writing --------------------------------------------------------------------------------------


def format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> JsonObject:
    """Return the fields of config.json in ``layout``.

    The arguments are those of `TrainedDrafter.save_pretrained`.

    Raises:
        InputError: The layout has no field for a property of the drafter.
    """
    config: DFlashConfig = drafter.config
    if not config.embedding_normed and layout != "dflash":
        raise InputError(
            f"layout={layout!r}: it cannot express embeddings without the target's norm: write it"
            " as 'dflash'"
        )
    if layout == "speculators":
        return _speculators_config(config, dtype, target)
    unsupported = [name for name, applies in _unsaid(config, layout).items() if applies]
    if unsupported:
        raise InputError(
            f"layout={layout!r}: it cannot express {', '.join(unsupported)}: write it as"
            " 'speculators'"
        )
    nested: JsonObject = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": [tap - 1 for tap in config.taps],
    }
    raw, size = config_json.format_config(config.layer, dtype), {"block_size": config.block_size}
    if config.target_layers is not None:  # SpecForge needs it even if the layers are named
        raw |= {"num_target_layers": config.target_layers}
    if layout == "deepspec":
        return (
            raw
            | size
            | nested
            | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512}
            | _heads_of(config)
        )
    nested |= {"causal_head": True} if config.causal else {}  # JetSpec's name for it
    nested |= {} if config.embedding_normed else {"embedding_normed": False}
    nested |= config.changed_factors
    raw |= {"is_causal": config.causal} if config.causal or not config.causal_in_window else {}
    if config.has_selector:
        # Both places need the block size: SpecForge reads one, z-lab's own files have the other.
        return (
            raw
            | size
            | {
                "architectures": ["DFlash2DraftModel"],
                "dflash_config": size | nested | config.of_dflash2,
            }
        )
    return raw | size | {"architectures": ["DFlashDraftModel"], "dflash_config": nested}


def _unsaid(config: DFlashConfig, layout: str) -> dict[str, bool]:
    """Return the properties that a layout cannot express, and whether a drafter has each."""
    properties = {
        "a vocabulary of its own": config.own_ids,
        "windows that are counted from the anchor": config.window_of_block,
    }
    if layout == "dflash":
        has_own = config.own_embedding or config.own_head
        return properties | {
            "predictions from the anchor": config.from_anchor,
            "an embedding or a head of its own": has_own,
        }
    uses_targets = not (config.own_embedding and config.own_head)
    return properties | {
        "blocks that are causal": config.causal or config.causal_in_window,
        "anchors that predict nothing": not config.from_anchor,
        "that embedding and head are the target's": uses_targets,
    }


def _heads_of(config: DFlashConfig) -> JsonObject:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_of_token,
    }


def _speculators_config(config: DFlashConfig, dtype: str, target: str) -> JsonObject:
    if config.causal or (config.layer.windowed_layers and not config.window_of_block):
        if config.causal:
            what = "a block that is causal in every layer"
        else:
            what = "windows that are counted from each token"
        raise InputError(f"layout='speculators': it cannot express {what}: write it as 'dflash'")
    if config.changed_factors:
        raise InputError(
            "layout='speculators': it cannot express factors of embeddings or logits: write it as"
            " 'dflash'"
        )
    kind, architecture = "dflash", "DFlashSpeculator"
    if config.has_selector:
        kind, architecture = "dflash2", "DFlash2DraftModel"
    elif config.has_heads:
        kind, architecture = "dspark", "DSparkSpeculator"
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_version": "0.9.0",
        "block_size": config.block_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.layer.hidden_size,
        "aux_hidden_state_layer_ids": list(config.taps),
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.from_anchor,
        "sliding_window_non_causal": not config.causal_in_window,
        **(_heads_of(config) if config.has_heads else {}),
        **(config.of_dflash2 if config.has_selector else {}),
        **speculators.format_common(config.layer, kind, config.depth, dtype, target),
    }


# --- the formats ----------------------------------------------------------------------------------

DFLASH = CheckpointFormat(
    title="a DFlash drafter",
    layouts=("dflash", "speculators", "deepspec"),
    recognises=lambda raw, tensors: kind_of(raw) == "dflash",
    read_config=_read_dflash,
    declare=declare,
    axis_units=lambda config: config.layer.axis_units | {"draft_vocab": config.draft_vocab_size},
    format_config=format_config,
    layout_of=lambda stored: layout_of(stored.raw) or "dflash",
    left_over=lambda config, stored: LEFT_OVER + speculators.LEFT_OVER,
    reduced_vocabulary=DraftVocabulary.of,
)
DFLASH2: CheckpointFormat = replace(
    DFLASH,
    title="a DFlash2 drafter",
    layouts=("dflash", "speculators"),
    recognises=lambda raw, tensors: kind_of(raw) == "dflash2",
    read_config=_read_dflash2,
)
DSPARK: CheckpointFormat = replace(
    DFLASH,
    title="a DSpark drafter",
    layouts=("deepspec", "speculators"),
    recognises=lambda raw, tensors: kind_of(raw) == "dspark",
    read_config=_read_dspark,
)
