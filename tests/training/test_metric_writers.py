"""The metrics of a training go to the service that its configuration names, and to no other."""

import importlib.machinery
import json
import os
import subprocess
import sys
import types
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specjax.config import ConfigError, dump_yaml
from specjax.training import loop, metric_writers
from specjax.training.config import DataConfig, OptimizerConfig, TrainConfig
from specjax.training.methods import Lm
from tests.training.test_loop import SIZES, stopping_at, write_texts


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return write_texts(tmp_path_factory.mktemp("text"), lines=20)


def config(source: str, output: Path, logging: Any, steps: int = 4) -> TrainConfig:
    return TrainConfig(
        output=str(output),
        method=Lm(model=SIZES),
        logging=logging,
        steps=steps,
        checkpoint_every=2,
        evaluate_every=4,
        data=DataConfig(source=source, vocab_size=290, window=32, batch=4, holdout=0.2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    )


@dataclass
class MadeUpRun:
    """A run as ``wandb.init`` returns it.

    Attributes:
        options: the arguments of ``wandb.init``.
        records: what was logged.
        axes: the axis of each pattern of metrics.
        exit_code: that of ``finish``; None before.
    """

    options: dict[str, Any]
    records: list[dict[str, float]] = field(default_factory=list)
    axes: dict[str, str | None] = field(default_factory=dict)
    exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float]) -> None:
        self.records.append(values)

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


@pytest.fixture
def runs(monkeypatch) -> list[MadeUpRun]:
    """Put a made-up ``wandb`` in the place of the package, and return the runs that it opens."""
    opened: list[MadeUpRun] = []
    module = types.ModuleType("wandb")
    module.__spec__ = importlib.machinery.ModuleSpec("wandb", None)

    class Error(Exception):
        pass

    def init(**options: Any) -> MadeUpRun:
        if os.environ.get("WANDB_MODE") == "online":
            raise Error("api_key not configured")
        opened.append(MadeUpRun(options))
        return opened[-1]

    vars(module).update(init=init, Settings=dict, errors=types.SimpleNamespace(Error=Error))
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    return opened


def lines_of(output: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


def steps_of(records: list[dict[str, float]]) -> list[float]:
    """Return the steps of all records but those of the time that a save took."""
    return [record["step"] for record in records if "save_seconds" not in record]


@pytest.mark.represents("the services that show the metrics of a training")
def test_wandb_receives_every_metric_with_its_step(source, tmp_path, runs, monkeypatch) -> None:
    # No other service is imported.
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    output = tmp_path / "run"
    loop.train(config(source, output, "wandb"))
    (run,) = runs
    assert run.records == lines_of(output)
    assert steps_of(run.records) == [1, 2, 3, 4, 4]
    assert {
        "loss",
        "gradient_norm",
        "learning_rate",
        "tokens_per_s",
        "share_of_peak",
        "host_memory_gb",
    } <= run.records[0].keys()
    assert "held_out_loss" in run.records[-1]
    assert run.axes == {"step": None, "*": "step"}
    assert run.exit_code == 0
    assert run.options["name"] == "run"
    assert run.options["project"] == "specjax"
    assert run.options["config"]["optimizer"]["learning_rate"] == 1e-2
    assert not (output / "tensorboard").exists()


@pytest.mark.full
def test_a_run_that_continues_continues_its_run_of_wandb(
    source, tmp_path, runs, monkeypatch
) -> None:
    output = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", stopping_at(3))
        with pytest.raises(KeyboardInterrupt):
            loop.train(config(source, output, "wandb"))
    loop.train(config(source, output, "wandb"))
    first, second = runs
    assert first.exit_code == 1
    assert second.exit_code == 0
    assert first.options["id"] == second.options["id"]
    assert second.options["resume"] == "allow"
    assert second.records[0]["step"] == 3
    (interrupted,) = (record for record in first.records if record["step"] == 3)
    assert second.records[0]["loss"] == interrupted["loss"]


@pytest.mark.full
def test_none_writes_lines_alone_and_the_service_may_change(source, tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setitem(sys.modules, "wandb", None)
    output = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", stopping_at(2))
        with pytest.raises(KeyboardInterrupt):
            loop.train(config(source, output, "none"))
    assert steps_of(lines_of(output)) == [1, 2]
    assert not (output / "tensorboard").exists()
    monkeypatch.delitem(sys.modules, "tensorboardX")
    loop.train(config(source, output, "tensorboard"))
    assert steps_of(lines_of(output)) == [1, 2, 3, 4, 4]
    assert list((output / "tensorboard").glob("events*"))


def test_a_missing_package_is_reported_before_anything_is_read(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(metric_writers.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'specjax\[wandb\]'"):
        loop.train(config("no-such-source", tmp_path / "run", "wandb"))
    assert not (tmp_path / "run").exists()


def test_a_refusal_of_wandb_names_the_remedy(tmp_path, runs, monkeypatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    (tmp_path / "run").mkdir()
    with pytest.raises(ConfigError, match="api_key not configured; run `wandb login`, or set"):
        metric_writers.open_writer(config("", tmp_path / "run", "wandb"), tmp_path / "run", 0)


@pytest.mark.full
def test_wandb_itself_works_offline(source, tmp_path) -> None:
    """Run it in its own process, because the package leaves threads and hooks behind."""
    pytest.importorskip("wandb", reason="needs wandb: pip install 'specjax[wandb]'")
    output, file = tmp_path / "run", tmp_path / "run.yaml"
    file.write_text(dump_yaml(config(source, output, "wandb")))
    subprocess.run(
        [sys.executable, "-m", "specjax", "train", "--config", str(file)],
        env={**os.environ, "WANDB_MODE": "offline"},
        check=True,
    )
    (stored,) = output.glob("wandb/offline-run-*/run-*.wandb")
    content = stored.read_bytes()
    for name in ("learning_rate", "held_out_loss", "host_memory_gb"):
        assert name.encode() in content
    assert (output / "wandb_id").read_text().encode() in stored.name.encode()
