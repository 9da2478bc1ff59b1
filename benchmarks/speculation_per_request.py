"""The time of requests that do not speculate, beside requests that do.

python -m benchmarks.speculation_per_request

Requests fill the rows of one engine. Some of them are off, and the others name a chain. The table
has the tokens per second of one request of either kind while all of them run.
"""

import statistics
import time
from dataclasses import dataclass

import tyro

import specjax
from specjax.demo import OnInflated, inflate
from specjax.serving import Engine
from specjax.serving.handle import TextCancelledError

PROMPTS = tuple(f"import os\nimport sys\n\n\ndef {name}" for name in ("read", "write", "main"))


@dataclass(frozen=True)
class SpeculationConfig:
    """Measure requests that are off beside requests that draft.

    Attributes:
        rows: the number of requests that run together.
        off: the numbers of requests that are off.
        chain: the length of the chain that the others draft.
        new_tokens: the tokens of a request that is measured; the others run longer.
        repeats: how often everything is measured, in turns.
        inflate: hidden size, MLP size and layers to which the target is padded, with the same
            outputs.
    """

    rows: int = 8
    off: tuple[int, ...] = (0, 1, 4, 7, 8)
    chain: int = 3
    new_tokens: int = 64
    repeats: int = 5
    inflate: tuple[int, int, int] = (768, 2304, 13)


def measure(engine: Engine, config: SpeculationConfig, off: int) -> tuple[float, float]:
    """Return the tokens per second of a request that is off, and of one that drafts; 0 for none.

    The requests that are off end first, or all of them draft; the others are cancelled then.
    """
    longest = 5 * config.new_tokens if off else config.new_tokens
    handles = [
        engine.submit(
            PROMPTS[row % len(PROMPTS)],
            max_new_tokens=config.new_tokens if row < off else longest,
            eos_token_ids=(),
            temperature=0.7,
            seed=row,
            speculation="off" if row < off else f"chain:{config.chain}",
        )
        for row in range(config.rows)
    ]
    started = time.perf_counter()
    for handle in handles[:off] if off else handles:
        handle.result()
    seconds = time.perf_counter() - started
    drafted = [len(handle.tokens) for handle in handles[off:]]
    for handle in handles[off:]:
        handle.cancel()
        try:
            handle.result()
        except TextCancelledError:
            continue
    return (
        config.new_tokens / seconds if off else 0.0,
        statistics.mean(drafted) / seconds if drafted else 0.0,
    )


def shown(values: list[float]) -> str:
    """Return the median, and the least and the largest value; nothing for zeros."""
    if not any(values):
        return ""
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def main(config: SpeculationConfig) -> None:
    """Measure all numbers of requests that are off in turns, and print the table."""
    generator = specjax.load("embedded", "embedded:eagle3", generation_config=None)
    small, drafter = generator.target, generator.drafter
    assert drafter is not None
    hidden_size, intermediate_size, num_layers = config.inflate
    target = inflate(
        small, hidden_size=hidden_size, intermediate_size=intermediate_size, num_layers=num_layers
    )
    results: dict[int, list[tuple[float, float]]] = {off: [] for off in config.off}
    with Engine(
        target,
        OnInflated.of(drafter, small),
        tokenizer=generator.tokenizer,
        rows=config.rows,
        widths=(config.rows,),
        drafts=(None, config.chain),
        capacity=6 * config.new_tokens + 64,
        pages=config.rows * 8,
    ) as engine:
        for off in config.off:  # the first calls of the programs
            measure(engine, config, off)
        for _ in range(config.repeats):
            for off in config.off:
                results[off].append(measure(engine, config, off))
    print(f"| off, of {config.rows} | off, tokens/s | drafting, tokens/s |\n|---:|---:|---:|")
    for off, pairs in results.items():
        of_off, of_drafting = zip(*pairs, strict=True)
        print(f"| {off} | {shown([*of_off])} | {shown([*of_drafting])} |")


if __name__ == "__main__":
    main(tyro.cli(SpeculationConfig))
