"""Check the cell that installs specjax: one text in all notebooks, for all machines of Colab."""

import functools
import glob
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from release.write_install_cell import FIRST_LINE, find_cell, render_cell
from specjax import installation
from specjax.installation import Mismatch
from tests.documents import ROOT
from tests.test_installation import write_nvidia_smi

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REAL_RUN, REAL_GLOB = subprocess.run, glob.glob


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_every_notebook_has_the_cell_before_all_other_code_that_imports(path) -> None:
    notebook = json.loads(path.read_text())
    cell = find_cell(notebook)
    assert cell is not None
    assert "".join(cell["source"]) == render_cell(), "run: python release/write_install_cell.py"
    texts = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    importing = [text for text in texts if "import " in text]
    assert [text.startswith(FIRST_LINE) for text in importing] == [True] + [False] * (
        len(importing) - 1
    )


def test_an_address_becomes_the_source(tmp_path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[tool.specjax]\naddress = "https://github.com/OWNER/NAME"'
    )
    assert 'SOURCE = "git+https://github.com/OWNER/NAME"' in render_cell(tmp_path)
    (tmp_path / "pyproject.toml").write_text("[tool.specjax]\naddress = ''")
    assert 'SOURCE = ""' in render_cell(tmp_path)


class Machine:
    """A made-up machine: its devices and packages, and the calls of pip by the cell.

    Attributes:
        pip: the arguments of each call of pip.
        versions: the versions of installed packages, which a call of pip changes.
        after: the versions after the first call of pip.
        mismatches: the mismatches that are left. A call of pip with the remedy of one removes it.
    """

    def __init__(self, monkeypatch, folder: Path) -> None:
        self._monkeypatch = monkeypatch
        self.pip: list[tuple[str, ...]] = []
        self.versions = {
            "jax": "0.7.2",
            "jaxlib": "0.7.2",
            "ml_dtypes": "0.5",
            "numpy": "2.2.6",
            "scipy": "1.16",
        }
        self.after = {"jax": "0.12.0.1", "jaxlib": "0.12.0.1"}
        self.mismatches: list[Mismatch] = []
        self.devices: list[str] = []
        self.is_installed = False
        self.fails = False
        monkeypatch.setattr(subprocess, "run", self._run)
        monkeypatch.setattr(
            glob,
            "glob",
            lambda pattern: [
                name for name in self.devices if name.startswith(pattern.partition("[")[0])
            ],
        )
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: self.is_installed or None)
        monkeypatch.setattr(metadata, "version", lambda name: self.versions[name])
        monkeypatch.setattr(installation, "find_mismatches", self._find_mismatches)
        monkeypatch.setattr(sys, "path", [*sys.path])
        for name in self.versions:
            monkeypatch.delitem(sys.modules, name, raising=False)
        for name in ("SPECJAX_SOURCE", "COLAB_TPU_ADDR", "TPU_WORKER_ID"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PATH", str(folder))
        monkeypatch.chdir(folder)

    def import_module(self, name: str) -> None:
        """Let this Python have imported a module before the cell runs."""
        self._monkeypatch.setitem(sys.modules, name, SimpleNamespace())

    def run_cell(self) -> None:
        """Run the cell as a notebook does."""
        with warnings.catch_warnings():
            exec(compile(render_cell(), "cell", "exec"), {"__name__": "__main__"})

    def _run(self, command, **options):
        if command[0] == "nvidia-smi":
            return REAL_RUN(command, **options)
        assert command[:3] == [sys.executable, "-m", "pip"]
        self.pip.append(tuple(command[3:]))
        self.versions |= self.after
        self.mismatches = [
            mismatch for mismatch in self.mismatches if mismatch.remedy != self.pip[-1]
        ]
        return SimpleNamespace(returncode=int(self.fails), stdout="no space left on device")

    def _find_mismatches(self, path=None, *, with_devices=False):
        assert self.is_installed or self.pip, "looked for before it is installed"
        return list(self.mismatches)


@pytest.fixture
def machine(monkeypatch, tmp_path) -> Machine:
    (tmp_path / "notebooks").mkdir()
    return Machine(monkeypatch, tmp_path / "notebooks")


@pytest.mark.parametrize(
    ("shown", "devices", "variable", "extra"),
    [
        ("", [], "", ""),
        ("CUDA Version: 12.4", [], "", "[cuda12]"),
        ("CUDA UMD Version: 13.1", [], "", "[cuda13]"),
        ("CUDA Version: 11.8", [], "", ""),
        ("no driver", [], "", ""),
        ("", ["/dev/accel0"], "", "[tpu]"),
        ("", ["/dev/vfio/0"], "", "[tpu]"),
        ("", [], "COLAB_TPU_ADDR", "[tpu]"),
        ("", [], "TPU_WORKER_ID", "[tpu]"),
    ],
)
def test_it_installs_the_extra_of_the_machine(
    machine, monkeypatch, tmp_path, shown, devices, variable, extra
) -> None:
    if shown:
        write_nvidia_smi(tmp_path / "notebooks", shown)
    if variable:
        monkeypatch.setenv(variable, "0")
    machine.devices = devices
    monkeypatch.setenv("SPECJAX_SOURCE", "/a/clone")
    machine.run_cell()
    assert machine.pip == [("install", f"/a/clone{extra}")]
    # `specjax env` and the warning on import look at the same things.
    monkeypatch.setattr(installation, "glob", glob.glob)
    assert installation.has_tpu() == (extra == "[tpu]")
    assert (installation.cuda_of_driver() or 0) // 12 == ("cuda" in extra)


@pytest.mark.parametrize(
    ("source", "requirement"),
    [
        ("git+https://example.org/specjax", "specjax[tpu] @ git+https://example.org/specjax"),
        ("../clone", "../clone[tpu]"),
        ("specjax", "specjax[tpu]"),
    ],
)
def test_the_variable_names_the_source(machine, monkeypatch, source, requirement) -> None:
    machine.devices = ["/dev/accel0"]
    Path("../pyproject.toml").touch()
    monkeypatch.setenv("SPECJAX_SOURCE", source)
    machine.run_cell()
    assert machine.pip == [("install", requirement)]


def test_in_a_clone_it_installs_the_clone_and_makes_it_importable_at_once(machine) -> None:
    machine.devices = ["/dev/accel0"]
    Path("../pyproject.toml").write_text('[project]\nname = "specjax"\n')
    machine.run_cell()
    assert machine.pip == [("install", "-e", "..[tpu]")]
    assert sys.path[0] == str(Path("..").resolve())


def test_in_another_project_it_does_not_install_that(machine) -> None:
    Path("../pyproject.toml").write_text('[project]\nname = "theirs"\n')
    with pytest.raises(SystemExit, match="specjax has no public address yet"):
        machine.run_cell()
    assert machine.pip == []


def test_without_a_source_it_says_what_to_do_in_one_line(machine) -> None:
    with pytest.raises(
        SystemExit, match=r"^specjax has no public address yet: .* set SPECJAX_SOURCE .*$"
    ):
        machine.run_cell()
    assert machine.pip == []


def test_what_is_installed_and_fits_stays_as_it_is(machine, capsys) -> None:
    machine.is_installed = True
    machine.import_module("jax")
    machine.run_cell()
    assert machine.pip == []
    assert capsys.readouterr().out == "specjax 0.1.0 with JAX 0.7.2\n"


def test_what_does_not_fit_afterwards_is_put_right_with_one_call_for_each_remedy(
    machine, monkeypatch
) -> None:
    monkeypatch.setenv("SPECJAX_SOURCE", "/a/clone")
    remove, lift = (
        ("uninstall", "-y", "jax-cuda12-plugin", "jax-cuda12-pjrt"),
        ("install", "-U", "jax[tpu]==0.12.0.1"),
    )
    machine.mismatches = [
        Mismatch("plugin", remove),
        Mismatch("jaxlib", lift),
        Mismatch("libtpu", lift),
    ]
    machine.run_cell()
    assert machine.pip == [("install", "/a/clone"), remove, lift]


def test_what_pip_cannot_put_right_is_named(machine, monkeypatch) -> None:
    machine.is_installed = True
    wrong = Mismatch(
        "flax 0.11.2 is installed, but specjax needs another", ("install", "-U", "flax>=0.12")
    )
    monkeypatch.setattr(installation, "find_mismatches", lambda with_devices=False: [wrong])
    with pytest.raises(
        SystemExit,
        match=(
            r"^flax 0\.11\.2 is installed, but specjax needs another: \S+ -m pip install -U"
            r" 'flax>=0.12'"
        ),
    ):
        machine.run_cell()


def test_a_pip_that_fails_is_shown(machine, monkeypatch, capsys) -> None:
    monkeypatch.setenv("SPECJAX_SOURCE", "/a/clone")
    machine.fails = True
    with pytest.raises(SystemExit, match="pip failed: see above"):
        machine.run_cell()
    assert capsys.readouterr().out == "pip install /a/clone\nno space left on device\n"


@pytest.mark.parametrize(
    ("imported", "message"),
    [
        ([], None),
        (["numpy"], None),  # pip has left its version
        (["jax"], "had imported jax 0.7.2 before"),
        (["jax", "jaxlib", "numpy"], "had imported jax 0.7.2, jaxlib 0.7.2 before"),
    ],
)
def test_it_asks_for_a_restart_only_where_what_was_imported_has_been_replaced(
    machine, monkeypatch, imported, message
) -> None:
    monkeypatch.setenv("SPECJAX_SOURCE", "/a/clone")
    for name in imported:
        machine.import_module(name)
    if message is None:
        machine.run_cell()
    else:
        with pytest.raises(SystemExit, match=f"^Restart the session .* {message}"):
            machine.run_cell()


def test_it_asks_for_a_restart_where_the_numpy_below_jax_has_been_replaced(
    machine, monkeypatch
) -> None:
    monkeypatch.setenv("SPECJAX_SOURCE", "/a/clone")
    machine.import_module("numpy")
    machine.after["numpy"] = "2.4.6"
    with pytest.raises(
        SystemExit, match=r"^Restart the session .* had imported numpy 2\.2\.6 before"
    ):
        machine.run_cell()


def test_it_asks_for_a_restart_where_the_libtpu_of_an_imported_jax_is_replaced(machine) -> None:
    machine.is_installed, machine.after = True, {}
    machine.import_module("jax")
    machine.mismatches = [Mismatch("libtpu", ("install", "-U", "jax[tpu]==0.7.2"))]
    with pytest.raises(SystemExit, match=r"^Restart the session .* had imported JAX before"):
        machine.run_cell()


# --- Colab ----------------------------------------------------------------------------------------

COLAB = (
    *("jax==0.7.2", "jaxlib==0.7.2", "flax==0.11.2", "libtpu==0.0.21.1", "numpy>=2.1,<2.3"),
    *("ipykernel", "nbclient"),
)
PLUGIN = ("jax-cuda12-plugin==0.7.2", "jax-cuda12-pjrt==0.7.2")
"""They are installed without what they require: libraries for GPUs, of gigabytes."""

EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=1800, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[1])
"""


@functools.cache
def find_python_313() -> str | None:
    """Return the path of a Python 3.13, or None if there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    candidates = [sys.executable, shutil.which("python3.13")]
    candidates += sorted(map(str, pyenv.glob("versions/3.13*/bin/python")))
    if uv := shutil.which("uv"):
        command = [uv, "python", "find", "3.13"]
        shown = REAL_RUN(command, capture_output=True, text=True, check=False)
        candidates.append(shown.stdout.strip())
    for python in filter(None, candidates):
        shown = REAL_RUN([python, "--version"], capture_output=True, text=True, check=False)
        if shown.returncode == 0 and shown.stdout.startswith("Python 3.13."):
            return python
    return None


@pytest.mark.thorough
@pytest.mark.timeout(3600)
def test_on_colab_the_cell_lifts_jax_and_all_its_parts_and_the_quickstart_runs(tmp_path) -> None:
    python = find_python_313()
    if python is None:
        pytest.skip(
            "COLAB WAS NOT TRIED: there is no Python 3.13 (pyenv install 3.13, or uv python install"
            " 3.13)"
        )
    prefixes_of_tests = ("JAX_", "PYTHONPATH", "SPECJAX_", "XLA_FLAGS")
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(prefixes_of_tests)
    }
    environment |= {"SPECJAX_SOURCE": str(tmp_path / "clone"), "JAX_PLATFORMS": "cpu"}

    def run(command: list[str], **options) -> str:
        done = REAL_RUN(
            command, check=False, env=environment, capture_output=True, text=True, **options
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    run([python, "-m", "venv", str(tmp_path / "colab")])
    colab = str(tmp_path / "colab" / "bin" / "python")
    run([colab, "-m", "pip", "install", "--only-binary", ":all:", *COLAB])
    run([colab, "-m", "pip", "install", "--only-binary", ":all:", "--no-deps", *PLUGIN])
    run(["git", "clone", "-q", str(ROOT), str(tmp_path / "clone")])
    # Changes that are not committed are tested, too.
    for name in ("specjax", "release", "notebooks", "pyproject.toml", "requirements.txt"):
        source, copy = ROOT / name, tmp_path / "clone" / name
        if source.is_dir():
            shutil.copytree(source, copy, dirs_exist_ok=True)
        else:
            shutil.copy(source, copy)
    notebook = Path(shutil.copy(ROOT / "notebooks" / "quickstart.ipynb", tmp_path))
    run([colab, "-c", EXECUTE, str(notebook)], cwd=tmp_path)
    outputs = [
        output
        for cell in json.loads(notebook.read_text())["cells"]
        for output in cell.get("outputs", [])
    ]
    printed = "".join("".join(output.get("text", ())) for output in outputs)
    assert "with JAX 0.1" in printed
    assert "realised" in printed
    report = json.loads(run([colab, "-m", "specjax", "env", "--json"], cwd=tmp_path))
    assert report["mismatches"] == []
    assert report["jax"]["devices"][0]["platform"] == "cpu"
    # The plugins of another JAX are removed, because this machine has no use for them.
    assert not report["packages"].keys() & installation.PLUGINS.keys()
