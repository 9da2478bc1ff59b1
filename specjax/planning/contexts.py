"""The gain of a compressed cache by context and batch size.

It follows MagicDec (Sadhukhan et al. 2024, arXiv 2408.11049). With short contexts, most of a step's
time is spent on the weights, which all rows share. The more rows there are, the larger is the share
of verification's arithmetic, and the smaller the gain. With long contexts, most time is spent on
keys and values, of which every row has its own. Drafting over few of them stays cheap, so the gain
grows with the number of rows. The context between the two cases is called *critical*.
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
"""The number of tokens per row that suffices to measure acceptance, for `measure_contexts`."""


@dataclass(frozen=True)
class Gain:
    """The gain of speculation at one context and batch size with one budget and chain length.

    Attributes:
        context: the number of tokens in each row's cache.
        batch: the number of rows.
        budget: the number of slots of a row in the drafter's cache.
        gamma: the number of tokens of a chain.
        tokens: the expected number of tokens per target pass.
        speedup: the speed-up over plain decoding.

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
    """The measurements from which gains are computed.

    Attributes:
        costs: by context and batch, T_V(n) of the target with T_T = T_V(1); T_D is 0 here.
        draft_times: by budget and batch, T_D in seconds per drafted token.
        survival: by context and budget, for each depth the probability that a chain's tokens up to
            it are accepted.

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
        """Return MagicDec's gain: expected tokens times T_T / (gamma T_D + T_V(gamma + 1))."""
        costs, tokens = self.costs[context, batch], 1 + sum(self.survival[context, budget][:gamma])
        times = (costs.target, self.draft_times[budget, batch], costs.verification(gamma + 1))
        return Gain(
            context, batch, budget, gamma, tokens, theory.speedup_from_times(*times, gamma, tokens)
        )

    def gains(self, context: int, batch: int) -> list[Gain]:
        """Return the gains of all budgets and chain lengths, the largest first."""
        gains = [
            self.gain(context, batch, budget, gamma)
            for measured_context, budget in self.survival
            if measured_context == context
            for gamma in range(1, 1 + len(self.survival[context, budget]))
        ]
        return sorted(gains, key=lambda gain: -gain.speedup)

    @property
    def contexts(self) -> list[int]:
        """The measured contexts, ascending."""
        return sorted({context for context, _ in self.costs})

    @property
    def batches(self) -> list[int]:
        """The measured batch sizes, ascending."""
        return sorted({batch for _, batch in self.costs})

    def critical_context(self) -> float | None:
        """Return the context from which the largest batch gains at least as much as the smallest.

        It is interpolated on a logarithmic scale. It is None if the measured contexts do not
        enclose it.
        """
        fewest, most = self.batches[0], self.batches[-1]
        rises = [
            self.gains(c, most)[0].speedup - self.gains(c, fewest)[0].speedup for c in self.contexts
        ]
        crossings = [i for i in range(1, len(rises)) if rises[i - 1] < 0 <= rises[i]]
        if not crossings:
            return None
        i = crossings[-1]
        at = np.interp(
            0.0, [rises[i - 1], rises[i]], np.log2([self.contexts[i - 1], self.contexts[i]])
        )
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
    """Measure T_V, T_D and acceptance for every context, batch size and budget.

    Args:
        target: the target.
        drafter: the drafter; its own budget and draft shape do not matter.
        texts: ``[R, P]`` tokens, with P at least the longest context. Acceptance is measured after
            the first tokens of each text.
        contexts: the numbers of tokens in each row's cache.
        batches: the batch sizes.
        budgets: the numbers of slots of a row in the drafter's cache.
        longest: the length of the longest chain.
        options: the options of the later generation, without a grammar.

    Raises:
        InputError: A text is too short, or the target has too few positions.

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
    options.check_has_no_grammar("measure_contexts")
    texts = np.asarray(texts)
    if min(budgets) >= min(contexts):
        raise InputError(
            f"budgets={tuple(budgets)}: at least one must be below the shortest context,"
            f" {min(contexts)}"
        )
    if max(contexts) >= target.config.max_positions:
        raise InputError(
            f"contexts={tuple(contexts)}: give less than the target's {target.config.max_positions}"
            " positions"
        )
    for budget in budgets:
        drafter.scheme.check(budget)
    if texts.shape[1] < max(contexts):
        raise InputError(
            f"texts: they have {texts.shape[1]} tokens; the longest context needs {max(contexts)}"
        )
    chain = with_draft(drafter, Chain(longest))
    assert isinstance(chain, CompressedCache)
    survival = {}
    for context in contexts:
        for budget in budgets:
            if budget >= context:  # the cache would hold all tokens
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
            costs[context, batch] = measure_costs(
                target, None, batch=batch, context=context, nodes=nodes, **measure
            )
            forget_programs()
    # Drafting over a full compressed cache costs the same at every context.
    draft = {}
    for budget in budgets:
        sized = replace(chain, budget=budget, draft=Chain(2))
        for batch in batches:
            draft[budget, batch] = measure_costs(
                target, sized, batch=batch, context=budget, verify=False, **measure
            ).draft_time
            forget_programs()
    return MeasuredContexts(costs, draft, survival)


def forget_programs() -> None:
    """Free all compiled programs. On a CPU, a process can hold only some hundreds of them.

    Examples:
        >>> from specjax.planning.contexts import forget_programs
        >>> forget_programs()
    """
    jax.clear_caches()
