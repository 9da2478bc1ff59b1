"""The measured cost of a step on this machine, and the speed-up that follows from it.

Compiled loops of many passes are timed, so that the times contain only the passes themselves. The
rest of a step of the engine (verification, bookkeeping) is missing from a prediction.
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
from specjax.drafters.base import Committed, Drafter, LikelyTokens, NoDraft, append_tokens
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import UnionTree
from specjax.errors import InputError
from specjax.models.cache import KVCache, gather_entries
from specjax.models.transformer import States, Target
from specjax.progress import track, waiting
from specjax.sampling import Rule, Sampling, argmax

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Costs:
    """The costs of a step in seconds, for one batch size and context.

    Attributes:
        verify: T_V(n) by n, a target pass over n nodes per row. ``verify[1]`` is T_T, a step of
            plain decoding.
        draft_time: T_D, the drafting of one level of a tree; in a chain, of one token per row.
        levels: the number of levels of every draft; None if drafts may end early.

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
        """T_T, the seconds of a target pass over one token per row."""
        return self.verify[1]

    def verification(self, nodes: float) -> float:
        """Return T_V of a mean number of nodes, interpolated linearly between measured ones."""
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
    """Measure T_T, T_V(n) for every number of nodes that the drafter is compiled for, and T_D.

    Args:
        target: the target.
        drafter: the drafter; None to measure T_T alone. A chain that may stop early is drafted to
            its end.
        batch: B, the number of rows.
        context: the number of tokens in each row's cache.
        new_tokens: the room for further tokens in the caches; measuring may require more.
        sampling: the sampling parameters of the drafter.
        rule: the verification rule, as in `decoding.generate`.
        repeats: the number of repeats of each compiled loop. They are interleaved, and the median
            is returned.
        nodes: further numbers of nodes for which to measure T_V.
        verify: whether to measure T_V. Otherwise only T_D is measured.

    Raises:
        InputError: The target has too few positions for ``context``.

    Examples:
        >>> from specjax.planning.costs import measure_costs
        >>> drafter = specjax.EarlyExit(layers=1, draft=2)
        >>> costs = measure_costs(target, drafter, context=16, repeats=1)
        >>> sorted(costs.verify), costs.draft_time > 0
        ([1, 3], True)
    """
    drafter = NoDraft() if drafter is None else drafter
    counts = sorted({1, *drafter.node_counts, *nodes}) if verify else []
    # A union's parts draft all of their levels, whatever they offer.
    is_union = isinstance(drafter.draft_shape, UnionTree)
    ends_early = len(drafter.node_counts) > 1 and not is_union
    drafter = _without_stop(drafter)
    needed = max(new_tokens, tokens_needed(repeats, max(counts, default=1)))
    if repeats < 1:
        raise InputError(f"repeats={repeats}: must be at least 1")
    if context + needed > (positions := decoding.most_positions(target, drafter)):
        raise InputError(
            f"context={context}: with the {needed} tokens for measuring, it exceeds the {positions}"
            " positions of target and drafter; give a shorter context"
        )
    # The tokens do not matter: the time of a pass does not depend on them.
    options = GenerationOptions(
        max_new_tokens=needed, sampling=sampling, eos_token_ids=(), rule=rule
    )
    drafter, state = decoding.start(
        target, drafter, np.ones((batch, context), np.int32), options=options
    )
    cache = jax.tree.map(jnp.copy, state.cache)
    seconds: dict[int | str, list[float]] = {name: [] for name in [*counts, "draft"]}
    for repeat in track(
        range(-1, repeats), f"compiling and timing passes, {batch} rows, {context} tokens"
    ):
        for count in counts:
            elapsed, cache = _timed(_score, target, cache, count, _PASSES)
            seconds[count].append(elapsed)
        elapsed, state = _timed(_propose, target, drafter, state, _PASSES)
        seconds["draft"].append(elapsed)
        if repeat < 0:  # discard the first repeat, which includes compilation
            seconds = {name: [] for name in seconds}
    medians = agreed(
        np.array([median(values) / _PASSES for values in seconds.values()]), target.mesh
    )
    per_pass = dict(zip(seconds, medians.tolist(), strict=True))
    return Costs(
        verify={count: per_pass[count] for count in counts},
        draft_time=(
            per_pass["draft"] / drafter.draft_shape.depth if drafter.draft_shape.depth else 0.0
        ),
        levels=None if ends_early else drafter.draft_shape.depth,
    )


_PASSES = 8  # passes per compiled loop
_TRIAL_REPEATS = 3


def tokens_needed(repeats: int, nodes: int = 1) -> int:
    """Return the number of tokens that measuring requires in the caches.

    Each drafting pass commits a root, and the widest scoring pass writes ``nodes`` tokens.

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
    """Score ``nodes`` tokens ``passes`` times, each time the likeliest ones of the pass before.

    No token is committed: each pass overwrites the entries of the pass before. The states of linear
    attention take in all tokens, which costs as much as taking in accepted ones. So their values
    belong to no text any more, which does not matter here.
    """

    def body(_: int, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
        tokens, cache = carry
        output, new = target.score(tokens, cache)
        appended = cache.append(new, jnp.full_like(cache.length, nodes), after=output.hidden)
        return argmax(output.logits), replace(appended, length=cache.length)

    tokens = jnp.ones((cache.length.shape[0], nodes), jnp.int32)
    return jax.lax.fori_loop(0, passes, body, (tokens, cache))[1]


@by_rows(
    decoding.rows_of_pass,
    models=("target", "drafter"),
    static_argnames="passes",
    donate_argnames="state",
)
def _propose(
    target: Target, drafter: Drafter, state: decoding.DecodeState, passes: int
) -> decoding.DecodeState:
    """Draft ``passes`` times; the last token of a draft is the root of the next one.

    Only the root of each draft is committed.
    """
    batch = state.lengths.shape[0]
    count = jnp.ones(batch, jnp.int32)

    vocab, num_likely = target.config.vocab_size, drafter.likely_tokens(target.config)

    def likely_after(draft: Draft) -> LikelyTokens | None:
        if not num_likely:
            return None
        tokens = (draft.tokens[..., None] + 1 + jnp.arange(num_likely)) % vocab
        return LikelyTokens(tokens=tokens, logprobs=jnp.full(tokens.shape, -jnp.log(num_likely)))

    def body(_: int, state: decoding.DecodeState) -> decoding.DecodeState:
        draft, proposed = decoding.propose_step(target, drafter, state)
        newest = draft.tokens[:, -1:]
        verdict = Verdict(
            path=jnp.zeros((batch, draft.depth + 1), jnp.int32), count=count, token=newest[:, 0]
        )

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
            # Use entries of the cache: with zeros, the compiler could move work out of the loop.
            entries=gather_entries(state.cache.layers, state.lengths[:, None] - 1 - verdict.path),
            count=count,
            cache=state.cache,
            likely=likely_after(draft),
        )
        return replace(
            state,
            tokens=append_tokens(state.tokens, state.lengths, newest, count),
            lengths=state.lengths + 1,
            drafter=drafter.update(target, proposed.drafter, draft, verdict, committed),
        )

    return jax.lax.fori_loop(0, passes, body, state)


def _without_stop(drafter: Any) -> Drafter:
    """Return a drafter whose chains never stop early."""
    if not getattr(drafter.draft_shape, "stop_below", 0.0):
        return drafter
    return replace(drafter, draft=replace(drafter.draft_shape, stop_below=0.0))


def predicted_speedup(costs: Costs, *batches: Stats) -> float:
    """Return the speed-up over plain decoding that follows from costs and acceptance.

    The formula is MagicDec's `theory.speedup_from_times`. A batch runs until its last row is done.
    So the row with the most steps counts, and for plain decoding the longest row.

    Args:
        costs: the costs of a step.
        batches: the statistics of batches that are decoded one after the other.

    Examples:
        >>> from specjax.planning.costs import Costs, predicted_speedup
        >>> costs = Costs(verify={1: 0.010, 5: 0.012}, draft_time=0.001)
        >>> predicted_speedup(costs, plain.stats)
        1.0
    """
    plain = speculative = 0.0
    for stats in batches:
        steps, levels, scored = (
            np.asarray(field) for field in (stats.steps, stats.drafted_at.sum(axis=1), stats.scored)
        )
        emitted = np.asarray(stats.histogram) @ np.arange(stats.histogram.shape[1])
        # All levels are drafted, even if the best nodes of a dynamic tree are not deep.
        if costs.levels is not None:
            levels = steps * costs.levels
        last = int(np.argmax(steps))
        plain += emitted.max() * costs.target
        speculative += levels[last] * costs.draft_time + steps[last] * costs.verification(
            scored[last] / steps[last]
        )
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
    """Predict the speed-up of a drafter for these prompts, from its costs and a short trial.

    If it is 1 or less, use plain decoding.

    Args:
        target: the target.
        drafter: the drafter.
        tokens: ``[B, P]`` prompts as in `decoding.generate`.
        lengths: ``[B]`` the length of each prompt.
        options: the options of the later generation, without a grammar. The trial has its own
            random key (`trial_key`).
        trial_tokens: the maximum number of tokens to generate in the trial.

    Raises:
        InputError: An argument is invalid, as in `decoding.generate`.

    Examples:
        >>> from specjax.planning.costs import trial_speedup
        >>> drafter = specjax.EarlyExit(layers=1, draft=2)
        >>> gain = trial_speedup(target, drafter, prompts, trial_tokens=8)
        >>> gain > 0  # 1 is plain decoding
        True
    """
    options.check_has_no_grammar("trial_speedup")
    tokens, lengths = check_prompts(tokens, lengths, target.config.vocab_size)
    batch, width = tokens.shape
    positions = decoding.most_positions(target, drafter)
    max_new_tokens = min(
        trial_tokens, positions - int(lengths.max()), int(np.max(options.max_new_tokens))
    )
    trial_options = replace(
        options, max_new_tokens=max(1, max_new_tokens), key=trial_key(options.key)
    )
    with waiting("generating on trial"):
        trial = decoding.generate(target, drafter, tokens, lengths, **vars(trial_options))
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
    """Return a random key for trials that is independent of the later generation's key.

    If the trial used the generation's own random numbers, the choice of the draft would depend on
    the text, and would bias it: selecting by acceptance gave a total variation of 0.045, where
    chance explains 0.024.

    Examples:
        >>> from specjax.planning.costs import trial_key
        >>> bool(trial_key(jax.random.key(0)) == jax.random.key(0))
        False
    """
    return jax.random.fold_in(as_key(key).ravel()[0], _TRIAL)


_TRIAL = 0x747269  # larger than any row index: row indices are folded into the same key


def agreed(values: np.ndarray, mesh: Mesh | None) -> np.ndarray:
    """Return in every process the floats of the process with the mesh's first device (process 0).

    Clocks differ between processes. If each chose a draft by its own measurements, they could run
    different programs and wait for each other for ever. Only the processes of the mesh take part.

    Examples:
        >>> from specjax.planning.costs import agreed
        >>> agreed(np.array([0.5, 0.7]), mesh=None)  # one process agrees with itself
        array([0.5, 0.7])
    """
    if mesh is None or not sharding.spans_processes(mesh):
        return values
    by_device = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    local = values.astype(np.float32)[None]
    all_values = jax.make_array_from_callback(
        (mesh.size, *values.shape), by_device, lambda _: local
    )
    return sharding.to_host(all_values, mesh)[0]
