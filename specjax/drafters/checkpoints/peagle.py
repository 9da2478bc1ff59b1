"""The parameters of P-EAGLE, and the two layouts of its published checkpoints.

Both layouts are EAGLE-3's with two additions: ``mask_hidden``, and the token that marks positions
without a drafted token. ``speculators`` is the layout of the speculators package, which vLLM reads;
its layers may have sliding windows. ``specforge`` is SpecForge's layout: the fields of a Llama
model, and the layers whose *output* is read. Its config.json may omit the token, which SpecForge
then takes from the tokenizer. The user must state it to load such a file.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import Any

from specjax.drafters.checkpoints import eagle3 as eagle3_checkpoint
from specjax.drafters.checkpoints.eagle3 import Eagle3Config
from specjax.drafters.trained import CheckpointFormat, TrainedDrafter, architectures_of
from specjax.errors import InputError
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import (
    CheckpointError,
    Field,
    Fields,
    JsonObject,
    check_fields,
    texts,
    whole,
)
from specjax.models.params import Param, Params

_FULL, _WINDOWED = "full_attention", "sliding_attention"
_MASK_FIELDS: dict[
    str, Field
] = {  # both layouts have the first, and vLLM has two more names for it
    name: whole(0, 9_999_999, default=None)
    for name in ("mask_token_id", "pard_token", "ptd_token_id")
}


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """The configuration of a `PEagle`: that of an EAGLE-3 drafter, with one more field.

    Its layers may have windows.

    Attributes:
        mask_token_id: the token that marks positions without a drafted token.
    """

    mask_token_id: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tap_count:
            raise InputError(
                "fc is missing: mask_hidden takes the place of target layers, so the drafter must"
                " read some"
            )
        if not 0 <= self.mask_token_id < self.layer.vocab_size:
            raise InputError(
                f"mask_token_id={self.mask_token_id}: must be a token of the target, from 0 to"
                f" {self.layer.vocab_size - 1}"
            )

    @classmethod
    def of(cls, config: Eagle3Config, mask_token_id: int) -> "PEagleConfig":
        """Return ``config`` with a mask token."""
        return cls(
            **{field.name: getattr(config, field.name) for field in fields_of(Eagle3Config)},
            mask_token_id=mask_token_id,
        )


def declare(config: PEagleConfig, layout: str) -> Params:
    """Return the `Param` declarations; the names are the same in both layouts."""
    return eagle3_checkpoint.declare(config, "speculators") | declare_mask_hidden(config)


def declare_mask_hidden(config: PEagleConfig) -> Params:
    """Declare the vector that takes the place of the target's layers."""
    joined = config.tap_count * config.target_hidden_size
    # A deviation of 1 gives the vector the norm of a normed state, so that its projection by fc is
    # as large as that of the target's states.
    return {"mask_hidden": Param((1, 1, joined), (None, None, None), "mask_hidden", stddev=1.0)}


# --- reading --------------------------------------------------------------------------------------


def recognises(raw: Fields, tensors: Collection[str]) -> bool:
    """Return whether a checkpoint is a P-EAGLE drafter's; see `CheckpointFormat`."""
    by_name = any("peagle" in name.lower() for name in architectures_of(raw))
    return by_name or raw.get("speculators_model_type") == "peagle" or "mask_hidden" in tensors


def read_config(stored: CheckpointFiles, mask_token_id: int | None = None) -> PEagleConfig:
    """Return the configuration of a checkpoint in either layout.

    Args:
        stored: the files of the checkpoint.
        mask_token_id: the mask token, if config.json does not state it.

    Raises:
        CheckpointError: A field is invalid, a count does not match the tensors, or a part is
            missing.
    """
    if eagle3_checkpoint.layout_of(stored) == "eagle3":
        raise CheckpointError(
            f"{stored.directory}: the first layer's tensors begin with 'midlayer.', but P-EAGLE's"
            " with 'layers.0.': give a checkpoint as speculators or SpecForge write it"
        )
    if "mask_hidden" not in stored.shapes:
        raise CheckpointError(
            f"{stored.directory}: 'mask_hidden' is missing, which a P-EAGLE drafter reads in place"
            " of the target's layers: give the checkpoint of one, or load it as eagle3"
        )
    mask = _mask_token(stored, mask_token_id)
    layer_fields = stored.raw.get("transformer_layer_config")
    plain, windows = _without_windows(
        stored.raw if layer_fields is None else layer_fields, stored.file
    )
    raw = plain if layer_fields is None else {**stored.raw, "transformer_layer_config": plain}
    config = PEagleConfig.of(eagle3_checkpoint.read_config(stored, raw), mask)
    kinds, window = windows
    if not kinds:
        return config
    if len(kinds) != config.layer.num_layers:
        raise CheckpointError(
            f"{stored.file}: layer_types names {len(kinds)} layers of {config.layer.num_layers}:"
            " name each"
        )
    windowed = tuple(index for index, kind in enumerate(kinds) if kind == _WINDOWED)
    return replace(
        config, layer=replace(config.layer, sliding_window=window, windowed_layers=windowed)
    )


def _mask_token(stored: CheckpointFiles, requested: int | None) -> int:
    stated = check_fields(stored.raw, _MASK_FIELDS, stored.file)
    tokens = {token for token in (*stated.values(), requested) if token is not None}
    if not tokens:
        raise CheckpointError(
            f"{stored.file}: mask_token_id is missing, the token at positions without a drafted"
            " token: add the one that the drafter was trained with, or give it as"
            " from_pretrained(..., mask_token_id=...)"
        )
    if len(tokens) > 1:
        raise CheckpointError(
            f"{stored.file}: mask_token_id is stated as {' and '.join(map(str, sorted(tokens)))}:"
            " give only the one that the drafter was trained with"
        )
    return tokens.pop()


def _without_windows(layer_fields: Any, source: str) -> tuple[Any, tuple[list[str], int | None]]:
    """Return the fields of a layer without those about windows, and the windows.

    The windows are the kinds of the layers and the window size in pairs. The kinds are empty if no
    layer has a window. Elsewhere Llama layers have no windows, so their reader would refuse the
    fields.
    """
    if not isinstance(layer_fields, Mapping):
        return layer_fields, ([], None)  # the reader of all fields refuses it
    stated = check_fields(
        layer_fields,
        {"layer_types": texts(default=None), "sliding_window": whole(1, 10**9, default=None)},
        source,
    )
    plain = {
        name: value
        for name, value in layer_fields.items()
        if name not in ("layer_types", "sliding_window")
    }
    plain |= {"use_sliding_window": False} if "use_sliding_window" in layer_fields else {}
    kinds = stated["layer_types"] or []
    if unknown := sorted(set(kinds) - {_FULL, _WINDOWED}):
        raise CheckpointError(
            f"{source}: layer_types has {unknown[0]!r}: only {_FULL!r} and {_WINDOWED!r} are"
            " supported"
        )
    if _WINDOWED not in kinds:
        return plain, ([], None)
    if stated["sliding_window"] is None:
        raise CheckpointError(
            f"{source}: layer_types has {_WINDOWED!r}, but there is no sliding_window: write its"
            " size"
        )
    return plain, (kinds, stated["sliding_window"])


# --- writing --------------------------------------------------------------------------------------


def format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> JsonObject:
    """Return the fields of config.json in ``layout``.

    The arguments are those of `TrainedDrafter.save_pretrained`.

    Raises:
        InputError: The layout has no field for a property of the drafter.
    """
    config: PEagleConfig = drafter.config
    mask: JsonObject = {"mask_token_id": config.mask_token_id}
    window, windowed = config.layer.sliding_window, config.layer.windowed_layers
    plain = replace(config, layer=replace(config.layer, sliding_window=None, windowed_layers=()))
    if layout == "specforge":
        if windowed or config.layer.model_type != "llama" or not config.own_head:
            raise InputError(
                "layout='specforge': it has Llama's layers without windows, and a head: write it as"
                " 'speculators'"
            )
        return (
            eagle3_checkpoint.format_eagle3(plain, dtype)
            | mask
            | {"architectures": ["PEagleDraftModel"]}
        )
    raw = eagle3_checkpoint.format_speculators(plain, dtype, target) | mask
    if windowed:
        kinds = [
            _WINDOWED if index in windowed else _FULL for index in range(config.layer.num_layers)
        ]
        raw["transformer_layer_config"] |= {
            "layer_types": kinds,
            "sliding_window": window,
            "use_sliding_window": True,
        }
    raw["speculators_config"] |= {
        "algorithm": "peagle",
        "proposal_methods": [
            {"proposal_type": "greedy", "speculative_tokens": drafter.draft_shape.depth}
        ],
    }
    return raw | {
        "architectures": ["PEagleSpeculator"],
        "speculators_model_type": "peagle",
        "speculators_version": "0.9.0",
        "embed_requires_grad": True,
    }


FORMAT: CheckpointFormat = replace(
    eagle3_checkpoint.FORMAT,
    title="a P-EAGLE drafter",
    layouts=("speculators", "specforge"),
    recognises=recognises,
    read_config=read_config,
    declare=declare,
    format_config=format_config,
    layout_of=None,
)
