"""Files and directories that are written whole or not at all, and what is said where a disk is full."""

import errno
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from specjax.errors import InputError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_SAYS_FULL = ("No space left on device", "StorageFull", "Disk quota exceeded")
"""What libraries that write in Rust or C++ say in errors of their own."""

_unfinished: dict[Path, Sequence[Path]] = {}
"""What is being written beside its place, and the directories that were made for it, the innermost first."""


class FullDiskError(InputError):
    """No space is left where something is written.

    Attributes:
        needs: bytes that are to be written, 0 where nobody knows.
    """

    def __init__(self, path: Path, needs: int = 0, remedy: str = "make room, or name another place") -> None:
        """Say which disk has no room for ``path``, how much this takes, and what to do."""
        disk = mount_point(path)
        taken = f"needs about {max(1, math.ceil(needs / 10**6)):,} MB, " if needs else ""
        free = f"has {shutil.disk_usage(disk).free // 10**6:,} MB"
        super().__init__(f"{path}: no space left on {disk}, {taken}{free}: {remedy}")
        self.needs = needs


def mount_point(path: Path) -> Path:
    """Return the directory at which the disk of ``path``, which need not exist, is mounted.

    Examples:
        >>> from pathlib import Path
        >>> from specjax.files import mount_point
        >>> mount_point(Path("/proc/there/is/none"))
        PosixPath('/proc')
    """
    path = path.absolute()
    while not path.exists() or not os.path.ismount(path):
        path = path.parent
    return path


def is_full_disk(error: BaseException) -> bool:
    """Return whether an error, of the system or of a library, means that no space was left."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return any(words in str(error) for words in _SAYS_FULL)


@contextmanager
def naming_full_disk(path: Path, needs: int = 0) -> Iterator[None]:
    """Turn errors of the block that mean a full disk into one that a user understands.

    Args:
        path: what is written, as the user named it.
        needs: bytes that it takes, where that is known.

    Raises:
        FullDiskError: no space is left.
    """
    try:
        yield
    except FullDiskError as error:  # of something inside that is only on its way to ``path``
        raise FullDiskError(path, max(needs, error.needs)) from error
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise FullDiskError(path, needs) from error


@contextmanager
def replacing(directory: Path, needs: int = 0) -> Iterator[Path]:
    """A scratch directory that becomes ``directory`` when the block ends well, and vanishes when it does not.

    Where ``directory`` exists its files are replaced one by one, config.json last: a reader that is let in between sees
    the old configuration with new weights, which the check of shapes catches unless both models are of one shape.

    Args:
        directory: is made where there is none, and the directories above it.
        needs: bytes that are going to be written, where that is known.

    Raises:
        FullDiskError: there is no room for so much, or there was none while it was written.

    Examples:
        >>> from pathlib import Path
        >>> from specjax.files import replacing
        >>> with replacing(Path("reports/today")) as scratch:
        ...     _ = (scratch / "report.txt").write_text("all is well")
        >>> Path("reports/today/report.txt").read_text()
        'all is well'
    """
    with naming_full_disk(directory, needs), _parents_of(directory) as made:
        _check_room(directory, needs)
        scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
        with _on_the_way(scratch, made):
            yield scratch
            if directory.exists():
                for file in sorted(scratch.iterdir(), key=lambda file: (file.name == "config.json", file.name)):
                    file.replace(directory / file.name)
            else:
                scratch.chmod(0o755)
                scratch.rename(directory)


@contextmanager
def writing(path: Path, needs: int = 0) -> Iterator[Path]:
    """The path of a scratch file that becomes ``path`` when the block ends well, and vanishes when it does not.

    Args:
        path: of the file. The directories above it are made where there are none.
        needs: bytes that are going to be written, where that is known.

    Raises:
        FullDiskError: there is no room for so much, or there was none while it was written.
    """
    with naming_full_disk(path, needs), _parents_of(path) as made:
        _check_room(path, needs)
        scratch = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")  # a picture's kind is told by its ending
        with _on_the_way(scratch, made):
            yield scratch
            scratch.replace(path)


def write_text(path: Path, content: str) -> None:
    """Write a text file, UTF-8, whole or not at all; errors as of `writing`."""
    raw = content.encode()
    with writing(path, len(raw)) as scratch:
        scratch.write_bytes(raw)


def discard_unfinished() -> None:
    """Remove whatever is being written at this moment: for a process that is about to end."""
    for scratch, made in list(_unfinished.items()):
        _remove(scratch, made)


@contextmanager
def _on_the_way(scratch: Path, made: Sequence[Path]) -> Iterator[None]:
    _unfinished[scratch] = made
    try:
        yield
    finally:
        _remove(scratch, ())
        _unfinished.pop(scratch, None)


@contextmanager
def _parents_of(path: Path) -> Iterator[Sequence[Path]]:
    """Make the directories above ``path``, and remove those that were made if the block fails."""
    made = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield made
    except BaseException:
        _remove_empty(made)
        raise


def _remove(scratch: Path, made: Sequence[Path]) -> None:
    if scratch.is_dir() and not scratch.is_symlink():
        shutil.rmtree(scratch, ignore_errors=True)
    else:
        with suppress(OSError):
            scratch.unlink()
    _remove_empty(made)


def _remove_empty(directories: Sequence[Path]) -> None:
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()


def _check_room(path: Path, needs: int) -> None:
    if needs > shutil.disk_usage(mount_point(path)).free:
        raise FullDiskError(path, needs)
