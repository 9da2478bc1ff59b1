"""Cost of a verdict by rule: milliseconds of verification alone, for random drafts and logits.

python -m benchmarks.verification
"""

import sys
import time
from dataclasses import dataclass
from statistics import median

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from specjax.decoding.verification import verify
from specjax.drafts import tree
from specjax.drafts.draft import Draft
from specjax.drafts.published import EAGLE_TREE
from specjax.drafts.shapes import StaticTree, complete_tree
from specjax.errors import InputError
from specjax.sampling import Rule, Sampling, position_keys, probabilities

DRAFTS = {
    "chain of 5": tree.chain_parents(6),
    "static tree of 26": StaticTree(EAGLE_TREE).template.parents,
    "sampled tree of 28": StaticTree(complete_tree((3, 2, 1, 1, 1))).template.parents,
}
CASES: tuple[
    tuple[str, str, Rule, bool], ...
] = (  # rule, draft, how it is asked for, and whether tokens come with their q
    ("greedy", "chain of 5", "independent", False),
    ("greedy", "static tree of 26", "independent", False),
    ("block", "chain of 5", "block", True),
    ("rejection", "chain of 5", "rejection", True),
    ("coupled", "chain of 5", "coupled", False),
    ("matching", "static tree of 26", "independent", False),
    ("coupled", "static tree of 26", "coupled", False),
    ("recursive rejection", "sampled tree of 28", "independent", True),
    ("coupled", "sampled tree of 28", "coupled", False),
)


@dataclass(frozen=True)
class VerificationConfig:
    """Time every rule.

    Attributes:
        vocab: sizes of the vocabulary.
        batch: numbers of rows.
        top_p: top_p; 1 truncates nothing.
        repeats: repeats of every case, interleaved; the median counts.
    """

    vocab: tuple[int, ...] = (3072, 128_000)
    batch: tuple[int, ...] = (1, 8)
    top_p: tuple[float, ...] = (1.0, 0.9)
    repeats: int = 9


def measure(vocab: int, batch: int, top_p: float, repeats: int) -> list[float]:
    """Return the milliseconds of each of CASES.

    Every verdict goes to the end of a path, because all of p lies on one drafted child.
    """
    runs = []
    for rule, draft_name, rule_options, with_q in CASES:
        parents = DRAFTS[draft_name]
        nodes, depth = len(parents), int(tree.depths(parents).max())
        logits = jax.random.normal(jax.random.key(0), (batch, nodes, vocab)) * 3
        # A single token, although the largest of so many may tie.
        likeliest = jax.nn.one_hot(jnp.argmax(logits, axis=-1), vocab, dtype=bool)
        logits = jnp.where(likeliest, 1000.0, logits)
        ranks = np.array(
            [sum(parents[i] == parents[node] for i in range(1, node)) for node in range(nodes)]
        )
        best = jax.lax.top_k(logits, int(ranks.max()) + 1)[1]
        tokens = jnp.where(np.arange(nodes) > 0, best[:, np.maximum(parents, 0), ranks], 0).astype(
            jnp.int32
        )
        sampling = Sampling(temperature=0.0 if rule == "greedy" else 1.0, top_p=top_p).rows(
            batch, rule_options
        )
        q = probabilities(logits, sampling) if with_q else None
        keys = jax.random.split(jax.random.key(1), batch)
        if rule_options == "coupled":
            keys = position_keys(
                keys, jnp.broadcast_to(jnp.arange(depth + 1)[:, None], (depth + 1, batch))
            )
        run = jax.jit(verify)
        arguments = (Draft.of_tree(tokens, parents, q), logits, sampling, keys)
        assert int(run(*arguments).count.min()) == depth + 1  # and compiles
        runs.append((run, arguments))
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for times, (run, arguments) in zip(seconds, runs, strict=True):
            started = time.perf_counter()
            jax.block_until_ready(run(*arguments))
            times.append(time.perf_counter() - started)
    return [median(times) * 1e3 for times in seconds]


def main(config: VerificationConfig) -> None:
    """Print the table."""
    if min(config.vocab) < 8 or min(config.batch) < 1 or config.repeats < 1:
        raise InputError("vocab must be at least 8, batch and repeats at least 1")
    settings = [
        (vocab, batch, top_p)
        for vocab in config.vocab
        for batch in config.batch
        for top_p in config.top_p
    ]
    columns = [measure(*setting, config.repeats) for setting in settings]
    table = Table("rule", "draft", title="milliseconds a verdict: vocabulary, rows, top-p")
    for vocab, batch, top_p in settings:
        table.add_column(f"{vocab}, {batch}, {top_p:g}", justify="right")
    for i, (rule, draft_name, _, _) in enumerate(CASES):
        table.add_row(rule, draft_name, *(f"{column[i]:.2f}" for column in columns))
    Console(width=160).print(table)


if __name__ == "__main__":
    try:
        main(tyro.cli(VerificationConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
