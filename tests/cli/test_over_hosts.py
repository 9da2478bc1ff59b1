"""Check commands that several processes run together, as their users start them."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from specjax.config import dump_yaml
from tests.conftest import save_tiny
from tests.processes import ends_all, free_port
from tests.training import two_processes

TOGETHER = ["--mesh", "1", "2"]
"""The model is split over the devices of two processes, which have one each."""


@contextlib.contextmanager
def commands(
    directory: Path,
    *words: str,
    count: int = 2,
    port: int | None = None,
    numbers: Sequence[int] | None = None,
) -> Iterator[list[subprocess.Popen]]:
    """Run ``specjax WORDS`` in several processes, whose outputs go to I.out and I.err.

    No process outlives the block.
    """
    port = port or free_port()
    running = []
    try:
        for number in range(count) if numbers is None else numbers:
            variables = {"JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(number)}
            variables |= {"JAX_COORDINATOR_ADDRESS": f"localhost:{port}"} if count > 1 else {}
            variables |= {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": (
                    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=1"
                ),
            }
            with (
                (directory / f"{number}.out").open("w") as out,
                (directory / f"{number}.err").open("w") as err,
            ):
                running.append(
                    subprocess.Popen(
                        [sys.executable, "-m", "specjax", *words],
                        cwd=Path(__file__).parents[2],
                        env=os.environ | variables,
                        stdout=out,
                        stderr=err,
                    )
                )
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def run(directory: Path, *words: str, count: int = 2) -> list[str]:
    """Return the output of each process."""
    with commands(directory, *words, count=count) as running:
        codes = [process.wait(300) for process in running]
    logs = [(directory / f"{number}.err").read_text() for number in range(count)]
    assert codes == [0] * count, logs
    return [(directory / f"{number}.out").read_text() for number in range(count)]


@pytest.mark.thorough
def test_generate_prints_once_what_one_process_prints(tmp_path) -> None:
    words = ["generate", "--prompt", "def area(", "--drafter", "embedded:eagle3"]
    words += ["--max-new-tokens", "24", "--json"]
    words += ["--temperature", "0.8", "--seed", "3", "--rule", "coupled", "--precision", "highest"]
    first, second = run(tmp_path, *words, *TOGETHER)
    (alone,) = run(tmp_path, *words, count=1)
    assert second == ""
    assert json.loads(first)["token_ids"] == json.loads(alone)["token_ids"]


@pytest.mark.full
def test_a_mesh_that_leaves_devices_out_is_refused_by_all(tmp_path) -> None:
    with commands(tmp_path, "generate", "--prompt", "x") as running:
        codes = [process.wait(120) for process in running]
    errors = [(tmp_path / f"{number}.err").read_text() for number in range(2)]
    # The first process that notices ends, and the other one with it.
    assert any(
        "mesh=(1, 1): 2 processes have 2 devices; give a mesh of all of them" in error
        for error in errors
    )
    assert all(codes)


@pytest.mark.full
def test_other_options_in_one_process_are_refused_by_all(tmp_path) -> None:
    port = free_port()
    prompts = [["generate", "--prompt", prompt, *TOGETHER] for prompt in ("x", "y")]
    with (
        commands(tmp_path, *prompts[0], port=port, numbers=(0,)) as first,
        commands(tmp_path, *prompts[1], port=port, numbers=(1,)) as second,
    ):
        assert [process.wait(120) for process in (*first, *second)] == [2, 2]
    for number in range(2):
        assert "run different commands or options" in (tmp_path / f"{number}.err").read_text()


@pytest.mark.full
def test_an_error_in_one_process_ends_the_other_soon(tmp_path) -> None:
    """Serve without a key at a public address, which the process that listens refuses."""
    with commands(tmp_path, "serve", "--host", "0.0.0.0", *TOGETHER) as running:
        ends_all(running, 0)
    assert "give --api-key-file FILE" in (tmp_path / "0.err").read_text()


@pytest.mark.full
def test_what_runs_in_one_process_says_so(tmp_path) -> None:
    with commands(tmp_path, "regenerate", "--source", "x", "--output", "y.jsonl") as running:
        assert [process.wait(120) for process in running] == [2, 2]
    assert (
        "specjax regenerate runs in one process: unset JAX_COORDINATOR_ADDRESS"
        in (tmp_path / "1.err").read_text()
    )


@pytest.mark.thorough
def test_evaluate_writes_once_and_with_the_acceptance_of_one_process(tmp_path) -> None:
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"prompt": "def area("}\n{"prompt": "class Tree:"}\n')
    words = ["evaluate", "--questions", str(questions), "--drafter", "embedded:eagle3@chain:3"]
    words += ["--max-new-tokens", "24"]
    first, second = run(tmp_path, *words, "--output", str(tmp_path / "two"), *TOGETHER)
    run(tmp_path, *words, "--output", str(tmp_path / "one"), count=1)
    assert "embedded:eagle3@chain:3" in first and second == ""
    results = [
        json.loads((tmp_path / name / "results.json").read_text())["results"]["overall"]
        for name in ("one", "two")
    ]
    alone, together = (
        result["embedded:eagle3@chain:3"]["acceptance_by_position"] for result in results
    )
    assert alone == together and alone[0] > 0


def training(directory: Path, checkpoint_every: int) -> Callable[[Path], list[str]]:
    """Return the words of a training of 40 steps by two processes, for its output."""
    save_tiny(directory / "target", num_layers=1)
    (directory / "text").mkdir()
    for number in range(20):
        (directory / "text" / f"{number}.py").write_text(
            f"def function_{number}(self): return {number}\n" * 9
        )
    config = replace(
        two_processes.config(directory, "", (1, 1)),
        steps=40,
        checkpoint_every=checkpoint_every,
        evaluate_every=40,
    )
    file = directory / "train.yaml"
    file.write_text(dump_yaml(config))
    return lambda output: ["train", "--config", str(file), "--output", str(output), *TOGETHER]


def until_step(metrics: Path, step: int, running: list[subprocess.Popen]) -> None:
    """Wait until a training has reported a step."""
    deadline = time.monotonic() + 300
    while not metrics.exists() or len(metrics.read_text().splitlines()) < step:
        assert time.monotonic() < deadline and all(process.poll() is None for process in running)
        time.sleep(0.05)


def weights_of(output: Path) -> dict[str, np.ndarray]:
    return load_file(output / "latest" / "model.safetensors")


@pytest.mark.thorough
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_one_process_of_a_training_stops_both_after_the_same_step(
    tmp_path, number
) -> None:
    """Signal the second process alone, and continue in two processes, and in one.

    In two, the weights are those of an undisturbed run, bit for bit. In one, which has another mesh
    as well, the losses are those of the undisturbed run up to rounding.
    """
    words = training(tmp_path, checkpoint_every=100)
    run(tmp_path, *words(tmp_path / "whole"))
    stopped = tmp_path / "stopped"
    # The tests may have been started in the background, where SIGINT is ignored.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with commands(tmp_path, *words(stopped)) as running:
            until_step(stopped / "metrics.jsonl", 6, running)
            running[1].send_signal(number)
            codes = [process.wait(60) for process in running]
    finally:
        signal.signal(signal.SIGINT, handler)
    errors = [(tmp_path / f"{process}.err").read_text() for process in range(2)]
    assert codes == [128 + number] * 2, errors
    (step,) = (int(path.name) for path in (stopped / "checkpoints").glob("[0-9]*"))
    assert 6 <= step < 40
    assert f" after step {step}, which is saved; the same command continues" in errors[0]
    shutil.copytree(stopped, tmp_path / "alone")
    run(tmp_path, *words(stopped))
    whole, continued = weights_of(tmp_path / "whole"), weights_of(stopped)
    for name, value in whole.items():
        np.testing.assert_array_equal(continued[name], value, err_msg=name)
    run(tmp_path, *words(tmp_path / "alone")[: -len(TOGETHER)], count=1)
    losses = [
        [json.loads(line).get("loss") for line in (tmp_path / name / "metrics.jsonl").open()]
        for name in ("whole", "alone")
    ]
    expected, values = ([loss for loss in of_run if loss is not None] for of_run in losses)
    assert len(values) == 40
    np.testing.assert_allclose(values[: step + 20], expected[: step + 20], rtol=1e-4)


@pytest.mark.thorough
def test_a_training_of_which_one_process_is_killed_goes_on_to_the_same_weights(tmp_path) -> None:
    """Kill either process with SIGKILL, at different steps.

    Both processes end, and the same command ends with the weights of an undisturbed run.
    """
    words = training(tmp_path, checkpoint_every=4)
    run(tmp_path, *words(tmp_path / "whole"))
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for lost, steps in ((1, 6), (0, 15)):
        with commands(tmp_path, *words(tmp_path / "killed")) as running:
            until_step(metrics, steps, running)
            running[lost].kill()
            ends_all(running, lost)
    run(tmp_path, *words(tmp_path / "killed"))
    whole, killed = weights_of(tmp_path / "whole"), weights_of(tmp_path / "killed")
    assert whole.keys() == killed.keys()
    for name, value in whole.items():
        np.testing.assert_array_equal(killed[name], value, err_msg=name)


def ask(port: int, prompt: str, seed: int) -> str:
    """Return a sampled text."""
    body = {
        "model": "embedded",
        "prompt": prompt,
        "max_tokens": 24,
        "temperature": 0.9,
        "seed": seed,
    }
    request = urllib.request.Request(
        f"http://localhost:{port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["text"]


def until_ready(port: int, running: list[subprocess.Popen], seconds: float = 400) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and all(process.poll() is None for process in running):
        with (
            contextlib.suppress(OSError),
            urllib.request.urlopen(f"http://localhost:{port}/health", timeout=5),
        ):
            return
        time.sleep(0.5)
    pytest.fail("the server did not begin")


@pytest.mark.thorough
def test_serve_answers_as_one_process_does_ends_with_any_and_starts_again(tmp_path) -> None:
    """Kill either process with SIGKILL.

    Both end within 30 seconds, and may be started again at the same ports.
    """
    http, coordinator = free_port(), free_port()
    words = ["serve", "--drafter", "embedded:eagle3", "--drafts", "none", "chain:3"]
    words += ["--rows", "2", "--capacity", "256", "--port", str(http)]
    words += ["--max-logprobs", "0", "--max-prediction", "0", "--precision", "highest"]
    requests = [("def area(", 1), ("class Tree:", 2), ("import os\n", 3), ("for each in ", 4)]
    with commands(tmp_path, *words, count=1) as running:
        until_ready(http, running)
        alone = [ask(http, *request) for request in requests]
    for lost in (1, 0):
        with commands(tmp_path, *words, *TOGETHER, port=coordinator) as running:
            until_ready(http, running)
            assert [ask(http, *request) for request in requests] == alone
            running[lost].kill()
            ends_all(running, lost)
        assert f"process {lost} (" in (tmp_path / f"{1 - lost}.err").read_text() or lost == 0
    with commands(tmp_path, *words, *TOGETHER, port=coordinator) as running:
        until_ready(http, running)
        for process in running:  # as a supervisor ends them
            process.terminate()
        assert [process.wait(60) for process in running] == [0, 0]
