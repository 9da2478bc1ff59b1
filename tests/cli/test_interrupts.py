"""Check that Ctrl-C and SIGTERM end a command at once, at any moment.

The command prints one line, and its status is that of the signal.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from specjax.cli import interrupts

STATUS = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}
HANGS = 60.0
"""Seconds after which a test gives a process up.

Tests check the status, which differs from the status of a command that comes to its own end."""


def start(*command: str, **variables: str) -> subprocess.Popen[str]:
    # Compiled programs are not kept: otherwise a second run would compile nothing, and be over
    # before the signal.
    environment = (
        os.environ | {"JAX_PLATFORMS": "cpu", "JAX_ENABLE_COMPILATION_CACHE": "0"} | variables
    )
    # Tests in the background of a shell ignore SIGINT, and so would their child processes.
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
    finally:
        signal.signal(signal.SIGINT, handler)


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    while not condition():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)


def handles_signals(process: subprocess.Popen[str]) -> bool:
    """Return whether the process has its handlers, which it lacks while Python itself starts."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    (caught,) = (
        int(line.split()[1], 16) for line in status.splitlines() if line.startswith("SigCgt")
    )
    return all(caught >> (number - 1) & 1 for number in STATUS)


def end(process: subprocess.Popen[str], number: signal.Signals, hint: str = "") -> str:
    """Send a signal, check that the process ends by it with one line, and return its output."""
    process.send_signal(number)
    out, err = process.communicate(timeout=HANGS)
    status, word = STATUS[number]
    # A wait of some seconds is announced in a line.
    lines = [line for line in err.splitlines() if not line.startswith("specjax: compiling")]
    assert (process.returncode, lines[-1:]) == (status, [f"specjax: {word}{hint}"]), err
    assert "Traceback" not in err and "Exception" not in err
    return out


# --- in C, where no handler runs ---

IN_C = """
import ctypes, sys
from pathlib import Path
from specjax import files
from specjax.cli import interrupts
interrupts.end_at_signals()
with files.replacing(Path(sys.argv[1]) / "deep" / "out") as scratch:
    (scratch / "half").write_text("ha")
    print("ready", flush=True)
    list(map(ctypes.CDLL(None).sleep, [3600] * 100))  # no instruction of Python's in between
"""


@pytest.mark.parametrize("number", STATUS)
def test_a_main_thread_that_is_in_c_does_not_keep_a_command_from_ending(tmp_path, number) -> None:
    process = start("-c", IN_C, str(tmp_path))
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    assert end(process, number) == ""
    # The half-written file and its directory are removed.
    assert not list(tmp_path.iterdir())


WITH_A_LOCK = """
import sys, threading, time
from specjax.cli import interrupts
lock = threading.Lock()
lock.acquire()
with interrupts.ending_with(lambda: 1 / 0), interrupts.ending_with(lock.acquire):
    interrupts.end_at_signals()
    interrupts.say_also("go on")
    print("ready", flush=True)
    while True:
        time.sleep(1)
"""


def test_a_lock_that_is_never_released_and_an_error_do_not_keep_it_either() -> None:
    process = start("-c", WITH_A_LOCK)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    end(process, signal.SIGINT, "; go on")


OTHERS = """
import os, signal, sys, time
from specjax.cli import interrupts
signal.signal(signal.SIGINT, signal.SIG_IGN)
interrupts.end_at_signals()
os.kill(os.getpid(), signal.SIGINT)  # ignored as before: a job in the background
signal.signal(signal.SIGTERM, lambda *_: print("drained", flush=True))
os.kill(os.getpid(), signal.SIGTERM)  # handled by other code from now on
time.sleep(0.5)
child = os.fork()
if child == 0:
    signal.signal(signal.SIGTERM, interrupts._handle)
    print("child", flush=True)
    time.sleep(3600)
time.sleep(0.2)
os.kill(child, signal.SIGTERM)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def test_signals_that_others_handle_or_ignore_are_left_alone() -> None:
    """Check handlers of other code, and a forked process, which has no thread for signals.

    The forked process ends as any other.
    """
    # Python 3.12 warns of every fork of a process with threads, which is the point of this test.
    out, err = start("-W", "ignore::DeprecationWarning", "-c", OTHERS).communicate(timeout=HANGS)
    assert (out, err) == ("drained\nchild\n-15\n", "")


def test_the_library_leaves_signals_alone() -> None:
    """Check that a program keeps its handlers if it imports the library or calls its functions."""
    before = [signal.getsignal(number) for number in STATUS]
    assert interrupts._handle not in before


# --- commands ---

LONG = (
    *("generate", "--target", "embedded", "--drafter", "embedded:eagle3"),
    *("--prompt", "class A:", "--max-new-tokens", "900"),
)


def commands(folder: Path) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return command lines that take longer than any test waits, each with the end of its line."""
    prompts = folder / "prompts.txt"
    prompts.write_text("def main():\n" * 400)
    pair = ("--target", "embedded", "--drafter", "embedded:eagle3")
    regenerate = (
        *("regenerate", "--target", "embedded", "--source", str(prompts)),
        *("--output", str(folder / "out.jsonl")),
    )
    evaluate = (
        *("evaluate", *pair, "--questions", str(prompts)),
        *("--max-new-tokens", "500", "--repeats", "50"),
    )
    return {
        "generate": (LONG, ""),
        "demo": (("demo", "--repeats", "1000"), ""),
        "evaluate": (evaluate, ""),
        "lossless": (("evaluate", *pair, "--lossless", "--draws", "1000000"), ""),
        "regenerate": (
            (*regenerate, "--max-new-tokens", "500", "--copies", "200"),
            "; the same command continues the run",
        ),
        "plan measure": (
            ("plan", "measure", *pair, "--prompts", str(prompts), "--longest", "60"),
            "",
        ),
        "serve": (("serve", *pair, "--port", "0", "--warm", "--rows", "32"), ""),
    }


def interrupt(folder: Path, name: str, number: signal.Signals, seconds: float) -> None:
    words, hint = commands(folder)[name]
    process = start("-m", "specjax", *words)
    try:
        wait_until(lambda: handles_signals(process), process)
        time.sleep(seconds)
        # Text and waits that were printed before do not belong to the end.
        process.send_signal(number)
        _, err = process.communicate(timeout=HANGS)
        status, word = STATUS[number]
        lines = err.replace("\r", "\n").splitlines()
        assert process.returncode == status, (name, seconds, err)
        assert lines[-1] == f"specjax: {word}" or lines[-1] == f"specjax: {word}{hint}", (
            name,
            seconds,
            err,
        )
        assert "Traceback" not in err and "Fatal" not in err, (name, seconds, err)
        assert not [path for path in folder.iterdir() if path.name.startswith(".")]
    finally:
        process.kill()


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "number", "seconds"),
    [
        ("generate", signal.SIGINT, 0.0),  # imports
        ("generate", signal.SIGINT, 6.0),  # most likely it compiles
        ("generate", signal.SIGTERM, 4.0),
        ("regenerate", signal.SIGINT, 5.0),
        ("serve", signal.SIGTERM, 5.0),
    ],
)
def test_commands_end_at_once(tmp_path, name, number, seconds) -> None:
    interrupt(tmp_path, name, number, seconds)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(50))
def test_commands_end_at_once_at_any_moment(tmp_path, seed) -> None:
    rng = random.Random(seed)
    name = list(commands(tmp_path))[seed % len(commands(tmp_path))]
    interrupt(tmp_path, name, rng.choice([*STATUS]), rng.uniform(0, 12))


@pytest.mark.full
def test_env_ends_what_it_has_started(tmp_path) -> None:
    """Check the child process that asks JAX, and would wait for a device for two more minutes."""
    (tmp_path / "jax.py").write_text(
        "import pathlib,"
        " time\npathlib.Path(__file__).with_name('asked').touch()\ntime.sleep(3600)\n"
    )
    process = start(
        "-m",
        "specjax",
        "env",
        PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]),
    )
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until((tmp_path / "asked").exists, process)
    (child,) = children.read_text().split()
    end(process, signal.SIGINT)

    def is_dead() -> bool:
        try:
            state = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX"  # a dead process stays until its parent waits for it

    until = time.monotonic() + HANGS
    while not is_dead():  # a kill takes a moment
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.thorough
def test_a_server_that_listens_drains_as_before(tiny_pair) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ("--target", tiny_pair[0], "--port", str(port), "--rows", "2", "--capacity", "64")
    process = start("-m", "specjax", "serve", *options)
    assert process.stdout is not None
    assert "is ready" in process.stdout.readline()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
        assert answer.status == 200
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0 and "terminated" not in err
