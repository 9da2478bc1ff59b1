"""One of two processes that read the data of a run: `test_held_out` starts both.

python -m tests.training.two_readers DIRECTORY COORDINATOR PROCESS
"""

import os
import sys
from pathlib import Path

import jax

from specjax import processes
from specjax.config import ConfigError
from specjax.training import fingerprint


def main(directory: Path, coordinator: str, process: int) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    os.environ |= {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(process),
    }
    together = processes.join()
    assert together is not None
    fingerprint.check_agreement("data.source='text'", 4 * "00ff00ff")
    message = "no error"
    try:
        fingerprint.check_agreement("data.source='text'", 4 * f"0000000{process}")
    except ConfigError as error:
        message = str(error)
    (directory / f"{process}.txt").write_text(message)
    together.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
