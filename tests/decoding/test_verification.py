"""Losslessness of the rules themselves, on Markov chains whose joint distribution is known exactly.

Many drafts of one kind are verified, and the joint distribution of the next three tokens is compared with the exact one. The
bound is `conformance.monte_carlo_bound`; rules that are broken on purpose must exceed three times it.

Compiling costs as much as drawing. So one compiled program verifies each draft by several rules, and its rows belong in turn to
the cases (`cases_of`), each a drafter and settings of its own. The run of every change takes 64,000 drafts of a case: three
times the bound is then 0.09, and the mildest of the broken rules is 0.12 away. The thorough run takes a million.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import verification
from specjax.decoding.verification import CHAIN_RULES, by_rule, descend, recursive_rejection, verify
from specjax.draft import Draft, Verdict
from specjax.drafters.expansion import expand
from specjax.evaluation.conformance import monte_carlo_bound, total_variation
from specjax.sampling import RowSampling, Sampling, draw, probabilities, split_keys
from specjax.tree import Chain, DynamicTree, SampledTree, StaticTree

V, GAMMA, HORIZON = 5, 3, 3
TIERS = pytest.mark.parametrize("draws", [64_000, pytest.param(1_000_000, marks=pytest.mark.thorough)])


def logits_table(seed: int, scale: float = 1.5) -> np.ndarray:
    """``[V, V]``: row t holds the logits of what follows token t. Token 0 is as likely as any other."""
    return np.random.default_rng(seed).normal(size=(V, V)).astype(np.float32) * scale


P_TABLE = logits_table(1)
ZERO_Q = logits_table(2)
ZERO_Q[:, [0, 3]] = -np.inf  # the drafter never proposes tokens 0 and 3, which the target likes
Q_TABLES = {
    "unlike": logits_table(2),
    "close": P_TABLE + 0.05 * logits_table(3),  # alpha near 1
    "opposite": -4 * P_TABLE,  # alpha near 0
    "zeros": ZERO_Q,
    "equal": P_TABLE,
}


@dataclass(frozen=True)
class Case:
    """What a group of rows drafts and samples with."""

    q: str = "unlike"
    sampling: Sampling = Sampling()


DRAFTERS = tuple(Case(q) for q in Q_TABLES)
SETTINGS = (
    *(Sampling(temperature=t, top_p=top_p) for t in (0.0, 0.6, 1.0, 1.5) for top_p in (1.0, 0.85) if (t, top_p) != (1, 1)),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.3, top_k=3),
    Sampling(temperature=1.5, min_p=0.2),
)
CASES = (*DRAFTERS, *(Case(sampling=sampling) for sampling in SETTINGS))


def cases_of(draws: int) -> tuple["Case", ...]:
    """The thorough run takes all cases, that of every change every drafter and every fourth setting."""
    return CASES if draws > 64_000 else (*DRAFTERS, *CASES[len(DRAFTERS) :: 4])


SHAPES = {
    "chain": Chain(2),  # its bonus token is within the horizon
    "adaptive": Chain(3, stop_below=0.3),
    "static": StaticTree(((0,), (1,), (0, 0), (2,), (1, 0), (0, 1), (0, 0, 0))),
    "dynamic": DynamicTree(top_k=3, depth=3, nodes=9),
    "sampled": SampledTree((4, 2)),  # with "zeros", more siblings than q has tokens
}
TREES = ["static", "dynamic", "sampled"]


def propose(after: Callable, length: jax.Array, sampling: RowSampling, keys: jax.Array, how: str) -> Draft:
    """A draft of the Markov drafter below token 0.

    Args:
        after: ``[B, ...]`` tokens to the drafter's logits after each.
        length: ``[B]`` 0 to GAMMA, tokens of a ``ragged`` chain.
        sampling: the rows' settings.
        keys: ``[B]``.
        how: one of SHAPES; or a chain of GAMMA tokens made without `expand`: ``drawn``, ``ragged``, or ``chosen``, the argmax.
    """
    root = jnp.zeros(length.shape, jnp.int32)
    if how in SHAPES:
        shape, active = SHAPES[how], jnp.ones(root.shape, bool)
        keys = split_keys(keys, shape.depth)
        return expand(shape, lambda nodes, _: (after(nodes.tokens), ()), after(root), (), root, sampling, keys, active)[0]

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
def verified(q_tables: jax.Array, group: jax.Array, sampling: RowSampling, key: jax.Array, *, how: str, checks: tuple) -> list:
    """For each of ``checks`` the ``[B, HORIZON]`` emitted tokens, and how many there are in each row ``[B]``.

    Those in FIRST_CASE are asked about the rows of the first case alone.
    """
    draft_keys, verify_keys = split_keys(jax.random.split(key, len(group)), 2)
    length = jnp.arange(len(group)) // len(q_tables) % (GAMMA + 1)

    def after(tokens: jax.Array) -> jax.Array:
        return q_tables[group.reshape(-1, *(1,) * (tokens.ndim - 1)), tokens]

    draft = propose(after, length, sampling, draft_keys, how)
    results = []
    for check in checks:
        rows = slice(None, None, len(q_tables) if check in FIRST_CASE else 1)
        fields = {name: getattr(draft, name) for name in ("tokens", "q", "valid", "grown")}
        some = draft.replace(**{name: field[rows] for name, field in fields.items() if isinstance(field, jax.Array)})
        settings, keys = jax.tree.map(operator.itemgetter(rows), (sampling, verify_keys))
        verdict = CHECKS[check](some, jnp.asarray(P_TABLE)[some.tokens], settings, keys)
        results.append((verdict.emitted(some)[:, :HORIZON], verdict.count))
    return results


@dataclass
class Found:
    """What came of the drafts of one case under one check.

    Attributes:
        joint: ``[V ** HORIZON]`` how many drafts led to each continuation.
        counts: ``[n]`` how many drafts emitted so many tokens.
        exact: ``[V ** HORIZON]`` the target's probability of each continuation.
    """

    joint: np.ndarray
    counts: np.ndarray
    exact: np.ndarray

    @property
    def emitted(self) -> float:
        """Tokens a draft."""
        return float(self.counts @ np.arange(len(self.counts)) / self.counts.sum())

    @property
    def distance(self) -> float:
        """From the target's distribution, over what chance stays below."""
        return total_variation(self.joint, self.exact) / monte_carlo_bound(self.exact, int(self.counts.sum()))


@cache
def find(how: str, checks: tuple[str, ...], cases: tuple[Case, ...], draws: int) -> dict[str, dict[Case, Found]]:
    """Verify ``draws`` drafts of each case by each check."""
    rows = 32_000 // len(cases) * len(cases)
    names = Sampling.__dataclass_fields__
    sampling = Sampling(**{n: np.resize([getattr(case.sampling, n) for case in cases], rows) for n in names}).rows(rows)
    group, q_tables = np.arange(rows) % len(cases), np.stack([Q_TABLES[case.q] for case in cases])
    tables = [target_table(case.sampling) for case in cases]
    found = {
        check: {
            case: Found(np.zeros(V**HORIZON), np.zeros(GAMMA + 2, int), exact_joint(p))
            for case, p in zip(cases[: 1 if check in FIRST_CASE else None], tables, strict=False)
        }
        for check in checks
    }
    for i in range(-(-draws * len(cases) // rows)):
        results = verified(q_tables, group, sampling, jax.random.key(i), how=how, checks=checks)
        for check, (emitted, count) in zip(checks, jax.device_get(results), strict=True):
            for number, case in enumerate(found[check]):
                mine = slice(number, None, len(found[check]))
                found[check][case].joint += continued(emitted[mine], count[mine], tables[number])
                found[check][case].counts += np.bincount(count[mine], minlength=GAMMA + 2)
    return found


def target_table(sampling: Sampling) -> np.ndarray:
    """``[V, V]`` float64, the distribution that the target's tokens are drawn from after each token."""
    p = np.asarray(probabilities(jnp.asarray(P_TABLE), sampling.rows(V)), np.float64)
    return p / p.sum(axis=1, keepdims=True)


def exact_joint(p: np.ndarray) -> np.ndarray:
    """The exact distribution of the HORIZON tokens after token 0, by enumeration."""
    return np.einsum("a,ab,bc->abc", p[0], p, p).reshape(-1)


def continued(emitted: np.ndarray, count: np.ndarray, p: np.ndarray) -> np.ndarray:
    """``[V ** HORIZON]`` how many of the rows continue in each way.

    The target goes on where a row emitted fewer than HORIZON tokens. Instead of drawing that, the row is shared out over all
    continuations by their probabilities: the expectation is the same and the variance smaller, so that the bound holds.
    """
    joint = np.zeros(V**HORIZON)
    for length in range(1, HORIZON + 1):
        tokens = emitted[np.minimum(count, HORIZON) == length, :length]
        rows = np.bincount(tokens @ V ** np.arange(length)[::-1], minlength=V**length).reshape(-1, V)
        for _ in range(HORIZON - length):
            rows = (rows[..., None] * p).reshape(-1, V)
        joint += rows.reshape(-1)
    return joint


# --- rules, right and broken -----------------------------------------------------------------------------------------


def as_tree(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
    return descend(draft, by_rule(recursive_rejection, logits, sampling, keys))


def as_chosen(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
    return verify(draft.replace(q=None), logits, sampling, keys)


def without_residual(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
    """Broken: accepts with p/q, but draws from p itself after a rejection."""

    def rule(p, q, x, drafted, keys):
        accept_keys, token_keys = split_keys(keys, 2)
        u = verification._uniform(accept_keys, x.shape[1])
        accepted = verification._leading((u * verification._of(q, x) < verification._of(p, x)) & drafted)
        return accepted, draw(verification._at(p, accepted), token_keys)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CHAIN_RULES, "rejection", rule)
        return verify(draft, logits, sampling.replace(rule="rejection"), keys)


def ratio_on_chosen(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
    """Broken: divides by the drafter's own probability of tokens that it chose."""
    q = probabilities(jnp.asarray(Q_TABLES["unlike"])[draft.tokens], sampling)
    return verify(draft.replace(q=q), logits, sampling.replace(rule="rejection"), keys)


def same_q(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
    """Broken: q loses each rejected sibling, as it has to, but is not renormalised."""
    normalised = verification._normalised
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            verification, "_normalised", lambda mass, otherwise: mass if mass is otherwise else normalised(mass, otherwise)
        )
        return verify(draft, logits, sampling, keys)


def dropping(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array) -> Verdict:
    """Broken: a draft may end early at a token of low probability, but not without it (lessons: the stop rule)."""
    own = jnp.take_along_axis(draft.q[:, :-1], draft.tokens[:, 1:, None], axis=-1)[..., 0]
    kept = jnp.cumprod(own > 0.4, axis=1).astype(bool)
    return verify(draft.replace(valid=jnp.pad(kept, ((0, 0), (1, 0)), constant_values=True)), logits, sampling, keys)


def by_chain_rule(rule: str) -> Callable:
    return lambda draft, logits, sampling, keys: verify(draft, logits, sampling.replace(rule=rule), keys)


CHECKS = {rule: by_chain_rule(rule) for rule in CHAIN_RULES} | {
    check.__name__: check for check in (verify, as_tree, as_chosen, without_residual, ratio_on_chosen, same_q, dropping)
}
PROGRAMS = {
    "chain": ("block", "rejection"),
    "adaptive": ("block", "rejection"),
    "ragged": ("block", "rejection", "as_tree"),
    "chosen": ("verify", "ratio_on_chosen"),
    "static": ("verify", "ratio_on_chosen"),
    "dynamic": ("verify", "ratio_on_chosen"),
    "sampled": ("verify", "same_q"),
}
BROKEN = ("without_residual", "ratio_on_chosen", "same_q", "dropping")
FIRST_CASE = ("as_tree", *BROKEN)


@TIERS
@pytest.mark.parametrize("how", PROGRAMS)
def test_every_pair_keeps_the_distribution_whatever_drafts_at_every_setting(how: str, draws: int) -> None:
    """And dividing by q on tokens that were chosen does not, nor judging siblings by the same q."""
    for check, found in find(how, PROGRAMS[how], cases_of(draws), draws).items():
        if check in BROKEN:
            assert found[Case()].distance > 3, check
            continue
        for case in found:
            assert found[case].distance < 1, (check, case)
        if how in TREES:
            for case in DRAFTERS:
                assert found[case].emitted > 1.01, case  # something was accepted: the test is not about bonus tokens alone
    if how == "ragged":  # a chain judged as a tree is judged by rejection
        found = find(how, PROGRAMS[how], cases_of(draws), draws)
        chain, tree = (found[check][Case()].emitted for check in ("rejection", "as_tree"))
        assert tree == pytest.approx(chain, abs=5 * GAMMA / 2 / np.sqrt(draws))


DRAWN = ("block", "rejection", "as_chosen", "without_residual", "dropping")


@TIERS
def test_a_drawn_chain_keeps_the_distribution_by_every_right_rule_and_by_no_broken_one(draws: int) -> None:
    """Whether a token is the target's own may be asked of drawn tokens too: it is as exact as it is wasteful."""
    found = find("drawn", DRAWN, DRAFTERS, draws)
    for check in DRAWN:
        for case in found[check]:
            if check in BROKEN:
                assert found[check][case].distance > 3, check
            else:
                assert found[check][case].distance < 1, (check, case)
    close = Case("close")
    assert found["as_chosen"][close].emitted < found["rejection"][close].emitted - 0.5


@TIERS
def test_block_accepts_at_least_as_much_as_rejection(draws: int) -> None:
    found = find("drawn", DRAWN, DRAFTERS, draws)
    for case in DRAFTERS:
        # The drafts are the same ones, so only the rules' own randomness differs: 4 standard errors of it.
        block, token = found["block"][case].emitted, found["rejection"][case].emitted
        assert block > token - 4 * np.sqrt(2) * (GAMMA / 2) / np.sqrt(draws), case
        if case.q == "unlike":
            assert block > token + 0.01


@TIERS
def test_rejection_accepts_at_rate_sum_of_minima(draws: int) -> None:
    """Leviathan et al., Theorem 3.5: the first drafted token is accepted with probability beta = sum min(p, q)."""
    for case, found in find("drawn", DRAWN, DRAFTERS, draws)["rejection"].items():
        p, q = (np.asarray(jax.nn.softmax(table[0])) for table in (P_TABLE, Q_TABLES[case.q]))
        accepted = found.counts[2:].sum() / found.counts.sum()
        assert accepted == pytest.approx(np.minimum(p, q).sum(), abs=5 * 0.5 / np.sqrt(draws)), case


def test_equal_distributions_accept_everything() -> None:
    found = find("drawn", DRAWN, DRAFTERS, 64_000)
    for rule in CHAIN_RULES:
        assert found[rule][Case("equal")].emitted == GAMMA + 1


def test_siblings_accept_more_than_one_token_alone() -> None:
    siblings = find("sampled", PROGRAMS["sampled"], cases_of(64_000), 64_000)["verify"][Case()].emitted
    chain = find("drawn", DRAWN, DRAFTERS, 64_000)["rejection"][Case()].emitted
    assert siblings > chain + 0.2  # of two levels, against the chain's three


# --- greedy rows -----------------------------------------------------------------------------------------------------


def descent_of(tokens, parents, valid, best) -> tuple[list[int], int]:
    """The slow, obvious greedy rule for one row of a tree: the path, and the token after it."""
    path = [0]
    while True:
        wanted = best[path[-1]]
        below = [n for n in range(len(tokens)) if parents[n] == path[-1] and valid[n] and tokens[n] == wanted]
        if not below:
            return path, wanted
        path.append(below[0])


def some_tree(rng: np.random.Generator, nodes: int) -> np.ndarray:
    return np.array([-1] + [rng.integers(0, n) for n in range(1, nodes)])


@pytest.mark.parametrize("kind", ["chain", "static", "on the device", "among rows that are not greedy"])
def test_greedy_rows_equal_the_oracle(kind: str) -> None:
    rng = np.random.default_rng(0)
    batches, rows, nodes, longest = (15, 20, 7, 0) if kind == "static" else (1, 300, 7, 0)
    for _ in range(batches):
        if kind in ("chain", "static"):
            known = np.arange(-1, nodes - 1) if kind == "chain" else some_tree(rng, nodes)
            parents = np.tile(known, (rows, 1))
        else:
            known, parents = None, np.stack([some_tree(rng, nodes) for _ in range(rows)])
        siblings_before = [[sum(of_row[:n] == of_row[n]) for n in range(nodes)] for of_row in parents]
        tokens = np.array(siblings_before, np.int32)  # siblings have different tokens
        if kind == "chain":
            tokens = rng.integers(0, 2, (rows, nodes)).astype(np.int32)
        logits = rng.normal(size=(rows, nodes, 3)).astype(np.float32)
        if kind == "chain":
            logits[..., 2] -= 2
        valid = rng.random((rows, nodes)) < 0.9
        valid[:, 0] = True
        greedy = np.arange(rows) % 3 > 0 if kind == "among rows that are not greedy" else np.ones(rows, bool)
        sampling = Sampling(temperature=np.where(greedy, 0.0, 1.0)).rows(rows)
        draft = Draft.of_tree(
            tokens=jnp.asarray(tokens), parents=jnp.asarray(parents) if known is None else known, valid=jnp.asarray(valid)
        )
        verdict = verify(draft, jnp.asarray(logits), sampling, jax.random.split(jax.random.key(0), rows))
        emitted, paths = np.asarray(verdict.emitted(draft)), np.asarray(verdict.path)
        for row, count in enumerate(np.asarray(verdict.count)):
            if greedy[row]:
                path, token = descent_of(tokens[row], parents[row], valid[row], logits[row].argmax(-1))
                assert paths[row, :count].tolist() == path
                assert emitted[row, :count].tolist() == [*tokens[row, path[1:]], token]
        longest = max(longest, np.asarray(verdict.count).max())
    assert longest > 3


# --- what verification makes of its arguments ------------------------------------------------------------------------


def a_draft(how: str, rows: int, extra: int = 0) -> tuple[Draft, jax.Array]:
    """A draft of one of TREES or a chain, with ``extra`` nodes that were not drafted; and the target's logits."""
    parents = np.arange(-1, GAMMA)
    if how == "dynamic":
        parents = np.array([-1, 0, 0, 0, 1, 1, 2, 4, 4])
    elif how in TREES:
        parents = SHAPES[how].template.parents
    nodes = len(parents)
    rank = np.array([sum(parents[:node] == parents[node]) for node in range(nodes)])
    rng = np.random.default_rng(0)
    tokens = jnp.asarray((rng.integers(0, V, (rows, nodes))[:, parents] + rank) % V, jnp.int32)  # siblings differ

    def wider(values: jax.Array) -> jax.Array:
        return jnp.pad(values, ((0, 0), (0, extra), *((0, 0),) * (values.ndim - 2)))

    draft = Draft.of_tree(
        tokens=wider(tokens),
        parents=np.concatenate([parents, np.zeros(extra, int)]),
        q=wider(jax.nn.softmax(jnp.asarray(Q_TABLES["close"])[tokens])) if how in ("sampled", "drawn") else None,
        valid=wider(jnp.ones(tokens.shape, bool)),
    )
    if how == "dynamic":
        draft = draft.replace(topology=None, grown=jnp.tile(draft.parents, (rows, 1)), levels=GAMMA)
    return draft, jnp.asarray(P_TABLE)[draft.tokens]


@pytest.mark.parametrize("how", ["static", "sampled"])
def test_a_rows_verdict_depends_on_no_other_row_and_not_on_the_number_of_nodes(how: str) -> None:
    rows = 24
    temperature = np.resize([1.0, 0.0, 1.6, 0.8], rows)
    keys = jax.random.split(jax.random.key(6), rows)

    def verdict(some: np.ndarray, extra: int) -> Verdict:
        draft, logits = a_draft(how, rows, extra)
        draft = draft.replace(
            **{name: None if (v := getattr(draft, name)) is None else v[some] for name in ("tokens", "q", "valid")}
        )
        sampling = Sampling(temperature=temperature[some], top_p=0.95).rows(len(some))
        return jax.jit(lambda logits, keys: verify(draft, logits, sampling, keys))(logits[some], keys[some])

    together, some = verdict(np.arange(rows), 0), np.array([23, 5, 16, 2, 11, 9])
    assert len(set(np.asarray(together.count).tolist())) > 1
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a)[some], b), together, verdict(some, 3))


def made(jaxpr) -> list:
    """Shape and type of every array that a program makes, its loops and functions included."""
    arrays = []
    for equation in jaxpr.eqns:
        arrays += [(variable.aval.shape, variable.aval.dtype) for variable in equation.outvars]
        for inner in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda x: isinstance(x, jax.extend.core.ClosedJaxpr | jax.extend.core.Jaxpr)
        ):
            if isinstance(inner, jax.extend.core.ClosedJaxpr):
                arrays += made(inner.jaxpr)
            elif isinstance(inner, jax.extend.core.Jaxpr):
                arrays += made(inner)
    return arrays


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("how", [*TREES, "chosen", "drawn"])
def test_the_targets_distribution_is_formed_where_the_walk_goes_and_not_at_all_nodes(how: str, temperature: float) -> None:
    """It is what verification costs: ``[B, N, V]`` is 31 MB a row for 60 nodes and 128,000 tokens."""
    rows = 2
    sampling = Sampling(temperature=temperature, top_p=0.9).rows(rows)
    draft, logits = a_draft(how, rows)
    keys = jax.random.split(jax.random.key(0), rows)

    def check(logits: jax.Array, q: jax.Array | None) -> Verdict:
        return verify(draft.replace(q=q), logits, sampling, keys)

    arrays = made(jax.make_jaxpr(check)(logits, draft.q).jaxpr)
    everywhere = [array for array in arrays if array == (logits.shape, jnp.float32)]
    at_a_node = [array for array in arrays if array == ((rows, V), jnp.float32)]
    assert bool(everywhere) == (how == "drawn" and temperature > 0)  # block and rejection need it along the whole chain
    assert bool(at_a_node) == (temperature > 0)
