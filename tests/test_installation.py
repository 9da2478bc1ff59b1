"""Check that packages that do not fit each other are noticed by their metadata alone.

Each mismatch has a remedy.
"""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from specjax import installation
from specjax.installation import Mismatch, find_mismatches
from tests.documents import ROOT
from tests.made_up_packages import JAX, install, install_fitting

PIP = shlex.join((sys.executable, "-m", "pip"))
"""The pip of this Python, in a command for a shell."""


@pytest.fixture
def on(monkeypatch):
    """Set what the machine has: "tpu", "gpu", both or neither."""

    def set_machine(*accelerators: str) -> None:
        monkeypatch.setattr(installation, "has_tpu", lambda: "tpu" in accelerators)
        monkeypatch.setattr(installation, "has_nvidia_gpu", lambda: "gpu" in accelerators)

    set_machine()
    return set_machine


def mismatches(folder: Path, **options) -> list[Mismatch]:
    return find_mismatches([str(folder)], **options)


def test_packages_that_fit_have_no_mismatch(tmp_path, on) -> None:
    install_fitting(tmp_path)
    install(tmp_path, "libtpu", "0.0.50.1")
    install(tmp_path, "jax-cuda12-plugin", "0.12.0.1")
    install(tmp_path, "jax-cuda12-pjrt", "0.12.0.1")
    on("tpu", "gpu")
    assert mismatches(tmp_path, with_devices=True) == []


@pytest.mark.parametrize(
    ("machine", "remedy"),
    [(("tpu",), ("install", "-U", "jax[tpu]==0.12.0.1")), ((), ("uninstall", "-y", "libtpu"))],
)
def test_a_libtpu_of_another_jax_is_replaced_on_a_tpu_and_removed_elsewhere(
    tmp_path, on, machine, remedy
) -> None:
    install_fitting(tmp_path)
    install(tmp_path, "libtpu", "0.0.21.1")
    on(*machine)
    (mismatch,) = mismatches(tmp_path)
    assert (
        mismatch.problem == "libtpu 0.0.21.1 is installed, but jax 0.12.0.1 needs libtpu==0.0.50.*"
    )
    assert mismatch.remedy == remedy


@pytest.mark.parametrize(
    ("machine", "remedy"),
    [
        (("gpu",), ("install", "-U", "jax[cuda12]==0.12.0.1")),
        (("tpu",), ("uninstall", "-y", "jax-cuda12-plugin", "jax-cuda12-pjrt")),
    ],
)
def test_a_plugin_of_another_jax_is_replaced_on_a_gpu_and_removed_elsewhere(
    tmp_path, on, machine, remedy
) -> None:
    install_fitting(tmp_path)
    install(tmp_path, "libtpu", "0.0.50.1")
    install(tmp_path, "jax-cuda12-plugin", "0.7.2")
    install(tmp_path, "jax-cuda12-pjrt", "0.7.2")
    on(*machine)
    (mismatch,) = mismatches(tmp_path)
    assert mismatch.problem.startswith(
        "jax-cuda12-plugin 0.7.2 is installed, but jax 0.12.0.1 needs jax-cuda12-plugin<=0.12.0.1"
    )
    assert mismatch.remedy == remedy


def test_a_pjrt_package_without_its_plugin_is_compared_too(tmp_path, on) -> None:
    install_fitting(tmp_path)
    install(tmp_path, "jax-cuda12-pjrt", "0.7.2")
    assert [mismatch.remedy for mismatch in mismatches(tmp_path)] == [
        ("uninstall", "-y", "jax-cuda12-pjrt")
    ]


def test_of_two_plugins_the_one_that_fits_stays(tmp_path, on) -> None:
    install_fitting(tmp_path)
    install(tmp_path, "jax-cuda12-plugin", "0.12.0.1")
    install(tmp_path, "jax-cuda13-plugin", "0.11.0")
    on("gpu")
    assert [mismatch.remedy for mismatch in mismatches(tmp_path)] == [
        ("uninstall", "-y", "jax-cuda13-plugin")
    ]


def test_a_plugin_that_this_jax_does_not_know_does_not_fit(tmp_path, on) -> None:
    install_fitting(tmp_path, "jax")
    install(tmp_path, "jax", "0.12.0.1", [line for line in JAX if "cuda13" not in line])
    install(tmp_path, "jax-cuda13-plugin", "0.12.0.1")
    assert [mismatch.problem for mismatch in mismatches(tmp_path)] == [
        "jax-cuda13-plugin 0.12.0.1 is installed, but jax 0.12.0.1 needs no version of it"
    ]


def test_a_jaxlib_that_is_too_old_or_missing(tmp_path, on) -> None:
    install_fitting(tmp_path, "jaxlib")
    (missing,) = mismatches(tmp_path)
    assert (
        missing.problem
        == "jaxlib is not installed, but jax 0.12.0.1 needs jaxlib<=0.12.0.1,>=0.11.2"
    )
    install(tmp_path, "jaxlib", "0.10.2")
    (old,) = mismatches(tmp_path)
    assert (
        old.problem
        == "jaxlib 0.10.2 is installed, but jax 0.12.0.1 needs jaxlib<=0.12.0.1,>=0.11.2"
    )
    assert old.remedy == missing.remedy == ("install", "-U", "jax==0.12.0.1")


def test_with_a_libtpu_jaxlib_must_be_the_one_that_it_goes_with(tmp_path, on) -> None:
    install_fitting(tmp_path, "jaxlib")
    install(tmp_path, "jaxlib", "0.11.2")
    assert mismatches(tmp_path) == []
    install(tmp_path, "libtpu", "0.0.50.1")
    on("tpu")
    (mismatch,) = mismatches(tmp_path)
    assert (
        mismatch.problem
        == "jaxlib 0.11.2 is installed, but jax 0.12.0.1 needs jaxlib<=0.12.0.1,>=0.12.0.1"
    )
    assert mismatch.command == f"{PIP} install -U 'jax[tpu]==0.12.0.1'"


def test_a_package_that_is_too_old_for_specjax(tmp_path, on) -> None:
    install_fitting(tmp_path, "flax")
    install(tmp_path, "flax", "0.11.2")
    (mismatch,) = mismatches(tmp_path)
    assert mismatch.problem == "flax 0.11.2 is installed, but specjax needs flax<0.13,>=0.12.4"
    assert mismatch.command == f"{PIP} install -U 'flax<0.13,>=0.12.4'"


def test_a_jax_that_is_too_old_is_replaced_together_with_its_libtpu(tmp_path, on) -> None:
    install_fitting(tmp_path, "jax", "jaxlib")
    install(tmp_path, "jax", "0.7.2", ["jaxlib<=0.7.2,>=0.7.2", 'libtpu==0.0.23; extra == "tpu"'])
    install(tmp_path, "jaxlib", "0.7.2")
    install(tmp_path, "libtpu", "0.0.21.1")
    on("tpu")
    libtpu, jax = mismatches(tmp_path)
    assert libtpu.problem == "libtpu 0.0.21.1 is installed, but jax 0.7.2 needs libtpu==0.0.23"
    assert jax.problem == "jax 0.7.2 is installed, but specjax needs jax>=0.10,<0.13"
    assert libtpu.remedy == jax.remedy == ("install", "-U", "jax[tpu]>=0.10,<0.13")


def test_what_only_an_extra_needs_may_be_missing_and_what_pip_left_behind_counts_for_nothing(
    tmp_path, on
) -> None:
    install_fitting(tmp_path)  # without torch, which `specjax[test]` needs
    (tmp_path / "libtpu-0.0.21.1.dist-info").mkdir()
    assert mismatches(tmp_path) == []


def test_in_a_clone_that_is_not_installed_a_file_says_what_is_needed(tmp_path, on) -> None:
    install_fitting(tmp_path, "specjax")
    problems = [mismatch.problem for mismatch in mismatches(tmp_path)]
    assert any(
        problem.startswith("tyro is not installed, but specjax needs tyro>=")
        for problem in problems
    )
    assert not [problem for problem in problems if problem.startswith(("flax", "jax "))]


def test_without_packaging_nothing_is_compared_but_it_is_missed(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "packaging.specifiers", None)
    assert [mismatch.command for mismatch in mismatches(tmp_path)] == [f"{PIP} install packaging"]


@pytest.mark.parametrize(
    ("shown", "extra"),
    [
        ("CUDA Version: 12.4", "cuda12"),
        ("CUDA UMD Version: 13.1", "cuda13"),
        ("CUDA Version: 11.8", ""),
    ],
)
def test_a_gpu_without_a_plugin(tmp_path, on, monkeypatch, shown, extra) -> None:
    install_fitting(tmp_path / "packages")
    write_nvidia_smi(tmp_path, shown)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    on("gpu")
    assert mismatches(tmp_path / "packages") == []
    commands = [
        mismatch.command for mismatch in mismatches(tmp_path / "packages", with_devices=True)
    ]
    assert commands == ([f"{PIP} install -U 'jax[{extra}]==0.12.0.1'"] if extra else [])
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert mismatches(tmp_path / "packages", with_devices=True) == []


def test_a_tpu_without_libtpu(tmp_path, on, monkeypatch) -> None:
    install_fitting(tmp_path)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    on("tpu")
    (mismatch,) = mismatches(tmp_path, with_devices=True)
    assert mismatch.command == f"{PIP} install -U 'jax[tpu]==0.12.0.1'"


def write_nvidia_smi(folder: Path, shown: str) -> None:
    program = folder / "nvidia-smi"
    program.write_text(
        f"#!/bin/sh\necho '| NVIDIA-SMI 550.54   Driver Version: 550.54   {shown} |'\n"
    )
    program.chmod(0o755)


# --- import specjax -------------------------------------------------------------------------------

LOADED = (
    "print(sorted({'jax', 'jaxlib', 'numpy', 'flax', 'transformers', 'rich'} & sys.modules.keys()))"
)


def import_specjax(path: Path, code: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), str(ROOT)])}
    command = [sys.executable, "-W", "always", "-c", f"import sys\n{code}"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


def test_importing_specjax_warns_once_and_imports_no_jax(tmp_path) -> None:
    install_fitting(tmp_path, "flax")
    install(tmp_path, "flax", "0.11.2")
    done = import_specjax(
        tmp_path, f"import specjax, specjax.errors, specjax.cli.env\nimport specjax\n{LOADED}"
    )
    assert done.stdout == "[]\n"
    assert done.stderr.count("Warning") == 1
    assert (
        f"flax 0.11.2 is installed, but specjax needs flax<0.13,>=0.12.4: {PIP} install -U"
        " 'flax<0.13,>=0.12.4'" in done.stderr
    )
    assert "python -m specjax env" in done.stderr


def test_importing_specjax_says_nothing_where_all_fits(tmp_path) -> None:
    install_fitting(tmp_path)
    done = import_specjax(tmp_path, f"import specjax\n{LOADED}")
    assert (done.stdout, done.stderr) == ("[]\n", "")
