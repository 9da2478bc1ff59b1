"""What config.json says of rotary embeddings: one for all layers, or one for each kind of layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from specjax.models.config import Layer, ModelConfig, Rope
from specjax.models.fields import CheckpointError, Field, check_fields, flag, number, show, text, whole

FULL, WINDOWED = "full_attention", "sliding_attention"
"""The kinds of layers, as ``layer_types`` names them."""

_NUMBERS: dict[str, tuple[str, Field]] = {  # Hugging Face's name -> ours
    "factor": ("factor", number(0.001, 1e6, default=None)),
    "original_max_position_embeddings": ("original_max_positions", whole(1, 1_000_000_000, default=None)),
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
_FIELDS: dict[str, Field] = {
    "rope_type": text(*_NEEDS, default=None),
    "type": text(*_NEEDS, default=None),  # its name before transformers 4.45
    "rope_theta": number(2, 1e12, default=None),
    "partial_rotary_factor": number(0.01, 1, default=None),
    **{name: field for name, (_, field) in _NUMBERS.items()},
}


def parse_rope(fields: Mapping[str, Any], theta: float = 10000.0, turns_parts: bool = False) -> Rope:
    """Both layouts: ``rope_theta`` with ``rope_scaling``, and the ``rope_parameters`` of transformers 5.

    Where both are there, ``rope_scaling`` is read, as in transformers 5. ``original_max_position_embeddings`` beside them takes
    the place of the one within, for the types that read it.

    Args:
        fields: of config.json.
        theta: where it says none.
        turns_parts: whether the family reads ``partial_rotary_factor``; proportional RoPE always does.

    Raises:
        CheckpointError: a field is missing, or is not as it must be.
    """
    place, said = said_of_rope(fields)
    theta, turned = fields["rope_theta"] or theta, fields["partial_rotary_factor"]
    if place == "rope_scaling":
        _check_not_lost(fields["rope_parameters"] or {}, {"rope_theta": theta, "partial_rotary_factor": turned, **said})
    rope = _parse(said, f"{place}.", theta, fields["max_position_embeddings"], turned, turns_parts)
    original = fields["original_max_position_embeddings"]
    return replace(rope, original_max_positions=original) if original and rope.kind in ("llama3", "yarn") else rope


def said_of_rope(fields: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Return the name and the content of the field that describes the rope: ``rope_scaling``, or else ``rope_parameters``."""
    place = "rope_scaling" if fields["rope_scaling"] else "rope_parameters"
    return place, fields[place] or {}


_ONLY_OF_A_MODEL = ("rope_theta", "partial_rotary_factor", "llama_4_scaling_beta")
"""What a rope says that was trained with, and is not changed to read longer texts."""


def _check_not_lost(parameters: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    """Refuse a file where ``rope_scaling`` hides what only ``rope_parameters`` says of how the model was trained.

    Transformers then computes with a default: a user who adds ``rope_scaling`` for longer texts does not want another theta.
    """
    for name in _ONLY_OF_A_MODEL:
        if (value := parameters.get(name)) is not None and read.get(name) != value:
            raise CheckpointError(
                f"rope_parameters.{name}={show(value)}: rope_scaling stands beside rope_parameters, and transformers "
                f"then reads rope_scaling alone, with {name}={show(read.get(name))}: write the whole rope into "
                "rope_parameters, and leave rope_scaling out"
            )


def _parse(
    said: Mapping[str, Any], place: str, theta: float, positions: int, turned: float | None = None, turns_parts: bool = False
) -> Rope:
    scaling = check_fields(said, _FIELDS, "config.json", place)
    kind = scaling["rope_type"] or scaling["type"] or "default"
    if missing := [name for name in _NEEDS[kind] if scaling[name] is None]:
        raise CheckpointError(f"{place.rstrip('.')}: rope type {kind!r} needs {', '.join(missing)}")
    share = scaling["partial_rotary_factor"] or turned or 1.0
    if share != 1.0 and kind != "proportional" and not turns_parts:
        if kind != "default":
            raise CheckpointError(
                f"{place}partial_rotary_factor={share}: must be 1 with rope type {kind!r}: heads of this model_type are turned "
                "as a whole"
            )
        share = 1.0  # which transformers does not read in this model_type
    if kind == "dynamic" and scaling["mscale_all_dim"]:  # with latent attention it would scale the scores
        raise CheckpointError(f"{place}mscale_all_dim={scaling['mscale_all_dim']}: is not supported with rope type 'dynamic'")
    theta = float(scaling["rope_theta"] or theta)
    if kind in ("default", "dynamic"):  # dynamic is the default up to max_position_embeddings, and no text here is longer
        return Rope(theta=theta, turned=float(share))
    given = {ours: scaling[name] for name, (ours, _) in _NUMBERS.items() if scaling[name] is not None}
    if kind != "proportional":
        given.setdefault("original_max_positions", positions)
    rope = Rope(theta=theta, kind=kind, turned=float(share), **given)
    for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
        if getattr(rope, low) >= getattr(rope, high):
            raise CheckpointError(f"{place}{low}={getattr(rope, low)}: must be below {high}={getattr(rope, high)}")
    return rope


def check_turned(fields: Mapping[str, Any]) -> None:
    """Refuse, with a CheckpointError, a ``partial_rotary_factor`` that does not turn pairs of a head's numbers."""
    _, said = said_of_rope(fields)
    share = said.get("partial_rotary_factor") or fields["partial_rotary_factor"] or 1.0
    size = fields["head_dim"] or fields["hidden_size"] // fields["num_attention_heads"]
    # What is no such number is refused by `parse_rope`.
    if type(share) in (int, float) and 0 < share <= 1 and (int(size * share) < 2 or int(size * share) % 2):
        raise CheckpointError(f"partial_rotary_factor={share}: must turn an even share of a head's {size} numbers")


def format_rope(rope: Rope) -> dict[str, Any]:
    """The ``rope_parameters`` that `parse_rope` reads."""
    said: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        said |= {name: value for name, (ours, _) in _NUMBERS.items() if (value := getattr(rope, ours)) is not None}
    return said | ({} if rope.turned == 1.0 else {"partial_rotary_factor": rope.turned})


# --- one for each kind of layer -------------------------------------------------------------------------------------------


def parse_by_kind(fields: Mapping[str, Any], defaults: Mapping[str, Rope]) -> dict[str, Rope]:
    """The rotary embedding of each kind of layer, full and windowed.

    Files of transformers 5 have ``rope_parameters`` for each kind. In older ones ``rope_theta`` and ``rope_scaling`` are those
    of the full layers, and ``rope_local_base_freq`` is the theta of the windowed ones. Where both are there, ``rope_scaling``
    replaces what ``rope_parameters`` says of the full layers, key by key, as in transformers 5.

    Args:
        fields: of config.json; ``rope_local_base_freq`` where the family has it.
        defaults: by kind, where it says nothing.
    """
    said, positions = fields["rope_parameters"] or {}, fields["max_position_embeddings"]
    if said and not {FULL, WINDOWED} & said.keys():
        raise CheckpointError(f"rope_parameters: must be given for {FULL!r} and {WINDOWED!r}: this model_type has one for each")
    thetas = {FULL: fields["rope_theta"], WINDOWED: fields.get("rope_local_base_freq")}
    found = {}
    for kind, default in defaults.items():
        own, place = said.get(kind), f"rope_parameters.{kind}."
        if own is not None and not isinstance(own, dict):
            raise CheckpointError(f"rope_parameters.{kind}={show(own)}: must be an object")
        if kind == FULL and (scaling := fields["rope_scaling"]):
            place = "rope_scaling." if own is None else place
            own = _rescaled(said, scaling)
        theta = thetas[kind]
        if own is None:
            found[kind] = Rope(theta=float(theta)) if theta else default
        else:
            found[kind] = _parse(own, place, theta or default.theta, positions)
        if not found[kind].truncate:
            raise CheckpointError(
                f"{place}truncate=False: transformers does not read it where each kind of layers has a rope of its own: "
                "leave it out, or give a model of another type"
            )
    return found


def _rescaled(said: Mapping[str, Any], scaling: Mapping[str, Any]) -> dict[str, Any]:
    """What ``rope_parameters`` says of the full layers, with ``rope_scaling`` over it."""
    if said and said.get(FULL) is None:
        raise CheckpointError(
            f"rope_scaling={show(scaling)}: rope_parameters stands beside it without {FULL!r}, whose rope this is: write it "
            "there"
        )
    whole = {"rope_type": "default", **(said.get(FULL) or {}), **scaling}
    if scaling.get("type") not in (None, whole["rope_type"]):
        raise CheckpointError(
            f"rope_scaling.type={show(scaling['type'])}: transformers reads rope_type={show(whole['rope_type'])} in its place "
            "in this model_type: write rope_type"
        )
    return whole


def layers_by_kind(fields: Mapping[str, Any], full: Layer) -> tuple[Layer, ...]:
    """The ``layers`` of a `ModelConfig` that says of all layers what is so of the windowed ones; ``full`` is how the others
    differ."""
    return tuple(full if kind == FULL else Layer() for kind in fields["layer_types"])


def ropes_of(config: ModelConfig) -> dict[str, Rope]:
    """The rotary embedding of each kind of layer, for ``rope_parameters``: of windowed layers where there are any, that of the
    model, and otherwise likewise of both."""
    full = [config.of_layer(i).rope for i in range(config.num_layers) if i not in config.windowed_layers]
    return {FULL: full[0] if full else config.rope, WINDOWED: config.rope}


def format_by_kind(config: ModelConfig) -> dict[str, Any]:
    """The fields that `parse_by_kind` reads."""
    return {"rope_parameters": {kind: format_rope(rope) for kind, rope in ropes_of(config).items()}}
