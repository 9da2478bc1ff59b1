"""What sets one model type of Hugging Face apart from the others, as data."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import jax

from specjax.models.config import ModelConfig
from specjax.models.families.ropes import FULL, WINDOWED
from specjax.models.fields import CheckpointError, Field, show
from specjax.models.params import Param, Params, Within


def _nothing(_: Any) -> dict[str, Any]:
    return {}


def _none(_: ModelConfig) -> tuple[str, ...]:
    return ()


@dataclass(frozen=True)
class Fused:
    """Parameters that are one tensor in a family's checkpoints, side by side in what they give.

    Attributes:
        name: how the tensor's name ends.
        parts: how the names that the parameters are declared with end, in order. ``{}`` is in those of experts, and the tensor
            is then one of all experts.
        interleaved: the parts take turns, and do not lie one behind the other.
        transposed: as in `Param`; None: as declared.
        axis: of the tensor, along which the parts lie; None: that of what they give, the last one as it is used.
    """

    name: str
    parts: tuple[str, ...]
    interleaved: bool = False
    transposed: bool | None = None
    axis: int | None = None

    def store(self, params: Mapping[str, Param]) -> dict[str, Param]:
        """``params``, by their declared names, as parts of such tensors where they are any."""
        found = dict(params)
        for first in [name for name in params if name.endswith(self.parts[0])]:
            prefix = first.removesuffix(self.parts[0])
            whole = [params[prefix + part] for part in self.parts if prefix + part in params]
            along = -1 if self.axis is None else self.axis
            size, start = sum(param.shape[along] for param in whole), 0
            for i, param in enumerate(whole):
                transposed = param.transposed if self.transposed is None else self.transposed
                axis = len(param.shape) - (2 if transposed else 1) if self.axis is None else self.axis
                place = (i, len(whole)) if self.interleaved else (start, 1)
                within = None if len(whole) == 1 else Within(axis, size, *place)
                found[param.name] = replace(param, name=prefix + self.name, within=within, transposed=transposed)
                start += param.shape[along]
        return found


def _beside(prefix: str) -> str:
    """How the name of the head begins in a checkpoint where the names of the model's tensors begin with ``prefix``."""
    return prefix.removesuffix(PREFIX) if prefix.endswith(f".{PREFIX}") else ""


PREFIX = "model."
"""How the names of a model's tensors begin, but for the head's."""

_NULL_IS_LEFT_OUT = ("rope_parameters", "tie_word_embeddings", "query_pre_attn_scalar", "num_kv_shared_layers")
"""Fields of config.json that say nothing where they are null: of others that means that there is no such thing."""

_OF_THE_WHOLE = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype", "quantization_config")
"""Fields of config.json that stand beside ``text_config``, and count for the text model."""


@dataclass(frozen=True)
class Family:
    """One model type: what its config.json says that others' do not, and how its tensors are called.

    A new one is a file that makes one of these, and a line in `specjax.models.families.FAMILIES`.

    Attributes:
        model_type: of its `ModelConfig`: that of another family where a model is such a one with modules beside it.
        architecture: the class in transformers that its config.json names.
        defaults: what transformers takes where config.json leaves a field out.
        switches: the fields of `ModelConfig` that are alike in all its models, such as ``{"qk_norm": True}``.
        biases: fields of config.json, and the switches of `ModelConfig` that each decides. What is not here is not read.
        kinds: of layers, as ``layer_types`` names them.
        windows: which of its layers may have a sliding window: none; all, or none; any, by ``layer_types`` or
            ``max_window_layers``.
        whole_every: where ``layer_types`` is left out, one layer of so many sees the whole text, and the others have a window;
            None: ``max_window_layers`` says.
        theta: of RoPE, where config.json says none.
        turns_parts: whether it reads ``partial_rotary_factor``.
        ropes_by_kind: layers with a window have a RoPE of their own, and ``parse`` reads both.
        window_switch: the field of config.json without which ``sliding_window`` means nothing.
        fields: of config.json, beside those that all families have; they are for ``parse``.
        aliases: other names of fields, under which these are looked for where they are not there.
        parse: the fields of `ModelConfig` that the fields of config.json say, beside those that all families have.
        format: the fields of config.json that `parse` reads to the same.
        by_inner_type: the families of other text models that may be nested in such a file, by the ``model_type`` within.
        nested: the field of config.json that holds the text model's fields, in models that see and hear as well. Tensors
            outside of the text model are then left unread.
        prefixes: how the names of the text model's tensors begin in its checkpoints, in place of ``model.``; several, where
            published files differ. The first is written.
        names: parts of the names of tensors, as `specjax.models.params` declares them, and what stands in their place.
        fused: tensors that hold several parameters.
        fused_where_stored: likewise, in those checkpoints that have them; others, and those that are written, have the
            parameters one by one.
        left_over: of a configuration, the patterns (``*`` matches anything) of the names of tensors that are no part of the
            target: modules that predict further tokens, say.
        modules_follow: ``num_nextn_predict_layers`` such modules are numbered on from the last layer, as if they were layers.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    switches: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    kinds: tuple[str, ...] = (FULL, WINDOWED)
    windows: Literal["none", "all", "any"] = "none"
    window_switch: str | None = None
    whole_every: int | None = None
    theta: float = 10000.0
    turns_parts: bool = False
    ropes_by_kind: bool = False
    fields: Mapping[str, Field] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    parse: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    format: Callable[[ModelConfig], dict[str, Any]] = _nothing
    by_inner_type: Mapping[str, "Family"] = field(default_factory=dict)
    nested: str | None = None
    prefixes: tuple[str, ...] = (PREFIX,)
    names: Mapping[str, str] = field(default_factory=dict)
    fused: tuple[Fused, ...] = ()
    fused_where_stored: tuple[Fused, ...] = ()
    left_over: Callable[[ModelConfig], tuple[str, ...]] = _none
    modules_follow: bool = False

    def of_file(self, raw: Mapping[str, Any]) -> "Family":
        """Return the family of the text model in a config.json of this ``model_type``: itself, or that of another type."""
        inner = raw.get(self.nested) if self.nested is not None else None
        asked = inner.get("model_type") if isinstance(inner, dict) else None
        return self.by_inner_type.get(asked, self) if isinstance(asked, str) else self

    def said_of_whole(self, raw: Mapping[str, Any]) -> set[str]:
        """The fields that are read beside ``nested``, and not within."""
        return {name for name in _OF_THE_WHOLE if raw.get(name) is not None} if self.nested is not None else set()

    def complete(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a config.json, with what the family takes for granted."""
        if self.nested is not None:
            inner = raw.get(self.nested)
            if not isinstance(inner, dict):
                raise CheckpointError(f"{self.nested}={show(inner)}: must be an object: the text model's fields")
            raw = inner | {name: raw[name] for name in self.said_of_whole(raw)}
        named = {name: raw[other] for other, name in self.aliases.items() if other in raw}
        given = {**named, **raw}
        defaults = dict(self.defaults)
        if given.get("rope_scaling"):  # its older place
            defaults.pop("rope_parameters", None)
        return defaults | {name: value for name, value in given.items() if value is not None or name not in _NULL_IS_LEFT_OUT}

    def prefix_in(self, stored: Collection[str]) -> str:
        """Which of its ``prefixes`` the tensors of a checkpoint have, by the names that are ``stored``."""
        there = [prefix for prefix in self.prefixes if f"{prefix}embed_tokens.weight" in stored]
        return (there or self.prefixes)[0]

    def embedding_and_head(self, stored: Collection[str]) -> tuple[str, str]:
        """The names of the two tensors in a checkpoint, by the names that are ``stored``."""
        prefix = self.prefix_in(stored)
        return f"{prefix}embed_tokens.weight", f"{_beside(prefix)}lm_head.weight"

    def store(self, declared: Params, prefix: str | None = None, names: Collection[str] = ()) -> Params:
        """The declarations of a model, as parts of the tensors that its checkpoints have.

        Args:
            declared: as `specjax.models.params` declares them.
            prefix: stands in place of ``model.``; None: the first of its own.
            names: of the tensors of the checkpoint that is read.
        """
        prefix = self.prefixes[0] if prefix is None else prefix
        beside = _beside(prefix)
        params, tree = jax.tree.flatten(declared)
        stored = {param.name: param for param in params}
        there = [each for each in self.fused_where_stored if any(name.endswith(each.name) for name in names)]
        for each in (*self.fused, *there):
            stored |= each.store(stored)

        def renamed(param: Param) -> Param:
            param = stored[param.name]
            name = param.name
            for ours, theirs in self.names.items():
                name = name.replace(ours, theirs)
            return replace(param, name=prefix + name.removeprefix(PREFIX) if name.startswith(PREFIX) else beside + name)

        return jax.tree.unflatten(tree, [renamed(param) for param in params])
