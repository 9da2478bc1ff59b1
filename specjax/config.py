"""Configuration files: YAML is read into frozen dataclasses. Undeclared keys are errors."""

import dataclasses
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import dacite
import yaml

from specjax.errors import InputError, did_you_mean

_Config = TypeVar("_Config")


class ConfigError(InputError):
    """A configuration that cannot be used; the message has the field, its value, and the remedy."""


def load_yaml(cls: type[_Config], path: str | Path) -> _Config:
    """Read a YAML file into the dataclass ``cls``.

    A field whose type is a dataclass is a section. A field whose type is a union of dataclasses is
    a tagged section: its key ``name`` selects the dataclass (``method: {name: distill, ...}``).
    Each of these dataclasses has a field ``name`` whose default is its tag.

    Raises:
        ConfigError: the file is missing or is not YAML, a key is not declared by ``cls``, or a
            value has the wrong type.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read as a text file ({error})") from None
    # ValueError: an invalid number or date.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(
            f"--config {path}: the file must hold key: value pairs, not {type(content).__name__}"
        )
    return parse(cls, content, str(path))


def parse(cls: type[_Config], content: Mapping[str, Any], source: str, prefix: str = "") -> _Config:
    """Read a mapping into the dataclass ``cls``, as `load_yaml` reads a file.

    Args:
        cls: the dataclass.
        content: the mapping.
        source: the file name, for error messages.
        prefix: the path of this section inside the file, such as ``optimizer.``, for error
            messages.
    """
    hints = get_type_hints(cls)
    field_names = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    values = {}
    for key, value in content.items():
        if key not in field_names:
            hint = did_you_mean(str(key), field_names)
            raise ConfigError(
                f"{source}: unknown key {prefix}{key}; the keys are {', '.join(field_names)}{hint}"
            )
        section = _section(hints[key], value, source, f"{prefix}{key}")
        values[key] = value if section is None else parse(section, value, source, f"{prefix}{key}.")
    try:
        return dacite.from_dict(
            cls, values, dacite.Config(cast=[tuple], type_hooks={float: _as_float})
        )
    except dacite.DaciteFieldError as error:
        if prefix:
            error.update_path(prefix.removesuffix("."))
        raise ConfigError(f"{source}: {error}") from None
    # Such as a date for a list, or a number too large for a float.
    except (ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{source}: {error}") from None


def _section(hint: Any, value: Any, source: str, name: str) -> type | None:
    """Return the dataclass for a section; None if the key holds a plain value."""
    if get_origin(hint) in (Union, types.UnionType) and all(
        map(dataclasses.is_dataclass, get_args(hint))
    ):
        tagged = {_tag(kind): kind for kind in get_args(hint)}
        tag = value.get("name") if isinstance(value, Mapping) else None
        if not isinstance(tag, str) or tag not in tagged:
            hint = did_you_mean(tag, tagged) if isinstance(tag, str) else ""
            raise ConfigError(
                f"{source}: {name}.name={tag!r}: must be one of {', '.join(tagged)}{hint}"
            )
        return tagged[tag]
    if get_origin(hint) in (Union, types.UnionType) and value is not None:  # an optional section
        hint = next((kind for kind in get_args(hint) if dataclasses.is_dataclass(kind)), hint)
    return hint if dataclasses.is_dataclass(hint) and isinstance(value, Mapping) else None  # pyright: ignore


def _tag(kind: type) -> str:
    """Return the default of the field ``name``, by which tagged sections are told apart."""
    return next(str(field.default) for field in dataclasses.fields(kind) if field.name == "name")


def _as_float(value: Any) -> Any:
    """Convert a value to a float where one is declared.

    YAML 1.1 reads ``3e-4`` as text and ``1`` as an integer.
    """
    try:
        return float(value)
    except (TypeError, ValueError):
        return value  # dacite refuses it as a value of the wrong type, and names the field


def dump_yaml(config: Any) -> str:
    """Return the YAML from which `load_yaml` makes an equal config."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def differences(before: Any, after: Any, prefix: str = "") -> list[str]:
    """List the fields in which two configs of one class differ, as ``name: left -> right``."""
    changes = []
    for field in dataclasses.fields(before):
        if not field.compare:
            continue
        a, b = getattr(before, field.name), getattr(after, field.name)
        if dataclasses.is_dataclass(a) and type(a) is type(b):
            changes += differences(a, b, f"{prefix}{field.name}.")
        # The two are classes of one tagged section.
        elif dataclasses.is_dataclass(a) and dataclasses.is_dataclass(b):
            changes.append(f"{prefix}{field.name}.name: {_tag(type(a))!r} -> {_tag(type(b))!r}")
        elif a != b:
            changes.append(f"{prefix}{field.name}: {a!r} -> {b!r}")
    return changes
