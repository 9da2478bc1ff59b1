"""Tokens per second of an EAGLE-3 training step, compared with the speculators package (PyTorch).

python -m benchmarks.train

Both have the same shapes and numbers, and read hidden states of the target that are computed
beforehand. So only the drafter's step is compared: seven steps of the training-time test over a
window, the gradient, and an AdamW update. The losses of the first step must agree.
"""

import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from rich.console import Console
from rich.table import Table

import specjax
from specjax.drafters import Eagle3
from specjax.errors import InputError
from specjax.models.config import ModelConfig
from specjax.models.transformer import States
from specjax.training.objectives.unrolling import unroll

RATE, DECAY = 1e-5, 0.8


@dataclass(frozen=True)
class TrainBenchmarkConfig:
    """Time a step of both.

    Attributes:
        hidden_size: hidden size of the target and the drafter.
        intermediate_size: size of the drafter's MLP.
        heads: heads of the drafter; it has a quarter as many key/value heads.
        vocab_size: vocabulary of the target and the drafter.
        window: tokens of the one row that speculators' model reads at a time.
        steps: steps of the training-time test.
        repeats: repeats of each, interleaved; the median counts.
    """

    hidden_size: int = 256
    intermediate_size: int = 768
    heads: int = 8
    vocab_size: int = 4096
    window: int = 512
    steps: int = 7
    repeats: int = 5


def speculators_model(directory: str) -> Any:
    """Load the package's model with the weights of a checkpoint that we wrote."""
    from speculators.models.eagle3.core import Eagle3DraftModel

    read = Eagle3DraftModel.from_pretrained(directory)
    read.config.transformer_layer_config._attn_implementation = (
        "eager"  # its other kinds of attention are made for GPUs
    )
    model = Eagle3DraftModel(read.config)
    model.load_state_dict(read.state_dict())
    return model.train()


@dataclass(frozen=True)
class _Data:
    """The training row: tokens ``[1, T+1]``, and random taps and final states of a target."""

    tokens: np.ndarray
    taps: np.ndarray
    final: np.ndarray


def _their_step(
    config: TrainBenchmarkConfig, target: specjax.Target, drafter: Eagle3, data: _Data
) -> Callable[[], float]:
    """Return a step of speculators' model with the same weights, which returns its loss."""
    import torch
    from speculators.losses import resolve_loss_config

    with tempfile.TemporaryDirectory() as place:
        target.save_pretrained(f"{place}/target")
        drafter.save_pretrained(f"{place}/drafter", layout="speculators", target=f"{place}/target")
        model = speculators_model(f"{place}/drafter")
    with torch.no_grad():
        model.embed_tokens.weight.copy_(torch.tensor(np.asarray(target.params["embed"])))
        model.verifier_lm_head.weight.copy_(torch.tensor(np.asarray(target.params["lm_head"]).T))
        model.verifier_norm.weight.fill_(1.0)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(("verifier", "embed")))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=RATE)
    inputs = {
        "hidden_states": torch.tensor(data.taps.reshape(1, config.window, -1)),
        "input_ids": torch.tensor(data.tokens[:, 1:]),
        "document_ids": torch.zeros(1, config.window, dtype=torch.long),
        "position_ids": torch.arange(config.window)[None],
        "verifier_last_hidden_states": torch.tensor(np.roll(data.final, -1, axis=1)),
        "ttt_steps": config.steps,
        "ttt_step_loss_decay": DECAY,
        "loss_config": resolve_loss_config("kl_div", "eager"),  # its fused losses need Triton
    }

    def step() -> float:
        optimizer.zero_grad()
        _, loss, _ = model(**inputs)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _our_step(
    config: TrainBenchmarkConfig, target: specjax.Target, drafter: Eagle3, data: _Data
) -> Callable[[], float]:
    """Return our step with speculators' loss: KL, the mean over positions."""
    adamw = optax.adamw(RATE)
    final = jnp.asarray(data.final)
    size = jnp.sqrt(jnp.mean(jnp.square(final), -1, keepdims=True) + target.config.norm_eps)
    expected = target.head(final / size)
    batch = {
        "tokens": jnp.asarray(data.tokens),
        "segments": jnp.zeros(data.tokens.shape, jnp.int32),
    }
    output = States(hidden=final, taps=jnp.asarray(data.taps))

    def loss_of(params: Any) -> jax.Array:
        student = drafter.replace(params=params)  # pyright: ignore[reportAttributeAccessIssue]
        total = jnp.zeros(())
        for step, states in enumerate(
            unroll(student, batch, target, student.features(output), config.steps, detach=False)
        ):
            target_log_probs = jax.nn.log_softmax(jnp.roll(expected, -1 - step, axis=1))
            ours = jax.nn.log_softmax(student.logits(target, states))
            losses = jnp.sum(jnp.exp(target_log_probs) * (target_log_probs - ours), axis=-1)[
                0, : config.window - step
            ]
            total += DECAY**step * jnp.mean(losses)
        return total

    @jax.jit
    def update(params: Any, state: Any) -> tuple[Any, Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = adamw.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    carry = (drafter.params, adamw.init(drafter.params))

    def step() -> float:
        nonlocal carry
        *carry, loss = update(*carry)
        return float(loss)

    return step


def measure(config: TrainBenchmarkConfig) -> dict[str, Any]:
    """Return the seconds of a step of each, and both losses."""
    shape = ModelConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=8,
        num_heads=config.heads,
        num_kv_heads=max(1, config.heads // 4),
        head_dim=config.hidden_size // config.heads,
    )
    target = specjax.Target.init(shape, jax.random.key(0))
    drafter = Eagle3.init(target, jax.random.key(1))
    rng = np.random.default_rng(0)
    data = _Data(
        tokens=rng.integers(0, config.vocab_size, (1, config.window + 1)),
        taps=rng.normal(size=(1, config.window, 3, config.hidden_size)).astype(np.float32),
        final=rng.normal(size=(1, config.window, config.hidden_size)).astype(np.float32),
    )
    steps = {
        "specjax": _our_step(config, target, drafter, data),
        "speculators": _their_step(config, target, drafter, data),
    }
    losses = {name: step() for name, step in steps.items()}  # and compiles
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(config.repeats):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            seconds[name].append(time.perf_counter() - started)
    return {"losses": losses, "seconds": seconds}


def main(config: TrainBenchmarkConfig) -> None:
    """Print both."""
    results = measure(config)
    table = Table(
        "",
        "tokens/s",
        "spread",
        "loss of the first step",
        title=f"EAGLE-3, {config.steps} steps of {config.window} tokens",
    )
    for name, seconds in results["seconds"].items():
        low, high = config.window / max(seconds), config.window / min(seconds)
        speed = config.window / median(seconds)
        table.add_row(
            name, f"{speed:,.0f}", f"{low:,.0f}-{high:,.0f}", f"{results['losses'][name]:.5f}"
        )
    Console().print(table)


if __name__ == "__main__":
    try:
        main(tyro.cli(TrainBenchmarkConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
