"""Shards of a data set, each written by its own process on any machine that a scheduler assigns."""

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from specjax.errors import InputError
from specjax.files import write_text
from specjax.training.written import BEGUN

_NAME = re.compile(r"(\d{5})-of-(\d{5})\.jsonl(\.part)?")
_WHOLE = "# whole: "


@dataclass(frozen=True)
class Shard:
    """One of ``count`` shards of a data set. The hash of a document's content decides its shard.

    Examples:
        >>> from specjax.cli.shards import Shard
        >>> f"{Shard(3, 16)}", Shard(3, 16).holds("0013"), Shard(3, 16).holds("0014")
        ('3/16', True, False)
    """

    number: int
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def holds(self, identity: str) -> bool:
        """Return True if a document belongs to the shard. Its identity is a hexadecimal number."""
        return int(identity, 16) % self.count == self.number

    def file(self, folder: Path) -> Path:
        """Return the path of the complete shard in a folder."""
        return folder / f"{self.number:05d}-of-{self.count:05d}.jsonl"


def find_shard(text: str, environment: Mapping[str, str] = os.environ) -> Shard:
    """Parse a shard: "I/N", or "auto/N" or "auto", where a scheduler gives the index.

    Slurm arrays give both numbers (SLURM_ARRAY_TASK_ID, which starts at SLURM_ARRAY_TASK_MIN, and
    SLURM_ARRAY_TASK_COUNT). Indexed jobs of Kubernetes give the index (JOB_COMPLETION_INDEX).

    Raises:
        InputError: the text is not a shard, or the scheduler gives no index.

    Examples:
        >>> from specjax.cli.shards import find_shard
        >>> find_shard("3/16")
        Shard(number=3, count=16)
        >>> find_shard("auto/16", {"JOB_COMPLETION_INDEX": "5"})
        Shard(number=5, count=16)
        >>> slurm = {"TASK_ID": "1", "TASK_MIN": "1", "TASK_COUNT": "8"}
        >>> find_shard("auto", {f"SLURM_ARRAY_{name}": value for name, value in slurm.items()})
        Shard(number=0, count=8)
    """
    match = re.fullmatch(r"(\d+|auto)(?:/(\d+))?", text)
    if match is None or (match[1] != "auto" and match[2] is None):
        raise InputError(
            f"shard={text!r}: give I/N, such as 0/16, the first of 16; or auto, or auto/16, under a"
            " scheduler"
        )
    number, count = match[1], match[2]
    if number == "auto":
        number, scheduler_count = _of_scheduler(text, environment)
        count = count or scheduler_count
    if count is None:
        raise InputError(
            f"shard={text!r}: the scheduler gives the shard's index, but not the number of shards:"
            " give auto/N"
        )
    shard = Shard(int(number), int(count))
    if not shard.number < shard.count < 100_000:
        raise InputError(
            f"shard={text!r}: shard {shard} does not exist; the last of N shards, at most 99999, is"
            " N-1/N"
        )
    return shard


def _of_scheduler(text: str, environment: Mapping[str, str]) -> tuple[str, str | None]:
    """Return the index of this process's shard, and the number of shards if it is known."""
    names = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")
    name = next((name for name in names if environment.get(name)), None)
    if name is None:
        raise InputError(
            f"shard={text!r}: neither {' nor '.join(names)} is set: run it as a task of an array,"
            " or give I/N"
        )
    index = environment[name]
    first_index = environment.get("SLURM_ARRAY_TASK_MIN", "0") if name == names[0] else "0"
    if not (index.isdecimal() and first_index.isdecimal()) or int(index) < int(first_index):
        raise InputError(
            f"shard={text!r}: {name}={index!r} must be a number, at least {first_index}: give I/N"
        )
    count = environment.get("SLURM_ARRAY_TASK_COUNT") if name == names[0] else None
    return str(int(index) - int(first_index)), count if count and count.isdecimal() else None


def beside(file: Path) -> Path:
    """Return the path of the file with the options of a file or shard, complete or not."""
    return file.with_name(file.name.removesuffix(BEGUN)).with_suffix(".yaml")


def open_shard(folder: Path, shard: Shard) -> Path:
    """Return the file of a shard if it is complete, else the partial file to continue (`is_begun`).

    A file that is not as `finish` left it counts as partial.

    Raises:
        InputError: the folder is a file, or it has shards of another number. The same documents
            would then be in both.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output={str(folder)!r}: it is a file: with shard={shard} give a folder")
    counts = {int(match[2]) for path in folder.glob("*") if (match := _NAME.fullmatch(path.name))}
    if other_counts := sorted(counts - {shard.count}):
        raise InputError(
            f"output={str(folder)!r}: it has 1 of {other_counts[0]} shards, but shard={shard}: give"
            " another folder"
        )
    file = shard.file(folder)
    part = file.with_name(f"{file.name}{BEGUN}")
    if file.is_file() and not is_whole(file):
        file.replace(part)
    return file if file.is_file() else part


def is_begun(file: Path) -> bool:
    """Return True if a shard's file is partial."""
    return file.name.endswith(BEGUN)


def finish(part: Path, claim: str) -> Path:
    """Mark a partial shard as complete, rename its file, and return the new path.

    The mark is the file's hash, beside the file. ``claim`` is written there if the shard has no
    documents.
    """
    file, noted = part.with_name(part.name.removesuffix(BEGUN)), beside(part)
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    lines = (noted.read_text() if noted.exists() else claim).splitlines(keepends=True)
    write_text(
        noted,
        "".join(
            [*(line for line in lines if not line.startswith(_WHOLE)), f"{_WHOLE}{_digest(part)}\n"]
        ),
    )
    part.replace(file)
    return file


def is_whole(file: Path) -> bool:
    """Return True if a shard's file exists and is as `finish` left it."""
    claim = beside(file)
    if not file.is_file() or not claim.is_file():
        return False
    return f"{_WHOLE}{_digest(file)}" in claim.read_text(errors="replace").splitlines()


def missing(folder: Path, count: int) -> list[Shard]:
    """Return the shards that are not complete."""
    return [
        shard
        for number in range(count)
        if not is_whole((shard := Shard(number, count)).file(folder))
    ]


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
