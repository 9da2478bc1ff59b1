"""What the files under deploy/ say: the manifests in them, and the command lines that they run."""

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
    """All objects of these manifests; of all, if none is given."""
    return [each for file in files or MANIFESTS for each in yaml.safe_load_all(file.read_text())]


def of_kind(kind: str, *files: Path) -> list[dict[str, Any]]:
    """Those of one kind."""
    return [each for each in objects(*files) if each["kind"] == kind]


def templates(object_: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of the pods that an object makes."""
    spec = object_.get("spec", {})
    if object_["kind"] == "LeaderWorkerSet":
        return [spec["leaderWorkerTemplate"][name] for name in ("leaderTemplate", "workerTemplate")]
    return [spec["template"]] if "template" in spec else []


def pods(*files: Path) -> list[dict[str, Any]]:
    """The specifications of all pods of these manifests."""
    return [template["spec"] for each in objects(*files) for template in templates(each)]


def containers(*files: Path) -> list[dict[str, Any]]:
    """Their containers."""
    return [container for pod in pods(*files) for container in pod["containers"]]


def commands_of_shell(text: str) -> Iterator[list[str]]:
    """The words after ``specjax`` of every command in a script, and of those that its comments show, three spaces in."""
    text = re.sub(r"^#   +", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    for line in text.splitlines():
        if line.lstrip().startswith("#") or "specjax" not in line:
            continue
        words = shlex.split(line, comments=True)
        for place, word in enumerate(words[:-1]):
            if word == "specjax" and words[place + 1] in COMMANDS:
                yield words[place + 1 :]


def command_lines(file: Path) -> list[list[str]]:
    """Every command line of specjax in a file."""
    if file in MANIFESTS:
        return [container["args"] for container in containers(file)]
    if file in TASKS:
        return list(commands_of_shell(yaml.safe_load(file.read_text())["run"]))
    return list(commands_of_shell(file.read_text()))


def config_of(words: list[str]) -> Any:
    """The options of a command line, as the command gets them."""
    name, command, options = find_command(words)
    assert isinstance(command, Command), f"{' '.join(words)}: names no command"
    return parse_options(command.config, options, prog=name)


def option_of_sbatch(script: Path, name: str) -> str:
    """What a script tells sbatch."""
    found = re.search(rf"^#SBATCH --{name}=(\S+)$", script.read_text(), re.MULTILINE)
    assert found, f"{script.name}: has no --{name}"
    return found[1]
