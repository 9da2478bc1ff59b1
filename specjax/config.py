"""Run configuration: frozen dataclasses, and YAML files that may hold nothing they do not declare."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import dacite
import yaml

from specjax.errors import InputError

_Config = TypeVar("_Config")


class ConfigError(InputError):
    """A configuration that cannot be used; says which field, its value, and the mend."""


def load_yaml(cls: type[_Config], path: str | Path) -> _Config:
    """Read a YAML file into the dataclass ``cls``.

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


def parse(cls: type[_Config], content: Mapping[str, Any], source: str) -> _Config:
    """`load_yaml` of a mapping already read; ``source`` names it in errors."""
    _refuse_unknown_keys(cls, content, source)
    try:
        # YAML 1.1 reads 3e-4 as text and 1 as a whole number: both are meant where a float is declared.
        return dacite.from_dict(cls, content, dacite.Config(strict=True, cast=[tuple], type_hooks={float: float}))
    except (dacite.DaciteError, ValueError, TypeError, OverflowError) as error:
        raise ConfigError(f"{source}: {error}") from None


def _refuse_unknown_keys(cls: type, content: Mapping[str, Any], source: str, prefix: str = "") -> None:
    hints = get_type_hints(cls)
    known = [field.name for field in dataclasses.fields(cls)]
    for key, value in content.items():
        if key not in known:
            raise ConfigError(f"{source}: unknown key {prefix}{key}; known here: {', '.join(known)}")
        if dataclasses.is_dataclass(hints[key]) and isinstance(value, Mapping):
            _refuse_unknown_keys(hints[key], value, source, f"{prefix}{key}.")


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
        a, b = getattr(left, field.name), getattr(right, field.name)
        if dataclasses.is_dataclass(a) and type(a) is type(b):
            found += differences(a, b, f"{prefix}{field.name}.")
        elif a != b:
            found.append(f"{prefix}{field.name}: {a!r} -> {b!r}")
    return found


# --- training --------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to train on.

    Attributes:
        source: ``stdlib`` (the running Python's own source), or a directory or glob of text files.
        tokenizer: a directory with tokenizer.json; empty: the teacher's, or where there is none a byte-level BPE
            tokenizer trained on the source.
        vocab_size: of a tokenizer trained here.
        window: tokens a training window.
        batch: windows a step.
        holdout: share of the files kept for evaluation.
    """

    source: str = "stdlib"
    tokenizer: str = ""
    vocab_size: int = 3072
    window: int = 512
    batch: int = 8
    holdout: float = 0.02


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model to train from random weights; the vocabulary is the tokenizer's."""

    hidden_size: int = 192
    intermediate_size: int = 512
    num_layers: int = 12
    num_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 32
    max_positions: int = 1024


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """Linear warmup, cosine decay to ``final_share`` of the peak; ``clip`` bounds the global gradient norm.

    ``method`` is ``adamw``, or ``muon``: orthogonalised updates for the layers' matrices (scaled to AdamW's size, so that
    one learning rate serves both) and AdamW for the rest. Muon is for short trainings from random weights.
    """

    method: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = 3e-3
    warmup_steps: int = 100
    final_share: float = 0.05
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """One training run: ``python -m specjax train --config configs/demo_target.yaml``.

    Attributes:
        output: directory of the run: checkpoints, metrics.jsonl, config.yaml, and at the end the model under ``final/``.
        objective: ``lm`` (next token) or ``distill`` (forward KL to a teacher).
        teacher: for ``distill``, a directory or hub id.
        steps: optimiser steps.
        evaluate_every, checkpoint_every: in steps.
        export_dtype: data type of the exported model.
    """

    output: str = "runs/model"
    objective: Literal["lm", "distill"] = "lm"
    teacher: str = ""
    seed: int = 0
    steps: int = 1000
    evaluate_every: int = 200
    checkpoint_every: int = 100
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    data: DataConfig = DataConfig()
    model: ModelSizes = ModelSizes()
    optimizer: OptimizerConfig = OptimizerConfig()

    def check(self) -> None:
        """Refuse, with a ConfigError, values that cannot be used together or lie out of range."""
        if self.objective == "distill" and not self.teacher:
            raise ConfigError("teacher='': objective=distill needs the directory or hub id of a teacher")
        if self.objective == "lm" and self.teacher:
            raise ConfigError(f"teacher={self.teacher!r}: objective=lm has no teacher; set objective=distill or leave it out")
        for name in ("steps", "evaluate_every", "checkpoint_every"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.data.window < 2 or self.data.batch < 1:
            raise ConfigError(f"data.window={self.data.window}, data.batch={self.data.batch}: at least 2 and 1")
        if not 0 < self.data.holdout < 1:
            raise ConfigError(f"data.holdout={self.data.holdout}: a share between 0 and 1")
