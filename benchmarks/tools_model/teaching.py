"""The training: stages of growing length, a checkpoint now and then, and rates while it runs."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.tools_model import network
from benchmarks.tools_model.conversations import Writer
from benchmarks.tools_model.encoding import answers, encode, make_tokenizer, weights
from benchmarks.tools_model.first_weights import first_target
from specjax.models.transformer import Target
from specjax.training import run_directory
from specjax.training.config import OptimizerConfig
from specjax.training.optimizer import make_optimizer
from specjax.training.step import TrainState

CHARACTERS_PER_TOKEN = 2.5
PREAMBLE = 170
"""About how many tokens the template adds to a list of tools."""
SHORTEST_TURN = 50
MEASURED = 1024
"""The length of the conversations that are measured while training."""


@dataclass(frozen=True)
class Stage:
    """A part of the training.

    Attributes:
        steps: the number of its steps.
        length: the tokens of a row.
        batch: the rows of a step.
        lists: the smallest and largest share of a row that the list of tools takes.
    """

    steps: int
    length: int
    batch: int
    lists: tuple[float, float] = (0.3, 0.55)


@dataclass(frozen=True)
class Row:
    """A row of training.

    Attributes:
        tokens: ``[T]``.
        weights: ``[T]`` the weight of each token in the loss; 0 for the first.
    """

    tokens: np.ndarray
    weights: np.ndarray


def chat_row(
    tokenizer: Any,
    seed: str,
    length: int,
    lists: tuple[float, float],
    is_held_out: bool = False,
) -> Row:
    """Return a conversation of so many tokens: a list of tools of random size, then turns."""
    rng = random.Random(seed)
    before = length * rng.uniform(*lists)
    characters = int(max(before - PREAMBLE, 60) * CHARACTERS_PER_TOKEN)
    system = int(characters * rng.uniform(0, 0.4)) if rng.random() < 0.1 else rng.choice((0, 60))
    size = 0 if rng.random() < 0.03 else characters - system
    turns = max(2, int((length - before) / SHORTEST_TURN))
    writer = Writer(seed, is_held_out)
    tokens = encode(tokenizer, writer.conversation(size, system, turns))[:length]
    row_weights = weights(tokenizer, tokens)
    padding = length - len(tokens)
    return Row(
        np.pad(np.asarray(tokens, np.int32), (0, padding)), np.pad(row_weights, (0, padding))
    )


def make_rows(tokenizer: Any, stage: Stage, seed: int, step: int) -> list[Row]:
    """Return the rows of a step. They depend on nothing but the arguments."""
    return [
        chat_row(tokenizer, f"train {seed} {step} {index}", stage.length, stage.lists)
        for index in range(stage.batch)
    ]


def _labels(rows: Sequence[Row], share: int = 3) -> tuple[np.ndarray, ...]:
    """Return tokens ``[B, T]``, and the indices, ids and weights ``[B, K]`` of labels.

    K is T / share; further labels of a row are left out.
    """
    tokens = np.stack([row.tokens for row in rows]).astype(np.int32)
    count = tokens.shape[1] // share
    places, ids, values = (np.zeros((len(rows), count), kind) for kind in (int, int, np.float32))
    for index, row in enumerate(rows):
        chosen = np.flatnonzero(row.weights[1:])
        if len(chosen) > count:  # answers come before everything else
            order = np.argsort(-row.weights[1:][chosen], kind="stable")[:count]
            chosen = np.sort(chosen[order])
        places[index, : len(chosen)] = chosen
        ids[index, : len(chosen)] = row.tokens[1:][chosen]
        values[index, : len(chosen)] = row.weights[1:][chosen]
    return tokens, places, ids, values


def _loss(
    params: Any,
    config: Any,
    tokens: jax.Array,
    places: jax.Array,
    ids: jax.Array,
    values: jax.Array,
) -> jax.Array:
    states = network.hidden_states(params, config, tokens, remat=tokens.shape[1] > 4096)
    states = jnp.take_along_axis(states, places[:, :, None], axis=1)
    logits = (states.reshape(-1, states.shape[-1]) @ params["embed"].T).reshape(*ids.shape, -1)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, ids)
    return (losses * values).sum() / jnp.maximum(values.sum(), 1)


SLOW = 0.05
"""The learning rate of what begins as a search, as a share of the last MLP's and the norms'.

At the whole rate fifty steps destroy the codes of tokens and the search.
"""


def _slowed(path: Any, update: jax.Array) -> jax.Array:
    name = jax.tree_util.keystr(path, simple=True, separator=".")
    last = max(network.FULL)
    is_fast = name.endswith("norm") or any(
        name.endswith(f"layers.{last}.{part}") for part in ("gate", "up", "down")
    )
    return update if is_fast else update * SLOW


def make_step(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """Return a training step: of state and batch, the next state and the loss."""

    @partial(jax.jit, donate_argnums=0)
    def step(state: TrainState, batch: tuple[jax.Array, ...]) -> tuple[TrainState, jax.Array]:
        student = state.student
        value, gradients = jax.value_and_grad(_loss)(student.params, student.config, *batch)
        updates, memory = optimizer.update(gradients, state.optimizer, student.params)
        updates = jax.tree_util.tree_map_with_path(_slowed, updates)
        params = optax.apply_updates(student.params, updates)
        return TrainState(student.replace(params=params), memory, state.step + 1), value

    return step


@dataclass
class _Position:
    """The place in the data, for checkpoints: rows are made from the number of their step."""

    step: int = 0

    def get_state(self) -> dict[str, int]:
        """Return what a checkpoint stores."""
        return {"step": self.step}

    def set_state(self, stored: dict[str, int]) -> None:
        """Set what a checkpoint stored."""
        self.step = stored["step"]


def stage_of(stages: Sequence[Stage], step: int) -> Stage:
    """Return the stage that a step is in."""
    for stage in stages:
        if step < stage.steps:
            return stage
        step -= stage.steps
    return stages[-1]


@dataclass(frozen=True)
class Rates:
    """The shares of held-out calls.

    Attributes:
        tools: calls of the right tool.
        calls: calls that are right in every character.
        answers: answers in words that are right in every character.
    """

    tools: float
    calls: float
    answers: float


@partial(jax.jit, static_argnames=("config",))
def _best(params: Any, config: Any, tokens: jax.Array, places: jax.Array) -> jax.Array:
    states = network.hidden_states(params, config, tokens, remat=False)
    states = jnp.take_along_axis(states, places[:, :, None], axis=1)
    return jnp.argmax(states @ params["embed"].T, axis=-1)


def rates(
    target: Target,
    tokenizer: Any,
    length: int,
    count: int,
    batch: int = 1,
    lists: tuple[float, float] = (0.4, 0.7),
) -> Rates:
    """Return how often greedy decoding would answer right in held-out conversations.

    Every answer is predicted from the right text before it, all in one pass: an answer is right as
    a whole exactly if each of its tokens is the likeliest one.
    """
    names, calls, words = [], [], []
    for first in range(0, count, batch):
        rows = [
            chat_row(tokenizer, f"test {length} {first + index}", length, lists, is_held_out=True)
            for index in range(batch)
        ]
        tokens, places, ids, _ = _labels(rows)
        best = np.asarray(_best(target.params, target.config, tokens, places))
        for index, row in enumerate(rows):
            is_right = np.ones(length + 1, bool)
            # Places that fill the row up are 0, and no answer is there.
            is_right[places[index] + 1] = best[index] == ids[index]
            for answer in answers(tokenizer, row.tokens.tolist()):
                is_whole = bool(is_right[answer.start : answer.end].all())
                (calls if answer.names else words).append(is_whole)
                names += [is_right[start:end].all() for start, end in answer.names]
    shares = (float(np.mean(hits)) if hits else 0.0 for hits in (names, calls, words))
    return Rates(*shares)


def train(
    directory: Path,
    stages: Sequence[Stage],
    seed: int = 0,
    learning_rate: float = 1e-3,
    checkpoint_every: int = 50,
    measure_every: int = 50,
    stop_after: int | None = None,
    save: Callable[[Target], None] = lambda target: None,
) -> Target:
    """Train a model, or continue a training that was killed, and return it.

    Args:
        directory: the directory for checkpoints.
        stages: the stages, in order.
        seed: the seed of the weights and the data.
        learning_rate: the largest learning rate.
        checkpoint_every: the number of steps between two checkpoints.
        measure_every: the number of steps between two measurements; 0 for none.
        stop_after: end after this step, as if killed; None: go on to the end.
        save: takes the model at each checkpoint.
    """
    tokenizer = make_tokenizer()
    total = sum(stage.steps for stage in stages)
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=learning_rate, warmup_steps=20, weight_decay=0.0), total
    )
    # A step donates its arrays, and some of the first ones are shared.
    student = jax.tree.map(jnp.copy, first_target(tokenizer, seed))
    state = TrainState(student, optimizer.init(student.params), jnp.zeros((), jnp.int32))
    step_once = make_step(optimizer)
    start, recent = time.monotonic(), []
    with run_directory.open_checkpoints(directory) as checkpoints:
        position = _Position()
        state = run_directory.restore(checkpoints, state, position)
        since, tokens_done = position.step, 0
        for step in range(since, total if stop_after is None else stop_after):
            stage = stage_of(stages, step)
            batch = _labels(make_rows(tokenizer, stage, seed, step))
            state, value = step_once(state, batch)
            recent.append(float(value))
            tokens_done += stage.length * stage.batch
            position.step = step + 1
            if position.step % 20 == 0:
                elapsed = time.monotonic() - start
                print(
                    f"step {step + 1} of {total}: loss {np.mean(recent):.3f}, length"
                    f" {stage.length}, {tokens_done / elapsed:,.0f} tokens/s, {elapsed:,.0f} s",
                    flush=True,
                )
                recent = []
            if position.step % checkpoint_every == 0 or position.step == total:
                run_directory.save(checkpoints, state, position)
                save(state.student)
            if measure_every and (position.step % measure_every == 0 or position.step == total):
                print(f"  {rates(state.student, tokenizer, MEASURED, count=16)}", flush=True)
    return state.student
