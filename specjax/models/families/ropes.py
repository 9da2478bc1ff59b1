"""What config.json says of rotary embeddings: one for all layers, or one for each kind of layer."""

from collections.abc import Mapping
from typing import Any

from specjax.models.config import Layer, ModelConfig, Rope
from specjax.models.fields import CheckpointError, Field, check_fields, flag, number, text, whole

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
    "truncate": ("truncate", flag(default=None)),
}
_NEEDS = {
    "default": (),
    "linear": ("factor",),
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

    Args:
        fields: of config.json.
        theta: where it says none.
        turns_parts: whether the family reads ``partial_rotary_factor``; proportional RoPE always does.

    Raises:
        CheckpointError: a field is missing, or is not as it must be.
    """
    place = "rope_parameters" if fields["rope_parameters"] else "rope_scaling"
    said = fields[place] or {}
    theta = fields["rope_theta"] or theta
    return _parse(said, f"{place}.", theta, fields["max_position_embeddings"], fields["partial_rotary_factor"], turns_parts)


def _parse(
    said: Mapping[str, Any], place: str, theta: float, positions: int, turned: float | None = None, turns_parts: bool = False
) -> Rope:
    scaling = check_fields(said, _FIELDS, "config.json", place)
    kind = scaling["rope_type"] or scaling["type"] or "default"
    if missing := [name for name in _NEEDS[kind] if scaling[name] is None]:
        raise CheckpointError(f"{place.rstrip('.')}: rope type {kind!r} needs {', '.join(missing)}")
    share = scaling["partial_rotary_factor"] or turned or 1.0
    if share != 1.0 and kind != "proportional" and not turns_parts:
        raise CheckpointError(
            f"{place}partial_rotary_factor={share}: must be 1: heads of this model_type are turned as a whole"
        )
    theta = float(scaling["rope_theta"] or theta)
    if kind == "default":
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
    said = fields["rope_parameters"] or fields["rope_scaling"] or {}
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
    of the full layers, and ``rope_local_base_freq`` is the theta of the windowed ones.

    Args:
        fields: of config.json; ``rope_local_base_freq`` where the family has it.
        defaults: by kind, where it says nothing.
    """
    said, positions = fields["rope_parameters"] or {}, fields["max_position_embeddings"]
    if said and not {FULL, WINDOWED} & said.keys():
        raise CheckpointError(f"rope_parameters: must be given for {FULL!r} and {WINDOWED!r}: this model_type has one for each")
    older = {
        FULL: (fields["rope_scaling"], fields["rope_theta"]),
        WINDOWED: (None, fields.get("rope_local_base_freq")),
    }
    found = {}
    for kind, default in defaults.items():
        scaling, theta = older[kind]
        if kind in said:
            if not isinstance(said[kind], dict):
                raise CheckpointError(f"rope_parameters.{kind}={said[kind]!r}: must be an object")
            found[kind] = _parse(said[kind], f"rope_parameters.{kind}.", theta or default.theta, positions)
        elif scaling is not None:
            found[kind] = _parse(scaling, "rope_scaling.", theta or default.theta, positions)
        else:
            found[kind] = Rope(theta=float(theta)) if theta else default
    return found


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
