"""One of several processes that share a cache: `test_stored_windows` starts them.

python -m tests.training.one_builder DIRECTORY COORDINATOR NUMBER

A process writes NUMBER.begun when it begins to tokenize the data of config.json, and goes on when
the file "go" is there. In the end it writes the hash of the windows into NUMBER.txt.
"""

import json
import sys
import time
from pathlib import Path

from specjax.training import data
from specjax.training.config import DataConfig


def main(directory: Path, number: str) -> None:
    pack = data._pack

    def pack_when_told(*arguments):
        (directory / f"{number}.begun").touch()
        while not (directory / "go").exists():
            time.sleep(0.05)
        return pack(*arguments)

    data._pack = pack_when_told
    config = DataConfig(**json.loads((directory / "config.json").read_text()))
    (directory / f"{number}.txt").write_text(data.prepare(config).digest)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[3])
