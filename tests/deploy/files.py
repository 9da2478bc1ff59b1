"""Read the files under deploy/: their manifests, and the command lines that they run."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from specjax.cli.main import COMMANDS, Command, find_command, parse_options
from tests.documents import ROOT

DEPLOY = ROOT / "deploy"
SCRIPTS = sorted((DEPLOY / "slurm").glob("*.sh"))
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
TASKS = sorted((DEPLOY / "skypilot").glob("*.yaml"))


def objects(*files: Path) -> list[dict[str, Any]]:
    """Return all objects of these manifests, or of all manifests if none is named."""
    texts = [file.read_text() for file in files or MANIFESTS]
    return [object_ for text in texts for object_ in yaml.safe_load_all(text)]


def of_kind(kind: str, *files: Path) -> list[dict[str, Any]]:
    """Return the objects of one kind."""
    return [object_ for object_ in objects(*files) if object_["kind"] == kind]


def templates(object_: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the templates of the pods that an object makes."""
    spec = object_.get("spec", {})
    if object_["kind"] == "LeaderWorkerSet":
        return [spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
    return [spec["template"]] if "template" in spec else []


def pods(*files: Path) -> list[dict[str, Any]]:
    """Return the specifications of all pods of these manifests."""
    return [template["spec"] for object_ in objects(*files) for template in templates(object_)]


def containers(*files: Path) -> list[dict[str, Any]]:
    """Return the containers of all pods of these manifests."""
    return [container for pod in pods(*files) for container in pod["containers"]]


def commands_of_shell(text: str) -> Iterator[list[str]]:
    """Yield the words after ``specjax`` of every command in a script.

    Commands in its comments, three spaces in, are included.
    """
    text = re.sub(r"^#   +", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    for line in text.splitlines():
        if line.lstrip().startswith("#") or "specjax" not in line:
            continue
        words = shlex.split(line, comments=True)
        for place, word in enumerate(words[:-1]):
            if word == "specjax" and words[place + 1] in COMMANDS:
                yield words[place + 1 :]


def command_lines(file: Path) -> list[list[str]]:
    """Return every command line of specjax in a file."""
    if file in MANIFESTS:
        # The image has these files of the repository in that folder.
        return [
            [word.replace("/opt/specjax/", f"{ROOT}/") for word in container["args"]]
            for container in containers(file)
        ]
    if file in TASKS:
        return list(commands_of_shell(yaml.safe_load(file.read_text())["run"]))
    return list(commands_of_shell(file.read_text()))


def config_of(words: list[str]) -> Any:
    """Return the options of a command line, as the command reads them."""
    name, command, options = find_command(words)
    assert isinstance(command, Command), f"{' '.join(words)}: names no command"
    return parse_options(command.config, options, prog=name)


def option_of_sbatch(script: Path, name: str) -> str:
    """Return the value of an option of sbatch in a script."""
    match = re.search(rf"^#SBATCH --{name}=(\S+)$", script.read_text(), re.MULTILINE)
    assert match, f"{script.name}: has no --{name}"
    return match[1]
