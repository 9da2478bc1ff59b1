"""The documents that a run holds out, and the agreement of its processes on what they read."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from specjax.config import ConfigError
from specjax.training import loop, run_directory
from specjax.training.config import DataConfig, TrainConfig
from specjax.training.methods import Lm
from specjax.training.objectives.whole_model import ModelSizes
from tests.processes import processes, wait
from tests.training import two_readers


def run(folder: Path, steps: int) -> TrainConfig:
    """Return a short training of a tiny model on 30 records, of which one cannot be used."""
    texts = [f"This is text {number}. " * 20 for number in range(30)]
    lines = [json.dumps({"text": text}) for text in texts]
    (folder / "texts.jsonl").write_text("\n".join([lines[0], "{", *lines[1:]]))
    sizes = ModelSizes(
        hidden_size=16,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_positions=64,
    )
    source = DataConfig(
        source=str(folder / "texts.jsonl"),
        vocab_size=270,
        window=32,
        batch=4,
        holdout=0.2,
        max_unusable=0.1,
    )
    return TrainConfig(output=str(folder / "run"), method=Lm(model=sizes), data=source, steps=steps)


@pytest.mark.parametrize(
    ("files", "rule"),
    [
        ({}, "content"),
        ({"config.yaml": "", "claim.json": '{"data": "a", "target": null}'}, "name"),
        ({"config.yaml": "", "claim.json": '{"held_out_by": "content"}'}, "content"),
        ({"config.yaml": "", "claim.json": '{"held_out_by": "name"}'}, "name"),
        ({"config.yaml": "", "claim.json": "{"}, "name"),
        ({"config.yaml": ""}, "name"),
    ],
)
def test_a_run_keeps_the_rule_that_it_began_with(files, rule, tmp_path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert run_directory.held_out_rule(tmp_path) == rule


@pytest.mark.full  # two trainings
def test_an_older_run_goes_on_with_its_own_held_out_documents(tmp_path, monkeypatch) -> None:
    config = run(tmp_path, steps=2)
    with monkeypatch.context() as older:
        older.setattr(run_directory, "held_out_rule", lambda _: "name")
        loop.train(config)
    claim = tmp_path / "run" / "claim.json"
    noted = json.loads(claim.read_text())
    assert noted.pop("held_out_by") == "name"
    claim.write_text(json.dumps(noted))  # as an older version left it
    loop.train(replace(config, data=replace(config.data, max_unusable=0.2)))
    (line,) = (tmp_path / "run" / run_directory.UNUSABLE).read_text().splitlines()
    assert line.startswith(f"{tmp_path.name}/texts.jsonl:2: not JSON")
    with monkeypatch.context() as newer:
        newer.setattr(run_directory, "held_out_rule", lambda _: "content")
        with pytest.raises(ConfigError, match="the text has changed"):
            loop.train(config)


@pytest.mark.full  # starts two processes
def test_processes_that_read_other_data_are_refused(tmp_path) -> None:
    with processes(two_readers.__name__, tmp_path) as running:
        wait(running, tmp_path)
    for process in (0, 1):
        message = (tmp_path / f"{process}.txt").read_text()
        assert message.startswith("data.source='text': process 1 reads other data than process 0")
