"""The training loop: batches to steps, checkpoints that a killed run continues from bit for bit, metrics as JSON lines.

What is trained, on what loss, is a `Method`'s business; how one step goes is `specjax.training.step`'s.
"""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import tokenizers
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specjax.config import ConfigError, differences, dump_yaml, load_yaml
from specjax.models import huggingface
from specjax.models.checkpoint import replacing
from specjax.models.transformer import Target
from specjax.sharding import make_mesh
from specjax.training import data
from specjax.training.config import TrainConfig
from specjax.training.methods import Given
from specjax.training.optimizer import make_optimizer
from specjax.training.step import TrainState, evaluate, initial_state, make_batch, train_step
from specjax.training.tokenizer import save_tokenizer


def train(config: TrainConfig) -> Path:
    """Run, or continue, the training that ``config`` describes.

    Returns:
        The directory of the trained student, which its ``from_pretrained`` reads.

    Raises:
        InputError: ``config.output`` holds a run of another configuration, or a part of ``config`` cannot be used.
    """
    config.check()
    output, method = Path(config.output), config.method
    _refuse_foreign(output, config)
    mesh = None if config.mesh == (1, 1) else make_mesh(*config.mesh)
    target = Target.from_pretrained(method.target, mesh=mesh) if method.target else None
    data_config = config.data
    if target is not None and not data_config.tokenizer:
        data_config = replace(data_config, tokenizer=str(huggingface.locate(method.target, weights=False)))
    tokenizer, packed, held_out = data.prepare(data_config)
    if target is not None:
        _check_target(config, target, tokenizer)
    _claim(output, config, data.fingerprint(packed, held_out))

    key = jax.random.key(config.seed)
    optimizer = make_optimizer(config.optimizer, config.steps)
    vocab = tokenizer.get_vocab_size() if target is None else target.config.vocab_size
    given = Given(tokenizer, data.count_labels(packed, vocab), target, mesh)
    state = initial_state(method, method.init(key, given), optimizer, mesh)
    noise = jax.random.fold_in(key, 2**31)  # apart from what `init` draws from
    iterator = data.batches(packed, config.data.batch, config.seed)
    tokens_a_step = config.data.batch * config.data.window

    with _checkpoints(output) as checkpoints:
        state = _restore(checkpoints, state, iterator)
        first = int(state.step)
        with _MetricsLog(output / "metrics.jsonl", first) as log, _progress(config.steps, first) as report:
            clock = time.perf_counter()
            for step in range(first + 1, config.steps + 1):
                batch = make_batch(next(iterator), jax.random.fold_in(noise, step), step / config.steps, mesh)
                state, metrics = train_step(state, batch, target, method=method, optimizer=optimizer)
                metrics = {name: float(value) for name, value in metrics.items()}  # waits for the step
                now = time.perf_counter()
                speed, clock = tokens_a_step / (now - clock), now
                report(step, metrics["loss"], speed)
                log.write({"step": step, **metrics, "tokens_per_s": round(speed)})
                if step % config.evaluate_every == 0 or step == config.steps:
                    held = evaluate(state.student, held_out, config.data.batch, target, method, mesh)
                    log.write({"step": step, **{f"held_out_{name}": value for name, value in held.items()}})
                    clock = time.perf_counter()
                if step % config.checkpoint_every == 0 or step == config.steps:
                    _save(checkpoints, state, iterator)
        checkpoints.wait_until_finished()

    directory = output / "final"
    state.student.save_pretrained(directory, jnp.dtype(config.export_dtype))
    if method.whole_model:
        save_tokenizer(directory, tokenizer, data_config.tokenizer, state.student.config.max_positions)
    return directory


def _check_target(config: TrainConfig, target: Target, tokenizer: tokenizers.Tokenizer) -> None:
    """See that the frozen target can read the windows."""
    if tokenizer.get_vocab_size() > target.config.vocab_size:
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer!r} has {tokenizer.get_vocab_size()} tokens and "
            f"method.target={config.method.target!r} a vocabulary of {target.config.vocab_size}: use the target's own tokenizer"
        )
    if config.data.window > target.config.max_positions:
        raise ConfigError(
            f"data.window={config.data.window} is longer than the {target.config.max_positions} positions of "
            f"method.target={config.method.target!r}"
        )


def _refuse_foreign(output: Path, config: TrainConfig) -> None:
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


def _claim(output: Path, config: TrainConfig, fingerprint: str) -> None:
    """Make ``output`` this run's, once everything is known to be usable; refuse to continue it on other tokens."""
    stored = output / "data.sha256"
    if not stored.exists():
        with replacing(output) as scratch:
            (scratch / "data.sha256").write_text(fingerprint)
            (scratch / "config.yaml").write_text(dump_yaml(config))
    elif stored.read_text() != fingerprint:
        raise ConfigError(
            f"data.source={config.data.source!r}: the text has changed since the run in output={config.output!r} "
            "began, and so have its tokens: choose another output, or restore the text"
        )


@contextmanager
def _checkpoints(output: Path) -> Iterator[ocp.CheckpointManager]:
    options = ocp.CheckpointManagerOptions(max_to_keep=2, enable_async_checkpointing=True)
    with ocp.CheckpointManager((output / "checkpoints").absolute(), options=options) as manager:
        yield manager


def _save(checkpoints: ocp.CheckpointManager, state: TrainState, iterator: Any) -> None:
    checkpoints.save(
        int(state.step),
        args=ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(iterator.get_state())),
    )


def _restore(checkpoints: ocp.CheckpointManager, state: TrainState, iterator: Any) -> TrainState:
    """The newest complete checkpoint's state, with ``iterator`` set to its place; ``state`` itself when there is none."""
    step = checkpoints.latest_step()
    if step is None:
        return state
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    restored = checkpoints.restore(
        step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore())
    )
    iterator.set_state(restored["data"])
    return restored["state"]


class _MetricsLog:
    """JSON lines, one a step. Continuing at ``start`` drops what an interrupted run wrote after its last checkpoint."""

    def __init__(self, path: Path, start: int) -> None:
        lines = path.read_text().splitlines() if path.exists() else []
        kept = []
        for line in lines:
            try:
                record = json.loads(line)
            except json.JSONDecodeError:  # the line that a kill cut short
                break
            if record["step"] <= start:
                kept.append(line)
        rewritten = path.with_suffix(".tmp")
        rewritten.write_text("".join(f"{line}\n" for line in kept))
        rewritten.replace(path)
        self._file = path.open("a", buffering=1)  # a line at a time

    def __enter__(self) -> "_MetricsLog":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")


@contextmanager
def _progress(steps: int, start: int) -> Iterator[Any]:
    columns = (
        TextColumn("step {task.completed}/{task.total}"),
        BarColumn(),
        TextColumn("loss {task.fields[loss]:.3f}  {task.fields[speed]:,.0f} tokens/s "),
        TimeRemainingColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("", total=steps, completed=start, loss=float("nan"), speed=0.0)

        def report(step: int, loss: float, speed: float) -> None:
            progress.update(task, completed=step, loss=loss, speed=speed)

        yield report
