"""Folders in buckets: a manifest makes them whole, and local copies make them readable.

::

    specjax.manifest.json             the files of the folder: object, size and SHA-256 of each
    best/v-0123456789abcdef/...       the objects of a version of a subfolder

An object is never replaced by another content. A new content gets a new version, and the manifest
is written last, in one conditional write. So a reader sees the old folder or the new one, and of
two writers one is refused. Objects that no manifest names are remains of a killed upload.
"""

import fnmatch
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from specjax.errors import InputError
from specjax.files import naming_full_disk
from specjax.progress import say, waiting
from specjax.stores import ChangedError, ReplacedError, Store, StoredObject, Version

MANIFEST = "specjax.manifest.json"
_FORMAT = "specjax folder 1"
_VERSIONED = re.compile(r"(?:.*/)?v-[0-9a-f]{16}/.+", re.DOTALL)
_THREADS = 4
_ATTEMPTS = 3


@dataclass(frozen=True)
class StoredFile:
    """A file of a folder in a bucket.

    Attributes:
        object: the name of its object, below the folder.
        size: its bytes.
        sha256: the hash of its content, as hexadecimal digits; empty if no manifest states it.
        e_tag: the tag of the object; None if it is not known.
    """

    object: str
    size: int
    sha256: str
    e_tag: str | None = None


@dataclass(frozen=True)
class Manifest:
    """The files of a folder in a bucket.

    Attributes:
        files: the files by name.
        writer: a name that no other manifest has.
        version: the version of the object, which the next manifest replaces.
    """

    files: Mapping[str, StoredFile]
    writer: str
    version: Version


# --- writing --------------------------------------------------------------------------------------


def read_manifest(store: Store) -> Manifest | None:
    """Return the manifest of a folder, or None if the folder has none.

    Raises:
        InputError: The manifest is damaged, or of a newer version of specjax.
    """
    stored = store.read(MANIFEST)
    if stored is None:
        return None
    try:
        content = json.loads(stored[0])
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']!r}")
        files = {
            _checked(name): StoredFile(_checked(file["object"]), file["size"], file["sha256"])
            for name, file in content["files"].items()
        }
        return Manifest(files, content["writer"], stored[1])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise store.error(
            f"{MANIFEST} cannot be read ({error}); use a newer specjax, or choose another folder"
        ) from None


def _checked(name: str) -> str:
    """Return a name unless it could lead out of the folder."""
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"name {name!r}")
    return name


def publish(
    store: Store,
    directory: Path,
    replaces: Manifest | None,
    part_of: Callable[[str], str],
    tried: set[str] | None = None,
) -> Manifest:
    """Make a folder in a bucket equal to a local directory. Nothing may change it meanwhile.

    Args:
        store: the folder.
        directory: the directory.
        replaces: the manifest of the folder, which is replaced; None for a new folder.
        part_of: returns the subfolder that a file belongs to, "" for none. The files of a subfolder
            get a new version together, so that one can be copied without specjax.
        tried: the writers of earlier calls of this process, some of which may have failed. That of
            this call is added. A manifest of one of them is this process's own: the answer was
            lost.

    Returns:
        The new manifest. Objects that it has replaced are deleted; if that fails, they stay as
        remains, see `delete_remains`.

    Raises:
        ChangedError: Another writer has replaced the manifest. The folder is as that one left it.
        InputError: The store cannot be written.
    """
    writer, tried = secrets.token_hex(16), set() if tried is None else tried
    tried.add(writer)
    earlier = {} if replaces is None else replaces.files
    files = _local_files(directory, part_of, earlier, writer)
    present = {file.object for file in earlier.values()}
    missing = {file.object: name for name, file in files.items() if file.object not in present}
    with ThreadPoolExecutor(_THREADS) as threads:
        # The list raises the first error of the uploads.
        list(
            threads.map(lambda entry: store.upload(entry[0], directory / entry[1]), missing.items())
        )
    content = manifest_text(files, writer).encode()
    version = _write(store, content, None if replaces is None else replaces.version, tried)
    try:
        store.delete(sorted(present - {file.object for file in files.values()}))
    except InputError as error:  # the new folder is whole
        say(f"{error}; replaced objects stay in {store.url}", unasked=True)
    return Manifest(files, writer, version)


def _write(store: Store, content: bytes, replaces: Version | None, tried: set[str]) -> Version:
    """Write a manifest in place of the version ``replaces``, and return the new version.

    Raises:
        ChangedError: Another process has replaced that version.
    """
    try:
        return store.write_if(MANIFEST, content, replaces)
    except ChangedError:
        present = read_manifest(store)
        if present is None or present.writer not in tried:
            raise
        return store.write_if(MANIFEST, content, present.version)


def manifest_text(files: Mapping[str, StoredFile], writer: str) -> str:
    """Return the JSON of a manifest."""
    listed = {
        name: {"object": file.object, "size": file.size, "sha256": file.sha256}
        for name, file in files.items()
    }
    return json.dumps({"format": _FORMAT, "writer": writer, "files": listed}, indent=1)


def delete_remains(store: Store, manifest: Manifest) -> None:
    """Delete the objects of killed uploads. Only the writer of the manifest may do so."""
    objects = {file.object for file in manifest.files.values()}
    store.delete([stored.name for stored in store.objects() if is_remains(stored, objects)])


def is_remains(stored: StoredObject, objects: set[str]) -> bool:
    """Return whether an object is a remains of an upload; ``objects`` are those of the manifest."""
    return stored.name not in objects and bool(_VERSIONED.fullmatch(stored.name))


def _local_files(
    directory: Path,
    part_of: Callable[[str], str],
    earlier: Mapping[str, StoredFile],
    writer: str,
) -> dict[str, StoredFile]:
    """Return the files of a local directory, with the objects that they belong in.

    A subfolder that has not changed keeps its objects. Otherwise its version is one that no other
    writer uses, even for the same content: an earlier process may still delete its objects.
    """
    paths = sorted(
        path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()
    )
    names = [str(PurePosixPath(path.relative_to(directory))) for path in paths]
    hashes = dict(zip(names, map(_hash_of, paths), strict=True))
    parts: dict[str, list[str]] = {}
    for name in names:
        parts.setdefault(part_of(name), []).append(name)
    files: dict[str, StoredFile] = {}
    for part, members in parts.items():
        stored = {name: file for name, file in earlier.items() if part_of(name) == part}
        if {name: file.sha256 for name, file in stored.items()} == {
            name: hashes[name] for name in members
        }:
            files |= stored
            continue
        version = f"v-{hashlib.sha256(f'{writer} {part}'.encode()).hexdigest()[:16]}"
        for name in members:
            below = name.removeprefix(f"{part}/") if part else name
            place = f"{part}/{version}/{below}" if part else f"{version}/{below}"
            files[name] = StoredFile(place, (directory / name).stat().st_size, hashes[name])
    return files


def _hash_of(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# --- reading --------------------------------------------------------------------------------------


def copy(store: Store, files: Mapping[str, StoredFile], directory: Path) -> None:
    """Copy files to a local directory. Those that it has already are not read again.

    Args:
        store: the folder of the objects.
        files: the files by name.
        directory: the directory. Other files in it are left alone.

    Raises:
        InputError: An object is missing, or is not what the manifest states.
    """
    directory.mkdir(parents=True, exist_ok=True)

    def fetch(entry: tuple[str, StoredFile]) -> None:
        name, file = entry
        path = directory / name
        if _has(path, file):
            return
        store.download(StoredObject(file.object, file.size, file.e_tag), path)
        if file.sha256 and _hash_of(path) != file.sha256:
            path.unlink()
            raise store.error(
                f"{file.object} is not the object that {MANIFEST} states; restore it, or use"
                " another folder"
            )

    size = sum(file.size for file in files.values())
    with (
        waiting(f"reading {store.url}, {size / 1e6:,.1f} MB", len(files)) as wait,
        naming_full_disk(directory),
        ThreadPoolExecutor(_THREADS) as threads,
    ):
        for done, _ in enumerate(threads.map(fetch, files.items()), 1):
            wait.update(done=done)


def _has(path: Path, file: StoredFile) -> bool:
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return not file.sha256 or _hash_of(path) == file.sha256


def cache_directory(*names: str) -> Path:
    """Return a directory for local copies, below ``XDG_CACHE_HOME`` or ``~/.cache``.

    Args:
        names: the names of the folders below the cache of specjax.
    """
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root).joinpath("specjax", *names)


@dataclass(frozen=True)
class LocalCopy:
    """A folder of a bucket, copied.

    Attributes:
        directory: the local directory.
        files: the files that the URL and the patterns name.
        is_object: whether the URL is that of one object.
    """

    directory: Path
    files: Sequence[Path]
    is_object: bool


def fetch(url: str, argument: str, patterns: Sequence[str] = ("**",)) -> LocalCopy:
    """Copy a folder or an object of a bucket into the cache, and return its local directory.

    The cache holds contents: a folder that has changed is copied to another directory, and one
    that has not is not read again.

    Args:
        url: a folder, an object, or a pattern with ``*``, ``**``, ``?`` or ``[abc]``.
        argument: the name of the user's argument, for messages.
        patterns: the files to copy, as patterns of their names in the folder.

    Raises:
        InputError: There is no such folder, or it is incomplete: its upload has not ended.
    """
    for _ in range(_ATTEMPTS - 1):
        with suppress(ReplacedError):  # the run has published meanwhile: read its new manifest
            return _fetch(url, argument, patterns)
    return _fetch(url, argument, patterns)


def _fetch(url: str, argument: str, patterns: Sequence[str]) -> LocalCopy:
    match, is_object = re.search(r"[*?\[]", url), False
    if match:
        base = url[: match.start()].rpartition("/")[0]
        store, patterns = Store(base, argument), [url[len(base) + 1 :]]
        files = _listed(store)
    else:
        store = Store(url, argument)
        files = _files_of_manifest(store)
        if files is None:
            files = _listed(store)
        if not files and store.prefix:
            base, _, name = store.url.rpartition("/")
            store = Store(base, argument)
            stored = store.find(name)
            is_object = stored is not None
            files = {} if stored is None else {name: _as_file(stored)}
            patterns = [name] if files else patterns
    chosen = {
        name: file
        for name, file in files.items()
        if any(re.fullmatch(_as_expression(pattern), name) for pattern in patterns)
    }
    if not files or (match and not chosen):
        raise InputError(
            f"{argument}={url!r}: there is no such object or folder; check the spelling"
        )
    listing = [(name, file.size, file.sha256 or file.e_tag) for name, file in sorted(files.items())]
    anonymous = "" if all(file.sha256 for file in files.values()) else store.url
    key = hashlib.sha256(json.dumps([anonymous, listing]).encode()).hexdigest()[:32]
    name = PurePosixPath(store.prefix).name or store.bucket
    directory = cache_directory("stores", key, name)
    copy(store, chosen, directory)
    return LocalCopy(directory, [directory / name for name in chosen], is_object)


def _files_of_manifest(store: Store) -> dict[str, StoredFile] | None:
    """Return the files of a folder by its manifest, or by that of the folder above it.

    None means that there is no manifest: others have put the objects there.

    Raises:
        InputError: The folder is not in the manifest of the folder above.
    """
    if (manifest := read_manifest(store)) is not None:
        return dict(manifest.files)
    if not store.prefix:
        return None
    base, _, name = store.url.rpartition("/")
    if (manifest := read_manifest(Store(base, store.argument))) is None:
        return None
    inside = {
        path.removeprefix(f"{name}/"): StoredFile(
            file.object.removeprefix(f"{name}/"), file.size, file.sha256
        )
        for path, file in manifest.files.items()
        if path.startswith(f"{name}/") and file.object.startswith(f"{name}/")
    }
    if not inside:
        raise store.error(
            f"the run there has no folder {name!r}, or its upload has not ended; wait for it, or"
            " continue the run"
        )
    return inside


def _listed(store: Store) -> dict[str, StoredFile]:
    """Return the files of a folder without a manifest: all its objects."""
    try:
        return {_checked(stored.name): _as_file(stored) for stored in store.objects()}
    except ValueError as error:
        raise store.error(f"an object's {error} has '..'; rename it") from None


def _as_file(stored: StoredObject) -> StoredFile:
    return StoredFile(stored.name, stored.size, "", stored.e_tag)


_WILDCARDS = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def _as_expression(pattern: str) -> str:
    """Return the regular expression of a pattern. As in a shell, only ``**`` stands for a slash."""
    pieces = re.split(r"(\*\*/|\*\*|\*|\?|\[!?\]?[^\]]*\])", pattern)
    expressions = [
        # Pieces at odd places are those that the expression above has matched.
        _WILDCARDS.get(piece) or (fnmatch.translate(piece) if index % 2 else re.escape(piece))
        for index, piece in enumerate(pieces)
    ]
    return "".join(expression.removesuffix(r"\Z") for expression in expressions)
