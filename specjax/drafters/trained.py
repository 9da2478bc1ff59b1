"""Drafters with weights of their own, which are trained for a target: what they all do alike, written once.

A subclass says what its parameters are and what config.json says of them. Reading, writing, the layouts in which a checkpoint
is published, laying the parameters out on a mesh and counting what drafting reads of them follow from that.
"""

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
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
from specjax.drafters.draft_vocabulary import DraftVocabulary
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError
from specjax.models import checkpoint, directories, fingerprint, hub, huggingface
from specjax.models import params as declarations
from specjax.models.cache import Entry
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig, Rope
from specjax.models.fields import CheckpointError
from specjax.models.params import Params
from specjax.models.quantization import is_quantized, saved, schemes
from specjax.models.transformer import States, Target, default_dtype
from specjax.progress import waiting


def open_drafter(path: str | Path | CheckpointFiles) -> CheckpointFiles:
    """Return the files of a drafter's checkpoint; its weights are fetched, and config.json and all headers are read.

    Raises:
        CheckpointError: there is no such checkpoint, or a file is missing or damaged.
    """
    files = hub.open_checkpoint(path)
    directories.check(files)
    assert files.raw is not None and files.shapes is not None  # read here: damaged files are refused before any field is
    return files


LEFT_OVER = ("*rotary_emb.inv_freq",)
"""Patterns of tensors that every checkpoint may hold, and that are not read."""


@dataclass(frozen=True)
class CheckpointFormat:
    """How the checkpoints of one kind of drafter are recognised, read and written.

    Attributes:
        title: what a checkpoint is called in errors: "an EAGLE drafter".
        layouts: the names of the ways in which checkpoints are written. All of them are read. `TrainedDrafter.save_pretrained`
            writes the first, unless another one is requested.
        recognises: takes the fields of config.json and the names of the tensors, and says whether a checkpoint is of this kind.
            The names are missing if the checkpoint is on the hub, because its weights have not been fetched by then.
        read_config: takes what is stored and the options of `TrainedDrafter.from_pretrained` beyond the usual, and returns the
            shape. It compares counts with the tensors before anything is declared after them (`CheckpointFiles.check_count`).
            An `InputError` becomes a `CheckpointError` that names the file.
        declare: takes a shape and a layout, and returns the `Param` declarations with the names of that layout.
        axis_units: takes a shape, and returns what `ModelConfig.axis_units` says of a model's.
        format_config: takes a drafter and the layout, dtype and target of `TrainedDrafter.save_pretrained`, and returns the
            fields of config.json, from which ``read_config`` reads an equal shape.
        layout_of: takes what is stored, and returns its layout; None if the tensors have the same names in all layouts.
        left_over: takes a shape and what is stored, and returns patterns of the tensors that are not read.
        reduced_vocabulary: takes a shape, and returns the drafter's own vocabulary, whose table ``d2t`` is one of the
            parameters; None if the drafter has the target's.
        describe: takes a drafter and a layout, and says in a line what that layout states differently; may be empty.

    Examples:
        >>> specjax.Medusa.checkpoint_format.recognises({"medusa_num_heads": 2}, ())
        True
        >>> specjax.PEagle.checkpoint_format.layouts
        ('speculators', 'specforge')
    """

    title: str
    layouts: tuple[str, ...]
    recognises: Callable[[Mapping[str, Any], Collection[str]], bool]
    read_config: Callable[..., Any]
    declare: Callable[[Any, str], Params]
    axis_units: Callable[[Any], Mapping[str, int]]
    format_config: Callable[[Any, str, str, str], dict[str, Any]]
    layout_of: Callable[[CheckpointFiles], str] | None = None
    left_over: Callable[[Any, CheckpointFiles], Collection[str]] = lambda config, stored: LEFT_OVER
    reduced_vocabulary: Callable[[Any], DraftVocabulary | None] = lambda config: None
    describe: Callable[[Any, str], str] = lambda drafter, layout: ""

    def check_layout(self, layout: str) -> str:
        """Return ``layout`` if it is one of `layouts`. Raises `InputError` otherwise."""
        if layout not in self.layouts:
            known = ", ".join(map(repr, self.layouts))
            raise InputError(f"layout={layout!r}: {self.title} is written in the layout{'s' * (len(self.layouts) > 1)} {known}")
        return layout


class TrainedDrafter(Drafter[State]):
    """A drafter with weights of its own. Subclass it as a ``flax.struct.dataclass`` with the fields below.

    Attributes:
        params: its own parameters, in the structure that its format declares.
        config: its shape: a frozen dataclass, static.
        draft: the shape of its drafts. The field's default is what checkpoints are loaded with (see `default_draft`).
        mesh: where the params live; None is the default device.
        checkpoint_format: how its checkpoints are read and written. Every subclass names one.
        title: that of its format.
        layouts: those of its format.

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
    checkpoint_format: ClassVar[CheckpointFormat]
    title: ClassVar[str]
    layouts: ClassVar[tuple[str, ...]]

    @classmethod
    def _complete_class(cls, own: Mapping[str, Any]) -> None:
        """Set `title` and `layouts`, and make a format of methods on the class, which drafters had in place of a format."""
        old = ", ".join(field.name for field in fields(CheckpointFormat) if field.name in own)
        if old and "checkpoint_format" not in own:
            message = f"{cls.__name__}: give {old} to a CheckpointFormat, and name that as checkpoint_format"
            warnings.warn(message, DeprecationWarning, stacklevel=3)
            base = getattr(cls, "checkpoint_format", None)
            values: dict[str, Any] = {part.name: getattr(base, part.name, part.default) for part in fields(CheckpointFormat)}
            cls.checkpoint_format = CheckpointFormat(**{name: getattr(cls, name, value) for name, value in values.items()})
        if hasattr(cls, "checkpoint_format"):
            cls.title, cls.layouts = cls.checkpoint_format.title, cls.checkpoint_format.layouts

    # --- what a subclass says ---

    def fingerprint(self) -> str:
        return fingerprint.of_params(self.params, self.config, self.mesh)

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

    # --- what follows ---

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | CheckpointFiles,
        *,
        draft: DraftShape | int | None = None,
        dtype: DTypeLike | None = None,
        mesh: Mesh | None = None,
        weights: schemes.Weights = schemes.AS_STORED,
        **options: Any,
    ) -> Self:
        """Load a checkpoint, in any of its layouts, recognised by what is in it.

        Args:
            path: directory, or hub id, with config.json and safetensors or a ``pytorch_model.bin``; or its opened files.
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
            inspect.signature(cls.checkpoint_format.read_config).bind(None, **options)
        except TypeError as error:
            raise TypeError(f"{cls.__name__}.from_pretrained() {error}") from None
        stored = open_drafter(path)
        config = cls._config_of(stored, **options)
        form = cls.checkpoint_format
        layout = form.layouts[0] if form.layout_of is None else form.layout_of(stored)
        declared, vocabulary = form.declare(config, layout), form.reduced_vocabulary(config)
        if vocabulary is not None and "t2d" in stored.shapes:
            declared |= vocabulary.declare_t2d()
        with waiting(f"loading {path}"):
            params = checkpoint.load(
                stored,
                schemes.declare(declared, huggingface.forms_for(stored, weights, mesh), mesh),
                default_dtype() if dtype is None else dtype,
                what=f"{form.title} with this config.json",
                ignored=form.left_over(config, stored),
                mesh=mesh,
                units=form.axis_units(config),
            )
        if vocabulary is not None:
            vocabulary.check_values(params, params.pop("t2d", None), stored.directory)
        draft = cls.default_draft(config) if draft is None else draft
        return cls(params=params, config=config, draft=draft, mesh=mesh)  # pyright: ignore[reportCallIssue]

    @classmethod
    def abstract_from(cls, path: str | Path | CheckpointFiles, *, dtype: DTypeLike, **options: Any) -> Self:
        """The drafter that `from_pretrained` makes of a checkpoint, with shapes in place of its params.

        Reads config.json, and of the tensors their names and shapes; no values, so that damaged ones are not found.

        Args:
            path: directory, or hub id, as for `from_pretrained`.
            dtype: of the shapes.
            options: those of the class, if it has any.

        Raises:
            CheckpointError: a file or a field is not as it must be.
        """
        config = cls._config_of(open_drafter(path), **options)
        declared = cls.checkpoint_format.declare(config, cls.layouts[0])
        params = jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype or dtype)), declared)
        return cls(params=params, config=config, draft=cls.default_draft(config), mesh=None)  # pyright: ignore[reportCallIssue]

    @classmethod
    def _config_of(cls, stored: CheckpointFiles, **options: Any) -> Any:
        """Return what the format's ``read_config`` returns. All errors name the file."""
        try:
            return cls.checkpoint_format.read_config(stored, **options)
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
        form = self.checkpoint_format
        layout = form.check_layout(form.layouts[0] if layout is None else layout)
        type_name = checkpoint.float_type(self._dtype if dtype is None else dtype).name
        content = form.format_config(self, layout, type_name, target)
        params, declared = self.params, form.declare(self.config, layout)
        if (vocabulary := form.reduced_vocabulary(self.config)) is not None:
            params, declared = params | vocabulary.compute_t2d(params), declared | vocabulary.declare_t2d()
        declared = schemes.declare_like(declared, params)
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

    @property
    def declared(self) -> Params:
        """The declarations of its params."""
        return self.checkpoint_format.declare(self.config, self.layouts[0])

    @property
    def units(self) -> Mapping[str, int]:
        """The units of its params' axes (see `sharding.partition`)."""
        return self.checkpoint_format.axis_units(self.config)

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
        form = cls.checkpoint_format
        declared, units = form.declare(config, form.layouts[0]), form.axis_units(config)
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
