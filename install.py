"""Make a virtual environment and install into it, with a line that says what pip does.

The Makefile calls it. It needs Python alone.

    python install.py DIRECTORY PIP_ARGUMENT...

In a terminal one line says what pip does, and for how long; in a log a new line does so now and
then. The last line says how long it all took. The output of pip itself is printed if pip fails.
"""

import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAUSE, PAUSE_OF_LOG = 0.5, 10.0
"""Seconds between two lines, in a terminal and elsewhere."""


class Sign:
    """The line that says what is being done."""

    def __init__(self, where: str) -> None:
        self._where, self.doing = where, "making a virtual environment"
        self._began, self._over = time.monotonic(), threading.Event()
        self._is_terminal = sys.stderr.isatty()

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Say now and then what is being done, as long as the body runs."""
        thread = threading.Thread(target=self._speak, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()

    def say(self, words: str) -> None:
        """Show one line, which in a terminal replaces the line before it."""
        begin, end = ("\r\033[K", "") if self._is_terminal else ("", "\n")
        print(begin + words, end=end, file=sys.stderr, flush=True)

    def seconds(self) -> str:
        """Return the time since the start, in words."""
        minutes, seconds = divmod(round(time.monotonic() - self._began), 60)
        return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"

    def _speak(self) -> None:
        pause = PAUSE if self._is_terminal else PAUSE_OF_LOG
        self.say(f"installing into {self._where} ...")
        while not self._over.wait(pause):
            line = f"installing into {self._where}, {self.seconds()}: {self.doing}"
            columns = shutil.get_terminal_size((100, 24)).columns
            self.say(line[: columns - 1])  # a wrapped line could not be replaced


def doing(line: str, packages: set[str]) -> str | None:
    """Return what pip does, read from a ``line`` of its output; None if the line does not say.

    The packages that the line names are added to ``packages``.
    """
    word, _, rest = line.strip().partition(" ")
    if word == "Collecting":
        packages.add(rest.split()[0])
        return f"looking for packages, {len(packages)} found"
    if word in ("Downloading", "Using"):
        return (
            f"{len(packages)} packages found, fetching"
            f" {rest.removeprefix('cached ').rpartition('/')[2]}"
        )
    if line.startswith("Installing collected packages"):
        return f"unpacking {rest.count(',') + 1} packages"
    return None


def main(directory: str, *arguments: str) -> int:
    """Install, and return the exit status of pip, or of venv if that fails."""
    sign, output = Sign(directory), []
    packages: set[str] = set()
    python = Path(directory) / "bin" / "python"
    packages_of_python = (
        Path(directory) / "lib" / "python{}.{}".format(*sys.version_info) / "site-packages"
    )
    with sign.shown():
        if not (packages_of_python / "pip").exists():
            venv = subprocess.run([sys.executable, "-m", "venv", directory], check=False)
            if venv.returncode:  # venv has printed why
                return venv.returncode
        sign.doing = "looking for packages"
        command = [
            str(python),
            "-m",
            "pip",
            "install",
            "--disable-pip-version-check",
            "--progress-bar",
            "off",
            *arguments,
        ]
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        ) as pip:
            assert pip.stdout is not None
            for line in pip.stdout:
                output.append(line)
                sign.doing = doing(line, packages) or sign.doing
    if pip.returncode:
        sign.say("".join(output) + f"pip failed, after {sign.seconds()}\n")
    else:
        sign.say(
            f"installed into {directory} in {sign.seconds()}"
            + ("\n" if sys.stderr.isatty() else "")
        )
    return pip.returncode


if __name__ == "__main__":
    try:
        sys.exit(main(*sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
