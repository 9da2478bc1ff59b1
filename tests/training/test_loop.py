"""Training end to end on a small text.

It learns, it resumes bit for bit after a kill, and it refuses to mix runs.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from specjax.cli.main import main
from specjax.config import ConfigError, dump_yaml
from specjax.models.config import ModelConfig, Rope
from specjax.models.transformer import Target
from specjax.sharding import make_mesh
from specjax.training import fingerprint, loop, losses, step
from specjax.training.config import DataConfig, OptimizerConfig, TrainConfig
from specjax.training.contract import StudentInputs, TrainingMethod
from specjax.training.methods import Distill, Lm
from specjax.training.objectives.whole_model import ModelSizes
from specjax.training.objectives.windows import forward
from specjax.training.optimizer import make_optimizer
from tests.conftest import ASSETS, tiny_target

SIZES = ModelSizes(
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=64,
)


def write_texts(path: Path, lines: int) -> str:
    """Write thirty texts with so many lines into a folder, and return its path."""
    for i in range(30):
        text = "".join(f"line {i} says {j % 7} and then {j % 5}\n" for j in range(lines))
        (path / f"{i}.txt").write_text(text)
    return str(path)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return write_texts(tmp_path_factory.mktemp("text"), lines=60)


def config(source: str, output, **changes) -> TrainConfig:
    run = TrainConfig(
        output=str(output),
        method=Lm(model=SIZES),
        steps=40,
        checkpoint_every=20,
        evaluate_every=20,
        export_dtype="float32",
        data=DataConfig(source=source, vocab_size=290, window=32, batch=4, holdout=0.2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, method="muon"),
    )
    return replace(run, **changes)


def metrics_of(output) -> list[dict]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    lines = [line for line in lines if "save_seconds" not in line]
    measured = ("tokens_per_s", "share_of_peak", "host_memory_gb", "device_memory_gb")
    return [{k: v for k, v in line.items() if k not in measured} for line in lines]


def stopping_at(last: int):
    """Return a `train_step` that is interrupted before the step after ``last``."""

    def stopped_step(state, *arguments, **options):
        if int(state.step) == last:
            raise KeyboardInterrupt
        return step.train_step(state, *arguments, **options)

    return stopped_step


def assert_same_runs(output: Path, expected: Path) -> None:
    """Check that every reported number and every bit of the students is the same."""
    assert metrics_of(output) == metrics_of(expected)
    students = [load_file(path / "best" / "model.safetensors") for path in (output, expected)]
    jax.tree.map(np.testing.assert_array_equal, *students)


@pytest.fixture(scope="module")
def finished(source, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "run"
    loop.train(config(source, output))
    return output


@pytest.mark.represents("the training loop")
def test_it_learns_and_reports(finished) -> None:
    lines = metrics_of(finished)
    losses = [line["loss"] for line in lines if "loss" in line]
    assert len(losses) == 40
    assert losses[-1] < losses[0] - 0.5
    assert [line["step"] for line in lines if "held_out_loss" in line] == [20, 40]
    rates = [line["learning_rate"] for line in lines if "learning_rate" in line]
    assert len(rates) == 40
    assert rates[0] == 0 < rates[1] < rates[2] == max(rates) == pytest.approx(1e-2)
    assert rates[-1] == min(rates[1:])
    model = Target.from_pretrained(finished / "best")
    assert model.config.vocab_size == 290
    assert model.config.eos_token_ids == (0,)
    assert (finished / "best" / "tokenizer.json").exists()


@pytest.mark.full
def test_a_killed_run_continues_bit_for_bit(source, finished, tmp_path) -> None:
    """Kill a process in the middle of training, and run the same command again.

    The second run is in this process, which has compiled the program already.
    """
    output = tmp_path / "run"
    file = tmp_path / "run.yaml"
    file.write_text(dump_yaml(config(source, output, checkpoint_every=4)))
    command = ["train", "--config", str(file)]
    running = [sys.executable, "-m", "specjax", *command]
    first = subprocess.Popen(running, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log = output / "metrics.jsonl"
    deadline = time.time() + 120

    def has_checkpoint() -> bool:
        return any(path.name.isdigit() for path in (output / "checkpoints").glob("*"))

    while time.time() < deadline and not has_checkpoint():
        time.sleep(0.02)
    os.kill(first.pid, signal.SIGKILL)
    first.wait()
    assert json.loads(log.read_text().splitlines()[-2])["step"] < 40, (
        "the run was too fast to be killed"
    )
    before = log.read_text().splitlines()[:4]
    with log.open("a") as torn:
        torn.write('{"step": 39')  # a kill can leave half a line
    assert main(command) == 0
    # Even the speeds are the same: these steps were not run again.
    assert log.read_text().splitlines()[:4] == before
    assert_same_runs(output, finished)


def test_a_finished_run_is_not_trained_again(source, finished) -> None:
    before = (finished / "metrics.jsonl").read_bytes()
    loop.train(config(source, finished))
    assert (finished / "metrics.jsonl").read_bytes() == before


def test_a_directory_of_another_run_is_refused(source, finished, tmp_path) -> None:
    with pytest.raises(
        ConfigError, match=r"another configuration \(seed: 0 -> 1; optimizer\.clip: 1\.0 -> 2\.0\)"
    ):
        run = config(source, finished, seed=1)
        loop.train(replace(run, optimizer=replace(run.optimizer, clip=2.0)))
    with pytest.raises(
        ConfigError, match=r"another configuration \(method\.name: 'lm' -> 'distill'\)"
    ):
        loop.train(config(source, finished, method=Distill(target="here", model=SIZES)))
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and has no run"):
        loop.train(config(source, tmp_path))
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


def test_a_run_does_not_continue_on_another_text(source, finished) -> None:
    file = Path(source) / "1.txt"
    text = file.read_text()
    try:
        file.write_text("something else\n" * 40)
        with pytest.raises(ConfigError, match="the text has changed since the run"):
            loop.train(config(source, finished))
    finally:
        file.write_text(text)


@pytest.mark.full
def test_a_run_does_not_continue_with_another_target(
    source, finished, tmp_path, monkeypatch
) -> None:
    """Overwrite the target's directory between two halves of a run.

    One change is to a single weight, and one to epsilon.
    """
    target = tmp_path / "target"
    shutil.copytree(finished / "best", target)
    run = config(
        source,
        tmp_path / "draft",
        method=Distill(target=str(target), model=SIZES),
        steps=8,
        checkpoint_every=4,
    )
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop, "train_step", stopping_at(6))
        loop.train(run)
    weights = load_file(target / "model.safetensors")
    changed = {name: array.copy() for name, array in weights.items()}
    changed["model.norm.weight"][3] = np.nextafter(
        changed["model.norm.weight"][3], 9, dtype=np.float32
    )
    swapped = {**weights, "model.norm.weight": weights["model.norm.weight"][::-1].copy()}
    message = (
        r"method\.target='.*target': the model there has changed since the run in output=.*choose"
        r" another output"
    )
    for tensors in (changed, swapped):
        save_file(tensors, target / "model.safetensors")
        with pytest.raises(ConfigError, match=message):
            loop.train(run)
    save_file(weights, target / "model.safetensors")
    settings = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 2e-6}))
    with pytest.raises(ConfigError, match=message):
        loop.train(run)
    (target / "config.json").write_text(json.dumps(settings))
    shutil.move(target, tmp_path / "elsewhere")  # only the content counts, not the directory
    shutil.copytree(tmp_path / "elsewhere", target)
    loop.train(run)
    assert metrics_of(tmp_path / "draft")[-2]["step"] == 8


def test_a_run_that_did_not_note_its_target_is_refused(source, finished, tmp_path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    (tmp_path / "run" / "claim.json").unlink()
    (tmp_path / "run" / "data.sha256").write_text("0" * 32)
    with pytest.raises(
        ConfigError, match=r"output=.*: an older version .* began this run.*choose another output"
    ):
        loop.train(config(source, tmp_path / "run"))


@pytest.mark.full
def test_a_targets_fingerprint_is_the_same_on_any_mesh() -> None:
    target = tiny_target(vocab_size=12)
    places = [
        NamedSharding(make_mesh(2, 2), PartitionSpec(*axes))
        for axes in (("data",), (None, "model"))
    ]
    alone = fingerprint.of_target(target)
    for place in places:

        def spread(leaf, place=place):
            replicated = NamedSharding(place.mesh, PartitionSpec())
            return jax.device_put(leaf, place if leaf.ndim == 2 else replicated)

        params = jax.tree.map(spread, target.params)
        assert fingerprint.of_target(target.replace(params=params, mesh=place.mesh)) == alone
    half = target.replace(
        params=jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target.params)
    )
    assert fingerprint.of_target(half) != alone
    layers = target.params["layers"]
    swapped = target.replace(params={**target.params, "layers": [layers[1], layers[0]]})
    assert fingerprint.of_target(swapped) != alone
    assert fingerprint.of_target(None) is None


def test_a_targets_fingerprint_outlives_new_fields_of_its_configuration() -> None:
    """Check a later version, whose new fields have their defaults for this model."""

    @dataclass(frozen=True)
    class LaterRope(Rope):
        bend: float = 0.0

    @dataclass(frozen=True)
    class LaterConfig(ModelConfig):
        echo: tuple[int, ...] = ()

    target = tiny_target(rope=Rope(theta=300.0))
    alone = fingerprint.of_target(target)

    def later(bend: float = 0.0, **changes) -> str | None:
        rope = LaterRope(**vars(target.config.rope), bend=bend)
        config = LaterConfig(**{**vars(target.config), "rope": rope, **changes})
        return fingerprint.of_target(target.replace(config=config))

    assert later() == alone
    changed = [
        later(bend=1.0),
        later(echo=(1,)),
        later(norm_eps=2e-5),
        later(rope=Rope(theta=301.0)),
        later(rope=Rope()),
    ]
    assert len({alone, *changed}) == 6


@pytest.mark.full
def test_distilling_raises_acceptance(source, finished, tmp_path) -> None:
    method = Distill(target=str(finished / "best"), model=SIZES)
    adamw = OptimizerConfig(learning_rate=1e-2, warmup_steps=2)
    loop.train(config(source, tmp_path / "draft", method=method, steps=30, optimizer=adamw))
    lines = [line for line in metrics_of(tmp_path / "draft") if "acceptance" in line]
    assert lines[-1]["acceptance"] > lines[0]["acceptance"] + 0.1
    assert lines[-1]["loss"] < lines[0]["loss"] / 2


def test_windows_that_the_target_cannot_read_are_refused(source, finished, tmp_path) -> None:
    method = Distill(target=str(finished / "best"), model=replace(SIZES, max_positions=128))
    run = config(source, tmp_path / "draft", method=method)
    with pytest.raises(
        ConfigError, match=r"has 3072 tokens and method\.target=.* a vocabulary of 290"
    ):
        loop.train(replace(run, data=replace(run.data, tokenizer=str(ASSETS / "target"))))
    with pytest.raises(
        ConfigError, match=r"data\.window=128 is longer than the 64 positions of method\.target="
    ):
        loop.train(replace(run, data=replace(run.data, window=128)))
    assert not (tmp_path / "draft").exists()  # a run that cannot start claims no directory


@pytest.mark.full
def test_a_batch_larger_than_the_text_claims_nothing(source, tmp_path) -> None:
    run = config(source, tmp_path / "run", steps=1)
    with pytest.raises(ConfigError, match=r"data\.batch=4096: the text has only \d+ windows"):
        loop.train(replace(run, data=replace(run.data, batch=4096)))
    assert not (tmp_path / "run").exists()
    loop.train(run)  # the corrected command


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_one_line_and_claims_nothing(source, tmp_path, capsys, seed) -> None:
    (tmp_path / "run.yaml").write_text(dump_yaml(config(source, tmp_path / "run")))
    assert main(["train", "--config", str(tmp_path / "run.yaml"), "--seed", str(seed)]) == 2
    error = capsys.readouterr().err
    assert f"seed={seed}: must be a whole number, at least 0 and below 2**63" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_every_bit_of_a_seed_counts(source, tmp_path, monkeypatch) -> None:
    """Check seeds that agree in their last 32 bits.

    Each has other weights, another order of the data, and other noise in the steps.
    """
    weights, keys, first = {}, {}, {}

    def watched_batch(windows, key, *arguments):
        keys[seed], first[seed] = jax.random.key_data(key), windows["tokens"]
        return step.make_batch(windows, key, *arguments)

    def watched_step(state, *_, **__):
        weights[seed] = state.student.params["embed"]
        raise KeyboardInterrupt

    monkeypatch.setattr(loop, "make_batch", watched_batch)
    monkeypatch.setattr(loop, "train_step", watched_step)
    for seed in (7, 2**32 + 7, 2**63 - 1):
        with pytest.raises(KeyboardInterrupt):
            loop.train(config(source, tmp_path / str(seed), seed=seed))
    for by_seed in (weights, keys, first):
        assert len({np.asarray(array).tobytes() for array in by_seed.values()}) == 3
    first_step = jax.random.fold_in(jax.random.fold_in(jax.random.key(7), 2**31), 1)
    np.testing.assert_array_equal(keys[7], jax.random.key_data(first_step))


@pytest.mark.full
def test_a_mesh_trains_the_same_and_resumes_bit_for_bit(
    source, finished, tmp_path, monkeypatch
) -> None:
    loop.train(config(source, tmp_path / "whole", mesh=(2, 2)))
    single, four = metrics_of(finished), metrics_of(tmp_path / "whole")
    for name in ("loss", "accuracy", "gradient_norm"):  # in later steps rounding errors have grown
        np.testing.assert_allclose(
            [line[name] for line in four[:6]], [line[name] for line in single[:6]], rtol=1e-4
        )
    np.testing.assert_allclose(four[-1]["held_out_loss"], single[-1]["held_out_loss"], atol=0.05)

    mesh, shapes = make_mesh(2, 2), []

    def watched_step(state, batch, *arguments, **options):
        if len(shapes) == 6:
            raise KeyboardInterrupt
        assert batch["tokens"].sharding.shard_shape((4, 33)) == (2, 33)
        state, metrics = step.train_step(state, batch, *arguments, **options)
        # These are "gate", "up" and their moments.
        gates = [leaf for leaf in jax.tree.leaves(state) if leaf.shape == (16, 32)]
        shapes.append([leaf.sharding.shard_shape((16, 32)) for leaf in gates])
        assert all(leaf.sharding.mesh == mesh for leaf in jax.tree.leaves(state))
        return state, metrics

    run = config(source, tmp_path / "resumed", mesh=(2, 2), checkpoint_every=4)
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop, "train_step", watched_step)
        loop.train(run)
    # A quarter is on each device: units are split over "model", and the other axis over "data".
    assert shapes == [[(8, 16)] * 4] * 6
    loop.train(run)
    assert_same_runs(tmp_path / "whole", tmp_path / "resumed")


@struct.dataclass
class Head:
    """A drafter in miniature, which is no `Target`.

    It predicts token t + 2 from the target's state at t and token t + 1.

    Attributes:
        params: "embed" (the target's own array, frozen), "ids" (whole numbers) and "fuse"
            (trained).
        taps: layers of the target that it reads.
    """

    params: dict[str, Any]
    taps: tuple[int, ...] = struct.field(pytree_node=False, default=(1,))

    def save_pretrained(self, path: str | Path, *, dtype: Any = None) -> None:
        path.mkdir(exist_ok=True)
        save_file(
            {name: np.asarray(array) for name, array in self.params.items()},
            path / "model.safetensors",
        )


@dataclass(frozen=True)
class TrainHead(TrainingMethod):
    name: Literal["head"] = "head"
    target: str = ""
    noise: float = 0.1

    def init(self, key, inputs):
        hidden = inputs.target.config.hidden_size
        fuse = jax.random.normal(key, (2 * hidden, hidden)) / 4
        embed = inputs.target.params["embed"]
        return Head(params={"embed": embed, "ids": jnp.arange(3), "fuse": fuse})

    def objective(self, student, batch, target):
        features = forward(target, batch, student.taps).taps[:, :-1, 0]
        noise = jax.random.normal(batch["key"], features.shape)
        features += self.noise * (1 - batch["progress"]) * noise
        following = student.params["embed"][batch["tokens"][:, 1:-1]]
        state = jnp.concatenate([features, following], axis=-1) @ student.params["fuse"]
        terms = losses.cross_entropy(target.head(state), batch["tokens"][:, 2:])
        loss = losses.mean_over_positions(terms, batch["loss_mask"][:, 1:])
        return loss, {"loss": loss}

    def frozen(self, path):
        return path == "params.embed"


@pytest.mark.full
def test_a_drafter_trains_as_a_whole_model_does(source, finished, tmp_path) -> None:
    """Check that the loop needs no model.

    The drafter has a frozen target, frozen and whole-number parameters, and its own export.
    """
    method = TrainHead(target=str(finished / "best"))
    target = Target.from_pretrained(method.target)
    student = method.init(jax.random.key(0), StudentInputs(None, None, target))
    run = config(
        source,
        tmp_path / "head",
        method=method,
        optimizer=OptimizerConfig(learning_rate=3e-2, warmup_steps=2),
    )
    state = step.initial_state(method, student, make_optimizer(run.optimizer, run.steps))
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(state.optimizer))
    trained_size = student.params["fuse"].size
    assert sizes == [1, 1, trained_size, trained_size]  # counts, and Adam's two moments

    directory = loop.train(run)
    lines = [line["loss"] for line in metrics_of(tmp_path / "head") if "loss" in line]
    assert lines[-1] < lines[0] - 0.5
    assert [file.name for file in directory.iterdir()] == ["model.safetensors"]
    trained = load_file(directory / "model.safetensors")
    assert trained["embed"].tobytes() == np.asarray(student.params["embed"]).tobytes()
    assert trained["ids"].tolist() == [0, 1, 2]
    assert np.all(trained["fuse"] != student.params["fuse"])
    # The target's array was not donated.
    np.testing.assert_array_equal(target.params["embed"], student.params["embed"])


# --- two steps at once ----------------------------------------------------------------------------


@dataclass(frozen=True)
class SlowLm(Lm):
    """Language modelling whose steps take tens of milliseconds."""

    def objective(self, student, batch, target):
        loss, metrics = super().objective(student, batch, target)
        matrix = jnp.full((512, 512), 1e-3) + batch["tokens"][0, 0]
        busy = jax.lax.fori_loop(0, 24, lambda _, x: jnp.tanh(x @ matrix), matrix)
        loss += 0 * jnp.sum(busy)
        return loss, {**metrics, "loss": loss}


@pytest.mark.full
def test_a_step_runs_while_the_next_ones_data_are_made(source, tmp_path, monkeypatch) -> None:
    """Check that making data overlaps with a step, if both take about as long.

    When the data are requested, the step before has begun and not ended.
    """
    real_batches, newest, still_running, times = loop.data.batches, [], [], []

    class SlowBatches:
        def __init__(self, *arguments) -> None:
            self.real = real_batches(*arguments)

        def __next__(self):
            times.append(time.perf_counter())
            still_running.extend(not loss.is_ready() for loss in newest[-1:])
            time.sleep(0.04)
            return next(self.real)

        def __getattr__(self, name):
            return getattr(self.real, name)

    def watched_step(*arguments, **options):
        state, metrics = step.train_step(*arguments, **options)
        newest.append(metrics["loss"])
        return state, metrics

    monkeypatch.setattr(loop.data, "batches", SlowBatches)
    monkeypatch.setattr(loop, "train_step", watched_step)
    run = config(
        source,
        tmp_path / "run",
        method=SlowLm(model=SIZES),
        steps=16,
        evaluate_every=16,
        checkpoint_every=16,
    )
    loop.train(run)
    assert len(still_running) == 15
    assert np.mean(still_running) > 0.7
    lines = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    reported = np.array([4 * 32 / line["tokens_per_s"] for line in lines if "tokens_per_s" in line])
    assert len(reported) == 16
    # The reported speeds add up to the time that passed: from the third batch, when the first step
    # has just been reported, to the last batch, when the last step but two has.
    np.testing.assert_allclose(sum(reported[1:-2]), times[-1] - times[2], rtol=0.1)


def test_metrics_of_the_steps_that_finished_are_written_where_a_run_is_interrupted(
    source, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(loop, "train_step", stopping_at(6))
    with pytest.raises(KeyboardInterrupt):
        loop.train(config(source, tmp_path / "run"))
    assert [line["step"] for line in metrics_of(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]


# --- other files of a run, and other ways to run it -----------------------------------------------


@pytest.mark.full
def test_the_best_student_is_kept_beside_the_latest(source, tmp_path, monkeypatch) -> None:
    """Check made-up held-out losses, of which the second is the best of three."""
    made_up = iter([3.0, 1.0, 2.0])
    monkeypatch.setattr(loop, "evaluate", lambda *_, **__: {"loss": next(made_up)})
    directory = loop.train(
        config(source, tmp_path / "run", steps=6, evaluate_every=2, checkpoint_every=2)
    )
    assert directory == tmp_path / "run" / "best"
    best, latest = (
        load_file(tmp_path / "run" / name / "model.safetensors") for name in ("best", "latest")
    )
    assert not np.array_equal(best["model.norm.weight"], latest["model.norm.weight"])
    lines = metrics_of(tmp_path / "run")
    held_out = [line["held_out_loss"] for line in lines if "held_out_loss" in line]
    assert held_out == [3.0, 1.0, 2.0]
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


@pytest.mark.full
def test_a_run_that_dies_in_an_evaluation_evaluates_once_when_it_continues(
    source, finished, tmp_path, monkeypatch
) -> None:
    """Check a run that ends in the evaluation of step 20, after the checkpoint of that step."""
    steps = []

    def failing(*arguments, **options):
        raise MemoryError

    def counting(*arguments, **options):
        steps.append("evaluated")
        return step.evaluate(*arguments, **options)

    def counted_step(state, *arguments, **options):
        steps.append(int(state.step) + 1)
        return step.train_step(state, *arguments, **options)

    run = config(source, tmp_path / "run")
    with monkeypatch.context() as patched:
        patched.setattr(loop, "evaluate", failing)
        with pytest.raises(MemoryError):
            loop.train(run)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("[0-9]*")] == ["20"]
    assert not any("held_out_loss" in line for line in metrics_of(tmp_path / "run"))
    monkeypatch.setattr(loop, "evaluate", counting)
    monkeypatch.setattr(loop, "train_step", counted_step)
    loop.train(run)
    assert steps == ["evaluated", *range(21, 41), "evaluated"]
    assert_same_runs(tmp_path / "run", finished)
    # A finished run neither trains nor evaluates again.
    loop.train(run)
    assert len(steps) == 22


def test_an_evaluation_that_does_not_fit_fails_before_the_first_step(
    source, tmp_path, monkeypatch
) -> None:
    shapes = []

    def failing(student, batch, *arguments, **options):
        shapes.append(batch["tokens"].shape)
        raise MemoryError

    monkeypatch.setattr(loop, "evaluation_step", failing)
    with pytest.raises(MemoryError):
        loop.train(config(source, tmp_path / "run", accumulate=2))
    assert shapes == [(2, 33)]  # as many rows as a part of a batch
    assert not metrics_of(tmp_path / "run")


@pytest.mark.full
def test_as_many_checkpoints_stay_as_the_configuration_says(source, tmp_path) -> None:
    loop.train(config(source, tmp_path / "run", steps=8, checkpoint_every=2, checkpoints=3))
    names = {path.name for path in (tmp_path / "run" / "checkpoints").glob("[0-9]*")}
    assert names == {"4", "6", "8"}


@pytest.mark.full
def test_a_damaged_checkpoint_is_reported_and_the_one_before_is_used(
    source, finished, tmp_path, monkeypatch, capsys
) -> None:
    run = config(source, tmp_path / "run", checkpoint_every=4)
    steps = []

    def stopped_step(state, *arguments, **options):
        if int(state.step) == 10:
            raise KeyboardInterrupt
        steps.append(int(state.step))
        return step.train_step(state, *arguments, **options)

    monkeypatch.setattr(loop, "train_step", stopped_step)
    with pytest.raises(KeyboardInterrupt):
        loop.train(run)
    newest = tmp_path / "run" / "checkpoints" / "8"
    for file in newest.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")
    steps.clear()

    def counted_step(state, *arguments, **options):
        steps.append(int(state.step))
        return step.train_step(state, *arguments, **options)

    monkeypatch.setattr(loop, "train_step", counted_step)
    loop.train(run)
    assert "the checkpoint of step 8 cannot be read" in capsys.readouterr().err
    assert steps[0] == 4
    assert_same_runs(tmp_path / "run", finished)


@pytest.mark.full
def test_a_warm_start_begins_with_the_weights_and_nothing_else(source, finished, tmp_path) -> None:
    run = config(
        source,
        tmp_path / "run",
        init_from=str(finished / "best"),
        steps=2,
        evaluate_every=1,
        checkpoint_every=1,
    )
    loop.train(run)
    first = metrics_of(tmp_path / "run")[0]
    assert first["step"] == 1
    assert not (tmp_path / "run" / "best" / "trained_with.json").exists()  # they are no chats
    assert first["loss"] < metrics_of(finished)[0]["loss"] - 0.5
    other_run = replace(
        run, output=str(tmp_path / "other"), method=Lm(model=replace(SIZES, intermediate_size=16))
    )
    with pytest.raises(
        ConfigError,
        match=r"its shape differs from this run's student \(intermediate_size: 32 -> 16\)",
    ):
        loop.train(other_run)


@pytest.mark.full
def test_a_student_of_chats_has_their_variables_beside_it(source, tmp_path, capsys) -> None:
    template, chats = tmp_path / "template.jinja", tmp_path / "chats.jsonl"
    template.write_text(
        "{{ mood or 'sad' }}{% for m in messages %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% endfor %}"
    )
    records = [
        {"messages": [{"role": "user", "content": f"line {line} says 2 and then 3"}] * 3}
        for line in range(30)
    ]
    chats.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = DataConfig(
        source=str(chats),
        tokenizer=str(ASSETS / "target"),
        window=32,
        batch=4,
        holdout=0.2,
        chat_template=str(template),
        chat_template_kwargs='{"mood": "glad"}',
    )
    run = config(source, tmp_path / "first", data=data, steps=1)
    loop.train(run)
    for student in ("best", "latest"):
        file = tmp_path / "first" / student / "trained_with.json"
        assert json.loads(file.read_text()) == {"chat_template_kwargs": {"mood": "glad"}}
    warm = replace(run, output=str(tmp_path / "second"), init_from=str(tmp_path / "first" / "best"))
    with pytest.warns(UserWarning, match=r"init_from=.*\"glad\".*data\.chat_template_kwargs=\{\}"):
        loop.train(replace(warm, data=replace(data, chat_template_kwargs="")))


@pytest.mark.full
def test_parts_of_a_batch_and_bfloat16_learn_the_same(source, finished, tmp_path) -> None:
    loop.train(config(source, tmp_path / "parts", accumulate=2, steps=6, evaluate_every=6))
    loop.train(
        config(source, tmp_path / "bf16", compute_dtype="bfloat16", steps=6, evaluate_every=6)
    )
    whole = [line["loss"] for line in metrics_of(finished)[:3]]
    np.testing.assert_allclose(
        [line["loss"] for line in metrics_of(tmp_path / "parts")[:3]], whole, rtol=1e-4
    )
    np.testing.assert_allclose(
        [line["loss"] for line in metrics_of(tmp_path / "bf16")[:3]], whole, rtol=2e-2
    )
    with pytest.raises(ConfigError, match=r"accumulate=3: must divide data\.batch=4"):
        loop.train(config(source, tmp_path / "thirds", accumulate=3))
