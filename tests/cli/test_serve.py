"""`specjax serve`: what is refused before anything is loaded. The server itself is tested in tests/serving/http."""

import socket

import pytest

from specjax import pipeline
from specjax.cli.main import main


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch) -> None:
    def load(*_, **__):
        raise AssertionError("something is loaded")

    monkeypatch.setattr(pipeline, "load", load)


def refusal(capsys, *options: str) -> str:
    """What ``specjax serve`` says to options that it does not take: a line."""
    assert main(["serve", "--port", "0", *options]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("specjax: error: ")
    assert said.err.count("\n") == 1
    return said.err


def test_others_are_not_let_in_by_accident(capsys) -> None:
    for host in ("0.0.0.0", "::"):
        said = refusal(capsys, "--host", host)
        assert "--api-key-file" in said
        assert "--no-api-key" in said


def test_an_address_that_somebody_has(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert f"port={port}: cannot listen there" in refusal(capsys, "--port", str(port))
    assert "host='no such name'" in refusal(capsys, "--host", "no such name")
    assert "port=65536" in refusal(capsys, "--port", "65536")
    assert "host=''" in refusal(capsys, "--host", "")


@pytest.mark.parametrize(
    ("content", "word"), [(b"", "visible"), (b" short \n", "visible"), (b"two words in it", "visible"), (b"\xff" * 9, "read")]
)
def test_a_key_that_is_none(content: bytes, word: str, tmp_path, capsys) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    assert word in refusal(capsys, "--api-key-file", str(file))


def test_a_key_that_is_not_there_or_not_wanted(tmp_path, capsys) -> None:
    assert "cannot be read" in refusal(capsys, "--api-key-file", str(tmp_path / "missing"))
    (tmp_path / "key").write_text("a good long key")
    assert "no_api_key" in refusal(capsys, "--api-key-file", str(tmp_path / "key"), "--no-api-key")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rows", "0"),
        ("max-queue", "-1"),
        ("cache-gb", "nan"),
        ("cache-gb", "-1"),
        ("drain-seconds", "inf"),
        ("max-connections", "0"),
    ],
)
def test_numbers_out_of_range(option: str, value: str, capsys) -> None:
    assert f"{option.replace('-', '_')}=" in refusal(capsys, f"--{option}", value)
