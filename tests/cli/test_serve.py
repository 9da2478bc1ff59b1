"""Check what `specjax serve` refuses before anything is loaded.

The server itself is tested in tests/serving/http.
"""

import socket
import urllib.error
import urllib.request

import jax
import pytest

from specjax import pipeline
from specjax.cli.main import main, parse_options
from specjax.cli.serve import (
    ServeConfig,
    choose_capacity,
    engine_options,
    make_engine,
    read_drafts,
    read_keys,
)
from specjax.drafters import Suffix
from specjax.drafters.suffix_index import SuffixIndex
from specjax.errors import InputError
from specjax.serving import memory
from specjax.sharding import make_mesh
from tests.conftest import tiny_target


@pytest.fixture(autouse=True)
def _nothing_is_loaded(monkeypatch) -> None:
    def load(*_, **__):
        raise AssertionError("something is loaded")

    monkeypatch.setattr(pipeline, "load", load)


def refusal(capsys, *options: str) -> str:
    """Return the line with which ``specjax serve`` refuses options."""
    assert main(["serve", "--port", "0", *options]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("specjax: error: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_it_listens_before_anything_is_loaded(monkeypatch, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    statuses = []

    def load(*_, **__):
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=30)
        statuses.append(caught.value.code)
        raise InputError("no such model")

    monkeypatch.setattr(pipeline, "load", load)
    assert "no such model" in refusal(capsys, "--port", str(port))
    assert statuses == [503]


def test_others_are_not_let_in_by_accident(capsys) -> None:
    for host in ("0.0.0.0", "::"):
        error = refusal(capsys, "--host", host)
        assert "--api-key-file" in error
        assert "--no-api-key" in error


def test_an_address_that_somebody_has(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert f"port={port}: cannot listen there" in refusal(capsys, "--port", str(port))
    assert "host='no such name'" in refusal(capsys, "--host", "no such name")
    assert "port=65536" in refusal(capsys, "--port", "65536")
    assert "host=''" in refusal(capsys, "--host", "")


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "visible"),
        (b" short \n", "visible"),
        (b"two words in it", "visible"),
        (b"\xff" * 9, "read"),
    ],
)
def test_a_key_that_is_none(content: bytes, word: str, tmp_path, capsys) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    assert word in refusal(capsys, "--api-key-file", str(file))


def test_keys_a_line_each(tmp_path) -> None:
    (tmp_path / "keys").write_text("a-first-key\n\n  a-second-key \r\na-first-key\n")
    assert read_keys(ServeConfig(api_key_file=str(tmp_path / "keys"))) == (
        "a-first-key",
        "a-second-key",
    )
    assert read_keys(ServeConfig()) == ()


def test_the_type_of_the_cache_is_handed_on(monkeypatch) -> None:
    def load(*_, cache_dtype, **__):
        raise LookupError(cache_dtype)

    monkeypatch.setattr(pipeline, "load", load)
    for dtype in ("float", "int8"):
        with pytest.raises(LookupError, match=dtype):
            make_engine(ServeConfig(cache_dtype=dtype))


@pytest.mark.parametrize(
    ("line", "expected"), [([], True), (["--reread", "on"], True), (["--reread", "off"], False)]
)
def test_ended_texts_are_read_once_more_unless_that_is_off(
    line: list[str], expected: bool, monkeypatch
) -> None:
    generator = pipeline.TextGenerator(tiny_target(), None)
    monkeypatch.setattr(pipeline, "load", lambda *_, **__: generator)
    line = ["--grammars", "off", "--capacity", "64", *line]
    options, _ = engine_options(parse_options(ServeConfig, line, prog="serve"))
    assert options["reread"] is expected


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "free", "capacity", "words"),
    [
        ({}, 10**15, 40_960, "all that the models support"),
        ({}, 2_000_000_000, 16_384, "free memory, or at least 4096; the models support 40960"),
        ({}, 1, 4096, "at least 4096; the models support 40960"),
        ({}, None, 4096, "the default, as the free memory is unknown"),
        ({"capacity": 5000}, 1, 5000, "set by --capacity"),
        (
            {"cache_gb": 0.5},
            1,
            30_464,
            "in 0.5 GB of caches; the models support 40960: see --capacity",
        ),
        ({"cache_gb": 1000.0}, 1, 40_960, "all that the models support"),
    ],
)
def test_texts_may_be_as_long_as_models_and_memory_allow(
    options: dict, free: int | None, capacity: int, words: str, monkeypatch
) -> None:
    """Choose the capacity by the memory.

    A token takes 16 layers x 2 heads x 64 x 2 x 4 bytes: half a GB holds 476 pages.
    """
    # Nothing is computed.
    target = jax.eval_shape(lambda: tiny_target(num_layers=16, head_dim=64, max_positions=40_960))
    monkeypatch.setattr(memory, "free_bytes", lambda mesh: free)
    generator, sizes = pipeline.TextGenerator(target, None), {"rows": 8, "page": 64, "chunk": None}
    chosen, why = choose_capacity(ServeConfig(**options), generator, sizes)
    assert chosen == capacity
    assert words in why


@pytest.mark.parametrize("devices", [1, 2])
def test_earlier_answers_count_in_the_memory_of_caches(devices: int, monkeypatch) -> None:
    """Give a server more memory by what the answers take on its devices: it has equal pages."""
    mesh = None if devices == 1 else make_mesh(model=devices)
    target = jax.eval_shape(lambda: tiny_target(num_layers=16, head_dim=64)).replace(mesh=mesh)
    monkeypatch.setattr(pipeline, "load", lambda *_, **__: generator)
    index = SuffixIndex.empty(segments=8, capacity=2**16)
    of_answers = devices * (index.tokens.nbytes + index.order.nbytes)  # on each device

    def pages(gigabytes: float, tokens: int) -> int:
        config = ServeConfig(
            cache_gb=gigabytes, earlier_answers=tokens, grammars="off", rows=8, page=64
        )
        return engine_options(config)[0]["pages"]

    generator = pipeline.TextGenerator(target, None, Suffix())
    without = pages(0.5, 0)
    assert pages(0.5, 2**16) < without - 1
    assert pages(0.5 + of_answers / 1e9, 2**16) == without


def test_one_key_of_several_is_none(tmp_path, capsys) -> None:
    (tmp_path / "keys").write_text("a-first-key\nshort\n")
    assert "one key per line" in refusal(capsys, "--api-key-file", str(tmp_path / "keys"))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (None, (None, False)),
        (("auto",), (None, False)),
        (("auto", "clients"), (None, True)),
        (("clients",), ((None,), True)),
        ((), ((None,), True)),
        (("none",), ((None,), False)),
        (("none", "chain:3"), ((None, "chain:3"), False)),
        (("clients", "chain:3"), (("chain:3",), True)),
    ],
)
def test_drafts_by_words_and_by_file(
    words: tuple[str, ...] | None, expected: object, tmp_path
) -> None:
    line = [] if words is None else ["--drafts", *words]
    assert read_drafts(parse_options(ServeConfig, line, prog="serve")) == expected
    file = tmp_path / "serve.yaml"
    file.write_text("rows: 2\n" if words is None else f"drafts: {list(words)}\n")
    assert (
        read_drafts(parse_options(ServeConfig, ["--config", str(file)], prog="serve")) == expected
    )
    assert read_drafts(
        parse_options(ServeConfig, ["--config", str(file), "--drafts", "auto"], prog="serve")
    ) == (None, False)


def test_the_engines_choice_is_not_among_shapes(capsys) -> None:
    assert "drafts=auto chain:3" in refusal(capsys, "--drafts", "auto", "chain:3")


def test_tls_that_is_none(tmp_path, capsys) -> None:
    file = tmp_path / "file"
    file.write_text("no certificate")
    assert "give both" in refusal(capsys, "--tls-cert", str(file))
    assert "give both" in refusal(capsys, "--tls-key", str(file))
    assert "cannot be used" in refusal(capsys, "--tls-cert", str(file), "--tls-key", str(file))
    assert "cannot be used" in refusal(
        capsys, "--tls-cert", str(tmp_path / "missing"), "--tls-key", str(file)
    )


def test_a_key_that_is_not_there_or_not_wanted(tmp_path, capsys) -> None:
    assert "cannot be read" in refusal(capsys, "--api-key-file", str(tmp_path / "missing"))
    (tmp_path / "key").write_text("a good long key")
    assert "no_api_key" in refusal(capsys, "--api-key-file", str(tmp_path / "key"), "--no-api-key")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("rows", "0"),
        ("client_rows", "9"),
        ("client_sessions", "-1"),
        ("max-queue", "-1"),
        ("cache-gb", "nan"),
        ("cache-gb", "-1"),
        ("drain-seconds", "inf"),
        ("max-connections", "0"),
    ],
)
def test_numbers_out_of_range(option: str, value: str, capsys) -> None:
    assert f"{option.replace('-', '_')}=" in refusal(capsys, f"--{option}", value)


@pytest.mark.parametrize("proxy", ["proxy", "10.0.0.1/8", "10.0.0.0/33", ""])
def test_proxies_that_are_none(proxy: str, capsys) -> None:
    error = refusal(capsys, "--trusted-proxy", "127.0.0.1", "--trusted-proxy", proxy)
    assert f"trusted_proxy={proxy!r}" in error
    assert "10.0.0.7" in error


@pytest.mark.parametrize(
    "origin", ["chat.example", "https://chat.example/", "https://Chat.example", ""]
)
def test_origins_that_no_browser_sends(origin: str, capsys) -> None:
    error = refusal(capsys, "--cors-origin", "https://chat.example", "--cors-origin", origin)
    assert f"cors_origin={origin!r}" in error
    assert "http://localhost:3000" in error
