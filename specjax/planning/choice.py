"""The choice of the fastest draft on this machine: a chain, a tree, or plain decoding.

The speed of a candidate is computed from four measurements: the time to draft a level (T_D), the
time to verify n nodes (T_V(n)), and on given prompts how often chains are accepted to each depth,
and how often the child of each rank is accepted. Static trees come from Sequoia's dynamic
programming. The acceptance length of a dynamic tree does not follow from these probabilities, so
two dynamic trees are tried out; with sampling, a few sampled trees as well.
"""

from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from specjax import decoding, sharding
from specjax.decoding.options import GenerationOptions, check_prompts
from specjax.decoding.verification import RULES
from specjax.drafters import CompressedCache, Drafter
from specjax.drafts.shapes import (
    Chain,
    DraftShape,
    DynamicTree,
    SampledTree,
    StaticTree,
    complete_tree,
)
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.planning import theory
from specjax.planning.costs import Costs, measure_costs, tokens_needed, trial_key
from specjax.progress import waiting
from specjax.sampling import Sampling

_TRIAL_STEPS = 256
"""The number of steps of a trial, over all rows together."""
_LEAST_STEPS = 32
"""The smallest number of steps of each row in a trial."""
_RANKS = 8
"""The number of children of the root whose acceptance is measured."""
_TIMING_REPEATS = 3
_NODE_COUNTS = (2, 3, 5, 9, 17, 33, 65)
"""The numbers of nodes n for which T_V(n) may be measured; larger trees are taken as fast as 65."""
BUDGETS = (128, 256, 512)
"""The sizes in slots of a compressed cache that `fastest_drafter` tries."""
_SAMPLED_WIDTHS = ((2, 1, 1), (2, 2, 1), (3, 2, 1, 1))
_DYNAMIC = ((4, 13), (8, 33))
"""Children per node, and nodes, of the dynamic trees that are tried.

There are only two, because each is compiled and run. `_measure_times` measures T_D at their widths,
4 and 8, in any case.
"""
_LEAST_SURVIVAL = 0.2
"""The depth of dynamic trees is the largest that a chain reaches in this share of the steps.

Deeper levels would cost time in every step and gain little. The depth is at least two.
"""


@dataclass(frozen=True)
class TrialAcceptance:
    """The acceptance in short trials.

    The verification rule is that of the options, or else the default rule of the shape.

    Attributes:
        survival: for each depth, the probability that a chain's tokens up to it are accepted.
        by_rank: the probability that the child of each rank is the target's token; empty if the
            drafter or the rule supports only chains.
        sampled: tokens per target pass with each of a few sampled trees that fit the depth and the
            vocabulary; empty if all rows are greedy, with coupled sampling, and if the drafter or
            the rule supports only chains.
        dynamic: tokens per target pass with each of at most two dynamic trees that fit the depth
            and the vocabulary; empty if the drafter or the rule supports only chains.

    Examples:
        >>> from specjax.planning.choice import TrialAcceptance
        >>> acceptance = TrialAcceptance(survival=(0.7, 0.5), by_rank=(0.7, 0.1), sampled={})
        >>> 1 + sum(acceptance.survival)  # tokens a step of a chain of 2
        2.2
    """

    survival: tuple[float, ...]
    by_rank: tuple[float, ...]
    sampled: dict[SampledTree, float]
    dynamic: dict[DynamicTree, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Candidate:
    """A draft shape and its predicted speed.

    Attributes:
        draft: the shape; None for plain decoding.
        tokens: the expected number of tokens per target pass.
        seconds: the seconds of a step, drafting and verification; 0 if nothing was measured,
            because the prompts leave no room for a draft.
        speedup: the speed-up over plain decoding.

    Examples:
        >>> from specjax.planning.choice import Candidate
        >>> Candidate(draft=None, tokens=1.0, seconds=0.01, speedup=1.0).draft  # plain decoding
    """

    draft: DraftShape | None
    tokens: float
    seconds: float
    speedup: float


@dataclass(frozen=True)
class DraftComparison:
    """The candidates, and the measurements from which their speeds were computed.

    Attributes:
        acceptance: the acceptance in trials.
        verify: T_V(n) in seconds by n.
        draft_times: T_D of a level in seconds, by the number of nodes read together.
        candidates: the candidates, the fastest first, with plain decoding.

    Examples:
        >>> from specjax.planning.choice import Candidate, DraftComparison, TrialAcceptance
        >>> plain_decoding = Candidate(draft=None, tokens=1.0, seconds=0.01, speedup=1.0)
        >>> chain = Candidate(specjax.Chain(2), tokens=2.2, seconds=0.015, speedup=1.47)
        >>> comparison = DraftComparison(
        ...     TrialAcceptance((0.7, 0.5), (), {}), {1: 0.01}, {1: 0.001}, (chain, plain_decoding)
        ... )
        >>> print(comparison.best.draft)
        chain of 2
    """

    acceptance: TrialAcceptance
    verify: dict[int, float]
    draft_times: dict[int, float]
    candidates: tuple[Candidate, ...]

    @property
    def best(self) -> Candidate:
        """The fastest candidate."""
        return self.candidates[0]


def with_draft(drafter: Drafter, draft: DraftShape) -> Drafter:
    """Return a drafter with another draft shape.

    Examples:
        >>> from specjax.planning.choice import with_draft
        >>> with_draft(specjax.EarlyExit(layers=1), specjax.Chain(2))
        EarlyExit(layers=1, draft=Chain(length=2, stop_below=0.0))
    """
    return replace(drafter, draft=draft)  # pyright: ignore[reportArgumentType] - every drafter is a dataclass


def compare_drafts(
    target: Target,
    drafter: Drafter,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    options: GenerationOptions = GenerationOptions(),
    batch: int | None = None,
    longest: int = 8,
    nodes: int = 33,
    acceptance: TrialAcceptance | None = None,
) -> DraftComparison:
    """Measure times and acceptance, and compute the speed of many draft shapes.

    The candidates are all chains of up to ``longest`` tokens, the best static trees of up to
    ``nodes`` nodes, and those sampled and dynamic trees with at most ``nodes`` nodes that were
    tried out. If the rule supports only chains, there are no trees.

    Args:
        target: the target.
        drafter: the drafter; its own draft shape does not matter.
        tokens: ``[R, P]`` prompts as in `decoding.generate`, on which acceptance is measured.
        lengths: ``[R]`` the length of each prompt.
        options: the options of the later generation, without a grammar. Trials emit at most
            ``max_new_tokens`` per row, and have their own random key.
        batch: B, the batch size for which times are measured; by default R.
        longest: the length of the longest chain, and the depth of the deepest tree.
        nodes: the maximum number of nodes of a tree, with the root. T_V(n) is measured for up to 65
            nodes, so the speed of larger trees is overstated.
        acceptance: the result of `measure_acceptance`, to share it among several batch sizes; None
            to measure it here.

    Raises:
        InputError: An argument is invalid, as in `decoding.generate`.

    Examples:
        >>> from specjax.planning.choice import TrialAcceptance, compare_drafts
        >>> drafter = specjax.EarlyExit(layers=1)
        >>> measured = TrialAcceptance((0.7, 0.5), (), {})  # or None, to measure it here
        >>> comparison = compare_drafts(target, drafter, prompts, acceptance=measured)
        >>> candidates = sorted(comparison.candidates, key=lambda candidate: candidate.tokens)
        >>> [str(candidate.draft) for candidate in candidates]
        ['None', 'chain of 1', 'chain of 2']
    """
    if drafter.part_names:
        raise InputError(
            f"drafter={type(drafter).__name__}: several drafters that draft together have no"
            " automatic draft (draft='auto'), because shapes are compared for one drafter; give a"
            " shape for each part, such as 'chain:4+chain:8'"
        )
    options.check_has_no_grammar("compare_drafts")
    if acceptance is None:
        acceptance = measure_acceptance(
            target, drafter, tokens, lengths, options=options, longest=longest
        )
    rows, prompt_length = np.asarray(tokens).shape
    depth = len(acceptance.survival)
    plain = Candidate(None, 1.0, 0.0, 1.0)
    if depth == 0:  # the prompts leave no room for a draft
        return DraftComparison(acceptance, {}, {}, (plain,))
    ranks = len(acceptance.by_rank)
    costs, draft_times = _measure_times(
        target, drafter, depth, ranks, nodes, (batch or rows, prompt_length), options
    )
    widths = sorted(draft_times)

    def make_candidate(shape: DraftShape, emitted: float) -> Candidate:
        level_seconds = float(
            np.interp(shape.width, widths, [draft_times[width] for width in widths])
        )
        seconds = shape.depth * level_seconds + costs.verification(shape.nodes)
        return Candidate(shape, emitted, seconds, emitted * costs.target / seconds)

    candidates = [replace(plain, seconds=costs.target)]
    candidates += [
        make_candidate(Chain(n), 1 + sum(acceptance.survival[:n])) for n in range(1, depth + 1)
    ]
    tried: dict[DraftShape, float] = {**acceptance.sampled, **acceptance.dynamic}
    candidates += [
        make_candidate(shape, emitted) for shape, emitted in tried.items() if shape.nodes <= nodes
    ]
    if ranks and nodes > 1:
        trees = theory.best_trees(acceptance.by_rank, nodes, depth)
        branching = [tree for tree in trees.values() if max(path[-1] for path in tree) > 0]
        candidates += [
            make_candidate(StaticTree(tree), theory.tree_tokens(acceptance.by_rank, tree))
            for tree in branching
        ]
    ordered = sorted(candidates, key=lambda candidate: -candidate.speedup)
    return DraftComparison(acceptance, costs.verify, draft_times, tuple(ordered))


def fastest_drafter(
    target: Target,
    drafter: Drafter,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    options: GenerationOptions = GenerationOptions(),
) -> tuple[Drafter | None, Candidate]:
    """Return the drafter with its fastest draft, and the predicted speed of that choice.

    The drafter is None if plain decoding is fastest. A compressed cache is tried with its own
    budget, and with all `BUDGETS` below the length of the prompts. The arguments are as in
    `compare_drafts`.

    Examples:
        >>> from specjax.planning.choice import fastest_drafter
        >>> drafter, best = fastest_drafter(target, specjax.PromptLookup(), prompts)
        >>> best.speedup >= 1  # plain decoding, which has 1, is among the candidates
        True
    """
    sized: list[Drafter] = [drafter]
    if isinstance(drafter, CompressedCache):
        prompt_length = np.asarray(tokens).shape[1]
        budgets = [b for b in BUDGETS if 0 < drafter.scheme.kept(b) < b < prompt_length]
        budgets = sorted({*budgets, drafter.budget})
        sized = [replace(drafter, budget=budget) for budget in budgets]
    results = [
        (variant, compare_drafts(target, variant, tokens, lengths, options=options).best)
        for variant in sized
    ]
    fastest, best = max(results, key=lambda pair: pair[1].speedup)
    return None if best.draft is None else with_draft(fastest, best.draft), best


def measure_acceptance(
    target: Target,
    drafter: Drafter,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    options: GenerationOptions = GenerationOptions(),
    longest: int = 8,
) -> TrialAcceptance:
    """Measure the acceptance in short generations.

    Each of them uses another draft: a long chain, a tree with one level of many children, and some
    dynamic and sampled trees. The acceptance of a rank is assumed to be the same at every depth
    (Sequoia's positional acceptance); the acceptance of chains is measured for each depth. The
    arguments are as in `compare_drafts`.

    Examples:
        >>> from specjax.planning.choice import measure_acceptance
        >>> drafter = specjax.EarlyExit(layers=1)
        >>> acceptance = measure_acceptance(target, drafter, prompts, longest=2)
        >>> len(acceptance.survival), len(acceptance.by_rank), acceptance.sampled
        (2, 8, {})
        >>> [str(tree) for tree in acceptance.dynamic]
        ['dynamic tree, 13 nodes, 2 deep', 'dynamic tree, 33 nodes, 2 deep']
    """
    vocab = target.config.vocab_size
    survival = chain_survival(target, drafter, tokens, lengths, options=options, longest=longest)
    depth = len(survival)
    if depth == 0:
        return TrialAcceptance((), (), {})

    def trial(shape: DraftShape) -> tuple[np.ndarray, np.ndarray, float]:
        return _run_trial(target, with_draft(drafter, shape), tokens, lengths, options)

    by_rank: tuple[float, ...] = ()
    sampled: dict[SampledTree, float] = {}
    dynamic: dict[DynamicTree, float] = {}
    if drafter.grows_trees and (options.rule is None or RULES[options.rule].takes_trees):
        by_rank = tuple(trial(StaticTree(complete_tree((min(_RANKS, vocab),))))[1].tolist())
        dynamic = {shape: trial(shape)[2] for shape in _dynamic_trees(survival, vocab)}
        # With coupled sampling, a sampled tree has the same children as a static tree.
        if not np.all(np.asarray(options.sampling.temperature) == 0) and options.rule != "coupled":
            shapes = [
                SampledTree(widths)
                for widths in _SAMPLED_WIDTHS
                if len(widths) <= depth and max(widths) <= vocab
            ]
            sampled = {shape: trial(shape)[2] for shape in shapes}
    return TrialAcceptance(survival, by_rank, sampled, dynamic)


def _dynamic_trees(survival: tuple[float, ...], vocab: int) -> list[DynamicTree]:
    """Return the dynamic trees to try, whose depth depends on the acceptance of chains.

    Trees of one level are left out, because static trees cover them.
    """
    depth = max(2, sum(chance >= _LEAST_SURVIVAL for chance in survival))
    if len(survival) < depth:
        return []
    return [
        DynamicTree(top_k, depth, max(nodes, depth + 1))
        for top_k, nodes in _DYNAMIC
        if top_k <= vocab
    ]


def chain_survival(
    target: Target,
    drafter: Drafter,
    tokens: ArrayLike,
    lengths: ArrayLike | None = None,
    *,
    options: GenerationOptions = GenerationOptions(),
    longest: int = 8,
) -> tuple[float, ...]:
    """Measure for each depth the probability that a chain's tokens up to it are accepted.

    The arguments are those of `measure_acceptance`. The depth is limited by the positions of target
    and drafter, so the result may be empty.

    Examples:
        >>> from specjax.planning.choice import chain_survival
        >>> survival = chain_survival(
        ...     target, specjax.EarlyExit(layers=1), prompts, longest=2
        ... )
        >>> len(survival), survival[0] >= survival[1]
        (2, True)
    """
    depth = min(longest, _positions_left(target, drafter, tokens, lengths) - 1)
    if depth < 1:
        return ()
    survival, _, _ = _run_trial(target, with_draft(drafter, Chain(depth)), tokens, lengths, options)
    return tuple(survival.tolist())


def _positions_left(
    target: Target, drafter: Drafter, tokens: ArrayLike, lengths: ArrayLike | None
) -> int:
    """Return by how many tokens the longest prompt can be continued."""
    _, checked = check_prompts(tokens, lengths, target.config.vocab_size)
    return decoding.most_positions(target, drafter) - int(checked.max())


def _run_trial(
    target: Target,
    drafter: Drafter,
    tokens: ArrayLike,
    lengths: ArrayLike | None,
    options: GenerationOptions,
) -> tuple[np.ndarray, np.ndarray, float]:
    """Generate for a few steps.

    Returns:
        For each depth, the share of the steps that accepted tokens up to it; for each rank, the
        share of the steps that accepted this child of the root; and the mean tokens per step.
    """
    options.check_has_no_grammar("a trial")
    rows, shape = len(np.asarray(tokens)), drafter.draft_shape
    count = max(_LEAST_STEPS, _TRIAL_STEPS // rows)
    positions_left = _positions_left(target, drafter, tokens, lengths)
    max_new_tokens = min(
        count * (1 + shape.depth), positions_left, int(np.max(options.max_new_tokens))
    )
    trial_options = replace(options, max_new_tokens=max_new_tokens, key=trial_key(options.key))
    drafter, state = decoding.start(target, drafter, tokens, lengths, trial_options)
    with waiting(f"trying a {shape}"):
        first_accepted, stats = sharding.to_host(
            _run_steps(target, drafter, state, count), target.mesh
        )
    steps = max(int(np.sum(stats.steps)), 1)
    ranks = np.bincount(first_accepted.ravel(), minlength=shape.branching + 1)[1:]
    return (
        stats.accepted_at.sum(axis=0) / steps,
        ranks / steps,
        float(np.sum(stats.accepted)) / steps + 1,
    )


@partial(jax.jit, static_argnames="steps")
def _run_steps(
    target: Target, drafter: Drafter, state: decoding.DecodeState, steps: int
) -> tuple[jax.Array, Any]:
    """Return the first accepted node of each step ``[steps, B]``, or 0, and the statistics."""

    def body(state: decoding.DecodeState, _: None) -> tuple[decoding.DecodeState, jax.Array]:
        state, info = decoding.step(target, drafter, state)
        return state, jnp.where(info.accepted > 0, info.path[:, 1], 0)

    state, first_accepted = jax.lax.scan(body, state, length=steps)
    return first_accepted, state.stats


def _measure_times(
    target: Target,
    drafter: Drafter,
    depth: int,
    ranks: int,
    nodes: int,
    size: tuple[int, int],
    options: GenerationOptions,
) -> tuple[Costs, dict[int, float]]:
    """Measure T_V(n) for several n, and the time to draft a level for several widths.

    ``size`` is the batch size and the length of the prompts. The largest n is at least that of the
    largest candidate, but at most the last of `_NODE_COUNTS`.
    """
    batch, prompt_length = size
    branchings = [(count, *(1,) * (min(depth, 4) - 1)) for count in (ranks // 2, ranks) if count]
    wide = [with_draft(drafter, StaticTree(complete_tree(branching))) for branching in branchings]
    largest = max(depth + 1, nodes if ranks else 0)
    counts = [
        count for i, count in enumerate(_NODE_COUNTS) if i == 0 or _NODE_COUNTS[i - 1] < largest
    ]
    needed = tokens_needed(
        _TIMING_REPEATS, max(*counts, *(variant.draft_shape.nodes for variant in wide), depth + 1)
    )
    settings: dict[str, Any] = {
        "batch": batch,
        "context": max(1, min(prompt_length, decoding.most_positions(target, drafter) - needed)),
        "new_tokens": needed,
        "sampling": _for_batch(options.sampling, batch),
        "rule": options.rule,
        "repeats": _TIMING_REPEATS,
    }
    costs = measure_costs(target, with_draft(drafter, Chain(depth)), nodes=counts, **settings)
    draft_times = {1: costs.draft_time}
    for variant in wide:
        draft_times[variant.draft_shape.width] = measure_costs(
            target, variant, verify=False, **settings
        ).draft_time
    return costs, draft_times


def _for_batch(sampling: Sampling, batch: int) -> Sampling:
    """Return sampling parameters for ``batch`` rows: values per row are repeated or truncated."""
    values = {name: getattr(sampling, name) for name in sampling.__dataclass_fields__}
    return Sampling(
        **{
            name: np.resize(value, batch) if np.ndim(value) else value
            for name, value in values.items()
        }
    )
