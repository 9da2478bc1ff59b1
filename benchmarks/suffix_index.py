"""Cost of drafts from earlier text: the search, a whole draft, the sort, and an insertion.

python -m benchmarks.suffix_index

The text is made up: words of Zipf's distribution, in which long parts are repeated. The rows end as
a part of it does, so that contexts of all lengths occur.
"""

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from specjax.drafters.continuations import Continuations
from specjax.drafters.methods.suffix import Suffix
from specjax.drafters.suffix_index import LONGEST_CONTEXT, SuffixIndex, sorted_positions
from specjax.drafters.text_search import RowTexts
from specjax.drafts.draft import Draft
from specjax.drafts.shapes import Chain, DynamicTree
from specjax.errors import InputError
from specjax.models.config import ModelConfig
from specjax.models.transformer import Target
from specjax.sampling import Sampling

SHAPES = {"chain of 8": Chain(8), "dynamic tree of 16": DynamicTree(3, 8, 16)}


@dataclass(frozen=True)
class SuffixIndexConfig:
    """Time the parts of a draft.

    Attributes:
        tokens: number of tokens in the index.
        rows: number of rows.
        own_tokens: number of tokens of each row's own text.
        vocab: number of different tokens.
        repeats: repeats of every case, interleaved.
        sorts: repeats of the sort, and of the insertion.
        inserted: tokens of a text that is inserted in place of another one.
        seed: random seed of the text.
    """

    tokens: int = 1_000_000
    rows: int = 8
    own_tokens: int = 4096
    vocab: int = 100_000
    repeats: int = 200
    sorts: int = 3
    inserted: int = 1_000
    seed: int = 0


def make_text(rng: np.random.Generator, count: int, vocab: int) -> np.ndarray:
    """Return ``count`` tokens, of which about half belong to parts that are repeated."""
    text = np.minimum(rng.zipf(1.2, count), vocab) - 1
    length = min(300, count // 4)
    for _ in range(count // (2 * length)):
        source, place = rng.integers(0, count - length, 2)
        text[place : place + length] = text[source : source + length]
    return text


def rows_of(rng: np.random.Generator, text: np.ndarray, rows: int, length: int) -> RowTexts:
    """Return rows of which each ends as a part of ``text`` does.

    Their last token, behind the stated lengths, is the root of a draft.
    """
    starts = rng.integers(0, len(text) - length, rows)
    tokens = np.stack([text[start : start + length] for start in starts]).astype(np.int32)
    return RowTexts(jnp.asarray(tokens), jnp.full(rows, length - 1, jnp.int32))


def cases(config: SuffixIndexConfig, target: Target) -> dict[str, Callable[..., Any]]:
    """Return the compiled functions that are timed, by their names, of an index and rows."""
    sampling = Sampling(temperature=0.0).rows(config.rows)
    keys = jnp.broadcast_to(jax.random.key(0), (8, config.rows))
    active = jnp.ones(config.rows, bool)

    def search(index: SuffixIndex, texts: RowTexts) -> tuple[jax.Array, jax.Array]:
        return index.matches(texts.last(LONGEST_CONTEXT), texts.lengths)

    def search_own(_: SuffixIndex, texts: RowTexts) -> jax.Array:
        return texts.overlaps(LONGEST_CONTEXT)

    def follow(index: SuffixIndex, texts: RowTexts) -> Continuations:
        return Suffix(index, draft=Chain(8)).continuations(texts)

    def draft_with(shape: Any) -> Callable[[SuffixIndex, RowTexts], Draft]:
        def draft(index: SuffixIndex, texts: RowTexts) -> Draft:
            root = jnp.take_along_axis(texts.tokens, texts.lengths[:, None], axis=1)[:, 0]
            drafter = Suffix(index, draft=shape)
            return drafter.propose(target, texts, root, sampling, keys, active)[0]

        return draft

    parts = {
        "search in the index": search,
        "search in the rows' own texts": search_own,
        "both, and what follows": follow,
    }
    drafts = {f"whole draft, {name}": draft_with(shape) for name, shape in SHAPES.items()}
    return {name: jax.jit(function) for name, function in (parts | drafts).items()}


def measure(config: SuffixIndexConfig) -> dict[str, np.ndarray]:
    """Return the milliseconds of every repeat, by case."""
    rng = np.random.default_rng(config.seed)
    text = make_text(rng, config.tokens, config.vocab)
    padded = np.append(text, -1).astype(np.int32)
    inserting = f"insertion of {config.inserted:,} tokens, on the host"
    times: dict[str, list[float]] = {"sort, on the host": [], inserting: []}
    first, rest = text[: config.inserted].tolist(), text[config.inserted :].tolist()
    stored = SuffixIndex.on_host([first, rest])
    for _ in range(config.sorts):
        started = time.perf_counter()
        sorted_positions(padded)
        times["sort, on the host"].append(time.perf_counter() - started)
        started = time.perf_counter()
        stored.with_texts([first[::-1]], config.inserted + 1, config.tokens + 2)
        times[inserting].append(time.perf_counter() - started)
    index = jax.block_until_ready(SuffixIndex.of([text.tolist()]))
    target = Target.init(
        ModelConfig(
            vocab_size=config.vocab,
            hidden_size=8,
            intermediate_size=8,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=8,
        ),
        jax.random.key(0),
    )
    functions = cases(config, target)
    batches = [rows_of(rng, text, config.rows, config.own_tokens) for _ in range(16)]
    for name, function in functions.items():
        result = jax.block_until_ready(function(index, batches[0]))  # compiles
        if isinstance(result, Draft):
            assert result.valid is not None
            drafted = int(result.valid[:, 1:].sum())
            if drafted < config.rows:  # the rows are parts of the text
                raise RuntimeError(f"{name}: {drafted} tokens are drafted in {config.rows} rows")
    times |= {name: [] for name in functions}
    for repeat in range(config.repeats):
        for name, function in functions.items():
            started = time.perf_counter()
            jax.block_until_ready(function(index, batches[repeat % len(batches)]))
            times[name].append(time.perf_counter() - started)
    return {name: 1e3 * np.array(values) for name, values in times.items()}


def main(config: SuffixIndexConfig) -> None:
    """Print the table."""
    if min(config.rows, config.repeats, config.sorts) < 1 or config.own_tokens < 32:
        raise InputError("rows, repeats and sorts must be at least 1, own_tokens at least 32")
    if config.tokens <= 2 * config.own_tokens or config.vocab < 2:
        raise InputError("tokens must be more than twice own_tokens, and vocab at least 2")
    if not 1 <= config.inserted < config.tokens:
        raise InputError(f"inserted={config.inserted}: must be from 1 to less than tokens")
    results = measure(config)
    load = f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
    table = Table(
        "part",
        title=f"milliseconds, {config.tokens:,} tokens, {config.rows} rows ({load})",
    )
    for column in ("fastest", "10%", "median", "90%"):
        table.add_column(column, justify="right")
    for name, values in results.items():
        table.add_row(name, *(f"{np.percentile(values, at):.3f}" for at in (0, 10, 50, 90)))
    Console(width=120).print(table)


if __name__ == "__main__":
    try:
        main(tyro.cli(SuffixIndexConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
