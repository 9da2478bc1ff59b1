"""Atomic writes of files and directories, and the error for a full disk."""

import errno
import math
import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from specjax.errors import InputError

_FULL = {errno.ENOSPC, errno.EDQUOT}
_SAYS_FULL = ("No space left on device", "StorageFull", "Disk quota exceeded")
"""Messages for a full disk in errors of libraries that write in Rust or C++."""

_SCHEMES = {"s3:", "gs:", "gcs:", "az:", "abfs:", "hdfs:", "http:", "https:", "file:"}
"""The first part of a path that was a URL: ``Path("s3://bucket")`` is ``s3:/bucket``."""

_unfinished: dict[Path, Sequence[Path]] = {}
"""Scratch paths that are being written, each with the directories created for it (inside out)."""


class FullDiskError(InputError):
    """A disk without enough free space for a write.

    Attributes:
        needs: the size of the write in bytes; 0 if unknown.
    """

    def __init__(
        self, path: Path, needs: int = 0, remedy: str = "make room, or name another place"
    ) -> None:
        """Name the disk, the size of the write, the free space and the remedy in the message."""
        disk = mount_point(path)
        size = f"needs about {max(1, math.ceil(needs / 10**6)):,} MB, " if needs else ""
        free = f"has {shutil.disk_usage(disk).free // 10**6:,} MB"
        super().__init__(f"{path}: no space left on {disk}, {size}{free}: {remedy}")
        self.needs = needs


def mount_point(path: Path) -> Path:
    """Return the mount point of the disk that holds ``path``. The path need not exist.

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
    """Return True if an error of the system or of a library means that the disk is full."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return any(words in str(error) for words in _SAYS_FULL)


@contextmanager
def naming_full_disk(path: Path, needs: int = 0) -> Iterator[None]:
    """Convert errors that mean a full disk into a `FullDiskError`.

    Args:
        path: the file or directory that is written, as the user named it.
        needs: the size of the write in bytes, if known.

    Raises:
        FullDiskError: the disk is full.
    """
    try:
        yield
    except FullDiskError as error:  # it names a scratch file; the user knows ``path``
        raise FullDiskError(path, max(needs, error.needs)) from error
    except Exception as error:
        if not is_full_disk(error):
            raise
        raise FullDiskError(path, needs) from error


@contextmanager
def replacing(directory: Path, needs: int = 0) -> Iterator[Path]:
    """Yield a scratch directory that replaces ``directory`` if the block succeeds.

    If the block fails, the scratch directory is removed. If ``directory`` exists, its files are
    replaced one by one, config.json last. A process that reads in between sees the old
    configuration with new weights; the check of shapes detects this, unless both models have the
    same shapes.

    Args:
        directory: the directory to write. It is created, with its parents, if it does not exist.
        needs: the number of bytes that will be written, if known.

    Raises:
        FullDiskError: there is not enough free space, before or during the write.

    Examples:
        >>> from pathlib import Path
        >>> from specjax.files import replacing
        >>> with replacing(Path("reports/today")) as scratch:
        ...     _ = (scratch / "report.txt").write_text("all is well")
        >>> Path("reports/today/report.txt").read_text()
        'all is well'
    """
    with naming_full_disk(directory, needs), creating_parents(directory) as created:
        _check_room(directory, needs)
        scratch = Path(tempfile.mkdtemp(dir=directory.parent, prefix=f".{directory.name}-"))
        with _on_the_way(scratch, created):
            yield scratch
            if directory.exists():
                for file in sorted(
                    scratch.iterdir(), key=lambda file: (file.name == "config.json", file.name)
                ):
                    file.replace(directory / file.name)
            else:
                scratch.chmod(0o755)
                scratch.rename(directory)


@contextmanager
def writing(path: Path, needs: int = 0) -> Iterator[Path]:
    """Yield the path of a scratch file that replaces ``path`` if the block succeeds.

    If the block fails, the scratch file is removed.

    Args:
        path: the file to write. Its parent directories are created if they do not exist.
        needs: the number of bytes that will be written, if known.

    Raises:
        FullDiskError: there is not enough free space, before or during the write.
    """
    with naming_full_disk(path, needs), creating_parents(path) as created:
        _check_room(path, needs)
        # The suffix stays at the end, because matplotlib reads the format from it.
        # Not the number of the process alone, which containers that share a disk may have twice.
        unique = f"{os.getpid()}-{secrets.token_hex(4)}"
        scratch = path.with_name(f".{path.stem}-{unique}{path.suffix}")
        with _on_the_way(scratch, created):
            yield scratch
            scratch.replace(path)


def write_text(path: Path, content: str) -> None:
    """Write a UTF-8 text file atomically. Raises the errors of `writing`."""
    raw = content.encode()
    with writing(path, len(raw)) as scratch:
        scratch.write_bytes(raw)


def discard_unfinished() -> None:
    """Remove everything that is half written; for a process that is about to exit."""
    for scratch, created in list(_unfinished.items()):
        _remove(scratch, created)


@contextmanager
def _on_the_way(scratch: Path, created: Sequence[Path]) -> Iterator[None]:
    _unfinished[scratch] = created
    try:
        yield
    finally:
        _remove(scratch, ())
        _unfinished.pop(scratch, None)


@contextmanager
def creating_parents(path: Path) -> Iterator[Sequence[Path]]:
    """Create the parent directories of ``path``; remove the new ones if the block fails.

    The created directories are yielded, the inner ones first.
    """
    if path.parts[:1] and path.parts[0] in _SCHEMES:
        raise InputError(f"{path}: a URL cannot be written here; give a local path")
    created = [parent for parent in path.parents if not parent.exists()]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield created
    except BaseException:
        _remove_empty(created)
        raise


def _remove(scratch: Path, created: Sequence[Path]) -> None:
    if scratch.is_dir() and not scratch.is_symlink():
        shutil.rmtree(scratch, ignore_errors=True)
    else:
        with suppress(OSError):
            scratch.unlink()
    _remove_empty(created)


def _remove_empty(directories: Sequence[Path]) -> None:
    for directory in directories:
        with suppress(OSError):
            directory.rmdir()


def _check_room(path: Path, needs: int) -> None:
    if needs > shutil.disk_usage(mount_point(path)).free:
        raise FullDiskError(path, needs)
