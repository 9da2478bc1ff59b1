"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules in a row, each looks a token further.

Models that were trained with it bring the modules in their own checkpoints. `MTP` reads those of MiMo, of DeepSeek-V3 and of
Qwen3.5 and Qwen3-Next, and what `specjax train` writes for targets that have none.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.drafters.base import DraftingReads
from specjax.drafters.features import FeatureDrafter, FeatureState
from specjax.drafters.trained import CheckpointFormat, TrainedDrafter, layer_like
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models import config_json
from specjax.models import params as declarations
from specjax.models.attention import Piece
from specjax.models.cache import Entry
from specjax.models.checkpoint_files import CheckpointFiles, number_after
from specjax.models.config import ModelConfig
from specjax.models.families import FAMILIES, delta_net
from specjax.models.families.qwen2 import MIMO_MODULES
from specjax.models.fields import CheckpointError, check_fields, whole
from specjax.models.layers import decoder_layer, linear, normed, rms_norm
from specjax.models.params import Params, matrix, norm
from specjax.models.rope import rotations
from specjax.models.transformer import States, Target

Layout = Literal["mimo", "deepseek", "qwen"]

_PREFIX: dict[Layout, str] = {"mimo": MIMO_MODULES, "deepseek": "model.layers.", "qwen": delta_net.MODULES}
_NAMES: dict[Layout, dict[str, str]] = {
    "mimo": {
        "hidden_norm": "hidden_layernorm",
        "embed_norm": "token_layernorm",
        "fc": "input_proj",
        "norm": "final_layernorm",
    },
    "deepseek": {"hidden_norm": "hnorm", "embed_norm": "enorm", "fc": "eh_proj", "norm": "shared_head.norm"},
    "qwen": {"hidden_norm": "pre_fc_norm_hidden", "embed_norm": "pre_fc_norm_embedding", "fc": "fc", "norm": "norm"},
}
"""How the tensors of a module are called, beside those of its decoder layer."""

_QWEN_COUNT = "mtp_num_hidden_layers"
"""The field of config.json that counts Qwen3.5's modules, among those of the text model."""


@dataclass(frozen=True)
class MTPConfig:
    """The shape of an `MTP`.

    Attributes:
        layer: of each module's one decoder layer; ``vocab_size`` and ``hidden_size`` are the target's.
        modules: how many.
        layout: how its tensors are named, and two habits that go with the names. MiMo joins state and embedding in this order,
            and hands on the state *after* the module's norm; DeepSeek joins embedding and state, and hands it on before; Qwen
            joins as DeepSeek does, and hands on as MiMo.
        first_layer: number of the first module in DeepSeek's names: the target's number of layers.
        experts_joined: all experts are in two tensors, as in some files of Qwen's.
    """

    layer: ModelConfig
    modules: int
    layout: Layout = "mimo"
    first_layer: int = 0
    experts_joined: bool = False

    def __post_init__(self) -> None:
        if self.modules < 1:
            raise InputError(f"modules={self.modules}: must be at least 1")
        if self.layout == "qwen" and self.modules > 1:
            raise InputError(f"modules={self.modules}: Qwen's checkpoints have names for one: give 1")

    def prefix(self, module: int) -> str:
        """How the names of the tensors of ``module`` begin."""
        if self.layout == "qwen":
            return _PREFIX["qwen"]
        return f"{self.numbered}{self.first_layer + module if self.layout == 'deepseek' else module}."

    def layer_prefix(self, module: int) -> str:
        """How the names of the tensors of its decoder layer begin."""
        return f"{self.numbered}{module}." if self.layout == "qwen" else self.prefix(module)

    @property
    def numbered(self) -> str:
        """What stands before the number of a module in the names of tensors."""
        return _PREFIX[self.layout] + ("layers." if self.layout == "qwen" else "")


def _read_qwen(stored: CheckpointFiles) -> MTPConfig:
    """Of a module among the tensors of a Qwen3.5 or Qwen3-Next, or alone. Only the former's config.json counts the modules."""
    whole_model = config_json.parse_drafter_config(stored.raw, stored.file)
    if not whole_model.gated_attention:
        raise CheckpointError(
            f"{stored.file}: model_type={whole_model.model_type!r}: modules whose tensors are called '{_PREFIX['qwen']}*' are "
            "those of Qwen3.5 and Qwen3-Next: give a checkpoint of one of these"
        )
    inner = _fields_of_text(stored.raw)
    count = check_fields(inner, {_QWEN_COUNT: whole(1, 100, default=1)}, stored.file)[_QWEN_COUNT]
    mlp = f"{_PREFIX['qwen']}layers.0.mlp."
    layer = _attention_layer(whole_model, is_sparse=f"{mlp}gate.weight" in stored.shapes)
    config = MTPConfig(layer, count, "qwen", experts_joined=f"{mlp}experts.gate_up_proj" in stored.shapes)
    _check_counts(stored, config)
    return config


def _attention_layer(config: ModelConfig, is_sparse: bool, **sizes: Any) -> ModelConfig:
    """A layer as those of a hybrid with full attention, with experts or without. The end of a text is the target's matter."""
    moe = replace(config.moe, dense_layers=()) if config.moe is not None and is_sparse else None
    plain: dict[str, Any] = {"num_layers": 1, "linear": None, "linear_layers": (), "moe": moe, "tie_embeddings": False}
    plain |= {"bos_token_id": None, "eos_token_ids": ()}
    return replace(config, **(plain | sizes))


def _check_counts(stored: CheckpointFiles, config: MTPConfig) -> None:
    """Compare the counts of config.json with the tensors' headers, before declarations are made after them."""
    found = stored.numbered(config.numbered, config.first_layer)
    field = _QWEN_COUNT if config.layout == "qwen" else "num_nextn_predict_layers"
    stored.check_count(field, config.modules, found, "modules")
    if (moe := config.layer.moe) is None or not config.layer.is_sparse(config.first_layer) or config.experts_joined:
        return
    for module in range(config.modules):
        found = stored.numbered(f"{config.layer_prefix(module)}mlp.experts.")
        stored.check_count("the number of experts", moe.num_experts, found, f"experts in module {module}")


def _fields_of_text(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Those of the text model in a config.json, also of models that see as well."""
    inner = raw.get("text_config")
    return inner if isinstance(inner, dict) else raw


def _has_qwens(tensors: Collection[str]) -> bool:
    return f"{_PREFIX['qwen']}fc.weight" in tensors


def _left_over(config: MTPConfig, stored: CheckpointFiles) -> Collection[str]:
    """Return the names of the target's own tensors, and of DeepSeek's copies of its embedding and head in a module."""
    own = _PREFIX[config.layout]
    copies = ("embed_tokens.weight", "embed_tokens.weight_scale_inv", "shared_head.head.weight")

    def is_foreign(name: str) -> bool:
        if not name.startswith(own):
            return name.startswith(("model.", "lm_head."))
        number = number_after(own, name)
        is_layer = config.layout == "deepseek" and number is not None and number < config.first_layer
        is_copy = config.layout != "qwen" and name.endswith(copies)
        return is_layer or is_copy or name.endswith("rotary_emb.inv_freq")

    return [name for name in stored.shapes if is_foreign(name)]


def recognises(raw: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """Return whether config.json counts modules, and ``tensors``, unless it is empty, has theirs; see `CheckpointFormat`.

    Qwen's modules are recognised by their tensors, if these are available.
    """
    if tensors and _has_qwens(tensors):
        return True
    named = any(name.startswith(_PREFIX["mimo"]) or name.endswith(".eh_proj.weight") for name in tensors)
    if not tensors and _fields_of_text(raw).get(_QWEN_COUNT):
        return True
    return bool(raw.get("num_nextn_predict_layers")) and (named or not tensors)


def read_config(stored: CheckpointFiles) -> MTPConfig:
    """Return the shape of a checkpoint. Raises `CheckpointError`."""
    if _has_qwens(stored.shapes):
        return _read_qwen(stored)
    names, known = stored.shapes, {"num_nextn_predict_layers": whole(1, 100)}
    count = check_fields(stored.raw, known, stored.file)["num_nextn_predict_layers"]
    layer = config_json.parse_drafter_config(stored.raw, stored.file)
    layout: Layout = "mimo" if any(name.startswith(_PREFIX["mimo"]) for name in names) else "deepseek"
    config = MTPConfig(layer, count, layout, layer.num_layers if layout == "deepseek" else 0)
    if f"{config.prefix(0)}{_NAMES[layout]['fc']}.weight" not in names:
        raise CheckpointError(
            f"{stored.directory}: has no 'model.mtp_layers.0.input_proj.weight' and no "
            f"'model.layers.{layer.num_layers}.eh_proj.weight': its MTP modules were left out. Take a checkpoint with them"
        )
    _check_counts(stored, config)
    own = replace(layer, num_layers=1)
    is_plain = own.mla is None and own.moe is None
    return replace(config, layer=config_json.with_switches(own, names, config.prefix(0)) if is_plain else own)


def declare(config: MTPConfig, layout: str) -> Params:
    """Return the `Param` declarations, with the names of the configuration's own layout."""
    hidden, names = config.layer.hidden_size, _NAMES[config.layout]

    def declare_module(module: int) -> Params:
        prefix, offset = config.prefix(module), config.layer.norm_offset
        layer = declarations.declare_layer(config.layer, config.layer_prefix(module), config.first_layer)
        return {
            "hidden_norm": norm(prefix + names["hidden_norm"], hidden, offset),
            "embed_norm": norm(prefix + names["embed_norm"], hidden, offset),
            "fc": matrix(prefix + names["fc"], (2 * hidden, None), (hidden, None)),
            "layers": [layer],  # with experts, if any has
            "norm": norm(prefix + names["norm"], hidden, offset),
        }

    declared = {"modules": [declare_module(module) for module in range(config.modules)]}
    if config.layout != "qwen":
        return declared
    family = FAMILIES[config.layer.model_type]
    joined = [each.name for each in family.fused_where_stored if config.experts_joined]
    return family.store(declared, names=joined)


def _format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> dict[str, Any]:
    config: MTPConfig = drafter.config
    layers = config.first_layer if config.layout == "deepseek" else 1
    content = config_json.format_config(replace(config.layer, num_layers=layers), dtype)
    count = _QWEN_COUNT if config.layout == "qwen" else "num_nextn_predict_layers"
    return content | {"architectures": ["MTPDrafter"], count: config.modules}


@struct.dataclass
class MTP(FeatureDrafter):
    """Modules in a row: module m drafts the token m + 1 places below the root, and the last one all that follow.

    With h the target's last hidden state after the final norm, or the state of the module before at the token before, and e the
    embedding of the next token, a module is ``layer(fc([norm(h), norm(e)]))``. The target's own head reads its normed state.
    Checkpoints hold the target too, or the modules alone; these are what is written. A hybrid's module has the layer that its
    family has, with full attention, and is written as Qwen's are.

    Attributes:
        params: of the modules (see `declare`).
        config: its configuration.
        draft: the shape of its drafts; they may be deeper than there are modules.
        mesh: where the params live.

    Examples:
        >>> drafter = specjax.MTP.init(target, jax.random.key(1), modules=2, draft=3)
        >>> drafter.config.modules, drafter.draft_shape.depth  # the last module goes on
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
        cls, target: Target, key: jax.Array, draft: DraftShape | int = Chain(4), *, modules: int = 1, **sizes: Any
    ) -> Self:
        """Modules for ``target`` with random weights; consumes ``key``.

        Their layers are plain Llama layers of the target's sizes; ``sizes`` override fields of their `ModelConfig`. That of one
        module for a hybrid is as its own layers with attention, and with experts if it has any.
        """
        if target.config.linear_layers and modules == 1:
            config = MTPConfig(_attention_layer(target.config, True, **sizes), modules, "qwen")
        else:
            config = MTPConfig(layer_like(target.config, **sizes), modules)
        return cls(params=cls._initialise(config, key, target), config=config, draft=draft, mesh=target.mesh)

    def first(self, count: int) -> "MTP":
        """The same with its first ``count`` modules alone; the last of them goes on with its own states."""
        if not 1 <= count <= self.modules:
            raise InputError(f"count={count}: there are {self.modules} modules; give 1 to {self.modules}")
        kept = {"modules": self.params["modules"][:count]}
        return replace(self, params=kept, config=replace(self.config, modules=count))

    @property
    def sizes(self) -> ModelConfig:
        return self.config.layer

    @property
    def modules(self) -> int:
        return self.config.modules

    def features(self, output: States, entries: Sequence[Entry] = ()) -> jax.Array:
        return output.hidden

    def run(
        self,
        states: jax.Array,
        embedded: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None,
        past: tuple[tuple[Piece, ...], ...],
        module: int = 0,
    ) -> tuple[jax.Array, tuple[Entry, ...]]:
        config, own = self.sizes, self.params["modules"][module]
        parts = [normed(own, "hidden_norm", config, states), normed(own, "embed_norm", config, embedded)]
        joined = jnp.concatenate(parts if self.config.layout == "mimo" else parts[::-1], axis=-1)
        turn = rotations(config.rope, config.head_dim, positions)
        x, entry = decoder_layer(own["layers"][0], config, linear(own, "fc", joined), turn, mask, past[0], self.mesh)
        return (normed(own, "norm", config, x) if self._hands_on_normed else x), (entry,)

    def logits(self, target: Target, states: jax.Array, module: int | jax.Array = 0) -> jax.Array:
        if self._hands_on_normed:
            return target.head(states)
        norms = jnp.stack([own["norm"] for own in self.params["modules"]])
        return target.head(rms_norm(states, norms[module], self.sizes.norm_eps))

    def drafting_reads(
        self, target: Target, state: FeatureState | tuple[()] = (), cache: Sequence[Entry] = ()
    ) -> DraftingReads:
        """A level runs one of the modules, over what that one remembers."""
        held = (state.cache.layers[: self.sizes.num_layers], state.cache.length, state.newest) if state else ()
        return DraftingReads(level=(self.params["modules"][-1], held, target.head_as_stored))

    @property
    def _hands_on_normed(self) -> bool:
        return self.config.layout != "deepseek"
