"""A target that was taught to write JSON, for the part *taught* of `benchmarks.grammars`.

    python -m benchmarks.teach --directory taught
    python -m benchmarks.grammars --target taught --parts taught

The embedded target is trained on random records, as compact JSON that `SCHEMA` accepts. So its free
texts are legal nearly always, as those of a large model that was asked for JSON.
"""

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro

from specjax import text
from specjax.models import hub
from specjax.models.transformer import Target

PROMPT = "records:\n"
CITIES = ("Oslo", "Lima", "Cairo", "Kyoto", "Quito", "Delhi", "Porto", "Accra")
STATES = ("open", "closed", "waiting", "failed")
SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "minimum": 0, "maximum": 99999},
            "city": {"type": "string"},
            "state": {"enum": list(STATES)},
            "sizes": {"type": "array", "items": {"type": "integer"}},
            "is_new": {"type": "boolean"},
        },
        "required": ["id", "city", "state", "sizes", "is_new"],
        "additionalProperties": False,
    },
}


@dataclass(frozen=True)
class TeachConfig:
    """Teach a target to write JSON.

    Attributes:
        directory: where to save the taught target, with its tokenizer.
        target: directory or hub id of the target.
        steps: the number of steps.
        batch: the number of texts in a step.
        length: the tokens of a text.
        learning_rate: the largest learning rate.
        seed: the seed of the texts.
    """

    directory: str
    target: str = "embedded"
    steps: int = 300
    batch: int = 8
    length: int = 160
    learning_rate: float = 1e-3
    seed: int = 0


def records(rng: random.Random, count: int) -> str:
    """Return ``count`` random records as compact JSON, which `SCHEMA` accepts."""
    items = [
        {
            "id": rng.randrange(100_000),
            "city": rng.choice(CITIES),
            "state": rng.choice(STATES),
            "sizes": [rng.randrange(100) for _ in range(rng.randrange(4))],
            "is_new": rng.random() < 0.5,
        }
        for _ in range(count)
    ]
    return json.dumps(items, separators=(",", ":"))


def teach(config: TeachConfig) -> None:
    """Train the target, and save it with its tokenizer."""
    source = hub.locate(config.target, weights=True)
    target, tokenizer = Target.from_pretrained(source), text.load_tokenizer(source)
    target = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), target)
    beginning = text.encode(tokenizer, PROMPT)
    rng = random.Random(config.seed)
    optimizer = optax.adamw(
        optax.warmup_cosine_decay_schedule(
            0.0, config.learning_rate, config.steps // 10, config.steps
        )
    )

    def texts() -> np.ndarray:
        batch = []
        while len(batch) < config.batch:
            tokens = beginning + text.encode_continuation(tokenizer, records(rng, 40))
            batch.append(tokens[: config.length])
        return np.asarray(batch, np.int32)

    def loss(params: Any, tokens: jax.Array) -> jax.Array:
        logits = target.replace(params=params).forward(tokens[:, :-1])[0].logits
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses[:, len(beginning) - 1 :].mean()

    @jax.jit
    def step(params: Any, state: Any, tokens: jax.Array) -> tuple[Any, Any, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params, state = target.params, optimizer.init(target.params)
    for number in range(config.steps):
        params, state, value = step(params, state, texts())
        if number % 20 == 0 or number == config.steps - 1:
            print(f"step {number}: loss {float(value):.3f}", flush=True)
    directory = Path(config.directory)
    directory.mkdir(parents=True, exist_ok=True)
    target.replace(params=params).save_pretrained(directory, dtype=jnp.float32)
    text.copy_tokenizer(source, directory)


if __name__ == "__main__":
    teach(tyro.cli(TeachConfig))
