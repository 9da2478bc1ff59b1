"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules in a row, each looks a token further.

Models that were trained with it bring the modules in their own checkpoints. `MTP` reads those of MiMo and DeepSeek-V3, and what
`specjax train` writes for targets that have none.
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
from specjax.drafters.trained import Stored, layer_like, number_after
from specjax.drafts.shapes import Chain, DraftShape
from specjax.errors import InputError
from specjax.models import huggingface
from specjax.models import params as declarations
from specjax.models.attention import Piece
from specjax.models.cache import Entry
from specjax.models.config import ModelConfig
from specjax.models.families.qwen2 import MIMO_MODULES
from specjax.models.fields import CheckpointError, check_fields, whole
from specjax.models.layers import decoder_layer, linear, rms_norm
from specjax.models.params import Params, matrix, norm
from specjax.models.rope import rotations
from specjax.models.transformer import States, Target

Layout = Literal["mimo", "deepseek"]

_PREFIX: dict[Layout, str] = {"mimo": MIMO_MODULES, "deepseek": "model.layers."}
_NAMES: dict[Layout, dict[str, str]] = {
    "mimo": {
        "hidden_norm": "hidden_layernorm",
        "embed_norm": "token_layernorm",
        "fc": "input_proj",
        "norm": "final_layernorm",
    },
    "deepseek": {"hidden_norm": "hnorm", "embed_norm": "enorm", "fc": "eh_proj", "norm": "shared_head.norm"},
}
"""How the tensors of a module are called, beside those of its decoder layer."""


@dataclass(frozen=True)
class MTPConfig:
    """The shape of an `MTP`.

    Attributes:
        layer: of each module's one decoder layer; ``vocab_size`` and ``hidden_size`` are the target's.
        modules: how many.
        layout: how its tensors are named, and two habits that go with the names. MiMo joins state and embedding in this order,
            and hands on the state *after* the module's norm; DeepSeek joins embedding and state, and hands it on before.
        first_layer: number of the first module in DeepSeek's names: the target's number of layers.
    """

    layer: ModelConfig
    modules: int
    layout: Layout = "mimo"
    first_layer: int = 0

    def __post_init__(self) -> None:
        if self.modules < 1:
            raise InputError(f"modules={self.modules}: must be at least 1")

    def prefix(self, module: int) -> str:
        """How the names of the tensors of ``module`` begin."""
        return f"{_PREFIX[self.layout]}{self.first_layer + module if self.layout == 'deepseek' else module}."


def _check_counts(stored: Stored, config: MTPConfig) -> None:
    """Compare the counts of config.json with the tensors' headers, before declarations are made after them."""
    found = stored.numbered(_PREFIX[config.layout], config.first_layer)
    stored.check_count("num_nextn_predict_layers", config.modules, found, "modules")
    if (moe := config.layer.moe) is None or not config.layer.is_sparse(config.first_layer):
        return
    for module in range(config.modules):
        found = stored.numbered(f"{config.prefix(module)}mlp.experts.")
        stored.check_count("the number of experts", moe.num_experts, found, f"experts in module {module}")


def _not_of_modules(config: MTPConfig, names: Collection[str]) -> list[str]:
    """Those of ``names`` that are the target's own tensors, and DeepSeek's copies of its embedding and head in a module."""
    own = _PREFIX[config.layout]
    copies = ("embed_tokens.weight", "embed_tokens.weight_scale_inv", "shared_head.head.weight")

    def is_foreign(name: str) -> bool:
        if not name.startswith(own):
            return name.startswith(("model.", "lm_head."))
        number = number_after(own, name)
        is_layer = config.layout == "deepseek" and number is not None and number < config.first_layer
        return is_layer or name.endswith(copies) or name.endswith("rotary_emb.inv_freq")

    return [name for name in names if is_foreign(name)]


@struct.dataclass
class MTP(FeatureDrafter):
    """Modules in a row: module m drafts the token m + 1 places below the root, and the last one all that follow.

    With h the target's last hidden state after the final norm, or the state of the module before at the token before, and e the
    embedding of the next token, a module is ``layer(fc([norm(h), norm(e)]))``. The target's own head reads its normed state.
    Checkpoints hold the target too, or the modules alone; these are what is written.

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

    title: ClassVar[str] = "the MTP modules"
    layouts: ClassVar[tuple[str, ...]] = ("mtp",)

    @classmethod
    def recognises(cls, raw: Mapping[str, Any], tensors: Collection[str]) -> bool:
        """Its config.json says how many modules there are, and ``tensors`` names theirs, unless it is empty."""
        named = any(name.startswith(_PREFIX["mimo"]) or name.endswith(".eh_proj.weight") for name in tensors)
        return bool(raw.get("num_nextn_predict_layers")) and (named or not tensors)

    @classmethod
    def read_config(cls, stored: Stored) -> MTPConfig:
        names, known = stored.shapes, {"num_nextn_predict_layers": whole(1, 100)}
        count = check_fields(stored.raw, known, stored.file)["num_nextn_predict_layers"]
        layer = huggingface.parse_config(stored.raw, stored.file)
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
        return replace(config, layer=huggingface.with_switches(own, names, config.prefix(0)) if is_plain else own)

    @classmethod
    def declare(cls, config: MTPConfig, layout: str = "mtp") -> Params:
        """With the names of the configuration's own layout."""
        hidden, names = config.layer.hidden_size, _NAMES[config.layout]

        def declare_module(prefix: str) -> Params:
            return {
                "hidden_norm": norm(prefix + names["hidden_norm"], hidden),
                "embed_norm": norm(prefix + names["embed_norm"], hidden),
                "fc": matrix(prefix + names["fc"], (2 * hidden, None), (hidden, None)),
                "layers": [declarations.declare_layer(config.layer, prefix, config.first_layer)],  # with experts, if any has
                "norm": norm(prefix + names["norm"], hidden),
            }

        return {"modules": [declare_module(config.prefix(module)) for module in range(config.modules)]}

    @classmethod
    def axis_units(cls, config: MTPConfig) -> Mapping[str, int]:
        return config.layer.axis_units

    @classmethod
    def left_over(cls, config: MTPConfig, stored: Stored) -> Collection[str]:
        return _not_of_modules(config, stored.shapes)

    def format_config(self, layout: str, dtype: str, target: str) -> dict[str, Any]:
        layers = self.config.first_layer if self.config.layout == "deepseek" else 1
        content = huggingface.format_config(replace(self.config.layer, num_layers=layers), dtype)
        return content | {"architectures": ["MTPDrafter"], "num_nextn_predict_layers": self.modules}

    @classmethod
    def init(
        cls, target: Target, key: jax.Array, draft: DraftShape | int = Chain(4), *, modules: int = 1, **sizes: Any
    ) -> Self:
        """Modules for ``target`` with random weights; consumes ``key``.

        Their layers are plain Llama layers of the target's sizes; ``sizes`` override fields of their `ModelConfig`.
        """
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
        config, own, eps = self.sizes, self.params["modules"][module], self.sizes.norm_eps
        parts = [rms_norm(states, own["hidden_norm"], eps), rms_norm(embedded, own["embed_norm"], eps)]
        joined = jnp.concatenate(parts if self._is_mimo else parts[::-1], axis=-1)
        turn = rotations(config.rope, config.head_dim, positions)
        x, entry = decoder_layer(own["layers"][0], config, linear(own, "fc", joined), turn, mask, past[0], self.mesh)
        return (rms_norm(x, own["norm"], eps) if self._is_mimo else x), (entry,)

    def logits(self, target: Target, states: jax.Array, module: int | jax.Array = 0) -> jax.Array:
        if self._is_mimo:
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
    def _is_mimo(self) -> bool:
        return self.config.layout == "mimo"
