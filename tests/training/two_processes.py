"""One of two processes that train together: `test_processes` starts both.

python -m tests.training.two_processes DIRECTORY COORDINATOR PROCESS
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import jax

from specjax import processes
from specjax.training import loop
from specjax.training.config import DataConfig, OptimizerConfig, TrainConfig
from specjax.training.methods import Eagle3Training
from specjax.training.step import TrainState


def config(directory: Path, output: str, mesh: tuple[int, int]) -> TrainConfig:
    """Return the configuration of a drafter for the target in ``directory``."""
    return TrainConfig(
        output=str(directory / output),
        method=Eagle3Training(target=str(directory / "target"), steps=2, draft_vocab_size=200),
        steps=6,
        evaluate_every=3,
        checkpoint_every=3,
        export_dtype="float32",
        mesh=mesh,
        data=DataConfig(source=str(directory / "text"), window=16, batch=4, holdout=0.2),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=2, method="muon"),
    )


def train(config: TrainConfig, stop_at: int) -> None:
    """Train, be interrupted before step ``stop_at``, and train on."""
    real = loop.train_step

    def stopped(state: TrainState, *arguments: Any, **options: Any) -> Any:
        if int(state.step) == stop_at - 1:
            raise KeyboardInterrupt
        return real(state, *arguments, **options)

    with mock.patch.object(loop, "train_step", stopped), suppress(KeyboardInterrupt):
        loop.train(config)
    loop.train(config)


def main(directory: Path, coordinator: str, process: int) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.config.update("jax_default_matmul_precision", "highest")
    os.environ |= {
        "JAX_COORDINATOR_ADDRESS": coordinator,
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(process),
    }
    together = processes.join()
    assert together is not None
    train(config(directory, "data", (2, 1)), stop_at=5)
    loop.train(config(directory, "model", (1, 2)))
    together.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
