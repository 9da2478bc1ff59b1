"""The layouts in which the checkpoints of a DFlash drafter and its kin are published: read and written.

``dflash`` is z-lab's: config.json is a Qwen3 model's, with ``block_size`` and ``dflash_config``; JetSpec's drafters are in it,
too, and DFlash2's, which have all fields of their own in ``dflash_config``. ``speculators`` is that of the speculators package
and vLLM: the layers' sizes stand in ``transformer_layer_config``. ``deepspec`` is DeepSeek's: a Qwen3 model's config.json with
the fields beside the others, and embedding and head in the file.

The layouts number the target's layers in two ways. Here a tap is the number of a layer whose *input* is read, as speculators
counts; the others name the layer before, whose output that is.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, get_args

from specjax.drafters.checkpoints.dflash_config import DFlashConfig, Markov, declare, default_taps
from specjax.drafters.draft_vocabulary import DraftVocabulary
from specjax.drafters.trained import LEFT_OVER, CheckpointFormat, TrainedDrafter
from specjax.errors import InputError
from specjax.models import config_json
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.fields import CheckpointError, Field, check_fields, flag, mapping, number, text, whole

Kind = Literal["dflash", "dspark", "dflash2"]
"""Which of the drafters a checkpoint is of."""


# --- reading ---------------------------------------------------------------------------------------------------------


def layout_of(raw: Mapping[str, Any]) -> str | None:
    """Which layout a config.json is in; None: it is of no such drafter."""
    if raw.get("speculators_model_type") in get_args(Kind):
        return "speculators"
    named = raw.get("architectures")
    named = named if isinstance(named, list) else []
    if "DFlashDraftModel" in named or "DFlash2DraftModel" in named:
        return "dflash"
    return "deepspec" if "Qwen3DSparkModel" in named else None


def kind_of(raw: Mapping[str, Any]) -> Kind | None:
    """Which drafter a config.json is of; None: of none of these. DeepSpec writes its DFlash drafters as DSpark ones without
    heads."""
    layout = layout_of(raw)
    if layout == "speculators":
        return raw["speculators_model_type"]
    if layout == "deepspec":
        return "dspark" if raw.get("markov_rank") or raw.get("enable_confidence_head") else "dflash"
    if layout == "dflash":
        return "dflash2" if "DFlash2DraftModel" in raw["architectures"] else "dflash"
    return None


def _layer_numbers(lowest: int) -> Field:
    def accepts(value: Any) -> bool:
        return type(value) is list and 0 < len(value) <= 64 and all(type(i) is int and lowest <= i < 10_000 for i in value)

    return Field("a list of at most 64 layer numbers", accepts, None)


_HEADS: dict[str, Field] = {
    "markov_rank": whole(0, 1_000_000, default=0),
    "markov_head_type": text(*get_args(Markov), default="vanilla"),
    "enable_confidence_head": flag(default=False),
    "confidence_head_with_markov": flag(default=False),
}
_OF_DFLASH2: dict[str, Field] = {
    "conv_kernel_size": whole(1, 4096),
    "conv_group_size": whole(1, 1_000_000),
    "selector_rank": whole(1, 1_000_000),
    "selector_top_k": whole(1, 10_000_000),
}
_PUBLISHED = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 256, "selector_top_k": 16}
_FIELDS: dict[str, dict[str, Field]] = {
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
        "aux_hidden_state_layer_ids": _layer_numbers(0),
        "mask_token_id": whole(0, 10_000_000),
        "transformer_layer_config": mapping(),
    },
    "deepspec": {
        "block_size": whole(1, 4096),
        "mask_token_id": whole(0, 10_000_000),
        "target_layer_ids": _layer_numbers(-1),
        "num_target_layers": whole(1, 10_000, default=None),
        **_HEADS,
    },
}
_NESTED: dict[str, Field] = {  # in dflash_config
    "mask_token_id": whole(0, 10_000_000),
    "target_layer_ids": _layer_numbers(-1),
    "block_size": whole(1, 4096, default=None),  # in newer files
    "causal_head": flag(default=None),
    "causal": flag(default=None),
    "target_hidden_size": whole(1, 1_000_000, default=None),
}
_FACTORS: dict[str, Field] = {  # z-lab's code looks for them in dflash_config first, then beside it
    "input_embedding_scale": number(1e-6, 1e6, default=None),
    "output_multiplier": number(1e-6, 1e6, default=None),
    "final_logit_softcapping": Field(
        "null, 0 or a number from 1e-06 to 1e+06", lambda value: type(value) in (int, float) and _is_cap(value), None
    ),
}
_NO_FACTORS: dict[str, Field] = {  # of layouts whose authors' code reads no such fields
    "input_embedding_scale": Field("1 in this layout", lambda value: value == 1, None),
    "output_multiplier": Field("1 in this layout", lambda value: value == 1, None),
    "final_logit_softcapping": Field("null or 0 in this layout", lambda value: value == 0, None),
}


def _is_cap(value: float) -> bool:
    return value == 0 or 1e-6 <= value <= 1e6  # z-lab's code takes 0 for no bound


_QWEN3 = {  # speculators leaves out what equals transformers' defaults
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}


def read_config(stored: CheckpointFiles) -> DFlashConfig:
    """The shape of a checkpoint, in any layout.

    Raises:
        CheckpointError: a field is not as it must be, or counts what there are no tensors of; half of a head is there.
    """
    layout = layout_of(stored.raw)
    if layout is None:
        raise CheckpointError(f"{stored.file}: names no architecture of a DFlash drafter: give the checkpoint of one")
    fields = check_fields(stored.raw, _FIELDS[layout], stored.file)
    own = _read_speculators(fields, stored) if layout == "speculators" else _read_qwen3(fields, stored, layout)
    if layout == "dflash":
        own |= _read_factors(stored)
    else:
        check_fields(stored.raw, _NO_FACTORS, stored.file)
    layer: ModelConfig = own["layer"]
    stored.check_count("num_hidden_layers", layer.num_layers, stored.numbered("layers."), "layers")
    windows = {"sliding_window": layer.sliding_window, "windowed_layers": layer.windowed_layers}
    own["layer"] = replace(config_json.with_switches(layer, stored.shapes, "layers.0."), **windows)
    _check_parts(own, stored)
    config = DFlashConfig(
        **own,
        own_ids="d2t" in stored.shapes,
        own_embedding="embed_tokens.weight" in stored.shapes,
        own_head="lm_head.weight" in stored.shapes,
    )
    read, hidden = stored.shapes.get("fc.weight", (0, 0))[-1], config.layer.hidden_size
    if read != len(config.taps) * hidden:
        raise CheckpointError(
            f"{stored.file}: fc.weight reads {read} numbers, and {len(config.taps)} layers of the target with {hidden} each "
            f"are {len(config.taps) * hidden}: give the configuration and the weights of one model, of the target's hidden size"
        )
    if config.draft_vocab_size != config.layer.vocab_size:
        DraftVocabulary(config.draft_vocab_size, config.layer.vocab_size).check_stored(stored.shapes, stored.directory)
    return config


def _read_qwen3(fields: dict[str, Any], stored: CheckpointFiles, layout: str) -> dict[str, Any]:
    """The fields of z-lab's and DeepSpec's config.json."""
    layer = config_json.parse_drafter_config(dict(stored.raw), stored.file)
    own = _read_zlab(fields, layer, stored) if layout == "dflash" else _read_deepspec(fields, stored)
    return {"layer": layer, "draft_vocab_size": layer.vocab_size, "target_layers": fields["num_target_layers"], **own}


def _read_zlab(fields: dict[str, Any], layer: ModelConfig, stored: CheckpointFiles) -> dict[str, Any]:
    is_dflash2 = kind_of(stored.raw) == "dflash2"
    nested = check_fields(fields["dflash_config"], _NESTED | (_OF_DFLASH2 if is_dflash2 else {}), stored.file, "dflash_config.")
    _check_hidden(nested["target_hidden_size"], layer, stored)
    size, named = fields["block_size"] or nested["block_size"], nested["target_layer_ids"]
    if size is None:
        raise CheckpointError(f"{stored.file}: block_size is missing: how many tokens the drafter writes at once")
    if named is None and fields["num_target_layers"] is None:
        raise CheckpointError(
            f"{stored.file}: dflash_config.target_layer_ids is missing, and num_target_layers, from which it would follow"
        )
    said = [value for value in (fields["is_causal"], nested["causal"], nested["causal_head"]) if value is not None]
    return {
        "block_size": size,
        "mask_token_id": nested["mask_token_id"],
        "taps": default_taps(fields["num_target_layers"], layer.num_layers) if named is None else _taps(named),
        "causal": any(said),
        "causal_in_window": not said and bool(layer.windowed_layers),  # what z-lab's code does where nothing is said
        **{name: nested[name] for name in _OF_DFLASH2 if is_dflash2},
    }


def _read_factors(stored: CheckpointFiles) -> dict[str, float | None]:
    """The factors of embeddings and logits: of each the field in dflash_config, where there is one, else that beside it."""
    nested = stored.raw["dflash_config"]
    within = {name: field for name, field in _FACTORS.items() if name in nested}
    beside = {name: field for name, field in _FACTORS.items() if name not in nested}
    values = check_fields(nested, within, stored.file, "dflash_config.") | check_fields(stored.raw, beside, stored.file)
    return {
        "input_embedding_scale": float(values["input_embedding_scale"] or 1.0),
        "output_multiplier": float(values["output_multiplier"] or 1.0),
        "final_logit_softcapping": float(values["final_logit_softcapping"] or 0.0) or None,
    }


def _read_deepspec(fields: dict[str, Any], stored: CheckpointFiles) -> dict[str, Any]:
    if fields["target_layer_ids"] is None:
        raise CheckpointError(f"{stored.file}: target_layer_ids is missing: the target's layers that are read")
    own = {"block_size": fields["block_size"], "mask_token_id": fields["mask_token_id"], "from_anchor": True}
    return own | {"taps": _taps(fields["target_layer_ids"])} | _read_heads(fields)


def _taps(outputs: list[int]) -> tuple[int, ...]:
    """The layers whose input is the output of those named."""
    return tuple(number + 1 for number in outputs)


def _read_speculators(fields: dict[str, Any], stored: CheckpointFiles) -> dict[str, Any]:
    described = fields["transformer_layer_config"]
    raw = _with_windows({**_QWEN3, "model_type": "qwen3", **described})
    layer = config_json.parse_drafter_config(raw, f"{stored.file}: transformer_layer_config")
    kind = kind_of(stored.raw)
    _check_hidden(fields["target_hidden_size"], layer, stored)
    if fields["aux_hidden_state_layer_ids"] is None:
        raise CheckpointError(f"{stored.file}: aux_hidden_state_layer_ids is missing: the target's layers that are read")
    by_kind = check_fields(stored.raw, _speculators_fields(kind), stored.file)
    return {
        "layer": layer,
        "block_size": fields["block_size"],
        "mask_token_id": fields["mask_token_id"],
        "taps": tuple(fields["aux_hidden_state_layer_ids"]),
        "draft_vocab_size": fields["draft_vocab_size"],
        "from_anchor": by_kind["sample_from_anchor"],
        "window_of_block": bool(layer.windowed_layers),
        "causal_in_window": bool(layer.windowed_layers) and not by_kind["sliding_window_non_causal"],
        **(_read_heads(by_kind) if kind == "dspark" else {}),
        **({name: by_kind[name] for name in _OF_DFLASH2} if kind == "dflash2" else {}),
    }


def _speculators_fields(kind: Kind | None) -> dict[str, Field]:
    """Those whose defaults are another drafter's own."""
    fields = {"sample_from_anchor": flag(kind == "dspark"), "sliding_window_non_causal": flag(kind == "dflash2")}
    if kind == "dspark":
        ranks = {"markov_rank": whole(0, 1_000_000, default=256)}
        fields |= _HEADS | ranks | {name: flag(True) for name in ("enable_confidence_head", "confidence_head_with_markov")}
    if kind == "dflash2":
        fields |= {name: replace(field, default=_PUBLISHED[name]) for name, field in _OF_DFLASH2.items()}
    return fields


def _with_windows(raw: dict[str, Any]) -> dict[str, Any]:
    """``raw``, whose windows are those of ``layer_types``, whatever else it says: so speculators reads it. One that is longer
    than any text still makes blocks causal: it is kept, as long as a text can be."""
    kinds, window, longest = raw.get("layer_types"), raw.get("sliding_window"), raw.get("max_position_embeddings", 32_768)
    if not isinstance(kinds, list) or "sliding_attention" not in kinds:
        return raw
    if type(window) is int and type(longest) is int:
        window = min(window, longest - 1)  # from the anchor, which may stand behind so many
    return raw | {"use_sliding_window": True, "sliding_window": window}


def _read_heads(fields: dict[str, Any]) -> dict[str, Any]:
    return {
        "markov_rank": fields["markov_rank"],
        "markov": fields["markov_head_type"],
        "confidence": fields["enable_confidence_head"],
        "confidence_of_token": fields["enable_confidence_head"] and fields["confidence_head_with_markov"],
    }


def _check_hidden(said: int | None, layer: ModelConfig, stored: CheckpointFiles) -> None:
    if said not in (None, layer.hidden_size):
        raise CheckpointError(
            f"{stored.file}: target_hidden_size={said}, and the drafter's hidden_size is {layer.hidden_size}: give a drafter "
            "of its target's hidden size, whose embedding and head it can use"
        )


def _check_parts(own: Mapping[str, Any], stored: CheckpointFiles) -> None:
    """Refuse parts of which config.json says one thing and the tensors another: they would be left out without a word."""
    for field, what, part, said in (
        ("markov_rank", "a head", "markov_head.", own.get("markov_rank", 0) > 0),
        ("enable_confidence_head", "a head", "confidence_head.", own.get("confidence", False)),
        ("selector_rank", "a selector", "candidate_selector.", "selector_rank" in own),
        ("conv_kernel_size", "convolutions", "attention_conv.", "conv_kernel_size" in own),
        ("conv_kernel_size", "convolutions", "mlp_conv.", "conv_kernel_size" in own),
    ):
        found = sorted(name for name in stored.shapes if name.startswith(part) or f".{part}" in name)
        if found and not said:
            raise CheckpointError(
                f"{stored.file}: says nothing of {what} ({field}), but there are its tensors {', '.join(found)}: give the "
                "configuration and the weights of one model"
            )
        if said and not found:
            raise CheckpointError(
                f"{stored.directory}: has no tensors {part}*, {what} that {field} in config.json says there is: give the "
                "configuration and the weights of one model"
            )


def _read_dflash(stored: CheckpointFiles) -> DFlashConfig:
    config = read_config(stored)
    if config.has_selector:
        raise CheckpointError(f"{stored.file}: is of a DFlash2, whose convolutions a DFlash lacks: load it as a DFlash2")
    return config


def _read_dflash2(stored: CheckpointFiles) -> DFlashConfig:
    config = read_config(stored)
    if not config.has_selector:
        raise CheckpointError(f"{stored.file}: has neither convolutions nor a selector: load it as a DFlash")
    return config


def _read_dspark(stored: CheckpointFiles) -> DFlashConfig:
    config = read_config(stored)
    if not config.has_heads:
        raise CheckpointError(f"{stored.file}: has neither a Markov head nor a confidence head: load it as a DFlash")
    return config


# --- writing ---------------------------------------------------------------------------------------------------------


def format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> dict[str, Any]:
    """Return the fields of config.json in ``layout``; arguments as in `TrainedDrafter.save_pretrained`.

    Raises:
        InputError: the layout cannot say what the drafter is.
    """
    config: DFlashConfig = drafter.config
    if layout == "speculators":
        return _speculators_config(config, dtype, target)
    wrong = [name for name, is_so in _unsaid(config, layout).items() if is_so]
    if wrong:
        raise InputError(f"layout={layout!r}: cannot say {', '.join(wrong)}: write it as 'speculators'")
    own: dict[str, Any] = {"mask_token_id": config.mask_token_id, "target_layer_ids": [tap - 1 for tap in config.taps]}
    raw, size = config_json.format_config(config.layer, dtype), {"block_size": config.block_size}
    if config.target_layers is not None:  # SpecForge reads it where the layers are named, too
        raw |= {"num_target_layers": config.target_layers}
    if layout == "deepspec":
        return raw | size | own | {"architectures": ["Qwen3DSparkModel"], "num_anchors": 512} | _heads_of(config)
    own |= {"causal_head": True} if config.causal else {}  # JetSpec's name of it
    own |= config.changed_factors
    raw |= {"is_causal": config.causal} if config.causal or not config.causal_in_window else {}
    if config.has_selector:
        # The size of a block stands twice: SpecForge reads the one, and z-lab's own files have the other.
        return raw | size | {"architectures": ["DFlash2DraftModel"], "dflash_config": size | own | _dflash2_of(config)}
    return raw | size | {"architectures": ["DFlashDraftModel"], "dflash_config": own}


def _unsaid(config: DFlashConfig, layout: str) -> dict[str, bool]:
    """What a layout has no field for, and whether a drafter is so."""
    unsaid = {
        "a vocabulary of its own": config.own_ids,
        "windows that are counted from the anchor": config.window_of_block,
    }
    if layout == "dflash":
        brings = config.own_embedding or config.own_head
        return unsaid | {"predictions from the anchor": config.from_anchor, "an embedding or a head of its own": brings}
    lacks = not (config.own_embedding and config.own_head)
    return unsaid | {
        "blocks that are causal": config.causal or config.causal_in_window,
        "anchors that predict nothing": not config.from_anchor,
        "that embedding and head are the target's": lacks,
    }


def _heads_of(config: DFlashConfig) -> dict[str, Any]:
    return {
        "markov_rank": config.markov_rank,
        "markov_head_type": config.markov,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_of_token,
    }


def _dflash2_of(config: DFlashConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in _OF_DFLASH2}


def _speculators_config(config: DFlashConfig, dtype: str, target: str) -> dict[str, Any]:
    if config.causal or (config.layer.windowed_layers and not config.window_of_block):
        what = "a block that is causal in every layer" if config.causal else "windows that are counted from each token"
        raise InputError(f"layout='speculators': cannot say {what}: write it as 'dflash'")
    if config.changed_factors:
        raise InputError("layout='speculators': cannot say factors of embeddings or logits: write it as 'dflash'")
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
        **(_dflash2_of(config) if config.has_selector else {}),
        "transformer_layer_config": config_json.format_config(config.layer, dtype),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.depth}],
            "verifier": {"name_or_path": target or None, "architectures": []},
        },
        "dtype": dtype,
        "torch_dtype": dtype,
    }


# --- the formats -----------------------------------------------------------------------------------------------------

DFLASH = CheckpointFormat(
    title="a DFlash drafter",
    layouts=("dflash", "speculators", "deepspec"),
    recognises=lambda raw, tensors: kind_of(raw) == "dflash",
    read_config=_read_dflash,
    declare=declare,
    axis_units=lambda config: config.layer.axis_units | {"draft_vocab": config.draft_vocab_size},
    format_config=format_config,
    left_over=lambda config, stored: (*LEFT_OVER, "verifier_norm.weight", "verifier_lm_head.weight"),
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
