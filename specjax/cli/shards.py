"""Parts of a data set, each written by a process of its own, on whatever machine a scheduler gives it."""

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
    """One of ``count`` parts of a data set. A document belongs to the one that the hash of its content says.

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
        """Whether a document of this ``identity``, a hexadecimal number, belongs to it."""
        return int(identity, 16) % self.count == self.number

    def file(self, folder: Path) -> Path:
        """Where it lies in a ``folder`` when it is whole."""
        return folder / f"{self.number:05d}-of-{self.count:05d}.jsonl"


def find_shard(text: str, environment: Mapping[str, str] = os.environ) -> Shard:
    """The shard that ``text`` names: "I/N"; or "auto/N", or "auto" alone, where a scheduler says which one this process is.

    Slurm's arrays say both numbers (SLURM_ARRAY_TASK_ID, from SLURM_ARRAY_TASK_MIN on, and SLURM_ARRAY_TASK_COUNT). Indexed
    jobs of Kubernetes say the first (JOB_COMPLETION_INDEX).

    Raises:
        InputError: it is no such text, or the scheduler says nothing.

    Examples:
        >>> from specjax.cli.shards import find_shard
        >>> find_shard("3/16")
        Shard(number=3, count=16)
        >>> find_shard("auto/16", {"JOB_COMPLETION_INDEX": "5"})
        Shard(number=5, count=16)
        >>> slurm = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_MIN": "1", "SLURM_ARRAY_TASK_COUNT": "8"}
        >>> find_shard("auto", slurm)
        Shard(number=0, count=8)
    """
    found = re.fullmatch(r"(\d+|auto)(?:/(\d+))?", text)
    if found is None or (found[1] != "auto" and found[2] is None):
        raise InputError(f"shard={text!r}: give I/N, such as 0/16, the first of 16; or auto, or auto/16, under a scheduler")
    number, count = found[1], found[2]
    if number == "auto":
        number, said = _of_scheduler(text, environment)
        count = count or said
    if count is None:
        raise InputError(f"shard={text!r}: the scheduler says which shard this is, and not of how many: give auto/N")
    shard = Shard(int(number), int(count))
    if not shard.number < shard.count < 100_000:
        raise InputError(f"shard={text!r}: is shard {shard}, and of N shards, at most 99999, the last is N-1")
    return shard


def _of_scheduler(text: str, environment: Mapping[str, str]) -> tuple[str, str | None]:
    """The number of this process's shard, and of how many, if it is said."""
    names = ("SLURM_ARRAY_TASK_ID", "JOB_COMPLETION_INDEX")
    name = next((name for name in names if environment.get(name)), None)
    if name is None:
        raise InputError(f"shard={text!r}: neither {' nor '.join(names)} is set: run it as a task of an array, or give I/N")
    number, first = environment[name], environment.get("SLURM_ARRAY_TASK_MIN", "0") if name == names[0] else "0"
    if not (number.isdecimal() and first.isdecimal()) or int(number) < int(first):
        raise InputError(f"shard={text!r}: {name}={number!r} is no number from {first} on: give I/N")
    count = environment.get("SLURM_ARRAY_TASK_COUNT") if name == names[0] else None
    return str(int(number) - int(first)), count if count and count.isdecimal() else None


def beside(file: Path) -> Path:
    """Where is noted how a ``file`` was written; of a shard the same whether it is whole or only begun."""
    return file.with_name(file.name.removesuffix(BEGUN)).with_suffix(".yaml")


def open_shard(folder: Path, shard: Shard) -> Path:
    """The file of a ``shard``, if it is whole; or where it is written, `is_begun`. One that is not as `finish` left it is
    written on.

    Raises:
        InputError: the ``folder`` is none, or has shards of another number: in those the same documents would be once more.
    """
    if folder.exists() and not folder.is_dir():
        raise InputError(f"output={str(folder)!r}: is a file: with shard={shard} give a folder")
    counts = {int(found[2]) for path in folder.glob("*") if (found := _NAME.fullmatch(path.name))}
    if other := sorted(counts - {shard.count}):
        raise InputError(
            f"output={str(folder)!r}: has shards of {other[0]}, and shard={shard} is of {shard.count}: give another"
        )
    file = shard.file(folder)
    part = file.with_name(f"{file.name}{BEGUN}")
    if file.is_file() and not is_whole(file):
        file.replace(part)
    return file if file.is_file() else part


def is_begun(file: Path) -> bool:
    """Whether a shard's ``file`` is not whole yet."""
    return file.name.endswith(BEGUN)


def finish(part: Path, claim: str) -> Path:
    """The file of a shard that was begun in ``part`` and is whole: that is noted beside it, and then it is renamed. ``claim``
    is what is noted beside one of no documents."""
    file, noted = part.with_name(part.name.removesuffix(BEGUN)), beside(part)
    part.parent.mkdir(parents=True, exist_ok=True)
    part.touch()
    lines = (noted.read_text() if noted.exists() else claim).splitlines(keepends=True)
    write_text(noted, "".join([*(line for line in lines if not line.startswith(_WHOLE)), f"{_WHOLE}{_digest(part)}\n"]))
    part.replace(file)
    return file


def is_whole(file: Path) -> bool:
    """Whether ``file`` is there, and as `finish` left it."""
    claim = beside(file)
    if not file.is_file() or not claim.is_file():
        return False
    return f"{_WHOLE}{_digest(file)}" in claim.read_text(errors="replace").splitlines()


def missing(folder: Path, count: int) -> list[Shard]:
    """Those of ``count`` shards that are not there whole."""
    return [shard for number in range(count) if not is_whole((shard := Shard(number, count)).file(folder))]


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
