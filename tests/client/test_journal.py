"""Tests that a text continues from its journal, and from no other."""

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from specjax import SamplingParams
from specjax.client.exchange import Exchange, ExchangeRequest
from specjax.client.journal import Journal
from specjax.errors import InputError

PARAMS = SamplingParams(max_new_tokens=8, temperature=0.5, seed=3, eos_token_ids=(2,))
REQUEST = ExchangeRequest(prompt=(5, 6), params=PARAMS, target="a", drafter="b")


@pytest.fixture
def file(tmp_path) -> Path:
    return tmp_path / "text.json"


def kept(file: Path, *tokens: int) -> Journal:
    journal = Journal(file)
    exchange = journal.open(REQUEST)
    exchange.tokens += tokens
    journal.keep(exchange)
    return journal


def test_it_goes_on_where_it_was_left(file: Path) -> None:
    kept(file, 7, 8)
    again = kept(file, 9)
    exchange = again.open(REQUEST)
    assert (exchange.tokens, exchange.request, exchange.known) == ([5, 6, 7, 8, 9], REQUEST, 0)
    assert os.listdir(file.parent) == [file.name]
    assert json.loads(file.read_text())["committed"] == [7, 8, 9]


def test_the_file_has_the_names_that_it_always_had(file: Path) -> None:
    kept(file, 7)
    of_distribution = {"temperature": 0.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    expected = {"prompt": [5, 6], "limit": 8, **of_distribution, "seed": 3, "eos": [2]}
    expected |= {"target": "a", "drafter": "b", "precision": "float16"}
    assert json.loads(file.read_text()) == {"request": expected, "committed": [7]}


def test_a_file_of_an_older_client_is_gone_on_with(file: Path) -> None:
    request = {
        "prompt": [5, 6],
        "limit": 8,
        "temperature": 0,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": 3,
        "eos": None,
    }
    request |= {"target": "a", "drafter": "b", "precision": "int8"}
    file.write_text(json.dumps({"request": request, "committed": [7, 9]}))
    params = SamplingParams(max_new_tokens=8, seed=3)
    exchange = Journal(file).open(ExchangeRequest((5, 6), params, target="a", drafter="b"))
    assert exchange.tokens == [5, 6, 7, 9]
    del request["limit"]
    file.write_text(json.dumps({"request": request, "committed": []}))
    with pytest.raises(InputError, match="is not a journal"):
        Journal(file).open(ExchangeRequest((5, 6), SamplingParams(), target="a", drafter="b"))


def test_how_numbers_come_down_may_change(file: Path) -> None:
    kept(file, 7)
    assert Journal(file).open(replace(REQUEST, precision="int8")).tokens == [5, 6, 7]


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": (5, 7)},
        {"params": replace(PARAMS, max_new_tokens=9)},
        {"params": replace(PARAMS, temperature=0.0)},
        {"params": replace(PARAMS, top_k=3)},
        {"params": replace(PARAMS, top_p=0.5)},
        {"params": replace(PARAMS, min_p=0.5)},
        {"params": replace(PARAMS, seed=4)},
        {"params": replace(PARAMS, eos_token_ids=None)},
        {"target": "c"},
    ],
)
def test_a_journal_of_another_text_is_refused(change, file: Path) -> None:
    kept(file, 7)
    with pytest.raises(InputError, match=r"journal=.*text\.json.*another prompt"):
        Journal(file).open(replace(REQUEST, **change))
    assert json.loads(file.read_text())["committed"] == [7]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b"null",
        b'{"request": {}, "committed": []}',
        b'{"committed": []}',
        b'{"request": {"prompt": [5], "limit": 1}}',
        b'{"request": {"prompt": [5], "limit": 1}, "committed": ["a"]}',
        b'{"request": {"prompt": [5], "limit": 1}, "committed": 3}',
    ],
)
def test_what_is_no_journal_is_refused(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(InputError, match=r"journal=.*is not a journal"):
        Journal(file).open(REQUEST)
    assert file.read_bytes() == content


def test_tokens_that_no_text_has(file: Path) -> None:
    for wrong in ([-1], [2**31], [7] * 9):
        file.unlink(missing_ok=True)
        kept(file)
        snapshot = json.loads(file.read_text()) | {"committed": wrong}
        file.write_text(json.dumps(snapshot))
        with pytest.raises(InputError, match="is not a journal"):
            Journal(file).open(REQUEST)


def test_where_nothing_can_be_kept(file: Path) -> None:
    with pytest.raises(InputError, match="journal="):
        Journal(file.parent).open(REQUEST)
    with pytest.raises(InputError, match=r"journal=.*cannot be written"):
        Journal(file.parent / "not there" / "text.json").keep(Exchange(REQUEST))
