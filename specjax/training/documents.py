"""What is trained on: documents, which are texts or conversations, from files or the hub.

A conversation is a list of messages, ``{"role": …, "content": …}``, whatever form it was stored in. What was thought before an
answer may stand beside it as ``thinking``, for templates that write it.
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

_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "__pycache__"}
"""Not prose in code form: tests (absent from some distributions' Python), installed packages, and generated tables."""

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
"""The roles that ShareGPT, OpenAI and others write, and the role that is meant."""


REGENERATED_FROM = "regenerated_from"
"""The field in which ``specjax regenerate`` keeps the origin of a record: `find_origin` of the document that it was written
after."""


@dataclass(frozen=True)
class Document:
    """A text or a conversation; one of the two.

    Attributes:
        name: decides whether it is held out; the same wherever the others lie. Records of one origin have one name.
        text: the text.
        messages: the conversation.
        origin: of a record that ``specjax regenerate`` wrote, what `REGENERATED_FROM` says.
        written: the tokens that it was written in, where its record has them.
    """

    name: str
    text: str | None = None
    messages: tuple[Message, ...] | None = None
    origin: str | None = None
    written: WrittenTokens | None = field(default=None, compare=False)


def find_files(source: str, argument: str = "data.source") -> list[Path]:
    """The files of a ``source`` that is no hub id: "stdlib", a file, a directory or a glob; sorted by name.

    What ``specjax regenerate`` has not finished is left out, and so are the notes that it keeps beside its outputs.

    Raises:
        ConfigError: there are none; names the ``argument`` that gave it.
    """
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = [f for f in root.rglob("*.py") if not _STDLIB_SKIPPED.intersection(f.relative_to(root).parts)]
    elif Path(source).is_dir():
        files = [f for f in Path(source).rglob("*") if f.is_file()]
    else:
        files = [Path(f) for f in glob.glob(source, recursive=True) if Path(f).is_file()]
    if source != "stdlib":
        unfinished = [file.name for file in files if file.name.endswith(f".jsonl{written.BEGUN}")]
        if unfinished:
            say(f"{argument}={source!r}: not read, as they are still being written: {', '.join(sorted(unfinished))}")
        files = [file for file in files if not written.is_beside(file)]
    if not files:
        raise ConfigError(f"{argument}={source!r}: no files there; give 'stdlib', a file, a directory, a glob, hf:OWNER/NAME")
    return sorted(files)


def read_documents(source: str, argument: str = "data.source") -> list[Document]:
    """The documents of ``source``, in an order that is the same each time.

    Args:
        source: files as for `find_files`: of ``.jsonl`` and ``.parquet`` files every record is a document, of others every file
            is a text. Or ``hf:OWNER/NAME`` or ``hf:OWNER/NAME:SPLIT``, a data set of the hub; the split is "train" by default.
        argument: gave it.

    Raises:
        InputError: there are none, a line is no JSON, or a record is neither a text nor a conversation.
    """
    if source.startswith("hf:"):
        return list(_of_hub(source, argument))
    documents: list[Document] = []
    for file in find_files(source, argument):
        if file.suffix in _NO_TEXT:
            raise ConfigError(f"{argument}={source!r}: {file.name} is no text, JSONL or Parquet: write JSON lines")
        if file.suffix in _RECORD_FILES:
            documents += _of_records(file)
        else:  # bytes that are not UTF-8 become the replacement character
            documents.append(Document("/".join(file.parts[-2:]), text=file.read_text(encoding="utf-8", errors="replace")))
    return documents


def parse_record(record: Any, where: str) -> Document:
    """The document in a record: ``text``; or ``messages`` or ``conversations``, as OpenAI (role, content) or ShareGPT (from,
    value) write them. Its name is ``where``, or what `REGENERATED_FROM` says. Beside it may be the tokens that it was written
    in, `specjax.training.written`.

    Raises:
        ConfigError: it is none of these, or its tokens are damaged; ``where`` says which record it is.
    """
    if isinstance(record, Mapping):
        origin = record[REGENERATED_FROM] if isinstance(record.get(REGENERATED_FROM), str) else None
        name = origin or where
        for kind in ("messages", "conversations"):
            if isinstance(record.get(kind), Sequence) and not isinstance(record[kind], str):
                messages = tuple(_message(entry, f"{where}: {kind}") for entry in record[kind])
                return Document(name, messages=messages, origin=origin, written=written.parse(record, where))
        if isinstance(record.get("text"), str):
            return Document(name, text=record["text"], origin=origin, written=written.parse(record, where))
    fields = ", ".join(map(str, record)) if isinstance(record, Mapping) else type(record).__name__
    raise ConfigError(f"{where}: has {fields}; a record needs text, or messages or conversations, a list of messages")


def find_origin(document: Document) -> str:
    """The same for all that is written after ``document``, rewritten any number of times, and for documents equal to it.

    A hash of its content; where it was itself written after another, the origin of that one.
    """
    return document.origin or hash_of(_content(document))


def identities(documents: Sequence[Document]) -> list[str]:
    """What tells each document from the others wherever it lies: a hash of its content.

    Into that of the k-th of equal documents its number is folded, so that each has its own, and all of them together the same
    in any order.
    """
    before: Counter[str] = Counter()
    found = []
    for document in documents:
        content = _content(document)
        found.append(hash_of(f"{before[content]} {content}"))
        before[content] += 1
    return found


def _content(document: Document) -> str:
    origin = [] if document.origin is None else [document.origin]
    return json.dumps([document.text, document.messages, *origin], sort_keys=True)


def hash_of(content: str) -> str:
    """128 bits of it, in hexadecimal digits."""
    return hashlib.sha256(content.encode()).hexdigest()[:32]


def _message(entry: Any, where: str) -> Message:
    if isinstance(entry, Mapping):
        role, content = entry.get("role", entry.get("from")), entry.get("content", entry.get("value"))
        if isinstance(content, str) and isinstance(role, str):
            if role.lower() not in _ROLES:
                raise ConfigError(f"{where}: role {role!r}: must be one of {', '.join(_ROLES)}")
            message = {"role": _ROLES[role.lower()], "content": content}
            thinking = entry.get("thinking")
            return message | {"thinking": thinking} if isinstance(thinking, str) and thinking else message
    raise ConfigError(f"{where}: a message needs role and content, or from and value, and both must be text")


def _of_records(file: Path) -> Iterator[Document]:
    name = "/".join(file.parts[-2:])
    if file.suffix == ".parquet":
        from datasets import Dataset

        try:
            records = Dataset.from_parquet(str(file))
        except Exception as error:  # pyarrow and datasets raise whatever a damaged file makes them stumble over
            raise ConfigError(f"{file}: cannot be read as Parquet ({type(error).__name__}): make it again") from None
        yield from (parse_record(record, f"{name}:{number}") for number, record in enumerate(records, 1))
        return
    for number, record in read_json_lines(file):
        yield parse_record(record, f"{name}:{number}")


def _of_hub(source: str, argument: str) -> Iterator[Document]:
    _, name, *split = source.split(":")
    from datasets import load_dataset

    try:
        records = load_dataset(name, split=":".join(split) or "train")
    except Exception as error:  # the hub's client raises a dozen unrelated types
        raise ConfigError(
            f"{argument}={source!r}: the hub did not give it ({type(error).__name__}): check the spelling, the split, the "
            "network, and for gated data the login"
        ) from None
    for number, record in enumerate(records):
        yield parse_record(record, f"{name}:{number}")
