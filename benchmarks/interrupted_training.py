"""Interrupt trainings at random moments, and compare their weights with an unbroken run's.

    python -m benchmarks.interrupted_training
    python -m benchmarks.interrupted_training --processes 2 --moments 20

The same command is started again and again. Each start is interrupted by ``kill -9``, SIGTERM or
SIGINT at a random moment: a quarter of them at any time of a whole run, the others while it trains.
When a run comes to its end, its students must equal those of the unbroken run bit for bit, and a
new run begins. Of several processes, SIGTERM and SIGINT go to one or to all of them, and
``kill -9`` to one.
"""

import filecmp
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from specjax.config import dump_yaml
from specjax.errors import InputError
from specjax.training.config import DataConfig, OptimizerConfig, TrainConfig
from specjax.training.methods import Distill, Lm
from specjax.training.objectives.whole_model import ModelSizes

_PATIENCE = 900.0
_SIZES = ModelSizes(
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    max_positions=64,
)


@dataclass(frozen=True)
class InterruptionConfig:
    """Interrupt trainings.

    Attributes:
        moments: number of interruptions.
        processes: number of processes that train together, with one device each.
        target: a target to distil into a small model; empty: a small model of the text.
        steps: steps of a run.
        checkpoint_every: steps between two checkpoints.
        seed: random seed of the moments.
        output: JSON file for the interruptions; by default none.
    """

    moments: int = 50
    processes: int = 1
    target: str = ""
    steps: int = 60
    checkpoint_every: int = 25
    seed: int = 0
    output: Path | None = None


@dataclass
class Ends:
    """The interruptions by one signal, and how they ended.

    Attributes:
        statuses: the number of ends with each exit status of the first process.
        seconds: from the signal to the end of all processes.
        lost: the steps that the interrupted start had reported and not saved.
    """

    statuses: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    seconds: list[float] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)


def start(
    file: Path, output: Path, config: InterruptionConfig, log: Path
) -> list[subprocess.Popen]:
    """Start the processes of a run."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = f"localhost:{free.getsockname()[1]}"
    words = ["train", "--config", str(file), "--output", str(output)]
    words += ["--mesh", str(config.processes), "1"]
    running = []
    for number in range(config.processes):
        variables = {"JAX_PLATFORMS": "cpu", "JAX_COMPILATION_CACHE_DIR": str(file.parent / "xla")}
        variables["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
        if config.processes > 1:
            variables |= {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(config.processes),
                "JAX_PROCESS_ID": str(number),
            }
        with log.with_suffix(f".{number}").open("w") as text:
            running.append(
                subprocess.Popen(
                    [sys.executable, "-m", "specjax", *words],
                    env=os.environ | variables,
                    stdout=text,
                    stderr=subprocess.STDOUT,
                )
            )
    return running


def wait(running: list[subprocess.Popen], log: Path) -> list[int]:
    """Return the statuses of all processes when they have ended."""
    deadline = time.monotonic() + _PATIENCE
    try:
        return [process.wait(max(deadline - time.monotonic(), 1)) for process in running]
    except subprocess.TimeoutExpired:
        texts = [file.read_text()[-2000:] for file in log.parent.glob(f"{log.stem}.*")]
        raise InputError("a training did not end:\n" + "\n---\n".join(texts)) from None
    finally:
        for process in running:
            process.kill()


def last_step(output: Path) -> int:
    """Return the last step that a run has reported."""
    metrics = output / "metrics.jsonl"
    steps = [0]
    for line in metrics.read_text().splitlines() if metrics.exists() else []:
        try:
            steps.append(json.loads(line)["step"])
        except ValueError:  # a line that a kill has cut
            continue
    return max(steps)


def until_it_trains(running: list[subprocess.Popen], output: Path) -> None:
    """Wait until a start reports its first step, or ends."""
    begin = time.time()
    while all(process.poll() is None for process in running):
        if unsaved_steps(output, begin):
            return
        time.sleep(0.02)


def unsaved_steps(output: Path, begin: float) -> int:
    """Return how many steps the start at ``begin`` has reported after the newest checkpoint."""
    metrics = output / "metrics.jsonl"
    # A start removes the metrics of steps that it repeats. Until then they are an earlier start's.
    is_rewritten = metrics.exists() and metrics.stat().st_mtime > begin
    return max(last_step(output) - saved_step(output), 0) if is_rewritten else 0


def saved_step(output: Path) -> int:
    """Return the step of the newest checkpoint."""
    names = [path.name for path in (output / "checkpoints").glob("*")]
    return max([0, *(int(name) for name in names if name.isdecimal())])


def same_students(output: Path, whole: Path) -> bool:
    """Return whether both students of two runs are the same, byte for byte."""
    names = [
        str(file.relative_to(whole))
        for name in ("best", "latest")
        for file in (whole / name).rglob("*.safetensors")
    ]
    assert names
    return filecmp.cmpfiles(whole, output, names, shallow=False)[0] == names


def run(config: InterruptionConfig) -> dict[str, Ends]:
    """Interrupt trainings, print each interruption, and return the ends by signal.

    Raises:
        AssertionError: a finished run differs from the unbroken one, or a start failed by itself.
    """
    rng = random.Random(config.seed)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "text").mkdir()
        for number in range(40):
            text = "".join(f"line {number} says {j % 7} and then {j % 5}\n" for j in range(60))
            (folder / "text" / f"{number}.txt").write_text(text)
        training = TrainConfig(
            method=Distill(target=config.target, model=_SIZES)
            if config.target
            else Lm(model=_SIZES),
            steps=config.steps,
            checkpoint_every=config.checkpoint_every,
            evaluate_every=config.checkpoint_every,
            export_dtype="float32",
            logging="none",
            data=DataConfig(
                source=str(folder / "text"), vocab_size=290, window=32, batch=4, holdout=0.2
            ),
            optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
        )
        file, log = folder / "train.yaml", folder / "log"
        file.write_text(dump_yaml(training))
        for warm in ("compiles", "whole"):  # the second one has its programs, as later starts have
            begin = time.monotonic()
            running = start(file, folder / warm, config, log)
            until_it_trains(running, folder / warm)
            trains = time.monotonic()
            statuses = wait(running, log)
            longest, training_seconds = time.monotonic() - begin, time.monotonic() - trains
            assert not any(statuses), log.with_suffix(".0").read_text()
        assert same_students(folder / "compiles", folder / "whole")
        print(
            f"an unbroken run takes {longest:.1f} s, {training_seconds:.1f} s of it for its steps"
        )
        ends: dict[str, Ends] = defaultdict(Ends)
        moments = compared = 0
        while moments < config.moments or saved_step(folder / "run"):
            begin = time.time()
            running = start(file, folder / "run", config, log)
            interrupted = moments < config.moments and interrupt(
                running, folder / "run", begin, rng, (longest, training_seconds), log, ends
            )
            moments += interrupted
            statuses = wait(running, log)
            assert interrupted or not any(statuses), log.with_suffix(".0").read_text()
            if not any(statuses):
                assert same_students(folder / "run", folder / "whole"), "other weights"
                compared += 1
                shutil.rmtree(folder / "run")
        print(f"{moments} interruptions; {compared} runs came to their end with equal weights")
        return ends


def interrupt(
    running: list[subprocess.Popen],
    output: Path,
    begin: float,
    rng: random.Random,
    times: tuple[float, float],
    log: Path,
    ends: dict[str, Ends],
) -> bool:
    """Interrupt processes at a random moment. Return False if they ended before.

    They were started at ``begin``. ``times`` are those of an unbroken run, and of its steps.
    """
    number = rng.choice([signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
    is_training, share = rng.random() < 0.75, rng.random()
    to = [rng.choice(running)]
    if number != signal.SIGKILL and rng.random() < 0.5:
        to = running
    if is_training:
        until_it_trains(running, output)
    deadline = time.monotonic() + share * times[is_training]
    while time.monotonic() < deadline:
        if all(process.poll() is not None for process in running):
            return False
        time.sleep(0.01)
    sent = time.monotonic()
    for process in to:
        process.send_signal(number)
    statuses = wait(running, log)
    seconds = time.monotonic() - sent
    if not any(statuses):  # it was over before the signal came
        return False
    end = ends[number.name]
    end.statuses[statuses[running.index(to[0])]] += 1
    end.seconds.append(seconds)
    end.lost.append(unsaved_steps(output, begin))
    text = log.with_suffix(".0").read_text()
    assert "Traceback" not in text and "Fatal" not in text, text
    since = (
        f"{share * times[is_training]:.1f} s after the {'first step' if is_training else 'start'}"
    )
    print(
        f"{number.name} to {len(to)} of {len(running)}, {since}: statuses {statuses}"
        f" in {seconds:.1f} s; step {last_step(output)}, saved {saved_step(output)}",
        flush=True,
    )
    return True


def main(config: InterruptionConfig) -> None:
    """Run, and print the table."""
    # A job that a shell starts in the background ignores SIGINT, and so would its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    ends = run(config)
    print("| signal | number | statuses | seconds to the end, median and most | steps lost, most |")
    print("|---|---:|---|---:|---:|")
    for name, end in sorted(ends.items()):
        statuses = ", ".join(f"{status}: {count}" for status, count in sorted(end.statuses.items()))
        seconds = sorted(end.seconds)
        print(
            f"| {name} | {len(seconds)} | {statuses} | {seconds[len(seconds) // 2]:.1f},"
            f" {seconds[-1]:.1f} | {max(end.lost)} |"
        )
    if config.output:
        config.output.write_text(
            json.dumps({name: vars(end) for name, end in ends.items()}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main(tyro.cli(InterruptionConfig))
