"""The training loop: steps, evaluations, checkpoints and exports.

A `TrainingMethod` defines the student and the loss. `specjax.training.step` defines one step.
"""

import itertools
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tokenizers
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.console import Console
from rich.text import Text

from specjax import chips, stores
from specjax.config import ConfigError, differences
from specjax.drafters import chat_variables
from specjax.drafters.base import Drafter
from specjax.errors import NonFiniteError
from specjax.models import config_json, hub
from specjax.models.config import ModelConfig
from specjax.models.quantization import schemes
from specjax.models.transformer import Target
from specjax.progress import Wait, say, waiting
from specjax.sampling import make_key
from specjax.sharding import mesh_for, to_host
from specjax.templates import settings_of
from specjax.training import data, fingerprint, run_directory, run_store
from specjax.training.config import TrainConfig
from specjax.training.contract import Batch, Metrics, StudentInputs, Windows
from specjax.training.memory import peak_memory
from specjax.training.metric_writers import check_logging
from specjax.training.optimizer import learning_rates, make_optimizer
from specjax.training.step import (
    TrainState,
    cast,
    evaluate,
    evaluation_batches,
    evaluation_rows,
    evaluation_step,
    flops_of_step,
    initial_state,
    is_finite,
    make_batch,
    train_step,
)
from specjax.training.stopping import Agreement, StoppedError, StopRequest, until_stopped
from specjax.training.tokenizer import save_tokenizer
from specjax.training.unusable import RecordTally


def train(config: TrainConfig, stop: StopRequest | None = None) -> Path | str:
    """Start or continue a training run.

    Args:
        config: the configuration of the run.
        stop: a request, which another thread may make, to save and return after the running step.
            The same call continues the run then. The first step is not interrupted in this way.

    Returns:
        The directory of the best student, which its ``from_pretrained`` reads; a URL if
        ``config.output`` is one. A run that was stopped before its first evaluation has no such
        directory yet.

    Raises:
        InputError: ``config.output`` has a run with another configuration, or the configuration is
            invalid.
        NonFiniteError: The loss, the gradients or the weights are not finite after a step. The
            checkpoints and students of earlier steps stay.

    Examples:
        >>> from pathlib import Path
        >>> from specjax.training.config import DataConfig, TrainConfig
        >>> from specjax.training.loop import train
        >>> from specjax.training.methods import Lm
        >>> from specjax.training.objectives.whole_model import ModelSizes
        >>> Path("texts").mkdir()
        >>> for number in range(30):
        ...     _ = Path(f"texts/{number}.txt").write_text(f"This is text {number}. " * 40)
        >>> sizes = ModelSizes(
        ...     hidden_size=16,
        ...     intermediate_size=32,
        ...     num_layers=1,
        ...     num_heads=2,
        ...     num_kv_heads=1,
        ...     head_dim=8,
        ...     max_positions=64,
        ... )
        >>> data = DataConfig(source="texts", vocab_size=290, window=32, batch=4, holdout=0.2)
        >>> run = TrainConfig(output="run", method=Lm(model=sizes), data=data, steps=2)
        >>> best = train(run)
        the first window; ...
        >>> specjax.Target.from_pretrained(best).config.num_layers
        1
    """
    stop = stop or StopRequest()
    # A signal during the last upload must not end it.
    with stop.heeded_until_the_end(), run_store.open_output(config.output) as place:
        _train(config, place, stop)
    return place.best


def _train(config: TrainConfig, place: run_store.RunOutput, stop: StopRequest) -> None:
    output, run = place.directory, _prepare(config, place)
    state, target, iterator = run.state, run.target, run.iterator
    agreement = Agreement(stop, run.mesh)
    # Folded, so that it is independent of the key of the initial weights.
    noise = jax.random.fold_in(make_key(config.seed), 2**31)

    with run_directory.open_checkpoints(output, config.checkpoints) as checkpoints:
        state = run_directory.restore(checkpoints, state, iterator, config.resume)
        first = int(state.step)
        with (
            run_directory.MetricsLog(output, config, first) as log,
            waiting("training, compiling the first step", config.steps, first) as wait,
        ):
            saves = _Saves(config, run, log, wait, checkpoints)
            saves.say_start(first)
            evaluations = _Evaluations(config, run, log, wait, agreement)
            evaluations.begin(first, state)
            figures = _Figures(log, wait, config)
            try:
                for step in range(first + 1, config.steps + 1):
                    batch = make_batch(
                        next(iterator),
                        jax.random.fold_in(noise, step),
                        step / config.steps,
                        run.mesh,
                    )
                    if step == first + 1:
                        figures.flops = flops_of_step(state, batch, target, **run.fixed)
                    # Dispatched, not awaited: the host makes the next batch meanwhile.
                    state, metrics = train_step(state, batch, target, **run.fixed)
                    figures.add(step, metrics)
                    # Before the first step there is nothing to save.
                    stop.is_heeded = True
                    stops = agreement.reached()
                    if not evaluations.due(step) and not saves.due(step) and not stops:
                        continue
                    figures.flush()
                    _refuse_non_finite(step, state, run.mesh, config.output)
                    if saves.due(step) and not stops:
                        saves.save(step, state, figures.seconds)
                        place.publish(checkpoints.wait_until_finished)
                    if evaluations.due(step) and not stops:
                        # The checkpoint must be complete if the evaluation ends the process.
                        checkpoints.wait_until_finished()
                        # A run that continues makes up for an evaluation that is interrupted.
                        stops = not evaluations.run(step, state)
                        if not stops:
                            place.publish(checkpoints.wait_until_finished)
                    if stops:
                        saves.save(step, state, figures.seconds, is_last=True)
                        stop.stopped_after = step
                        break
                    # Evaluation and saving must not count as time of the next step.
                    figures.restart()
            finally:  # write the metrics of the last steps even if an error ends the run
                figures.flush()
    if jax.process_count() > 1:
        # The caller may read the files at once, so wait until the first process has written them.
        multihost_utils.sync_global_devices("specjax: trained")


@dataclass(frozen=True)
class _Run:
    """The parts of a run before its first step.

    Attributes:
        directory: the directory that the run writes.
        state: the state before the first step.
        target: the frozen target, or None.
        mesh: the mesh; None for one device.
        tokenizer: the tokenizer of the windows.
        tokenizer_directory: the directory of the tokenizer; empty if it was trained here.
        chat_template_kwargs: the variables of the chat template; None if the data are texts.
        iterator: the iterator over the training batches.
        held_out: the windows to evaluate on.
        fixed: the other arguments of `train_step`, which are the same in every step.
        earlier: the configuration of the last start; None for a new run.
        changes: the differences to it that a run which continues may have.
    """

    directory: Path
    state: TrainState
    target: Target | None
    mesh: Mesh | None
    tokenizer: tokenizers.Tokenizer
    tokenizer_directory: str
    chat_template_kwargs: dict[str, Any] | None
    iterator: grain.DatasetIterator
    held_out: Windows
    fixed: dict[str, Any]
    earlier: TrainConfig | None
    changes: list[str]


def _prepare(config: TrainConfig, place: run_store.RunOutput) -> _Run:
    """Prepare a run, and claim its output directory at the end, when all inputs are valid."""
    config.check()
    check_logging(config.logging)
    output, method = place.directory, config.method
    earlier = run_directory.stored_config(output)
    changes = run_directory.refuse_foreign(output, config)
    mesh = mesh_for(config.mesh)
    compute = jnp.dtype(config.compute_dtype)
    target, data_config = None, config.data
    if method.target:
        files = hub.open_checkpoint(method.target, weights=False)
        config_json.check_whole(files)
        target = Target.from_pretrained(files, dtype=compute, mesh=mesh)
        data_config = replace(data_config, tokenizer=data_config.tokenizer or str(files.directory))
    if stores.is_url(data_config.tokenizer):
        tokenizer_directory = hub.locate(data_config.tokenizer, weights=False)
        data_config = replace(data_config, tokenizer=str(tokenizer_directory))
    end = None if target is None else next(iter(target.config.eos_token_ids), None)
    held_out_by = run_directory.held_out_rule(output)
    tally = RecordTally(data_config.source, limit=data_config.max_unusable)
    prepared = data.prepare(
        data_config,
        end,
        None if target is None else target.config.vocab_size,
        held_out_by,
        tally,
    )
    tokenizer, packed, held_out, chat_tokenizer, _, digest = prepared
    fingerprint.check_agreement(f"data.source={data_config.source!r}", digest)
    if target is not None:
        _check_target(config, target, tokenizer)
    vocab = tokenizer.get_vocab_size() if target is None else target.config.vocab_size
    inputs = StudentInputs(tokenizer, prepared.count_labels(vocab), target, mesh, config.init_from)
    # In float32, also if the target is in bfloat16: bfloat16 would round small updates away.
    student = cast(method.init(make_key(config.seed), inputs), jnp.float32)
    if config.init_from:
        student = _warm_start(student, config.init_from)
        if chat_tokenizer is not None:
            chat_variables.compare(
                f"init_from={config.init_from!r}",
                hub.open_checkpoint(config.init_from, weights=False),
                chat_tokenizer,
                "data.chat_template_kwargs",
            )
    if isinstance(student, Drafter):
        assert target is not None
        student.check(target)
    optimizer = make_optimizer(config.optimizer, config.steps)
    state = initial_state(method, student, optimizer, mesh)
    iterator = data.batches(packed, config.data.batch, config.seed)
    claim = run_directory.Claim(digest, fingerprint.of_target(target), held_out_by)
    run_directory.claim(output, config, claim)
    place.claim()
    if jax.process_index() == 0:
        tally.write(output / run_directory.UNUSABLE)
        show_batch(tokenizer, packed)
    fixed = {
        "method": method,
        "optimizer": optimizer,
        "accumulate": config.accumulate,
        "compute_dtype": compute,
    }
    variables = None if chat_tokenizer is None else settings_of(chat_tokenizer)
    directory = data_config.tokenizer
    return _Run(
        directory=output,
        state=state,
        target=target,
        mesh=mesh,
        tokenizer=tokenizer,
        tokenizer_directory=directory,
        chat_template_kwargs=variables,
        iterator=iterator,
        held_out=held_out,
        fixed=fixed,
        earlier=earlier,
        changes=changes,
    )


def _warm_start(student: Any, path: str) -> Any:
    """Replace the weights of a student by those of an earlier student.

    A whole model may have more positions than the earlier one, with scaled RoPE.
    """
    earlier = type(student).from_pretrained(
        path, dtype=jnp.float32, mesh=student.mesh, weights=schemes.FLOATS
    )
    if isinstance(earlier, Target):
        earlier.check_whole()
    if isinstance(student, Target) and _is_stretched(earlier.config, student.config):
        positions = {"rope": student.config.rope, "max_positions": student.config.max_positions}
        earlier = replace(earlier, config=replace(earlier.config, **positions))
    if changed := differences(earlier.config, student.config):
        raise ConfigError(
            f"init_from={path!r}: its shape differs from this run's student ({'; '.join(changed)});"
            " set the options under method to its values"
        )
    # The configurations may be equal although the parameters differ.
    if jax.tree.structure(earlier) != jax.tree.structure(student):
        raise ConfigError(
            f"init_from={path!r}: its parameters differ from this run's student; set the options"
            " under method to its values"
        )
    return jax.tree.map(lambda _, leaf: leaf, student, earlier)


def _is_stretched(earlier: ModelConfig, later: ModelConfig) -> bool:
    """Return whether ``later`` has at least as many positions, and the same RoPE before scaling."""
    return earlier.rope.theta == later.rope.theta and earlier.max_positions <= later.max_positions


def show_batch(tokenizer: tokenizers.Tokenizer, packed: Windows) -> None:
    """Print the first window as text, with the labels that count in green.

    So the user can stop the run if the wrong words are green.
    """
    # The places after the last document are empty.
    length = int((packed["segments"][0] >= 0).sum()) - 1
    tokens = packed["tokens"][0, 1 : 1 + length].tolist()
    counts = packed["loss_mask"][0, :length]
    edges = [0, *(np.flatnonzero(np.diff(counts)) + 1).tolist(), len(tokens)]
    shown = Text()
    for begin, end in itertools.pairwise(edges):
        shown.append(
            tokenizer.decode(tokens[begin:end], skip_special_tokens=False),
            style="green" if counts[begin] else "dim",
        )
    console = Console()
    share = packed["loss_mask"].mean()
    console.print(
        f"the first window; labels that count are green, {share:.0%} of all"
        f" {packed['loss_mask'].size:,}:"
    )
    console.print(shown)


def _check_target(config: TrainConfig, target: Target, tokenizer: tokenizers.Tokenizer) -> None:
    """Raise ConfigError if the frozen target cannot read the windows."""
    if tokenizer.get_vocab_size() > target.config.vocab_size:
        raise ConfigError(
            f"data.tokenizer={config.data.tokenizer!r} has {tokenizer.get_vocab_size()} tokens and"
            f" method.target={config.method.target!r} a vocabulary of {target.config.vocab_size}:"
            " use the target's own tokenizer"
        )
    if config.data.window > target.config.max_positions:
        raise ConfigError(
            f"data.window={config.data.window} is longer than the {target.config.max_positions}"
            f" positions of method.target={config.method.target!r}; give a shorter window"
        )


def _refuse_non_finite(step: int, state: TrainState, mesh: Mesh | None, output: str) -> None:
    """Raise NonFiniteError rather than save or evaluate weights that are not finite.

    They may be so although the gradients were finite, for example after too large an update.
    """
    if not to_host(is_finite(state), mesh):
        raise NonFiniteError(step, "a weight or the optimizer's state", output)


class _Evaluations:
    """The evaluations of a run on its held-out windows, and its best student.

    A checkpoint that is due at the same step is saved before. So a run that dies in an evaluation
    continues after that checkpoint. It makes up for the evaluation, which has no metrics yet.

    Args:
        config: the configuration of the run.
        run: its parts.
        log: its metrics.
        wait: its progress.
        agreement: whether the run stops.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: _Run,
        log: run_directory.MetricsLog,
        wait: Wait,
        agreement: Agreement,
    ) -> None:
        self._config, self._run, self._method = config, run, config.method
        self._log, self._wait, self._agreement = log, wait, agreement
        self._options = {"method": config.method, "compute_dtype": run.fixed["compute_dtype"]}
        self._metric = f"held_out_{config.method.best_by}"
        # A run that continues must not replace a better student of its earlier steps.
        self._best = max(map(self._method.goodness, log.values(self._metric)), default=-np.inf)

    def due(self, step: int) -> bool:
        """Return whether there is an evaluation after a step."""
        return step > 0 and (step == self._config.steps or step % self._config.evaluate_every == 0)

    def begin(self, step: int, state: TrainState) -> None:
        """Evaluate after the last step of the killed run, if it did not do so.

        Otherwise compute one part of an evaluation: what does not fit in memory should fail now,
        and not hours later.
        """
        if self.due(step) and not self._log.has(self._metric, step):
            self.run(step, state)
        elif step < self._config.steps:
            self._wait.update(what="training, trying an evaluation")
            batch = next(self._batches())
            jax.block_until_ready(
                evaluation_step(state.student, batch, self._run.target, **self._options)
            )
        self._wait.update(what="training, compiling the first step")

    def run(self, step: int, state: TrainState) -> bool:
        """Evaluate after a step, write the metrics, and export the student if it is the best.

        Return False if a request to stop has interrupted the evaluation, which then leaves nothing.
        """
        self._wait.update(what="training, evaluating after step")
        batches = until_stopped(self._batches(), self._agreement)
        try:
            evaluation = evaluate(
                state.student, batches, self._run.target, mesh=self._run.mesh, **self._options
            )
        except StoppedError:
            return False
        best_by = self._method.best_by
        _check_finite(step, evaluation, ("loss", best_by), self._config.output, "held_out_")
        goodness = self._method.goodness(evaluation[best_by])
        if goodness > self._best:
            self._best = goodness
            # Before the metrics: a run that is killed here evaluates again, and exports.
            _export(self._config, self._run, "best", state)
        self._log.write(
            {"step": step, **{f"held_out_{name}": value for name, value in evaluation.items()}}
        )
        return True

    def _batches(self) -> Iterator[Batch]:
        rows = evaluation_rows(self._config.data.batch, self._config.accumulate, self._run.mesh)
        return evaluation_batches(self._run.held_out, rows, self._run.mesh)


def _check_finite(
    step: int, values: dict[str, float], names: Iterable[str], output: str, prefix: str = ""
) -> None:
    """Raise NonFiniteError if one of the named metrics is not finite."""
    bad = [
        f"{prefix}{name} {values[name]}"
        for name in dict.fromkeys(names)
        if name in values and not math.isfinite(values[name])
    ]
    if bad:
        raise NonFiniteError(step, ", ".join(bad), output)


class _Saves:
    """The checkpoints of a run, each with its student ``latest``.

    It prints what a step and a save take: a run needs so much time to stop at a signal, and the
    grace period of a scheduler must be longer.
    """

    def __init__(
        self,
        config: TrainConfig,
        run: _Run,
        log: run_directory.MetricsLog,
        wait: Wait,
        checkpoints: ocp.CheckpointManager,
    ) -> None:
        self._config, self._run, self._log, self._wait = config, run, log, wait
        self._checkpoints = checkpoints
        self._is_timed = False

    def say_start(self, first: int) -> None:
        """Print where the run starts, and what the last step and save took."""
        if jax.process_index() != 0:
            return
        output, steps = self._config.output, self._config.steps
        if first == 0:
            say(f"output={output!r}: a new run of {steps:,} steps")
            return
        say(f"output={output!r}: the run continues after step {first:,} of {steps:,}")
        self._say_changes(first)
        speeds, saves = self._log.values("tokens_per_s"), self._log.values("save_seconds")
        if speeds and saves:
            tokens = self._config.data.batch * self._config.data.window
            _say_times(tokens / max(speeds[-1], 1), saves[-1])

    def _say_changes(self, first: int) -> None:
        """Print what has changed since the last start, and what follows from it."""
        earlier, config = self._run.earlier, self._config
        if earlier is None or not self._run.changes:
            return
        say(f"changed since its last start: {'; '.join(self._run.changes)}")
        if earlier.steps < config.steps:
            last, following = (
                learning_rates(config.optimizer, steps)[step - 1]
                for steps, step in ((earlier.steps, first), (config.steps, first + 1))
            )
            say(
                f"steps={config.steps}: from here on the learning rate is that of a run of"
                f" {config.steps:,} steps: {following:.3g} at step {first + 1:,}, after {last:.3g}"
                f" at step {first:,}; the weights will not be those of a run that had"
                f" {config.steps:,} steps from the beginning"
            )

    def due(self, step: int) -> bool:
        """Return whether there is a checkpoint after a step."""
        return step == self._config.steps or step % self._config.checkpoint_every == 0

    def save(
        self, step: int, state: TrainState, step_seconds: float, is_last: bool = False
    ) -> None:
        """Save after a step, unless it has been saved.

        The checkpoint is written in the background. Only the first of each start, and the last one
        before the process ends at a signal, are complete when this returns; they are timed.
        """
        self._wait.update(what="training, saving after step")
        begin = time.perf_counter()
        if self._checkpoints.latest_step() != step:
            # Export before the checkpoint: a run that is killed here and continues from this
            # checkpoint would not repeat the export.
            _export(self._config, self._run, "latest", state)
            run_directory.save(self._checkpoints, state, self._run.iterator)
        if self._is_timed and not is_last:
            return
        self._checkpoints.wait_until_finished()
        seconds = round(time.perf_counter() - begin, 2)
        is_news = not is_last and not self._is_timed and not self._log.values("save_seconds")
        self._is_timed = True
        self._log.write({"step": step, "save_seconds": seconds})
        if is_news and jax.process_index() == 0:
            _say_times(step_seconds, seconds)


def _say_times(step_seconds: float, save_seconds: float) -> None:
    say(
        f"a step took {step_seconds:.1f} s and a save {save_seconds:.1f} s; SIGTERM and Ctrl-C end"
        " the run after both, so a scheduler's grace period must be longer"
    )


def _export(config: TrainConfig, run: _Run, name: str, state: TrainState) -> None:
    """Save the student of a state under a name."""
    folder = run.directory / name
    state.student.save_pretrained(folder, dtype=jnp.dtype(config.export_dtype))
    if jax.process_index() != 0:
        return
    if run.chat_template_kwargs is not None:
        for config_file in folder.rglob("config.json"):
            chat_variables.write(config_file.parent, run.chat_template_kwargs)
    if config.method.whole_model:
        positions = state.student.config.max_positions
        save_tokenizer(folder, run.tokenizer, run.tokenizer_directory, positions)


class _Figures:
    """The metrics of the steps, fetched one step late: after the next step has been dispatched.

    So the device has work while the host waits, writes metrics, and makes the next batch. The time
    of a step is the time between two fetches. So the times add up to the time that has passed. The
    progress line has the loss, tokens per second, and the share of the devices' peak FLOPS.

    `MetricsLog.write` gets all metrics of the run, here those of steps.

    Attributes:
        flops: the floating-point operations of a step.
        seconds: the time of the last reported step.
    """

    def __init__(self, log: run_directory.MetricsLog, wait: Wait, config: TrainConfig) -> None:
        self.flops, self.seconds = 0.0, 0.0
        self._log, self._wait, self._output = log, wait, config.output
        self._tokens = config.data.batch * config.data.window
        self._rates = learning_rates(config.optimizer, config.steps)
        self._peak = chips.peak_flops(jax.devices()[0]) * config.mesh[0] * config.mesh[1]
        self._pending: deque[tuple[int, Metrics]] = deque()
        self.restart()

    def restart(self) -> None:
        """Start the time of the next step now."""
        self._clock = time.perf_counter()

    def add(self, step: int, metrics: Metrics) -> None:
        """Add the metrics of a step that has been dispatched, and report the step before it."""
        self._pending.append((step, metrics))
        while len(self._pending) > 1:
            self._fetch()

    def flush(self) -> None:
        """Wait for all dispatched steps, and report them."""
        while self._pending:
            self._fetch()

    def _fetch(self) -> None:
        step, metrics = self._pending[0]
        # The host waits for the step here, one step late.
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        try:
            _check_finite(step, values, ("loss", "gradient_norm"), self._output)
        except NonFiniteError:
            self._pending.clear()  # the first such step counts; later ones are not finite either
            raise
        self._pending.popleft()
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        self.seconds = seconds
        rate, share = self._tokens / seconds, self.flops / seconds / self._peak
        what = (
            f"training, loss {values['loss']:.3f}, {rate:,.0f} tokens/s, {share:.0%} of peak: step"
        )
        self._wait.update(what=what, done=step)
        self._log.write(
            {
                "step": step,
                **values,
                "learning_rate": float(self._rates[step - 1]),
                "tokens_per_s": round(rate),
                "share_of_peak": share,
                **peak_memory(),
            }
        )
