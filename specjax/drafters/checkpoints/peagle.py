"""P-EAGLE's parameters, and the two layouts in which its checkpoints are published.

Both are EAGLE-3's with two things more: ``mask_hidden``, and the token that stands where nothing has been drafted yet.
``speculators`` is that of the speculators package, which vLLM reads; its layers may have sliding windows. ``specforge`` is
SpecForge's: the fields of a Llama model, and the layers whose *output* is read. Its config.json may leave the token out, which
SpecForge then takes from the tokenizer: whoever reads such a file must say it.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import Any

from specjax.drafters.checkpoints import eagle3 as eagle3_checkpoint
from specjax.drafters.checkpoints.eagle3 import Eagle3Config
from specjax.drafters.trained import CheckpointFormat, TrainedDrafter
from specjax.errors import InputError
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError, Field, check_fields, texts, whole
from specjax.models.params import Param, Params

_FULL, _WINDOWED = "full_attention", "sliding_attention"
_MASK_FIELDS: dict[str, Field] = {  # the first is both layouts', the others are vLLM's names for it
    name: whole(0, 9_999_999, default=None) for name in ("mask_token_id", "pard_token", "ptd_token_id")
}


@dataclass(frozen=True, kw_only=True)
class PEagleConfig(Eagle3Config):
    """The shape of a `PEagle`: that of an EAGLE-3 drafter, whose layers may have windows, and one field more.

    Attributes:
        mask_token_id: the token that stands where nothing has been drafted yet.
    """

    mask_token_id: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tap_count:
            raise InputError("fc is missing: mask_hidden stands in place of layers of the target, so some must be read")
        if not 0 <= self.mask_token_id < self.layer.vocab_size:
            raise InputError(
                f"mask_token_id={self.mask_token_id}: must be a token of the target, from 0 to {self.layer.vocab_size - 1}"
            )

    @classmethod
    def of(cls, config: Eagle3Config, mask_token_id: int) -> "PEagleConfig":
        """``config`` with the token beside."""
        return cls(
            **{field.name: getattr(config, field.name) for field in fields_of(Eagle3Config)}, mask_token_id=mask_token_id
        )


def declare(config: PEagleConfig, layout: str) -> Params:
    """Return the `Param` declarations; the names are the same in both layouts."""
    return eagle3_checkpoint.declare(config, "speculators") | declare_mask_hidden(config)


def declare_mask_hidden(config: PEagleConfig) -> Params:
    """Return the declaration of the vector that stands in place of the target's layers."""
    joined = config.tap_count * config.target_hidden_size
    # As wide as states are that have been normed: what fc makes of it is then as long as what it makes of the target's.
    return {"mask_hidden": Param((1, 1, joined), (None, None, None), "mask_hidden", stddev=1.0)}


# --- reading ---------------------------------------------------------------------------------------------------------


def recognises(raw: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """Return whether a checkpoint is a P-EAGLE drafter's; see `CheckpointFormat`."""
    named = raw.get("architectures")
    by_name = isinstance(named, list) and any("peagle" in str(name).lower() for name in named)
    return by_name or raw.get("speculators_model_type") == "peagle" or "mask_hidden" in tensors


def read_config(stored: CheckpointFiles, mask_token_id: int | None = None) -> PEagleConfig:
    """The shape of a checkpoint in either layout.

    Args:
        stored: the checkpoint.
        mask_token_id: the token, where config.json does not say it.

    Raises:
        CheckpointError: a field is not as it must be, or counts what there are no tensors of; a part is missing.
    """
    if eagle3_checkpoint.layout_of(stored) == "eagle3":
        raise CheckpointError(
            f"{stored.directory}: the first layer's tensors begin with 'midlayer.', and P-EAGLE's with 'layers.0.': give a "
            "checkpoint as speculators or SpecForge write it"
        )
    if "mask_hidden" not in stored.shapes:
        raise CheckpointError(
            f"{stored.directory}: 'mask_hidden' is missing, what a P-EAGLE drafter reads where the target has read nothing "
            "yet: give the checkpoint of one, or load it as eagle3"
        )
    mask = _mask_token(stored, mask_token_id)
    described = stored.raw.get("transformer_layer_config")
    plain, windows = _without_windows(stored.raw if described is None else described, stored.file)
    raw = plain if described is None else {**stored.raw, "transformer_layer_config": plain}
    config = PEagleConfig.of(eagle3_checkpoint.read_config(stored, raw), mask)
    kinds, window = windows
    if not kinds:
        return config
    if len(kinds) != config.layer.num_layers:
        raise CheckpointError(f"{stored.file}: layer_types names {len(kinds)} layers of {config.layer.num_layers}: name each")
    windowed = tuple(index for index, kind in enumerate(kinds) if kind == _WINDOWED)
    return replace(config, layer=replace(config.layer, sliding_window=window, windowed_layers=windowed))


def _mask_token(stored: CheckpointFiles, told: int | None) -> int:
    said = check_fields(stored.raw, _MASK_FIELDS, stored.file)
    tokens = {token for token in (*said.values(), told) if token is not None}
    if not tokens:
        raise CheckpointError(
            f"{stored.file}: mask_token_id is missing, the token that stands where nothing has been drafted yet: write the one "
            "that the drafter was trained with into it, or give it as from_pretrained(..., mask_token_id=...)"
        )
    if len(tokens) > 1:
        raise CheckpointError(
            f"{stored.file}: mask_token_id: said to be {' and '.join(map(str, sorted(tokens)))}: only one can be the token "
            "that the drafter was trained with"
        )
    return tokens.pop()


def _without_windows(described: Any, source: str) -> tuple[Any, tuple[list[str], int | None]]:
    """The fields of a layer without those of windows, which Llama's have not elsewhere; and the layers' kinds, where one has a
    window, and how many pairs that sees."""
    if not isinstance(described, Mapping):
        return described, ([], None)  # which is refused where all fields are read
    said = check_fields(
        described, {"layer_types": texts(default=None), "sliding_window": whole(1, 10**9, default=None)}, source
    )
    plain = {name: value for name, value in described.items() if name not in ("layer_types", "sliding_window")}
    plain |= {"use_sliding_window": False} if "use_sliding_window" in described else {}
    kinds = said["layer_types"] or []
    if others := sorted(set(kinds) - {_FULL, _WINDOWED}):
        raise CheckpointError(f"{source}: layer_types has {others[0]!r}: only {_FULL!r} and {_WINDOWED!r} are supported")
    if _WINDOWED not in kinds:
        return plain, ([], None)
    if said["sliding_window"] is None:
        raise CheckpointError(f"{source}: layer_types has {_WINDOWED!r}, but there is no sliding_window: write its size")
    return plain, (kinds, said["sliding_window"])


# --- writing ---------------------------------------------------------------------------------------------------------


def format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> dict[str, Any]:
    """Return the fields of config.json in ``layout``; arguments as in `TrainedDrafter.save_pretrained`.

    Raises:
        InputError: the layout cannot say what the drafter is.
    """
    config: PEagleConfig = drafter.config
    own: dict[str, Any] = {"mask_token_id": config.mask_token_id}
    window, windowed = config.layer.sliding_window, config.layer.windowed_layers
    plain = replace(config, layer=replace(config.layer, sliding_window=None, windowed_layers=()))
    if layout == "specforge":
        if windowed or config.layer.model_type != "llama" or not config.own_head:
            raise InputError("layout='specforge': has Llama's layers without windows, and a head: write it as 'speculators'")
        return eagle3_checkpoint.format_eagle3(plain, dtype) | own | {"architectures": ["PEagleDraftModel"]}
    raw = eagle3_checkpoint.format_speculators(plain, dtype, target) | own
    if windowed:
        kinds = [_WINDOWED if index in windowed else _FULL for index in range(config.layer.num_layers)]
        raw["transformer_layer_config"] |= {"layer_types": kinds, "sliding_window": window, "use_sliding_window": True}
    raw["speculators_config"] |= {
        "algorithm": "peagle",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": drafter.draft_shape.depth}],
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
