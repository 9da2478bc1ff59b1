"""The benchmark of clients that draft: its tables and pictures of made-up results, its counts."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

import specjax
from benchmarks import client_server, client_server_counts, client_server_tables
from benchmarks.slow_server import Slow
from specjax import wire
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from tests.conftest import tiny_target

PAGE = Path(__file__).parents[1] / "docs" / "results" / "client_server.md"


def spread(middle: float) -> dict[str, float]:
    return {"low": 0.9 * middle, "middle": middle, "high": 1.2 * middle}


def made_up() -> dict:
    """Return made-up results of three drafters, one of which drafts on the server, too."""
    trips = {"none": 0.0, "5G": 10.0, "4G": 21.0, "100 ms": 100.0}
    figures = (
        *("rounds", "tokens_a_round", "depth", "kept", "round_trip", "beside", "drafting", "up"),
        "down",
    )
    methods = {
        name: (
            {
                network: {figure: spread(3.0) for figure in ("tokens_per_second", *figures)}
                for network in trips
            }
            | {"alone": {"tokens_per_second": spread(200.0)}}
        )
        for name in ("MoA", "EAGLE-3", "draft model")
    }
    for name in ("EAGLE-3, on the server", client_server.PLAIN):
        methods[name] = {network: {"tokens_per_second": spread(30.0)} for network in trips}
    run = {
        name: spread(5.0)
        for name in ("tokens_per_second", "tokens_a_busy_second", "tokens_a_pass", "busy", "cores")
    }
    ways = {way: dict.fromkeys(("1", "2", "8"), run) for way in client_server.WAYS}
    alone = {
        "until_first_difference": 3.2,
        "error": 0.4,
        "right": {"8": 0.5, "20": 0.25},
        "unbroken": [0.9, 0.5, 0.2],
    }
    rows = [{"drafter": name, **alone} for name in ("MoA", "EAGLE-3")]
    parts = {
        "networks": {"round_trips": trips, "methods": methods},
        "clients": {"drafter": "EAGLE-3", "network": "4G", "ways": ways},
        "cut": {
            "written": 50,
            "alone": 20,
            "texts": 4,
            "rows": {"stories": rows, "Python": rows[:1]},
        },
        "compression": [
            {"drafter": "MoA", "precision": "int8", "tokens_a_round": 2.5, "bytes_a_token": 66}
        ],
    }
    return {part: {"found": results, "settings": {"wait": 25.0}} for part, results in parts.items()}


def test_every_part_has_its_tables() -> None:
    console = Console(width=150, record=True)
    client_server_tables.show(made_up(), console)
    printed = console.export_text()
    for part in (
        "tokens/s, by network",
        "rounds",
        "clients of one server",
        "stories: 4 texts, cut after 50",
        "how numbers are",
    ):
        assert part in printed
    assert "30 (27-36)" in printed
    assert "300%" in printed  # the share of the rounds whose drafts were kept, from made-up numbers


@pytest.mark.parametrize("name", ["networks", "clients", "cut"])
def test_pictures_are_drawn_of_results(name: str) -> None:
    figure = getattr(client_server_tables, f"{name}_picture")(made_up())
    assert len(figure.axes) == 2
    assert all(axes.lines for axes in figure.axes)


@pytest.mark.full
def test_bytes_are_those_of_the_formula_but_for_the_frame() -> None:
    rows = {
        row["drafter"]: row
        for row in client_server_counts.bytes_of_rounds("llama-3.1-8b", 62, 4, 20e6)
    }
    for row in rows.values():
        ours, formula = row["ours"]["down"]["float16"], row["formula"]["down"]
        assert formula == pytest.approx(ours, abs=300)
        assert row["formula"]["up"] < row["ours"]["up"] < 1.2 * row["formula"]["up"]
    assert (
        rows["MoA, TLI 1"]["ours"]["down"]["int8"]
        < 0.53 * rows["MoA, TLI 1"]["ours"]["down"]["float16"]
    )


@pytest.mark.thorough
def test_counts_of_a_drafter_that_is_the_target() -> None:
    """Check that every round brings all that was drafted, and one token more."""
    target = tiny_target()
    drafter = specjax.DraftModel(target, draft=Chain(client_server_counts.CHAIN))
    prompts = np.array(jax.random.randint(jax.random.key(0), (2, 4), 0, target.config.vocab_size))
    (row,) = client_server_counts.text_after_a_cut(target, {"itself": drafter}, prompts, 6, 8)
    assert row["until_first_difference"] == 8
    assert row["right"] == {"8": 1.0}
    texts = client_server_counts.written(target, prompts, 14)
    reading = client_server_counts.Reading(target, drafter, texts, "float16")
    assert reading.tokens_a_round(0, 4) == client_server_counts.CHAIN + 1
    # Tokens alone are enough for a draft model, so there is nothing to compress.
    assert client_server_counts.compression(target, {"itself": drafter}, prompts, 8) == []


def test_a_slow_target_counts_its_passes(tmp_path: Path) -> None:
    slow = Slow(0.001, tmp_path / "busy.json")
    assert slow.once(lambda device, x: x + 1)(None, 2) == 3
    slow.wait(0.0, 3)
    counts = json.loads((tmp_path / "busy.json").read_text())
    assert counts["passes"] == 4
    assert counts["busy"] > 0.004


def test_settings_that_cannot_be_measured_are_refused() -> None:
    make = client_server.ClientServerConfig
    for config, message in [
        (make(), "target and drafters: give both, or --only bytes"),
        (make(only=("bytes",), network="6G"), "network='6G': give one of none, 5G, 4G, 100 ms"),
        (make(only=("bytes",), tokens=0), "tokens=0: must be at least 1"),
        (
            make(target="T", drafters=("MoA=M",)),
            "has no 'MoA, TLI 1', which on_server or crowd names; there are MoA",
        ),
    ]:
        with pytest.raises(InputError, match=message):
            client_server.run(config)


def test_the_page_names_the_command() -> None:
    page = PAGE.read_text()
    assert "python -m benchmarks.client_server" in page
    for name in ("networks", "clients", "cut"):
        assert f"../images/client_server_{name}.png" in page


def test_verdicts_have_the_size_that_is_counted() -> None:
    frame = client_server_counts.verdict({"hidden": (64,)}, 3, "float16")
    answer = wire.decode_down(frame)
    assert isinstance(answer, wire.VerdictMessage)
    assert len(answer.accepted) == 2
    assert wire.unpack(answer.arrays["hidden"]).shape == (3, 64)
