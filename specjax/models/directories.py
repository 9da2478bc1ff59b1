"""Directories without a readable model: each kind is refused before weights are read."""

import re
from pathlib import Path

from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.fields import CheckpointError, FieldTable, check_fields, mapping, show

_INDEX = "model.safetensors.index.json"
_SHARD = re.compile(r".+-[0-9]{5}-of-[0-9]{5}\.safetensors")
_QUANTIZED_BY_MODELOPT = "hf_quant_config.json"
_QUANTIZATION: FieldTable = {"quantization": mapping(default={})}


def check(files: CheckpointFiles) -> None:
    """Refuse directories that are known not to be readable checkpoints.

    They are LoRA adapters, GGUF files, shards without their index, and weights that ModelOpt has
    quantized.

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
    if _QUANTIZED_BY_MODELOPT in names:
        file = directory / _QUANTIZED_BY_MODELOPT
        quantization = check_fields(files.json(file.name), _QUANTIZATION, str(file))["quantization"]
        for name in ("quant_algo", "kv_cache_quant_algo"):
            if (algorithm := quantization.get(name)) is not None:
                raise CheckpointError(
                    f"{file}: quantization.{name}={show(algorithm)}: ModelOpt's quantization is not"
                    " supported: use the checkpoint without quantization"
                )


def check_file(file: Path) -> None:
    """Refuse a path to a file, because a directory is required."""
    if file.suffix.lower() == ".gguf":
        raise CheckpointError(
            f"{file}: GGUF is not supported: give the directory of the model's checkpoint in"
            " safetensors"
        )
    raise CheckpointError(f"{file} is a file: give the directory of the checkpoint")
