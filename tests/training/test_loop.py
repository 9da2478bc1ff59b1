"""Training end to end on a small text: it learns, it resumes bit for bit after a kill, it refuses to mix runs."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.config import ConfigError, DataConfig, ModelSizes, OptimizerConfig, TrainConfig, dump_yaml
from specjax.models.transformer import Target
from specjax.training import loop
from tests.conftest import ASSETS

SIZES = ModelSizes(
    hidden_size=16, intermediate_size=32, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8, max_positions=64
)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("text")
    for i in range(30):
        (path / f"{i}.txt").write_text("".join(f"line {i} says {j % 7} and then {j % 5}\n" for j in range(60)))
    return str(path)


def config(source: str, output, **changes) -> TrainConfig:
    run = TrainConfig(
        output=str(output),
        steps=40,
        checkpoint_every=4,
        evaluate_every=20,
        export_dtype="float32",
        data=DataConfig(source=source, vocab_size=290, window=32, batch=4, holdout=0.2),
        model=SIZES,
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, method="muon"),
    )
    return replace(run, **changes)


def metrics_of(output) -> list[dict]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_s"} for line in lines]


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory):
    output = tmp_path_factory.mktemp("whole") / "run"
    loop.train(config(source, output))
    return output


def test_it_learns_and_reports(finished) -> None:
    lines = metrics_of(finished)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 0.5
    assert [line["step"] for line in lines if "held_out_loss" in line] == [20, 40]
    model = Target.from_pretrained(finished / "final")
    assert model.config.vocab_size == 290
    assert model.config.eos_token_ids == (0,)
    assert (finished / "final" / "tokenizer.json").exists()


def test_a_killed_run_continues_bit_for_bit(source, finished, tmp_path) -> None:
    """SIGKILL in the middle of training, then the same command again."""
    output = tmp_path / "run"
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(config(source, output)))
    command = [sys.executable, "-m", "specjax", "train", "--config", str(file)]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = output / "metrics.jsonl"
    deadline = time.time() + 120
    while time.time() < deadline and not any(path.name.isdigit() for path in (output / "checkpoints").glob("*")):
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert not (output / "final").exists(), "the run was too fast to be killed"
    before = log.read_text().splitlines()[:4]
    with log.open("a") as torn:
        torn.write('{"step": 39')  # what a kill can leave: half a line
    subprocess.run(command, check=True, capture_output=True)
    assert log.read_text().splitlines()[:4] == before  # speeds and all: these steps were not run again
    assert metrics_of(output) == metrics_of(finished)
    whole, resumed = (load_file(path / "final" / "model.safetensors") for path in (finished, output))
    for name, value in whole.items():
        np.testing.assert_array_equal(value, resumed[name])


def test_a_finished_run_is_not_trained_again(source, finished) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    loop.train(config(source, finished))
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_directory_of_another_run_is_refused(source, finished, tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"another configuration \(seed: 0 -> 1; optimizer\.clip: 1\.0 -> 2\.0\)"):
        run = config(source, finished, seed=1)
        loop.train(replace(run, optimizer=replace(run.optimizer, clip=2.0)))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        loop.train(config(source, tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_distilling_raises_acceptance(source, finished, tmp_path) -> None:
    teacher = str(finished / "final")
    loop.train(config(source, tmp_path / "draft", objective="distill", teacher=teacher, steps=30))
    lines = [line for line in metrics_of(tmp_path / "draft") if "acceptance" in line]
    assert lines[-1]["acceptance"] > lines[0]["acceptance"] + 0.1
    assert lines[-1]["loss"] < lines[0]["loss"] / 2


def test_a_tokenizer_larger_than_the_teachers_vocabulary_is_refused(source, finished, tmp_path) -> None:
    run = config(source, tmp_path / "draft", objective="distill", teacher=str(finished / "final"))
    larger = replace(run.data, tokenizer=str(ASSETS / "target"))
    with pytest.raises(ConfigError, match=r"has 3072 tokens and teacher=.* a vocabulary of 290"):
        loop.train(replace(run, data=larger))
    assert not (tmp_path / "draft").exists()  # nothing is claimed by a run that cannot start


def test_a_run_does_not_continue_on_another_text(source, tmp_path) -> None:
    text = tmp_path / "text"
    shutil.copytree(source, text)
    run = config(str(text), tmp_path / "run", steps=1)
    loop.train(run)
    (text / "1.txt").write_text("something else\n" * 40)
    with pytest.raises(ConfigError, match="the text has changed since the run"):
        loop.train(run)


@pytest.mark.parametrize("method", ["adamw", "muon"])
def test_decay_touches_matrices_only(method) -> None:
    params = {"embed": jnp.ones((3, 2)), "layers": [{"q": jnp.ones((2, 2))}], "norm": jnp.ones(2)}
    optimizer = loop.make_optimizer(OptimizerConfig(method=method, learning_rate=0.1, warmup_steps=1, weight_decay=0.5), 10)
    state = optimizer.init(params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    for _ in range(3):
        updates, state = optimizer.update(zeros, state, params)
    assert np.all(updates["layers"][0]["q"] < 0)
    assert np.all(updates["embed"] < 0)
    assert np.all(updates["norm"] == 0)
