"""The training: states of many conversations, from which the last MLP learns what to write.

The attention is made by hand (`first_weights`), and is not trained. So the states before the last
MLP do not change, and are computed once. Only the last MLP and the norms around it are trained:
they choose between what the heads have copied and the form of calls and answers.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.tools_model import network
from benchmarks.tools_model.conversations import Writer
from benchmarks.tools_model.encoding import encode, label_places, make_tokenizer
from benchmarks.tools_model.evaluation import Hits, predict
from benchmarks.tools_model.first_weights import PLACES, first_target
from specjax.models.config import ModelConfig
from specjax.models.params import Params
from specjax.models.transformer import Target
from specjax.training import run_directory
from specjax.training.config import OptimizerConfig
from specjax.training.optimizer import make_optimizer
from specjax.training.step import TrainState

CHARACTERS_PER_TOKEN = 2.5
PREAMBLE = 60
"""About how many tokens the template adds to a list of tools."""
SHORTEST_TURN = 50
ROWS = 16
"""The number of rows in a file of states."""
MEASURED = 1024
"""The length of the conversations that are measured while training."""
BATCH = 512
"""The number of labels in a step."""
READOUT = ("gate", "up", "down", "post_norm")
"""The parameters of the last layer that are trained."""


@dataclass(frozen=True)
class Stage:
    """A part of the data.

    Attributes:
        rows: the number of its conversations, a multiple of `ROWS`.
        length: the tokens of a row.
        lists: the smallest and largest share of a row that the list of tools takes.
    """

    rows: int
    length: int
    lists: tuple[float, float] = (0.2, 0.55)


def chat_row(
    tokenizer: Any,
    seed: str,
    length: int,
    lists: tuple[float, float],
    is_held_out: bool = False,
) -> np.ndarray:
    """Return a conversation of so many tokens: a list of tools of random size, then turns."""
    rng = random.Random(seed)
    before = length * rng.uniform(*lists)
    characters = int(max(before - PREAMBLE, 60) * CHARACTERS_PER_TOKEN)
    system = int(characters * rng.uniform(0, 0.4)) if rng.random() < 0.1 else rng.choice((0, 60))
    size = 0 if rng.random() < 0.03 else characters - system
    turns = max(2, int((length - before) / SHORTEST_TURN))
    writer = Writer(seed, is_held_out)
    tokens = encode(tokenizer, writer.conversation(size, system, turns))[:length]
    return np.pad(np.asarray(tokens, np.int32), (0, length - len(tokens)))


@partial(jax.jit, static_argnames=("config",))
def _states(params: Params, config: ModelConfig, tokens: jax.Array) -> jax.Array:
    return network.before_readout(params, config, tokens[None], has_mlps=False)[0]


def write_states(
    directory: Path, target: Target, tokenizer: Any, stages: Sequence[Stage], seed: int
) -> None:
    """Write files with the states before the labels of all stages' conversations.

    Files that are there from a run that was killed are used.
    """
    directory.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    for index, stage in enumerate(stages):
        for first in range(0, stage.rows, ROWS):
            path = directory / f"{index}-{first:05}.npz"
            if path.exists():
                continue
            states, labels = [], []
            for row in range(first, first + ROWS):
                name = f"train {seed} {index} {row}"
                tokens = chat_row(tokenizer, name, stage.length, stage.lists)
                places = label_places(tokenizer, tokens.tolist())
                of_row = np.asarray(_states(target.params, target.config, jnp.asarray(tokens)))
                states.append(of_row[places - 1].astype(np.float16))
                labels.append(tokens[places])
            part = path.with_suffix(".part")
            with part.open("wb") as file:
                np.savez(file, states=np.concatenate(states), labels=np.concatenate(labels))
            part.rename(path)
            print(
                f"states of stage {index + 1} of {len(stages)}: {first + ROWS} of {stage.rows}"
                f" conversations, {time.monotonic() - start:,.0f} s",
                flush=True,
            )


def read_states(directory: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return all states ``[N, H]`` and their labels ``[N]``."""
    files = [np.load(path) for path in sorted(directory.glob("*.npz"))]
    states, labels = (np.concatenate([file[name] for file in files]) for name in files[0].files)
    return states, labels


def readout_of(params: Params) -> Params:
    """Return the parameters that are trained."""
    last = params["layers"][-1]
    return {"norm": params["norm"], **{name: last[name] for name in READOUT}}


def with_readout(params: Params, readout: Params) -> Params:
    """Return a model's parameters with trained ones."""
    last = {**params["layers"][-1], **{name: readout[name] for name in READOUT}}
    layers = [*params["layers"][:-1], last]
    return {**params, "layers": layers, "norm": readout["norm"]}


def make_step(
    optimizer: optax.GradientTransformation, target: Target
) -> Callable[..., tuple[TrainState, jax.Array]]:
    """Return a training step: of training state, states and labels, the next one and the loss."""

    def loss(readout: Params, head: jax.Array, states: jax.Array, labels: jax.Array) -> jax.Array:
        params = {"layers": [readout], "norm": readout["norm"]}
        output = network.read_out(params, target.config, states)[:, PLACES["out"]]
        logits = output @ head
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    @partial(jax.jit, donate_argnums=0)
    def step(
        state: TrainState, head: jax.Array, states: jax.Array, labels: jax.Array
    ) -> tuple[TrainState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(state.student, head, states, labels)
        updates, memory = optimizer.update(gradients, state.optimizer, state.student)
        readout = optax.apply_updates(state.student, updates)
        return TrainState(readout, memory, state.step + 1), value

    # All other rows are 0.
    head = target.params["lm_head"][PLACES["out"]]
    return lambda state, states, labels: step(state, head, states, labels)


@dataclass
class _Position:
    """The place in the data, for checkpoints: a step's labels are drawn from its number."""

    step: int = 0

    def get_state(self) -> dict[str, int]:
        """Return what a checkpoint stores."""
        return {"step": self.step}

    def set_state(self, stored: dict[str, int]) -> None:
        """Set what a checkpoint stored."""
        self.step = stored["step"]


def train(
    directory: Path,
    stages: Sequence[Stage],
    steps: int,
    seed: int = 0,
    learning_rate: float = 3e-3,
    checkpoint_every: int = 400,
    measured: int = 8,
    stop_after: int | None = None,
    save: Callable[[Target], None] = lambda target: None,
) -> Target:
    """Train a model, or continue a training that was killed, and return it.

    Args:
        directory: the directory for states and checkpoints.
        stages: the parts of the data.
        steps: the number of steps.
        seed: the seed of the weights and the data.
        learning_rate: the largest learning rate.
        checkpoint_every: the number of steps between two checkpoints.
        measured: the number of held-out conversations to measure at each checkpoint; 0 for none.
        stop_after: end after this step, as if killed; None: go on to the end.
        save: takes the model at each checkpoint.
    """
    tokenizer = make_tokenizer()
    target = first_target(tokenizer, seed)
    write_states(directory / "states", target, tokenizer, stages, seed)
    states, labels = read_states(directory / "states")
    optimizer = make_optimizer(
        OptimizerConfig(learning_rate=learning_rate, warmup_steps=50, weight_decay=0.0), steps
    )
    # A step donates its arrays.
    readout = jax.tree.map(jnp.copy, readout_of(target.params))
    state = TrainState(readout, optimizer.init(readout), jnp.zeros((), jnp.int32))
    step_once = make_step(optimizer, target)
    chats = [
        chat_row(tokenizer, f"test {index}", MEASURED, (0.4, 0.7), is_held_out=True)
        for index in range(measured)
    ]
    start, recent = time.monotonic(), []
    with run_directory.open_checkpoints(directory, 2) as checkpoints:
        position = _Position()
        state = run_directory.restore(checkpoints, state, position)
        for step in range(position.step, steps if stop_after is None else stop_after):
            chosen = np.random.default_rng((seed, step)).integers(len(labels), size=BATCH)
            batch = (jnp.asarray(states[chosen], jnp.float32), jnp.asarray(labels[chosen]))
            state, value = step_once(state, *batch)
            recent.append(float(value))
            position.step = step + 1
            if position.step % 50 == 0:
                loss, elapsed = np.mean(recent), time.monotonic() - start
                print(
                    f"step {position.step} of {steps}: loss {loss:.4f}, {elapsed:,.0f} s",
                    flush=True,
                )
                recent = []
            if position.step % checkpoint_every == 0 or position.step == steps:
                run_directory.save(checkpoints, state, position)
                learned = replace(target, params=with_readout(target.params, state.student))
                save(learned)
                if measured:
                    hits = sum((predict(learned, tokenizer, row.tolist()) for row in chats), Hits())
                    print(f"  {hits.line()}", flush=True)
    return replace(target, params=with_readout(target.params, state.student))
