"""Losslessness of the rules themselves, on Markov chains with an exactly known joint distribution.

Many drafts of one kind are verified. Two things are compared with an enumeration of all drafts: the
joint distribution of the next three tokens, and how many tokens a draft leads to (the papers'
formulas, slow and obvious, in float64). Both are compared by `conformance.g_test`. Rules that are
broken on purpose must fail at the very p-value at which the right ones pass.

Compiling costs as much as drawing. So one compiled program verifies each draft by several rules,
and its rows belong in turn to the cases (`cases_of`), each with its own drafter and settings. The
run of every change takes 32,000 drafts of a case, the thorough run a million.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise, product
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import ClosedJaxpr, Jaxpr

from specjax.decoding import verification
from specjax.decoding.verification import RULES, by_rule, descend, recursive_rejection, verify
from specjax.drafters.expansion import expand
from specjax.drafts.draft import Draft, Verdict
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree, StaticTree
from specjax.evaluation.conformance import FALSE_ALARM, g_test
from specjax.sampling import (
    Distributions,
    RowSampling,
    Rule,
    Sampling,
    draw,
    probabilities,
    split_keys,
)

V, GAMMA, HORIZON = 5, 3, 3
TIERS = pytest.mark.parametrize(
    "draws", [32_000, pytest.param(1_000_000, marks=pytest.mark.thorough)]
)


def logits_table(seed: int, scale: float = 1.5) -> np.ndarray:
    """Return ``[V, V]`` logits: row t holds those of the token after t. No token is special."""
    return np.random.default_rng(seed).normal(size=(V, V)).astype(np.float32) * scale


P_TABLE = logits_table(1)
ZERO_Q = logits_table(2)
ZERO_Q[:, [0, 3]] = -np.inf  # this drafter never proposes tokens 0 and 3, which the target likes
Q_TABLES = {
    "unlike": logits_table(2),
    "close": P_TABLE + 0.05 * logits_table(3),  # alpha near 1
    "opposite": -4 * P_TABLE,  # alpha near 0
    "zeros": ZERO_Q,
    "equal": P_TABLE,
    "sharp": 2 * P_TABLE,
}


@dataclass(frozen=True)
class Case:
    """The drafter and the settings of a group of rows."""

    q: str = "unlike"
    sampling: Sampling = Sampling()


DRAFTERS = tuple(Case(q) for q in Q_TABLES)
SETTINGS = (
    *(
        Sampling(temperature=t, top_p=top_p)
        for t in (0.0, 0.6, 1.0, 1.5)
        for top_p in (1.0, 0.85)
        if (t, top_p) != (1, 1)
    ),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.3, top_k=3),
    Sampling(temperature=1.5, min_p=0.2),
)
CASES = (*DRAFTERS, *(Case(sampling=sampling) for sampling in SETTINGS))


def cases_of(draws: int) -> tuple["Case", ...]:
    """Return all cases in the thorough run, else every drafter and every fourth setting."""
    return CASES if draws > 32_000 else (*DRAFTERS, *CASES[len(DRAFTERS) :: 4])


SHAPES = {
    "adaptive": Chain(2, stop_below=0.3),  # its bonus token is within the horizon
    "coupled": Chain(2),
    "static": StaticTree(((0,), (1,), (0, 0), (2,), (1, 0), (0, 1), (0, 0, 0))),
    "dynamic": DynamicTree(top_k=3, depth=3, nodes=9),
    "sampled": SampledTree((4, 2)),  # with "zeros", more siblings than q has tokens
}
TREES = ["static", "dynamic", "sampled"]


def propose(
    after: Callable, length: jax.Array, sampling: RowSampling, keys: jax.Array, how: str
) -> Draft:
    """Return a draft of the Markov drafter below token 0.

    Args:
        after: maps ``[B, ...]`` tokens to the drafter's logits after each.
        length: ``[B]`` the tokens of a ``ragged`` chain, 0 to GAMMA.
        sampling: the rows' settings.
        keys: ``[B]``.
        how: one of SHAPES, or a chain of GAMMA tokens made without `expand`: ``ragged``, or
            ``chosen`` for the argmax.
    """
    root = jnp.zeros(length.shape, jnp.int32)
    if how in SHAPES:
        shape, active = SHAPES[how], jnp.ones(root.shape, bool)
        if how == "coupled":
            keys, sampling = (
                split_keys(keys, shape.depth + 1)[:-1],
                sampling.replace(rule="coupled"),
            )
        else:
            keys = split_keys(keys, shape.depth)
        return expand(
            shape,
            lambda nodes, _: (after(nodes.tokens), ()),
            after(root),
            (),
            root,
            sampling,
            keys,
            active,
        )[0]

    def step(token: jax.Array, keys: jax.Array):
        q = probabilities(after(token), sampling)
        token = jnp.argmax(after(token), axis=-1) if how == "chosen" else draw(q, keys)
        return token.astype(jnp.int32), (token, q)

    tokens, q = jax.lax.scan(step, root, split_keys(keys, GAMMA))[1]
    valid = jnp.arange(GAMMA)[None] < length[:, None] if how == "ragged" else None
    return Draft.chain(root, tokens.T, None if how == "chosen" else jnp.moveaxis(q, 0, 1), valid)


RUNS_LONG = {"xla_backend_optimization_level": 1, "xla_llvm_disable_expensive_passes": False}
"""Millions of verdicts are worth more of the compiler's effort than other tests ask for."""


@partial(jax.jit, static_argnames=("how", "checks"), compiler_options=RUNS_LONG)
def verified(
    q_tables: jax.Array,
    group: jax.Array,
    sampling: RowSampling,
    key: jax.Array,
    *,
    how: str,
    checks: tuple,
) -> list:
    """Return for each of ``checks`` the ``[B, HORIZON]`` emitted tokens, and their number ``[B]``.

    A check is its name, and the index of the only case whose rows it verifies, or None for all.
    """
    key, length_key = jax.random.split(key)
    draft_keys, verify_keys = split_keys(jax.random.split(key, len(group)), 2)
    length = jax.random.bits(length_key, group.shape) % (GAMMA + 1)

    def after(tokens: jax.Array) -> jax.Array:
        return q_tables[group.reshape(-1, *(1,) * (tokens.ndim - 1)), tokens]

    draft = propose(after, length, sampling, verify_keys if how == "coupled" else draft_keys, how)
    results = []
    for check, number in checks:
        rows = slice(number, None, 1 if number is None else len(q_tables))
        fields = {name: getattr(draft, name) for name in ("tokens", "q", "valid", "grown")}
        arrays = {name: field for name, field in fields.items() if isinstance(field, jax.Array)}
        some = draft.replace(**{name: field[rows] for name, field in arrays.items()})
        settings, keys = jax.tree.map(operator.itemgetter(rows), (sampling, verify_keys))
        verdict = CHECKS[check](some, jnp.asarray(P_TABLE)[some.tokens], settings, keys)
        results.append((verdict.emitted(some)[:, :HORIZON], verdict.count))
    return results


@dataclass
class Outcome:
    """The outcome of the drafts of one case under one check, and the exact probabilities.

    Attributes:
        joint: ``[V ** HORIZON]`` how many drafts led to each continuation.
        counts: ``[n]`` how many drafts emitted so many tokens.
        exact: ``[V ** HORIZON]`` the target's probability of each continuation.
        exact_counts: ``[n]`` how likely the rule is to emit so many tokens; None if not computed.
    """

    joint: np.ndarray
    counts: np.ndarray
    exact: np.ndarray
    exact_counts: np.ndarray | None

    @property
    def emitted(self) -> float:
        """The mean number of tokens of a draft."""
        return float(self.counts @ np.arange(len(self.counts)) / self.counts.sum())

    @property
    def p_values(self) -> dict[str, float]:
        """The p-values of the tokens and of their number."""
        tokens = {"tokens": g_test(self.joint, self.exact)}
        return (
            tokens
            if self.exact_counts is None
            else tokens | {"accepted": g_test(self.counts, self.exact_counts)}
        )

    @property
    def passes(self) -> bool:
        return min(self.p_values.values()) >= FALSE_ALARM


@cache
def outcomes_of(how: str, draws: int, seed: int = 0) -> dict[str, dict[Case, Outcome]]:
    """Verify ``draws`` drafts of each case by each of the PROGRAMS' checks."""
    cases, checks = cases_of(draws), PROGRAMS[how]
    rows = 4_000 * len(cases)
    names = Sampling.__dataclass_fields__
    sampling = Sampling(
        **{n: np.resize([getattr(case.sampling, n) for case in cases], rows) for n in names}
    ).rows(rows)
    group, q_tables = np.arange(rows) % len(cases), np.stack([Q_TABLES[case.q] for case in cases])
    cases_by_check = {check: (ONE_CASE[check],) if check in ONE_CASE else cases for check in checks}
    outcomes = {
        check: {
            case: Outcome(
                joint=np.zeros(V**HORIZON),
                counts=np.zeros(GAMMA + 2),
                exact=exact_joint(table(P_TABLE, case.sampling)),
                exact_counts=exact_counts(how, check, case),
            )
            for case in cases_by_check[check]
        }
        for check in checks
    }
    numbered = tuple(
        (check, cases.index(ONE_CASE[check]) if check in ONE_CASE else None) for check in checks
    )
    rng = np.random.default_rng(seed)
    for key in jax.random.split(jax.random.key(seed), draws // 4_000):
        results = verified(q_tables, group, sampling, key, how=how, checks=numbered)
        for check, (emitted, count) in zip(checks, jax.device_get(results), strict=True):
            for number, (case, so_far) in enumerate(outcomes[check].items()):
                of_case = slice(number, None, len(outcomes[check]))
                so_far.joint += continued(
                    emitted[of_case], count[of_case], table(P_TABLE, case.sampling), rng
                )
                so_far.counts += np.bincount(count[of_case], minlength=GAMMA + 2)
    return outcomes


@cache
def _table(logits: bytes, sampling: Sampling) -> np.ndarray:
    values = np.frombuffer(logits, np.float32).reshape(V, V)
    p = np.asarray(probabilities(jnp.asarray(values), sampling.rows(V)), np.float64)
    return p / p.sum(axis=1, keepdims=True)


def table(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """Return ``[V, V]`` float64, the distribution that the token after each token is drawn from."""
    return _table(logits.tobytes(), sampling)


def continued(
    emitted: np.ndarray, count: np.ndarray, p: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return ``[V ** HORIZON]``, the number of rows with each continuation.

    If a row emitted fewer tokens, p continues it.
    """
    joint = np.zeros(V**HORIZON)
    for length in range(1, HORIZON + 1):
        tokens = emitted[np.minimum(count, HORIZON) == length, :length]
        rows = np.bincount(tokens @ V ** np.arange(length)[::-1], minlength=V**length)
        for _ in range(HORIZON - length):
            rows = rng.multinomial(rows, np.tile(p, (len(rows) // V, 1))).reshape(-1)
        joint += rows
    return joint


# --- exact probabilities, by enumeration ----------------------------------------------------------


def exact_joint(p: np.ndarray) -> np.ndarray:
    """Return the exact distribution of the HORIZON tokens after token 0."""
    return np.einsum("a,ab,bc->abc", p[0], p, p).reshape(-1)


def exact_counts(how: str, check: str, case: Case) -> np.ndarray | None:
    """Return ``[GAMMA + 2]``, how likely a draft leads to so many tokens; None if not computed."""
    rule = MUTANTS[check].of if check in MUTANTS else check
    p, q = table(P_TABLE, case.sampling), table(Q_TABLES[case.q], case.sampling)
    if how == "sampled":  # greedy rows do not draw
        return siblings_counts(p, q, SHAPES[how].widths) if case.sampling.temperature > 0 else None
    if how == "coupled":
        return coupled_counts(p, q, SHAPES[how].length)
    if how == "chosen":
        return chain_counts(
            "matching", p, np.eye(V)[Q_TABLES[case.q].argmax(axis=1)], range(GAMMA, GAMMA + 1)
        )
    if how == "ragged":
        lengths = (
            range(GAMMA + 1)
            if rule in ("block", "rejection", "as_tree")
            else range(GAMMA, GAMMA + 1)
        )
        named = {
            "as_tree": "rejection",
            "full block": "block",
            "full rejection": "rejection",
            "as_chosen": "matching",
        }
        return chain_counts(named.get(rule, rule), p, q, lengths)
    # Chains of greedy rows end by another probability.
    if how == "adaptive" and case.sampling.temperature > 0:
        return chain_counts(rule, p, q, [SHAPES[how].length], SHAPES[how].stop_below)
    return None


def chain_counts(
    rule: str, p: np.ndarray, q: np.ndarray, lengths: Any, stop_below: float = 0.0
) -> np.ndarray:
    """Return `exact_counts` over all chains below token 0.

    All ``lengths`` are equally likely. A chain may end after a token whose q is below a bound.
    """
    total = np.zeros(GAMMA + 2)
    for longest in lengths:
        for x in product(range(V), repeat=longest):
            chances = [q[pair] for pair in pairwise((0, *x))]
            ends = (i + 1 for i, chance in enumerate(chances) if chance < stop_below)
            length = next(ends, longest)
            if np.prod(chances) > 0:
                total[1 : length + 2] += np.prod(chances) * accepted(rule, p, q, x[:length])
    return total / len(lengths)


def accepted(rule: str, p: np.ndarray, q: np.ndarray, x: tuple[int, ...]) -> np.ndarray:
    """Return ``[len(x) + 1]``, the chance that so many tokens of the chain ``x`` are accepted.

    The chain is below token 0.
    """
    if rule == "block":
        return accepted_by_block(p, q, x)
    # Leviathan et al., Algorithm 1, ends with the first token that is rejected. So does matching.
    passes = [
        min(1.0, p[pair] / q[pair]) if rule == "rejection" else p[pair]
        for pair in pairwise((0, *x))
    ]
    reached = np.cumprod([1.0, *passes])
    return reached - np.append(reached[1:], 0.0)


def accepted_by_block(p: np.ndarray, q: np.ndarray, x: tuple[int, ...]) -> np.ndarray:
    """Compute `accepted` by Sun et al., Algorithm 2.

    The longest prefix i with u_i < h_i is accepted, and u_1, u_2, … are independent.
    """
    h, ratio = [], 1.0
    for i, pair in enumerate(pairwise((0, *x)), start=1):
        ratio = min(1.0, ratio * p[pair] / q[pair])
        if i == len(x):
            h.append(ratio)
        else:
            excess = sum(max(0.0, ratio * p[x[i - 1], y] - q[x[i - 1], y]) for y in range(V))
            h.append(excess / (excess + 1 - ratio) if excess + 1 - ratio > 0 else 0.0)
    chances = [h[i] * np.prod([1 - later for later in h[i + 1 :]]) for i in range(len(x))]
    return np.array([1 - sum(chances), *chances])


def siblings_counts(p: np.ndarray, q: np.ndarray, widths: tuple[int, ...]) -> np.ndarray:
    """Return `exact_counts` over sampled trees below token 0."""

    def below(token: int, depth: int) -> np.ndarray:
        counts = np.zeros(GAMMA + 2)
        chances = (
            accepted_sibling(p[token], q[token], widths[depth])
            if depth < len(widths)
            else np.zeros(V)
        )
        counts[1] = 1 - chances.sum()
        for child in np.flatnonzero(chances):
            counts[1:] += chances[child] * below(child, depth + 1)[:-1]
        return counts

    return below(0, 0)


def accepted_sibling(p: np.ndarray, q: np.ndarray, count: int) -> np.ndarray:
    """Return ``[V]``, the chance of each token to be the accepted one of ``count`` siblings.

    The siblings are drawn without replacement. SpecInfer, section 4.3, with Sequoia's q: after each
    rejection p becomes norm(max(0, p - q)), and the next token is drawn from q without x.
    """
    chances = np.zeros(V)
    if count == 0:
        return chances
    for x in np.flatnonzero(q):
        accept = min(1.0, p[x] / q[x])
        chances[x] += q[x] * accept
        residual, rest = np.maximum(0.0, p - q), np.where(np.arange(V) == x, 0.0, q)
        if accept < 1 and rest.sum() > 0:
            chances += (
                q[x]
                * (1 - accept)
                * accepted_sibling(residual / residual.sum(), rest / rest.sum(), count - 1)
            )
    return chances


def coupled_counts(p: np.ndarray, q: np.ndarray, length: int) -> np.ndarray:
    """Return `exact_counts` over coupled chains below token 0.

    Both argmax(log p + G) and argmax(log q + G) are i with probability
    1 / sum_j max(p_j / p_i, q_j / q_i) (Daliri et al.).
    """

    def below(token: int, remaining: int) -> np.ndarray:
        counts = np.zeros(GAMMA + 2)
        both = np.flatnonzero((p[token] > 0) & (q[token] > 0)) if remaining else []
        chances = {
            i: 1 / np.maximum(p[token] / p[token, i], q[token] / q[token, i]).sum() for i in both
        }
        counts[1] = 1 - sum(chances.values())
        for i, chance in chances.items():
            counts[1:] += chance * below(i, remaining - 1)[:-1]
        return counts

    return below(0, length)


# --- rules, right and broken ----------------------------------------------------------------------

Check = Callable[[Draft, jax.Array, RowSampling, jax.Array], Verdict]


def as_tree(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
    return descend(draft, by_rule(recursive_rejection, logits, sampling, keys))


def as_chosen(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
    return verify(draft.replace(q=None, valid=None), logits, sampling, keys)


def coupled(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
    return verify(
        draft, logits, sampling.replace(rule="coupled"), split_keys(keys, draft.depth + 1)
    )


CHAIN_RULES = [name for name, rule in RULES.items() if not rule.takes_trees]


def by_chain_rule(rule: str, full: bool = False) -> Check:
    """Return the check of a chain by ``rule``.

    ``full`` verifies all tokens of the chain, though some do not count as drafted.
    """

    def check(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
        # If the mask were a constant, XLA would fold it while compiling, for a second each time.
        whole = draft.replace(valid=draft.tokens >= 0) if full else draft
        return verify(whole, logits, sampling.replace(rule=rule), keys)

    return check


CHECKS: dict[str, Check] = {
    "verify": verify,
    "as_tree": as_tree,
    "as_chosen": as_chosen,
    "coupled": coupled,
    **{rule: by_chain_rule(rule) for rule in CHAIN_RULES},
    **{f"full {rule}": by_chain_rule(rule, full=True) for rule in CHAIN_RULES},
}


@dataclass(frozen=True)
class Mutant:
    """A rule that is broken on purpose.

    Attributes:
        of: the name in CHECKS of the right rule, which gives the exact numbers.
        case: the case whose rows show the fault.
        check: the broken check.
    """

    of: str
    case: Case
    check: Check


def patched(of: str, case: Case, *patches: tuple[Any, str, Callable[[Any], Any]]) -> Mutant:
    """Return a mutant of the library's own code.

    Each patch is a module, the name of a function in it, and what turns it into the broken one.
    """

    def check(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
        with pytest.MonkeyPatch.context() as patch:
            for module, name, change in patches:
                patch.setattr(module, name, change(getattr(module, name)))
            return CHECKS[of](draft, logits, sampling, keys)

    return Mutant(of, case, check)


def scaled(factor: float) -> tuple[Any, str, Callable[[Any], Any]]:
    """Return a patch that scales the random numbers of shape ``()``, which judge a token.

    Tokens are drawn from larger arrays, which stay as they are.
    """

    def change(uniform: Any) -> Any:
        def changed(
            key: jax.Array, shape: tuple[int, ...] = (), *rest: Any, **named: Any
        ) -> jax.Array:
            return uniform(key, shape, *rest, **named) * (factor if shape == () else 1.0)

        return changed

    return jax.random, "uniform", change


def noise_of_the_next_position(
    draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array
) -> Verdict:
    """Draw each token with the numbers that belong to the position below."""
    return CHECKS["coupled"](draft, logits, sampling, jnp.roll(keys, -1, axis=0))


def ratio_on_chosen(
    draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array
) -> Verdict:
    """Divide by the drafter's own probability of tokens that it chose."""
    q = probabilities(jnp.asarray(Q_TABLES["unlike"])[draft.tokens], sampling)
    return verify(draft.replace(q=q), logits, sampling.replace(rule="rejection"), keys)


def dropping(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
    """End a draft before a token of low probability.

    A draft may end early at such a token, but not without it (lessons: the stop rule).
    """
    probability = jnp.take_along_axis(draft.q[:, :-1], draft.tokens[:, 1:, None], axis=-1)[..., 0]
    is_kept = jnp.cumprod(probability > 0.4, axis=1).astype(bool)
    return verify(
        draft.replace(valid=jnp.pad(is_kept, ((0, 0), (1, 0)), constant_values=True)),
        logits,
        sampling,
        keys,
    )


def unwarped_bonus(real: Any) -> Any:
    def unwarped(logits: jax.Array, sampling: RowSampling, legal: Any = None) -> Distributions:
        """Replace the distribution of the last node by the target's before it is warped."""
        warped = real(logits, sampling, legal)
        total = jnp.sum(jnp.exp(logits[:, -1]), axis=-1)
        numbers = {
            "values": logits[:, -1],
            "top": 0.0,
            "temperature": 1.0,
            "total": total,
            "is_certain": False,
        }
        return warped.replace(
            **{name: getattr(warped, name).at[:, -1].set(value) for name, value in numbers.items()}
        )

    return unwarped


WARPED = Case(sampling=SETTINGS[8])
MUTANTS = {
    "accepts 3% too often": patched("full block", Case("close"), scaled(0.97)),
    "accepts 3% too rarely": patched("full block", Case("close"), scaled(1.03)),
    "accepts siblings 3% too often": patched("verify", Case("sharp"), scaled(0.97)),
    "accepts siblings 3% too rarely": patched("verify", Case("sharp"), scaled(1.03)),
    "residual without the ratio": patched(
        "full block",
        Case("zeros"),
        (
            verification,
            "_residual",
            lambda real: lambda ratio, *rest: real(jnp.ones_like(ratio), *rest),
        ),
    ),
    "no residual": patched(
        "full rejection",
        Case(),
        (verification, "_residual", lambda real: lambda ratio, p, q, drafted, node: p.at(node)),
    ),
    "q not renormalised": patched(
        "verify",
        Case(),
        (
            verification,
            "_normalised",
            lambda real: (
                lambda mass, otherwise: mass if mass is otherwise else real(mass, otherwise)
            ),
        ),
    ),
    "bonus of the unwarped target": patched(
        "block", WARPED, (verification, "distributions", unwarped_bonus)
    ),
    "one key judges and draws": patched(
        "full rejection",
        Case(),
        (verification, "split_keys", lambda real: lambda keys, count: [keys] * count),
        (
            verification,
            "_uniform",
            lambda real: (
                lambda keys, count: jax.vmap(lambda key: jax.random.uniform(key, (count,)))(keys)
            ),
        ),
    ),
    "one number judges a whole chain": patched(
        "full block",
        Case(),
        (
            verification,
            "_uniform",
            lambda real: lambda keys, count: jnp.tile(real(keys, 1), (1, count)),
        ),
    ),
    "one number judges all siblings": patched(
        "verify", Case(), (verification, "_fold_in", lambda real: lambda keys, number: keys)
    ),
    "noise of the next position": Mutant("coupled", Case(), noise_of_the_next_position),
    "divides by q of chosen tokens": Mutant("verify", Case(), ratio_on_chosen),
    "drops what ends a draft": Mutant("full block", Case(), dropping),
}
CHECKS |= {name: mutant.check for name, mutant in MUTANTS.items()}
ONE_CASE = {
    "as_tree": Case(),
    "as_chosen": Case("close"),
    **{name: mutant.case for name, mutant in MUTANTS.items()},
}
PROGRAMS = {
    "adaptive": ("block", "rejection", "bonus of the unwarped target"),
    "ragged": (
        *("block", "rejection", "as_tree", "full block", "full rejection", "as_chosen"),
        *(
            name
            for name, mutant in MUTANTS.items()
            if mutant.of in ("full block", "full rejection")
        ),
    ),
    "coupled": ("coupled", "noise of the next position"),
    "chosen": ("verify", "divides by q of chosen tokens"),
    "static": ("verify",),
    "dynamic": ("verify", "divides by q of chosen tokens"),
    "sampled": (
        *("verify", "q not renormalised", "one number judges all siblings"),
        *("accepts siblings 3% too often", "accepts siblings 3% too rarely"),
    ),
}


def test_every_mutant_is_tried() -> None:
    tried = {check for checks in PROGRAMS.values() for check in checks}
    assert set(MUTANTS) == tried & set(MUTANTS)


@pytest.mark.full
@pytest.mark.thorough_except("adaptive-32000", "ragged-32000")
@TIERS
@pytest.mark.parametrize("how", PROGRAMS)
def test_every_right_rule_keeps_the_distribution_at_every_setting_and_no_mutant_does(
    how: str, draws: int
) -> None:
    """Check every drafter; the number of accepted tokens must follow the papers' formulas."""
    for check, outcomes in outcomes_of(how, draws).items():
        for case, outcome in outcomes.items():
            passes = check not in MUTANTS
            assert outcome.passes == passes, (check, case, outcome.p_values)
            if how in TREES and check == "verify" and case.sampling == Sampling():
                # Some drafted tokens were accepted, so that not only bonus tokens are tested.
                assert outcome.emitted > 1.01, case


@pytest.mark.full
@TIERS
def test_block_accepts_at_least_as_much_as_rejection(draws: int) -> None:
    outcomes = outcomes_of("ragged", draws)
    for case in cases_of(draws):
        block, token = (
            outcomes[f"full {rule}"][case].exact_counts @ np.arange(GAMMA + 2)
            for rule in CHAIN_RULES
        )
        assert block > token - 1e-12, case
    by_block, by_token = (outcomes[f"full {rule}"][Case()] for rule in ("block", "rejection"))
    assert by_block.emitted > by_token.emitted + 0.01
    # Matching may verify drawn tokens too: it is exact, but wasteful.
    close = Case("close")
    assert outcomes["as_chosen"][close].emitted < outcomes["full rejection"][close].emitted - 0.5


@pytest.mark.full
def test_rejection_accepts_at_rate_sum_of_minima() -> None:
    """Check Leviathan et al., Theorem 3.5.

    The first drafted token is accepted with probability beta = sum min(p, q).
    """
    for case in DRAFTERS:
        p, q = table(P_TABLE, Sampling()), table(Q_TABLES[case.q], Sampling())
        assert chain_counts("rejection", p, q, [GAMMA])[2:].sum() == pytest.approx(
            np.minimum(p[0], q[0]).sum()
        )


@pytest.mark.full
def test_equal_distributions_accept_everything() -> None:
    outcomes = outcomes_of("ragged", 32_000)
    for rule in CHAIN_RULES:
        assert outcomes[f"full {rule}"][Case("equal")].emitted == GAMMA + 1


@pytest.mark.thorough
def test_siblings_accept_more_than_one_token_alone() -> None:
    siblings = outcomes_of("sampled", 32_000)["verify"][Case()].emitted
    chain = outcomes_of("ragged", 32_000)["full rejection"][Case()].emitted
    assert siblings > chain + 0.2  # the tree has two levels, the chain three


# --- greedy rows ----------------------------------------------------------------------------------


def descent_of(tokens, parents, valid, best) -> tuple[list[int], int]:
    """Follow the slow, obvious greedy rule for one row of a tree.

    Returns the path, and the token after it.
    """
    path = [0]
    while True:
        likeliest = best[path[-1]]
        below = [
            n
            for n in range(len(tokens))
            if parents[n] == path[-1] and valid[n] and tokens[n] == likeliest
        ]
        if not below:
            return path, likeliest
        path.append(below[0])


def some_tree(rng: np.random.Generator, nodes: int) -> np.ndarray:
    return np.array([-1] + [rng.integers(0, n) for n in range(1, nodes)])


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", ["chain", "static", "on the device", "among rows that are not greedy"]
)
def test_greedy_rows_equal_the_oracle(kind: str) -> None:
    rng = np.random.default_rng(0)
    batches, rows, nodes, longest = (15, 20, 7, 0) if kind == "static" else (1, 300, 7, 0)
    for _ in range(batches):
        if kind in ("chain", "static"):
            shared_parents = np.arange(-1, nodes - 1) if kind == "chain" else some_tree(rng, nodes)
            parents = np.tile(shared_parents, (rows, 1))
        else:
            shared_parents, parents = None, np.stack([some_tree(rng, nodes) for _ in range(rows)])
        siblings_before = [
            [sum(of_row[:n] == of_row[n]) for n in range(nodes)] for of_row in parents
        ]
        tokens = np.array(siblings_before, np.int32)  # siblings have different tokens
        if kind == "chain":
            tokens = rng.integers(0, 2, (rows, nodes)).astype(np.int32)
        logits = rng.normal(size=(rows, nodes, 3)).astype(np.float32)
        if kind == "chain":
            logits[..., 2] -= 2
        valid = rng.random((rows, nodes)) < 0.9
        valid[:, 0] = True
        greedy = (
            np.arange(rows) % 3 > 0
            if kind == "among rows that are not greedy"
            else np.ones(rows, bool)
        )
        sampling = Sampling(temperature=np.where(greedy, 0.0, 1.0)).rows(rows)
        draft = Draft.of_tree(
            tokens=jnp.asarray(tokens),
            parents=jnp.asarray(parents) if shared_parents is None else shared_parents,
            valid=jnp.asarray(valid),
        )
        verdict = verify(
            draft, jnp.asarray(logits), sampling, jax.random.split(jax.random.key(0), rows)
        )
        emitted, paths = np.asarray(verdict.emitted(draft)), np.asarray(verdict.path)
        for row, count in enumerate(np.asarray(verdict.count)):
            if greedy[row]:
                path, token = descent_of(
                    tokens[row], parents[row], valid[row], logits[row].argmax(-1)
                )
                assert paths[row, :count].tolist() == path
                assert emitted[row, :count].tolist() == [*tokens[row, path[1:]], token]
        longest = max(longest, np.asarray(verdict.count).max())
    assert longest > 3


# --- independence of rows, and cost ---------------------------------------------------------------


def a_draft(how: str, rows: int, extra: int = 0) -> tuple[Draft, jax.Array]:
    """Return a draft of a chain or one of TREES, and the target's logits.

    The draft has ``extra`` nodes that were not drafted.
    """
    parents = np.arange(-1, GAMMA)
    if how == "dynamic":
        parents = np.array([-1, 0, 0, 0, 1, 1, 2, 4, 4])
    elif how in TREES:
        parents = SHAPES[how].template.parents
    nodes = len(parents)
    rank = np.array([sum(parents[:node] == parents[node]) for node in range(nodes)])
    rng = np.random.default_rng(0)
    # Siblings have different tokens.
    tokens = jnp.asarray((rng.integers(0, V, (rows, nodes))[:, parents] + rank) % V, jnp.int32)

    def wider(values: jax.Array) -> jax.Array:
        return jnp.pad(values, ((0, 0), (0, extra), *((0, 0),) * (values.ndim - 2)))

    draft = Draft.of_tree(
        tokens=wider(tokens),
        parents=np.concatenate([parents, np.zeros(extra, int)]),
        q=(
            wider(jax.nn.softmax(jnp.asarray(Q_TABLES["close"])[tokens]))
            if how in ("sampled", "drawn")
            else None
        ),
        valid=wider(jnp.ones(tokens.shape, bool)),
    )
    if how == "dynamic":
        draft = draft.replace(topology=None, grown=jnp.tile(draft.parents, (rows, 1)), levels=GAMMA)
    return draft, jnp.asarray(P_TABLE)[draft.tokens]


@pytest.mark.full
@pytest.mark.parametrize("how", ["static", "sampled"])
def test_a_rows_verdict_depends_on_no_other_row_and_not_on_the_number_of_nodes(how: str) -> None:
    rows = 24
    temperature = np.resize([1.0, 0.0, 1.6, 0.8], rows)
    keys = jax.random.split(jax.random.key(6), rows)

    def verdict(some: np.ndarray, extra: int) -> Verdict:
        draft, logits = a_draft(how, rows, extra)
        fields = {name: getattr(draft, name) for name in ("tokens", "q", "valid")}
        draft = draft.replace(
            **{name: None if field is None else field[some] for name, field in fields.items()}
        )
        sampling = Sampling(temperature=temperature[some], top_p=0.95).rows(len(some))
        return jax.jit(lambda logits, keys: verify(draft, logits, sampling, keys))(
            logits[some], keys[some]
        )

    together, some = verdict(np.arange(rows), 0), np.array([23, 5, 16, 2, 11, 9])
    assert len(set(np.asarray(together.count).tolist())) > 1
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(np.asarray(a)[some], b),
        together,
        verdict(some, 3),
    )


def exponentials(jaxpr) -> list:
    """Return the shape of every array that a program computes by exp, as for a distribution.

    The program's loops and functions are included.
    """
    arrays = []
    for equation in jaxpr.eqns:
        if equation.primitive.name == "exp":
            arrays += [variable.aval.shape for variable in equation.outvars]
        for inner in jax.tree.leaves(
            list(equation.params.values()),
            is_leaf=lambda leaf: isinstance(leaf, ClosedJaxpr | Jaxpr),
        ):
            if isinstance(inner, ClosedJaxpr):
                arrays += exponentials(inner.jaxpr)
            elif isinstance(inner, Jaxpr):
                arrays += exponentials(inner)
    return arrays


@pytest.mark.full
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", [*TREES, "chosen", "drawn"])
def test_the_targets_distribution_is_formed_where_the_walk_goes_and_not_at_all_nodes(
    how: str, temperature: float
) -> None:
    """Check the main cost of verification.

    ``[B, N, V]`` takes 31 MB a row for 60 nodes and 128,000 tokens.
    """
    rows = 2
    sampling = Sampling(temperature=temperature, top_p=0.9).rows(rows)
    draft, logits = a_draft(how, rows)
    keys = jax.random.split(jax.random.key(0), rows)

    def check(logits: jax.Array, q: jax.Array | None) -> Verdict:
        return verify(draft.replace(q=q), logits, sampling, keys)

    arrays = exponentials(jax.make_jaxpr(check)(logits, draft.q).jaxpr)
    everywhere = [array for array in arrays if array == logits.shape]
    at_a_node = [array for array in arrays if array == (rows, V)]
    # Block and rejection need the distribution along the whole chain.
    assert bool(everywhere) == (how == "drawn" and temperature > 0)
    # A chain needs it at the node where its last token is drawn.
    assert bool(at_a_node) == (temperature > 0)


def test_the_table_has_every_rule_once_and_drafters_know_whose_keys_they_have() -> None:
    assert tuple(RULES) == get_args(Rule)
    assert CHAIN_RULES == ["block", "rejection"]
    for name, rule in RULES.items():
        assert Sampling().rows(1, name).coupled == rule.keys_by_position, name
