"""The parameters of EAGLE-3, and the two layouts of its published checkpoints.

``eagle3`` is the layout of SafeAILab, SpecForge and SGLang. The names of the first layer's tensors
begin with ``midlayer.``, config.json is a Llama model's with a few additional fields, and
``eagle_config`` names the layers whose *output* is read. ``speculators`` is the layout of the
speculators package and vLLM. The names begin with ``layers.0.``, the sizes of the layer are in
``transformer_layer_config``, and config.json names the layers whose *input* is read. ModelOpt
writes config.json in the first layout and names in the second. NVIDIA's drafters for gpt-oss may
have no ``lm_head``, or no ``fc``: the latter read the target's last hidden state. Kimi K2.6's
drafter has latent attention (``Eagle3DeepseekV2ForCausalLM``), and names in the second layout.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from specjax.drafters.checkpoints import speculators
from specjax.drafters.draft_vocabulary import DraftVocabulary, declare_d2t
from specjax.drafters.trained import LEFT_OVER, CheckpointFormat, TrainedDrafter, architectures_of
from specjax.errors import InputError
from specjax.models import config_json
from specjax.models import params as declarations
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
    whole,
)
from specjax.models.params import Param, Params, matrix, norm

_FIRST_LAYER: dict[str, str] = {"eagle3": "midlayer.", "speculators": "layers.0."}
"""The prefixes of the tensor names of the first layer."""


@dataclass(frozen=True)
class Eagle3Config:
    """The configuration of an `Eagle3` drafter.

    Attributes:
        layer: the configuration of its decoder layers; ``vocab_size`` is the target's.
        draft_vocab_size: the number of tokens that the drafter can draft, Vd.
        target_hidden_size: the hidden size of the target.
        tap_count: the number of target layers that the drafter reads. With 0 its feature is the
            target's last hidden state, after the final norm.
        taps: the target layers whose *input* the drafter reads, in the order in which they are
            joined; None is `default_taps` of the target.
        norm_before_residual: whether the residual of the first layer is the normed state, and not
            the state before the norm.
        norm_before_fc: whether there is one norm over all taps together.
        fc_norm: whether each tap has a norm of its own (EAGLE-3.1).
        norm_output: whether the state is fed back after the final norm (EAGLE-3.1), and not before
            it.
        own_embedding: whether the drafter has an embedding of its own and does not use the
            target's.
        own_ids: whether a table maps the drafter's tokens to the target's. Otherwise the ids are
            the same.
        own_head: whether the drafter has a head of its own and does not use the target's.
    """

    layer: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    tap_count: int = 3
    taps: tuple[int, ...] | None = None
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    own_ids: bool = True
    own_head: bool = True

    def __post_init__(self) -> None:
        if self.norm_before_fc and self.fc_norm:
            raise InputError(
                "norm_before_fc and fc_norm exclude each other: give one norm over all taps, or one"
                " for each"
            )
        if self.taps is not None and len(self.taps) != self.tap_count:
            raise InputError(
                f"taps={self.taps}: the weights are made for {self.tap_count} layers of the target"
            )
        if self.layer.hidden_size != self.target_hidden_size and not self.own_embedding:
            raise InputError(
                f"hidden_size={self.layer.hidden_size}, but the target's is"
                f" {self.target_hidden_size}: such a drafter needs an embedding of its own"
            )
        sizes = (self.layer.hidden_size, self.draft_vocab_size, self.own_ids)
        if not self.own_head and sizes != (self.target_hidden_size, self.layer.vocab_size, False):
            raise InputError(
                "lm_head is missing: the target's serves only the target's hidden size and"
                " vocabulary"
            )
        if not self.tap_count and (
            self.layer.hidden_size != self.target_hidden_size or self.norm_before_fc or self.fc_norm
        ):
            raise InputError(
                "fc is missing: without it the hidden size must be the target's, and no norm may"
                " come before it"
            )

    def taps_of(self, layers: int) -> tuple[int, ...]:
        """Return the taps of a target with ``layers`` layers, in the order of joining.

        The ids in ``eagle_config`` name layers whose output is read. Some drafters for gpt-oss name
        layers whose input is read there. This is recognised if the last id would otherwise be the
        output of a layer that does not exist.
        """
        if self.taps is None:
            return default_taps(layers) if self.tap_count else ()
        shift = int(max(self.taps, default=0) == layers + 1)
        return tuple(tap - shift for tap in self.taps)


def default_taps(layers: int) -> tuple[int, ...]:
    """Return the taps of a target with L layers: 2, L // 2 and L - 3, as in the published code.

    A target of fewer than 7 layers does not have three such layers. Its taps are spread evenly from
    the output of the first layer to the output of the last: three taps, or as many as there are.
    """
    if layers >= 7:
        return (2, layers // 2, layers - 3)
    return tuple(sorted({round(tap) for tap in np.linspace(1, layers, 3).tolist()}))


def declare(config: Eagle3Config, layout: str) -> Params:
    """Return the `Param` declarations, with the tensor names of ``layout``."""
    layer, hidden = config.layer, config.layer.hidden_size
    first, fused = _FIRST_LAYER[layout], config.tap_count * config.target_hidden_size

    layers = [
        declarations.declare_layer(layer, f"layers.{i}." if i else first)
        for i in range(layer.num_layers)
    ]
    layers[0]["hidden_norm"] = norm(f"{first}hidden_norm", hidden)
    # They read the embedding and the state.
    for name in ("q", "k", "v") if layer.mla is None else _latent_inputs(layer):
        inputs, outputs = layers[0][name].shape
        layers[0][name] = replace(layers[0][name], shape=(2 * inputs, outputs))
    tree: Params = {"layers": layers, "norm": norm("norm", hidden)}
    if config.tap_count:
        tree["fc"] = matrix("fc", (fused, None), (hidden, None))
    if config.own_head:
        tree["lm_head"] = matrix(
            "lm_head", (hidden, None), (config.draft_vocab_size, "draft_vocab")
        )
    if config.norm_before_fc:
        tree["input_norm"] = norm("input_norm", fused)
    if config.fc_norm:
        tree["fc_norm"] = [
            norm(f"fc_norm.{i}", config.target_hidden_size) for i in range(config.tap_count)
        ]
    if config.own_embedding:
        tree["embed"] = Param((layer.vocab_size, hidden), ("vocab", None), "embed_tokens.weight")
    if config.own_ids:
        tree["d2t"] = declare_d2t(config.draft_vocab_size)
    return tree


def _latent_inputs(layer: ModelConfig) -> tuple[str, str]:
    """Return the names of the parameters of latent attention that read the layer's input."""
    assert layer.mla is not None
    return ("q" if layer.mla.q_lora_rank is None else "q_a", "kv_a")


# --- reading --------------------------------------------------------------------------------------


def recognises(raw: Fields, tensors: Collection[str]) -> bool:
    """Return whether a checkpoint is an EAGLE-3 drafter's; see `CheckpointFormat`."""
    by_name = any("eagle3" in name.lower() for name in architectures_of(raw))
    return by_name or raw.get("speculators_model_type") == "eagle3" or "draft_vocab_size" in raw


def layout_of(stored: CheckpointFiles) -> str:
    """Return the layout that the names of the first layer's tensors show."""
    return "eagle3" if _input_of("midlayer.", stored) else "speculators"


def _input_of(first: str, stored: CheckpointFiles) -> bool:
    """Return whether there is a projection of queries in the layer with the prefix ``first``."""
    names = (f"{first}self_attn.{name}.weight" for name in ("q_proj", "q_a_proj"))
    return any(name in stored.shapes for name in names)


_FLAGS: FieldTable = {
    name: flag(default=False)
    for name in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
}
_FIELDS: FieldTable = {
    "draft_vocab_size": whole(1, 10_000_000, default=None),
    "target_hidden_size": whole(1, 1_000_000, default=None),
    "eagle_aux_hidden_state_layer_ids": speculators.layer_numbers(-1),
    "eagle_config": mapping(default=None),
    "transformer_layer_config": mapping(default=None),
}
_NESTED: FieldTable = {  # the fields in eagle_config
    "use_aux_hidden_state": flag(default=True),
    "return_hidden_post_norm": flag(default=False),
    "eh_proj_before_attn": Field(
        "left out, or false: one projection of state and embedding is another drafter",
        lambda value: value is False,
        False,
    ),
}


def read_config(stored: CheckpointFiles, raw: JsonObject | None = None) -> Eagle3Config:
    """Return the configuration of a checkpoint in either layout.

    Args:
        stored: the files of the checkpoint.
        raw: fields that replace those of config.json; None reads config.json.

    Raises:
        CheckpointError: A field is invalid, a count does not match the tensors, or ``d2t`` or
            ``t2d`` is missing.
    """
    raw = stored.raw if raw is None else raw
    source = stored.file
    shapes = stored.shapes
    layout = layout_of(stored)
    fields = check_fields(raw, _FIELDS, source)
    nested, layer_fields = fields["eagle_config"] or {}, fields["transformer_layer_config"]
    flags = check_fields({**nested, **raw}, _FLAGS, source)
    options = check_fields(nested, _NESTED, source, "eagle_config.")
    flags["norm_output"] |= options["return_hidden_post_norm"]
    if layer_fields is None and raw.get("kv_lora_rank") is not None:
        # A null in place of a number of experts says that there are none.
        stated = {
            name: value
            for name, value in raw.items()
            if value is not None or name not in _NO_EXPERTS
        }
        layer = config_json.parse_drafter_config(_NO_EXPERTS | stated | _LATENT, source)
    elif layer_fields is None:
        layer = config_json.parse_drafter_config(raw, source)
    else:
        kind = layer_fields.get("model_type", "qwen3")  # as speculators reads it
        layer = config_json.parse_drafter_config(
            {**speculators.LAYER_DEFAULTS.get(kind, {}), "model_type": kind, **layer_fields},
            f"{source}: transformer_layer_config",
        )
    first = _FIRST_LAYER[layout]
    if not _input_of(first, stored):
        raise CheckpointError(
            f"{source}: there is no 'midlayer.self_attn.q_proj.weight' and no"
            " 'layers.0.self_attn.q_proj.weight': give the weights of an EAGLE-3 drafter"
        )
    # In the layout `eagle3` the first layer has a name instead of an index.
    count = stored.numbered("layers.") + (layout == "eagle3")
    stored.check_count("num_hidden_layers", layer.num_layers, count, "layers")
    if layer.mla is None:
        layer = config_json.with_switches(layer, shapes, first)
    else:
        layer = _with_latents(layer, source)
    target_hidden = fields["target_hidden_size"] or layer.hidden_size
    fused = shapes.get("fc.weight", (0, 0))[-1] if options["use_aux_hidden_state"] else 0
    if options["use_aux_hidden_state"] and (fused == 0 or fused % target_hidden):
        raise CheckpointError(
            f"{source}: fc.weight reads {fused} numbers, which is no multiple of the target's"
            f" hidden size {target_hidden}: set target_hidden_size"
        )
    config = Eagle3Config(
        layer=layer,
        draft_vocab_size=fields["draft_vocab_size"] or layer.vocab_size,
        target_hidden_size=target_hidden,
        tap_count=fused // target_hidden,
        taps=_read_taps(fields, nested, source) if fused else (),
        **flags | {name: flags[name] or tensor in shapes for name, tensor in _NORM_TENSORS.items()},
        own_embedding="embed_tokens.weight" in shapes,
        own_ids="d2t" in shapes,
        own_head="lm_head.weight" in shapes or fields["draft_vocab_size"] is not None,
    )
    if config.fc_norm and (norms := stored.numbered("fc_norm.")) != config.tap_count:
        raise CheckpointError(
            f"{source}: fc.weight joins {config.tap_count} layers of the target, but there are"
            f" tensors of {norms} norms fc_norm.*, one for each: give the configuration and the"
            " weights of one model"
        )
    if config.draft_vocab_size != layer.vocab_size or {"d2t", "t2d"} & shapes.keys():
        # ModelOpt omits t2d, because it follows from d2t; the eagle3 layout always has both.
        needed = ("d2t", "t2d") if layout == "eagle3" else ("d2t",)
        DraftVocabulary(config.draft_vocab_size, layer.vocab_size).check_stored(
            shapes, stored.directory, needed
        )
    return config


_LATENT: JsonObject = {"model_type": "deepseek_v3"}
_NO_EXPERTS: JsonObject = {
    "n_routed_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 1,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
}
"""Fields that the config.json of a DeepSeek-V3 has, and that of a drafter without experts lacks."""


def _with_latents(layer: ModelConfig, source: str) -> ModelConfig:
    """Return the configuration of the one layer of a drafter with latent attention."""
    if layer.num_layers != 1 or layer.is_sparse(0) or layer.indexer is not None:
        raise CheckpointError(
            f"{source}: model_type={layer.model_type!r}, num_hidden_layers={layer.num_layers}: a"
            " drafter with latent attention must have one layer, with an MLP and without indexer:"
            " give such a drafter"
        )
    return replace(layer, tie_embeddings=False)


_NORM_TENSORS = {"norm_before_fc": "input_norm.weight", "fc_norm": "fc_norm.0.weight"}


def _read_taps(fields: Fields, nested: Fields, source: str) -> tuple[int, ...] | None:
    """Return the layers whose input is read.

    ``eagle_config`` names the layers whose output is read.
    """
    if (inputs := fields["eagle_aux_hidden_state_layer_ids"]) is not None:
        return tuple(inputs)
    table = {"eagle_aux_hidden_state_layer_ids": _FIELDS["eagle_aux_hidden_state_layer_ids"]}
    checked = check_fields(nested, table, source, "eagle_config.")
    outputs = checked["eagle_aux_hidden_state_layer_ids"]
    return None if outputs is None else tuple(layer + 1 for layer in outputs)


def left_over(config: Eagle3Config, stored: CheckpointFiles) -> Collection[str]:
    """Return patterns of the tensors that are ignored."""
    unread = () if config.tap_count else ("fc.weight",)
    return (*LEFT_OVER, *speculators.LEFT_OVER, *unread)


# --- writing --------------------------------------------------------------------------------------


def format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> JsonObject:
    """Return the fields of config.json in ``layout``.

    ``target`` is the target's directory or hub id. speculators and vLLM read it to find the target.
    """
    if layout == "speculators":
        return format_speculators(drafter.config, dtype, target)
    return format_eagle3(drafter.config, dtype)


def _flags(config: Eagle3Config) -> dict[str, bool]:
    return {name: getattr(config, name) for name in _FLAGS}


def format_eagle3(config: Eagle3Config, dtype: str) -> JsonObject:
    """Return the fields of config.json in the layout ``eagle3``."""
    content = config_json.format_config(config.layer, dtype) | {
        "architectures": [
            "LlamaForCausalLMEagle3" if config.layer.mla is None else "Eagle3DeepseekV2ForCausalLM"
        ],
        "draft_vocab_size": config.draft_vocab_size if config.own_head else None,
        "target_hidden_size": config.target_hidden_size,
        **_flags(config),
    }
    if not config.tap_count:
        content["eagle_config"] = {"use_aux_hidden_state": False}
    elif (outputs := _left(config)) is not None:
        content["eagle_config"] = {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": outputs,
        }
    return content


def format_speculators(config: Eagle3Config, dtype: str, target: str) -> JsonObject:
    """Return the fields of config.json in the layout ``speculators``."""
    if not (config.own_head and config.tap_count):
        raise InputError(
            "layout='speculators': it needs fc and lm_head, but this drafter lacks one: write it as"
            " 'eagle3'"
        )
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.2.0",
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        **_flags(config),
        "eagle_aux_hidden_state_layer_ids": _entered(config),
        **speculators.format_common(config.layer, "eagle3", 5, dtype, target),
    }


def describe(drafter: TrainedDrafter, layout: str) -> str:
    """Return a line about the layer ids that `format_config` writes, and what they mean."""
    config: Eagle3Config = drafter.config
    if layout == "speculators":
        return f"eagle_aux_hidden_state_layer_ids={_entered(config)}: the layers that are entered"
    return (
        f"eagle_config.eagle_aux_hidden_state_layer_ids={_left(config)}: the layers whose output is"
        " read"
    )


def _entered(config: Eagle3Config) -> list[int] | None:
    """Return the layers whose input is read, as speculators numbers them."""
    return None if config.taps is None else list(config.taps)


def _left(config: Eagle3Config) -> list[int] | None:
    """Return the layers whose output is read, for ``eagle_config``."""
    return None if config.taps is None else [tap - 1 for tap in config.taps]


FORMAT = CheckpointFormat(
    title="an EAGLE-3 drafter",
    layouts=("eagle3", "speculators"),
    recognises=recognises,
    read_config=read_config,
    declare=declare,
    axis_units=lambda config: config.layer.axis_units | {"draft_vocab": config.draft_vocab_size},
    format_config=format_config,
    layout_of=layout_of,
    left_over=left_over,
    reduced_vocabulary=DraftVocabulary.of,
    describe=describe,
)
