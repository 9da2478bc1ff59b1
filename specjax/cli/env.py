"""``python -m specjax env``: what is installed, which devices JAX finds, and what does not fit.

It must work where nothing else does. So this file needs Python alone, and JAX is asked in a process of its own: a libtpu that
does not fit can end the process that loads it, or keep it waiting for ever.
"""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from specjax.cli.interrupts import ending_with
from specjax.installation import PLUGINS, Mismatch, find_mismatches, find_package

SHOWN = ("specjax", "jax", "jaxlib", *PLUGINS, "flax", "numpy", "transformers")
"""The packages whose versions are printed, where they are installed."""

LONGEST_WAIT = 120.0
"""Seconds until JAX's devices are given up. A TPU takes up to a minute."""

_WARNING = re.compile(r"\w(?:Warning|Error): |jax\._src\.")
"""A line of a warning or an exception of Python's, or of JAX's log. Plugins print much more."""

_ANSWER = "specjax-env:"
# Devices are printed before specjax is imported: that may fail in its own way.
_ASK_JAX = f"""
import json
import warnings
import jax

def answer(**values):
    print("{_ANSWER}" + json.dumps(values), flush=True)

devices = jax.devices()
answer(devices=[{{"platform": device.platform, "kind": device.device_kind}} for device in devices])
warnings.simplefilter("ignore")  # of mismatches, which the report names
from specjax.cli.env import describe_kernels
answer(kernels=describe_kernels())
"""


@dataclass(frozen=True)
class EnvConfig:
    """Options of ``python -m specjax env``.

    It prints the versions of what is installed, the devices that JAX finds, whether attention is a Pallas kernel on them, the
    folders of caches, and everything that does not fit, with the command that puts it right. The exit status is 1 where
    something does not fit or JAX does not start.

    Attributes:
        json: print one JSON object instead of text.
    """

    json: bool = False


@dataclass(frozen=True)
class Devices:
    """What JAX says in a process of its own.

    Attributes:
        devices: the platform and kind of each; empty where JAX did not get so far.
        kernels: whether attention is a Pallas kernel on the first of them, and why; empty where that is not known.
        error: why an answer is missing; empty where none is.
        said: the first warnings and errors that JAX printed and went on after, without the rest of its log.
    """

    devices: tuple[dict[str, str], ...] = ()
    kernels: str = ""
    error: str = ""
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnvironmentReport:
    """What the command prints.

    Attributes:
        python: its version.
        executable: the path of Python.
        packages: the versions of those of `SHOWN` that are installed, by name.
        jax: what JAX says.
        caches: folders, by what is kept in them.
        mismatches: what does not fit, each with its command.
    """

    python: str
    executable: str
    packages: dict[str, str]
    jax: Devices
    caches: dict[str, str]
    mismatches: tuple[Mismatch, ...]

    @property
    def is_sound(self) -> bool:
        """Whether everything fits, and JAX and specjax start."""
        return not self.mismatches and not self.jax.error


def run_env(config: EnvConfig) -> int:
    """Print the report; returns 1 where something does not fit or does not start, otherwise 0."""
    report = make_report()
    print(to_json(report) if config.json else to_text(report))
    return 0 if report.is_sound else 1


def main(arguments: Sequence[str]) -> int:
    """Run the command without anything that might be missing: ``specjax`` calls this before it imports the others."""
    import argparse

    parser = argparse.ArgumentParser(prog="specjax env", description="print what is installed, and what does not fit")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return run_env(EnvConfig(json=parser.parse_args(arguments).json))


def make_report() -> EnvironmentReport:
    """Look at the packages, ask JAX, and compare."""
    packages = {name: package.version for name in SHOWN if (package := find_package(name))}
    return EnvironmentReport(
        python=sys.version.partition(" ")[0],
        executable=sys.executable,
        packages=packages,
        jax=ask_jax() if "jax" in packages else Devices(error="jax is not installed"),
        caches={"compiled programs": compiled_programs(), "Hugging Face": hugging_face_cache()},
        mismatches=tuple(find_mismatches(with_devices=True)),
    )


def ask_jax(timeout: float = LONGEST_WAIT) -> Devices:
    """Return what JAX finds, asked in a process of its own that is ended after ``timeout`` seconds."""
    # In a session of its own, so that what it has started ends with it.
    process = subprocess.Popen(
        [sys.executable, "-c", _ASK_JAX],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )

    def end() -> None:
        os.killpg(process.pid, signal.SIGKILL)

    try:
        with ending_with(end):
            out, err = process.communicate(timeout=timeout)
        error = _why_it_ended(process.returncode, err)
    except subprocess.TimeoutExpired:
        end()
        out, err = process.communicate()
        error = f"JAX did not start within {timeout:g} s; does another process hold the TPU, or is a host of several missing?"
    except BaseException:  # Ctrl-C, for example: what hangs would go on holding a TPU
        end()
        raise
    answers: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith(_ANSWER):
            answers |= json.loads(line.removeprefix(_ANSWER))
    said = dict.fromkeys(line.strip() for line in err.splitlines() if _WARNING.search(line) and not error)
    return Devices(tuple(answers.get("devices", ())), answers.get("kernels", ""), error, tuple(said)[:4])


def _why_it_ended(status: int, err: str) -> str:
    """Return the last line of what failed, and the signal where one ended it; nothing where all went well."""
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "")
    if status < 0:
        return f"JAX was ended by {signal.Signals(-status).name}" + (f": {last}" if last else "")
    return (last or f"JAX ended with status {status}") if status else ""


def describe_kernels() -> str:
    """Return whether attention to a cache is a Pallas kernel on the devices that JAX finds, and why."""
    from specjax.models.attention import kernels_status

    status = kernels_status()
    return f"{'used' if status.is_used else 'not used'}: {status.reason}"


def compiled_programs() -> str:
    """Return the folder in which commands keep compiled programs; empty where they keep none."""
    if os.environ.get("JAX_ENABLE_COMPILATION_CACHE", "").lower() in ("0", "false", "no", "off", "n", "f"):
        return ""
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(Path.home() / ".cache" / "specjax" / "compiled")


def hugging_face_cache() -> str:
    """Return the folder in which models from the hub are kept; empty where huggingface_hub cannot say."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except Exception:  # a broken installation fails in any way, and everything else is still to be printed
        return ""
    return str(HF_HUB_CACHE)


def to_text(report: EnvironmentReport) -> str:
    """Return the report as lines of two columns, and the mismatches below them."""
    rows = [("Python", f"{report.python} ({report.executable})"), *report.packages.items()]
    rows.append(("devices", _name_devices(report.jax.devices) or "none"))
    rows += [("Pallas kernels", report.jax.kernels or "not known")]
    rows += [(f"cache: {what}", folder or "none") for what, folder in report.caches.items()]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += [f"{'JAX says' if not index else '':<{width}}  {line}" for index, line in enumerate(report.jax.said)]
    if report.jax.error:
        lines += ["", f"JAX or specjax does not start: {report.jax.error}"]
    if report.mismatches:
        lines += ["", "What does not fit, and the command that puts it right:"]
        for mismatch in report.mismatches:
            lines += [f"- {mismatch.problem}", f"  {mismatch.command}"]
    elif not report.jax.error:
        lines += ["", "Everything fits."]
    return "\n".join(lines)


def to_json(report: EnvironmentReport) -> str:
    """Return the report as one JSON object."""
    mismatches = [{"problem": mismatch.problem, "command": mismatch.command} for mismatch in report.mismatches]
    return json.dumps({**asdict(report), "mismatches": mismatches}, indent=2)


def _name_devices(devices: Sequence[dict[str, str]]) -> str:
    counts: dict[str, int] = {}
    for device in devices:
        name = f"{device['kind']} ({device['platform']})" if device["kind"] != device["platform"] else device["kind"]
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in counts.items())
