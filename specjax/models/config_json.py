"""Read and write config.json: the fields of a checkpoint, and the `ModelConfig` that follows.

Everything here runs on the host, so every failure is a `CheckpointError` that names the file or the
field, its value and the remedy. `specjax.models.families` has the differences of the model types.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import fields as fields_of
from dataclasses import replace
from typing import Any

from specjax.errors import InputError, did_you_mean
from specjax.models import directories, generation_config, parts
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import Activation, ModelConfig, Rope
from specjax.models.families import FAMILIES, REFUSED, Family
from specjax.models.families.ropes import FULL, WINDOWED, format_rope, parse_rope
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
    show,
    text,
    texts,
    whole,
)
from specjax.models.parts import Layers
from specjax.models.quantization import published

SUPPORTED = FAMILIES.keys()
"""The model types that can be loaded."""


_DTYPES = ("float32", "bfloat16", "float16", "float64")
_TOKEN = whole(0, 9_999_999, default=None)
_TOKENS = Field(
    "a token id from 0 to 9,999,999, or a list of them",
    lambda value: all(map(_TOKEN.accepts, value if type(value) is list else [value])),
    default=None,
)


_ACTIVATIONS: dict[str, Activation] = {  # Hugging Face's name -> ours; the first of ours is written
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}

# The fields of every family's config.json. The bounds are far beyond any model, and small enough to
# compute with.
_FIELDS: FieldTable = {
    "vocab_size": whole(1, 10_000_000),
    "hidden_size": whole(1, 1_000_000),
    "intermediate_size": whole(1, 10_000_000),
    "num_hidden_layers": whole(1, 10_000),
    "num_attention_heads": whole(1, 100_000),
    "num_key_value_heads": whole(1, 100_000, default=None),
    "head_dim": whole(2, 100_000, default=None),
    "max_position_embeddings": whole(1, 1_000_000_000),
    "rms_norm_eps": number(1e-12, 0.1, default=1e-6),
    "hidden_act": text(*_ACTIVATIONS, default="silu"),
    "tie_word_embeddings": flag(default=None),
    "attention_bias": flag(default=None),
    "mlp_bias": flag(default=None),
    "rope_theta": number(2, 1e12, default=None),
    "rope_scaling": mapping(default=None),
    "rope_parameters": mapping(default=None),
    "partial_rotary_factor": number(0.01, 1, default=None),
    "original_max_position_embeddings": whole(1, 1_000_000_000, default=None),
    "sliding_window": whole(1, 1_000_000_000, default=None),
    "use_sliding_window": flag(default=None),
    "max_window_layers": whole(0, 10_000, default=28),
    "layer_types": texts(default=None),
    "per_layer_config": Field(
        "left out, or null: this model_type has no fields for single layers",
        lambda value: not value,
        default=None,
    ),
    "num_nextn_predict_layers": whole(0, 1000, default=None),
    "bos_token_id": _TOKEN,
    "eos_token_id": _TOKENS,
    "pad_token_id": whole(-1, 9_999_999, default=None),
    "dtype": text(*_DTYPES, default=None),
    "torch_dtype": text(*_DTYPES, default=None),
    "quantization_config": mapping(default=None),
}
_GENERATION: FieldTable = {"eos_token_id": _TOKENS}  # of generation_config.json


def read_config(files: CheckpointFiles) -> ModelConfig:
    """Read config.json, and the end-of-sequence ids of generation_config.json.

    Raises:
        CheckpointError: A field is missing, has the wrong type, is out of range, or asks for
            something that is not supported.
    """
    directories.check(files)
    config = parse_config(files.raw, files.file)
    source = str(files.directory / generation_config.FILE)
    eos = check_fields(files.json(generation_config.FILE, {}), _GENERATION, source)["eos_token_id"]
    if eos is None:
        return config
    return replace(config, eos_token_ids=_eos_token_ids(eos, config.vocab_size, source))


_PART: FieldTable = {
    "specjax_layers": Field(
        "two whole numbers, the first layer and the one after the last",
        lambda value: (
            type(value) is list and len(value) == 2 and all(type(item) is int for item in value)
        ),
        default=None,
    ),
    "specjax_part_of": Field(
        "the fingerprint of the whole target, 32 hexadecimal digits",
        lambda value: type(value) is str and re.fullmatch("[0-9a-f]{32}", value) is not None,
        default="",
    ),
}


def read_part(files: CheckpointFiles) -> tuple[Layers, str] | None:
    """Return the layers of a part of a target, and the fingerprint of the whole.

    It returns None if the checkpoint is whole.

    Raises:
        CheckpointError: config.json cannot be read, or these fields are invalid.
    """
    fields = check_fields(files.raw, _PART, files.file)
    if fields["specjax_layers"] is None:
        return None
    (first, last), count = fields["specjax_layers"], parse_config(files.raw, files.file).num_layers
    if (
        not fields["specjax_part_of"]
        or not 0 <= first <= last <= count
        or (first == last and last != count)
    ):
        raise CheckpointError(
            f"{files.file}: specjax_layers={[first, last]},"
            f" specjax_part_of={fields['specjax_part_of']!r}: must be layers of the {count} of the"
            " target, and its fingerprint: write the part again with specjax convert"
            " --client-parts"
        )
    return (first, last), fields["specjax_part_of"]


def check_whole(files: CheckpointFiles) -> None:
    """Refuse, with an InputError, a checkpoint that is a part of a target. No weights are read."""
    if (part := read_part(files)) is not None:
        raise parts.refusal(str(files.directory), part[0], read_config(files).num_layers)


def parse_config(raw: JsonObject, source: str = "config.json") -> ModelConfig:
    """Return the `ModelConfig` of the fields of a config.json; ``source`` names it in errors.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    family = family_of(raw, source)
    names: dict[str, str] = {}
    try:
        completed = family.complete(raw)
        names = family.names_in_file(raw, completed)
        fields = check_fields(completed, {**_FIELDS, **family.fields}, source)
        published.check_config(fields["quantization_config"], source)
        fields["layer_types"] = _layer_types(fields, family)
        family_fields = family.parse(fields)
        hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
        if fields["head_dim"] is None and "head_dim" not in family_fields and hidden % heads:
            raise InputError(
                f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}: give"
                " head_dim"
            )
        return ModelConfig(**_parse_common(fields, family, source) | family_fields)
    except InputError as error:
        message = str(error).removeprefix(f"{source}: ").removeprefix("config.json: ")
        message = _with_path(_as_in_file(message, names), raw, family, names)
        raise CheckpointError(f"{source}: {message}") from None


def _as_in_file(message: str, names: Mapping[str, str]) -> str:
    """Return an error message that names fields as the file does; see `Family.names_in_file`."""
    if not names:
        return message
    # A text in quotes is a value of the file, and a name after a point is in another object.
    pattern = rf"(?<![\w.'\"])({'|'.join(names)})(?![\w'\"])"
    return re.sub(pattern, lambda match: names[match[0]], message)


def _with_path(message: str, raw: Fields, family: Family, names: Mapping[str, str]) -> str:
    """Return an error message, with the path to its field if the field is in a nested object."""
    if family.nested is None or not isinstance(raw.get(family.nested), dict):
        return message
    name = re.match("[a-z0-9_]*", message)
    outer_names = {stated.partition(".")[0] for stated in names.values()}
    if name is None or name[0] not in {*_FIELDS, *family.fields, *outer_names}:
        return f"{family.nested}: {message}"
    return message if name[0] in family.said_of_whole(raw) else f"{family.nested}.{message}"


def parse_drafter_config(raw: Fields, source: str = "config.json") -> ModelConfig:
    """Return the `ModelConfig` of a drafter's layers; arguments and errors as in `parse_config`.

    A drafter never ends a text, so its ``bos_token_id`` and ``eos_token_id`` are not used.
    Published drafters have those of their target there, which may be beyond a smaller vocabulary;
    such ids are ignored, not refused.
    """
    size = raw.get("vocab_size")
    if type(size) is not int:
        return parse_config(dict(raw), source)

    def within(token: Any) -> bool:
        return type(token) is not int or token < size  # `parse_config` refuses other types

    bos, eos = raw.get("bos_token_id"), raw.get("eos_token_id")
    replaced: dict[str, Any] = {} if within(bos) else {"bos_token_id": None}
    if isinstance(eos, list):
        replaced["eos_token_id"] = [token for token in eos if within(token)]
    elif not within(eos):
        replaced["eos_token_id"] = None
    return parse_config({**raw, **replaced}, source)


def family_of(raw: JsonObject, source: str) -> Family:
    """Return the family that a config.json names.

    Args:
        raw: the fields of the file.
        source: the file's name, for errors.

    Raises:
        CheckpointError: ``model_type`` is missing, unknown, or not supported.
    """
    model_type = raw.get("model_type")
    if type(model_type) is str and model_type in REFUSED:
        raise CheckpointError(
            f"{source}: model_type={model_type!r} is not supported: {REFUSED[model_type]}: give a"
            f" model of one of the types {', '.join(SUPPORTED)}"
        )
    if type(model_type) is str and model_type not in SUPPORTED:
        raise CheckpointError(
            f"{source}: model_type={model_type!r}: must be one of"
            f" {', '.join(SUPPORTED)}{did_you_mean(model_type, SUPPORTED)}"
        )
    return FAMILIES[
        check_fields(raw, {"model_type": text(*SUPPORTED)}, source)["model_type"]
    ].of_file(raw)


def _parse_common(fields: Fields, family: Family, source: str) -> dict[str, Any]:
    """Return the fields of `ModelConfig` that all families parse in the same way."""
    hidden, heads = fields["hidden_size"], fields["num_attention_heads"]
    rope = Rope() if family.ropes_by_kind else parse_rope(fields, family.theta, family.turns_parts)
    max_positions = fields["max_position_embeddings"]
    if rope.kind == "yarn" and rope.original_max_positions is not None:
        # Qwen's model cards enable YaRN without raising max_position_embeddings.
        max_positions = max(max_positions, int(rope.factor * rope.original_max_positions))
    windows = _parse_windows(fields, family, max_positions, source)
    eos_token_ids = _eos_token_ids(fields["eos_token_id"], fields["vocab_size"], source)
    if (bos := fields["bos_token_id"]) is not None:
        _check_vocabulary("bos_token_id", bos, fields["vocab_size"], source)
    biases = {
        switch: bool(fields[name])
        for name, switches in family.biases.items()
        for switch in switches
    }
    return {
        "model_type": family.model_type,
        "vocab_size": fields["vocab_size"],
        "hidden_size": hidden,
        "intermediate_size": fields["intermediate_size"],
        "num_layers": fields["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": fields["num_key_value_heads"] or heads,
        "head_dim": fields["head_dim"] or hidden // heads,
        "max_positions": max_positions,
        "norm_eps": fields["rms_norm_eps"],
        "activation": _ACTIVATIONS[fields["hidden_act"]],
        "rope": rope,
        "tie_embeddings": bool(fields["tie_word_embeddings"]),
        "bos_token_id": bos,
        "eos_token_ids": eos_token_ids,
        **family.switches,
        **biases,
        **windows,
    }


def with_switches(config: ModelConfig, names: Collection[str], prefix: str) -> ModelConfig:
    """Return ``config`` with the biases and norms that a layer's tensors have.

    ``names`` are those of the tensors, and the layer's begin with ``prefix``. A drafter's
    config.json often lacks these switches, or repeats the target's.

    Raises:
        CheckpointError: The layer has latent attention or experts, or layers are of several kinds.
    """
    if config.mla is not None or config.moe is not None or config.layers or config.linear_layers:
        raise CheckpointError(
            f"model_type={config.model_type!r}: this drafter's layers must have ordinary attention"
            " and one MLP: give a drafter whose config.json is that of a dense model"
        )
    return replace(
        config,
        qkv_bias=f"{prefix}self_attn.q_proj.bias" in names,
        output_bias=f"{prefix}self_attn.o_proj.bias" in names,
        mlp_bias=f"{prefix}mlp.gate_proj.bias" in names,
        qk_norm=f"{prefix}self_attn.q_norm.weight" in names,
        tie_embeddings=False,
        sliding_window=None,  # a drafter's layers read the whole text
        windowed_layers=(),
    )


def _check_vocabulary(name: str, token: int, vocab_size: int, source: str) -> None:
    if token >= vocab_size:
        raise CheckpointError(
            f"{source}: {name}={token}: must be below the model's vocab_size={vocab_size}"
        )


def _eos_token_ids(ids: int | list[int] | None, vocab_size: int, source: str) -> tuple[int, ...]:
    tokens = () if ids is None else tuple(ids) if isinstance(ids, list) else (ids,)
    for token in tokens:
        _check_vocabulary("eos_token_id", token, vocab_size, source)
    return tokens


def _parse_windows(
    fields: Fields, family: Family, max_positions: int, source: str
) -> dict[str, Any]:
    """Return the fields of `ModelConfig` for sliding windows.

    If any layers may have a window, ``layer_types`` selects them, or in older files
    ``max_window_layers``: the layers from that index on. In other families all layers have a window
    or none, whatever ``layer_types`` says.
    """
    window, layers = fields["sliding_window"], fields["num_hidden_layers"]
    # transformers does not read layer_types in such models.
    kinds = None if family.windows == "all" else fields["layer_types"]
    if family.windows == "none" or (family.window_switch and not fields[family.window_switch]):
        window = None
    if kinds is not None:
        windowed = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
        if windowed and window is None:
            raise CheckpointError(
                f"{source}: layer_types has 'sliding_attention', but no sliding_window is in use: a"
                " model_type with windows needs its size, and Qwen's use_sliding_window, too"
            )
    else:
        windowed = tuple(
            range(fields["max_window_layers"] if family.windows == "any" else 0, layers)
        )
    if window is None or not windowed or (window >= max_positions and family.drops_long_windows):
        return {}
    return {"sliding_window": window, "windowed_layers": windowed}


def _layer_types(fields: Fields, family: Family) -> list[str] | None:
    """Return the kind of each layer, from ``layer_types`` or the family's pattern.

    It is None if there is neither.
    """
    kinds, layers = fields["layer_types"], fields["num_hidden_layers"]
    if kinds is None and family.whole_every:
        every = fields.get("sliding_window_pattern") or family.whole_every
        if not isinstance(every, int):  # EXAONE's "LLLG"
            raise CheckpointError(
                f"sliding_window_pattern={show(every)}: transformers does not read text here: give"
                " layer_types"
            )
        kinds = [FULL if (layer + 1) % every == 0 else WINDOWED for layer in range(layers)]
    if kinds is None and family.kinds_by_default is not None:
        kinds = family.kinds_by_default(layers)
    if unknown := sorted(set(kinds or ()) - set(family.kinds)):
        raise CheckpointError(
            f"layer_types has {show(unknown[0])}: only {' and '.join(map(repr, family.kinds))} are"
            " supported"
        )
    if kinds is not None and len(kinds) != layers:
        raise CheckpointError(
            f"layer_types names {len(kinds)} layers of num_hidden_layers={layers}: name each"
        )
    return kinds


def format_config(config: ModelConfig, dtype: str) -> JsonObject:
    """Return the fields of config.json; `parse_config` reads them back to an equal `ModelConfig`.

    Raises:
        CheckpointError: The layers differ, or have windows, in a way that this model type cannot
            express.
    """
    family = FAMILIES[config.model_type]
    _check_windows(config, family)
    raw = {
        "architectures": [family.architecture],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": next(
            name for name, activation in _ACTIVATIONS.items() if activation == config.activation
        ),
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": (
            list(config.eos_token_ids)
            if len(config.eos_token_ids) != 1
            else config.eos_token_ids[0]
        ),
        "dtype": dtype,
        "torch_dtype": dtype,
    }
    raw |= {name: getattr(config, switches[0]) for name, switches in family.biases.items()}
    raw |= _format_windows(config, family)
    if not family.ropes_by_kind:
        rope = format_rope(config.rope)
        if config.rope.kind == "default":
            scaling = None
        else:
            scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        # Both layouts are written: programs before transformers 5 know only the first.
        raw |= {"rope_theta": config.rope.theta, "rope_scaling": scaling, "rope_parameters": rope}
    raw |= family.format(config)
    return _check_said(config, raw)


def _check_said(config: ModelConfig, raw: JsonObject) -> JsonObject:
    """Return ``raw`` if ``config`` can be read back from it.

    Otherwise a property would be lost without a warning. Biases and norms of heads follow from the
    tensors (`with_switches`).
    """
    elsewhere = ("max_positions", "qkv_bias", "output_bias", "mlp_bias", "qk_norm")
    read = parse_config(raw, "config.json")
    expected = config if config.windowed_layers else replace(config, sliding_window=None)
    if config.rope.original_max_positions is None:  # the kind does not use it, but files have it
        expected = replace(
            expected,
            rope=replace(config.rope, original_max_positions=read.rope.original_max_positions),
        )
    if config.rope.turned != read.rope.turned:
        raise CheckpointError(
            f"partial_rotary_factor={config.rope.turned}: must be {read.rope.turned:g}:"
            f" transformers does not read it in a {config.model_type} checkpoint"
        )
    for field in fields_of(ModelConfig):
        value = getattr(expected, field.name)
        if value != getattr(read, field.name) and field.name not in elsewhere:
            raise CheckpointError(
                f"{field.name}={show(value)}: a {config.model_type} checkpoint cannot express this"
            )
    return raw


def _check_windows(config: ModelConfig, family: Family) -> None:
    windows = len(config.windowed_layers)
    if windows and not (
        family.windows == "any" or (family.windows == "all" and windows == config.num_layers)
    ):
        if family.windows == "all":
            rule = "all of its layers have a window, or none"
        else:
            rule = "its layers have no window"
        raise CheckpointError(
            f"windowed_layers={config.windowed_layers}: a {config.model_type} checkpoint cannot"
            f" express this: {rule}"
        )


def _format_windows(config: ModelConfig, family: Family) -> JsonObject:
    """Return the fields of config.json that `_parse_windows` reads."""
    raw: JsonObject = {}
    if family.windows != "none":
        raw["sliding_window"] = config.sliding_window
    if family.window_switch:
        raw[family.window_switch] = bool(config.windowed_layers)
    if family.windows == "any":
        kinds = (FULL, WINDOWED)
        raw["layer_types"] = [kinds[i in config.windowed_layers] for i in range(config.num_layers)]
    return raw
