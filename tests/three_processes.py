"""One of three processes that find each other: `test_processes` starts them.

    python -m tests.three_processes DIRECTORY COORDINATOR PROCESS

The first tells the others numbers, who write what they hear. Where the directory holds a file DIES, the process of that number
ends itself then; where it holds a file FAILS, that one raises an exception, while the others are in a collective.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp

from specjax import processes
from specjax.sharding import make_mesh, to_host

DIES = "dies"
FAILS = "fails"


def main(directory: Path, coordinator: str, process: int) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    together = processes.join(processes.ProcessPlace(coordinator, 3, process), say=print)
    assert (
        together is not None
        and processes.joined() is together
        and processes.speaks() == (process == 0)
    )
    heard = []
    if together.is_first:
        for number in range(100):
            together.send(f"{number} {'x' * number * 100}".encode())
        together.end()
    else:
        while (decision := together.receive()) is not None:
            heard.append(decision.decode().split())
    lost = directory / DIES
    if lost.exists():
        if process == int(lost.read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # until this process is told
    mesh = make_mesh(data=3)
    rows = jax.make_array_from_callback(
        (3,),
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")),
        lambda _: jnp.array([process + 1]),
    )
    if (directory / FAILS).exists() and process == int((directory / FAILS).read_text()):
        raise ValueError("this one alone")
    found = {
        "heard": heard,
        "rows": to_host(rows, mesh).tolist(),
        "roster": [each.pid for each in together.roster],
    }
    (directory / f"{process}.json").write_text(json.dumps(found))
    together.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
