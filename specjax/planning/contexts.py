"""How the gain of a compressed cache depends on context and batch (MagicDec, Sadhukhan et al. 2024, arXiv 2408.11049).

With short contexts a step's time goes into the weights, which all rows share: the more rows, the more of the time is
verification's arithmetic, and speculation gains less. With long contexts it goes into keys and values, of which every row has
its own: drafting over few of them stays cheap, and speculation gains more the more rows there are. The context at which the one
turns into the other is the *critical* one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from numpy.typing import ArrayLike

from specjax.decoding.options import GenerationOptions
from specjax.drafters import CompressedCache
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.planning import theory
from specjax.planning.choice import chain_survival, with_draft
from specjax.planning.costs import Costs, measure_costs

_REPEATS = 3
TRIAL_TOKENS = 192
"""Tokens a row that are enough to measure acceptance, for the ``options`` of `measure_contexts`."""


@dataclass(frozen=True)
class Gain:
    """What speculation gains at one context and batch with one budget and chain length.

    Attributes:
        context: tokens in each row's cache.
        batch: rows.
        budget: slots of a row in the drafter's cache.
        gamma: tokens of a chain.
        tokens: expected a target forward.
        speedup: over plain decoding.

    Examples:
        >>> from specjax.planning.contexts import Gain
        >>> Gain(
        ...     context=4096, batch=8, budget=256, gamma=3, tokens=2.5, speedup=1.4
        ... ).speedup
        1.4
    """

    context: int
    batch: int
    budget: int
    gamma: int
    tokens: float
    speedup: float


@dataclass(frozen=True)
class MeasuredContexts:
    """The measured parts that gains are computed from.

    Attributes:
        costs: by context and batch, T_V(n) of the target, T_T = T_V(1) among them; T_D is 0 here.
        draft_times: T_D by budget and batch, seconds a drafted token.
        survival: by context and budget, the chance that a chain's token at each depth is accepted, with those before it.

    Examples:
        >>> from specjax.planning.contexts import MeasuredContexts
        >>> from specjax.planning.costs import Costs
        >>> few, many = Costs({1: 0.010, 3: 0.011}, 0.0), Costs({1: 0.030, 3: 0.032}, 0.0)
        >>> measured = MeasuredContexts(
        ...     costs={(1024, 1): few, (4096, 1): many},
        ...     draft_times={(256, 1): 0.008},
        ...     survival={(1024, 256): (0.9, 0.8), (4096, 256): (0.8, 0.6)},
        ... )
        >>> [round(measured.gains(context, batch=1)[0].speedup, 2) for context in (1024, 4096)]
        [1.03, 1.5]
    """

    costs: dict[tuple[int, int], Costs]
    draft_times: dict[tuple[int, int], float]
    survival: dict[tuple[int, int], tuple[float, ...]]

    def gain(self, context: int, batch: int, budget: int, gamma: int) -> Gain:
        """MagicDec's equation: expected tokens times T_T over (gamma T_D + T_V(gamma + 1))."""
        costs, tokens = self.costs[context, batch], 1 + sum(self.survival[context, budget][:gamma])
        times = (costs.target, self.draft_times[budget, batch], costs.verification(gamma + 1))
        return Gain(context, batch, budget, gamma, tokens, theory.speedup_from_times(*times, gamma, tokens))

    def gains(self, context: int, batch: int) -> list[Gain]:
        """Those of every budget and length, the largest first."""
        found = [
            self.gain(context, batch, budget, gamma)
            for of_context, budget in self.survival
            if of_context == context
            for gamma in range(1, 1 + len(self.survival[context, budget]))
        ]
        return sorted(found, key=lambda gain: -gain.speedup)

    @property
    def contexts(self) -> list[int]:
        """Ascending."""
        return sorted({context for context, _ in self.costs})

    @property
    def batches(self) -> list[int]:
        """Ascending."""
        return sorted({batch for _, batch in self.costs})

    def critical_context(self) -> float | None:
        """The context from which on the most rows gain at least as much as the fewest, interpolated on a logarithmic scale.

        None where the contexts measured do not enclose it.
        """
        fewest, most = self.batches[0], self.batches[-1]
        rises = [self.gains(c, most)[0].speedup - self.gains(c, fewest)[0].speedup for c in self.contexts]
        crossings = [i for i in range(1, len(rises)) if rises[i - 1] < 0 <= rises[i]]
        if not crossings:
            return None
        i = crossings[-1]
        at = np.interp(0.0, [rises[i - 1], rises[i]], np.log2([self.contexts[i - 1], self.contexts[i]]))
        return float(2**at)


def measure_contexts(
    target: Target,
    drafter: CompressedCache,
    texts: ArrayLike,
    *,
    contexts: Sequence[int],
    batches: Sequence[int],
    budgets: Sequence[int],
    longest: int = 6,
    options: GenerationOptions = GenerationOptions(),
) -> MeasuredContexts:
    """Measure T_V, T_D and acceptance for every context, batch and budget.

    Args:
        target: the target model.
        drafter: its budget and the shape of its drafts do not matter.
        texts: ``[R, P]`` tokens, P at least the longest context: acceptance is measured behind the first tokens of each.
        contexts: tokens in each row's cache.
        batches: rows.
        budgets: slots of a row in the drafter's cache.
        longest: longest chain.
        options: of the generation to come.

    Raises:
        InputError: a text is too short, or the target has too few positions.

    Examples:
        >>> from specjax.planning.contexts import measure_contexts
        >>> measured = measure_contexts(
        ...     target,
        ...     specjax.CompressedCache(),
        ...     np.tile(prompts, 4),
        ...     contexts=(16,),
        ...     batches=(1,),
        ...     budgets=(8,),
        ...     longest=1,
        ...     options=specjax.decoding.GenerationOptions(max_new_tokens=8),
        ... )
        >>> len(measured.gains(context=16, batch=1))  # one budget, chains of 1 token
        1
    """
    texts = np.asarray(texts)
    if min(budgets) >= min(contexts):
        raise InputError(f"budgets={tuple(budgets)}: one at least must be below the shortest context, {min(contexts)}")
    if max(contexts) >= target.config.max_positions:
        raise InputError(f"contexts={tuple(contexts)}: the target has {target.config.max_positions} positions")
    for budget in budgets:
        drafter.scheme.check(budget)
    if texts.shape[1] < max(contexts):
        raise InputError(f"texts: of {texts.shape[1]} tokens; the longest context needs {max(contexts)}")
    chain = with_draft(drafter, Chain(longest))
    assert isinstance(chain, CompressedCache)
    survival = {}
    for context in contexts:
        for budget in budgets:
            if budget >= context:  # nothing would be left out
                continue
            sized = replace(chain, budget=budget)
            survival[context, budget] = chain_survival(
                target, sized, texts[:, :context], None, options=options, longest=longest
            )
            forget_programs()
    nodes = sorted({1, 2, 3, longest // 2 + 1, longest + 1})
    measure = {"sampling": options.sampling, "rule": options.rule, "repeats": _REPEATS}
    costs = {}
    for context in contexts:
        for batch in batches:
            costs[context, batch] = measure_costs(target, None, batch=batch, context=context, nodes=nodes, **measure)
            forget_programs()
    # A full ring costs the same whatever the context is.
    draft = {}
    for budget in budgets:
        sized = replace(chain, budget=budget, draft=Chain(2))
        for batch in batches:
            draft[budget, batch] = measure_costs(target, sized, batch=batch, context=budget, verify=False, **measure).draft_time
            forget_programs()
    return MeasuredContexts(costs, draft, survival)


def forget_programs() -> None:
    """Free what was compiled for sizes that do not come again: on a CPU a process can hold only some hundreds of programs.

    Examples:
        >>> from specjax.planning.contexts import forget_programs
        >>> forget_programs()
    """
    jax.clear_caches()
