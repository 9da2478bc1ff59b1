"""The command ``python -m specjax env``: installed packages, JAX's devices, and what does not fit.

It must work on a broken installation. So this module imports only the standard library, and JAX
runs in a separate process: a libtpu that does not fit may end the process that loads it, or make it
hang.
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
"""The packages whose versions are printed, if they are installed."""

LONGEST_WAIT = 120.0
"""Seconds after which JAX is given up. A TPU takes up to a minute to start."""

_WARNING = re.compile(r"\w(?:Warning|Error): |jax\._src\.")
"""The lines of warnings and exceptions of Python, and of JAX's log. Plugins print much more."""

_ANSWER = "specjax-env:"
# Devices are printed before specjax is imported, because that import may fail.
_ASK_JAX = f"""
import json
import warnings
import jax

def answer(**values):
    print("{_ANSWER}" + json.dumps(values), flush=True)

devices = jax.devices()
answer(devices=[{{"platform": device.platform, "kind": device.device_kind}} for device in devices])
warnings.simplefilter("ignore")  # the report has the mismatches
from specjax.cli.env import describe_kernels
answer(kernels=describe_kernels())
"""


@dataclass(frozen=True)
class EnvConfig:
    """Print installed versions, the devices that JAX finds, and whether everything fits together.

    The report also has the cache folders, whether attention runs as a Pallas kernel, and for each
    mismatch the command that corrects it. The exit status is 1 if something does not fit or JAX
    does not start.

    Attributes:
        json: print one JSON object instead of text.
    """

    json: bool = False


@dataclass(frozen=True)
class Devices:
    """The result of running JAX in a separate process.

    Attributes:
        devices: platform and kind of each device; empty if JAX did not start.
        kernels: whether attention is a Pallas kernel on the first device, and why; empty if
            unknown.
        error: why a result is missing; empty if all are there.
        said: the first warnings and errors of JAX that were not fatal, without the rest of its log.
    """

    devices: tuple[dict[str, str], ...] = ()
    kernels: str = ""
    error: str = ""
    said: tuple[str, ...] = ()


@dataclass(frozen=True)
class EnvironmentReport:
    """The report that the command prints.

    Attributes:
        python: the version of Python.
        executable: the path of Python.
        packages: the versions of the installed packages of `SHOWN`, by name.
        jax: JAX's devices.
        caches: the cache folders, by content.
        mismatches: the packages that do not fit, with the commands that correct it.
    """

    python: str
    executable: str
    packages: dict[str, str]
    jax: Devices
    caches: dict[str, str]
    mismatches: tuple[Mismatch, ...]

    @property
    def is_sound(self) -> bool:
        """True if everything fits, and JAX and specjax start."""
        return not self.mismatches and not self.jax.error


def run_env(config: EnvConfig) -> int:
    """Print the report; return 1 if something does not fit or does not start, otherwise 0."""
    report = make_report()
    print(to_json(report) if config.json else to_text(report))
    return 0 if report.is_sound else 1


def main(arguments: Sequence[str]) -> int:
    """Run the command with the standard library alone, before ``specjax`` imports anything else."""
    import argparse

    parser = argparse.ArgumentParser(
        prog="specjax env", description="print installed versions and devices, and check them"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    return run_env(EnvConfig(json=parser.parse_args(arguments).json))


def make_report() -> EnvironmentReport:
    """Collect the packages, the devices and the mismatches."""
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
    """Return the devices that JAX finds in a separate process, which has ``timeout`` seconds."""
    # The process gets a session of its own, so that its children can be ended with it.
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
        error = (
            f"JAX did not start within {timeout:g} s; is another process using the TPU, or is a"
            " host missing?"
        )
    except BaseException:  # Ctrl-C, for example: a process that hangs would keep the TPU
        end()
        raise
    answers: dict[str, Any] = {}
    for line in out.splitlines():
        if line.startswith(_ANSWER):
            answers |= json.loads(line.removeprefix(_ANSWER))
    lines = dict.fromkeys(
        line.strip() for line in err.splitlines() if _WARNING.search(line) and not error
    )
    return Devices(
        tuple(answers.get("devices", ())), answers.get("kernels", ""), error, tuple(lines)[:4]
    )


def _why_it_ended(status: int, err: str) -> str:
    """Return the signal that ended the process, or its last line of errors; "" after success."""
    last = next((line.strip() for line in reversed(err.splitlines()) if line.strip()), "")
    if status < 0:
        return f"JAX was ended by {signal.Signals(-status).name}" + (f": {last}" if last else "")
    return (last or f"JAX ended with status {status}") if status else ""


def describe_kernels() -> str:
    """Return whether attention to a cache is a Pallas kernel on JAX's devices, and why."""
    from specjax.models.attention import kernels_status

    status = kernels_status()
    return f"{'used' if status.is_used else 'not used'}: {status.reason}"


def compiled_programs() -> str:
    """Return the folder where commands keep compiled programs; empty if they keep none."""
    if os.environ.get("JAX_ENABLE_COMPILATION_CACHE", "").lower() in (
        "0",
        "false",
        "no",
        "off",
        "n",
        "f",
    ):
        return ""
    return os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(
        Path.home() / ".cache" / "specjax" / "compiled"
    )


def hugging_face_cache() -> str:
    """Return the folder with models from the hub; empty if huggingface_hub cannot be imported."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    # A broken installation may raise any error, and the report must still be printed.
    except Exception:
        return ""
    return str(HF_HUB_CACHE)


def to_text(report: EnvironmentReport) -> str:
    """Return the report as lines of two columns, with the mismatches at the end."""
    rows = [("Python", f"{report.python} ({report.executable})"), *report.packages.items()]
    rows.append(("devices", _name_devices(report.jax.devices) or "none"))
    rows += [("Pallas kernels", report.jax.kernels or "not known")]
    rows += [(f"cache: {what}", folder or "none") for what, folder in report.caches.items()]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    lines += [
        f"{'JAX says' if not index else '':<{width}}  {line}"
        for index, line in enumerate(report.jax.said)
    ]
    if report.jax.error:
        lines += ["", f"JAX or specjax does not start: {report.jax.error}"]
    if report.mismatches:
        lines += ["", "These packages do not fit. The command below each corrects it:"]
        for mismatch in report.mismatches:
            lines += [f"- {mismatch.problem}", f"  {mismatch.command}"]
    elif not report.jax.error:
        lines += ["", "Everything fits."]
    return "\n".join(lines)


def to_json(report: EnvironmentReport) -> str:
    """Return the report as a JSON object."""
    mismatches = [
        {"problem": mismatch.problem, "command": mismatch.command} for mismatch in report.mismatches
    ]
    return json.dumps({**asdict(report), "mismatches": mismatches}, indent=2)


def _name_devices(devices: Sequence[dict[str, str]]) -> str:
    counts: dict[str, int] = {}
    for device in devices:
        if device["kind"] != device["platform"]:
            name = f"{device['kind']} ({device['platform']})"
        else:
            name = device["kind"]
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} x {name}" for name, count in counts.items())
