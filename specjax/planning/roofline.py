"""What speculation should gain on a chip: a roofline of a decoder, and MagicDec's speed-up from it.

A forward pass is two kinds of work, one after the other: products with the weights, and attention over the cache. Each takes
as long as the slower of its arithmetic at the chip's peak and its memory traffic at full bandwidth; the pass takes the sum. A
single maximum over both would hide the loading of the cache behind the arithmetic of the products, and these two are what
holds up a large batch with a long context.

Left out are activations, norms, sampling, kernel launches and communication, and no kernel reaches the peaks, least of all the
small ones of a drafting step. So the trend can be trusted, and the size is an upper bound: where MagicDec measured 1.42 (table
1: Llama-3.1-8B drafting for itself on 4 H100, 32 rows, 32,000 tokens, K = 512, 2.82 tokens a step), this says 2.10. n chips
that share the work evenly divide every time by n and leave every speed-up as it is.

Symbols as in MagicDec (Sadhukhan et al. 2024, arXiv 2408.11049, sections 3 and 4): B rows in the batch, S tokens in each row's
cache, T tokens a row in the call, gamma the length of the drafted chain, alpha the acceptance rate, K entries in a compressed
draft cache; T_T seconds of a decoding step, T_V(gamma) of a verification, T_D of a drafting step.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import jax

from specjax.chips import Chip
from specjax.drafters.trained import TrainedDrafter
from specjax.drafts.shapes import Chain
from specjax.errors import InputError
from specjax.models.cache import Entry
from specjax.models.config import ModelConfig
from specjax.models.published import parameter_count
from specjax.models.quantized_cache import is_part
from specjax.models.transformer import Target
from specjax.planning import theory
from specjax.planning.work import Work, cache_bytes, commit_work, forward_time, state_bytes

LONGEST = 16
"""The longest chain that the searches try unless told otherwise, in tokens."""


# --- a target and its drafter ----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trained:
    """A drafter that was trained for its target, by what it says that drafting must read (`Drafter.drafting_reads`).

    Of what the target keeps, layers with a window are read no further back than that.

    Attributes:
        drafter: its params may be shapes.
        target: likewise.

    Examples:
        EAGLE-3's layer and head, of 32,000 tokens, and the entries of its own layer:

        >>> from specjax.chips import find_chip
        >>> from specjax.lowering.abstract import abstract_drafter, abstract_model
        >>> from specjax.models.published import published
        >>> from specjax.planning.roofline import Trained
        >>> from specjax.sharding import make_mesh
        >>> llama = abstract_model(published("llama-3.1-8b"), make_mesh(1, 1))
        >>> eagle3 = Trained(abstract_drafter("eagle3", None, llama), llama)
        >>> seconds = eagle3.level_time(find_chip("h100"), batch=1, context=1024)
        >>> round(1e3 * seconds, 2)  # milliseconds
        0.22
    """

    drafter: TrainedDrafter
    target: Target

    @property
    def parameters(self) -> int:
        """Numbers that it has."""
        return _numbers(self.drafter.params)

    @property
    def has_levels(self) -> bool:
        """Whether it drafts level by level, and not all at once."""
        return _numbers(self.drafter.drafting_reads(self.target).level) > 0

    def longest_chain(self, most: int) -> int:
        """The most tokens, up to ``most``, that its chains can have: those of a block end with the block."""

        def fits(gamma: int) -> bool:
            drafter: Any = self.drafter  # a dataclass
            try:  # it may compute with its params, which are shapes
                jax.eval_shape(lambda drafter, target: drafter.check(target), replace(drafter, draft=Chain(gamma)), self.target)
            except InputError:
                return False
            return True

        return next((gamma for gamma in range(most, 1, -1) if fits(gamma)), 1)

    def kept(self, batch: int, context: int) -> int:
        """Numbers that it remembers of B rows of S tokens."""
        return _numbers(self._state(batch, context))

    def level_time(self, chip: Chip, batch: int, context: int, weight_bytes: float = 2.0, kv_bytes: float = 2.0) -> float:
        """Seconds of a level of drafting, one node a row: the slower of its arithmetic and its traffic with the weights, and
        what it reads of states and caches."""
        return self._time(0, chip, batch, context, weight_bytes, kv_bytes)

    def step_time(
        self, chip: Chip, batch: int, context: int, gamma: int, weight_bytes: float = 2.0, kv_bytes: float = 2.0
    ) -> float:
        """Seconds of what it does once for all levels of a chain of ``gamma`` tokens, likewise. A block is read whole."""
        rows = batch * self.drafter.tokens_at_once(gamma)
        return self._time(1, chip, batch, context, weight_bytes, kv_bytes, rows)

    def _time(
        self, part: int, chip: Chip, batch: int, context: int, weight_bytes: float, kv_bytes: float, rows: int | None = None
    ) -> float:
        """Of a level, part 0, or of what is done once, part 1 (see `_reads`), with the products of ``rows`` tokens together."""
        weights, remembered = (sizes[part] for sizes in self._reads(batch, context))
        products = Work(2.0 * weights * (batch if rows is None else rows), weights * weight_bytes)
        return products.seconds(chip) + remembered * kv_bytes / chip.bandwidth

    def _state(self, batch: int, context: int) -> Any:
        return jax.eval_shape(partial(self.drafter.start, self.target, batch, context))

    @lru_cache(maxsize=4096)  # noqa: B019  a few of these are made in a process
    def _reads(self, batch: int, context: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Numbers of weights, in a level and once a step, and of all else, likewise."""
        alone = self.drafter.drafting_reads(self.target)
        everything = self.drafter.drafting_reads(self.target, self._state(batch, context), self._cache(batch, context))
        weights = _numbers(alone.level), _numbers(alone.step)
        return weights, (_numbers(everything.level) - weights[0], _numbers(everything.step) - weights[1])

    def _cache(self, batch: int, context: int) -> list[Entry]:
        """The target's entries, by layer, as far back as each layer looks."""
        config = self.target.config

        def entry(layer: int) -> Entry:
            seen = min(context, config.window_of(layer) or context)
            shapes = [(batch, heads, seen, dim) for heads, dim in config.entry_parts(layer)]
            return tuple(jax.ShapeDtypeStruct(shape, self.target.dtype) for shape in shapes)  # pyright: ignore

        return [entry(layer) for layer in range(config.num_layers)]


def _numbers(tree: Any) -> int:
    """Scales of entries in 8 bits are none: they are in the bytes of a number."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree, is_leaf=is_part))


@dataclass(frozen=True)
class Pair:
    """A target and what drafts for it, on one chip.

    Attributes:
        target: the model whose distribution is kept.
        chip: the accelerator that both run on.
        drafter: a draft model, or a drafter that was trained for the target; None is the target itself (self-speculation),
            which is worth it only with a `draft_cache`.
        draft_cache: K, entries that the drafter keeps of a row's cache (MagicDec: StreamingLLM, SnapKV); None is all of them.
        selection: share of the drafter's whole cache that is read to choose the K entries again at each drafting step. 0 where
            they are chosen once; 0.5 where every key is scored, as in top-k attention.
        weight_bytes: of one weight.
        kv_bytes: of one number in a cache.

    Examples:
        >>> from specjax.chips import find_chip
        >>> from specjax.models.published import published
        >>> from specjax.planning.roofline import Pair
        >>> pair = Pair(published("llama-3.1-8b"), find_chip("h100"), published("llama-3.2-1b"))

        >>> round(1e3 * pair.target_time(batch=1, context=1024), 2)  # milliseconds
        4.52
        >>> pair.fits(batch=1, context=1024)
        True
    """

    target: ModelConfig
    chip: Chip
    drafter: ModelConfig | Trained | None = None
    draft_cache: int | None = None
    selection: float = 0.0
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    def __post_init__(self) -> None:
        if self.draft_cache is not None and self.draft_cache < 1:
            raise InputError(f"draft_cache={self.draft_cache}: a draft cache keeps at least 1 entry; leave it out to keep all")
        if self.draft_cache is not None and isinstance(self.drafter, Trained):
            raise InputError(f"draft_cache={self.draft_cache}: a drafter that was trained for its target has no cache to cut")
        if not 0 <= self.selection <= 1:
            raise InputError(f"selection={self.selection:g}: a share of the cache lies between 0 and 1")

    @property
    def draft_config(self) -> ModelConfig:
        """The shape of the model that drafts: the target's own, where no other one does."""
        return self.drafter if isinstance(self.drafter, ModelConfig) else self.target

    @property
    def longest_context(self) -> int:
        """The largest S that the positions of both models allow, in tokens."""
        own = self.drafter.drafter.max_positions if isinstance(self.drafter, Trained) else None
        return min(self.target.max_positions, own or self.draft_config.max_positions)

    def target_time(self, batch: int, context: int) -> float:
        """T_T(B, S): seconds of a decoding step."""
        return self.verify_time(batch, context, 0)

    def verify_time(self, batch: int, context: int, gamma: int) -> float:
        """T_V(B, S, gamma): seconds of a forward over the chain and its root, gamma + 1 tokens a row, and of what committing
        them takes."""
        return self._forward(self.target, batch, gamma + 1, context) + self._commit(self.target, batch, gamma + 1)

    def draft_time(self, batch: int, context: int) -> float:
        """T_D(B, K) + T_select(B, S, K): seconds of a drafting step (equation 3; K = S where the cache is not compressed).

        It is 0 of a drafter that drafts all tokens at once: that takes `once_time`.
        """
        if isinstance(self.drafter, Trained):
            return self.drafter.level_time(self.chip, batch, context, self.weight_bytes, self.kv_bytes)
        return self._forward(self.draft_config, batch, 1, self._kept(context)) + self._selection_time(batch, context)

    def once_time(self, batch: int, context: int, gamma: int = 1) -> float:
        """Seconds of what the drafter does once for all levels of a chain of ``gamma`` tokens: a model commits the root, and in
        the end what was accepted."""
        if isinstance(self.drafter, Trained):
            return self.drafter.step_time(self.chip, batch, context, gamma, self.weight_bytes, self.kv_bytes)
        return 2 * self._commit(self.draft_config, batch, 1)

    def memory(self, batch: int, context: int) -> float:
        """Bytes of the weights (a target that drafts for itself has one set) and of both caches, their states among them."""
        weights, caches = parameter_count(self.target), batch * context * cache_bytes(self.target, self.kv_bytes)
        caches += batch * state_bytes(self.target)
        if isinstance(self.drafter, Trained):
            weights += self.drafter.parameters
            caches += self.drafter.kept(batch, context) * self.kv_bytes
        elif self.drafter is not None or self.draft_cache is not None:
            weights += 0 if self.drafter is None else parameter_count(self.drafter)
            caches += batch * self._kept(context) * cache_bytes(self.draft_config, self.kv_bytes)
            caches += batch * state_bytes(self.draft_config)
        return weights * self.weight_bytes + caches

    def fits(self, batch: int, context: int) -> bool:
        """Whether `memory` is no more than the chip has. Activations and the program itself need some beside it."""
        return self.memory(batch, context) <= self.chip.memory

    def _forward(self, config: ModelConfig, batch: int, tokens: int, context: int) -> float:
        return forward_time(config, self.chip, batch, tokens, context, self.weight_bytes, self.kv_bytes)

    def _commit(self, config: ModelConfig, batch: int, tokens: int) -> float:
        return commit_work(config, batch, tokens).seconds(self.chip)

    def _kept(self, context: int) -> int:
        return context if self.draft_cache is None else min(context, self.draft_cache)

    def _selection_time(self, batch: int, context: int) -> float:
        if self._kept(context) == context:
            return 0.0
        read = self.selection * batch * context * cache_bytes(self.draft_config, self.kv_bytes)
        return read / self.chip.bandwidth


def chain_speedup(pair: Pair, batch: int, context: int, gamma: int, alpha: float) -> float:
    """T_T over the time a token takes with chains of ``gamma`` at acceptance rate ``alpha`` (equation 2, inverted).

    Examples:
        >>> from specjax.chips import find_chip
        >>> from specjax.models.published import published
        >>> from specjax.planning.roofline import Pair, chain_speedup
        >>> pair = Pair(published("llama-3.1-8b"), find_chip("h100"), published("llama-3.2-1b"))

        >>> round(chain_speedup(pair, batch=1, context=1024, gamma=4, alpha=0.8), 2)
        2.02
    """
    level, once = pair.draft_time(batch, context), pair.once_time(batch, context, max(gamma, 1))
    if not level:  # all tokens are drafted at once
        level, once = once / max(gamma, 1), 0.0
    return theory.speedup_from_times(
        target_time=pair.target_time(batch, context),
        draft_time=level,
        verify_time=pair.verify_time(batch, context, gamma) + (once if gamma else 0.0),
        gamma=gamma,
        tokens=theory.expected_tokens(alpha, gamma),
    )


# --- searches --------------------------------------------------------------------------------------------------------


def best_gamma(pair: Pair, batch: int, context: int, alpha: float, longest: int = LONGEST, shortest: int = 0) -> theory.Choice:
    """The chain of ``shortest`` to ``longest`` tokens with the largest `chain_speedup`, the shortest among equals.

    With the default ``shortest`` the answer is 0, plain decoding, where speculation does not pay.

    Examples:
        >>> from specjax.chips import find_chip
        >>> from specjax.models.published import published
        >>> from specjax.planning.roofline import Pair, best_gamma
        >>> pair = Pair(published("llama-3.1-8b"), find_chip("h100"), published("llama-3.2-1b"))

        >>> best_gamma(pair, batch=1, context=1024, alpha=0.8).gamma
        4
    """
    if not 0 <= shortest <= longest:
        raise InputError(f"shortest={shortest}, longest={longest}: chain lengths, 0 <= shortest <= longest")
    choices = (
        theory.Choice(gamma, chain_speedup(pair, batch, context, gamma, alpha)) for gamma in range(shortest, longest + 1)
    )
    return max(choices, key=lambda choice: choice.factor)  # of equals, max returns the first


@dataclass(frozen=True)
class CacheChoice:
    """Entries of the draft cache (K; None is all), chain length, and their speed-up. ``gamma = 0`` is plain decoding.

    Examples:
        >>> from specjax.planning.roofline import CacheChoice
        >>> CacheChoice(draft_cache=None, gamma=0, factor=1.0)  # plain decoding
        CacheChoice(draft_cache=None, gamma=0, factor=1.0)
    """

    draft_cache: int | None
    gamma: int
    factor: float


def best_cache(pair: Pair, batch: int, context: int, alphas: Mapping[int | None, float], longest: int = LONGEST) -> CacheChoice:
    """The K and gamma of the largest speed-up, where ``alphas`` gives the acceptance rate of each K (equation 4).

    Among equals the first K in the order of ``alphas``. ``pair.draft_cache`` is not read.

    Examples:
        >>> from specjax.chips import find_chip
        >>> from specjax.models.published import published
        >>> from specjax.planning.roofline import Pair, best_cache
        >>> pair = Pair(published("llama-3.1-8b"), find_chip("h100"))  # drafts for itself
        >>> choice = best_cache(pair, batch=32, context=8192, alphas={256: 0.7, 1024: 0.85})
        >>> choice.draft_cache, choice.gamma
        (1024, 3)
    """
    if not alphas:
        raise InputError("alphas={}: give the acceptance rate of at least one size of the draft cache")
    choices = []
    for entries, alpha in alphas.items():
        choice = best_gamma(replace(pair, draft_cache=entries), batch, context, alpha, longest)
        choices.append(CacheChoice(entries, choice.gamma, choice.factor))
    return max(choices, key=lambda choice: choice.factor)


def break_even_context(pair: Pair, batch: int, alpha: float, longest: int = LONGEST) -> int | None:
    """The smallest S, in tokens, at which some chain of up to ``longest`` tokens is faster than plain decoding.

    MagicDec's critical sequence length, where speculation pays from there on; with a drafter that keeps its whole cache, or
    selects again each time, it may stop paying at a longer context. None where no context up to `Pair.longest_context` pays.

    For a fixed gamma all three times are linear in S up to K, and again beyond it: attention's arithmetic and traffic both
    grow with S, so the slower of them stays the slower. A ratio of linear functions is monotonic, so there is at most one
    crossing on either side of K, and the ends of each side tell whether there is one.

    Examples:
        >>> from specjax.chips import find_chip
        >>> from specjax.models.published import published
        >>> from specjax.planning.roofline import Pair, break_even_context
        >>> pair = Pair(published("llama-3.1-8b"), find_chip("h100"), draft_cache=512)
        >>> break_even_context(pair, batch=32, alpha=0.8)  # pays from here on
        1535
    """
    last = pair.longest_context
    knee = min(pair.draft_cache or last, last)
    found = [
        context
        for gamma in range(1, longest + 1)
        for low, high in ((1, knee), (knee + 1, last))
        if low <= high and (context := _first(partial(_pays, pair, batch, gamma, alpha), low, high))
    ]
    return min(found, default=None)


def _pays(pair: Pair, batch: int, gamma: int, alpha: float, context: int) -> bool:
    return chain_speedup(pair, batch, context, gamma, alpha) > 1


def _first(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """The smallest of ``low`` to ``high`` where ``holds``, which changes at most once in between; None where there is none."""
    if holds(low):
        return low
    if not holds(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
