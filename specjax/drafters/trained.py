"""Drafters with weights of their own, which are trained for a target: what they all do alike, written once.

A subclass says what its parameters are and what config.json says of them. Reading, writing, the layouts in which a checkpoint
is published, laying the parameters out on a mesh and counting what drafting reads of them follow from that.
"""

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from specjax import sharding
from specjax.drafters.base import Drafter, DraftingReads, RemoteFeatures, State, newest_of
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError
from specjax.models import checkpoint, directories, fingerprint, hub, huggingface
from specjax.models import params as declarations
from specjax.models.cache import Entry
from specjax.models.config import ModelConfig, Rope
from specjax.models.fields import CheckpointError, read_json
from specjax.models.params import Params
from specjax.models.quantization import is_quantized, saved, schemes
from specjax.models.transformer import States, Target, default_dtype
from specjax.progress import waiting


@dataclass(frozen=True)
class Stored:
    """What the shape of a drafter is read from: a checkpoint without its weights.

    Attributes:
        directory: where it lies.
        raw: what its config.json holds.
        shapes: of its tensors, by name, as their headers say.
    """

    directory: Path
    raw: dict[str, Any]
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, directory: Path) -> "Stored":
        """The checkpoint in ``directory``. Raises `CheckpointError` where a file is missing or damaged."""
        directories.check(directory)
        return cls(directory, read_json(directory / "config.json"), checkpoint.stored_shapes(directory))

    @property
    def file(self) -> str:
        """config.json, as errors name it."""
        return str(self.directory / "config.json")

    def numbered(self, prefix: str, first: int = 0) -> int:
        """How many different numbers, from ``first`` on, follow ``prefix`` in the tensors' names (see `number_after`)."""
        numbers = {number_after(prefix, name) for name in self.shapes}
        return sum(index is not None and index >= first for index in numbers)

    def check_count(self, field: str, said: int, found: int, parts: str) -> None:
        """Refuse a count that the tensors do not bear out: declarations are made after it, and take memory.

        Args:
            field: of config.json.
            said: what it says.
            found: how many of them there are tensors of.
            parts: what is counted.
        """
        if said != found:
            raise CheckpointError(
                f"{self.file}: {field}={said}, but of {parts} there are tensors of {found}: give the configuration and the "
                "weights of one model"
            )


def number_after(prefix: str, name: str) -> int | None:
    """The number that follows ``prefix`` in a tensor's ``name``, as 0 follows ``layers.`` in ``layers.0.mlp``; None where there
    is none. One of more than nine digits is none: it counts nothing, and Python does not read thousands of digits."""
    found = re.match(r"([0-9]{1,9})\.", name[len(prefix) :]) if name.startswith(prefix) else None
    return None if found is None else int(found[1])


class TrainedDrafter(Drafter[State]):
    """A drafter with weights of its own. Subclass it as a ``flax.struct.dataclass`` with the fields below.

    Attributes:
        params: its own parameters, in the structure of `declare`.
        config: its shape: a frozen dataclass, static.
        draft: the shape of its drafts. The field's default is what checkpoints are loaded with (see `default_draft`).
        mesh: where the params live; None is the default device.
        title: what a checkpoint is, in errors: "an EAGLE drafter".
        layouts: the names of the ways in which its checkpoints are written. `save_pretrained` writes the first, unless told
            otherwise; all of them are read.

    Examples:
        >>> drafter = specjax.Medusa.init(target, jax.random.key(1), heads=2, draft=2)
        >>> drafter.save_pretrained("medusa")
        >>> read = specjax.Medusa.from_pretrained("medusa", draft=2)
        >>> jax.tree.all(jax.tree.map(np.array_equal, read, drafter))
        True
    """

    params: Params
    config: Any
    draft: DraftShape | int
    mesh: Mesh | None
    title: ClassVar[str]
    layouts: ClassVar[tuple[str, ...]]

    # --- what a subclass says ---

    def fingerprint(self) -> str:
        return fingerprint.of_params(self.params, self.config, self.mesh)

    @classmethod
    def recognises(cls, raw: Mapping[str, Any], tensors: Collection[str]) -> bool:
        """Whether a checkpoint is one of its own.

        Args:
            raw: what its config.json holds.
            tensors: the names of its tensors, where they are at hand: of the hub's the weights have not been fetched by then.
        """
        raise NotImplementedError

    @classmethod
    def layout_of(cls, stored: Stored) -> str:
        """Which of its `layouts` a checkpoint is in."""
        return cls.layouts[0]

    @classmethod
    def read_config(cls, stored: Stored, **options: Any) -> Any:
        """The shape of a checkpoint, by its config.json and by the tensors that are there; ``options`` are those of
        `from_pretrained` beyond the usual.

        Counts are compared with the tensors here (`Stored.check_count`), before anything is declared after them. An
        `InputError` becomes a `CheckpointError` that names the file.
        """
        raise NotImplementedError

    @classmethod
    def declare(cls, config: Any, layout: str) -> Params:
        """The `Param` declarations, with the names of ``layout``."""
        raise NotImplementedError

    @classmethod
    def axis_units(cls, config: Any) -> Mapping[str, int]:
        """As `ModelConfig.axis_units`."""
        raise NotImplementedError

    def format_config(self, layout: str, dtype: str, target: str) -> dict[str, Any]:
        """The fields of config.json, from which `read_config` reads an equal shape; arguments as in `save_pretrained`."""
        raise NotImplementedError

    @classmethod
    def default_draft(cls, config: Any) -> DraftShape:
        """The shape of its drafts where none is asked for."""
        (default,) = (field.default for field in fields(cls) if field.name == "draft")  # pyright: ignore[reportArgumentType]
        assert isinstance(default, DraftShape)
        return default

    @classmethod
    def init(cls, target: Target, key: jax.Array, **options: Any) -> Self:
        """A drafter for ``target`` with random weights; consumes ``key``.

        Args:
            target: the target model.
            key: of the random weights.
            options: ``draft``, the shape of its drafts, and those of the class.
        """
        raise NotImplementedError

    @classmethod
    def usual_sizes(cls, target: Target) -> dict[str, Any]:
        """What ``init`` is given for a drafter as it is usually published for ``target``, whose params may be shapes."""
        return {}

    @classmethod
    def left_over(cls, config: Any, stored: Stored) -> Collection[str]:
        """Patterns of the tensors that a checkpoint may hold beside its own."""
        return ("*rotary_emb.inv_freq",)

    @classmethod
    def declare_beside(cls, config: Any) -> Params:
        """What a checkpoint may hold that follows from the parameters: it is checked and not kept."""
        return {}

    def beside(self) -> Params:
        """The values of that, to be written."""
        return {}

    @classmethod
    def check_values(cls, config: Any, params: Params, beside: Params, directory: Path) -> None:
        """Refuse, with a CheckpointError, values that cannot be: of the parameters, and of what was found ``beside`` them."""

    def describe(self, layout: str) -> str:
        """One line on what ``layout`` says otherwise than the others do; empty: nothing."""
        return ""

    # --- what follows ---

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        draft: DraftShape | int | None = None,
        dtype: DTypeLike | None = None,
        mesh: Mesh | None = None,
        weights: schemes.Weights = schemes.AS_STORED,
        **options: Any,
    ) -> Self:
        """Load a checkpoint, in any of its layouts, recognised by what is in it.

        Args:
            path: directory, or hub id, with config.json and safetensors or a ``pytorch_model.bin``.
            draft: the shape of its drafts; None: `default_draft`.
            dtype: of the params; the default is that of `Target.from_pretrained`. It should be the target's.
            mesh: the target's.
            weights: as for `Target.from_pretrained`.
            options: those of the class, if it has any.

        Raises:
            CheckpointError: a file, a field or a tensor is not as it must be.
            TypeError: the class has no such option.
        """
        try:  # before anything is read, or fetched
            inspect.signature(cls.read_config).bind(None, **options)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}.from_pretrained() {error}") from None
        stored = Stored.of(hub.locate(path))
        config = cls._config_of(stored, **options)
        beside = {name: param for name, param in cls.declare_beside(config).items() if param.name in stored.shapes}
        with waiting(f"loading {path}"):
            declared = cls.declare(config, cls.layout_of(stored)) | beside
            params = checkpoint.load(
                stored.directory,
                schemes.declare(declared, huggingface.forms_for(stored.directory, weights, mesh), mesh),
                default_dtype() if dtype is None else dtype,
                what=f"{cls.title} with this config.json",
                ignored=cls.left_over(config, stored),
                mesh=mesh,
                units=cls.axis_units(config),
            )
        cls.check_values(config, params, {name: params.pop(name) for name in beside}, stored.directory)
        draft = cls.default_draft(config) if draft is None else draft
        return cls(params=params, config=config, draft=draft, mesh=mesh)  # pyright: ignore[reportCallIssue]

    @classmethod
    def abstract_from(cls, path: str | Path, *, dtype: DTypeLike, **options: Any) -> Self:
        """The drafter that `from_pretrained` makes of a checkpoint, with shapes in place of its params.

        Reads config.json, and of the tensors their names and shapes; no values, so that damaged ones are not found.

        Args:
            path: directory, or hub id, as for `from_pretrained`.
            dtype: of the shapes.
            options: those of the class, if it has any.

        Raises:
            CheckpointError: a file or a field is not as it must be.
        """
        config = cls._config_of(Stored.of(hub.locate(path)), **options)
        declared = cls.declare(config, cls.layouts[0])
        params = jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype or dtype)), declared)
        return cls(params=params, config=config, draft=cls.default_draft(config), mesh=None)  # pyright: ignore[reportCallIssue]

    @classmethod
    def _config_of(cls, stored: Stored, **options: Any) -> Any:
        """`read_config`, whose errors all name the file."""
        try:
            return cls.read_config(stored, **options)
        except CheckpointError:
            raise
        except InputError as error:
            raise CheckpointError(f"{stored.file}: {error}") from None

    def save_pretrained(
        self, path: str | Path, *, dtype: DTypeLike | None = None, layout: str | None = None, target: str = ""
    ) -> None:
        """Write a checkpoint, which ``from_pretrained`` reads back bit for bit. All of it or nothing.

        Args:
            path: directory; is made where there is none.
            dtype: of the file; by default the params' own.
            layout: one of `layouts`; by default the first.
            target: directory or hub id of the target, for layouts whose config.json says what it is for.
        """
        layout = self.check_layout(self.layouts[0] if layout is None else layout)
        content = self.format_config(layout, checkpoint.float_type(self._dtype if dtype is None else dtype).name, target)
        params = self.params | self.beside()
        declared = schemes.declare_like(self.declare(self.config, layout) | self.declare_beside(self.config), params)
        if (quantization := saved.format_config(declared)) is not None:
            content["quantization_config"] = quantization
        checkpoint.save(Path(path), declared, params, {"config.json": content}, dtype)

    def quantize(self, weights: schemes.Weights) -> Self:
        """The same drafter with quantized weights; ``weights`` is the name of a scheme, as in `Target.from_pretrained`.

        Raises:
            InputError: there is no scheme of that name, or the weights are quantized already.
        """
        form_of = schemes.scheme_of(weights).form_of
        params = schemes.quantize_params(self.declared, self.params, form_of, self.mesh, self.units)
        return replace(self, params=params)  # pyright: ignore[reportArgumentType]

    narrow = schemes.narrow  # the old name

    @classmethod
    def check_layout(cls, layout: str) -> str:
        """``layout``, if it is one of its `layouts`. Raises `InputError`."""
        if layout not in cls.layouts:
            known = ", ".join(map(repr, cls.layouts))
            raise InputError(f"layout={layout!r}: {cls.title} is written in the layout{'s' * (len(cls.layouts) > 1)} {known}")
        return layout

    @property
    def declared(self) -> Params:
        """The declarations of its params."""
        return self.declare(self.config, self.layouts[0])

    @property
    def units(self) -> Mapping[str, int]:
        """The units of its params' axes (see `sharding.partition`)."""
        return self.axis_units(self.config)

    @property
    def own_weights(self) -> Params:
        """Its params but for an embedding, of which a few rows are looked up."""
        return {name: value for name, value in self.params.items() if name != "embed"}

    def drafting_reads(self, target: Target, state: State | tuple[()] = (), cache: Sequence[Entry] = ()) -> DraftingReads:
        """All of its weights in every level, and the target's head."""
        return DraftingReads(level=(self.own_weights, state, target.head_as_stored))

    def tokens_at_once(self, length: int) -> int:
        """How many tokens of a row go through what is done once a draft (`DraftingReads.step`), for ``length`` tokens."""
        return 1

    @classmethod
    def _initialise(cls, config: Any, key: jax.Array, target: Target) -> Params:
        """Random parameters for ``target``, in its data type and on its mesh; consumes ``key``."""
        declared, units = cls.declare(config, cls.layouts[0]), cls.axis_units(config)
        return declarations.initialise(declared, key, target.dtype, target.mesh, units)

    @property
    def _dtype(self) -> np.dtype:
        leaves = jax.tree.leaves(self.params, is_leaf=is_quantized)
        floats = (leaf for leaf in leaves if not is_quantized(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating))
        return next((leaf.dtype for leaf in floats), jnp.dtype(default_dtype()))


class NewestStateDrafter(TrainedDrafter[jax.Array]):
    """A drafter that remembers no more of a text than the target's hidden state at the newest token that it has read."""

    @property
    def target_hidden_size(self) -> int:
        """Of the target's states."""
        raise NotImplementedError

    def start(self, target: Target, batch: int, capacity: int) -> jax.Array:
        """``[B, H]`` the target's state at each row's newest token that it has read."""
        newest = jnp.zeros((batch, self.target_hidden_size), target.dtype)
        return sharding.constrain(newest, ("batch", None), {}, self.mesh)

    def remote_inputs(self, target: Target, output: States, entries: Sequence[Entry]) -> dict[str, jax.Array]:
        return {"hidden": output.hidden}

    def append_remote(self, target: Target, state: jax.Array, told: RemoteFeatures) -> jax.Array:
        return newest_of(told.arrays["hidden"], told.count, state)


def layer_like(config: ModelConfig, **sizes: Any) -> ModelConfig:
    """The shape of a drafter's one layer for a target of ``config``: a plain Llama layer of its sizes, but for ``sizes``.

    Nothing else of the target's is in it: the config.json of a drafter could not say it.
    """
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim")
    kept += ("max_positions", "norm_eps", "bos_token_id", "eos_token_ids")
    plain: dict[str, Any] = {name: getattr(config, name) for name in kept}
    plain |= {"num_layers": 1, "rope": _plain_rope(config)}
    return ModelConfig(**(plain | _plain_heads(config) | sizes))


def _plain_rope(config: ModelConfig) -> Rope:
    """That of the target's first layer which knows positions, if any of those that read the whole text does. What a Llama layer
    has no like of is left out of it: heads that are turned in part, and slower pairs that stand still."""
    layers = sorted(range(config.num_layers), key=lambda layer: layer in config.windowed_layers)
    ropes = [rope for layer in layers if (rope := config.of_layer(layer).rope).kind != "none"]
    rope = ropes[0] if ropes else Rope()
    return Rope(theta=rope.theta) if rope.kind == "proportional" or rope.turned != 1.0 else rope


def _plain_heads(config: ModelConfig) -> dict[str, Any]:
    """Heads of ordinary attention where the target's are latent, and too many for one layer: of the size of its values, as many
    as fit the hidden size, in up to 8 groups. For DeepSeek-V3 that is 56 heads of 128 and 8 key/value heads."""
    if config.mla is None:
        return {}
    head_dim = config.mla.v_head_dim + config.mla.v_head_dim % 2
    heads = max(config.hidden_size // head_dim, 1)
    kv_heads = max(count for count in range(1, 9) if heads % count == 0)
    return {"head_dim": head_dim, "num_heads": heads, "num_kv_heads": kv_heads}
