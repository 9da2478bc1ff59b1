"""The shape of a DFlash drafter and its kin, their parameters, and the layouts in which their checkpoints are published.

``dflash`` is z-lab's: config.json is a Qwen3 model's, with ``block_size`` and ``dflash_config``; JetSpec's drafters are in it,
too. ``speculators`` is that of the speculators package and vLLM: the layers' sizes stand in ``transformer_layer_config``.
``deepspec`` is DeepSeek's: a Qwen3 model's config.json with the fields beside the others, and embedding and head in the file.

The layouts number the target's layers in two ways. Here a tap is the number of a layer whose *input* is read, as speculators
counts; the others name the layer before, whose output that is.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from specjax.drafters.trained import Stored
from specjax.errors import InputError
from specjax.models import huggingface
from specjax.models import params as declarations
from specjax.models.config import ModelConfig
from specjax.models.fields import CheckpointError, Field, check_fields, flag, mapping, text, whole
from specjax.models.params import Param, Params, matrix, norm

LAYOUTS = ("dflash", "speculators", "deepspec")

Markov = Literal["vanilla", "gated", "rnn"]
"""What the head makes of the token before: one vector of it; the same, weighed by a gate that reads the state; or the state of
a recurrent cell that has read all tokens of the block."""


@dataclass(frozen=True)
class DFlashConfig:
    """The shape of a `DFlash`, and, with heads, of a `DSpark`.

    Attributes:
        layer: of its layers, those of a Qwen3; ``vocab_size`` is the target's.
        block_size: tokens of a block, the anchor included.
        mask_token_id: the token that stands where nothing is drafted yet.
        taps: the target's layers whose *input* it reads, ascending; the number after the last is that one's output.
        draft_vocab_size: tokens that it can draft, Vd.
        causal: tokens of a block see those before them, and not all of the block (JetSpec).
        from_anchor: the anchor predicts the first drafted token; otherwise the token after it does, and the anchor nothing.
        window_of_block: a window is counted from the anchor, for all tokens of a block alike, and has so many tokens before it;
            otherwise from each token, and has that one among them.
        causal_in_window: as ``causal``, in layers with a window.
        own_ids: whether a table says which of the target's tokens each of its own is; otherwise they are the same.
        own_embedding: whether it brings an embedding, and does not use the target's.
        own_head: whether it brings a head, and does not use the target's.
        markov_rank: of the matrix by which the token before changes the logits of the next; 0: nothing does.
        markov: see `Markov`.
        confidence: whether a head says how likely each token of a draft is to be accepted.
        confidence_of_token: whether that head reads the token before, too.
    """

    layer: ModelConfig
    block_size: int
    mask_token_id: int
    taps: tuple[int, ...]
    draft_vocab_size: int
    causal: bool = False
    from_anchor: bool = False
    window_of_block: bool = False
    causal_in_window: bool = False
    own_ids: bool = False
    own_embedding: bool = False
    own_head: bool = False
    markov_rank: int = 0
    markov: Markov = "vanilla"
    confidence: bool = False
    confidence_of_token: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1 + (not self.from_anchor):
            raise InputError(f"block_size={self.block_size}: leaves no token to draft")
        if not 0 <= self.mask_token_id < self.layer.vocab_size:
            raise InputError(f"mask_token_id={self.mask_token_id}: must be one of the target's {self.layer.vocab_size} tokens")
        if not self.taps or list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
            raise InputError(f"taps={self.taps}: must name layers of the target, ascending, and each once")
        if self.own_ids and not self.own_head:
            raise InputError("lm_head is missing: a drafter with a vocabulary of its own needs a head of its own")
        if self.confidence_of_token and not (self.confidence and self.markov_rank):
            raise InputError("confidence_head_with_markov: needs a confidence head, and a Markov head of a rank above 0")

    @property
    def depth(self) -> int:
        """Most tokens of a draft."""
        return self.block_size - (not self.from_anchor)

    @property
    def has_heads(self) -> bool:
        """Whether it is a DSpark's."""
        return self.markov_rank > 0 or self.confidence


def default_taps(layers: int, count: int) -> tuple[int, ...]:
    """``count`` taps of a target with so many layers, as z-lab spreads them: from the output of its second layer to that of its
    last but two. A target of fewer than 7 layers has them spread over all of it, fewer where there are not so many."""
    if count == 1:
        return (layers // 2 + 1,)
    first, last = (1, layers - 3) if layers >= 7 else (0, layers - 1)
    return tuple(sorted({1 + round(first + i * (last - first) / (count - 1)) for i in range(count)}))


def declare(config: DFlashConfig) -> Params:
    """The `Param` declarations; the names are the same in all layouts."""
    layer, hidden, rank = config.layer, config.layer.hidden_size, config.markov_rank
    own = (hidden, None)
    tree: Params = {
        "layers": [declarations.declare_layer(layer, f"layers.{i}.", i) for i in range(layer.num_layers)],
        "fc": matrix("fc", (len(config.taps) * hidden, None), own),
        "hidden_norm": norm("hidden_norm", hidden),
        "norm": norm("norm", hidden),
    }
    if config.own_embedding:
        tree["embed"] = Param((layer.vocab_size, hidden), ("vocab", None), "embed_tokens.weight")
    if config.own_head:
        tree["lm_head"] = matrix("lm_head", own, (config.draft_vocab_size, "draft_vocab"))
    if config.own_ids:
        tree["d2t"] = Param((config.draft_vocab_size,), (None,), "d2t", "zeros", dtype="int32", stored_dtype="int64")
    if rank:
        tree["markov_in"] = Param((layer.vocab_size, rank), ("vocab", None), "markov_head.markov_w1.weight")
        tree["markov_out"] = matrix("markov_head.markov_w2", (rank, None), (config.draft_vocab_size, "draft_vocab"))
    if rank and config.markov != "vanilla":
        name, inputs, outputs = ("gate", 1, 1) if config.markov == "gated" else ("joint", 2, 3)
        tensor = f"markov_head.{name}_proj"
        tree[f"markov_{name}"] = matrix(tensor, (hidden + inputs * rank, None), (outputs * rank, None))
        tree[f"markov_{name}_bias"] = Param((outputs * rank,), (None,), f"{tensor}.bias", "zeros")
    if config.confidence:
        tree["confidence"] = matrix("confidence_head.proj", (hidden + rank * config.confidence_of_token, None), (1, None))
        tree["confidence_bias"] = Param((1,), (None,), "confidence_head.proj.bias", "zeros")
    return tree


# --- reading ---------------------------------------------------------------------------------------------------------


def layout_of(raw: Mapping[str, Any]) -> str | None:
    """Which layout a config.json is in; None: it is no DFlash's."""
    if raw.get("speculators_model_type") in ("dflash", "dspark"):
        return "speculators"
    named = raw.get("architectures")
    named = named if isinstance(named, list) else []
    if "DFlashDraftModel" in named:
        return "dflash"
    return "deepspec" if "Qwen3DSparkModel" in named else None


def is_dspark(raw: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a drafter with heads. DeepSpec writes its DFlash drafters as DSpark ones without."""
    if layout_of(raw) == "speculators":
        return raw.get("speculators_model_type") == "dspark"
    return layout_of(raw) == "deepspec" and bool(raw.get("markov_rank") or raw.get("enable_confidence_head"))


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
_FIELDS: dict[str, dict[str, Field]] = {
    "dflash": {
        "block_size": whole(1, 4096, default=None),
        "is_causal": flag(default=False),
        "num_target_layers": whole(1, 10_000, default=None),
        "dflash_config": mapping(),
    },
    "speculators": {
        "block_size": whole(1, 4096, default=8),
        "draft_vocab_size": whole(1, 10_000_000, default=32_000),
        "target_hidden_size": whole(1, 1_000_000, default=None),
        "aux_hidden_state_layer_ids": _layer_numbers(0),
        "mask_token_id": whole(0, 10_000_000),
        "sliding_window_non_causal": flag(default=False),
        "transformer_layer_config": mapping(),
    },
    "deepspec": {
        "block_size": whole(1, 4096),
        "mask_token_id": whole(0, 10_000_000),
        "target_layer_ids": _layer_numbers(-1),
        **_HEADS,
    },
}
_NESTED: dict[str, Field] = {  # in dflash_config
    "mask_token_id": whole(0, 10_000_000),
    "target_layer_ids": _layer_numbers(-1),
    "block_size": whole(1, 4096, default=None),  # in newer files
    "causal_head": flag(default=False),
    "causal": flag(default=False),
    "target_hidden_size": whole(1, 1_000_000, default=None),
}
_QWEN3 = {  # speculators leaves out what equals transformers' defaults
    "vocab_size": 151936,
    "hidden_size": 4096,
    "intermediate_size": 22016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
}


def read_config(stored: Stored) -> DFlashConfig:
    """The shape of a checkpoint, in any layout.

    Raises:
        CheckpointError: a field is not as it must be, or counts what there are no tensors of; half of a head is there.
    """
    layout = layout_of(stored.raw)
    if layout is None:
        raise CheckpointError(f"{stored.file}: names no architecture of a DFlash drafter: give the checkpoint of one")
    fields = check_fields(stored.raw, _FIELDS[layout], stored.file)
    own = _read_speculators(fields, stored) if layout == "speculators" else _read_qwen3(fields, stored, layout)
    layer: ModelConfig = own["layer"]
    stored.check_count("num_hidden_layers", layer.num_layers, stored.numbered("layers."), "layers")
    windows = {"sliding_window": layer.sliding_window, "windowed_layers": layer.windowed_layers}
    own["layer"] = replace(huggingface.with_switches(layer, stored.shapes, "layers.0."), **windows)
    _check_heads(own, stored)
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
    if not config.own_ids and config.draft_vocab_size != config.layer.vocab_size:
        raise CheckpointError(
            f"{stored.directory}: 'd2t' is missing: it says which of the target's {config.layer.vocab_size} tokens the "
            f"{config.draft_vocab_size} of the drafter are. Take a checkpoint that has it"
        )
    return config


def _read_qwen3(fields: dict[str, Any], stored: Stored, layout: str) -> dict[str, Any]:
    """The fields of z-lab's and DeepSpec's config.json."""
    layer = huggingface.parse_config(dict(stored.raw), stored.file)
    heads = {}
    if layout == "dflash":
        nested = check_fields(fields["dflash_config"], _NESTED, stored.file, "dflash_config.")
        _check_hidden(nested["target_hidden_size"], layer, stored)
        named, mask, size = nested["target_layer_ids"], nested["mask_token_id"], fields["block_size"] or nested["block_size"]
        causal = fields["is_causal"] or nested["causal"] or nested["causal_head"]
        if size is None:
            raise CheckpointError(f"{stored.file}: block_size is missing: how many tokens the drafter writes at once")
        if named is None and fields["num_target_layers"] is None:
            raise CheckpointError(
                f"{stored.file}: dflash_config.target_layer_ids is missing, and num_target_layers, from which it would follow"
            )
    else:
        named, mask, size = fields["target_layer_ids"], fields["mask_token_id"], fields["block_size"]
        causal, heads = False, _read_heads(fields)
        if named is None:
            raise CheckpointError(f"{stored.file}: target_layer_ids is missing: the target's layers that are read")
    taps = default_taps(fields["num_target_layers"], layer.num_layers) if named is None else tuple(id + 1 for id in named)
    return {
        "layer": layer,
        "block_size": size,
        "mask_token_id": mask,
        "taps": taps,
        "draft_vocab_size": layer.vocab_size,
        "causal": causal,
        "from_anchor": layout == "deepspec",
        **heads,
    }


def _read_speculators(fields: dict[str, Any], stored: Stored) -> dict[str, Any]:
    described = fields["transformer_layer_config"]
    raw = _with_windows({**_QWEN3, "model_type": "qwen3", **described})
    layer = huggingface.parse_config(raw, f"{stored.file}: transformer_layer_config")
    is_dspark = stored.raw.get("speculators_model_type") == "dspark"
    _check_hidden(fields["target_hidden_size"], layer, stored)
    if fields["aux_hidden_state_layer_ids"] is None:
        raise CheckpointError(f"{stored.file}: aux_hidden_state_layer_ids is missing: the target's layers that are read")
    from_anchor = check_fields(stored.raw, {"sample_from_anchor": flag(default=is_dspark)}, stored.file)["sample_from_anchor"]
    defaults = {
        "markov_rank": whole(0, 1_000_000, default=256),
        "enable_confidence_head": flag(default=True),
        "confidence_head_with_markov": flag(default=True),
    }
    return {
        "layer": layer,
        "block_size": fields["block_size"],
        "mask_token_id": fields["mask_token_id"],
        "taps": tuple(fields["aux_hidden_state_layer_ids"]),
        "draft_vocab_size": fields["draft_vocab_size"],
        "from_anchor": from_anchor,
        "window_of_block": bool(layer.windowed_layers),
        "causal_in_window": bool(layer.windowed_layers) and not fields["sliding_window_non_causal"],
        **(_read_heads(check_fields(stored.raw, _HEADS | defaults, stored.file)) if is_dspark else {}),
    }


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


def _check_hidden(said: int | None, layer: ModelConfig, stored: Stored) -> None:
    if said not in (None, layer.hidden_size):
        raise CheckpointError(
            f"{stored.file}: target_hidden_size={said}, and the drafter's hidden_size is {layer.hidden_size}: give a drafter "
            "of its target's hidden size, whose embedding and head it can use"
        )


def _check_heads(own: Mapping[str, Any], stored: Stored) -> None:
    """Refuse a head of which config.json says one thing and the tensors another: it would be left out without a word."""
    for field, head, said in (
        ("markov_rank", "markov_head.", own.get("markov_rank", 0) > 0),
        ("enable_confidence_head", "confidence_head.", own.get("confidence", False)),
    ):
        found = sorted(name for name in stored.shapes if name.startswith(head))
        if found and not said:
            raise CheckpointError(
                f"{stored.file}: says nothing of a head ({field}), but there are its tensors {', '.join(found)}: give the "
                "configuration and the weights of one model"
            )
        if said and not found:
            raise CheckpointError(
                f"{stored.directory}: has no tensors {head}*, the head that {field} in config.json says there is: give the "
                "configuration and the weights of one model"
            )


# --- writing ---------------------------------------------------------------------------------------------------------


def format_config(config: DFlashConfig, layout: str, dtype: str, target: str) -> dict[str, Any]:
    """The fields of config.json in ``layout``; ``target`` as in `TrainedDrafter.save_pretrained`.

    Raises:
        InputError: the layout cannot say what the drafter is.
    """
    if layout == "speculators":
        return _speculators_config(config, dtype, target)
    wrong = [name for name, is_so in _unsaid(config, layout).items() if is_so]
    if wrong:
        raise InputError(f"layout={layout!r}: cannot say {', '.join(wrong)}: write it as 'speculators'")
    raw = huggingface.format_config(config.layer, dtype) | {"block_size": config.block_size}
    named = [tap - 1 for tap in config.taps]
    if layout == "dflash":
        nested = {"mask_token_id": config.mask_token_id, "target_layer_ids": named}
        nested |= {"causal_head": True} if config.causal else {}
        return raw | {"architectures": ["DFlashDraftModel"], "dflash_config": nested}
    own = {"architectures": ["Qwen3DSparkModel"], "mask_token_id": config.mask_token_id, "target_layer_ids": named}
    return raw | own | {"num_anchors": 512} | _heads_of(config)


def _unsaid(config: DFlashConfig, layout: str) -> dict[str, bool]:
    """What a layout has no field for, and whether a drafter is so."""
    unsaid = {
        "a vocabulary of its own": config.own_ids,
        "windows that are counted from the anchor": config.window_of_block,
        "causal blocks in windows alone": config.causal_in_window and not config.causal,
    }
    if layout == "dflash":
        brings = config.own_embedding or config.own_head
        return unsaid | {"predictions from the anchor": config.from_anchor, "an embedding or a head of its own": brings}
    lacks = not (config.own_embedding and config.own_head)
    return unsaid | {
        "blocks that are causal": config.causal,
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


def _speculators_config(config: DFlashConfig, dtype: str, target: str) -> dict[str, Any]:
    if config.causal or (config.layer.windowed_layers and not config.window_of_block):
        what = "a block that is causal in every layer" if config.causal else "windows that are counted from each token"
        raise InputError(f"layout='speculators': cannot say {what}: write it as 'dflash'")
    kind = "dspark" if config.has_heads else "dflash"
    return {
        "architectures": ["DSparkSpeculator" if config.has_heads else "DFlashSpeculator"],
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
        "transformer_layer_config": huggingface.format_config(config.layer, dtype),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": config.depth}],
            "verifier": {"name_or_path": target or None, "architectures": []},
        },
        "dtype": dtype,
        "torch_dtype": dtype,
    }
