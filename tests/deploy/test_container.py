"""Check the Dockerfile, as far as it can be read.

The files that it copies exist, its versions fit, and the manifests fit it.
"""

import fnmatch
import re
import shlex
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.deploy.files import DEPLOY, containers, pods
from tests.documents import ROOT


def steps() -> list[tuple[str, str]]:
    """Return the instructions: their names, and the rest of their lines."""
    text = re.sub(r"^#.*\n", "", (DEPLOY / "Dockerfile").read_text(), flags=re.MULTILINE)
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line.strip()]


def the(name: str) -> str:
    """Return the rest of the line of the only instruction of a name."""
    (rest_of_line,) = [rest for word, rest in steps() if word == name]
    return rest_of_line


def requirements() -> list[Requirement]:
    lines = (ROOT / "requirements.txt").read_text().splitlines()
    return [Requirement(line) for line in lines if line.strip() and not line.startswith("#")]


def pinned() -> dict[str, str]:
    """Return versions by name, in the form in which names are compared."""
    lines = [
        line
        for line in (DEPLOY / "constraints.txt").read_text().splitlines()
        if not line.startswith("#")
    ]
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version
        for name, version in (line.split("==") for line in lines)
    }


@pytest.mark.parametrize("requirement", requirements(), ids=lambda requirement: requirement.name)
def test_every_requirement_is_pinned_within_its_range(requirement: Requirement) -> None:
    version = pinned()[re.sub(r"[-_.]+", "-", requirement.name).lower()]
    assert requirement.specifier.contains(version)


def test_what_is_copied_is_there_and_is_not_ignored() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    let_through = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    assert "*" in ignored
    copied = [name for word, rest in steps() if word == "COPY" for name in rest.split()[:-1]]
    assert copied
    for name in copied:
        assert (ROOT / name).exists()
        assert any(fnmatch.fnmatch(name, pattern) for pattern in let_through), name
    assert sorted(let_through) == sorted(copied)


def test_its_python_is_one_that_specjax_runs_with() -> None:
    image, _, tag = the("FROM").partition(":")
    least = re.search(
        r'^requires-python = ">=(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert least and image == "python"
    numbers = re.match(r"(\d+)\.(\d+)-slim$", tag)
    assert numbers and tuple(map(int, numbers.groups())) >= tuple(map(int, least[1].split(".")))


def test_its_user_is_not_root_and_is_the_manifests() -> None:
    user = the("USER")
    assert int(user) > 0
    assert any(f"useradd --uid {user} " in rest for word, rest in steps() if word == "RUN")
    for pod in pods():
        assert pod["securityContext"] == {
            "runAsNonRoot": True,
            "runAsUser": int(user),
            "fsGroup": int(user),
        }


def test_what_is_compiled_and_downloaded_is_kept_in_the_volume() -> None:
    volume = the("VOLUME")
    variables = dict(pair.split("=", 1) for pair in shlex.split(the("ENV")))
    assert set(variables) == {"HF_HOME", "JAX_COMPILATION_CACHE_DIR"}
    assert all(Path(place).is_relative_to(volume) for place in variables.values())
    for container in containers():
        assert volume in [mount["mountPath"] for mount in container["volumeMounts"]]
        assert "command" not in container  # the command of the image is specjax
