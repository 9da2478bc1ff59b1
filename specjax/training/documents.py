"""Training documents, which are texts or conversations, from files or the hub."""

import codecs
import glob
import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from specjax import stored_folders, stores
from specjax.config import ConfigError
from specjax.progress import say
from specjax.training import written
from specjax.training.records import Document, parse_record
from specjax.training.unusable import RecordTally, UnusableRecordError

_STDLIB_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
"""Folders of the standard library that are left out.

They are tests, which some distributions of Python lack, installed packages, and generated tables.
"""

Record = tuple[str, str, Any]
"""The place of a record, the name of its document, and the record.

The record is a JSON value, the text of a file without records, or an `UnusableRecordError`.
"""

_RECORD_FILES = {".jsonl", ".json", ".parquet"}
_NO_TEXT = {".gz", ".zst", ".zip", ".bz2", ".xz", ".safetensors", ".bin", ".arrow"}
_NO_DATA = ("readme", "dataset_infos.json")
"""The beginnings of the names of files that describe a data set and are not part of it."""


def find_files(source: str, argument: str = "data.source") -> list[Path]:
    """Return the files of a source that is not a hub id, sorted by name.

    Unfinished outputs of ``specjax regenerate`` and the notes beside its outputs are left out. So
    are hidden files and READMEs, unless the source is the name of the file itself.

    Args:
        source: "stdlib", a file, a directory or a glob, also in a bucket (``s3://``, ``gs://``):
            its files are copied into a cache.
        argument: the name of the argument, for messages.

    Raises:
        ConfigError: The source has no files.
    """
    root: Path | None = None
    is_file = Path(source).is_file()
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [
            f
            for f in root.rglob("*.py")
            if not _STDLIB_SKIPPED.intersection(f.relative_to(root).parts)
        ]
    elif stores.is_url(source):
        fetched = stored_folders.fetch(source, argument)
        root, files, is_file = fetched.directory, list(fetched.files), fetched.is_object
    elif Path(source).is_dir():
        root = Path(source)
        files = [f for f in root.rglob("*") if f.is_file()]
    else:
        files = [Path(f) for f in glob.glob(source, recursive=True) if Path(f).is_file()]
    if source != "stdlib":
        unfinished = [file.name for file in files if file.name.endswith(f".jsonl{written.BEGUN}")]
        if unfinished:
            say(
                f"{argument}={source!r}: these files are skipped, as they are unfinished:"
                f" {', '.join(sorted(unfinished))}"
            )
        files = [file for file in files if not written.is_beside(file)]
        if not is_file:
            files = _without_descriptions(files, source, argument, root)
    if not files:
        raise ConfigError(
            f"{argument}={source!r}: it has no files; give 'stdlib', a file, a directory, a glob,"
            " s3://BUCKET/PATH, gs://BUCKET/PATH, hf:OWNER/NAME"
        )
    return sorted(files)


def _without_descriptions(
    files: Sequence[Path], source: str, argument: str, root: Path | None
) -> list[Path]:
    """Return the files without hidden ones and READMEs, and print the names of READMEs."""
    # Folders above the source may be hidden: a cache is often below ~/.cache.
    depth = len(root.parts) if root is not None else 0
    shown = [
        file
        for file in files
        if not any(part.startswith(".") for part in (file.parts[depth:] if depth else [file.name]))
    ]
    described = [file for file in shown if file.name.lower().startswith(_NO_DATA)]
    if described:
        say(
            f"{argument}={source!r}: these files are skipped, as they describe the data:"
            f" {', '.join(sorted({file.name for file in described}))}"
        )
    return [file for file in shown if file not in described]


def read_documents(
    source: str, argument: str = "data.source", tally: RecordTally | None = None
) -> list[Document]:
    """Read the documents of a source, in a fixed order.

    Records that cannot be used are left out, up to a share of all records.

    Args:
        source: files as for `find_files`, or a data set of the hub: ``hf:OWNER/NAME``,
            ``hf:OWNER/NAME:SPLIT`` or ``hf:OWNER/NAME@CONFIG:SPLIT``, with the split "train" by
            default. Each record of a ``.jsonl``, ``.json`` or ``.parquet`` file is a document; any
            other file is a text.
        argument: the name of the argument, for messages.
        tally: counts the records and those that are left out, for a caller that reports them. None:
            they are reported here, and the default limit holds.

    Raises:
        InputError: The source has no documents, or too many records cannot be used.
    """
    counted = RecordTally(source, argument) if tally is None else tally
    documents = list(iterate_documents(source, argument, counted))
    counted.check()
    if tally is None:
        counted.report()
    return documents


def iterate_documents(source: str, argument: str, tally: RecordTally) -> Iterator[Document]:
    """Yield the documents of `read_documents` one by one. The caller checks the tally at the end.

    Args:
        source: as for `read_documents`.
        argument: the name of the argument, for messages.
        tally: counts the records and those that are left out.
    """
    return parse_documents(read_records(source, argument), tally)


def parse_documents(records: Iterable[Record], tally: RecordTally) -> Iterator[Document]:
    """Yield the documents of records one by one, without those that cannot be used.

    Args:
        records: some of the records of `read_records`.
        tally: counts the records and those that are left out.
    """
    for where, name, record in records:
        tally.total += 1
        try:
            if isinstance(record, UnusableRecordError):
                raise record
            if isinstance(record, _FileText):
                yield Document(name, text=str(record), where=where)
            else:
                yield parse_record(record, where, tally.ignored)
        except UnusableRecordError as error:
            tally.leave_out(error)


def hash_of_source(source: str) -> str:
    """Return a hash of the content of a source, and of the names of its files."""
    if source.startswith("hf:"):
        return f"{source} {getattr(_hub_table(source, 'data.source'), '_fingerprint', None)}"
    digest = hashlib.sha256()
    for file in find_files(source):
        with file.open("rb") as content:
            of_file = hashlib.file_digest(content, "sha256").hexdigest()
        name = "/".join(file.parts[-2:])
        digest.update(f"{name!r} {of_file}\n".encode(errors="replace"))
    return digest.hexdigest()


def check_one_kind(documents: Sequence[Document], source: str) -> bool:
    """Return whether the documents are conversations.

    Args:
        documents: the documents of a source.
        source: the argument and its value, for messages.

    Raises:
        ConfigError: Some are texts and some are conversations.
    """
    text = next((document for document in documents if document.messages is None), None)
    chat = next((document for document in documents if document.messages is not None), None)
    if text is not None and chat is not None:
        raise ConfigError(
            f"{source}: it has both texts and conversations; give one kind ({text.place} is a text,"
            f" {chat.place} a conversation)"
        )
    return chat is not None


def find_origin(document: Document) -> str:
    """Return a name for a document that all documents regenerated from it inherit.

    It is a hash of the content, or the origin that the document itself has inherited. Equal
    documents have the same origin.
    """
    return document.origin or hash_of(_content(document))


def identities(documents: Sequence[Document]) -> list[str]:
    """Return a unique id for each document, a hash of its content.

    The hash of the k-th of several equal documents includes k. So the ids are unique, and the set
    of ids does not depend on the order of the documents.
    """
    counts: Counter[str] = Counter()
    ids = []
    for document in documents:
        content = _content(document)
        ids.append(hash_of(f"{counts[content]} {content}"))
        counts[content] += 1
    return ids


def _content(document: Document) -> str:
    optional = [part for part in (document.origin, document.tools) if part]
    return json.dumps([document.text, document.messages, *optional], sort_keys=True, default=str)


def hash_of(content: str) -> str:
    """Return 128 bits of the SHA-256 hash of a text, as hexadecimal digits."""
    return hashlib.sha256(content.encode()).hexdigest()[:32]


# --- the records of files and of the hub ----------------------------------------------------------


class _FileText(str):
    """The text of a file that has no records."""


def read_records(source: str, argument: str) -> Iterator[Record]:
    """Yield the records of `read_documents` one by one.

    Args:
        source: as for `read_documents`.
        argument: the name of the argument, for messages.

    Raises:
        ConfigError: The source has no files, or one that cannot be read.
    """
    if source.startswith("hf:"):
        yield from _of_hub(source, argument)
        return
    for file in find_files(source, argument):
        if file.suffix in _NO_TEXT:
            raise ConfigError(
                f"{argument}={source!r}: {file.name} is not text, JSON or Parquet; convert it to"
                " JSON lines"
            )
        name = "/".join(file.parts[-2:])
        if file.suffix == ".parquet":
            yield from _of_table(_parquet(file), name, first=1)
        elif file.suffix in _RECORD_FILES:
            is_array = file.suffix == ".json" and _first_character(file) == "["
            yield from _of_array(file, name) if is_array else _of_lines(file, name)
        else:  # bytes that are not UTF-8 become the replacement character
            text = file.read_text(encoding="utf-8", errors="replace")
            yield name, name, _FileText(text)


def _of_lines(file: Path, name: str) -> Iterator[Record]:
    r"""Yield the records of JSON lines. Lines end only at "\n"; U+2028 belongs to the text."""
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{name}:{number}"
            try:
                content = line.removeprefix(codecs.BOM_UTF8 if number == 1 else b"")
                yield where, where, json.loads(content.decode("utf-8").rstrip("\r\n"))
            except UnicodeDecodeError as error:
                yield where, where, UnusableRecordError(where, f"not UTF-8 text ({error.reason})")
            except json.JSONDecodeError as error:
                yield where, where, UnusableRecordError(where, f"not JSON ({error.msg})")
            except (ValueError, RecursionError) as error:  # a number or a nesting without end
                yield where, where, UnusableRecordError(where, f"not JSON ({error})")


def _of_array(file: Path, name: str) -> Iterator[Record]:
    """Yield the records of one JSON array, with the lines at which they begin.

    Raises:
        ConfigError: The file is not a JSON array.
    """
    try:
        text = file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 text ({error}); convert it") from None
    decoder, position, line, index = json.JSONDecoder(), text.index("[") + 1, 1, 0
    counted = 0  # the position up to which lines are counted
    while True:
        position = _after_space(text, position)
        line, counted = line + text.count("\n", counted, position), position
        if text[position : position + 1] == "]":
            return
        index += 1
        where = f"{name}:{line} (record {index})"
        try:
            record, position = decoder.raw_decode(text, position)
            position = _after_space(text, position)
            if text[position : position + 1] not in ("]", ","):
                raise ValueError("a comma or ] is missing after the record")
        except (ValueError, RecursionError) as error:
            # How many records are lost is not known, so no share of them can be allowed.
            raise ConfigError(
                f"{where}: not JSON ({error}), and nothing after it can be read; correct it, or"
                " convert the file to JSON lines"
            ) from None
        yield where, where, record
        position += text[position] == ","


def _after_space(text: str, position: int) -> int:
    """Return the first position from ``position`` on that is no white space of JSON."""
    while text[position : position + 1] in _SPACE:
        position += 1
    return position


_SPACE = frozenset(" \t\r\n")


def _first_character(file: Path) -> str:
    with file.open(encoding="utf-8-sig", errors="replace") as content:
        return content.read(4096).lstrip()[:1]


def _parquet(file: Path) -> Iterable[Any]:
    from datasets import Dataset

    try:
        return Dataset.from_parquet(str(file))
    except Exception as error:  # pyarrow and datasets raise unrelated types for damaged files
        raise ConfigError(
            f"{file}: it cannot be read as Parquet ({type(error).__name__}); create it again"
        ) from None


def _of_table(records: Iterable[Any], name: str, first: int) -> Iterator[Record]:
    for index, record in enumerate(records, first):
        where = f"{name}:{index}"
        yield where, where, _without_nulls(record)


def _without_nulls(value: Any) -> Any:
    """Return a value without the null fields of its objects.

    All rows of a table have the same fields, so those that a row lacks are null.
    """
    if isinstance(value, Mapping):
        return {key: _without_nulls(part) for key, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


def _of_hub(source: str, argument: str) -> Iterator[Record]:
    name = source.removeprefix("hf:").partition(":")[0]
    yield from _of_table(_hub_table(source, argument), name, first=0)


def _hub_table(source: str, argument: str) -> Iterable[Any]:
    name, _, split = source.removeprefix("hf:").partition(":")
    repository, _, config = name.partition("@")
    from datasets import load_dataset

    try:
        arguments = [repository, config] if config else [repository]
        return load_dataset(*arguments, split=split or "train")
    except Exception as error:  # the hub's client raises a dozen unrelated types
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise ConfigError(
            f"{argument}={source!r}: it cannot be loaded from the hub ({reason}); check the"
            " spelling, the configuration and the split (hf:OWNER/NAME@CONFIG:SPLIT), the network,"
            " and for gated data the login"
        ) from None
