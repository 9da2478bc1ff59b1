"""What sets one model type of Hugging Face apart from the others, as data."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from specjax.models.config import ModelConfig
from specjax.models.fields import Field


def _nothing(_: Any) -> dict[str, Any]:
    return {}


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
        windows: which of its layers may have a sliding window: none; all, or none; any, by ``layer_types`` or
            ``max_window_layers``.
        window_switch: the field of config.json without which ``sliding_window`` means nothing.
        fields: of config.json, beside those that all families have; they are for ``parse``.
        aliases: other names of fields, under which these are looked for where they are not there.
        parse: the fields of `ModelConfig` that the fields of config.json say, beside those that all families have.
        format: the fields of config.json that `parse` reads to the same.
        names: parts of the names of tensors, as `specjax.models.params` declares them, and what stands in their place.
        left_over: patterns (``*`` matches anything) of the names of tensors that are no part of the target: modules that
            predict further tokens, say.
        modules_follow: ``num_nextn_predict_layers`` such modules are numbered on from the last layer, as if they were layers.
    """

    model_type: str
    architecture: str
    defaults: Mapping[str, Any]
    switches: Mapping[str, Any] = field(default_factory=dict)
    biases: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    windows: Literal["none", "all", "any"] = "none"
    window_switch: str | None = None
    fields: Mapping[str, Field] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    parse: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    format: Callable[[ModelConfig], dict[str, Any]] = _nothing
    names: Mapping[str, str] = field(default_factory=dict)
    left_over: tuple[str, ...] = ()
    modules_follow: bool = False

    def complete(self, raw: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of a config.json, with what the family takes for granted."""
        named = {name: raw[other] for other, name in self.aliases.items() if other in raw}
        return {**self.defaults, **named, **raw}

    def name_of(self, declared: str) -> str:
        """What a tensor is called in a checkpoint, from the name that it is declared with; of the beginning of one likewise."""
        for ours, theirs in self.names.items():
            declared = declared.replace(ours, theirs)
        return declared
