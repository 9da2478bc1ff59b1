"""Arrays in which every pair of settings occurs, made greedily."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

Choices = Mapping[str, Sequence[str]]
"""The values of each factor, the cheapest first."""

Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two factors with a value each, in the order of the factors."""

Allowed = Callable[[str, str, str, str], bool]
"""Takes a factor, its value, another factor and its value; returns whether they go together."""


def pairs_of(choice: Mapping[str, str]) -> Iterator[Pair]:
    """Yield the pairs of a choice of one value for each factor."""
    yield from itertools.combinations(choice.items(), 2)


def all_pairs(factors: Choices) -> list[Pair]:
    """Return every pair of values of two factors."""
    return [
        ((a, x), (b, y))
        for a, b in itertools.combinations(factors, 2)
        for x in factors[a]
        for y in factors[b]
    ]


def covering_array(
    factors: Choices, allowed: Allowed, seed: int = 0
) -> tuple[list[dict[str, str]], list[Pair]]:
    """Return choices in which every possible pair occurs, and the pairs that no choice can have.

    Each choice begins with the first pair that has not occurred. It takes the value of every other
    factor that adds most new pairs, and the cheaper one if two add as many.
    """
    rng = random.Random(seed)
    missing = dict.fromkeys(all_pairs(factors))
    choices, impossible = [], []
    while missing:
        pair = next(iter(missing))
        choice = _complete(dict(pair), factors, allowed, missing, rng)
        if choice is None:
            impossible.append(pair)
            del missing[pair]
            continue
        choices.append(choice)
        for occurring in pairs_of(choice):
            missing.pop(occurring, None)
    return choices, impossible


def _complete(
    choice: dict[str, str],
    factors: Choices,
    allowed: Allowed,
    missing: Mapping[Pair, None],
    rng: random.Random,
) -> dict[str, str] | None:
    """Return a choice with a value for every factor, or None if there is none."""

    def fits(factor: str, value: str, chosen: Mapping[str, str]) -> bool:
        return all(
            allowed(second, chosen[second], factor, value)
            and allowed(factor, value, second, chosen[second])
            for second in chosen
            if second != factor
        )

    if not all(fits(factor, value, choice) for factor, value in choice.items()):
        return None
    order = list(factors)
    rest = [factor for factor in order if factor not in choice]
    if not rest:
        return {factor: choice[factor] for factor in order}
    rng.shuffle(rest)
    # The factor with the fewest values that fit comes first: a dead end shows at once.
    options = {f: [v for v in factors[f] if fits(f, v, choice)] for f in rest}
    factor = min(rest, key=lambda name: len(options[name]))

    def new_pairs(value: str) -> int:
        count = 0
        for second, chosen in choice.items():
            ordered = sorted(((second, chosen), (factor, value)), key=lambda it: order.index(it[0]))
            count += tuple(ordered) in missing
        return count

    for value in sorted(options[factor], key=new_pairs, reverse=True):  # stable: cheapest first
        whole = _complete(choice | {factor: value}, factors, allowed, missing, rng)
        if whole is not None:
            return whole
    return None


def counted(choices: Sequence[Mapping[str, str]]) -> Counter[Pair]:
    """Return how often each pair occurs."""
    return Counter(pair for choice in choices for pair in pairs_of(choice))


def table(factors: Choices, counts: Mapping[Pair, int], impossible: Sequence[Pair]) -> str:
    """Return how often each pair occurs, as text: one table for every two factors."""
    excluded, lines = set(impossible), []
    for a, b in itertools.combinations(factors, 2):
        lines += [f"\n{a} x {b}", "\t".join(["", *factors[b]])]
        for x in factors[a]:
            cells = [
                "-" if (pair := ((a, x), (b, y))) in excluded else str(counts.get(pair, 0))
                for y in factors[b]
            ]
            lines.append("\t".join([x, *cells]))
    return "\n".join(lines)
