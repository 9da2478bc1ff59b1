"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules in a row.

Each module predicts one token further ahead than the module before. Models that were trained with
it have the modules in their own checkpoints. `MTP` reads those of MiMo and MiMo-V2-Flash, of
DeepSeek-V3 to V3.2, of GLM-4.5 to GLM-5.2, of Qwen3.5 and Qwen3-Next, and of Nemotron 3, and what
`specjax train` writes for targets without modules.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.drafters.base import DraftingReads
from specjax.drafters.features import FeatureDrafter, Past
from specjax.drafters.trained import CheckpointFormat, TrainedDrafter, layer_like
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError, check_minimum
from specjax.models import config_json
from specjax.models import params as declarations
from specjax.models.cache import Entries
from specjax.models.checkpoint_files import CheckpointFiles, number_after
from specjax.models.config import Layer, ModelConfig
from specjax.models.families import FAMILIES, delta_net, mamba2
from specjax.models.families.mimo_v2_flash import MODULES as MIMO_V2_MODULES
from specjax.models.families.nemotron_h import MODULES as NEMOTRON_MODULES
from specjax.models.families.nemotron_h import NEMOTRON_H
from specjax.models.families.qwen2 import MIMO_MODULES
from specjax.models.families.ropes import FULL
from specjax.models.fields import (
    CheckpointError,
    Field,
    Fields,
    FieldTable,
    JsonObject,
    check_fields,
    flag,
    show,
    texts,
    whole,
)
from specjax.models.layers import decoder_layer, linear, normed
from specjax.models.params import Params, matrix, norm
from specjax.models.rope import rotations
from specjax.models.sparse_attention import entries_read
from specjax.models.transformer import Target

Layout = Literal["mimo", "mimo_v2", "deepseek", "qwen", "nemotron"]

_NUMBERED: dict[Layout, str] = {
    "mimo": MIMO_MODULES,
    "mimo_v2": f"{MIMO_V2_MODULES}layers.",
    "deepseek": "model.layers.",
    "qwen": f"{delta_net.MODULES}layers.",
    "nemotron": f"{NEMOTRON_MODULES}layers.",
}
"""The part of the tensor names before the index of a module, or of a layer of the one module."""

_NAMES: dict[Layout, dict[str, str]] = {
    "mimo": {
        "hidden_norm": "hidden_layernorm",
        "embed_norm": "token_layernorm",
        "fc": "input_proj",
        "norm": "final_layernorm",
    },
    "mimo_v2": {
        "hidden_norm": "hnorm",
        "embed_norm": "enorm",
        "fc": "eh_proj",
        "norm": "final_layernorm",
    },
    "deepseek": {
        "hidden_norm": "hnorm",
        "embed_norm": "enorm",
        "fc": "eh_proj",
        "norm": "shared_head.norm",
    },
    "qwen": {
        "hidden_norm": "pre_fc_norm_hidden",
        "embed_norm": "pre_fc_norm_embedding",
        "fc": "fc",
        "norm": "norm",
    },
    "nemotron": {
        "hidden_norm": "hnorm",
        "embed_norm": "enorm",
        "fc": "eh_proj",
        "norm": "final_layernorm",
    },
}
"""The names of the tensors of a module, except those of its decoder layers."""

_ALONE: dict[Layout, str] = {"qwen": "Qwen", "nemotron": "Nemotron"}
"""The layouts of one module, whose layers are numbered, and whose checkpoints they are."""

_COUNT = "num_nextn_predict_layers"

_QWEN_COUNT = "mtp_num_hidden_layers"
"""The field of config.json with the number of Qwen3.5's modules, among the text model's fields."""


_MOE = "moe"
_NEMOTRON_KINDS = {"*": FULL, "E": _MOE}
_NEMOTRON_PATTERN, _NEMOTRON_TYPES = "mtp_hybrid_override_pattern", "mtp_layers_block_type"


@dataclass(frozen=True)
class MTPConfig:
    """The configuration of an `MTP` drafter.

    Attributes:
        layer: the configuration of the decoder layers of each module, one layer except in
            Nemotron 3; ``vocab_size`` and ``hidden_size`` are the target's.
        modules: the number of modules.
        layout: the names of the tensors, and the conventions that come with them: MiMo
            concatenates state and embedding in this order, all others embedding and state; see
            `reads` as well.
        first_layer: the index of the first module in DeepSeek's names, which is the target's number
            of layers.
        experts_joined: whether all experts are in two tensors, as in some of Qwen's files.
    """

    layer: ModelConfig
    modules: int
    layout: Layout = "mimo"
    first_layer: int = 0
    experts_joined: bool = False

    def __post_init__(self) -> None:
        check_minimum(1, self, ["modules"])
        if self.layout in _ALONE and self.modules > 1:
            raise InputError(
                f"modules={self.modules}: {_ALONE[self.layout]}'s checkpoints have names for one:"
                " give 1"
            )

    @property
    def reads(self) -> Literal["before", "target"]:
        """The network whose state module m reads at position t, beside a token.

        ``before``: that of module m - 1 at t - 1, as DeepSeek-V3's section 2.2 has it. ``target``:
        the target's at t - m. So MiMo-V2-Flash was trained: SGLang passes states from module to
        module for Step-3.5 alone (``chain_mtp_hidden_states``), and with the target's states
        modules 1 and 2 were right in 73% of the drafts instead of 47% and 36%
        (github.com/sgl-project/sglang-jax/pull/1256).
        """
        return "target" if self.layout == "mimo_v2" else "before"

    def prefix(self, module: int) -> str:
        """Return the prefix of the tensor names of ``module``."""
        if self.layout == "qwen":
            return delta_net.MODULES
        return f"{_NUMBERED[self.layout]}{self.first_layer + module}."

    def layer_prefix(self, module: int, layer: int = 0) -> str:
        """Return the prefix of the tensor names of a decoder layer of ``module``."""
        return f"{_NUMBERED[self.layout]}{self.first_layer + module + layer}."

    def norm_prefix(self, module: int) -> str:
        """Return the prefix of the name of the norm of ``module``, after its layers."""
        if self.layout == "nemotron":
            return self.layer_prefix(module, self.layer.num_layers - 1)
        return self.prefix(module)


def _read_qwen(stored: CheckpointFiles) -> MTPConfig:
    """Read the configuration of a module of Qwen3.5 or Qwen3-Next.

    The checkpoint has the module alone, or the whole model. Only the config.json of Qwen3.5 states
    the number of modules.
    """
    whole_model = config_json.parse_drafter_config(stored.raw, stored.file)
    if not whole_model.gated_attention:
        raise CheckpointError(
            f"{stored.file}: model_type={whole_model.model_type!r}: only Qwen3.5 and Qwen3-Next"
            f" have modules with tensors '{delta_net.MODULES}*': give a checkpoint of one of these"
        )
    inner = _fields_of_text(stored.raw)
    count = check_fields(inner, {_QWEN_COUNT: whole(1, 100, default=1)}, stored.file)[_QWEN_COUNT]
    mlp = f"{_NUMBERED['qwen']}0.mlp."
    layer = _attention_layer(whole_model, is_sparse=f"{mlp}gate.weight" in stored.shapes)
    config = MTPConfig(
        layer, count, "qwen", experts_joined=f"{mlp}experts.gate_up_proj" in stored.shapes
    )
    _check_counts(stored, config)
    return config


def _read_nemotron(stored: CheckpointFiles, layer: ModelConfig, count: int) -> MTPConfig:
    """Read the configuration of the module of a Nemotron 3: a row of blocks, used for each step."""
    rules: FieldTable = {
        _NEMOTRON_PATTERN: Field(
            "text of * and E", lambda value: isinstance(value, str), default=None
        ),
        _NEMOTRON_TYPES: texts(default=None),
    }
    fields = check_fields(stored.raw, rules, stored.file)
    name = _NEMOTRON_PATTERN if fields[_NEMOTRON_TYPES] is None else _NEMOTRON_TYPES
    kinds = mamba2.today([_NEMOTRON_KINDS.get(kind, kind) for kind in fields[name] or ()])
    if FULL not in kinds or not set(kinds) <= set(_NEMOTRON_KINDS.values()):
        raise CheckpointError(
            f"{stored.file}: {name}={show(fields[name])}: only blocks of attention (*) and experts"
            " (E) are read, and at least one of attention: give a checkpoint with such a module"
        )
    sparse = tuple(index for index, kind in enumerate(kinds) if kind == _MOE)
    if sparse and layer.moe is None:
        raise CheckpointError(
            f"{stored.file}: {name}={show(fields[name])}: the target must have experts, too, since"
            " theirs are the sizes"
        )
    of_module = _attention_layer(layer, bool(sparse), num_layers=len(kinds), mlp_layers=sparse)
    return MTPConfig(of_module, count, "nemotron")


def _read_mimo_v2(stored: CheckpointFiles, layer: ModelConfig, count: int) -> MTPConfig:
    """Read the configuration of the modules of a MiMo-V2: layers with a window and an MLP."""
    if layer.sliding_window is None:
        raise CheckpointError(
            f"{stored.file}: layer_types: a module has the sliding window of the target's layers,"
            " but none of them has one: give a checkpoint with windowed layers"
        )
    # A checkpoint of the family states experts, even if no layer has any.
    moe = None if layer.moe is None else replace(layer.moe, dense_layers=(0,))
    of_module = _attention_layer(layer, False, layers=(Layer(),), windowed_layers=(0,), moe=moe)
    return MTPConfig(of_module, count, "mimo_v2")


def _attention_layer(config: ModelConfig, is_sparse: bool, **sizes: Any) -> ModelConfig:
    """Return the configuration of a module's layers, with experts or without; none keeps a state.

    It has no end-of-sequence ids, because the target's apply.
    """
    moe = replace(config.moe, dense_layers=()) if config.moe is not None and is_sparse else None
    plain: dict[str, Any] = {
        "num_layers": 1,
        "linear": None,
        "linear_layers": (),
        "moe": moe,
        "tie_embeddings": False,
    }
    plain |= {"bos_token_id": None, "eos_token_ids": ()}
    return replace(config, **(plain | sizes))


def _check_counts(stored: CheckpointFiles, config: MTPConfig) -> None:
    """Compare the counts in config.json with the tensors' headers.

    This must come before the declarations, whose size depends on the counts.
    """
    layer, numbered = config.layer, _NUMBERED[config.layout]
    count = stored.numbered(numbered, config.first_layer)
    if config.layout == "nemotron":
        pattern = stored.raw.get(_NEMOTRON_TYPES) is None
        field = f"blocks of {_NEMOTRON_PATTERN if pattern else _NEMOTRON_TYPES}"
        stored.check_count(field, layer.num_layers, count, "blocks")
    else:
        field = _QWEN_COUNT if config.layout == "qwen" else _COUNT
        stored.check_count(field, config.modules, count, "modules")
    if (moe := layer.moe) is None or config.experts_joined:
        return
    mlp = "mixer." if config.layout == "nemotron" else "mlp."
    for module in range(config.modules):
        for index in range(layer.num_layers):
            if not layer.is_sparse(config.first_layer + index):
                continue
            count = stored.numbered(f"{config.layer_prefix(module, index)}{mlp}experts.")
            stored.check_count(
                "the number of experts", moe.num_experts, count, f"experts in module {module}"
            )


def _fields_of_text(raw: Fields) -> Fields:
    """Return the fields of the text model in a config.json, which a multimodal model nests."""
    inner = raw.get("text_config")
    return inner if isinstance(inner, dict) else raw


def _has_qwens(tensors: Collection[str]) -> bool:
    return f"{delta_net.MODULES}fc.weight" in tensors


def _left_over(config: MTPConfig, stored: CheckpointFiles) -> Collection[str]:
    """Return the names of the tensors that are ignored.

    They are the target's own tensors, and DeepSeek's copies of embedding and head in a module.
    """
    prefix = delta_net.MODULES if config.layout == "qwen" else _NUMBERED[config.layout]
    copies = ("embed_tokens.weight", "embed_tokens.weight_scale_inv", "shared_head.head.weight")

    def is_foreign(name: str) -> bool:
        if not name.startswith(prefix):
            return name.startswith(("model.", "backbone.", "lm_head."))
        number = number_after(prefix, name)
        is_layer = (
            config.layout == "deepseek" and number is not None and number < config.first_layer
        )
        is_copy = config.layout not in _ALONE and name.endswith(copies)
        return is_layer or is_copy or name.endswith("rotary_emb.inv_freq")

    return [name for name in stored.shapes if is_foreign(name)]


def recognises(raw: Fields, tensors: Collection[str]) -> bool:
    """Return whether a checkpoint has modules; see `CheckpointFormat`.

    Its config.json states their number, and ``tensors`` has theirs unless it is empty. Qwen's
    modules are recognised by their tensors, if these are available.
    """
    if tensors and _has_qwens(tensors):
        return True
    has_modules = any(
        name.startswith(MIMO_MODULES) or name.endswith(".eh_proj.weight") for name in tensors
    )
    if not tensors and _fields_of_text(raw).get(_QWEN_COUNT):
        return True
    # MiMo-V2's config.json does not state the number.
    is_counted = bool(raw.get(_COUNT)) or any(name.startswith(MIMO_V2_MODULES) for name in tensors)
    return is_counted and (has_modules or not tensors)


_MINIMAX: FieldTable = {"use_mtp": flag(default=False), "num_mtp_modules": whole(0, 100, default=0)}


def _refuse_unpublished(stored: CheckpointFiles) -> None:
    """Refuse MiniMax-M2, whose config.json names modules that are not published."""
    has_modules = any(name.endswith(".eh_proj.weight") for name in stored.shapes)
    if stored.raw.get("model_type") != "minimax_m2" or has_modules:
        return
    fields = check_fields(stored.raw, _MINIMAX, stored.file)
    if fields["use_mtp"] or fields["num_mtp_modules"]:
        raise CheckpointError(
            f"{stored.file}: use_mtp={show(fields['use_mtp'])},"
            f" num_mtp_modules={fields['num_mtp_modules']}: MiniMax-M2's modules are not published:"
            " no checkpoint has their tensors: draft with another method"
        )


def _layout_of(stored: CheckpointFiles, model_type: str) -> Layout:
    starts: dict[str, Layout] = {MIMO_MODULES: "mimo", MIMO_V2_MODULES: "mimo_v2"}
    for start, layout in starts.items():
        if any(name.startswith(start) for name in stored.shapes):
            return layout
    return "nemotron" if model_type == NEMOTRON_H.model_type else "deepseek"


def read_config(stored: CheckpointFiles) -> MTPConfig:
    """Return the configuration of a checkpoint. Raises `CheckpointError`."""
    if _has_qwens(stored.shapes):
        return _read_qwen(stored)
    _refuse_unpublished(stored)
    layer = config_json.parse_drafter_config(stored.raw, stored.file)
    layout = _layout_of(stored, layer.model_type)
    numbered = stored.numbered(_NUMBERED["mimo_v2"]) if layout == "mimo_v2" else 0
    rules = {_COUNT: whole(1, 100, default=numbered) if numbered else whole(1, 100)}
    count = check_fields(stored.raw, rules, stored.file)[_COUNT]
    if layout == "nemotron":
        config = _read_nemotron(stored, layer, count)
    elif layout == "mimo_v2":
        config = _read_mimo_v2(stored, layer, count)
    else:
        first_layer = layer.num_layers if layout == "deepseek" else 0
        # GLM-5.2's index_share_for_mtp_iteration is ignored: it has all levels of a draft attend to
        # the keys that the newest token of the text has selected, when the text was read (SGLang's
        # pull request 29787, vLLM's 44420 and 47238, TensorRT-LLM's 15806). Here each level selects
        # its own, so that no selection is stored with a row. Drafts alone depend on it.
        indexer = None if layer.indexer is None else replace(layer.indexer, shared_layers=())
        one_layer = replace(layer, num_layers=1, indexer=indexer)
        config = MTPConfig(one_layer, count, layout, first_layer)
    needed = f"{config.prefix(0)}{_NAMES[layout]['fc']}.weight"
    if needed not in stored.shapes:
        alternative = f"' and '{MIMO_MODULES}0.input_proj.weight" * (layout == "deepseek")
        raise CheckpointError(
            f"{stored.directory}: it lacks '{needed}{alternative}': MTP modules were left out; give"
            " a checkpoint with them"
        )
    _check_counts(stored, config)
    layer = config.layer
    if layout in ("mimo", "deepseek") and layer.mla is None and layer.moe is None:
        layer = config_json.with_switches(layer, stored.shapes, config.prefix(0))
    return replace(config, layer=layer)


def declare(config: MTPConfig, layout: str) -> Params:
    """Return the `Param` declarations, with the names of the configuration's own layout."""
    hidden, names = config.layer.hidden_size, _NAMES[config.layout]

    def declare_module(module: int) -> Params:
        prefix, offset = config.prefix(module), config.layer.norm_offset
        layers = [
            declarations.declare_layer(
                config.layer, config.layer_prefix(module, index), config.first_layer + index
            )
            for index in range(config.layer.num_layers)
        ]
        return {
            "hidden_norm": norm(prefix + names["hidden_norm"], hidden, offset),
            "embed_norm": norm(prefix + names["embed_norm"], hidden, offset),
            "fc": matrix(prefix + names["fc"], (2 * hidden, None), (hidden, None)),
            "layers": layers,  # with experts, if the target's layers have them
            "norm": norm(config.norm_prefix(module) + names["norm"], hidden, offset),
        }

    declared = {"modules": [declare_module(module) for module in range(config.modules)]}
    if config.layout in ("mimo", "deepseek"):
        return declared
    family = FAMILIES[config.layer.model_type]
    joined = [group.name for group in family.fused_where_stored if config.experts_joined]
    stored = family.store(declared, shapes=dict.fromkeys(joined, ()))
    if config.layout != "mimo_v2":
        return stored
    return jax.tree.map(
        lambda param: replace(
            param, name=param.name.replace("post_attention_layernorm", "pre_mlp_layernorm")
        ),
        stored,
    )


def _format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> JsonObject:
    config: MTPConfig = drafter.config
    layer = config.layer
    if config.layout == "deepseek":
        layer = replace(layer, num_layers=config.first_layer)
    content = config_json.format_config(layer, dtype)
    count = _QWEN_COUNT if config.layout == "qwen" else _COUNT
    if config.layout == "nemotron":
        content[_NEMOTRON_TYPES] = [
            FULL if layer.has_mixer(index) else _MOE for index in range(layer.num_layers)
        ]
    return content | {"architectures": ["MTPDrafter"], count: config.modules}


@struct.dataclass
class MTP(FeatureDrafter):
    """A drafter of modules in a row: module m drafts the token at depth m + 1.

    The last module drafts all further tokens too. With h the target's last hidden state after the
    final norm, or the state of the module before at the token before, and e the embedding of the
    next token, a module is ``layer(fc([norm(h), norm(e)]))``. The target's own head reads its
    normed state. In MiMo-V2 h is the target's state for every module (see `MTPConfig.reads`).
    Checkpoints have the modules alone, or the target as well; the modules alone are
    written. The module for a hybrid target has the full-attention layer of its family, and is
    written in Qwen's layout.

    Attributes:
        params: the parameters of the modules (see `declare`).
        config: the configuration.
        draft: the shape of the drafts, which may be deeper than the number of modules.
        mesh: the mesh of the parameters.

    Examples:
        >>> drafter = specjax.MTP.init(target, jax.random.key(1), modules=2, draft=3)
        >>> drafter.config.modules, drafter.draft_shape.depth  # the last module drafts twice
        (2, 3)
        >>> specjax.MTP.from_pretrained("embedded:mtp").config.modules
        1
    """

    params: Params
    config: MTPConfig = struct.field(pytree_node=False)
    draft: DraftShape | int = struct.field(pytree_node=False, default=Chain(4))
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    checkpoint_format: ClassVar[CheckpointFormat] = CheckpointFormat(
        title="the MTP modules",
        layouts=("mtp",),
        recognises=recognises,
        read_config=read_config,
        declare=declare,
        axis_units=lambda config: config.layer.axis_units,
        format_config=_format_config,
        left_over=_left_over,
    )

    @classmethod
    def init(
        cls,
        target: Target,
        key: jax.Array,
        draft: DraftShape | int = Chain(4),
        *,
        modules: int = 1,
        **sizes: Any,
    ) -> Self:
        """Return modules for ``target`` with random weights.

        The layers are plain Llama layers of the target's sizes. A single module for a hybrid target
        with gated attention (Qwen3.5) has the hybrid's layer with attention instead, and with
        experts if the hybrid has any.

        Args:
            target: the target model.
            key: the random key for the weights. It is consumed.
            draft: the shape of the drafts.
            modules: the number of modules.
            sizes: fields of the layers' `ModelConfig`.
        """
        if target.config.layers_with_states and target.config.gated_attention and modules == 1:
            config = MTPConfig(_attention_layer(target.config, True, **sizes), modules, "qwen")
        else:
            config = MTPConfig(layer_like(target.config, **sizes), modules)
        return cls(
            params=cls._initialise(config, key, target),
            config=config,
            draft=draft,
            mesh=target.mesh,
        )

    def first(self, count: int) -> "MTP":
        """Return the drafter with its first ``count`` modules alone.

        The last of them continues with its own states.
        """
        if not 1 <= count <= self.modules:
            raise InputError(
                f"count={count}: there are {self.modules} modules; give 1 to {self.modules}"
            )
        params = {"modules": self.params["modules"][:count]}
        return replace(self, params=params, config=replace(self.config, modules=count))

    @property
    def modules(self) -> int:
        return self.config.modules

    @property
    def state_size(self) -> int:
        return self.sizes.hidden_size * (2 if self._passes_on else 1)

    @property
    def _passes_on(self) -> bool:
        """True if a state has two parts: the network's own, and what the next module reads."""
        return self.config.reads == "target" and self.modules > 1

    def logits(self, target: Target, states: jax.Array, module: int | jax.Array = 0) -> jax.Array:
        return target.head(states[..., : self.sizes.hidden_size])

    def run(
        self,
        states: jax.Array,
        embedded: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        past: Past,
        module: int = 0,
    ) -> tuple[jax.Array, Entries]:
        config, params = self.sizes, self.params["modules"][module]
        # The last part of a state is what is read in place of a feature. A feature has no parts.
        states = states[..., -config.hidden_size :]
        parts = [
            normed(params, "hidden_norm", config, states),
            normed(params, "embed_norm", config, embedded),
        ]
        # MiMo's modules join the state first, all others the embedding.
        joined = jnp.concatenate(parts if self.config.layout == "mimo" else parts[::-1], axis=-1)
        turn = rotations(config.rope, config.head_dim, positions)
        x, entries = linear(params, "fc", joined), ()
        for index, (layer, before) in enumerate(zip(params["layers"], past, strict=True)):
            visible = self.in_window(index, mask, positions)
            x, entry, _ = decoder_layer(
                layer, config.of_layer(index), x, turn, visible, before, self.mesh
            )
            entries += (entry,)
        # What is read in place of a feature is the state after this norm, as in vLLM since its pull
        # request 45895, for modules that are alone.
        output = normed(params, "norm", config, x)
        if not self._passes_on:
            return output, entries
        # The next module reads at the next position what this module has read here: the target's
        # state. The last module has none after it, and continues with its own.
        passed = output if module == self.modules - 1 else states.astype(output.dtype)
        return jnp.concatenate([output, passed], axis=-1), entries

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return the arrays of a level: one of the modules with its part of the cache."""
        if state:
            layers = state.cache.layers[: self.sizes.num_layers]
            module_state = (
                entries_read(self.sizes, layers, self.mesh),
                state.cache.length,
                state.newest,
            )
        else:
            module_state = ()
        return DraftingReads(
            level=(self.params["modules"][-1], module_state, target.head_as_stored)
        )
