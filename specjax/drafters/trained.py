"""The base of drafters with weights of their own, which are trained for a target.

A subclass declares its parameters and describes its config.json. The base reads and writes its
checkpoints in all published layouts, places the parameters on a mesh, and counts the bytes that
drafting reads.
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
from specjax.drafters.candidates import Vocabulary
from specjax.drafters.draft_vocabulary import DraftVocabulary, vocabulary_of
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError
from specjax.models import checkpoint, directories, fingerprint, hub, huggingface
from specjax.models import params as declarations
from specjax.models.cache import Entry
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig, Rope
from specjax.models.fields import CheckpointError, Fields, JsonObject
from specjax.models.params import Params
from specjax.models.quantization import is_quantized, saved, schemes
from specjax.models.transformer import States, Target, default_dtype
from specjax.progress import waiting


def open_drafter(path: str | Path | CheckpointFiles) -> CheckpointFiles:
    """Open the files of a drafter's checkpoint.

    The weights are downloaded, and config.json and the headers of all tensor files are read.

    Raises:
        CheckpointError: There is no such checkpoint, or a file is missing or damaged.
    """
    files = hub.open_checkpoint(path)
    directories.check(files)
    # Read first, so that a damaged file is reported before a wrong field.
    _ = (files.raw, files.shapes)
    return files


def architectures_of(raw: Fields) -> list[str]:
    """Return the architectures that a config.json names."""
    names = raw.get("architectures")
    return [str(name) for name in names] if isinstance(names, list) else []


LEFT_OVER = ("*rotary_emb.inv_freq",)
"""Patterns of the tensors that any checkpoint may have and that are ignored."""


@dataclass(frozen=True)
class CheckpointFormat:
    """The format of the checkpoints of one kind of drafter: how to recognise, read and write them.

    Attributes:
        title: the name of such a checkpoint in error messages, such as "an EAGLE drafter".
        layouts: the names of the layouts, that is, the published variants of the format. All are
            read. `TrainedDrafter.save_pretrained` writes the first, unless another one is
            requested.
        recognises: takes the fields of config.json and the names of the tensors, and returns
            whether a checkpoint is of this kind. There are no names if the checkpoint is on the
            hub, because its weights have not been downloaded yet.
        read_config: takes the checkpoint's files and the options that a class adds to
            `TrainedDrafter.from_pretrained`, and returns the drafter's configuration. It must
            compare counts with the tensors before anything is declared from them
            (`CheckpointFiles.check_count`). An `InputError` becomes a `CheckpointError` that names
            the file.
        declare: takes a configuration and a layout, and returns the `Param` declarations with the
            tensor names of that layout.
        axis_units: takes a configuration, and returns what `ModelConfig.axis_units` returns for a
            model.
        format_config: takes a drafter and the layout, dtype and target of
            `TrainedDrafter.save_pretrained`, and returns the fields of config.json. ``read_config``
            must return an equal configuration for them.
        layout_of: takes the checkpoint's files, and returns the layout; None if the tensors have
            the same names in all layouts.
        left_over: takes a configuration and the checkpoint's files, and returns patterns of the
            tensors that are ignored.
        reduced_vocabulary: takes a configuration, and returns the drafter's own vocabulary, whose
            table ``d2t`` is one of the parameters; None if the drafter has the target's vocabulary.
        describe: takes a drafter and a layout, and returns a line about the particulars of the
            layout, or an empty string.

    Examples:
        >>> specjax.Medusa.checkpoint_format.recognises({"medusa_num_heads": 2}, ())
        True
        >>> specjax.PEagle.checkpoint_format.layouts
        ('speculators', 'specforge')
    """

    title: str
    layouts: tuple[str, ...]
    recognises: Callable[[Fields, Collection[str]], bool]
    read_config: Callable[..., Any]
    declare: Callable[[Any, str], Params]
    axis_units: Callable[[Any], Mapping[str, int]]
    format_config: Callable[[Any, str, str, str], JsonObject]
    layout_of: Callable[[CheckpointFiles], str] | None = None
    left_over: Callable[[Any, CheckpointFiles], Collection[str]] = lambda config, stored: LEFT_OVER
    reduced_vocabulary: Callable[[Any], DraftVocabulary | None] = lambda config: None
    describe: Callable[[Any, str], str] = lambda drafter, layout: ""

    def check_layout(self, layout: str) -> str:
        """Return ``layout`` if it is one of `layouts`, or raise `InputError`."""
        if layout not in self.layouts:
            names = ", ".join(map(repr, self.layouts))
            raise InputError(
                f"layout={layout!r}: {self.title} is written in the"
                f" layout{'s' * (len(self.layouts) > 1)} {names}"
            )
        return layout


class TrainedDrafter(Drafter[State]):
    """The base of drafters with weights of their own.

    Decorate a subclass with ``flax.struct.dataclass``, and give it the fields below.

    Attributes:
        params: the parameters, in the structure that the checkpoint format declares.
        config: the configuration of the network: a frozen dataclass, static.
        draft: the shape of the drafts. Loaded checkpoints get the default of this field (see
            `default_draft`).
        mesh: the mesh of the parameters; None is the default device.
        checkpoint_format: the format of its checkpoints. Every subclass sets one.
        title: the title of the checkpoint format.
        layouts: the layouts of the checkpoint format.

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
    def _complete_class(cls, defined: Mapping[str, Any]) -> None:
        """Set `title` and `layouts`.

        A class that defines the parts of a `CheckpointFormat` as methods, as drafters did before
        there were formats, gets a format made of them, with a DeprecationWarning.
        """
        old = ", ".join(field.name for field in fields(CheckpointFormat) if field.name in defined)
        if old and "checkpoint_format" not in defined:
            message = (
                f"{cls.__name__}: give {old} to a CheckpointFormat, and name that as"
                " checkpoint_format"
            )
            warnings.warn(message, DeprecationWarning, stacklevel=3)
            base = getattr(cls, "checkpoint_format", None)
            values: dict[str, Any] = {
                part.name: getattr(base, part.name, part.default)
                for part in fields(CheckpointFormat)
            }
            cls.checkpoint_format = CheckpointFormat(
                **{name: getattr(cls, name, value) for name, value in values.items()}
            )
        if hasattr(cls, "checkpoint_format"):
            cls.title, cls.layouts = cls.checkpoint_format.title, cls.checkpoint_format.layouts

    # --- methods that a subclass may override ---

    def fingerprint(self) -> str:
        return fingerprint.of_params(self.params, self.config, self.mesh)

    @classmethod
    def default_draft(cls, config: Any) -> DraftShape:
        """Return the shape of the drafts for users who give none."""
        (default,) = (field.default for field in fields(cls) if field.name == "draft")  # pyright: ignore[reportArgumentType]
        assert isinstance(default, DraftShape)
        return default

    @classmethod
    def init(cls, target: Target, key: jax.Array, **options: Any) -> Self:
        """Return a drafter for ``target`` with random weights.

        Args:
            target: the target model.
            key: the random key for the weights. It is consumed.
            options: ``draft``, the shape of the drafts, and the options of the class.
        """
        raise NotImplementedError

    @classmethod
    def usual_sizes(cls, target: Target) -> dict[str, Any]:
        """Return the arguments of ``init`` for a drafter of the usual published size.

        The parameters of ``target`` may be shapes.
        """
        return {}

    # --- methods that every trained drafter has ---

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
        """Load a checkpoint. The layout is recognised by the content.

        Args:
            path: a directory or a hub id, with config.json and safetensors or a
                ``pytorch_model.bin``; or its opened files.
            draft: the shape of the drafts; None is `default_draft`.
            dtype: the data type of the parameters, which should be the target's. The default is
                that of `Target.from_pretrained`.
            mesh: the mesh of the target.
            weights: the quantization of the weights, as for `Target.from_pretrained`.
            options: the options of the class, if it has any.

        Raises:
            CheckpointError: A file, a field or a tensor is missing or invalid.
            TypeError: The class has no such option.
        """
        try:  # wrong options fail before anything is read or downloaded
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
    def abstract_from(
        cls, path: str | Path | CheckpointFiles, *, dtype: DTypeLike, **options: Any
    ) -> Self:
        """Return the drafter that `from_pretrained` loads, with shapes in place of its parameters.

        It reads config.json, and the names and shapes of the tensors. It reads no values, so it
        finds no damaged ones.

        Args:
            path: a directory or a hub id, as for `from_pretrained`.
            dtype: the data type of the shapes.
            options: the options of the class, if it has any.

        Raises:
            CheckpointError: A file or a field is missing or invalid.
        """
        config = cls._config_of(open_drafter(path), **options)
        declared = cls.checkpoint_format.declare(config, cls.layouts[0])
        params = jax.tree.map(
            lambda param: jax.ShapeDtypeStruct(param.shape, jnp.dtype(param.dtype or dtype)),
            declared,
        )
        return cls(params=params, config=config, draft=cls.default_draft(config), mesh=None)  # pyright: ignore[reportCallIssue]

    @classmethod
    def _config_of(cls, stored: CheckpointFiles, **options: Any) -> Any:
        """Return the result of the format's ``read_config``. All errors name the file."""
        try:
            return cls.checkpoint_format.read_config(stored, **options)
        except CheckpointError:
            raise
        except InputError as error:
            raise CheckpointError(f"{stored.file}: {error}") from None

    def save_pretrained(
        self,
        path: str | Path,
        *,
        dtype: DTypeLike | None = None,
        layout: str | None = None,
        target: str = "",
    ) -> None:
        """Write a checkpoint that `from_pretrained` reads back bit for bit.

        It is written completely or not at all.

        Args:
            path: the directory. It is created if it does not exist.
            dtype: the data type in the file; the default is that of the parameters.
            layout: one of `layouts`; the default is the first.
            target: the target's directory or hub id, for layouts whose config.json names the
                target.
        """
        form = self.checkpoint_format
        layout = form.check_layout(form.layouts[0] if layout is None else layout)
        type_name = checkpoint.float_type(self._dtype if dtype is None else dtype).name
        content = form.format_config(self, layout, type_name, target)
        params, declared = self.params, form.declare(self.config, layout)
        if (vocabulary := form.reduced_vocabulary(self.config)) is not None:
            params = params | vocabulary.compute_t2d(params)
            declared = declared | vocabulary.declare_t2d()
        declared = schemes.declare_like(declared, params)
        if (quantization := saved.format_config(declared)) is not None:
            content["quantization_config"] = quantization
        checkpoint.save(Path(path), declared, params, {"config.json": content}, dtype)

    def quantize(self, weights: schemes.Weights) -> Self:
        """Return the same drafter with quantized weights.

        ``weights`` is the name of a scheme, as in `Target.from_pretrained`.

        Raises:
            InputError: There is no scheme of that name, or the weights are quantized already.
        """
        form_of = schemes.scheme_of(weights).form_of
        params = schemes.quantize_params(self.declared, self.params, form_of, self.mesh, self.units)
        return replace(self, params=params)  # pyright: ignore[reportArgumentType]

    narrow = schemes.narrow  # the old name

    @property
    def declared(self) -> Params:
        """The declarations of the parameters."""
        return self.checkpoint_format.declare(self.config, self.layouts[0])

    @property
    def units(self) -> Mapping[str, int]:
        """The units of the parameters' axes (see `sharding.partition`)."""
        return self.checkpoint_format.axis_units(self.config)

    def embed(self, target: Target, tokens: jax.Array) -> jax.Array:
        """Return the embeddings ``[..., H]`` of ``tokens``: the drafter's own or the target's."""
        return self.params["embed"][tokens] if "embed" in self.params else target.embed(tokens)

    def vocabulary(self, target: Target) -> Vocabulary | None:
        """Return the tokens that the drafter can draft; None is the target's vocabulary."""
        return vocabulary_of(self.params, target)

    @property
    def own_weights(self) -> Params:
        """The parameters without an embedding, of which drafting reads only a few rows."""
        return {name: value for name, value in self.params.items() if name != "embed"}

    def drafting_reads(self, target: Target, state: Any = (), cache: Any = ()) -> DraftingReads:
        """Return all of its weights and the target's head, read in every level."""
        return DraftingReads(level=(self.own_weights, state, target.head_as_stored))

    def tokens_at_once(self, length: int) -> int:
        """Return the number of tokens that one read of `DraftingReads.step` serves, per row.

        ``length`` is the number of drafted tokens.
        """
        return 1

    @classmethod
    def _initialise(cls, config: Any, key: jax.Array, target: Target) -> Params:
        """Return random parameters, in the data type and on the mesh of ``target``.

        Consumes ``key``.
        """
        form = cls.checkpoint_format
        declared, units = form.declare(config, form.layouts[0]), form.axis_units(config)
        return declarations.initialise(declared, key, target.dtype, target.mesh, units)

    @property
    def _dtype(self) -> np.dtype:
        leaves = jax.tree.leaves(self.params, is_leaf=is_quantized)
        floats = (
            leaf
            for leaf in leaves
            if not is_quantized(leaf) and jnp.issubdtype(leaf.dtype, jnp.floating)
        )
        return next((leaf.dtype for leaf in floats), jnp.dtype(default_dtype()))


class NewestStateDrafter(TrainedDrafter[jax.Array]):
    """A drafter whose only memory is the target's hidden state at the newest token."""

    def start(self, target: Target, batch: int, capacity: int) -> jax.Array:
        """Return zeros ``[B, H]``, the place of the target's state at each row's newest token."""
        newest = jnp.zeros((batch, target.config.hidden_size), target.dtype)
        return sharding.constrain(newest, ("batch", None), {}, self.mesh)

    def remote_inputs(
        self, target: Target, output: States, entries: Sequence[Entry]
    ) -> dict[str, jax.Array]:
        return {"hidden": output.hidden}

    def append_remote(self, target: Target, state: jax.Array, told: RemoteFeatures) -> jax.Array:
        return newest_of(told.arrays["hidden"], told.count, state)


def layer_like(config: ModelConfig, **sizes: Any) -> ModelConfig:
    """Return the configuration of a drafter's one layer for a target of ``config``.

    It is a plain Llama layer with the target's sizes. ``sizes`` replace some of them. Nothing else
    is taken from the target, because a drafter's config.json could not express it.
    """
    names = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_heads",
        "num_kv_heads",
        "head_dim",
    )
    names += ("max_positions", "norm_eps", "bos_token_id", "eos_token_ids")
    plain: dict[str, Any] = {name: getattr(config, name) for name in names}
    plain |= {"num_layers": 1, "rope": _plain_rope(config)}
    return ModelConfig(**(plain | _plain_heads(config) | sizes))


def _plain_rope(config: ModelConfig) -> Rope:
    """Return the RoPE of a Llama layer that is closest to the target's.

    It is that of the target's first layer with RoPE; layers without a window come first. Partial
    and proportional RoPE are dropped, because a Llama layer has neither.
    """
    layers = sorted(range(config.num_layers), key=lambda layer: layer in config.windowed_layers)
    ropes = [rope for layer in layers if (rope := config.of_layer(layer).rope).kind != "none"]
    rope = ropes[0] if ropes else Rope()
    return Rope(theta=rope.theta) if rope.kind == "proportional" or rope.turned != 1.0 else rope


def _plain_heads(config: ModelConfig) -> dict[str, Any]:
    """Return the sizes of ordinary attention heads for a target with latent attention (MLA).

    Such a target has too many heads for one ordinary layer. The head size is that of its values,
    and there are as many heads as fit the hidden size, in up to 8 groups. For DeepSeek-V3 that is
    56 heads of size 128, and 8 key/value heads.
    """
    if config.mla is None:
        return {}
    head_dim = config.mla.v_head_dim + config.mla.v_head_dim % 2
    heads = max(config.hidden_size // head_dim, 1)
    kv_heads = max(count for count in range(1, 9) if heads % count == 0)
    return {"head_dim": head_dim, "num_heads": heads, "num_kv_heads": kv_heads}
