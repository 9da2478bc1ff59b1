"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules in a row.

Each module predicts one token further ahead than the module before. Models that were trained with
it have the modules in their own checkpoints. `MTP` reads those of MiMo, of DeepSeek-V3, and of
Qwen3.5 and Qwen3-Next, and what `specjax train` writes for targets without modules.
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
from specjax.models.config import ModelConfig
from specjax.models.families import FAMILIES, delta_net
from specjax.models.families.qwen2 import MIMO_MODULES
from specjax.models.fields import CheckpointError, Fields, JsonObject, check_fields, whole
from specjax.models.layers import decoder_layer, linear, normed, rms_norm
from specjax.models.params import Params, matrix, norm
from specjax.models.rope import rotations
from specjax.models.transformer import Target

Layout = Literal["mimo", "deepseek", "qwen"]

_PREFIX: dict[Layout, str] = {
    "mimo": MIMO_MODULES,
    "deepseek": "model.layers.",
    "qwen": delta_net.MODULES,
}
_NAMES: dict[Layout, dict[str, str]] = {
    "mimo": {
        "hidden_norm": "hidden_layernorm",
        "embed_norm": "token_layernorm",
        "fc": "input_proj",
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
}
"""The names of the tensors of a module, except those of its decoder layer."""

_QWEN_COUNT = "mtp_num_hidden_layers"
"""The field of config.json with the number of Qwen3.5's modules, among the text model's fields."""


@dataclass(frozen=True)
class MTPConfig:
    """The configuration of an `MTP` drafter.

    Attributes:
        layer: the configuration of each module's one decoder layer; ``vocab_size`` and
            ``hidden_size`` are the target's.
        modules: the number of modules.
        layout: the names of the tensors, and two conventions that come with them. MiMo concatenates
            state and embedding in this order, and feeds back the state *after* the module's norm.
            DeepSeek concatenates embedding and state, and feeds back the state before the norm.
            Qwen concatenates as DeepSeek does, and feeds back as MiMo does.
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
        if self.layout == "qwen" and self.modules > 1:
            raise InputError(
                f"modules={self.modules}: Qwen's checkpoints have names for one: give 1"
            )

    def prefix(self, module: int) -> str:
        """Return the prefix of the tensor names of ``module``."""
        if self.layout == "qwen":
            return _PREFIX["qwen"]
        return (
            f"{self.numbered}{self.first_layer + module if self.layout == 'deepseek' else module}."
        )

    def layer_prefix(self, module: int) -> str:
        """Return the prefix of the tensor names of the decoder layer of ``module``."""
        return f"{self.numbered}{module}." if self.layout == "qwen" else self.prefix(module)

    @property
    def numbered(self) -> str:
        """The part of the tensor names before the index of a module."""
        return _PREFIX[self.layout] + ("layers." if self.layout == "qwen" else "")


def _read_qwen(stored: CheckpointFiles) -> MTPConfig:
    """Read the configuration of a module of Qwen3.5 or Qwen3-Next.

    The checkpoint has the module alone, or the whole model. Only the config.json of Qwen3.5 states
    the number of modules.
    """
    whole_model = config_json.parse_drafter_config(stored.raw, stored.file)
    if not whole_model.gated_attention:
        raise CheckpointError(
            f"{stored.file}: model_type={whole_model.model_type!r}: only Qwen3.5 and Qwen3-Next"
            f" have modules with tensors '{_PREFIX['qwen']}*': give a checkpoint of one of these"
        )
    inner = _fields_of_text(stored.raw)
    count = check_fields(inner, {_QWEN_COUNT: whole(1, 100, default=1)}, stored.file)[_QWEN_COUNT]
    mlp = f"{_PREFIX['qwen']}layers.0.mlp."
    layer = _attention_layer(whole_model, is_sparse=f"{mlp}gate.weight" in stored.shapes)
    config = MTPConfig(
        layer, count, "qwen", experts_joined=f"{mlp}experts.gate_up_proj" in stored.shapes
    )
    _check_counts(stored, config)
    return config


def _attention_layer(config: ModelConfig, is_sparse: bool, **sizes: Any) -> ModelConfig:
    """Return the configuration of a hybrid's layer with full attention, with experts or without.

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
    count = stored.numbered(config.numbered, config.first_layer)
    field = _QWEN_COUNT if config.layout == "qwen" else "num_nextn_predict_layers"
    stored.check_count(field, config.modules, count, "modules")
    if (
        (moe := config.layer.moe) is None
        or not config.layer.is_sparse(config.first_layer)
        or config.experts_joined
    ):
        return
    for module in range(config.modules):
        count = stored.numbered(f"{config.layer_prefix(module)}mlp.experts.")
        stored.check_count(
            "the number of experts", moe.num_experts, count, f"experts in module {module}"
        )


def _fields_of_text(raw: Fields) -> Fields:
    """Return the fields of the text model in a config.json, which a multimodal model nests."""
    inner = raw.get("text_config")
    return inner if isinstance(inner, dict) else raw


def _has_qwens(tensors: Collection[str]) -> bool:
    return f"{_PREFIX['qwen']}fc.weight" in tensors


def _left_over(config: MTPConfig, stored: CheckpointFiles) -> Collection[str]:
    """Return the names of the tensors that are ignored.

    They are the target's own tensors, and DeepSeek's copies of embedding and head in a module.
    """
    prefix = _PREFIX[config.layout]
    copies = ("embed_tokens.weight", "embed_tokens.weight_scale_inv", "shared_head.head.weight")

    def is_foreign(name: str) -> bool:
        if not name.startswith(prefix):
            return name.startswith(("model.", "lm_head."))
        number = number_after(prefix, name)
        is_layer = (
            config.layout == "deepseek" and number is not None and number < config.first_layer
        )
        is_copy = config.layout != "qwen" and name.endswith(copies)
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
        name.startswith(_PREFIX["mimo"]) or name.endswith(".eh_proj.weight") for name in tensors
    )
    if not tensors and _fields_of_text(raw).get(_QWEN_COUNT):
        return True
    return bool(raw.get("num_nextn_predict_layers")) and (has_modules or not tensors)


def read_config(stored: CheckpointFiles) -> MTPConfig:
    """Return the configuration of a checkpoint. Raises `CheckpointError`."""
    if _has_qwens(stored.shapes):
        return _read_qwen(stored)
    names, rules = stored.shapes, {"num_nextn_predict_layers": whole(1, 100)}
    count = check_fields(stored.raw, rules, stored.file)["num_nextn_predict_layers"]
    layer = config_json.parse_drafter_config(stored.raw, stored.file)
    layout: Layout = (
        "mimo" if any(name.startswith(_PREFIX["mimo"]) for name in names) else "deepseek"
    )
    config = MTPConfig(layer, count, layout, layer.num_layers if layout == "deepseek" else 0)
    if f"{config.prefix(0)}{_NAMES[layout]['fc']}.weight" not in names:
        raise CheckpointError(
            f"{stored.directory}: it lacks 'model.mtp_layers.0.input_proj.weight' and"
            f" 'model.layers.{layer.num_layers}.eh_proj.weight': MTP modules were left out; give a"
            " checkpoint with them"
        )
    _check_counts(stored, config)
    indexer = None if layer.indexer is None else replace(layer.indexer, shared_layers=())
    one_layer = replace(layer, num_layers=1, indexer=indexer)
    is_plain = one_layer.mla is None and one_layer.moe is None
    return replace(
        config,
        layer=(
            config_json.with_switches(one_layer, names, config.prefix(0)) if is_plain else one_layer
        ),
    )


def declare(config: MTPConfig, layout: str) -> Params:
    """Return the `Param` declarations, with the names of the configuration's own layout."""
    hidden, names = config.layer.hidden_size, _NAMES[config.layout]

    def declare_module(module: int) -> Params:
        prefix, offset = config.prefix(module), config.layer.norm_offset
        layer = declarations.declare_layer(
            config.layer, config.layer_prefix(module), config.first_layer
        )
        return {
            "hidden_norm": norm(prefix + names["hidden_norm"], hidden, offset),
            "embed_norm": norm(prefix + names["embed_norm"], hidden, offset),
            "fc": matrix(prefix + names["fc"], (2 * hidden, None), (hidden, None)),
            "layers": [layer],  # with experts, if the target's layers have them
            "norm": norm(prefix + names["norm"], hidden, offset),
        }

    declared = {"modules": [declare_module(module) for module in range(config.modules)]}
    if config.layout != "qwen":
        return declared
    family = FAMILIES[config.layer.model_type]
    joined = [group.name for group in family.fused_where_stored if config.experts_joined]
    return family.store(declared, shapes=dict.fromkeys(joined, ()))


def _format_config(drafter: TrainedDrafter, layout: str, dtype: str, target: str) -> JsonObject:
    config: MTPConfig = drafter.config
    layers = config.first_layer if config.layout == "deepseek" else 1
    content = config_json.format_config(replace(config.layer, num_layers=layers), dtype)
    count = _QWEN_COUNT if config.layout == "qwen" else "num_nextn_predict_layers"
    return content | {"architectures": ["MTPDrafter"], count: config.modules}


@struct.dataclass
class MTP(FeatureDrafter):
    """A drafter of modules in a row: module m drafts the token at depth m + 1.

    The last module drafts all further tokens too. With h the target's last hidden state after the
    final norm, or the state of the module before at the token before, and e the embedding of the
    next token, a module is ``layer(fc([norm(h), norm(e)]))``. The target's own head reads its
    normed state. Checkpoints have the modules alone, or the target as well; the modules alone are
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
        parts = [
            normed(params, "hidden_norm", config, states),
            normed(params, "embed_norm", config, embedded),
        ]
        # MiMo's modules join the state first, all others the embedding.
        joined = jnp.concatenate(parts if self.config.layout == "mimo" else parts[::-1], axis=-1)
        turn = rotations(config.rope, config.head_dim, positions)
        x, entry = decoder_layer(
            params["layers"][0],
            config,
            linear(params, "fc", joined),
            turn,
            mask,
            past[0],
            self.mesh,
        )
        return (normed(params, "norm", config, x) if self._hands_on_normed else x), (entry,)

    def logits(self, target: Target, states: jax.Array, module: int | jax.Array = 0) -> jax.Array:
        if self._hands_on_normed:
            return target.head(states)
        norms = jnp.stack([params["norm"] for params in self.params["modules"]])
        return target.head(rms_norm(states, norms[module], self.sizes.norm_eps))

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return the arrays of a level: one of the modules with its part of the cache."""
        if state:
            module_state = (
                state.cache.layers[: self.sizes.num_layers],
                state.cache.length,
                state.newest,
            )
        else:
            module_state = ()
        return DraftingReads(
            level=(self.params["modules"][-1], module_state, target.head_as_stored)
        )

    @property
    def _hands_on_normed(self) -> bool:
        return self.config.layout != "deepseek"
