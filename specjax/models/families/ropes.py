"""The rotary embeddings in config.json: one for all layers, or one for each kind of layer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from specjax.models.config import Layer, ModelConfig, Rope
from specjax.models.fields import (
    CheckpointError,
    Field,
    Fields,
    FieldTable,
    JsonObject,
    check_fields,
    flag,
    number,
    show,
    text,
    whole,
)

FULL, WINDOWED = "full_attention", "sliding_attention"
"""The kinds of layers, as ``layer_types`` names them."""

_NUMBERS: dict[str, tuple[str, Field]] = {  # Hugging Face's name -> ours
    "factor": ("factor", number(0.001, 1e6, default=None)),
    "original_max_position_embeddings": (
        "original_max_positions",
        whole(1, 1_000_000_000, default=None),
    ),
    "low_freq_factor": ("low_freq_factor", number(0.001, 1e6, default=None)),
    "high_freq_factor": ("high_freq_factor", number(0.001, 1e6, default=None)),
    "beta_fast": ("beta_fast", number(0.001, 1e6, default=None)),
    "beta_slow": ("beta_slow", number(0.001, 1e6, default=None)),
    "attention_factor": ("attention_factor", number(0.001, 1000, default=None)),
    "mscale": ("mscale", number(0, 1000, default=None)),
    "mscale_all_dim": ("mscale_all_dim", number(0, 1000, default=None)),
    "truncate": ("truncate", flag(default=True)),
}
_NEEDS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "proportional": (),
}
_FIELDS: FieldTable = {
    "rope_type": text(*_NEEDS, default=None),
    "type": text(*_NEEDS, default=None),  # its name before transformers 4.45
    "rope_theta": number(2, 1e12, default=None),
    "partial_rotary_factor": number(0.01, 1, default=None),
    **{name: field for name, (_, field) in _NUMBERS.items()},
}


def parse_rope(fields: Fields, theta: float = 10000.0, turns_parts: bool = False) -> Rope:
    """Parse both layouts: ``rope_theta`` with ``rope_scaling``, or ``rope_parameters``.

    The second layout is that of transformers 5. If both are present, ``rope_scaling`` is read, as
    in transformers 5. An ``original_max_position_embeddings`` beside them replaces the one inside,
    for the types that read it.

    Args:
        fields: the fields of config.json.
        theta: the theta if config.json has none.
        turns_parts: whether the family reads ``partial_rotary_factor``; proportional RoPE always
            does.

    Raises:
        CheckpointError: A field is missing or invalid.
    """
    place, raw = said_of_rope(fields)
    theta, turned = fields["rope_theta"] or theta, fields["partial_rotary_factor"]
    if place == "rope_scaling":
        _check_not_lost(
            fields["rope_parameters"] or {},
            {"rope_theta": theta, "partial_rotary_factor": turned, **raw},
        )
    rope = _parse(raw, f"{place}.", theta, fields["max_position_embeddings"], turned, turns_parts)
    original = fields["original_max_position_embeddings"]
    if original and rope.kind in ("llama3", "yarn"):
        return replace(rope, original_max_positions=original)
    return rope


def said_of_rope(fields: Fields) -> tuple[str, Fields]:
    """Return the name and the content of the field that describes the RoPE.

    It is ``rope_scaling`` if present, or else ``rope_parameters``.
    """
    place = "rope_scaling" if fields["rope_scaling"] else "rope_parameters"
    return place, fields[place] or {}


_ONLY_OF_A_MODEL = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")
"""Fields of a RoPE that are fixed by training, and never changed to extend the context."""


def _check_not_lost(parameters: Fields, read: Fields) -> None:
    """Refuse a file where ``rope_scaling`` hides a trained value of ``rope_parameters``.

    transformers then computes with a default: a user who adds ``rope_scaling`` for longer texts
    does not want another theta.
    """
    for name in _ONLY_OF_A_MODEL:
        if (value := parameters.get(name)) is not None and read.get(name) != value:
            raise CheckpointError(
                f"rope_parameters.{name}={show(value)}: rope_scaling is present as well, and"
                f" transformers then reads rope_scaling alone, with {name}={show(read.get(name))}:"
                " write the whole rope into rope_parameters, and leave rope_scaling out"
            )


def _parse(
    raw: Fields,
    place: str,
    theta: float,
    positions: int,
    turned: float | None = None,
    turns_parts: bool = False,
) -> Rope:
    scaling = check_fields(raw, _FIELDS, "config.json", place)
    kind = scaling["rope_type"] or scaling["type"] or "default"
    if missing := [name for name in _NEEDS[kind] if scaling[name] is None]:
        raise CheckpointError(f"{place.rstrip('.')}: rope type {kind!r} needs {', '.join(missing)}")
    share = scaling["partial_rotary_factor"] or turned or 1.0
    if share != 1.0 and kind != "proportional" and not turns_parts:
        if kind != "default":
            raise CheckpointError(
                f"{place}partial_rotary_factor={share}: must be 1 with rope type {kind!r}: this"
                " model_type rotates whole heads"
            )
        share = 1.0  # transformers does not read the field in this model_type
    # With latent attention it would scale the scores.
    if kind == "dynamic" and scaling["mscale_all_dim"]:
        raise CheckpointError(
            f"{place}mscale_all_dim={scaling['mscale_all_dim']}: not supported with rope type"
            " 'dynamic'"
        )
    theta = float(scaling["rope_theta"] or theta)
    # Dynamic scaling starts beyond max_position_embeddings, and no text here is longer.
    if kind in ("default", "dynamic"):
        return Rope(theta=theta, turned=float(share))
    parameters = {
        ours: scaling[name] for name, (ours, _) in _NUMBERS.items() if scaling[name] is not None
    }
    if kind != "proportional":
        parameters.setdefault("original_max_positions", positions)
    rope = Rope(theta=theta, kind=kind, turned=float(share), **parameters)
    if rope.low_freq_factor >= rope.high_freq_factor:
        raise CheckpointError(
            f"{place}low_freq_factor={rope.low_freq_factor}: must be below"
            f" high_freq_factor={rope.high_freq_factor}"
        )
    if rope.beta_slow > rope.beta_fast:  # Kimi K2 has 1 for both
        raise CheckpointError(
            f"{place}beta_slow={rope.beta_slow}: must be at most beta_fast={rope.beta_fast}"
        )
    return rope


def check_turned(fields: Fields) -> None:
    """Refuse a ``partial_rotary_factor`` that does not rotate pairs of a head's numbers.

    The error is a `CheckpointError`.
    """
    _, raw = said_of_rope(fields)
    share = raw.get("partial_rotary_factor") or fields["partial_rotary_factor"] or 1.0
    size = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
    # `parse_rope` refuses other values.
    if (
        type(share) in (int, float)
        and 0 < share <= 1
        and (int(size * share) < 2 or int(size * share) % 2)
    ):
        raise CheckpointError(
            f"partial_rotary_factor={share}: must rotate an even number of a head's {size} numbers"
        )


def format_rope(rope: Rope) -> JsonObject:
    """Return the ``rope_parameters`` that `parse_rope` reads."""
    raw: JsonObject = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        raw |= {
            name: value
            for name, (ours, _) in _NUMBERS.items()
            if (value := getattr(rope, ours)) is not None
        }
    return raw | ({} if rope.turned == 1.0 else {"partial_rotary_factor": rope.turned})


# --- one RoPE for each kind of layer -------------------------------------------------------------


def parse_by_kind(
    fields: Fields, defaults: Mapping[str, Rope], turns_parts: bool | None = None
) -> dict[str, Rope]:
    """Return the RoPE of each kind of layer, full and windowed.

    Files of transformers 5 have ``rope_parameters`` for each kind. In older files ``rope_theta``
    and ``rope_scaling`` apply to the full layers, and ``rope_local_base_freq`` is the theta of the
    windowed ones. If both are present, ``rope_scaling`` replaces fields of the full layers'
    ``rope_parameters`` one by one, as in transformers 5.

    Args:
        fields: the fields of config.json; ``rope_local_base_freq`` if the family has it.
        defaults: the default for each kind.
        turns_parts: whether the family reads ``partial_rotary_factor``; None: if the default turns
            a part.
    """
    rope_parameters, positions = fields["rope_parameters"] or {}, fields["max_position_embeddings"]
    if rope_parameters and not {FULL, WINDOWED} & rope_parameters.keys():
        raise CheckpointError(
            f"rope_parameters: must have {FULL!r} and {WINDOWED!r}: this model_type has a rope for"
            " each kind"
        )
    thetas = {FULL: fields["rope_theta"], WINDOWED: fields.get("rope_local_base_freq")}
    ropes = {}
    for kind, default in defaults.items():
        raw, place = rope_parameters.get(kind), f"rope_parameters.{kind}."
        if raw is not None and not isinstance(raw, dict):
            raise CheckpointError(f"rope_parameters.{kind}={show(raw)}: must be an object")
        if kind == FULL and (scaling := fields["rope_scaling"]):
            place = "rope_scaling." if raw is None else place
            raw = _rescaled(rope_parameters, scaling)
        theta = thetas[kind]
        if raw is None:
            ropes[kind] = Rope(theta=float(theta)) if theta else default
        else:
            turns = turns_parts
            if turns is None:
                turns = default.kind == "default" and default.turned != 1.0
            # The default share of a head is that of unscaled RoPE.
            is_scaled = (raw.get("rope_type") or raw.get("type") or "default") != "default"
            share = default.turned if turns and not is_scaled else None
            ropes[kind] = _parse(raw, place, theta or default.theta, positions, share, turns)
        if not ropes[kind].truncate:
            raise CheckpointError(
                f"{place}truncate=False: transformers does not read it if each kind of layer has"
                " its own rope: leave it out, or give a model of another type"
            )
    return ropes


def _rescaled(rope_parameters: Fields, scaling: Fields) -> JsonObject:
    """Return ``rope_parameters`` of the full layers, updated with ``rope_scaling``."""
    if rope_parameters and rope_parameters.get(FULL) is None:
        raise CheckpointError(
            f"rope_scaling={show(scaling)}: rope_parameters lacks {FULL!r}, and this is the rope of"
            " those layers: write it there"
        )
    whole = {"rope_type": "default", **(rope_parameters.get(FULL) or {}), **scaling}
    if scaling.get("type") not in (None, whole["rope_type"]):
        raise CheckpointError(
            f"rope_scaling.type={show(scaling['type'])}: transformers reads"
            f" rope_type={show(whole['rope_type'])} in its place in this model_type: write"
            " rope_type"
        )
    return whole


def layers_by_kind(fields: Fields, full: Layer) -> tuple[Layer, ...]:
    """Return the ``layers`` of a `ModelConfig` whose own fields describe windowed layers.

    ``full`` has the fields in which the full layers differ.
    """
    return tuple(full if kind == FULL else Layer() for kind in fields["layer_types"])


def ropes_of(config: ModelConfig) -> dict[str, Rope]:
    """Return the RoPE of each kind of layer, for ``rope_parameters``.

    Windowed layers have the model's. If all layers are windowed, both kinds have it.
    """
    full = [
        config.of_layer(i).rope for i in range(config.num_layers) if i not in config.windowed_layers
    ]
    return {FULL: full[0] if full else config.rope, WINDOWED: config.rope}


def format_by_kind(config: ModelConfig) -> JsonObject:
    """Return the fields that `parse_by_kind` reads."""
    return {"rope_parameters": {kind: format_rope(rope) for kind, rope in ropes_of(config).items()}}


# --- layers without RoPE --------------------------------------------------------------------------

NO_POSITIONS = Layer(rope=Rope(kind="none"))
"""The difference of a layer without RoPE."""

INTERVAL_FIELDS: FieldTable = {"no_rope_layer_interval": whole(1, 10_000, default=4)}
"""The field that says which layers have no RoPE where ``no_rope_layers`` does not name them."""


def parse_rope_layers(fields: Fields, stated: Sequence[int] | None) -> list[bool]:
    """Return for each layer whether it has RoPE.

    Args:
        fields: the fields of config.json, with `INTERVAL_FIELDS`.
        stated: the value of ``no_rope_layers``; None: one layer of every interval has none.

    Raises:
        CheckpointError: Layers are missing.
    """
    count, every = fields["num_hidden_layers"], fields["no_rope_layer_interval"]
    turned = [(layer + 1) % every for layer in range(count)] if stated is None else stated
    if len(turned) < count:
        raise CheckpointError(
            f"no_rope_layers names {len(turned)} layers of num_hidden_layers={count}: name each"
        )
    return [bool(has_rope) for has_rope in turned[:count]]


def format_rope_layers(config: ModelConfig) -> JsonObject:
    """Return the ``no_rope_layers`` that `parse_rope_layers` reads."""
    kinds = [config.of_layer(layer).rope.kind for layer in range(config.num_layers)]
    return {"no_rope_layers": [int(kind != "none") for kind in kinds]}
