"""The expected gain of speculation on a chip: a roofline of a decoder, and MagicDec's speed-up.

A forward pass has two kinds of work, one after the other: products with the weights, and attention
over the cache. The time of each is that of its arithmetic at the chip's peak, or of its memory
traffic at full bandwidth, whichever is longer. The time of the pass is the sum. A single maximum
over both kinds would hide the traffic of the cache behind the arithmetic of the products, and these
two dominate a large batch with a long context.

Activations, norms, sampling, kernel launches and communication are left out. And no kernel reaches
the peaks, least of all the small kernels of a drafting step. So the trend is reliable, and the
value is an upper bound: where MagicDec measured 1.42 (table 1: Llama-3.1-8B drafting for itself on
4 H100, 32 rows, 32,000 tokens, K = 512, 2.82 tokens per step), this model gives 2.10. If n chips
share the work evenly, they divide every time by n and change no speed-up.

The symbols are those of MagicDec (Sadhukhan et al. 2024, arXiv 2408.11049, sections 3 and 4):

- B: the rows of the batch; S: the tokens in each row's cache; T: the tokens per row in a pass;
- gamma: the length of the drafted chain; alpha: the acceptance rate; K: the entries of a compressed
  draft cache;
- T_T, T_V(gamma), T_D: the seconds of a decoding step, a verification, a drafting step.
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
from specjax.planning.work import (
    Work,
    cache_bytes,
    commit_work,
    forward_time,
    root_work,
    state_bytes,
)

LONGEST = 16
"""The default length in tokens of the longest chain that the searches try."""


# --- a target and its drafter ---------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Trained:
    """A drafter that was trained for its target, modeled by its `Drafter.drafting_reads`.

    It reads the entries of a target layer with a sliding window only within the window.

    Attributes:
        drafter: the drafter; its params may be shapes.
        target: the target; its params may be shapes.

    Examples:
        EAGLE-3 reads its layer, a head of 32,000 tokens, and the entries of its own layer:

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
        """The number of the drafter's parameters."""
        return _numbers(self.drafter.params)

    @property
    def has_levels(self) -> bool:
        """True if the drafter drafts level by level, False if it drafts all tokens at once."""
        return _numbers(self.drafter.drafting_reads(self.target).level) > 0

    def longest_chain(self, most: int) -> int:
        """Return the maximum length of its chains, up to ``most``; a block limits it."""

        def fits(gamma: int) -> bool:
            drafter: Any = self.drafter  # a dataclass
            try:  # eval_shape, because `check` may compute with params, which are shapes here
                jax.eval_shape(
                    lambda drafter, target: drafter.check(target),
                    replace(drafter, draft=Chain(gamma)),
                    self.target,
                )
            except InputError:
                return False
            return True

        return next((gamma for gamma in range(most, 1, -1) if fits(gamma)), 1)

    def kept(self, batch: int, context: int) -> int:
        """Return how many numbers its state has for B rows of S tokens."""
        return _numbers(self._state(batch, context))

    def level_time(
        self, chip: Chip, batch: int, context: int, weight_bytes: float = 2.0, kv_bytes: float = 2.0
    ) -> float:
        """Return the seconds of drafting one level with one node per row.

        They are the time of its products with the weights, and of its reads of states and caches.
        """
        return self._time(0, chip, batch, context, weight_bytes, kv_bytes)

    def step_time(
        self,
        chip: Chip,
        batch: int,
        context: int,
        gamma: int,
        weight_bytes: float = 2.0,
        kv_bytes: float = 2.0,
    ) -> float:
        """Return the seconds of the work that is done once for all levels of a chain.

        ``gamma`` is the length of the chain. A block is read as a whole.
        """
        rows = batch * self.drafter.tokens_at_once(gamma)
        return self._time(1, chip, batch, context, weight_bytes, kv_bytes, rows)

    def _time(
        self,
        part: int,
        chip: Chip,
        batch: int,
        context: int,
        weight_bytes: float,
        kv_bytes: float,
        rows: int | None = None,
    ) -> float:
        """Return the seconds of a level (part 0) or of the work that is done once (part 1).

        ``rows`` is the number of tokens that are multiplied with the weights together.
        """
        weights, cached = (sizes[part] for sizes in self._reads(batch, context))
        products = Work(2.0 * weights * (batch if rows is None else rows), weights * weight_bytes)
        return products.seconds(chip) + cached * kv_bytes / chip.bandwidth

    def _state(self, batch: int, context: int) -> Any:
        return jax.eval_shape(partial(self.drafter.start, self.target, batch, context))

    @lru_cache(maxsize=4096)  # noqa: B019  a process makes only a few of these objects
    def _reads(self, batch: int, context: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return how many numbers are read: of weights, and of states and caches.

        Each is a pair: per level, and once per step.
        """
        weights_only = self.drafter.drafting_reads(self.target)
        everything = self.drafter.drafting_reads(
            self.target, self._state(batch, context), self._cache(batch, context)
        )
        weights = _numbers(weights_only.level), _numbers(weights_only.step)
        return weights, (
            _numbers(everything.level) - weights[0],
            _numbers(everything.step) - weights[1],
        )

    def _cache(self, batch: int, context: int) -> list[Entry]:
        """Return the target's entries by layer as shapes, each within the layer's window."""
        config = self.target.config

        def entry(layer: int) -> Entry:
            visible = min(context, config.window_of(layer) or context)
            shapes = [(batch, heads, visible, dim) for heads, dim in config.entry_parts(layer)]
            return tuple(jax.ShapeDtypeStruct(shape, self.target.dtype) for shape in shapes)  # pyright: ignore

        return [entry(layer) for layer in range(config.num_layers)]


def _numbers(tree: Any) -> int:
    """Count the numbers of a tree, without scales: the bytes of a quantized number include them."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree, is_leaf=is_part))


@dataclass(frozen=True)
class Pair:
    """A target and its drafter on one chip.

    Attributes:
        target: the config of the target.
        chip: the accelerator that both run on.
        drafter: the config of a draft model, or a drafter that was trained for the target. None for
            the target itself (self-speculation), which pays off only with a `draft_cache`.
        draft_cache: K, the number of entries of a row's cache that the drafter keeps (MagicDec:
            StreamingLLM, SnapKV); None for all of them.
        selection: the share of the drafter's whole cache that is read at each drafting step to
            select the K entries. It is 0 if they are selected once, and 0.5 if every key is scored,
            as in top-k attention.
        weight_bytes: the bytes of one weight.
        kv_bytes: the bytes of one number in a cache.

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
            raise InputError(
                f"draft_cache={self.draft_cache}: it must be at least 1 entry; leave it out to"
                " keep all"
            )
        if self.draft_cache is not None and isinstance(self.drafter, Trained):
            raise InputError(
                f"draft_cache={self.draft_cache}: a drafter trained for its target has no such"
                " cache; leave it out"
            )
        if not 0 <= self.selection <= 1:
            raise InputError(
                f"selection={self.selection:g}: a share of the cache must be between 0 and 1"
            )

    @property
    def draft_config(self) -> ModelConfig:
        """The config of the draft model, or of the target if it has none."""
        return self.drafter if isinstance(self.drafter, ModelConfig) else self.target

    @property
    def longest_context(self) -> int:
        """The maximum S in tokens by the positions of both models."""
        trained_positions = (
            self.drafter.drafter.max_positions if isinstance(self.drafter, Trained) else None
        )
        return min(self.target.max_positions, trained_positions or self.draft_config.max_positions)

    def target_time(self, batch: int, context: int) -> float:
        """Return T_T(B, S), the seconds of a decoding step."""
        return self.verify_time(batch, context, 0)

    def verify_time(self, batch: int, context: int, gamma: int) -> float:
        """Return T_V(B, S, gamma), the seconds of a verification.

        It is a pass over the chain and its root, gamma + 1 tokens per row, and their commit.
        """
        return self._forward(self.target, batch, gamma + 1, context) + self._commit(
            self.target, batch, gamma + 1
        )

    def draft_time(self, batch: int, context: int) -> float:
        """Return T_D(B, K) + T_select(B, S, K), the seconds of a drafting step (equation 3).

        K = S if the cache is not compressed. For a drafter that drafts all tokens at once it is 0,
        and `once_time` has the time.
        """
        if isinstance(self.drafter, Trained):
            return self.drafter.level_time(
                self.chip, batch, context, self.weight_bytes, self.kv_bytes
            )
        forward = self._forward(self.draft_config, batch, 1, self._cached(context))
        return forward + self._selection_time(batch, context)

    def once_time(self, batch: int, context: int, gamma: int = 1) -> float:
        """Return the seconds of the drafter's work that is done once for all levels of a chain.

        ``gamma`` is the length of the chain. A draft model commits the root in its pass, and at the
        end the accepted tokens that it has read: up to ``gamma`` - 1, because it does not read the
        last one of a chain.
        """
        if isinstance(self.drafter, Trained):
            return self.drafter.step_time(
                self.chip, batch, context, gamma, self.weight_bytes, self.kv_bytes
            )
        root = root_work(self.draft_config, batch).seconds(self.chip)
        if gamma == 1:
            return root
        return root + self._commit(self.draft_config, batch, gamma - 1)

    def memory(self, batch: int, context: int) -> float:
        """Return the bytes of the weights and of both caches, with their states.

        A target that drafts for itself has one set of weights.
        """
        weights = parameter_count(self.target)
        caches = batch * context * cache_bytes(self.target, self.kv_bytes)
        caches += batch * state_bytes(self.target)
        if isinstance(self.drafter, Trained):
            weights += self.drafter.parameters
            caches += self.drafter.kept(batch, context) * self.kv_bytes
        elif self.drafter is not None or self.draft_cache is not None:
            weights += 0 if self.drafter is None else parameter_count(self.drafter)
            caches += batch * self._cached(context) * cache_bytes(self.draft_config, self.kv_bytes)
            caches += batch * state_bytes(self.draft_config)
        return weights * self.weight_bytes + caches

    def fits(self, batch: int, context: int) -> bool:
        """Return whether the chip has enough `memory`. Activations and programs need a bit more."""
        return self.memory(batch, context) <= self.chip.memory

    def _forward(self, config: ModelConfig, batch: int, tokens: int, context: int) -> float:
        return forward_time(
            config, self.chip, batch, tokens, context, self.weight_bytes, self.kv_bytes
        )

    def _commit(self, config: ModelConfig, batch: int, tokens: int) -> float:
        return commit_work(config, batch, tokens).seconds(self.chip)

    def _cached(self, context: int) -> int:
        return context if self.draft_cache is None else min(context, self.draft_cache)

    def _selection_time(self, batch: int, context: int) -> float:
        if self._cached(context) == context:
            return 0.0
        bytes_read = (
            self.selection * batch * context * cache_bytes(self.draft_config, self.kv_bytes)
        )
        return bytes_read / self.chip.bandwidth


def chain_speedup(pair: Pair, batch: int, context: int, gamma: int, alpha: float) -> float:
    """Return the speed-up with chains of ``gamma`` tokens at acceptance rate ``alpha``.

    It is T_T divided by the time per token, the inverse of equation 2.

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


# --- searches -------------------------------------------------------------------------------------


def best_gamma(
    pair: Pair, batch: int, context: int, alpha: float, longest: int = LONGEST, shortest: int = 0
) -> theory.GammaChoice:
    """Return the chain of ``shortest`` to ``longest`` tokens with the largest `chain_speedup`.

    Among equals it is the shortest. With the default ``shortest``, the result is 0, plain decoding,
    if speculation does not pay off.

    Examples:
        >>> from specjax.chips import find_chip
        >>> from specjax.models.published import published
        >>> from specjax.planning.roofline import Pair, best_gamma
        >>> pair = Pair(published("llama-3.1-8b"), find_chip("h100"), published("llama-3.2-1b"))

        >>> best_gamma(pair, batch=1, context=1024, alpha=0.8).gamma
        4
    """
    if not 0 <= shortest <= longest:
        raise InputError(
            f"shortest={shortest}, longest={longest}: chain lengths must be 0 <= shortest <="
            " longest"
        )
    choices = (
        theory.GammaChoice(gamma, chain_speedup(pair, batch, context, gamma, alpha))
        for gamma in range(shortest, longest + 1)
    )
    return max(choices, key=lambda choice: choice.factor)  # max returns the first of equals


@dataclass(frozen=True)
class CacheChoice:
    """The entries of the draft cache (K; None for all), a chain length, and their speed-up.

    ``gamma = 0`` is plain decoding.

    Examples:
        >>> from specjax.planning.roofline import CacheChoice
        >>> CacheChoice(draft_cache=None, gamma=0, factor=1.0)  # plain decoding
        CacheChoice(draft_cache=None, gamma=0, factor=1.0)
    """

    draft_cache: int | None
    gamma: int
    factor: float


def best_cache(
    pair: Pair, batch: int, context: int, alphas: Mapping[int | None, float], longest: int = LONGEST
) -> CacheChoice:
    """Return the K and gamma with the largest speed-up (equation 4).

    Among equals it is the first K. ``alphas`` has the acceptance rate of each K to try, which
    replaces ``pair.draft_cache``.

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
        raise InputError(
            "alphas={}: give the acceptance rate of at least one size of the draft cache"
        )
    choices = []
    for entries, alpha in alphas.items():
        choice = best_gamma(replace(pair, draft_cache=entries), batch, context, alpha, longest)
        choices.append(CacheChoice(entries, choice.gamma, choice.factor))
    return max(choices, key=lambda choice: choice.factor)


def break_even_context(pair: Pair, batch: int, alpha: float, longest: int = LONGEST) -> int | None:
    """Return the smallest S in tokens at which a chain of up to ``longest`` tokens pays off.

    It is MagicDec's critical sequence length if speculation pays off at all longer contexts. With a
    drafter that keeps its whole cache, or selects entries in each step, it may stop to pay off at a
    longer context. The result is None if speculation does not pay off at any context up to
    `Pair.longest_context`.

    For a fixed gamma, all three times are linear in S up to K, and again beyond K: attention's
    arithmetic and traffic both grow with S, so the slower one stays the slower one. A ratio of
    linear functions is monotonic. So there is at most one crossing on each side of K, and the
    values at its ends decide whether there is one.

    Examples:
        >>> from specjax.chips import find_chip
        >>> from specjax.models.published import published
        >>> from specjax.planning.roofline import Pair, break_even_context
        >>> pair = Pair(published("llama-3.1-8b"), find_chip("h100"), draft_cache=512)
        >>> break_even_context(pair, batch=32, alpha=0.8)  # it pays off from here on
        1535
    """
    last = pair.longest_context
    knee = min(pair.draft_cache or last, last)
    crossings = [
        context
        for gamma in range(1, longest + 1)
        for low, high in ((1, knee), (knee + 1, last))
        if low <= high and (context := _first(partial(_pays, pair, batch, gamma, alpha), low, high))
    ]
    return min(crossings, default=None)


def _pays(pair: Pair, batch: int, gamma: int, alpha: float, context: int) -> bool:
    return chain_speedup(pair, batch, context, gamma, alpha) > 1


def _first(holds: Callable[[int], bool], low: int, high: int) -> int | None:
    """Return the smallest number from ``low`` to ``high`` for which ``holds`` is true, or None.

    ``holds`` may change at most once in between.
    """
    if holds(low):
        return low
    if not holds(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high
