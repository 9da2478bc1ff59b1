"""What a step costs on this machine, what it should therefore gain, and whether to speculate at all.

The clock runs around compiled loops of many passes, so that the figures hold nothing but the passes themselves. What a step of
the engine takes beyond them (verification, bookkeeping) is missing from a prediction.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from numpy.typing import ArrayLike

from specjax import decoding, sharding
from specjax.decoding.few_rows import by_rows
from specjax.decoding.options import GenerationOptions, as_key, check_prompts
from specjax.decoding.stats import Stats
from specjax.drafters.base import Committed, Drafter, NoDraft, append_tokens
from specjax.drafts.draft import Verdict
from specjax.errors import InputError
from specjax.models.cache import KVCache, gather_entries
from specjax.models.transformer import States, Target
from specjax.progress import track, waiting
from specjax.sampling import Rule, Sampling, argmax

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Costs:
    """Seconds, for one batch size and context.

    Attributes:
        verify: T_V(n), a pass of the target over n nodes a row, by n. ``verify[1]`` is T_T, a step of plain decoding.
        draft_time: T_D, drafting one level of a tree: of a chain, one token a row.
        levels: levels that every draft takes; None where drafts may end early.

    Examples:
        >>> from specjax.planning.costs import Costs
        >>> costs = Costs(verify={1: 0.010, 5: 0.012}, draft_time=0.001)
        >>> costs.target, round(costs.verification(3), 6)
        (0.01, 0.011)
    """

    verify: dict[int, float]
    draft_time: float
    levels: int | None = None

    @property
    def target(self) -> float:
        """T_T, a pass of the target over one token a row."""
        return self.verify[1]

    def verification(self, nodes: float) -> float:
        """T_V of a mean number of ``nodes``, on the line through the nearest measured ones."""
        measured = sorted(self.verify)
        return float(np.interp(nodes, measured, [self.verify[n] for n in measured]))


def measure_costs(
    target: Target,
    drafter: Drafter | None,
    *,
    batch: int = 1,
    context: int = 64,
    new_tokens: int = 64,
    sampling: Sampling = Sampling(temperature=0.0),
    rule: Rule | None = None,
    repeats: int = 5,
    nodes: Sequence[int] = (),
    verify: bool = True,
) -> Costs:
    """Time T_T, T_V(n) for every number of nodes that ``drafter`` is compiled for, and T_D.

    Args:
        target: the target model.
        drafter: None measures T_T alone. A chain that may stop early is drafted to its end.
        batch: B, rows.
        context: tokens in each row's cache.
        new_tokens: room beyond them, which makes the capacity of the caches; measuring may take more.
        sampling: the settings that the drafter draws with.
        rule: the rule that it drafts for, as in `decoding.generate`.
        repeats: of each compiled loop, interleaved; the median counts.
        nodes: further numbers of nodes to time T_V at.
        verify: False times T_D alone.

    Raises:
        InputError: the target has too few positions for ``context``.

    Examples:
        >>> from specjax.planning.costs import measure_costs
        >>> drafter = specjax.EarlyExit(layers=1, draft=2)
        >>> costs = measure_costs(target, drafter, context=16, repeats=1)
        >>> sorted(costs.verify), costs.draft_time > 0
        ([1, 3], True)
    """
    drafter = NoDraft() if drafter is None else drafter
    counts = sorted({1, *drafter.node_counts, *nodes}) if verify else []
    ends_early = len(drafter.node_counts) > 1
    drafter = _without_stop(drafter)
    needed = max(new_tokens, tokens_needed(repeats, max(counts, default=1)))
    if repeats < 1:
        raise InputError(f"repeats={repeats}: must be at least 1")
    if context + needed > (positions := decoding.most_positions(target, drafter)):
        raise InputError(
            f"context={context}: with the {needed} tokens to measure with, too long for the {positions} positions of target "
            "and drafter"
        )
    # Any text serves: a pass takes as long whatever the tokens are.
    options = GenerationOptions(max_new_tokens=needed, sampling=sampling, eos_token_ids=(), rule=rule)
    drafter, state = decoding.start(target, drafter, np.ones((batch, context), np.int32), options=options)
    cache = jax.tree.map(jnp.copy, state.cache)
    seconds: dict[int | str, list[float]] = {name: [] for name in [*counts, "draft"]}
    for repeat in track(range(-1, repeats), f"compiling and timing passes, {batch} rows, {context} tokens"):
        for count in counts:
            took, cache = _timed(_score, target, cache, count, _PASSES)
            seconds[count].append(took)
        took, state = _timed(_propose, target, drafter, state, _PASSES)
        seconds["draft"].append(took)
        if repeat < 0:  # that one compiled
            seconds = {name: [] for name in seconds}
    medians = agreed(np.array([median(values) / _PASSES for values in seconds.values()]), target.mesh)
    each = dict(zip(seconds, medians.tolist(), strict=True))
    return Costs(
        verify={count: each[count] for count in counts},
        draft_time=each["draft"] / drafter.draft_shape.depth if drafter.draft_shape.depth else 0.0,
        levels=None if ends_early else drafter.draft_shape.depth,
    )


_PASSES = 8  # of one kind in a compiled loop
_TRIAL_REPEATS = 3


def tokens_needed(repeats: int, nodes: int = 1) -> int:
    """Tokens that measuring takes: the drafting passes commit a root each, the widest scoring pass ``nodes``.

    Examples:
        >>> from specjax.planning.costs import tokens_needed
        >>> tokens_needed(repeats=3, nodes=5)
        32
    """
    return max(_PASSES * (repeats + 1), nodes)


def _timed(run: Callable[..., _Result], *arguments: object) -> tuple[float, _Result]:
    started = time.perf_counter()
    result = jax.block_until_ready(run(*arguments))
    return time.perf_counter() - started, result


@by_rows(
    lambda cache, nodes, **_: cache.length.shape[0] * nodes,
    models=("target",),
    static_argnames=("nodes", "passes"),
    donate_argnames="cache",
)
def _score(target: Target, cache: KVCache, nodes: int, passes: int) -> KVCache:
    """Score ``nodes`` tokens ``passes`` times, each time those that the pass before made likeliest, and commit none.

    The entries of a pass are written above what is committed. States that layers keep do take all of them, which costs as much
    as to take those that are accepted: their numbers are no text's any more, and nobody asks.
    """

    def body(_: int, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        tokens, cache = carry
        output, new = target.score(tokens, cache)
        written = cache.append(new, jnp.full_like(cache.length, nodes), after=output.hidden)
        return argmax(output.logits), replace(written, length=cache.length)

    tokens = jnp.ones((cache.length.shape[0], nodes), jnp.int32)
    return jax.lax.fori_loop(0, passes, body, (tokens, cache))[1]


@by_rows(decoding.rows_of_pass, models=("target", "drafter"), static_argnames="passes", donate_argnames="state")
def _propose(target: Target, drafter: Drafter, state: decoding.DecodeState, passes: int) -> decoding.DecodeState:
    """Draft ``passes`` times, each time below the last token of the draft before, of which nothing but the root is kept."""
    batch = state.lengths.shape[0]
    one = jnp.ones(batch, jnp.int32)

    def body(_: int, state: decoding.DecodeState) -> decoding.DecodeState:
        draft, proposed = decoding.propose_step(target, drafter, state)
        newest = draft.tokens[:, -1:]
        verdict = Verdict(path=jnp.zeros((batch, draft.depth + 1), jnp.int32), count=one, token=newest[:, 0])

        def along_path(*shape: int) -> jax.Array:
            return jnp.zeros((batch, draft.depth + 1, *shape), target.dtype)

        taps = len(drafter.taps(target.config))
        hidden = target.config.hidden_size
        output = States(hidden=along_path(hidden), taps=along_path(taps, hidden))
        path = jnp.broadcast_to(draft.tokens[:, :1], verdict.path.shape)
        committed = Committed(
            tokens=path,
            following=jnp.broadcast_to(newest, path.shape),
            output=output,
            # Of tokens in the cache: zeros would let the compiler take what is made of them out of the loop.
            entries=gather_entries(state.cache.layers, state.lengths[:, None] - 1 - verdict.path),
            count=one,
            cache=state.cache,
        )
        return replace(
            state,
            tokens=append_tokens(state.tokens, state.lengths, newest, one),
            lengths=state.lengths + 1,
            drafter=drafter.update(target, proposed.drafter, draft, verdict, committed),
        )

    return jax.lax.fori_loop(0, passes, body, state)


def _without_stop(drafter: Any) -> Drafter:
    """The drafter with chains that never stop early."""
    if not getattr(drafter.draft_shape, "stop_below", 0.0):
        return drafter
    return replace(drafter, draft=replace(drafter.draft_shape, stop_below=0.0))


def predicted_speedup(costs: Costs, *batches: Stats) -> float:
    """Speed-up over plain decoding from measured costs and what was accepted: MagicDec's `theory.speedup_from_times`.

    A batch goes on until its last row is done, so the row with the most steps counts, and for plain decoding the longest row.

    Args:
        costs: of one step of each kind.
        batches: statistics of one or more batches decoded one after another.

    Examples:
        >>> from specjax.planning.costs import Costs, predicted_speedup
        >>> costs = Costs(verify={1: 0.010, 5: 0.012}, draft_time=0.001)
        >>> predicted_speedup(costs, plain.stats)
        1.0
    """
    plain = speculative = 0.0
    for stats in batches:
        steps, levels, scored = (np.asarray(field) for field in (stats.steps, stats.drafted_at.sum(axis=1), stats.scored))
        emitted = np.asarray(stats.histogram) @ np.arange(stats.histogram.shape[1])
        if costs.levels is not None:  # drafted to the end, also where the best nodes of a dynamic tree lie higher up
            levels = steps * costs.levels
        last = int(np.argmax(steps))
        plain += emitted.max() * costs.target
        speculative += levels[last] * costs.draft_time + steps[last] * costs.verification(scored[last] / steps[last])
    return float(plain / speculative)


def trial_speedup(
    target: Target,
    drafter: Drafter,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    options: GenerationOptions = GenerationOptions(),
    trial_tokens: int = 48,
) -> float:
    """The speed-up to expect of ``drafter`` for these prompts, from its costs here and its acceptance in a short trial.

    At 1 or below, decode plainly.

    Args:
        target: the target model.
        drafter: the one in question.
        tokens: ``[B, P]`` prompts, as for `decoding.generate`.
        lengths: ``[B]``.
        options: of the generation to come. The trial has a random key of its own (`trial_key`).
        trial_tokens: most tokens to generate for the acceptance.

    Raises:
        InputError: as `decoding.generate`.

    Examples:
        >>> from specjax.planning.costs import trial_speedup
        >>> drafter = specjax.EarlyExit(layers=1, draft=2)
        >>> gain = trial_speedup(target, drafter, prompts, trial_tokens=8)
        >>> gain > 0  # 1 is plain decoding
        True
    """
    tokens, lengths = check_prompts(tokens, lengths, target.config.vocab_size)
    batch, width = tokens.shape
    positions = decoding.most_positions(target, drafter)
    most = min(trial_tokens, positions - int(lengths.max()), int(np.max(options.max_new_tokens)))
    tried = replace(options, max_new_tokens=max(1, most), key=trial_key(options.key))
    with waiting("generating on trial"):
        trial = decoding.generate(target, drafter, tokens, lengths, **vars(tried))
    needed = tokens_needed(_TRIAL_REPEATS, drafter.draft_shape.nodes)
    context = max(1, min(width, positions - needed))
    costs = measure_costs(
        target,
        drafter,
        batch=batch,
        context=context,
        new_tokens=needed,
        sampling=options.sampling,
        rule=options.rule,
        repeats=_TRIAL_REPEATS,
    )
    return predicted_speedup(costs, trial.stats)


def trial_key(key: jax.Array | None) -> jax.Array:
    """A random key for trials before the generation with ``key``, with which it shares no random number.

    A choice that has seen the generation's own random numbers has seen its text, and would bias it: with the likeliest
    acceptance as the selector, by a total variation of 0.045 where chance allows 0.024.

    Examples:
        >>> from specjax.planning.costs import trial_key
        >>> bool(trial_key(jax.random.key(0)) == jax.random.key(0))
        False
    """
    return jax.random.fold_in(as_key(key).ravel()[0], _TRIAL)


_TRIAL = 0x747269  # no row number: those are folded into the same key, and no batch has so many rows


def agreed(values: np.ndarray, mesh: Mesh | None) -> np.ndarray:
    """``values``, which are floats, as the process of the mesh's first device has them (process 0), in every process.

    Clocks differ between processes. Were each to choose by its own, one could wait for ever for what another never runs.
    Only the processes that the mesh spans take part: those that decode each for itself need not agree.

    Examples:
        >>> from specjax.planning.costs import agreed
        >>> agreed(np.array([0.5, 0.7]), mesh=None)  # one process agrees with itself
        array([0.5, 0.7])
    """
    if mesh is None or not sharding.spans_processes(mesh):
        return values
    by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    own = values.astype(np.float32)[None]
    every = jax.make_array_from_callback((mesh.size, *values.shape), by_device, lambda _: own)
    return sharding.to_host(every, mesh)[0]
