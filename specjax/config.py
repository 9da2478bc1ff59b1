"""Configuration files: YAML read into frozen dataclasses, which may hold nothing that they do not declare."""

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
    """A configuration that cannot be used; says which field, its value, and what to do."""


def load_yaml(cls: type[_Config], path: str | Path) -> _Config:
    """Read a YAML file into the dataclass ``cls``.

    A field that is itself a dataclass is a section. A field that is a union of dataclasses is a tagged section: its key
    ``name`` says which of them it is (``method: {name: distill, ...}``), and each has a field ``name`` with its tag as default.

    Raises:
        ConfigError: the file is missing or not YAML, has a key that ``cls`` does not declare, or a value of another type.
    """
    path = Path(path)
    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read as a text file ({error})") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a number or a date that is none
        raise ConfigError(f"--config {path}: not valid YAML: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"--config {path}: must hold key: value pairs, not {type(content).__name__}")
    return parse(cls, content, str(path))


def parse(cls: type[_Config], content: Mapping[str, Any], source: str, prefix: str = "") -> _Config:
    """`load_yaml` of a mapping already read; ``source`` names it in errors, ``prefix`` the section it is."""
    hints = get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]  # pyright: ignore[reportArgumentType]
    values = {}
    for key, value in content.items():
        if key not in known:
            hint = did_you_mean(str(key), known)
            raise ConfigError(f"{source}: unknown key {prefix}{key}; known here: {', '.join(known)}{hint}")
        section = _section(hints[key], value, source, f"{prefix}{key}")
        values[key] = value if section is None else parse(section, value, source, f"{prefix}{key}.")
    try:
        return dacite.from_dict(cls, values, dacite.Config(cast=[tuple], type_hooks={float: _as_float}))
    except dacite.DaciteFieldError as error:
        if prefix:
            error.update_path(prefix.removesuffix("."))
        raise ConfigError(f"{source}: {error}") from None
    except (ValueError, TypeError, OverflowError) as error:  # a date where a list is declared, a number beyond all floats
        raise ConfigError(f"{source}: {error}") from None


def _section(hint: Any, value: Any, source: str, name: str) -> type | None:
    """The dataclass that ``value`` is to be read into; None where the key holds a plain value."""
    if get_origin(hint) in (Union, types.UnionType) and all(map(dataclasses.is_dataclass, get_args(hint))):
        tagged = {_tag(kind): kind for kind in get_args(hint)}
        tag = value.get("name") if isinstance(value, Mapping) else None
        if not isinstance(tag, str) or tag not in tagged:
            hint = did_you_mean(tag, tagged) if isinstance(tag, str) else ""
            raise ConfigError(f"{source}: {name}.name={tag!r}: must be one of {', '.join(tagged)}{hint}")
        return tagged[tag]
    if get_origin(hint) in (Union, types.UnionType) and value is not None:  # a section that may be left out
        hint = next((kind for kind in get_args(hint) if dataclasses.is_dataclass(kind)), hint)
    return hint if dataclasses.is_dataclass(hint) and isinstance(value, Mapping) else None  # pyright: ignore


def _tag(kind: type) -> str:
    """The default of the field ``name``, which tells a kind of section from the others."""
    return next(str(field.default) for field in dataclasses.fields(kind) if field.name == "name")


def _as_float(value: Any) -> Any:
    """YAML 1.1 reads 3e-4 as text and 1 as a whole number: both are meant where a float is declared."""
    try:
        return float(value)
    except (TypeError, ValueError):
        return value  # is refused, by the field's name, as a value of another type


def dump_yaml(config: Any) -> str:
    """The YAML that `load_yaml` reads back to an equal ``config``."""
    return yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def differences(left: Any, right: Any, prefix: str = "") -> list[str]:
    """The fields in which two configs of one class differ, as ``name: left -> right``."""
    found = []
    for field in dataclasses.fields(left):
        if not field.compare:
            continue
        a, b = getattr(left, field.name), getattr(right, field.name)
        if dataclasses.is_dataclass(a) and type(a) is type(b):
            found += differences(a, b, f"{prefix}{field.name}.")
        elif dataclasses.is_dataclass(a) and dataclasses.is_dataclass(b):  # two kinds of one tagged section
            found.append(f"{prefix}{field.name}.name: {_tag(type(a))!r} -> {_tag(type(b))!r}")
        elif a != b:
            found.append(f"{prefix}{field.name}: {a!r} -> {b!r}")
    return found
