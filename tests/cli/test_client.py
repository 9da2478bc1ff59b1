"""Check what `specjax client` refuses before anything is loaded.

What it writes is tested in tests/client/test_served.py.
"""

import json
from types import SimpleNamespace

import pytest

from specjax import client
from specjax.cli.client import as_json, show, summary
from specjax.cli.main import main
from specjax.client import CommittedEvent, ProvisionalEvent, RetractedEvent, TextReport


@pytest.fixture
def _nothing_is_loaded(monkeypatch) -> None:
    def connect(*_, **__):
        raise AssertionError("something is loaded")

    monkeypatch.setattr(client, "connect", connect)


GIVEN = {"drafter": "eagle3:there", "target-parts": "there", "prompt": "import os"}


def refusal(capsys, **options: str) -> str:
    """Return the line with which ``specjax client`` refuses options."""
    words = [word for name, value in (GIVEN | options).items() for word in (f"--{name}", value)]
    assert main(["client", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("specjax: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.usefixtures("_nothing_is_loaded")
@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("drafter", ""),
        ("target-parts", ""),
        ("prompt", ""),
        ("provisional-after", "0"),
        ("provisional-after", "nan"),
        ("wait-seconds", "-1"),
        ("private", "not there"),
        ("api-key-file", "not there"),
    ],
)
def test_what_is_refused_names_its_option(option: str, value: str, capsys) -> None:
    assert f"error: {option.replace('-', '_')}=" in refusal(capsys, **{option: value})


@pytest.mark.usefixtures("_nothing_is_loaded")
def test_a_file_with_nothing_in_it(tmp_path, capsys) -> None:
    (tmp_path / "empty").write_text("\n \n")
    for option in ("private", "api-key-file"):
        assert "is empty" in refusal(capsys, **{option: str(tmp_path / "empty")})


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"server": "http://127.0.0.1:8000"}, "server='http://127.0.0.1:8000'"),
        ({"server": "ws://"}, "server='ws://'"),
        ({"certificate": "x"}, "certificate='x'"),
        ({"server": "wss://127.0.0.1:1", "certificate": "not there"}, "certificate='not there'"),
        ({"target-parts": "/not there"}, "/not there"),
    ],
)
def test_where_there_is_nothing(options: dict[str, str], word: str, capsys) -> None:
    assert word in refusal(capsys, **options)


def test_what_json_has() -> None:
    report = TextReport(
        text="a",
        tokens=(1, 2),
        finish_reason="length",
        rounds=1,
        accepted=1,
        round_trips=[0.123456],
        seconds=1.23456,
    )
    record = json.loads(json.dumps(as_json(report)))
    assert next(iter(record)) == "text"
    assert (record["text"], record["tokens"], record["tokens_a_round"]) == ("a", [1, 2], 2.0)
    assert (record["round_trips"], record["seconds"]) == ([0.1235], 1.235)


def test_the_summary() -> None:
    assert "no token was verified; 2 provisional tokens" in summary(
        TextReport(provisional_tokens=(1, 2))
    )
    line = summary(
        TextReport(
            tokens=(1, 2, 3),
            rounds=2,
            accepted=1,
            round_trips=[0.01, 0.03],
            provisional_tokens=(4,),
        )
    )
    assert "3 tokens" in line
    assert "2 rounds of 1.5 tokens, 30 ms" in line
    assert "1 tokens are not verified" in line


def test_what_a_terminal_shows(monkeypatch) -> None:
    shown: list[list[tuple[str, str]]] = []

    class Live:
        def __init__(self, **_) -> None: ...
        def __enter__(self):
            return SimpleNamespace(
                update=lambda text: shown.append(
                    (text.plain, [str(span.style) for span in text.spans])
                )
            )

        def __exit__(self, *_) -> None: ...

    monkeypatch.setattr("specjax.cli.client.Live", Live)
    events = [
        CommittedEvent((1,), "a"),
        ProvisionalEvent((2,), "b"),
        ProvisionalEvent((3,), "c"),
        ProvisionalEvent((4,), "d"),
        RetractedEvent((3, 4), "cd"),
        CommittedEvent((2, 5), "be", confirmed=1),
    ]
    show(events, console=None)  # pyright: ignore[reportArgumentType]
    grey = ["italic bright_black"]
    assert [text for text, _ in shown] == ["a", "ab", "abc", "abcd", "ab", "abe"]
    assert [styles for _, styles in shown[1:5]] == [grey] * 4
