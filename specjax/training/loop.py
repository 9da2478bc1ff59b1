"""The training loop: one jitted step, checkpoints that a killed run continues from bit for bit, metrics as JSON lines."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import orbax.checkpoint as ocp
import tokenizers
from flax import struct
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specjax.config import ConfigError, OptimizerConfig, TrainConfig, differences, dump_yaml, load_yaml
from specjax.models import huggingface
from specjax.models.checkpoint import replacing
from specjax.models.config import ModelConfig
from specjax.models.transformer import Target
from specjax.training import data
from specjax.training.objectives import OBJECTIVES, Objective

_EVALUATION_WINDOWS = 64


@struct.dataclass
class TrainState:
    """What the next step needs: ``params``, the optimiser's state and ``step``, the number of steps taken."""

    params: Any
    optimizer: optax.OptState
    step: jax.Array


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The optimiser of `OptimizerConfig`; matrices decay, norms and biases do not."""
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=config.learning_rate,
        warmup_steps=min(config.warmup_steps, steps // 2),
        decay_steps=steps,
        end_value=config.final_share * config.learning_rate,
    )

    def matrices(params: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.ndim > 1, params)

    descent = optax.adamw(schedule, b1=config.b1, b2=config.b2, weight_decay=config.weight_decay, mask=matrices)
    if config.method == "muon":
        # consistent_rms gives orthogonalised updates the size of AdamW's.
        muon = optax.contrib.muon(schedule, consistent_rms=0.2, weight_decay=config.weight_decay)
        descent = optax.multi_transform({"adamw": descent, "muon": muon}, _label_parameters)
    return optax.chain(optax.clip_by_global_norm(config.clip), descent)


def _label_parameters(params: Any) -> Any:
    """Muon for the layers' matrices. The embedding is a table of vectors, not a map between them, and stays with AdamW."""

    def label(path: Any, leaf: jax.Array) -> str:
        is_layer = any(getattr(key, "key", None) == "layers" for key in path)
        return "muon" if is_layer and leaf.ndim == 2 else "adamw"

    return jax.tree_util.tree_map_with_path(label, params)


@partial(jax.jit, static_argnames=("optimizer", "objective", "model_config"), donate_argnames="state")
def train_step(
    state: TrainState,
    batch: dict[str, jax.Array],
    teacher: Target | None,
    *,
    optimizer: optax.GradientTransformation,
    objective: Objective,
    model_config: ModelConfig,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One optimiser step. ``state`` is donated."""

    def loss(params: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
        return objective(Target(params=params, config=model_config), batch, teacher)

    gradients, metrics = jax.grad(loss, has_aux=True)(state.params)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer, state.params)
    metrics["gradient_norm"] = optax.tree.norm(gradients)
    return TrainState(optax.apply_updates(state.params, updates), optimizer_state, state.step + 1), metrics


@partial(jax.jit, static_argnames="objective")
def _evaluate_batch(model: Target, batch: dict[str, jax.Array], teacher: Target | None, *, objective: Objective) -> dict:
    return objective(model, batch, teacher)[1]


def evaluate(
    model: Target, packed: dict[str, np.ndarray], batch: int, teacher: Target | None, objective: Objective
) -> dict[str, float]:
    """Mean metrics over the first held-out windows (at most 64, a whole number of batches)."""
    windows = min(_EVALUATION_WINDOWS, len(packed["tokens"]))
    starts = range(0, windows - batch + 1, batch) or range(1)
    totals = [
        _evaluate_batch(model, {k: v[i : i + batch] for k, v in packed.items()}, teacher, objective=objective) for i in starts
    ]
    return {name: float(np.mean([total[name] for total in totals])) for name in totals[0]}


def train(config: TrainConfig) -> Path:
    """Run, or continue, the training that ``config`` describes.

    Returns:
        The directory of the trained model, in Hugging Face format.

    Raises:
        ConfigError: ``config.output`` holds a run of another configuration, or a part of ``config`` cannot be used.
    """
    config.check()
    output = Path(config.output)
    _refuse_foreign(output, config)
    teacher = Target.from_pretrained(config.teacher) if config.teacher else None
    data_config = config.data
    if teacher is not None and not data_config.tokenizer:
        data_config = replace(data_config, tokenizer=str(huggingface.locate(config.teacher, weights=False)))
    tokenizer, packed, held_out = data.prepare(data_config)
    model_config = _model_config(config, tokenizer, teacher)
    objective = OBJECTIVES[config.objective]
    optimizer = make_optimizer(config.optimizer, config.steps)
    _claim(output, config, data.fingerprint(packed, held_out))

    params = Target.init(model_config, jax.random.key(config.seed)).params
    state = TrainState(params, optimizer.init(params), jnp.zeros((), jnp.int32))
    iterator = data.batches(packed, config.data.batch, config.seed)
    tokens_a_step = config.data.batch * config.data.window

    with _checkpoints(output) as checkpoints:
        state = _restore(checkpoints, state, iterator)
        start = int(state.step)
        with _MetricsLog(output / "metrics.jsonl", start) as log, _progress(config.steps, start) as report:
            clock = time.perf_counter()
            for step in range(start + 1, config.steps + 1):
                state, metrics = train_step(
                    state,
                    next(iterator),
                    teacher,
                    optimizer=optimizer,
                    objective=objective,
                    model_config=model_config,
                )
                metrics = {name: float(value) for name, value in metrics.items()}  # waits for the step
                now = time.perf_counter()
                speed, clock = tokens_a_step / (now - clock), now
                report(step, metrics["loss"], speed)
                log.write({"step": step, **metrics, "tokens_per_s": round(speed)})
                if step % config.evaluate_every == 0 or step == config.steps:
                    model = Target(params=state.params, config=model_config)
                    held = evaluate(model, held_out, config.data.batch, teacher, objective)
                    log.write({"step": step, **{f"held_out_{name}": value for name, value in held.items()}})
                    clock = time.perf_counter()
                if step % config.checkpoint_every == 0 or step == config.steps:
                    _save(checkpoints, state, iterator)
        checkpoints.wait_until_finished()
    model = Target(params=state.params, config=model_config)
    return _export(output / "final", model, jnp.dtype(config.export_dtype), tokenizer, data_config.tokenizer)


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


def _model_config(config: TrainConfig, tokenizer: tokenizers.Tokenizer, teacher: Target | None) -> ModelConfig:
    sizes = config.model
    end = tokenizer.token_to_id(data.END_OF_TEXT)
    # A teacher's vocabulary may be padded beyond its tokenizer's; the student must match the teacher.
    vocab_size = tokenizer.get_vocab_size() if teacher is None else teacher.config.vocab_size
    if tokenizer.get_vocab_size() > vocab_size:
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer!r} has {tokenizer.get_vocab_size()} tokens and "
            f"teacher={config.teacher!r} a vocabulary of {vocab_size}: use the teacher's own tokenizer"
        )
    if config.data.window > sizes.max_positions:
        raise ConfigError(f"data.window={config.data.window} is longer than model.max_positions={sizes.max_positions}")
    return ModelConfig(
        vocab_size=vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        max_positions=sizes.max_positions,
        tie_embeddings=True,
        bos_token_id=end if teacher is None else teacher.config.bos_token_id,
        eos_token_ids=(() if end is None else (end,)) if teacher is None else teacher.config.eos_token_ids,
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


def _export(directory: Path, model: Target, dtype: Any, tokenizer: tokenizers.Tokenizer, tokenizer_source: str) -> Path:
    """The trained model as a Hugging Face checkpoint, with ``tokenizer`` or, if given, the one of ``tokenizer_source``."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    model.save_pretrained(directory, dtype)
    if tokenizer_source:  # with its chat template and special tokens
        exported = AutoTokenizer.from_pretrained(tokenizer_source)
    else:
        exported = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            bos_token=data.END_OF_TEXT,
            eos_token=data.END_OF_TEXT,
            clean_up_tokenization_spaces=False,
            model_max_length=model.config.max_positions,
        )
    with replacing(directory) as scratch:
        exported.save_pretrained(scratch)
    return directory
