"""Check ``specjax env``, which reports also on an environment in which nothing else works."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from specjax.cli import env
from specjax.cli.main import main
from specjax.installation import Mismatch
from tests.documents import ROOT
from tests.made_up_packages import install, install_fitting
from tests.test_installation import PIP

TWO_TPUS = """
class Device:
    platform, device_kind = "tpu", "TPU v5 lite"

def devices():
    return [Device(), Device()]
"""
FITTING = env.Devices(({"platform": "cpu", "kind": "cpu"},), "not used: it is a CPU")


@pytest.fixture
def environment(tmp_path, monkeypatch) -> Path:
    """Return a folder that hides packages of this environment from child processes."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    return tmp_path


def run_env(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "specjax", "env", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_where_nothing_can_be_imported_it_says_so_and_how_to_mend_it(environment) -> None:
    for name in ("jax", "numpy", "tyro", "flax", "rich"):
        (environment / f"{name}.py").write_text(f"raise ImportError('{name} is broken')")
    install_fitting(environment, "flax")
    install(environment, "flax", "0.11.2")
    done = run_env()
    assert done.returncode == 1
    assert done.stderr == ""
    assert re.search(r"^devices +none$", done.stdout, re.MULTILINE)
    assert "JAX or specjax does not start: ImportError: jax is broken\n" in done.stdout
    assert "- flax 0.11.2 is installed, but specjax needs flax<0.13,>=0.12.4\n" in done.stdout
    assert f"  {PIP} install -U 'flax<0.13,>=0.12.4'\n" in done.stdout


def test_devices_are_printed_even_where_specjax_cannot_be_imported(environment) -> None:
    (environment / "jax.py").write_text(TWO_TPUS)
    (environment / "flax.py").write_text("raise RuntimeError('flax is broken')")
    install_fitting(environment)
    done = run_env("--json")
    report = json.loads(done.stdout)
    assert done.returncode == 1
    assert report["jax"]["devices"] == [{"platform": "tpu", "kind": "TPU v5 lite"}] * 2
    assert report["jax"]["error"]
    assert report["packages"]["jax"] == "0.12.0.1"
    assert report["mismatches"] == []


def test_a_jax_that_ends_the_process(environment) -> None:
    (environment / "jax.py").write_text(
        "import os, sys\nprint('libtpu is of another JAX', file=sys.stderr, flush=True)\nos.abort()"
    )
    devices = env.ask_jax()
    assert devices.error.startswith("JAX was ended by SIGABRT")
    assert devices.devices == ()


def test_a_jax_that_waits_for_ever_is_ended_with_all_that_it_started(environment) -> None:
    code = (
        "import subprocess, sys\nsubprocess.run([sys.executable, '-c', 'import time;"
        " time.sleep(1000)'])"
    )
    (environment / "jax.py").write_text(code)
    # The call returns although the process that JAX started holds the pipe.
    devices = env.ask_jax(timeout=0.5)
    assert devices.error.startswith("JAX did not start within 0.5 s")


def test_what_jax_warns_of_is_printed(environment, monkeypatch) -> None:
    lines = (
        "WARNING:jax._src.xla_bridge:864: An NVIDIA GPU may be present",
        "I0000 a log",
        "x.py:1: RuntimeWarning: it is old",
    )
    says = f"import sys\nprint({chr(10).join((*lines, *lines))!r}, file=sys.stderr)\nprint('hello')"
    (environment / "jax.py").write_text(says + TWO_TPUS)
    monkeypatch.chdir(environment)  # a child process looks there first
    package = environment / "specjax" / "cli"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    (package / "env.py").write_text("def describe_kernels():\n    return 'used: a kernel'")
    devices = env.ask_jax()
    assert devices.said == (lines[0], lines[2])
    assert (devices.kernels, devices.error) == ("used: a kernel", "")


@pytest.mark.parametrize(
    ("mismatches", "devices", "status"),
    [
        ((), FITTING, 0),
        ((Mismatch("a is older than b", ("install", "a")),), FITTING, 1),
        ((), env.Devices(error="ended"), 1),
    ],
)
def test_its_exit_status_says_whether_all_fits(
    monkeypatch, capsys, mismatches, devices, status
) -> None:
    monkeypatch.setattr(env, "find_mismatches", lambda with_devices: list(mismatches))
    monkeypatch.setattr(env, "ask_jax", lambda: devices)
    assert main(["env"]) == status
    text = capsys.readouterr().out
    assert text.endswith("\nEverything fits.\n") == (status == 0)
    assert main(["env", "--json"]) == status
    report = json.loads(capsys.readouterr().out)
    assert report["mismatches"] == [
        {"problem": "a is older than b", "command": f"{PIP} install a"}
    ] * len(mismatches)


def test_its_columns_and_counted_devices() -> None:
    devices = ({"platform": "tpu", "kind": "TPU v5 lite"},) * 4
    report = env.EnvironmentReport(
        "3.13.0",
        "/python",
        {"jax": "0.12.0.1"},
        env.Devices(devices, "used: it is", said=("hm",)),
        {"it": ""},
        (),
    )
    assert env.to_text(report).splitlines() == [
        "Python          3.13.0 (/python)",
        "jax             0.12.0.1",
        "devices         4 x TPU v5 lite (tpu)",
        "Pallas kernels  used: it is",
        "cache: it       none",
        "JAX says        hm",
        "",
        "Everything fits.",
    ]


def test_the_folders_of_caches(monkeypatch) -> None:
    monkeypatch.delenv("JAX_ENABLE_COMPILATION_CACHE", raising=False)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert env.compiled_programs() == str(Path.home() / ".cache" / "specjax" / "compiled")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    assert env.compiled_programs() == "/elsewhere"
    monkeypatch.setenv("JAX_ENABLE_COMPILATION_CACHE", "0")
    assert env.compiled_programs() == ""
    assert env.hugging_face_cache()


def test_kernels_are_those_of_the_attention() -> None:
    assert env.describe_kernels().startswith("not used: ")  # on this CPU


@pytest.mark.thorough  # it imports JAX and specjax twice
def test_the_environment_of_these_tests_is_sound(monkeypatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    done = run_env()
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Everything fits." in done.stdout
    assert "x cpu" in done.stdout
