"""The time of a mixture of experts on this machine: of few and many experts, sorted or not.

Every token has 8 experts. With 8 experts in all, they run on all tokens. With more, tokens are
sorted by expert (`specjax.models.sorted_experts`), or all experts run on all tokens, which is the
form of passes over few tokens. The *floor* is no mixture: every expert runs on the same number of
rows, without a router and without sorting, which a mixture of so many experts cannot beat. The
cases take turns, and the table has the median of their times, so that other work on the machine
counts for all of them. The last column has the same two ratios of the CPU time of all threads,
which depends less on other work.

    python -m benchmarks.mixtures --sizes 1024x384 128x64 --tokens 1024 256
"""

import argparse
import os
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import moe
from specjax.models.config import ModelConfig, MoE
from specjax.models.params import Params, declare_layer, initialise

FEW = 8
"""The experts of a token, and the number of experts of the first case."""


def layer_of(hidden: int, width: int, experts: int) -> tuple[ModelConfig, Params]:
    """Return a configuration and the parameters of one layer, float32."""
    config = ModelConfig(
        vocab_size=32,
        hidden_size=hidden,
        intermediate_size=width,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        moe=MoE(num_experts=experts, experts_per_token=FEW, intermediate_size=width),
    )
    layer = initialise(declare_layer(config, "", 1), jax.random.key(0))
    names = ("router", "experts_gate", "experts_up", "experts_down")
    return config, {name: layer[name] for name in names}


def compiled(
    form: str, gradient: bool, config: ModelConfig, layer: Params, x: jax.Array
) -> Callable[[], object]:
    """Return a compiled call of the mixture in that form, or of its gradient."""
    run = partial(moe.mixture, config=config)

    def loss(layer: Params, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(run(layer, x=x)))

    function = jax.grad(loss, argnums=(0, 1)) if gradient else lambda layer, x: run(layer, x=x)
    with mock.patch.object(moe, "LEAST_SORTED", 1 if form == "sorted" else 2**31):
        program = jax.jit(function).lower(layer, x).compile()
    return lambda: jax.block_until_ready(program(layer, x))


def compiled_floor(
    gradient: bool, config: ModelConfig, layer: Params, rows: int
) -> Callable[[], object]:
    """Return a compiled call of all experts on so many rows each, or of its gradient."""
    experts = {name.removeprefix("experts_"): layer[name] for name in layer if name != "router"}
    shape = (len(experts["gate"]), rows, config.hidden_size)
    x = jax.random.normal(jax.random.key(2), shape)
    unit = partial(moe._unit, config)

    def run(experts: Params, x: jax.Array) -> jax.Array:
        counts = jnp.ones(rows, bool)
        return jax.lax.map(lambda pair: unit(pair[0], pair[1], counts), (experts, x))

    def loss(experts: Params, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.square(run(experts, x)))

    function = jax.grad(loss, argnums=(0, 1)) if gradient else run
    program = jax.jit(function).lower(experts, x).compile()
    return lambda: jax.block_until_ready(program(experts, x))


def medians(
    cases: dict[str, Callable[[], object]], repeats: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the median seconds of each case, by the clock and of all threads' work together.

    The cases take turns.
    """
    wall: dict[str, list[float]] = {name: [] for name in cases}
    cpu: dict[str, list[float]] = {name: [] for name in cases}
    for repeat in range(repeats + 1):
        for name, call in cases.items():
            start, start_cpu = time.perf_counter(), time.process_time()
            call()
            if repeat:  # the first call of all is left out
                wall[name].append(time.perf_counter() - start)
                cpu[name].append(time.process_time() - start_cpu)

    def middle(times: dict[str, list[float]]) -> dict[str, float]:
        return {name: float(np.median(values)) for name, values in times.items()}

    return middle(wall), middle(cpu)


def main() -> None:
    """Print a table in Markdown."""
    parser = argparse.ArgumentParser(description="Time mixtures of experts.")
    parser.add_argument("--sizes", nargs="+", default=["1024x384", "128x64"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 256])
    parser.add_argument("--experts", nargs="+", type=int, default=[128])
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    cases = f"{FEW}, ms | all run, ms | floor, ms | sorted, ms"
    print(f"load {os.getloadavg()[0]:.1f}, niceness {os.nice(0)}, {os.cpu_count()} cores")
    ratio_names = f"floor / {FEW} | sorted / {FEW} | CPU time"
    print(f"| hidden x width | tokens | experts | pass | {cases} | {ratio_names} |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for size in options.sizes:
        hidden, width = map(int, size.split("x"))
        for tokens in options.tokens:
            x = jax.random.normal(jax.random.key(1), (1, tokens, hidden))
            for experts in options.experts:
                few, many = layer_of(hidden, width, FEW), layer_of(hidden, width, experts)
                for gradient in (False, True):
                    time_of, work_of = medians(
                        {
                            "few": compiled("all", gradient, *few, x),
                            "all": compiled("all", gradient, *many, x),
                            "floor": compiled_floor(gradient, *many, tokens * FEW // experts),
                            "sorted": compiled("sorted", gradient, *many, x),
                        },
                        options.repeats,
                    )
                    figures = " | ".join(f"{1e3 * seconds:.1f}" for seconds in time_of.values())
                    name = "gradient" if gradient else "forward"
                    ratios = [time_of[case] / time_of["few"] for case in ("floor", "sorted")]
                    work = [work_of[case] / work_of["few"] for case in ("floor", "sorted")]
                    print(
                        f"| {size} | {tokens} | {experts} | {name} | {figures}"
                        f" | {ratios[0]:.2f} | {ratios[1]:.2f} | {work[0]:.2f}, {work[1]:.2f} |",
                        flush=True,
                    )
    print(f"load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
