"""The real programs that talk to the server, each in an environment of its own."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-clients"
SESSIONS = Path(__file__).parent / "sessions"
LONGEST_SESSION = 1800  # seconds; a model needs minutes


class UnavailableError(Exception):
    """A program cannot be had: its registry is not reachable, or node is missing."""


@dataclass(frozen=True)
class Program:
    """A program and the session that it holds.

    Attributes:
        name: the name of the program, and of its environment.
        session: the file of its session, Python or JavaScript.
        pip: what pip installs for it, each with its version.
        npm: what npm installs for it, each with its version.
    """

    name: str
    session: str
    pip: tuple[str, ...] = ()
    npm: tuple[str, ...] = ()

    @property
    def environment(self) -> Path:
        """The folder that the program is installed into."""
        return ENVIRONMENTS / self.name

    @property
    def versions(self) -> str:
        """The packages and their versions, in words."""
        return " and ".join(self.pip + self.npm)

    def install(self) -> None:
        """Install the program, unless this very version is installed.

        Raises:
            UnavailableError: it cannot be had.
        """
        mark = self.environment / "installed.txt"  # written last
        if mark.exists() and mark.read_text() == self.versions:
            return
        shutil.rmtree(self.environment, ignore_errors=True)
        if self.pip:
            self._install(
                sys.executable, str(ROOT / "install.py"), str(self.environment), *self.pip
            )
        if self.npm:
            quiet = ("--no-audit", "--no-fund", "--no-package-lock")
            self._install("npm", "install", "--prefix", str(self.environment), *quiet, *self.npm)
        self.environment.mkdir(exist_ok=True)
        mark.write_text(self.versions)

    def _install(self, *command: str) -> None:
        if shutil.which(command[0]) is None:
            raise UnavailableError(f"there is no {command[0]}")
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            lines = (done.stderr + done.stdout).strip().splitlines() or ["it says nothing"]
            first = next((line for line in lines if "error" in line.lower()), lines[-1])
            raise UnavailableError(f"{Path(command[0]).name} installs nothing: {first}")

    def run(
        self, address: str, model: str, home: Path, conversation: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """Hold the session with the server at an address, and return what the program reports.

        Args:
            address: the address of the server, without a path.
            model: the name of the model.
            home: an empty folder, which is the program's home and its working directory.
            conversation: the conversation to hold; None for the one in conversation.json.

        Raises:
            AssertionError: the program fails.
        """
        # JavaScript looks for packages in the folders above a file.
        sessions = self.environment / "sessions"
        shutil.rmtree(sessions, ignore_errors=True)
        shutil.copytree(SESSIONS, sessions)
        if conversation is not None:
            (sessions / "conversation.json").write_text(json.dumps(conversation))
        if not self.session.endswith(".py"):
            interpreter = "node"
        elif self.pip:
            interpreter = str(self.environment / "bin" / "python")
        else:
            interpreter = sys.executable
        # No settings or keys of the user, and nothing sent elsewhere.
        variables = {
            "PATH": f"{self.environment / 'node_modules' / '.bin'}:{os.environ['PATH']}",
            "HOME": str(home),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "PYDANTIC_DISABLE_PLUGINS": "__all__",
            "HF_HUB_OFFLINE": "1",
        }
        done = subprocess.run(
            [interpreter, str(sessions / self.session), address, model],
            cwd=home,
            env=variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=LONGEST_SESSION,
            check=False,
        )
        assert done.returncode == 0, f"{self.name}:\n{done.stdout}\n{done.stderr}"
        return json.loads(done.stdout.splitlines()[-1])


def _program(name: str, session: str, **packages: list[str]) -> Program:
    return Program(name, session, **{tool: tuple(names) for tool, names in packages.items()})


def _read() -> tuple[Program, ...]:
    table = tomllib.loads((Path(__file__).parent / "programs.toml").read_text())
    return tuple(_program(name, **entry) for name, entry in table.items())


PROGRAMS = _read()
