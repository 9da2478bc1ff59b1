"""The place of the directory of a run: a disk, or a bucket.

A run in a bucket works in a local directory, because tensorstore, which writes the checkpoints,
does not reach every server with the API of S3. At the beginning the directory is made equal to the
folder in the bucket. After each checkpoint and each evaluation the folder is made equal to the
directory, in the background. So a killed run continues, here or on another machine, from what was
uploaded last. The folder is always that of one moment: see `specjax.stored_folders`.

The folder belongs to the process that began or continued the run last. The upload of an earlier
process that still runs fails, because it replaces a manifest that is not there any more.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

import jax

from specjax import stored_folders, stores
from specjax.config import ConfigError
from specjax.errors import InputError
from specjax.progress import say, waiting
from specjax.stored_folders import Manifest
from specjax.stores import ChangedError, Store

_SNAPSHOT = ".upload-"
"""The beginning of the names of directories that are being uploaded."""


class RunOutput:
    """The output of a run on a disk.

    Attributes:
        directory: the directory that the run writes.
        best: the place of the best student, as ``from_pretrained`` and the commands take it.
    """

    def __init__(self, directory: Path, best: Path | str) -> None:
        self.directory, self.best = directory, best

    def claim(self) -> None:
        """Publish the identity of the run, unless another process has claimed the output."""

    def publish(self, complete: Callable[[], object] = lambda: None) -> None:
        """Publish what the run has written.

        Args:
            complete: called before an upload; it returns when the files are complete.
        """


@contextmanager
def open_output(output: str) -> Iterator[RunOutput]:
    """Open the output of a run. At the end, everything is published.

    Args:
        output: a directory, or a folder in a bucket: ``s3://BUCKET/PATH``, ``gs://BUCKET/PATH``.

    Raises:
        ConfigError: The folder is in use by another process here, or has foreign objects. Or there
            are several processes, each of which would have its own directory.
        InputError: The bucket cannot be read or written.
    """
    if not stores.is_url(output):
        directory = Path(output)
        yield RunOutput(directory, directory / "best")
        return
    if jax.process_count() > 1:
        raise ConfigError(
            f"output={output!r}: a run of several processes needs a directory that all of them"
            " share, such as a disk on the network or a bucket that is mounted as one"
        )
    store = Store(output, "output")
    key = hashlib.sha256(store.url.encode()).hexdigest()[:32]
    place = stored_folders.cache_directory("runs", key)
    with _locked(place, output):
        for snapshot in place.glob(f"{_SNAPSHOT}*"):  # of a process that was killed
            shutil.rmtree(snapshot, ignore_errors=True)
        directory = place / (PurePosixPath(store.prefix).name or store.bucket)
        stored = _StoredOutput(store, directory, _make_equal(store, directory))
        try:
            yield stored
        except BaseException as error:
            stored.end(error)
            raise
        stored.end()
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def _locked(place: Path, output: str) -> Iterator[None]:
    """Hold the lock of a local directory, which ends with the process, however that ends."""
    place.parent.mkdir(parents=True, exist_ok=True)
    with place.with_suffix(".lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"output={output!r}: another process on this machine runs it; wait for its end, or"
                " choose another output"
            ) from None
        yield


def _make_equal(store: Store, directory: Path) -> Manifest | None:
    """Make a local directory equal to a folder in a bucket, and return the folder's manifest.

    Raises:
        ConfigError: The folder has objects, and no run.
    """
    manifest = stored_folders.read_manifest(store)
    if manifest is None:
        # This also names a bucket that does not exist, before anything is computed.
        if any(not stored_folders.is_remains(stored, set()) for stored in store.objects()):
            raise ConfigError(
                f"output={store.url!r} is not empty and has no run; choose another folder"
            )
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        return None
    stored_folders.copy(store, manifest.files, directory)
    for path in sorted(directory.rglob("*"), reverse=True):  # what is in a folder before the folder
        if path.is_dir() and not path.is_symlink():
            if not any(path.iterdir()):
                path.rmdir()
        elif str(PurePosixPath(path.relative_to(directory))) not in manifest.files:
            path.unlink()
    return manifest


def _part_of(name: str) -> str:
    """Return the subfolder of a run that a file belongs to: a student, a checkpoint, or none."""
    parts = name.split("/")
    depth = 2 if parts[0] == "checkpoints" else 1
    return "/".join(parts[: min(depth, len(parts) - 1)])


class _StoredOutput(RunOutput):
    """The output of a run in a bucket."""

    def __init__(self, store: Store, directory: Path, manifest: Manifest | None) -> None:
        super().__init__(directory, f"{store.url}/best")
        self._store, self._manifest = store, manifest
        self._tried: set[str] = set()
        # At first, there may be those of a process that was killed.
        self._is_claimed, self._has_remains = False, True
        self._thread = ThreadPoolExecutor(1, "specjax upload")
        self._upload: Future[None] | None = None

    def claim(self) -> None:
        self.publish()
        self._finish()
        self._is_claimed = True

    def publish(self, complete: Callable[[], object] = lambda: None) -> None:
        complete()
        if self._is_claimed:
            self._finish_or_warn()
        # The run goes on and replaces files, while those of this moment are uploaded.
        snapshot = Path(tempfile.mkdtemp(dir=self.directory.parent, prefix=_SNAPSHOT))
        _link(self.directory, snapshot)
        self._upload = self._thread.submit(self._send, snapshot)

    def _send(self, snapshot: Path) -> None:
        try:
            self._manifest = stored_folders.publish(
                self._store, snapshot, self._manifest, _part_of, self._tried
            )
        except ChangedError:
            raise ConfigError(
                f"output={self._store.url!r}: another process has begun or continued this run, and"
                " it is that one's now; nothing of it was replaced"
            ) from None
        except InputError:
            self._has_remains = True
            raise
        finally:
            shutil.rmtree(snapshot, ignore_errors=True)
        if self._has_remains:
            stored_folders.delete_remains(self._store, self._manifest)
            self._has_remains = False

    def _finish(self) -> None:
        """Wait for the upload, and raise its error."""
        upload, self._upload = self._upload, None
        if upload is not None:
            with waiting(f"uploading to {self._store.url}"):
                upload.result()

    def _finish_or_warn(self) -> None:
        """Wait for the upload; a run goes on if the store could not be reached for a while."""
        try:
            self._finish()
        except ConfigError:
            raise
        except InputError as error:
            say(f"{error}; the next upload will have everything", unasked=True)

    def end(self, error: BaseException | None = None) -> None:
        """Publish the end of the run, which an error may have caused."""
        try:
            if self._is_claimed and not isinstance(error, ConfigError):
                self.publish()
                self._finish()
        except Exception as second:
            if error is None:
                raise
            say(f"the end of the run was not uploaded: {second}", unasked=True)
        finally:
            self._thread.shutdown(wait=True)


def _link(directory: Path, snapshot: Path) -> None:
    """Make a snapshot of a directory: of links to files that are replaced, and copies of the rest.

    Checkpoints and students are written once. All other files may grow.
    """
    for path in directory.rglob("*"):
        name = path.relative_to(directory)
        if path.is_symlink() or not path.is_file():
            continue
        (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
        if name.parts[0] in ("checkpoints", "best", "latest"):
            with suppress(OSError):  # not every disk has links
                os.link(path, snapshot / name)
                continue
        with suppress(FileNotFoundError):  # a service that shows metrics has removed it meanwhile
            shutil.copyfile(path, snapshot / name)
