"""The directory of a run: its configuration, checkpoints, metrics and students.

::

    config.yaml, claim.json      the identity of the run; a different run cannot use the directory.
                                 The configuration is that of the last start
    checkpoints/                 the newest checkpoints, to continue a killed run bit for bit
    metrics.jsonl                the metrics of every step
    tensorboard/, wandb/         the same for the service that ``logging`` names
    unusable.txt                 the records of the data that are left out, if there are any
    best/, latest/               the student, as its ``from_pretrained`` reads it
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
from specjax.training.config import Resume, TrainConfig
from specjax.training.data import HeldOutBy
from specjax.training.metric_writers import open_writer
from specjax.training.step import TrainState

STUDENTS = ("best", "latest")

UNUSABLE = "unusable.txt"
"""The file with a line for each record of the data that is left out."""

# --- identity of the run --------------------------------------------------------------------------


_UNSEEN = ("output", "logging", "checkpoints", "resume", "dry_run")
"""Fields that say where a run lies, who watches it, and what stays of it."""

_EXECUTION = ("mesh", "accumulate", "evaluate_every", "checkpoint_every", "export_dtype")
"""Fields that may change when a run continues, because they do not change what it learns from."""


def refuse_foreign(output: Path, config: TrainConfig) -> list[str]:
    """Raise ConfigError unless ``output`` is free or has a run that this configuration continues.

    The run may have been moved.

    Returns:
        The changes of its execution and of ``steps``, as `specjax.config.differences`.
    """
    if output.exists() and not output.is_dir():
        raise ConfigError(f"output={config.output!r} is a file; give a directory")
    earlier = stored_config(output)
    if earlier is not None:
        if config.resume == "never":
            raise ConfigError(
                f"resume='never': output={config.output!r} has a run; choose another output, or"
                " resume='auto' to continue that run"
            )
        same_view = _with_fields(earlier, config, _UNSEEN)
        # The hash of the windows says whether the data are the same, however they are read.
        data = _with_fields(same_view.data, config.data, ("cache", "max_unusable", "workers"))
        same_view = replace(same_view, data=data)
        same_execution = _with_fields(same_view, config, _EXECUTION)
        if type(earlier.method) is type(config.method) and hasattr(config.method, "remat"):
            method = _with_fields(earlier.method, config.method, ("remat",))
            same_execution = replace(same_execution, method=method)
        if config.steps > earlier.steps:
            same_execution = replace(same_execution, steps=config.steps)
        if changed := differences(same_execution, config):
            grow = "; steps may only grow" if config.steps < earlier.steps else ""
            raise ConfigError(
                f"output={config.output!r} has a run with another configuration"
                f" ({'; '.join(changed)}){grow}; choose another output, or restore these values to"
                " continue that run"
            )
        return differences(same_view, config)
    if config.resume == "must":
        raise ConfigError(
            f"resume='must': output={config.output!r} has no run to continue; check the path, or"
            " begin a run with resume='auto'"
        )
    if output.exists() and any(output.iterdir()):
        raise ConfigError(
            f"output={config.output!r} is not empty and has no run; choose another directory"
        )
    return []


def stored_config(output: Path) -> TrainConfig | None:
    """Return the configuration with which the run in ``output`` was last started, if there is one.

    It has the ``steps`` of that start.
    """
    stored = output / "config.yaml"
    return load_yaml(TrainConfig, stored) if stored.exists() else None


def _with_fields(earlier: Any, later: Any, names: tuple[str, ...]) -> Any:
    """Return ``earlier`` with some fields of ``later``."""
    return replace(earlier, **{name: getattr(later, name) for name in names})


@dataclass(frozen=True)
class Claim:
    """The hashes of a run's inputs other than its configuration.

    Attributes:
        data: the `fingerprint.of_windows` of the training and the held-out windows.
        target: the `fingerprint.of_target`; None without a target.
        held_out_by: the rule that decided which documents are held out. Older versions had one
            rule, and did not store it.
    """

    data: str
    target: str | None
    held_out_by: HeldOutBy = "name"


def held_out_rule(output: Path) -> HeldOutBy:
    """Return the rule of the run in ``output``, or that of new runs if there is none."""
    if not (output / "config.yaml").exists():
        return "content"
    try:
        claimed = json.loads((output / "claim.json").read_text()).get("held_out_by", "name")
    except (OSError, ValueError, AttributeError):  # `claim` reports a missing or damaged file
        return "name"
    return "content" if claimed == "content" else "name"


def claim(output: Path, config: TrainConfig, inputs: Claim) -> None:
    """Claim the directory for a new run, or check that a run which continues has the same inputs.

    The configuration of this start is stored, too.

    Call it when everything else is valid. Only the first of several processes acts.

    Args:
        output: the directory of the run.
        config: the configuration of the run.
        inputs: the hashes of the run's inputs.

    Raises:
        ConfigError: The tokens or the target have changed since the run began. Or the run is of an
            older version that did not store the hash of the target, so they may have changed.
    """
    stored = output / "claim.json"
    if jax.process_index() != 0:
        return
    for name in STUDENTS:  # remove incomplete students of a run that was killed while it saved
        for scratch in output.glob(f".{name}-*"):
            shutil.rmtree(scratch, ignore_errors=True)
    if not (output / "config.yaml").exists():
        with replacing(output) as scratch:
            (scratch / "claim.json").write_text(json.dumps(asdict(inputs), indent=2) + "\n")
            (scratch / "config.yaml").write_text(dump_yaml(config))
        return
    try:
        earlier = Claim(**json.loads(stored.read_text()))
    except FileNotFoundError:
        raise ConfigError(
            f"output={config.output!r}: an older version of specjax began this run, and did not"
            " store the hash of its target; choose another output"
        ) from None
    except (ValueError, TypeError, OSError) as error:
        raise ConfigError(
            f"output={config.output!r}: {stored} cannot be read ({error}); choose another output"
        ) from None
    if earlier.data != inputs.data:
        raise ConfigError(
            f"data.source={config.data.source!r}: the text has changed since the run in"
            f" output={config.output!r} began, and so have its tokens; choose another output, or"
            " restore the text"
        )
    if earlier.target != inputs.target:
        raise ConfigError(
            f"method.target={config.method.target!r}: the model there has changed since the run in"
            f" output={config.output!r} began, in its weights or its config.json; choose another"
            " output, or restore the model"
        )
    if stored_config(output) != config:
        # The next start compares with what this one does.
        write_text(output / "config.yaml", dump_yaml(config))


# --- checkpoints ----------------------------------------------------------------------------------


@contextmanager
def open_checkpoints(output: Path, count: int) -> Iterator[ocp.CheckpointManager]:
    """Open the checkpoints of a run, of which the newest ``count`` stay.

    They are saved in the background, and complete at the end.
    """
    options = ocp.CheckpointManagerOptions(max_to_keep=count, enable_async_checkpointing=True)
    folder = (output / "checkpoints").absolute()
    with naming_full_disk(output), ocp.CheckpointManager(folder, options=options) as manager:
        yield manager
        manager.wait_until_finished()


def save(checkpoints: ocp.CheckpointManager, state: TrainState, iterator: Any) -> None:
    """Save a checkpoint for `restore` in the background."""
    # Orbax copies the state to the host before it returns. It must, because the next step donates
    # the arrays of this one.
    checkpoints.save(
        int(state.step),
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(iterator.get_state())
        ),
    )


def restore(
    checkpoints: ocp.CheckpointManager, state: TrainState, iterator: Any, resume: Resume = "auto"
) -> TrainState:
    """Restore the newest checkpoint that can be read, and set the iterator to its batch.

    The checkpoint may be of another mesh, or of another number of processes. Without checkpoints,
    return ``state`` itself. If a checkpoint cannot be read but an older one can, report that, use
    the older one, and delete the damaged one.

    Raises:
        ConfigError: No checkpoint can be read. Or one cannot be read and there are several
            processes: each might restore a different one. Or there is none, and ``resume`` is
            "must".
    """
    if resume == "must" and not checkpoints.all_steps():
        raise ConfigError(
            "resume='must': the run in output has no checkpoint yet; give resume='auto' to begin"
            " with its first step"
        )
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    damaged = []
    for step in sorted(checkpoints.all_steps(), reverse=True):
        try:
            restored = checkpoints.restore(
                step,
                args=ocp.args.Composite(
                    state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore()
                ),
            )
            iterator.set_state(restored["data"])
        # orbax, tensorstore and JSON raise unrelated types for damaged files.
        except Exception as error:
            damaged.append(step)
            reason = f"the checkpoint of step {step} cannot be read ({type(error).__name__})"
            if jax.process_count() > 1:
                raise ConfigError(
                    f"output: {reason}; delete it to continue from the one before"
                ) from error
            print(f"specjax: {reason}; the one before is used", file=sys.stderr)
            continue
        for unread in damaged:
            checkpoints.delete(unread)
        return restored["state"]
    if damaged:
        raise ConfigError(
            f"output: none of the checkpoints can be read ({', '.join(map(str, damaged))}); check"
            " that there is enough memory, and that the files are readable; to start again, choose"
            " another output"
        )
    return state


# --- metrics --------------------------------------------------------------------------------------


class MetricsLog:
    """The metrics files: one line of JSON per step, and the same for the service of ``logging``.

    Only the first of several processes writes. A run that continues from step ``start`` removes the
    metrics after that step, which an interrupted run wrote after its last checkpoint.
    """

    def __init__(self, output: Path, config: TrainConfig, start: int) -> None:
        self._writes = jax.process_index() == 0
        path = output / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        self._records: list[dict[str, Any]] = []
        texts = []
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # a line that is incomplete because the run was killed
                break
            if record["step"] <= start:
                self._records.append(record)
                texts.append(line)
        if not self._writes:
            return
        write_text(path, "".join(f"{line}\n" for line in texts))
        self._writer = open_writer(config, output, start)
        self._file = path.open("a", buffering=1)  # flush each line

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, *error: object) -> None:
        if self._writes:
            self._file.close()
            self._writer.__exit__(*error)

    def write(self, record: dict[str, Any]) -> None:
        """Write the metrics of ``record["step"]``."""
        if not self._writes:
            return
        self._file.write(json.dumps(record) + "\n")
        values = {name: value for name, value in record.items() if name != "step"}
        self._writer.write(record["step"], values)

    def has(self, name: str, step: int) -> bool:
        """Return whether an earlier part of this run has written a metric of a step."""
        return any(record["step"] == step and name in record for record in self._records)

    def values(self, name: str) -> list[float]:
        """Return the values of a metric from before this run continued."""
        return [record[name] for record in self._records if name in record]
