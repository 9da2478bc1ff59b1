"""Run one of the three processes that find each other in `test_processes`.

    python -m tests.three_processes DIRECTORY COORDINATOR PROCESS

The first process sends numbers to the rest, which write what they receive. If the directory holds a
file DIES, the process with the number in it ends itself then. If it holds a file FAILS, that
process raises an exception while the rest are in a collective.
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
    assert together is not None
    assert processes.joined() is together
    assert processes.speaks() == (process == 0)
    received = []
    if together.is_first:
        for number in range(100):
            together.send(f"{number} {'x' * number * 100}".encode())
        together.end()
    else:
        while (decision := together.receive()) is not None:
            received.append(decision.decode().split())
    dies = directory / DIES
    if dies.exists():
        if process == int(dies.read_text()):
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)  # until this process is ended
    mesh = make_mesh(data=3)
    rows = jax.make_array_from_callback(
        (3,),
        jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data")),
        lambda _: jnp.array([process + 1]),
    )
    if (directory / FAILS).exists() and process == int((directory / FAILS).read_text()):
        raise ValueError("this one alone")
    results = {
        "heard": received,
        "rows": to_host(rows, mesh).tolist(),
        "roster": [member.pid for member in together.roster],
    }
    (directory / f"{process}.json").write_text(json.dumps(results))
    together.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
