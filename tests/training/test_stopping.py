"""A training that is asked to stop saves its running step, and continues bit for bit."""

import itertools
import json
import signal
import time
from pathlib import Path

import pytest

from specjax.cli import interrupts
from specjax.cli.main import main
from specjax.config import dump_yaml
from specjax.training import loop, step, stopping
from specjax.training.stopping import StopRequest
from tests.cli.test_interrupts import HANGS, start
from tests.training.test_loop import assert_same_runs, config, write_texts

SHORT = {"steps": 8, "checkpoint_every": 100, "evaluate_every": 4}


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> str:
    return write_texts(tmp_path_factory.mktemp("text"), lines=20)


@pytest.fixture(scope="module")
def unbroken(source, tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("unbroken") / "run"
    loop.train(config(source, output, **SHORT))
    return output


def steps_of(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.glob("[0-9]*"))


def test_a_request_belongs_to_one_training() -> None:
    stop = StopRequest()
    for number in (signal.SIGTERM, signal.SIGINT):
        with stop.heeded_until_the_end():
            assert (stop.number, stop.stopped_after) == (0, None)
            stop.is_heeded = True
            assert stop.request(number)
            stop.stopped_after = 7
        assert not stop.request(number)
        assert stop.number == number


@pytest.mark.represents("a training that a signal stops")
def test_a_stopped_run_saves_its_step_and_continues_bit_for_bit(
    source, unbroken, tmp_path, monkeypatch, capsys
) -> None:
    """Stop at an ordinary step, then in an evaluation, by the signals that the command is offered.

    Both statuses are those of the signals.
    """
    file = tmp_path / "run.yaml"
    output = tmp_path / "run"
    file.write_text(dump_yaml(config(source, output, **SHORT)))
    command = ["train", "--config", str(file)]

    def signalled_step(state, *arguments, **options):
        # The first step in a process is dispatched before a request is heeded.
        if int(state.step) == 2:
            assert interrupts._heed is not None and interrupts._heed(signal.SIGTERM)
        return step.train_step(state, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "train_step", signalled_step)
        assert main(command) == 143
    error = capsys.readouterr().err
    assert "terminated after step 3, which is saved; the same command continues the run" in error
    assert steps_of(output / "checkpoints") == ["3"]
    assert (output / "latest" / "model.safetensors").exists()

    def signalled_evaluation(student, batches, *arguments, **options):
        first = next(batches)
        assert interrupts._heed is not None and interrupts._heed(signal.SIGINT)
        return step.evaluate(student, itertools.chain([first], batches), *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(loop, "evaluate", signalled_evaluation)
        assert main(command) == 130
    error = capsys.readouterr().err
    assert "the run continues after step 3 of 8" in error
    assert "interrupted after step 4, which is saved" in error
    assert not any("held_out_loss" in line for line in (output / "metrics.jsonl").open())
    assert main(command) == 0
    assert_same_runs(output, unbroken)


def test_a_request_is_heeded_only_while_there_is_something_to_save(monkeypatch) -> None:
    clock = iter([100.0, 100.4, 101.2])
    monkeypatch.setattr(stopping.time, "monotonic", lambda: next(clock))
    stop = StopRequest()
    assert not stop.request(signal.SIGTERM) and not stop.number
    with stop.heeded_until_the_end():
        stop.is_heeded = True
        assert stop.request(signal.SIGTERM)
        assert stop.request(signal.SIGTERM)  # the same signal, from a launcher
        assert not stop.request(signal.SIGINT)  # a second one
    assert stop.number == signal.SIGTERM
    assert not stop.request(signal.SIGTERM)


def test_a_signal_is_the_first_one_though_another_process_had_it_earlier() -> None:
    """Check that a scheduler may signal a process after the others have told it to stop."""
    stop = StopRequest()
    with stop.heeded_until_the_end():
        stop.is_heeded, stop.number = True, int(signal.SIGTERM)
        assert stop.request(signal.SIGTERM)
        assert stop.number == signal.SIGTERM


@pytest.mark.full
def test_a_run_that_ends_anyway_ends_with_success(source, tmp_path, monkeypatch) -> None:
    """Check a request in the last evaluation's export, when nothing is left to interrupt."""
    stop = StopRequest()
    held_out = {"loss": 1.0}

    def last(*_, **__):
        assert stop.request(signal.SIGTERM)
        return held_out

    monkeypatch.setattr(loop, "evaluate", last)
    run = config(source, tmp_path / "run", steps=2, checkpoint_every=2, evaluate_every=2)
    assert loop.train(run, stop) == tmp_path / "run" / "best"
    assert stop.stopped_after is None
    assert (tmp_path / "run" / "best" / "model.safetensors").exists()


def stop_for_real(command: tuple[str, ...], output: Path, number: int, signals: int) -> tuple:
    """Start a training, send it signals after its second step, and return its end."""
    process = start(*command, JAX_ENABLE_COMPILATION_CACHE="1")
    log = output / "metrics.jsonl"
    deadline = time.monotonic() + HANGS * 5
    while not log.exists() or len(log.read_text().splitlines()) < 2:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(number)
    if signals == 2:
        time.sleep(stopping._SECONDS_OF_ONE_SIGNAL + 0.5)
        process.send_signal(number)
    _, error = process.communicate(timeout=HANGS * 5)
    return process.returncode, error


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_real_signal_stops_the_command(source, tmp_path, number) -> None:
    """Send a process the signal. It ends within its grace period, with what it did saved."""
    file, output = tmp_path / "run.yaml", tmp_path / "run"
    file.write_text(dump_yaml(config(source, output, steps=100_000, checkpoint_every=10**6)))
    command = ("-m", "specjax", "train", "--config", str(file))
    status, error = stop_for_real(command, output, number, signals=1)
    assert status == 128 + number, error
    word = "terminated" if number == signal.SIGTERM else "interrupted"
    assert f"specjax: {word}: the running step is finished and saved; a second signal" in error
    assert f"specjax: {word} after step " in error
    (saved,) = steps_of(output / "checkpoints")
    lines = [json.loads(line) for line in (output / "metrics.jsonl").open()]
    assert max(line["step"] for line in lines) == int(saved)
    assert "Traceback" not in error
