"""Objects in buckets: ``s3://`` (Amazon S3 and servers with its API) and ``gs://`` (Google's).

Everything goes through `Store`, which reads and writes whole objects with obstore. A rename is not
atomic in a bucket, and does not exist for a folder. But a write may depend on the version that it
replaces (`Store.write_if`), and `specjax.stored_folders` makes folders from that.
"""

import importlib.util
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from specjax.errors import InputError
from specjax.files import writing

SCHEMES = ("s3", "gs")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://?(.*)", re.DOTALL)
_PIECE = 2**24
"""The bytes of a request. A whole object may take longer than a connection lives."""
_THREADS = 8


def is_url(location: str | Path) -> bool:
    """Return whether a location is a URL, such as ``s3://bucket/runs``, and not a path.

    Examples:
        >>> from specjax.stores import is_url
        >>> is_url("s3://bucket/runs"), is_url("runs/model"), is_url("eagle3:runs/model")
        (True, False, False)
    """
    return isinstance(location, str) and "://" in location and bool(_URL.match(location))


class ChangedError(Exception):
    """A conditional write that did not happen, because the object has another version."""


class ReplacedError(InputError):
    """An object that was replaced or deleted while it was read."""


class Version(NamedTuple):
    """The version of an object; of an S3 object the tag, of a Google object the generation too."""

    e_tag: str | None
    generation: str | None


@dataclass(frozen=True)
class StoredObject:
    """An object in a bucket.

    Attributes:
        name: its name below the store's prefix.
        size: its bytes.
        e_tag: the tag of its content; None if the store has none.
    """

    name: str
    size: int
    e_tag: str | None


class Store:
    """The objects below a prefix of a bucket.

    Attributes:
        url: ``s3://BUCKET/PREFIX`` or ``gs://BUCKET/PREFIX``, without a slash at the end.
        argument: the name of the user's argument, for messages.

    Raises:
        InputError: The URL has another scheme or no bucket, or the package obstore is missing.
            Every method raises it for a bucket that does not exist, for missing or wrong
            credentials, and if the store cannot be reached.
    """

    def __init__(self, url: str, argument: str) -> None:
        self.url, self.argument = url if url.endswith("://") else url.rstrip("/"), argument
        self.scheme, self.bucket, self.prefix = _parts(self.url, argument)
        self._shown = f"{argument}={url!r}"
        if importlib.util.find_spec("obstore") is None:
            raise InputError(
                f"{self._shown}: needs the package obstore: pip install 'specjax[stores]'"
            )
        with self._explaining():
            self._store = _open(self.scheme, self.bucket, self.prefix)

    def objects(self) -> list[StoredObject]:
        """Return the objects below the prefix, sorted by name."""
        import obstore

        with self._explaining():
            stored = [
                StoredObject(entry["path"], entry["size"], entry["e_tag"])
                for entries in obstore.list(self._store, chunk_size=1000)
                for entry in entries
            ]
        # Consoles create empty objects whose names end with a slash, to show folders.
        return sorted(
            (entry for entry in stored if entry.name and not entry.name.endswith("/")),
            key=lambda entry: entry.name,
        )

    def find(self, name: str) -> StoredObject | None:
        """Return the object of this name, or None."""
        import obstore

        with self._explaining():
            try:
                entry = obstore.head(self._store, name)
            except FileNotFoundError:
                return None
            return StoredObject(name, entry["size"], entry["e_tag"])

    def read(self, name: str) -> tuple[bytes, Version] | None:
        """Return the content of a small object and its version, or None if there is none."""
        import obstore

        with self._explaining():
            try:
                result = obstore.get(self._store, name)
            except FileNotFoundError as error:
                if _lacks_bucket(error):
                    raise
                return None
            version = Version(result.meta["e_tag"], result.meta["version"])
            return bytes(result.bytes()), version

    def write_if(self, name: str, content: bytes, version: Version | None) -> Version:
        """Write a small object if its version is this one; None if it must not exist.

        The store decides between several writers, so that one of them succeeds.

        Args:
            name: the name of the object.
            content: its content, which no other writer would write: a write whose answer was lost
                is recognised by it.
            version: the version to replace.

        Raises:
            ChangedError: The object has another version, and was not written.
        """
        import obstore
        from obstore import exceptions

        if version is None:
            mode: Any = "create"
        else:
            stated = {"e_tag": version.e_tag, "version": version.generation}
            mode = {key: value for key, value in stated.items() if value is not None}
        with self._explaining():
            try:
                result = obstore.put(self._store, name, content, mode=mode)
                return Version(result["e_tag"], result["version"])
            except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
                # A write whose answer was lost is repeated, and then finds itself.
                present = self.read(name)
                if present is None or present[0] != content:
                    raise ChangedError(name) from error
                return present[1]

    def upload(self, name: str, file: Path) -> None:
        """Write a file as one object. It appears when it is complete."""
        import obstore

        with self._explaining():
            obstore.put(self._store, name, file, max_concurrency=_THREADS)

    def download(self, stored: StoredObject, file: Path) -> None:
        """Write an object to a file, which appears when it is complete.

        Raises:
            ReplacedError: The object has been replaced or deleted.
        """
        import obstore

        condition: Any = {} if stored.e_tag is None else {"if_match": stored.e_tag}
        with writing(file, stored.size) as scratch, scratch.open("wb") as content:
            content.truncate(stored.size)

            def fetch(begin: int) -> None:
                end = min(begin + _PIECE, stored.size)
                options: Any = {**condition, "range": (begin, end)}
                received = obstore.get(self._store, stored.name, options=options).bytes()
                if len(received) != end - begin:
                    raise ReplacedError(f"{self._shown}: {_replaced(stored.name)}")
                os.pwrite(content.fileno(), received, begin)

            with self._explaining(stored.name), ThreadPoolExecutor(_THREADS) as threads:
                # The list raises the first error of the pieces.
                list(threads.map(fetch, range(0, stored.size, _PIECE)))

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects. Those that do not exist are ignored."""
        import obstore

        if not names:
            return
        with self._explaining():
            try:
                obstore.delete(self._store, list(names))
            except FileNotFoundError as error:
                if _lacks_bucket(error):
                    raise

    def error(self, reason: str) -> InputError:
        """Return an error about this store."""
        return InputError(f"{self._shown}: {reason}")

    @contextmanager
    def _explaining(self, name: str = "") -> Iterator[None]:
        """Convert errors of obstore into one line with the remedy."""
        try:
            yield
        except (InputError, ChangedError):
            raise
        # obstore raises its own types and built-in ones. Their messages have a hundred lines.
        except Exception as error:
            if not _is_of_store(error):
                raise
            if _was_replaced(error):
                raise ReplacedError(f"{self._shown}: {_replaced(name)}") from error
            raise self.error(_explain(error, self.scheme, self.bucket)) from error


def _parts(url: str, argument: str) -> tuple[str, str, str]:
    """Return the scheme, the bucket and the prefix of a URL.

    Raises:
        InputError: The scheme is not supported, or there is no bucket.
    """
    match = _URL.fullmatch(url)
    scheme, rest = (match[1].lower(), match[2]) if match else ("", url)
    bucket, _, prefix = rest.partition("/")
    if scheme not in SCHEMES:
        hint = "write gs://; " if scheme in ("gcs", "gcp") else ""
        raise InputError(
            f"{argument}={url!r}: {scheme}:// is not supported; {hint}give a local path,"
            " s3://BUCKET/PATH or gs://BUCKET/PATH"
        )
    if not bucket:
        raise InputError(f"{argument}={url!r}: it has no bucket; write {scheme}://BUCKET/PATH")
    if any(part in ("", ".", "..") for part in prefix.split("/")) and prefix:
        raise InputError(
            f"{argument}={url!r}: a part of the path is empty, '.' or '..'; write"
            f" {scheme}://BUCKET/PATH"
        )
    return scheme, bucket, prefix


def _open(scheme: str, bucket: str, prefix: str) -> Any:
    """Open a bucket. The variables of the environment are those of each provider's own tools."""
    from obstore.store import GCSStore, S3Store

    # A whole piece must arrive within the timeout, also over a slow connection.
    client: Any = {"timeout": "5 minutes", "connect_timeout": "10 seconds"}
    if scheme == "gs":
        endpoint = os.environ.get("GOOGLE_BASE_URL", "")
        client["allow_http"] = endpoint.startswith("http://")
        return GCSStore(bucket, prefix=prefix or None, client_options=client)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
    client["allow_http"] = endpoint.startswith("http://")
    options: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    if (provider := _profile()) is not None:
        options["credential_provider"] = provider
    return S3Store(bucket, prefix=prefix or None, client_options=client, **options)


_AWS_VARIABLES = (
    *("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE"),
    *("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI"),
)
"""The variables with which obstore needs no help to find credentials."""


def _profile() -> Any:
    """Return the credentials of a profile in ``~/.aws``, which boto3 reads; None without one."""
    if any(os.environ.get(name) for name in _AWS_VARIABLES):
        return None
    if importlib.util.find_spec("boto3") is None:
        return None
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = boto3.Session()
    return None if session.get_credentials() is None else Boto3CredentialProvider(session)


def _is_of_store(error: Exception) -> bool:
    """Return whether an error is one of obstore, which also raises built-in types."""
    from obstore.exceptions import BaseError

    return isinstance(error, BaseError | FileNotFoundError) and "Debug source" in str(error)


_CREDENTIALS = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; for a profile of ~/.aws, pip install"
    " boto3",
    "gs": "run gcloud auth application-default login, or set GOOGLE_APPLICATION_CREDENTIALS to the"
    " file of a key",
}
_REFUSED = (
    *("AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"),
    *("403 Forbidden", "401 Unauthorized", "InvalidToken"),
)


def _was_replaced(error: Exception) -> bool:
    """Return whether an object is not the one that was listed."""
    from obstore.exceptions import PreconditionError

    is_absent = isinstance(error, FileNotFoundError) and not _lacks_bucket(error)
    return is_absent or isinstance(error, PreconditionError)


def _replaced(name: str) -> str:
    return f"{name or 'an object'} was replaced or deleted while it was read; try again"


def _lacks_bucket(error: Exception) -> bool:
    text = str(error)
    return "NoSuchBucket" in text or "The specified bucket does not exist" in text


def _explain(error: Exception, scheme: str, bucket: str) -> str:
    """Return the reason of an error of obstore and its remedy, as one line."""
    text = str(error)
    code = re.search(r"<Code>(\w+)</Code>", text)
    if _lacks_bucket(error):
        return f"the bucket {bucket!r} does not exist; create it, or check the spelling"
    if "169.254.169.254" in text or "metadata.google" in text or "TokenRequest" in text:
        return f"there are no credentials for {scheme}://; {_CREDENTIALS[scheme]}"
    if any(word in text for word in _REFUSED):
        reason = f" ({code[1]})" if code else ""
        return (
            f"the store refuses the credentials{reason}: they are wrong, or they do not allow this;"
            f" {_CREDENTIALS[scheme]}"
        )
    reason = " ".join(text.partition("Debug source")[0].split())[:300]
    endpoint = "AWS_ENDPOINT_URL and AWS_REGION" if scheme == "s3" else "GOOGLE_BASE_URL"
    return f"{reason}; check the network, and {endpoint}"
