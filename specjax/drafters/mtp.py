"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules in a row, each looks a token further.

Models that were trained with it bring the modules in their own checkpoints. `MTP` reads those of MiMo and DeepSeek-V3, and what
`specjax train` writes for targets that have none.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh

from specjax.drafters.features import FeatureDrafter, layer_like
from specjax.errors import InputError
from specjax.models import checkpoint, huggingface
from specjax.models import params as declarations
from specjax.models.attention import Piece
from specjax.models.cache import Entry
from specjax.models.config import ModelConfig
from specjax.models.fields import CheckpointError, check_fields, read_json, whole
from specjax.models.layers import decoder_layer, linear, rms_norm
from specjax.models.params import Params, matrix, norm
from specjax.models.rope import rotations
from specjax.models.transformer import Output, Target, default_dtype
from specjax.tree import Chain, Shape

Layout = Literal["mimo", "deepseek"]

_PREFIX: dict[Layout, str] = {"mimo": huggingface.MIMO_MODULES, "deepseek": "model.layers."}
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


def declare(config: MTPConfig) -> Params:
    """The `Param` declarations, with the names of the layout."""
    hidden, names = config.layer.hidden_size, _NAMES[config.layout]

    def declare_module(prefix: str) -> Params:
        return {
            "hidden_norm": norm(prefix + names["hidden_norm"], hidden),
            "embed_norm": norm(prefix + names["embed_norm"], hidden),
            "fc": matrix(prefix + names["fc"], (2 * hidden, None), (hidden, None)),
            "layers": [declarations.declare_layer(config.layer, prefix, config.first_layer)],  # which has experts, if any do
            "norm": norm(prefix + names["norm"], hidden),
        }

    return {"modules": [declare_module(config.prefix(module)) for module in range(config.modules)]}


def is_mtp(raw: Mapping[str, Any], tensors: Collection[str]) -> bool:
    """Whether a checkpoint has MTP modules: its config.json says how many, and ``tensors`` names theirs, unless it is empty."""
    named = any(name.startswith(_PREFIX["mimo"]) or name.endswith(".eh_proj.weight") for name in tensors)
    return bool(raw.get("num_nextn_predict_layers")) and (named or not tensors)


def _read_config(directory: Path, names: Collection[str]) -> MTPConfig:
    file = directory / "config.json"
    raw = read_json(file)
    count = check_fields(raw, {"num_nextn_predict_layers": whole(1, 100)}, str(file))["num_nextn_predict_layers"]
    layer = huggingface.parse_config(raw, str(file))
    layout: Layout = "mimo" if any(name.startswith(_PREFIX["mimo"]) for name in names) else "deepseek"
    config = MTPConfig(layer, count, layout, layer.num_layers if layout == "deepseek" else 0)
    if f"{config.prefix(0)}{_NAMES[layout]['fc']}.weight" not in names:
        raise CheckpointError(
            f"{directory}: has no 'model.mtp_layers.0.input_proj.weight' and no "
            f"'model.layers.{layer.num_layers}.eh_proj.weight': its MTP modules were left out. Take a checkpoint with them"
        )
    own = replace(layer, num_layers=1)
    is_plain = own.mla is None and own.moe is None
    return replace(config, layer=huggingface.with_switches(own, names, config.prefix(0)) if is_plain else own)


def _not_of_modules(config: MTPConfig, names: Collection[str]) -> list[str]:
    """Those of ``names`` that are the target's own tensors, and DeepSeek's copies of its embedding and head in a module."""
    own = _PREFIX[config.layout]
    copies = ("embed_tokens.weight", "embed_tokens.weight_scale_inv", "shared_head.head.weight")

    def is_foreign(name: str) -> bool:
        if not name.startswith(own):
            return name.startswith(("model.", "lm_head."))
        number = name.removeprefix(own).partition(".")[0]
        is_layer = config.layout == "deepseek" and number.isdecimal() and int(number) < config.first_layer
        return is_layer or name.endswith(copies) or name.endswith("rotary_emb.inv_freq")

    return [name for name in names if is_foreign(name)]


@struct.dataclass
class MTP(FeatureDrafter):
    """Modules in a row: module m drafts the token m + 1 places below the root, and the last one all that follow.

    With h the target's last hidden state after the final norm, or the state of the module before at the token before, and e the
    embedding of the next token, a module is ``layer(fc([norm(h), norm(e)]))``. The target's own head reads its normed state.

    Attributes:
        params: of the modules (see `declare`).
        config: its shape.
        draft: the shape of its drafts; they may be deeper than there are modules.
        mesh: where the params live.
    """

    params: Params
    config: MTPConfig = struct.field(pytree_node=False)
    draft: Shape = struct.field(pytree_node=False, default=Chain(4))
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def from_pretrained(cls, path: str | Path, draft: Shape = Chain(4), dtype: Any = None, mesh: Mesh | None = None) -> "MTP":
        """Load the modules of a checkpoint: of one that holds the target too, or of one that ``save_pretrained`` wrote.

        Args:
            path: directory, or hub id, with config.json and safetensors.
            draft: the shape of its drafts.
            dtype: of the params; the default is that of `Target.from_pretrained`. It should be the target's.
            mesh: the target's.

        Raises:
            CheckpointError: a file, a field or a tensor is not as it must be.
        """
        directory = huggingface.locate(path)
        names = checkpoint.stored_shapes(directory)
        config = _read_config(directory, names)
        params = checkpoint.read(
            directory,
            declare(config),
            dtype or default_dtype(),
            what="the MTP modules with this config.json",
            ignored=_not_of_modules(config, names),
            mesh=mesh,
            units=config.layer.axis_units,
        )
        return cls(params=params, config=config, draft=draft, mesh=mesh)

    @classmethod
    def init(cls, target: Target, key: jax.Array, draft: Shape = Chain(4), *, modules: int = 1, **sizes: Any) -> "MTP":
        """Modules for ``target`` with random weights; consumes ``key``.

        Their layers are plain Llama layers of the target's sizes; ``sizes`` override fields of their `ModelConfig`.
        """
        layer = layer_like(target.config, **sizes)
        config = MTPConfig(layer, modules)
        params = declarations.initialise(declare(config), key, target.dtype, target.mesh, layer.axis_units)
        return cls(params=params, config=config, draft=draft, mesh=target.mesh)

    def first(self, count: int) -> "MTP":
        """The same with its first ``count`` modules alone; the last of them goes on with its own states."""
        if not 1 <= count <= self.modules:
            raise InputError(f"count={count}: there are {self.modules} modules; give 1 to {self.modules}")
        kept = {"modules": self.params["modules"][:count]}
        return replace(self, params=kept, config=replace(self.config, modules=count))

    def save_pretrained(self, path: str | Path, dtype: Any = None) -> None:
        """Write the modules alone, in ``dtype`` (by default their own). All of it or nothing."""
        kept = checkpoint.float_type(dtype or self._dtype).name
        layers = self.config.first_layer if self.config.layout == "deepseek" else 1
        content = huggingface.format_config(replace(self.config.layer, num_layers=layers), kept)
        content |= {"architectures": ["MTPDrafter"], "num_nextn_predict_layers": self.modules}
        checkpoint.write(Path(path), declare(self.config), self.params, {"config.json": content}, dtype)

    @property
    def sizes(self) -> ModelConfig:
        return self.config.layer

    @property
    def modules(self) -> int:
        return self.config.modules

    def features(self, output: Output, entries: Sequence[Entry] = ()) -> jax.Array:
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

    @property
    def _is_mimo(self) -> bool:
        return self.config.layout == "mimo"
