"""Directories without a readable model: each kind is refused before weights are read."""

import re
from pathlib import Path

from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError, show
from specjax.models.quantization import published

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r".+-[0-9]{5}-of-[0-9]{5}\.safetensors")


def check(files: CheckpointFiles) -> None:
    """Refuse directories that are known not to be readable checkpoints.

    They are LoRA adapters, GGUF files, shards without their index, and weights that ModelOpt has
    quantized in a way that is not supported.

    Raises:
        CheckpointError: It is one of these. The message names which, and the remedy.
    """
    directory = files.directory
    if directory.is_dir():
        names = {file.name for file in directory.iterdir() if file.is_file()}
    else:
        names = set()
    weights = {name for name in names if name.endswith((".safetensors", ".bin"))}
    if "adapter_config.json" in names and "config.json" not in names:
        raise CheckpointError(
            f"{directory} is a LoRA adapter (it holds adapter_config.json), not a model: merge it"
            " into its base model, with peft's merge_and_unload, and save that"
        )
    if (gguf := sorted(name for name in names if name.lower().endswith(".gguf"))) and not weights:
        raise CheckpointError(
            f"{directory} holds {show(gguf[0])}: GGUF is not supported: give the model's checkpoint"
            " in safetensors"
        )
    if any(map(_SHARD.fullmatch, names)) and not names & {_INDEX, "model.safetensors"}:
        raise CheckpointError(
            f"{directory} holds shards of a model without {_INDEX}, which lists their tensors:"
            " download that file, too"
        )
    if published.MODELOPT_FILE in names:
        _ = files.quantization  # which checks the file


def check_file(file: Path) -> None:
    """Refuse a path to a file, because a directory is required."""
    if file.suffix.lower() == ".gguf":
        raise CheckpointError(
            f"{file}: GGUF is not supported: give the directory of the model's checkpoint in"
            " safetensors"
        )
    raise CheckpointError(f"{file} is a file: give the directory of the checkpoint")
