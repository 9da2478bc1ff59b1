"""Odd records and what becomes of each: a table as data, which docs/guides/odd-records.md shows."""

import json
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from specjax.training import chat
from specjax.training.documents import read_documents
from specjax.training.tokenizer import train_tokenizer
from specjax.training.unusable import RecordTally, UnusableRecordError
from tests.documents import ROOT

TABLE = json.loads(Path(__file__).with_name("odd_records.json").read_text())
PAGE = ROOT / "docs" / "guides" / "odd-records.md"
TEMPLATE = (
    "{% if tools %}<tools>{{ tools | map(attribute='function.name') | join(',') }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.role == 'assistant' %}{% generation %}"
    "{% if m.thinking %}<think>{{ m.thinking }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}"
    "<call>{{ call.function.name }} {{ call.function.arguments | tojson }}{% endfor %}"
    "<end>{% endgeneration %}"
    "{% else %}{{ m.content }}<end>{% endif %}{% endfor %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer of bytes, so that no token is learnt in part."""
    byte_tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=train_tokenizer([], 257), eos_token="<|endoftext|>"
    )
    byte_tokenizer.chat_template = TEMPLATE
    return byte_tokenizer


def outcome(line: str, tokenizer, folder: Path) -> str:
    """Return what a training learns of a line: the text, with brackets around what is learnt."""
    file = folder / "file.jsonl"
    file.write_text(line + "\n")
    tally = RecordTally(str(file), limit=1)
    documents = read_documents(str(file), tally=tally)
    assert tally.total == 1
    try:
        if tally.unusable:
            raise tally.unusable[0]
        (document,) = documents
        if document.messages is None:
            return f"the text {json.dumps(document.text)}"
        ids, learnt = chat.encode_document(tokenizer, document, responses_only=True)
    except UnusableRecordError as error:
        assert error.where == f"{folder.name}/file.jsonl:1"
        return f"left out: {error.reason.replace(folder.name, '')}"
    edges = np.flatnonzero(np.diff(np.concatenate([[False], learnt, [False]])))
    text = tokenizer.decode(ids)
    assert len(text) == len(ids)
    pieces = [text[begin:end] for begin, end in zip([0, *edges], [*edges, len(ids)], strict=True)]
    marked = "".join(f"[{piece}]" if index % 2 else piece for index, piece in enumerate(pieces))
    marked = marked.replace("\n", "\\n")
    ignored = ", ".join(tally.ignored)
    return f"{marked}; ignored: {ignored}" if ignored else marked


@pytest.mark.parametrize("row", TABLE, ids=[row["what"] for row in TABLE])
def test_what_becomes_of_a_record(row, tokenizer, tmp_path) -> None:
    assert outcome(row["line"], tokenizer, tmp_path) == row["becomes"]


def test_the_guide_has_the_table() -> None:
    assert len(TABLE) >= 40 and len({row["line"] for row in TABLE}) == len(TABLE)
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    assert rows == [table_row(row) for row in TABLE]


def table_row(row: dict[str, str]) -> str:
    line, becomes = (row[name].replace("|", "\\|") for name in ("line", "becomes"))
    if becomes.startswith("left out: "):
        return f"| {row['what']} | `{line}` | {becomes} |"
    return f"| {row['what']} | `{line}` | `{becomes}` |"
