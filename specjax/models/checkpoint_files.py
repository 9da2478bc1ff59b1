"""The files of one checkpoint, which are opened once for a load, and read at most once each.

Many functions need the same few files: one reads the configuration, the next the names of the
tensors, a third which of them are quantized. They all share one `CheckpointFiles`.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from specjax.models.fields import CheckpointError, JsonObject, read_json, show
from specjax.models.quantization import Form, float8, mxfp4, published
from specjax.models.quantization.stored import StoredMatrix
from specjax.models.torch_zip import TorchFile

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TORCH_WEIGHTS = "pytorch_model.bin"
"""The file that is read if there are no safetensors."""
MEDUSA_WEIGHTS = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
"""The names of published files with Medusa heads."""
INDEX = "model.safetensors.index.json"
_ONE_FILE = {"weight_map": {"": WEIGHTS}}
"""The substitute for an index if there is none."""


@dataclass(frozen=True, eq=False)
class CheckpointFiles:
    """The files of a checkpoint, of a target or of a drafter.

    `specjax.models.hub.open_checkpoint` makes one for each load. Each file is read when it is first
    needed, and never again: files that may have changed need a new object. Weight files are closed
    when neither this object nor a tensor of it is in use any more.

    Attributes:
        directory: the directory of the files.
        name: the directory, hub id or name by which the checkpoint was opened; empty if only the
            directory is known.
        has_weights: False if the checkpoint is on the hub, and only its small files were
            downloaded.

    Examples:
        >>> from specjax.models import hub
        >>> files = hub.open_checkpoint("embedded:eagle3")
        >>> files.raw["model_type"], len(files.shapes["midlayer.mlp.up_proj.weight"])
        ('llama', 2)
    """

    directory: Path
    name: str = ""
    has_weights: bool = True
    _parsed: dict[str, JsonObject] = field(default_factory=dict, init=False, repr=False)

    def __fspath__(self) -> str:
        return str(self.directory)

    def __str__(self) -> str:
        return self.name or str(self.directory)

    # --- JSON files ---

    def json(self, name: str, default: JsonObject | None = None) -> JsonObject:
        """Return the object in the JSON file ``name``.

        Args:
            name: the name of the file.
            default: the result if there is no such file; None if the file must exist.

        Raises:
            CheckpointError: The file is missing, or does not hold an object.
        """
        if default is not None and not (self.directory / name).exists():
            return default
        if name not in self._parsed:
            self._parsed[name] = read_json(self.directory / name)
        return self._parsed[name]

    @cached_property
    def raw(self) -> JsonObject:
        """The object in config.json.

        Raises:
            CheckpointError: The file is missing or damaged.
        """
        return self.json(CONFIG)

    @property
    def file(self) -> str:
        """The path of config.json, as errors name it."""
        return str(self.directory / CONFIG)

    @cached_property
    def quantization(self) -> JsonObject:
        """The checked description of the quantization; empty if there is none.

        It is ``quantization_config`` of config.json, or that of ModelOpt's hf_quant_config.json.

        Raises:
            CheckpointError: The quantization is not supported, or the two contradict each other.
        """
        stated = self.json(CONFIG, {}).get("quantization_config")
        published.check_config(stated, self.file)
        separate = self.json(published.MODELOPT_FILE, {})
        if separate:
            path = str(self.directory / published.MODELOPT_FILE)
            separate = published.of_modelopt_file(separate, path, stated)
        return stated or separate

    # --- tensors ---

    @cached_property
    def weight_files(self) -> list[str]:
        """The names of the files with the weights.

        Raises:
            CheckpointError: A file is missing.
        """
        shards = self.json(INDEX, _ONE_FILE).get("weight_map")
        if (
            not isinstance(shards, dict)
            or not shards
            or not all(type(file) is str for file in shards.values())
        ):
            raise CheckpointError(
                f"{self.directory / INDEX}: weight_map={show(shards)}: must map every tensor to a"
                " file: download the checkpoint again"
            )
        files = sorted(set(shards.values()))
        # Names are compared with the directory's own files, so that no name can lead out of it.
        present = {file.name for file in self.directory.iterdir() if file.is_file()}
        if files == [WEIGHTS] and WEIGHTS not in present:
            files = [name for name in (TORCH_WEIGHTS, *MEDUSA_WEIGHTS) if name in present][
                :1
            ] or files
        if missing := [name for name in files if name not in present]:
            names = ", ".join(
                name if name.isprintable() and len(name) <= 100 else show(name)
                for name in missing[:5]
            )
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise CheckpointError(
                f"{self.directory} lacks {names}{more}: download the checkpoint again, in"
                " safetensors format"
            )
        return files

    @property
    def weight_bytes(self) -> int:
        """The total size of the files with the weights."""
        return sum((self.directory / name).stat().st_size for name in self.weight_files)

    @cached_property
    def tensors(self) -> Mapping[str, Any]:
        """The tensors by name, from one file or from the shards that an index lists.

        Only headers and the smallest tensors are read. Each tensor has ``get_shape()`` and
        ``get_dtype()``, and returns a part for a slice of each axis. A quantized matrix replaces
        the tensors that it consists of.
        """
        tensors: dict[str, Any] = {}
        for name in self.weight_files:
            path = self.directory / name
            if name.endswith(".safetensors"):
                file_tensors = _open_safetensors(path)
            else:
                file_tensors = TorchFile(path).tensors
            if name.endswith(".safetensors") and (
                twice := sorted(file_tensors.keys() & tensors.keys())
            ):
                raise CheckpointError(
                    f"{self.directory}: two shards hold {show(twice[0])}: download the checkpoint"
                    " again"
                )
            tensors |= file_tensors
        matrices, used = published.matrices(tensors, self.quantization, self.directory)
        tensors = {name: tensor for name, tensor in tensors.items() if name not in used} | matrices
        return mxfp4.unpacked(tensors, self.directory)

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor by name, from the headers."""
        return {name: tuple(tensor.get_shape()) for name, tensor in self.tensors.items()}

    @property
    def tensor_names(self) -> Collection[str]:
        """The names of the tensors; empty without an index of the shards and without weights."""
        try:
            return (self.json(INDEX, {}).get("weight_map") or self.shapes).keys()
        except (CheckpointError, AttributeError):
            return ()

    @cached_property
    def forms(self) -> Mapping[str, Form]:
        """The forms of the quantized matrices, by name."""
        return {
            name: value.form
            for name, value in self.tensors.items()
            if isinstance(value, StoredMatrix) and value.is_kept
        }

    # --- counts ---

    def numbered(self, prefix: str, first: int = 0) -> int:
        """Return how many different numbers from ``first`` on follow ``prefix`` in tensors' names.

        See `number_after`.
        """
        return sum(
            number is not None and number >= first
            for number in {number_after(prefix, name) for name in self.shapes}
        )

    def check_count(self, field: str, stated: int, actual: int, parts: str) -> None:
        """Refuse a count that differs from the number of tensors.

        The count decides how much is declared, which takes memory.

        Args:
            field: the field of config.json.
            stated: the count in that field.
            actual: the number that there are tensors of.
            parts: the name of what is counted.
        """
        if stated != actual:
            raise CheckpointError(
                f"{self.file}: {field}={stated}, but there are tensors of {actual} {parts}: give"
                " the configuration and the weights of one model"
            )


def number_after(prefix: str, name: str) -> int | None:
    """Return the number after ``prefix`` in a tensor's name, or None.

    An example is 0 after ``layers.`` in ``layers.0.mlp``. Numbers of more than nine digits do not
    count: no real checkpoint has them, and Python refuses to read thousands of digits.
    """
    match = re.match(r"([0-9]{1,9})\.", name[len(prefix) :]) if name.startswith(prefix) else None
    return None if match is None else int(match[1])


class _Slices:
    """A tensor of a safetensors file, whose slices may have steps.

    The slices of safetensors itself do not support steps.
    """

    def __init__(self, stored: Any, path: Path) -> None:
        self._stored, self.path = stored, path
        self.get_shape, self.get_dtype = stored.get_shape, stored.get_dtype

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        reach = tuple(slice(piece.start, piece.stop) for piece in part)
        return self._stored[reach][tuple(slice(None, None, piece.step) for piece in part)]


def _open_safetensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a safetensors file by name.

    The file stays open while one of them is in use.
    """
    try:
        handle = safe_open(path, framework="numpy")
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path} is truncated or damaged ({' '.join(str(error).split())}): download it again"
        ) from None
    names = handle.keys()  # the handle is not a dict
    tensors: dict[str, Any] = {name: _Slices(handle.get_slice(name), path) for name in names}
    in_bytes = [key for key, tensor in tensors.items() if tensor.get_dtype() in float8.TYPES]
    return tensors | (float8.open_tensors(path, in_bytes) if in_bytes else {})
