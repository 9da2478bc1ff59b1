"""Check what is published: a source distribution, and the wheel built from it.

The demo runs from each in an empty environment.
"""

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from email import message_from_string
from email.message import Message
from pathlib import Path
from shutil import copy, copytree, ignore_patterns, rmtree

import pytest

import specjax
from specjax.cli.demo import FEW
from tests.documents import ROOT

NAME = f"specjax-{specjax.__version__}"
IN_SDIST = {
    *("CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md"),
    *("pyproject.toml", "requirements.txt"),
}
"""The files at the top of a source distribution, without setup.cfg, which setuptools writes."""

BUILD = (
    "import sys, setuptools.build_meta as backend; getattr(backend, 'build_' +"
    " sys.argv[1])(sys.argv[2])"
)


def files_of_the_package(root: Path) -> set[str]:
    """Return every file below specjax/, except those that Python itself writes there."""
    paths = (path for path in (root / "specjax").rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix() for path in paths if path.suffix != ".pyc"}


def build(kind: str, source: Path, output: Path) -> Path:
    """Build a distribution with the build backend itself, and return its path.

    The backend needs no network.
    """
    built = subprocess.run(
        [sys.executable, "-c", BUILD, kind, str(output)],
        cwd=source,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    (distribution,) = output.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return distribution


def copy_sources(folder: Path, copy_file: Callable[..., object] = copy) -> None:
    """Copy the sources of distributions into ``folder``.

    setuptools writes beside the sources.
    """
    for name in ("specjax", "tests"):
        copytree(
            ROOT / name,
            folder / name,
            ignore=ignore_patterns("__pycache__"),
            copy_function=copy_file,
        )
    for path in ROOT.iterdir():
        if path.is_file() and path.name != ".git":
            copy_file(path, folder / path.name)


def copy_if_small(source: str | Path, copied: str | Path) -> None:
    """Copy a file, or leave its copy empty if the file is large.

    Most of the time of a build goes into compressing the models.
    """
    if Path(source).stat().st_size < 100_000:
        copy(source, copied)
    else:
        Path(copied).touch()


@pytest.fixture(scope="module")
def sdist(tmp_path_factory) -> Path:
    """Return a source distribution in which large files are empty."""
    source = tmp_path_factory.mktemp("source")
    copy_sources(source, copy_if_small)
    return build("sdist", source, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def unpacked(sdist, tmp_path_factory) -> Path:
    """Return the folder of the unpacked source distribution."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return folder / NAME


@pytest.fixture(scope="module")
def wheel(unpacked, tmp_path_factory) -> Path:
    """Return a wheel built from the source distribution, as pip and build make it."""
    return build("wheel", unpacked, tmp_path_factory.mktemp("wheel"))


def read_member(wheel: Path, name: str) -> str:
    with zipfile.ZipFile(wheel) as archive:
        return archive.read(f"{NAME}.dist-info/{name}").decode()


def metadata(wheel: Path) -> Message:
    return message_from_string(read_member(wheel, "METADATA"))


def requirements(lines: Sequence[str]) -> set[str]:
    """Return requirements in one form.

    Comments and spaces are removed, and the bounds of a version are sorted.
    """
    plain = (line.partition("#")[0].replace(" ", "") for line in lines)
    named = (re.fullmatch(r"([\w.\[\]-]+?)([<>=!~].*)?", line) for line in plain if line)
    return {
        f"{match[1]}{','.join(sorted((match[2] or '').split(',')))}" for match in named if match
    }


def test_the_source_distribution_has_the_package_and_what_building_needs(unpacked) -> None:
    names = {
        path.relative_to(unpacked).as_posix() for path in unpacked.rglob("*") if path.is_file()
    }
    names = {name for name in names if not name.startswith("specjax.egg-info/")} - {"setup.cfg"}
    assert names == IN_SDIST | files_of_the_package(ROOT)


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if not name.startswith(f"{NAME}.dist-info/")}
    assert names == files_of_the_package(ROOT)
    assert {
        "specjax/py.typed",
        "specjax/assets/target/model.safetensors",
        "specjax/assets/target/config.json",
    } <= names
    assert any(name.endswith(".html") for name in names)


def test_the_wheel_needs_what_requirements_txt_says(wheel) -> None:
    needed = [
        line for line in metadata(wheel).get_all("Requires-Dist", []) if "extra ==" not in line
    ]
    assert requirements(needed) == requirements(
        (ROOT / "requirements.txt").read_text().splitlines()
    )


def test_the_wheel_says_what_it_is(wheel) -> None:
    about = metadata(wheel)
    assert about["Version"] == specjax.__version__
    assert about["License-Expression"] == "MIT"
    assert about["License-File"] == "LICENSE"
    assert about["Author"] == "The specjax developers"
    assert about["Author"] in read_member(wheel, "licenses/LICENSE")
    assert "# specjax" in about.get_payload()
    command = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]["specjax"]
    words = read_member(wheel, "entry_points.txt").split()
    assert words == ["[console_scripts]", "specjax", "=", command]


def test_the_classifiers_name_the_versions_of_python_that_are_tested() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(project["classifiers"]))
    workflow = (ROOT / ".github" / "workflows" / "checks.yml").read_text()
    (matrix,) = re.findall(r"python: \[(.*)\]", workflow)
    assert versions == re.findall(r'"(.*?)"', matrix)
    assert project["requires-python"] == f">={versions[0]}"


# --- with a package index -------------------------------------------------------------------------


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command without the settings of these tests, and return its output."""
    ours = ("JAX_", "PIP_REQUIRE", "PYTHON", "PYTEST", "SPECJAX_", "VIRTUAL_ENV", "XLA_")
    variables = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    ended = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, (
        f"{command} ended with {ended.returncode}:\n{ended.stdout[-4000:]}\n{ended.stderr[-4000:]}"
    )
    return ended.stdout


@contextmanager
def environment(folder: Path) -> Iterator[Path]:
    """Make an empty virtual environment, yield its Python, and remove the environment.

    With JAX it takes more than a gigabyte.
    """
    run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
    try:
        yield folder / "bin" / "python"
    finally:
        rmtree(folder)


@pytest.fixture(scope="module")
def distributions(tmp_path_factory) -> Path:
    """Return a folder of what `python -m build` makes, after the checks of the package index."""
    folder = tmp_path_factory.mktemp("build")
    copy_sources(folder / "source")
    with environment(folder / "environment") as python:
        tools = ("build", "twine", "validate-pyproject[all]")
        run(python, "-m", "pip", "install", "--quiet", *tools, cwd=folder)
        run(python, "-m", "validate_pyproject", folder / "source" / "pyproject.toml", cwd=folder)
        run(python, "-m", "build", "--outdir", folder / "dist", folder / "source", cwd=folder)
        run(python, "-m", "twine", "check", "--strict", *(folder / "dist").iterdir(), cwd=folder)
    return folder / "dist"


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", [".whl", ".tar.gz"])
def test_the_demo_runs_in_an_empty_environment(suffix, distributions, tmp_path) -> None:
    (distribution,) = distributions.glob(f"*{suffix}")
    empty = tmp_path / "empty"
    empty.mkdir()
    with environment(tmp_path / "environment") as python:
        run(python, "-m", "pip", "install", "--quiet", distribution, cwd=tmp_path)
        where = run(python, "-c", "import specjax; print(specjax.__file__)", cwd=empty)
        assert where.startswith(str(tmp_path / "environment"))
        few = ("--max-new-tokens", "8", "--repeats", "1")
        printed = run(python, "-m", "specjax", "demo", *few, cwd=empty)
    assert not [method for method in FEW if f" {method}" not in printed]
