"""The properties that distinguish one model type of Hugging Face from the others, as data."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

import jax

from specjax.models.config import ModelConfig
from specjax.models.families.ropes import FULL, WINDOWED
from specjax.models.fields import CheckpointError, Field, Fields, JsonObject, show
from specjax.models.params import Param, Params, Within


def _no_fields(_: Fields) -> Fields | None:
    return None


def _nothing(_: Any) -> dict[str, Any]:
    return {}


def _none(_: ModelConfig) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Fused:
    """Parameters that a family's checkpoints store as one tensor, concatenated along their outputs.

    Attributes:
        name: the end of the tensor's name.
        parts: the ends of the declared names of the parameters, in order. A name with ``{}`` is
            that of experts; the tensor is then one of all experts.
        interleaved: whether the parts alternate; otherwise they are concatenated.
        transposed: as in `Param`; None: as declared.
        axis: the axis of the tensor along which the parts are concatenated; None: the axis of their
            outputs, the last one in use.
    """

    name: str
    parts: tuple[str, ...]
    interleaved: bool = False
    transposed: bool | None = None
    axis: int | None = None

    def store(self, params: Mapping[str, Param]) -> dict[str, Param]:
        """Declare each of ``params`` that belongs to such a tensor as a part of it.

        The keys of ``params`` are the declared names.
        """
        stored = dict(params)
        for first in [name for name in params if name.endswith(self.parts[0])]:
            prefix = first.removesuffix(self.parts[0])
            whole = [params[prefix + part] for part in self.parts if prefix + part in params]
            along = -1 if self.axis is None else self.axis
            size, start = sum(param.shape[along] for param in whole), 0
            for i, param in enumerate(whole):
                transposed = param.transposed if self.transposed is None else self.transposed
                axis = (
                    len(param.shape) - (2 if transposed else 1) if self.axis is None else self.axis
                )
                place = (i, len(whole)) if self.interleaved else (start, 1)
                within = None if len(whole) == 1 else Within(axis, size, *place)
                stored[param.name] = replace(
                    param, name=prefix + self.name, within=within, transposed=transposed
                )
                start += param.shape[along]
        return stored

    def fits(self, params: Mapping[str, Param], shapes: Collection[tuple[int, ...]]) -> bool:
        """Return whether its tensors, one for each layer, have only shapes among ``shapes``.

        The keys of ``params`` are as in `store`.
        """
        stored = self.store(params).values()
        return {param.stored_shape for param in stored if param.name.endswith(self.name)} <= set(
            shapes
        )


def _beside(prefix: str) -> str:
    """Return the prefix of the head's name in a checkpoint whose tensors begin with ``prefix``."""
    return prefix.removesuffix(PREFIX) if prefix.endswith(f".{PREFIX}") else ""


PREFIX = "model."
"""The prefix of the declared names of a model's tensors, except for the head's."""

_NULL_IS_LEFT_OUT = (
    "rope_parameters",
    "tie_word_embeddings",
    "query_pre_attn_scalar",
    "num_kv_shared_layers",
)
"""Fields of config.json for which null means that the field is left out.

For all other fields null means that there is no such thing.
"""

_OF_THE_WHOLE = (
    "bos_token_id",
    "eos_token_id",
    "tie_word_embeddings",
    "dtype",
    "torch_dtype",
    "quantization_config",
)
"""Fields of config.json that are beside ``text_config`` and apply to the text model."""


def unpadded(by_layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file states by layer, with layer 5 as "5": with more than ten it is "05"."""
    return {name.lstrip("0") or "0": value for name, value in by_layer.items()}


def own_names(fields: Fields, aliases: Mapping[str, str]) -> dict[str, Any]:
    """Return the fields that a file states by names of its own, which win over the common names.

    It is for the names in the ``attribute_map`` of transformers' configurations.
    """
    return {name: fields[alias] for alias, name in aliases.items() if alias in fields}


@dataclass(frozen=True)
class Family:
    """One model type: how its config.json and its tensors' names differ from those of others.

    A new family is a file that makes one of these, and a line in
    `specjax.models.families.FAMILIES`.

    Attributes:
        title: the name under which the guide's table of models lists it. Families with one title
            share a row.
        models: what that table says of the published models; empty where another family says it.
        model_type: the ``model_type`` of its `ModelConfig`. It is another family's if a model is
            one of that family with further modules.
        architecture: the transformers class that its config.json names.
        defaults: the values that transformers uses for fields that config.json leaves out.
        switches: the fields of `ModelConfig` that are the same in all its models, such as
            ``{"qk_norm": True}``.
        biases: fields of config.json, and the switches of `ModelConfig` that each decides. Other
            fields for biases are not read.
        kinds: the kinds of layers, as ``layer_types`` names them.
        windows: which layers may have a sliding window: "none"; "all" of them or no layer; "any",
            selected by ``layer_types`` or ``max_window_layers``.
        whole_every: without ``layer_types``, one layer of so many has full attention, and the
            others have a window; None: ``max_window_layers`` decides.
        kinds_by_default: returns the kinds of a number of layers if config.json has no
            ``layer_types`` and ``whole_every`` cannot express them.
        theta: the theta of RoPE if config.json has none.
        turns_parts: whether the family reads ``partial_rotary_factor``.
        ropes_by_kind: whether layers with a window have a RoPE of their own; ``parse`` then reads
            both.
        window_switch: the field of config.json that enables ``sliding_window``.
        fields: further fields of config.json, for ``parse``, beside those of all families.
        aliases: alternative names of fields, used if the field itself is absent.
        derived_from: fields of config.json from which ``derived`` or ``parse`` makes another one,
            and that one, which errors then do not name. A field in an object has a path, such as
            ``linear_attn_config.head_dim``.
        derived: returns fields that replace those of config.json, from its fields and the defaults:
            other ways to write the number and the kinds of layers. Nothing was checked before.
        parse: converts the fields of config.json to fields of `ModelConfig`, beside those of all
            families.
        format: the inverse of ``parse``: returns fields of config.json.
        by_inner_type: the families of other text models that may be nested in such a file, by the
            inner ``model_type``.
        nested: in multimodal models, the field of config.json with the text model's fields. Tensors
            outside of the text model are then not read.
        short_file: returns the text model's fields of a file without the ``nested`` object, or None
            if the file does not have them.
        prefixes: the prefixes of the names of the text model's tensors in checkpoints, in place of
            ``model.``; several if published files differ. The first one is written.
        names: parts of the names of tensors, as `specjax.models.params` declares them, and their
            replacements.
        names_elsewhere: parts of the names that result, and replacements in some of the family's
            checkpoints, for tensors that a checkpoint lacks otherwise.
        fused: tensors that hold several parameters.
        fused_where_stored: further such tensors, in those checkpoints that have them. Other
            checkpoints, and all that are written, have the parameters one by one. If two have the
            same name, the second is that of checkpoints where the first would have another shape.
        unit_axes: ends of names of tensors that have axes of size 1 in front, and how many.
        left_over: returns for a configuration the patterns (``*`` matches anything) of the names of
            tensors that are not part of the target, such as MTP modules.
        modules_follow: whether ``num_nextn_predict_layers`` MTP modules are numbered like further
            layers after the last one.
    """

    title: str
    models: str
    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    switches: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kinds: tuple[str, ...] = (FULL, WINDOWED)
    windows: Literal["none", "all", "any"] = "none"
    window_switch: str | None = None
    whole_every: int | None = None
    kinds_by_default: Callable[[int], list[str]] | None = None
    theta: float = 10000.0
    turns_parts: bool = False
    ropes_by_kind: bool = False
    fields: Mapping[str, Field] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    derived_from: Mapping[str, str] = field(default_factory=dict)
    derived: Callable[[Fields], dict[str, Any]] = _nothing
    parse: Callable[[Fields], dict[str, Any]] = _nothing
    format: Callable[[ModelConfig], JsonObject] = _nothing
    by_inner_type: Mapping[str, "Family"] = field(default_factory=dict)
    nested: str | None = None
    short_file: Callable[[Fields], Fields | None] = _no_fields
    prefixes: tuple[str, ...] = (PREFIX,)
    names: Mapping[str, str] = field(default_factory=dict)
    names_elsewhere: Mapping[str, str] = field(default_factory=dict)
    fused: tuple[Fused, ...] = ()
    fused_where_stored: tuple[Fused, ...] = ()
    unit_axes: Mapping[str, int] = field(default_factory=dict)
    left_over: Callable[[ModelConfig], tuple[str, ...]] = _none
    modules_follow: bool = False

    @property
    def drops_long_windows(self) -> bool:
        """True if windows that are as long as the longest text are left out."""
        return self.whole_every is None and self.kinds_by_default is None

    def of_file(self, raw: Fields) -> "Family":
        """Return the family of the text model in a config.json of this ``model_type``.

        It is this family, or that of another inner type.
        """
        inner = raw.get(self.nested) if self.nested is not None else None
        inner_type = inner.get("model_type") if isinstance(inner, dict) else None
        return self.by_inner_type.get(inner_type, self) if isinstance(inner_type, str) else self

    def said_of_whole(self, raw: Fields) -> set[str]:
        """Return the fields that are read outside of the ``nested`` object, not within it."""
        if self.nested is not None:
            return {name for name in _OF_THE_WHOLE if raw.get(name) is not None}
        return set()

    def complete(self, raw: Fields) -> dict[str, Any]:
        """Return the fields of a config.json, with the family's defaults."""
        raw = self._of_text_model(raw)
        named = {name: raw[alias] for alias, name in self.aliases.items() if alias in raw}
        fields = {**named, **raw}
        defaults = dict(self.defaults)
        if fields.get("rope_scaling"):  # the older field, which a default must not hide
            defaults.pop("rope_parameters", None)
        completed = defaults | {
            name: value
            for name, value in fields.items()
            if value is not None or name not in _NULL_IS_LEFT_OUT
        }
        return completed | self.derived(completed)

    def names_in_file(self, raw: Fields, completed: Fields) -> dict[str, str]:
        """Return the names in a config.json of fields that are read under other names.

        Args:
            raw: the fields of the file.
            completed: the fields that `complete` makes from them.
        """
        raw = self._of_text_model(raw)
        names: dict[str, str] = {}
        for stated, name in [*self.aliases.items(), *self.derived_from.items()]:
            outer, _, inner = stated.partition(".")
            value = raw.get(outer)
            if inner:
                value = value.get(inner) if isinstance(value, dict) else None
            # With both names in the file, the value says which of them was read.
            if value is not None and (name not in raw or completed.get(name) != raw[name]):
                names.setdefault(name, stated)
        return names

    def _of_text_model(self, raw: Fields) -> Fields:
        """Return the fields of the text model, which a multimodal model nests."""
        if self.nested is None:
            return raw
        inner = raw.get(self.nested) if self.nested in raw else self.short_file(raw)
        if not isinstance(inner, dict):
            raise CheckpointError(
                f"{self.nested}={show(inner)}: must be an object with the text model's fields"
            )
        return inner | {name: raw[name] for name in self.said_of_whole(raw)}

    def prefix_in(self, stored: Collection[str]) -> str:
        """Return which of its ``prefixes`` a checkpoint's tensors have.

        ``stored`` are the names of the tensors.
        """
        embedding = self._stored_as("embed_tokens.weight")
        there = [prefix for prefix in self.prefixes if f"{prefix}{embedding}" in stored]
        return (there or self.prefixes)[0]

    def _stored_as(self, name: str) -> str:
        """Return a tensor's name with the family's replacements."""
        for ours, theirs in self.names.items():
            name = name.replace(ours, theirs)
        return name

    def embedding_and_head(self, stored: Collection[str]) -> tuple[str, str]:
        """Return the names of the embedding and the head in a checkpoint.

        ``stored`` are the names of its tensors.
        """
        prefix = self.prefix_in(stored)
        embedding = self._stored_as("embed_tokens.weight")
        return f"{prefix}{embedding}", f"{_beside(prefix)}lm_head.weight"

    def store(
        self,
        declared: Params,
        prefix: str | None = None,
        shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> Params:
        """Declare a model's parameters as parts of the tensors of its checkpoints.

        Args:
            declared: the declarations of `specjax.models.params`.
            prefix: replaces ``model.``; None for the family's first prefix.
            shapes: the shapes of the tensors of the checkpoint to read, by name.
        """
        prefix = self.prefixes[0] if prefix is None else prefix
        beside = _beside(prefix)
        params, tree = jax.tree.flatten(declared)
        stored = {param.name: param for param in params}
        present: dict[str, Fused] = {}
        for fused in self.fused_where_stored:
            theirs = [shape for name, shape in shapes.items() if name.endswith(fused.name)]
            before = present.get(fused.name)
            if theirs and (before is None or not before.fits(stored, theirs)):
                present[fused.name] = fused
        for fused in (*self.fused, *present.values()):
            stored |= fused.store(stored)

        def renamed(param: Param) -> Param:
            param = stored[param.name]
            name = self._stored_as(param.name)
            axes = next((n for end, n in self.unit_axes.items() if name.endswith(end)), 0)
            before = prefix if name.startswith(PREFIX) else beside
            name = before + name.removeprefix(PREFIX)
            for ours, theirs in self.names_elsewhere.items():
                if name not in shapes and (alternative := name.replace(ours, theirs)) in shapes:
                    name = alternative
            return replace(param, unit_axes=axes, name=name)

        return jax.tree.unflatten(tree, [renamed(param) for param in params])
