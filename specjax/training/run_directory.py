"""What a run leaves in its directory: whose it is, checkpoints to continue from, metrics, and students to use.

::

    config.yaml, claim.json    which run this is; another one is refused the directory
    checkpoints/               all that a killed run needs to continue bit for bit, the newest two
    metrics.jsonl, tensorboard/  every step's figures; TensorBoard's are written with some delay
    best/, latest/             the student, as its ``from_pretrained`` reads it
"""

import json
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from specjax.config import ConfigError, differences, dump_yaml, load_yaml
from specjax.files import naming_full_disk, replacing, write_text
from specjax.training.config import TrainConfig
from specjax.training.step import TrainState

STUDENTS = ("best", "latest")

# --- whose directory it is -------------------------------------------------------------------------------------------


def refuse_foreign(output: Path, config: TrainConfig) -> None:
    """See that ``output`` is free, or holds a run of this configuration; where the run lies may differ."""
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output={config.output!r} is a file: choose a directory")
    stored = output / "config.yaml"
    if stored.exists():
        earlier = replace(load_yaml(TrainConfig, stored), output=config.output)
        if changed := differences(earlier, config):
            raise ConfigError(
                f"output={config.output!r} holds a run of another configuration ({'; '.join(changed)}): "
                "choose another output, or restore these values to continue that run"
            )
    elif output.exists() and any(output.iterdir()):
        raise ConfigError(f"output={config.output!r} is not empty and holds no run: choose another directory")


@dataclass(frozen=True)
class Claim:
    """What a run's result depends on beside its configuration.

    Attributes:
        data: `fingerprint.of_windows` to train and to evaluate on.
        target: `fingerprint.of_target`; None where there is no target.
    """

    data: str
    target: str | None


def claim(output: Path, config: TrainConfig, found: Claim) -> None:
    """Make ``output`` this run's, once everything is known to be usable; refuse other tokens or another target than it had.

    Of several processes the first one does. A run that was begun before claims noted the target (it has data.sha256 and no
    claim.json) is refused, for nobody knows what its first half learnt from.
    """
    stored = output / "claim.json"
    if jax.process_index() != 0:
        return
    for name in STUDENTS:  # what a killed run left of a student that it was writing
        for scratch in output.glob(f".{name}-*"):
            shutil.rmtree(scratch, ignore_errors=True)
    if not (output / "config.yaml").exists():
        with replacing(output) as scratch:
            (scratch / "claim.json").write_text(json.dumps(asdict(found), indent=2) + "\n")
            (scratch / "config.yaml").write_text(dump_yaml(config))
        return
    try:
        earlier = Claim(**json.loads(stored.read_text()))
    except FileNotFoundError:
        raise ConfigError(
            f"output={config.output!r}: was begun by an older version of specjax, which did not note what its target was: "
            "choose another output"
        ) from None
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(f"output={config.output!r}: {stored} cannot be read ({error}): choose another output") from None
    if earlier.data != found.data:
        raise ConfigError(
            f"data.source={config.data.source!r}: the text has changed since the run in output={config.output!r} "
            "began, and so have its tokens: choose another output, or restore the text"
        )
    if earlier.target != found.target:
        raise ConfigError(
            f"method.target={config.method.target!r}: the model there has changed since the run in output={config.output!r} "
            "began, its weights or its config.json: choose another output, or restore the model"
        )


# --- checkpoints -----------------------------------------------------------------------------------------------------


@contextmanager
def open_checkpoints(output: Path) -> Iterator[ocp.CheckpointManager]:
    """The run's checkpoints; they are written in the background, and all of them are there when the block ends."""
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    folder = (output / "checkpoints").absolute()
    with naming_full_disk(output), ocp.CheckpointManager(folder, options=options) as manager:
        yield manager
        manager.wait_until_finished()


def save(checkpoints: ocp.CheckpointManager, state: TrainState, iterator: Any) -> None:
    """Write what `restore` needs, in the background."""
    checkpoints.save(
        int(state.step),
        args=ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(iterator.get_state())),
    )


def restore(checkpoints: ocp.CheckpointManager, state: TrainState, iterator: Any) -> TrainState:
    """The newest checkpoint that can be read, with ``iterator`` set to its place; ``state`` itself when there is none.

    Where the newest cannot be read and one before it can, that is reported, the one before is taken, and the damaged one is
    deleted.

    Raises:
        ConfigError: there are checkpoints, and none can be read; or one cannot, and there are several processes, which must all
            take the same.
    """
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    damaged = []
    for step in sorted(checkpoints.all_steps(), reverse=True):
        try:
            restored = checkpoints.restore(
                step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore())
            )
            iterator.set_state(restored["data"])
        except Exception as error:  # whatever a damaged file makes orbax, tensorstore or JSON stumble over
            damaged.append(step)
            reason = f"the checkpoint of step {step} cannot be read ({type(error).__name__})"
            if jax.process_count() > 1:
                raise ConfigError(f"output: {reason}: delete it, to continue from the one before") from error
            print(f"specjax: {reason}: taking the one before", file=sys.stderr)
            continue
        for unread in damaged:
            checkpoints.delete(unread)
        return restored["state"]
    if damaged:
        raise ConfigError(
            f"output: none of the checkpoints can be read ({', '.join(map(str, damaged))}): see that there is memory, and that "
            "the files may be read; to begin again, choose another output"
        )
    return state


# --- metrics ---------------------------------------------------------------------------------------------------------


class MetricsLog:
    """A line of JSON a step, and the same for TensorBoard. Of several processes the first one writes.

    Continuing at ``start`` drops what an interrupted run wrote after its last checkpoint.
    """

    def __init__(self, output: Path, start: int) -> None:
        from tensorboardX import SummaryWriter

        self._writes = jax.process_index() == 0
        path = output / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        self._kept: list[dict[str, Any]] = []
        texts = []
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # the line that a kill cut short
                break
            if record["step"] <= start:
                self._kept.append(record)
                texts.append(line)
        if not self._writes:
            return
        write_text(path, "".join(f"{line}\n" for line in texts))
        self._file = path.open("a", buffering=1)  # a line at a time
        self._board = SummaryWriter(str(output / "tensorboard"), purge_step=start + 1 if start else None)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        if self._writes:
            self._file.close()
            self._board.close()

    def write(self, record: dict[str, Any]) -> None:
        """Add the figures of ``record["step"]``."""
        if not self._writes:
            return
        self._file.write(json.dumps(record) + "\n")
        for name, value in record.items():
            if name != "step":
                self._board.add_scalar(name, value, record["step"])

    def values(self, name: str) -> list[float]:
        """What was written of ``name`` before this run continued."""
        return [record[name] for record in self._kept if name in record]
