"""Training documents, which are texts or conversations, from files or the hub.

A conversation is a list of messages, ``{"role": …, "content": …}``, whatever its stored form. A
message may also have ``thinking``, the reasoning before the answer, for templates that use it.
"""

import glob
import hashlib
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specjax.config import ConfigError
from specjax.progress import say
from specjax.text import read_json_lines
from specjax.training import written
from specjax.training.written import WrittenTokens

Message = dict[str, str]

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

_RECORD_FILES = {".jsonl", ".parquet"}
_NO_TEXT = {".json", ".gz", ".zst", ".zip", ".bz2", ".xz", ".safetensors", ".bin", ".arrow"}
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""The role names of ShareGPT, OpenAI and others, and the role that each stands for."""


REGENERATED_FROM = "regenerated_from"
"""The field in which ``specjax regenerate`` stores the `find_origin` of a record's source."""


@dataclass(frozen=True)
class Document:
    """A text or a conversation.

    Attributes:
        name: the name, which alone decides whether the document is held out. Records with the same
            origin have the same name.
        text: the text; None for a conversation.
        messages: the conversation; None for a text.
        origin: the value of the field `REGENERATED_FROM`; None if the record lacks it.
        written: the tokens that a target generated, if the record has them.
    """

    name: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    origin: str | None = None
    written: WrittenTokens | None = field(default=None, compare=False)


def find_files(source: str, argument: str = "data.source") -> list[Path]:
    """Return the files of a source that is not a hub id, sorted by name.

    Unfinished outputs of ``specjax regenerate`` and the notes beside its outputs are left out.

    Args:
        source: "stdlib", a file, a directory or a glob.
        argument: the name of the argument, for messages.

    Raises:
        ConfigError: The source has no files.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [
            f
            for f in root.rglob("*.py")
            if not _STDLIB_SKIPPED.intersection(f.relative_to(root).parts)
        ]
    elif Path(source).is_dir():
        files = [f for f in Path(source).rglob("*") if f.is_file()]
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
    if not files:
        raise ConfigError(
            f"{argument}={source!r}: it has no files; give 'stdlib', a file, a directory, a glob,"
            " hf:OWNER/NAME"
        )
    return sorted(files)


def read_documents(source: str, argument: str = "data.source") -> list[Document]:
    """Read the documents of a source, in a fixed order.

    Args:
        source: files as for `find_files`, or a data set of the hub: ``hf:OWNER/NAME`` or
            ``hf:OWNER/NAME:SPLIT``, with the split "train" by default. Each record of a ``.jsonl``
            or ``.parquet`` file is a document; any other file is a text.
        argument: the name of the argument, for messages.

    Raises:
        InputError: The source has no documents, a line is not JSON, or a record is neither a text
            nor a conversation.
    """
    if source.startswith("hf:"):
        return list(_of_hub(source, argument))
    documents: list[Document] = []
    for file in find_files(source, argument):
        if file.suffix in _NO_TEXT:
            raise ConfigError(
                f"{argument}={source!r}: {file.name} is not text, JSONL or Parquet; convert it to"
                " JSON lines"
            )
        if file.suffix in _RECORD_FILES:
            documents += _of_records(file)
        else:  # bytes that are not UTF-8 become the replacement character
            documents.append(
                Document(
                    "/".join(file.parts[-2:]),
                    text=file.read_text(encoding="utf-8", errors="replace"),
                )
            )
    return documents


def parse_record(record: Any, where: str) -> Document:
    """Parse a record as a document.

    Args:
        record: a mapping with ``text``, or with ``messages`` or ``conversations`` in the form of
            OpenAI (role, content) or ShareGPT (from, value). It may also have the tokens that a
            target generated (`specjax.training.written`).
        where: the place of the record, for messages. It is the name of the document unless the
            record has `REGENERATED_FROM`.

    Raises:
        ConfigError: The record is not a document, or its tokens are damaged.
    """
    if isinstance(record, Mapping):
        origin = record[REGENERATED_FROM] if isinstance(record.get(REGENERATED_FROM), str) else None
        name = origin or where
        for kind in ("messages", "conversations"):
            if isinstance(record.get(kind), Sequence) and not isinstance(record[kind], str):
                messages = tuple(_message(entry, f"{where}: {kind}") for entry in record[kind])
                return Document(
                    name, messages=messages, origin=origin, written=written.parse(record, where)
                )
        if isinstance(record.get("text"), str):
            return Document(
                name, text=record["text"], origin=origin, written=written.parse(record, where)
            )
    fields = ", ".join(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
    raise ConfigError(
        f"{where}: it has {fields}; a record needs text, or messages or conversations, a list of"
        " messages"
    )


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
    origin = [] if document.origin is None else [document.origin]
    return json.dumps([document.text, document.messages, *origin], sort_keys=True)


def hash_of(content: str) -> str:
    """Return 128 bits of the SHA-256 hash of a text, as hexadecimal digits."""
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _message(entry: Any, where: str) -> Message:
    if isinstance(entry, Mapping):
        role = entry.get("role", entry.get("from"))
        content = entry.get("content", entry.get("value"))
        if isinstance(content, str) and isinstance(role, str):
            if role.lower() not in _ROLES:
                raise ConfigError(f"{where}: role {role!r}: it must be one of {', '.join(_ROLES)}")
            message = {"role": _ROLES[role.lower()], "content": content}
            thinking = entry.get("thinking")
            if isinstance(thinking, str) and thinking:
                return message | {"thinking": thinking}
            return message
    raise ConfigError(
        f"{where}: a message needs role and content, or from and value, and both must be text"
    )


def _of_records(file: Path) -> Iterator[Document]:
    name = "/".join(file.parts[-2:])
    if file.suffix == ".parquet":
        from datasets import Dataset

        try:
            records = Dataset.from_parquet(str(file))
        except Exception as error:  # pyarrow and datasets raise unrelated types for damaged files
            raise ConfigError(
                f"{file}: it cannot be read as Parquet ({type(error).__name__}); create it again"
            ) from None
        yield from (
            parse_record(record, f"{name}:{index}") for index, record in enumerate(records, 1)
        )
        return
    for line, record in read_json_lines(file):
        yield parse_record(record, f"{name}:{line}")


def _of_hub(source: str, argument: str) -> Iterator[Document]:
    _, name, *split = source.split(":")
    from datasets import load_dataset

    try:
        records = load_dataset(name, split=":".join(split) or "train")
    except Exception as error:  # the hub's client raises a dozen unrelated types
        raise ConfigError(
            f"{argument}={source!r}: it cannot be loaded from the hub ({type(error).__name__});"
            " check the spelling, the split, the network, and for gated data the login"
        ) from None
    for index, record in enumerate(records):
        yield parse_record(record, f"{name}:{index}")
