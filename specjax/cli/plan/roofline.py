"""The command ``specjax plan roofline``: what speculation should gain on a chip."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from rich.table import Table

from specjax.chips import find_chip
from specjax.cli.plan.options import (
    check_batch,
    check_longest,
    check_plot,
    find_model,
    is_checkpoint,
    new_console,
    save_plot,
)
from specjax.drafters import TrainedDrafter, check_vocabulary
from specjax.drafters.registry import METHODS, find
from specjax.errors import InputError
from specjax.lowering import abstract
from specjax.models.config import ModelConfig
from specjax.planning import roofline, work
from specjax.reports.speedups import draw_by_length_and_context
from specjax.reports.tables import table_of_numbers
from specjax.sharding import make_mesh

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class RooflineConfig:
    """Estimate the gain of speculation on a chip, and the context length from which it pays.

    Attributes:
        target: the model to generate from: a published model such as llama-3.1-8b, a directory or a
            hub id.
        drafter: its draft model, in the same forms. Or a drafter that was trained for the target,
            by its directory or hub id or as METHOD:WHERE, whose costs follow from its own shapes.
            Or a method with such drafters, such as eagle3 or gemma4-assistant, for one of the usual
            size. "self" is the target itself with a draft cache.
        draft_cache: number of entries of a row's cache that the drafter keeps; the default is all.
            Of several numbers the best is chosen for each number of rows.
        alpha: acceptance rate, the probability that a drafted token is accepted; with several sizes
            of draft_cache, one for each.
        chip: the accelerator that target and drafter share.
        batch: numbers of rows that are decoded together; the table has a line for each.
        context: number of tokens in each row's KV cache.
        longest: maximum chain length to consider, in tokens.
        plot: picture to write: .png, .pdf or .svg.
    """

    target: str = ""
    drafter: str = ""
    draft_cache: tuple[int, ...] = ()
    alpha: tuple[float, ...] = (0.8,)
    chip: str = "h100"
    batch: tuple[int, ...] = (1, 4, 16, 64)
    context: int = 1024
    longest: int = roofline.LONGEST
    plot: str = ""


def run_roofline(config: RooflineConfig) -> None:
    """Run ``specjax plan roofline``."""
    check_batch(config.batch)
    check_longest(config.longest)
    check_plot(config.plot)
    pair, alphas, longest = _load_pair(config), _alphas(config), config.longest
    if isinstance(pair.drafter, roofline.Trained):
        config = replace(config, longest=pair.drafter.longest_chain(longest))
    best = {
        rows: roofline.best_cache(pair, rows, config.context, alphas, config.longest)
        for rows in config.batch
    }
    console = new_console()
    console.print(_table(config, pair, alphas, best))
    for name, model in {"target": pair.target, "drafter": pair.drafter}.items():
        if isinstance(model, ModelConfig) and model.layers_with_states:
            console.out(_memory_line(name, model))
    if plain := [f"{rows}" for rows, choice in best.items() if choice.gamma == 0]:
        console.out(
            f"Speculation does not pay at {', '.join(plain)} rows: plain decoding is best there."
        )
    if config.longest < longest:
        console.out(f"Drafts of this drafter have at most {config.longest} tokens.")
    elif config.longest == max(choice.gamma for choice in best.values()):
        console.out(f"A chain of more than {config.longest} may be better still: raise --longest.")
    console.out(
        "Real programs do not reach the peak FLOPs and bandwidth, so the speed-ups are upper"
        " bounds."
    )
    if config.plot:
        save_plot(console, _draw(config, pair, alphas), config.plot)


def _alphas(config: RooflineConfig) -> dict[int | None, float]:
    """Return the acceptance rate for each size of the draft cache; None is the whole cache."""
    sizes: tuple[int | None, ...] = config.draft_cache or (None,)
    if len(config.alpha) != len(sizes):
        raise InputError(
            f"alpha={config.alpha}: give one acceptance rate, or one for each size of"
            " --draft-cache, in order"
        )
    if len(set(sizes)) < len(sizes):
        raise InputError(f"draft_cache={config.draft_cache}: give each size once")
    return dict(zip(sizes, config.alpha, strict=True))


def _load_pair(config: RooflineConfig) -> roofline.Pair:
    """Return the target and the drafter on the chip, as shapes without weights.

    At most config.json is read, and the names and shapes of the tensors of a drafter that was
    trained for the target. The draft cache is not set.
    """
    chip = find_chip(config.chip)
    if not config.target:
        raise InputError("target='': name the model to generate from, such as llama-3.1-8b")
    if not config.drafter:
        raise InputError("drafter='': give a draft model, or \"self\" with --draft-cache ENTRIES")
    if config.drafter == "self" and not config.draft_cache:
        raise InputError(
            "drafter='self': a target that drafts with its whole cache gains nothing; give"
            " --draft-cache ENTRIES"
        )
    target = find_model("target", config.target)
    drafter = _find_drafter(config, target)
    if (
        config.draft_cache
        and isinstance(cut := drafter or target, ModelConfig)
        and cut.layers_with_states
    ):
        raise InputError(
            f"draft_cache={config.draft_cache}: layers of this drafter ({cut.model_type}) have a"
            " state, and no part of it can be dropped: leave the option out, or give a drafter"
            " with ordinary attention"
        )
    pair = roofline.Pair(target, chip, drafter)
    if config.context > pair.longest_context:
        raise InputError(
            f"context={config.context}: the models support {pair.longest_context} tokens"
        )
    return pair


def _find_drafter(
    config: RooflineConfig, target: ModelConfig
) -> ModelConfig | roofline.Trained | None:
    """Return the shapes of the drafter; None for the target itself."""
    if config.drafter == "self":
        return None
    name, on_one = config.drafter, abstract.abstract_model(target, make_mesh(1, 1))
    method, where = METHODS.get(name), name
    if is_checkpoint(name):
        method, where, _ = find(name)
    if method is None or method.translates:
        model = find_model("drafter", where)
        if not name.startswith("draft-model-intersect:"):  # intersect accepts any vocabulary
            check_vocabulary(model, target)
        return model
    if method.trained is None:
        raise InputError(
            f"drafter={name!r}: must be a draft model, or a drafter that is trained for its target;"
            ' or give "self" with --draft-cache ENTRIES for the target with a small cache'
        )
    if config.draft_cache:
        raise InputError(
            f"draft_cache={config.draft_cache}: {name} has no draft cache; leave it out"
        )
    if is_checkpoint(name):
        drafter = abstract.stored_drafter(name, on_one)
    else:
        drafter = abstract.abstract_drafter(name, None, on_one)
    assert isinstance(drafter, TrainedDrafter)
    return roofline.Trained(drafter, on_one)


def _table(
    config: RooflineConfig,
    pair: roofline.Pair,
    alphas: Mapping[int | None, float],
    best: Mapping[int, roofline.CacheChoice],
) -> Table:
    """Return the table: for each number of rows the times, the best chain, its gain, and memory."""
    room, several = f"{pair.chip.memory / 1e9:.0f}", len(alphas) > 1
    is_at_once = isinstance(pair.drafter, roofline.Trained) and not pair.drafter.has_levels
    headers = ["rows", "T_T ms", "T_D ms", "T_V ms", "gamma", "gain", "pays from", "memory GB"]
    table = table_of_numbers(_title(config, pair), *headers, *["K"] * several)
    what = "drafting the best chain at once" if is_at_once else "a drafting step"
    table.caption = (
        f"T_T: a decoding step. T_D: {what}. T_V: a verification of the best chain. gain: over"
        " plain decoding. pays from: the smallest context, in tokens, at which speculation pays."
        f" The chip has {room} GB." + several * " K: entries of the best draft cache."
    )
    for rows, choice in best.items():
        chosen = replace(pair, draft_cache=choice.draft_cache)
        break_even = _break_even(config, pair, rows, alphas)
        if is_at_once:
            draft = chosen.once_time(rows, config.context, choice.gamma or 1)
        else:
            draft = chosen.draft_time(rows, config.context)
        memory = f"{chosen.memory(rows, config.context) / 1e9:,.1f}"
        table.add_row(
            str(rows),
            f"{1e3 * chosen.target_time(rows, config.context):.2f}",
            f"{1e3 * draft:.2f}",
            (
                f"{1e3 * chosen.verify_time(rows, config.context, choice.gamma):.2f}"
                if choice.gamma
                else "-"
            ),
            str(choice.gamma) if choice.gamma else "plain",
            f"{choice.factor:.2f}x",
            "never" if break_even is None else f"{break_even:,}",
            memory if chosen.fits(rows, config.context) else f"{memory} > {room}",
            *([f"{choice.draft_cache:,}" if choice.gamma else "-"] if several else []),
        )
    return table


def _memory_line(name: str, model: ModelConfig) -> str:
    """Return a line with the memory of a row of a model with states."""
    return (
        f"A row of the {name} takes {work.cache_bytes(model) / 1e3:.1f} KB for each token in its"
        f" cache, {work.state_bytes(model) / 1e6:.1f} MB for its states at any length, and"
        f" {work.node_bytes(model) / 1e6:.2f} MB for each drafted token until it is verified."
    )


def _break_even(
    config: RooflineConfig, pair: roofline.Pair, rows: int, alphas: Mapping[int | None, float]
) -> int | None:
    """Return the smallest context at which speculation pays with any of the draft caches."""
    break_evens = [
        roofline.break_even_context(replace(pair, draft_cache=entries), rows, alpha, config.longest)
        for entries, alpha in alphas.items()
    ]
    return min((context for context in break_evens if context is not None), default=None)


def _title(config: RooflineConfig, pair: roofline.Pair) -> str:
    entries = " or ".join(f"{entries:,}" for entries in config.draft_cache)
    cache = f" with {entries} cache entries" if entries else ""
    place = f"{pair.chip.name}, context of {config.context:,} tokens"
    return (
        f"{config.target}, drafter {config.drafter}{cache}; {place}; alpha ="
        f" {' or '.join(f'{a:g}' for a in config.alpha)}"
    )


def _draw(
    config: RooflineConfig, pair: roofline.Pair, alphas: Mapping[int | None, float]
) -> "Figure":
    """Draw speed-up over chain length, and the best speed-up over context, for each number of rows.

    With several draft caches, each point is that of the best cache.
    """
    last, longest = pair.longest_context, config.longest
    contexts = np.unique(np.geomspace(max(1, last // 1024), last, 60).round().astype(int)).tolist()
    sized = [(replace(pair, draft_cache=entries), alpha) for entries, alpha in alphas.items()]
    by_length, by_context, fits_until = {}, {}, {}
    for rows in config.batch:
        by_length[rows] = [
            max(
                roofline.chain_speedup(variant, rows, config.context, gamma, alpha)
                for variant, alpha in sized
            )
            for gamma in range(longest + 1)
        ]
        by_context[rows] = [
            max(
                roofline.best_gamma(variant, rows, context, alpha, longest, shortest=1).factor
                for variant, alpha in sized
            )
            for context in contexts
        ]
        # Memory grows with the context, so it fits for the first contexts and for no others.
        fits_until[rows] = sum(
            any(variant.fits(rows, context) for variant, _ in sized) for context in contexts
        )
    return draw_by_length_and_context(
        _title(config, pair), by_length, contexts, by_context, fits_until, config.context
    )
