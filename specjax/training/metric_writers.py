"""The services that show the metrics of a training run: TensorBoard, Weights & Biases, or none."""

import importlib
import importlib.util
import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from specjax.config import ConfigError
from specjax.files import write_text
from specjax.training.config import TrainConfig


class MetricWriter(Protocol):
    """A service that receives the metrics of a run.

    Examples:
        >>> from pathlib import Path
        >>> from specjax.training.config import TrainConfig
        >>> from specjax.training.metric_writers import open_writer
        >>> with open_writer(TrainConfig(), Path("watched"), start=0) as writer:
        ...     writer.write(1, {"loss": 2.5})
        >>> len(list(Path("watched/tensorboard").glob("events*")))
        1
    """

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write metrics of a step, by name."""

    def __enter__(self) -> "MetricWriter": ...

    def __exit__(self, *error: Any) -> None:
        """Complete the files of the service. With an error, mark the run as failed."""


def check_logging(logging: str) -> None:
    """Raise ConfigError if the package of a service is not installed. Nothing is imported.

    Examples:
        >>> from specjax.training.metric_writers import check_logging
        >>> check_logging("tensorboard")
    """
    if logging == "wandb" and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "logging='wandb' needs the package wandb: pip install 'specjax[wandb]'; or choose"
            " tensorboard or none"
        )


def open_writer(config: TrainConfig, output: Path, start: int) -> MetricWriter:
    """Open the service that ``config.logging`` names.

    Args:
        config: the configuration of the run.
        output: the directory of the run.
        start: the step from which the run continues; 0 for a new run.

    Raises:
        ConfigError: The package of the service is not installed, or Weights & Biases refuses the
            run, for example without a login.

    Examples:
        >>> from pathlib import Path
        >>> from specjax.training.config import TrainConfig
        >>> from specjax.training.metric_writers import open_writer
        >>> with open_writer(TrainConfig(logging="none"), Path("run"), start=0) as writer:
        ...     writer.write(1, {"loss": 2.5})
    """
    check_logging(config.logging)
    if config.logging == "tensorboard":
        return _TensorBoard(output / "tensorboard", start)
    if config.logging == "wandb":
        return _Wandb(config, output)
    return _NoWriter()


class _NoWriter:
    """The writer where no service is named."""

    def write(self, step: int, values: dict[str, float]) -> None:
        pass

    def __enter__(self) -> "_NoWriter":
        return self

    def __exit__(self, *error: Any) -> None:
        pass


class _TensorBoard:
    """TensorBoard's files. They appear with a delay."""

    def __init__(self, directory: Path, start: int) -> None:
        from tensorboardX import SummaryWriter

        # TensorBoard hides what an interrupted run wrote after its last checkpoint.
        self._board = SummaryWriter(str(directory), purge_step=start + 1 if start else None)

    def write(self, step: int, values: dict[str, float]) -> None:
        for name, value in values.items():
            self._board.add_scalar(name, value, step)

    def __enter__(self) -> "_TensorBoard":
        return self

    def __exit__(self, *error: Any) -> None:
        self._board.close()


class _Wandb:
    """A run of Weights & Biases.

    Its variables of the environment apply: WANDB_MODE=offline, WANDB_PROJECT (by default specjax),
    WANDB_ENTITY. A training that continues also continues its run, by the id in ``wandb_id``. Steps
    that are repeated are sent again, with the same values.
    """

    def __init__(self, config: TrainConfig, output: Path) -> None:
        # Not an import statement: the package is optional, and type checkers would miss it.
        wandb: Any = importlib.import_module("wandb")
        run_id = output / "wandb_id"
        if not run_id.exists():
            write_text(run_id, secrets.token_hex(4))
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT") or "specjax",
                name=output.name,
                id=run_id.read_text(),
                resume="allow",
                dir=str(output),
                config=asdict(config),
                # What the terminal shows has text of the data, which stays here.
                settings=wandb.Settings(console="off"),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"logging='wandb': {error}; run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        # The service refuses steps that go back. A plain metric as the axis may go back.
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: dict[str, float]) -> None:
        self._run.log({"step": step, **values})

    def __enter__(self) -> "_Wandb":
        return self

    def __exit__(self, *error: Any) -> None:
        self._run.finish(exit_code=1 if error and error[0] else 0)
