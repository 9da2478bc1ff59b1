"""Losslessness of the rules themselves, on Markov chains whose joint distribution is known exactly.

Every case draws a million continuations (mixed batches: an eighth or a quarter of one for each setting) and compares the joint
distribution of the next three tokens with the exact one. The bound is `conformance.monte_carlo_bound`; rules that are broken
on purpose must exceed it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.decoding import verification
from specjax.decoding.verification import verify
from specjax.drafters.base import Draft
from specjax.drafters.expansion import expand
from specjax.evaluation.conformance import monte_carlo_bound, total_variation
from specjax.sampling import RowSampling, Sampling, draw, probabilities, split_keys
from specjax.tree import Chain, DynamicTree, SampledTree, StaticTree

V, GAMMA, HORIZON = 5, 3, 3
DRAWS, CHUNK = 1_000_000, 125_000


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
SAMPLINGS = {
    "T=1": Sampling(),
    "T=0.7 top_p=0.9": Sampling(temperature=0.7, top_p=0.9),
    "T=1.3 top_k=3": Sampling(temperature=1.3, top_k=3),
    "greedy": Sampling(temperature=0.0),
    "min_p": Sampling(temperature=1.5, min_p=0.2),
}


SHAPES = {
    "chain": Chain(2),
    "adaptive": Chain(3, stop_below=0.3),
    "static": StaticTree(((0,), (1,), (0, 0), (2,), (1, 0), (0, 1), (0, 0, 0))),
    "dynamic": DynamicTree(top_k=3, depth=3, nodes=9),
    "sampled": SampledTree((4, 2)),  # with "zeros", more siblings than q has tokens
}
TREES = ["static", "dynamic", "sampled"]


def propose(q_table: jax.Array, root: jax.Array, sampling: RowSampling, keys: jax.Array, how: str) -> Draft:
    """A draft of the Markov drafter: one of SHAPES, or a chain of GAMMA tokens drawn from q, or its argmax (``chosen``)."""
    if how in SHAPES:
        return expand(SHAPES[how], lambda nodes, _: (q_table[nodes.tokens], ()), q_table[root], (), root, sampling, keys)[0]
    tokens, qs, token = [], [], root
    for step_keys in split_keys(keys, GAMMA):
        if how == "chosen":
            token = jnp.argmax(q_table[token], axis=-1)
        else:
            qs.append(probabilities(q_table[token], sampling))
            token = draw(qs[-1], step_keys)
        tokens.append(token)
    valid = None
    if how == "ragged":  # rows draft 0 to GAMMA tokens
        valid = jnp.arange(GAMMA)[None] < (jnp.arange(root.shape[0]) % (GAMMA + 1))[:, None]
    return Draft.chain(root, jnp.stack(tokens, 1), jnp.stack(qs, 1) if qs else None, valid)


@partial(jax.jit, static_argnames=("how", "check"))
def continuations(p_table, q_table, sampling, key, *, how, check) -> tuple[jax.Array, jax.Array]:
    """``[CHUNK, HORIZON]`` tokens after root 0: one verified draft, then plain draws; and the accepted counts."""
    draft_keys, verify_keys, *tail_keys = split_keys(jax.random.split(key, CHUNK), 2 + HORIZON)
    draft = propose(q_table, jnp.zeros(CHUNK, jnp.int32), sampling, draft_keys, how)
    verdict = check(draft, p_table[draft.tokens], sampling, verify_keys)
    emitted = verdict.emitted(draft)[:, :HORIZON]
    previous = jnp.zeros(CHUNK, jnp.int32)
    tokens = []
    for i in range(HORIZON):
        plain = draw(probabilities(p_table[previous], sampling), tail_keys[i])
        previous = jnp.where(i < verdict.count, emitted[:, i], plain)
        tokens.append(previous)
    return jnp.stack(tokens, axis=1), verdict.count


def joint_counts(q_table, sampling: RowSampling, how: str, check, groups: int = 1, draws: int = DRAWS):
    """Counts of the next HORIZON tokens ``[groups, V, V, V]`` (row i belongs to group i % groups) and mean count."""
    counts = np.zeros((groups, V**HORIZON), np.int64)
    accepted = []
    for i in range(-(-draws * groups // CHUNK)):
        tokens, count = continuations(P_TABLE, q_table, sampling, jax.random.key(i), how=how, check=check)
        flat = np.asarray(tokens) @ (V ** np.arange(HORIZON)[::-1])
        for group in range(groups):
            counts[group] += np.bincount(flat[group::groups], minlength=V**HORIZON)
        accepted.append(float(count.mean()))
    return counts, float(np.mean(accepted))


def exact_joint(sampling: Sampling) -> np.ndarray:
    """The exact distribution of the HORIZON tokens after token 0, by enumeration."""
    p = np.asarray(probabilities(jnp.asarray(P_TABLE), sampling.rows(V)), np.float64)
    p /= p.sum(axis=1, keepdims=True)
    return np.einsum("a,ab,bc->abc", p[0], p, p).reshape(-1)


CHECKS = {rule: partial(verify, rule=rule) for rule in verification.CHAIN_RULES}
RULES = [("drawn", "block"), ("drawn", "rejection"), ("ragged", "block"), ("ragged", "rejection"), ("chosen", "rejection")]


@pytest.mark.parametrize(("how", "rule"), RULES)
@pytest.mark.parametrize("q", Q_TABLES)
def test_joint_distribution_is_the_targets(how: str, rule: str, q: str) -> None:
    sampling = Sampling()
    counts, _ = joint_counts(Q_TABLES[q], sampling.rows(CHUNK), how, CHECKS[rule])
    exact = exact_joint(sampling)
    assert total_variation(counts[0], exact) < monte_carlo_bound(exact, DRAWS)


@pytest.mark.parametrize(("how", "rule"), [pair for pair in RULES if pair[0] != "drawn"])
def test_rows_of_one_batch_keep_their_own_settings(how: str, rule: str) -> None:
    settings = list(SAMPLINGS.values())
    mixed = Sampling(
        **{name: np.resize([getattr(s, name) for s in settings], CHUNK) for name in ("temperature", "top_k", "top_p", "min_p")}
    )
    counts, _ = joint_counts(Q_TABLES["unlike"], mixed.rows(CHUNK), how, CHECKS[rule], groups=len(settings), draws=250_000)
    for name, group in zip(SAMPLINGS, counts, strict=True):
        exact = exact_joint(SAMPLINGS[name])
        assert total_variation(group, exact) < monte_carlo_bound(exact, int(group.sum())), name


GRID = [Sampling(temperature=t, top_p=top_p) for t in (0.0, 0.6, 1.0, 1.5) for top_p in (1.0, 0.85)]


PAIRS = [(how, rule) for how in SHAPES for rule in verification.CHAIN_RULES if rule == "block" or how not in TREES]


@pytest.mark.parametrize(("how", "rule"), PAIRS)
def test_every_pair_keeps_the_distribution_at_every_temperature(how: str, rule: str) -> None:
    """All settings side by side in one batch, an eighth of a million draws of each."""
    rows = Sampling(**{name: np.resize([getattr(s, name) for s in GRID], CHUNK) for name in ("temperature", "top_p")})
    counts, _ = joint_counts(Q_TABLES["unlike"], rows.rows(CHUNK), how, CHECKS[rule], groups=len(GRID), draws=125_000)
    for setting, group in zip(GRID, counts, strict=True):
        exact = exact_joint(setting)
        assert total_variation(group, exact) < monte_carlo_bound(exact, int(group.sum())), setting


@pytest.mark.parametrize("how", TREES)
@pytest.mark.parametrize("q", [name for name in Q_TABLES if name != "unlike"])
def test_trees_keep_the_distribution_whatever_drafts(how: str, q: str) -> None:
    counts, accepted = joint_counts(Q_TABLES[q], Sampling().rows(CHUNK), how, verify)
    exact = exact_joint(Sampling())
    assert total_variation(counts[0], exact) < monte_carlo_bound(exact, DRAWS)
    assert accepted > 1.01  # something was accepted: the test is not about bonus tokens alone


def test_siblings_accept_more_than_one_token_alone() -> None:
    rows = Sampling().rows(CHUNK)
    _, siblings = joint_counts(Q_TABLES["unlike"], rows, "sampled", verify, draws=CHUNK)
    _, chain = joint_counts(Q_TABLES["unlike"], rows, "drawn", CHECKS["rejection"], draws=CHUNK)
    assert siblings > chain + 0.2  # of two levels, against the chain's three


def test_a_chain_judged_as_a_tree_is_judged_by_rejection() -> None:
    rows = Sampling().rows(CHUNK)

    def check(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array):
        return verification.recursive_rejection(draft, probabilities(logits, sampling), keys)

    counts, as_tree = joint_counts(Q_TABLES["unlike"], rows, "ragged", check)
    _, as_chain = joint_counts(Q_TABLES["unlike"], rows, "ragged", CHECKS["rejection"])
    exact = exact_joint(Sampling())
    assert total_variation(counts[0], exact) < monte_carlo_bound(exact, DRAWS)
    assert as_tree == pytest.approx(as_chain, abs=5 * GAMMA / 2 / np.sqrt(DRAWS))


def without_residual(p, q, x, drafted, keys):
    """Broken: accepts with p/q, but draws from p itself after a rejection."""
    accept_keys, token_keys = split_keys(keys, 2)
    u = verification._uniform(accept_keys, x.shape[1])
    accepted = verification._leading((u * verification._of(q, x) < verification._of(p, x)) & drafted)
    return accepted, draw(verification._at(p, accepted), token_keys)


def ratio_on_chosen(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array):
    """Broken: divides by the drafter's own probability of tokens that it chose."""
    q = probabilities(jnp.asarray(Q_TABLES["unlike"])[draft.tokens], sampling)
    return verify(draft.replace(q=q), logits, sampling, keys, rule="rejection")


def test_rejection_without_the_residual_fails(monkeypatch) -> None:
    monkeypatch.setitem(verification.CHAIN_RULES, "without residual", without_residual)
    sampling = Sampling()
    check = partial(verify, rule="without residual")
    counts, _ = joint_counts(Q_TABLES["unlike"], sampling.rows(CHUNK), "drawn", check)
    exact = exact_joint(sampling)
    assert total_variation(counts[0], exact) > 3 * monte_carlo_bound(exact, DRAWS)


def test_dividing_by_q_on_chosen_tokens_fails() -> None:
    sampling = Sampling()
    counts, _ = joint_counts(Q_TABLES["unlike"], sampling.rows(CHUNK), "chosen", ratio_on_chosen)
    exact = exact_joint(sampling)
    assert total_variation(counts[0], exact) > 3 * monte_carlo_bound(exact, DRAWS)


@pytest.mark.parametrize("how", ["static", "dynamic"])
def test_dividing_by_q_on_chosen_children_fails(how: str) -> None:
    sampling = Sampling()
    counts, _ = joint_counts(Q_TABLES["unlike"], sampling.rows(CHUNK), how, ratio_on_chosen)
    exact = exact_joint(sampling)
    assert total_variation(counts[0], exact) > 3 * monte_carlo_bound(exact, DRAWS)


def test_siblings_judged_with_the_same_q_fail(monkeypatch) -> None:
    """q has to lose each rejected sibling and be renormalised."""
    normalised = verification._normalised
    monkeypatch.setattr(
        verification, "_normalised", lambda mass, otherwise: mass if mass is otherwise else normalised(mass, otherwise)
    )
    sampling = Sampling()
    counts, _ = joint_counts(Q_TABLES["unlike"], sampling.rows(CHUNK), "sampled", partial(verify))
    exact = exact_joint(sampling)
    assert total_variation(counts[0], exact) > 3 * monte_carlo_bound(exact, DRAWS)


def test_matching_drawn_siblings_is_as_exact_as_it_is_wasteful() -> None:
    """Whether a child is the target's own token may be asked of drawn children too: they say nothing about p."""
    sampling = Sampling()

    def check(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array):
        return verify(draft.replace(q=None), logits, sampling, keys)

    counts, matched = joint_counts(Q_TABLES["close"], sampling.rows(CHUNK), "drawn", check)
    _, judged = joint_counts(Q_TABLES["close"], sampling.rows(CHUNK), "drawn", CHECKS["rejection"], draws=CHUNK)
    exact = exact_joint(sampling)
    assert total_variation(counts[0], exact) < monte_carlo_bound(exact, DRAWS)
    assert matched < judged - 0.5


def test_dropping_a_token_for_its_own_low_probability_fails() -> None:
    """A draft may end early at a token, but not without it (lessons: the stop rule)."""

    def check(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array):
        own = jnp.take_along_axis(draft.q[:, :-1], draft.tokens[:, 1:, None], axis=-1)[..., 0]
        kept = jnp.cumprod(own > 0.4, axis=1).astype(bool)
        return verify(draft.replace(valid=jnp.pad(kept, ((0, 0), (1, 0)), constant_values=True)), logits, sampling, keys)

    sampling = Sampling()
    counts, _ = joint_counts(Q_TABLES["unlike"], sampling.rows(CHUNK), "drawn", check)
    exact = exact_joint(sampling)
    assert total_variation(counts[0], exact) > 3 * monte_carlo_bound(exact, DRAWS)


@pytest.mark.parametrize("q", Q_TABLES)
def test_block_accepts_at_least_as_much_as_rejection(q: str) -> None:
    rows = Sampling().rows(CHUNK)
    _, block = joint_counts(Q_TABLES[q], rows, "drawn", CHECKS["block"], draws=500_000)
    _, token = joint_counts(Q_TABLES[q], rows, "drawn", CHECKS["rejection"], draws=500_000)
    # The drafts are the same ones (same keys), so only the rules' own randomness differs: 4 standard errors of it.
    assert block > token - 4 * np.sqrt(2) * (GAMMA / 2) / np.sqrt(500_000)
    if q == "unlike":
        assert block > token + 0.01


def test_rejection_accepts_at_rate_sum_of_minima() -> None:
    """Leviathan et al., Theorem 3.5: one drafted token is accepted with probability beta = sum min(p, q)."""
    rows = Sampling().rows(CHUNK)

    def first_only(draft: Draft, logits: jax.Array, sampling: RowSampling, keys: jax.Array):
        valid = jnp.arange(GAMMA + 1)[None] < jnp.full((CHUNK, 1), 2)
        return verify(draft.replace(valid=valid), logits, sampling, keys, rule="rejection")

    _, count = joint_counts(Q_TABLES["unlike"], rows, "drawn", first_only)
    p, q = (np.asarray(jax.nn.softmax(table[0])) for table in (P_TABLE, Q_TABLES["unlike"]))
    assert count - 1 == pytest.approx(np.minimum(p, q).sum(), abs=5 * 0.5 / np.sqrt(DRAWS))


@pytest.mark.parametrize("rule", verification.CHAIN_RULES)
def test_equal_distributions_accept_everything(rule: str) -> None:
    _, count = joint_counts(Q_TABLES["equal"], Sampling().rows(CHUNK), "drawn", CHECKS[rule], draws=CHUNK)
    assert count == GAMMA + 1


def greedy_oracle(tokens, best, valid):
    """The slow, obvious greedy rule for one row."""
    emitted = []
    for i in range(len(tokens)):
        emitted.append(best[i])
        if i + 1 == len(tokens) or not valid[i + 1] or tokens[i + 1] != best[i]:
            return emitted


def test_greedy_equals_the_oracle() -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 2, (300, 5)).astype(np.int32)
    logits = rng.normal(size=(300, 5, 2)).astype(np.float32)
    valid = np.arange(5)[None] < rng.integers(1, 6, 300)[:, None]
    draft = Draft.chain(jnp.asarray(tokens[:, 0]), jnp.asarray(tokens[:, 1:]), valid=jnp.asarray(valid[:, 1:]))
    keys = jax.random.split(jax.random.key(0), 300)
    verdict = verify(draft, jnp.asarray(logits), Sampling(temperature=0.0).rows(300), keys)
    emitted = np.asarray(verdict.emitted(draft))
    for row in range(300):
        expected = greedy_oracle(tokens[row], logits[row].argmax(-1), valid[row])
        assert emitted[row, : verdict.count[row]].tolist() == expected


def descend(tokens, parents, valid, best) -> tuple[list[int], int]:
    """The slow, obvious greedy rule for one row of a tree: the path, and the token after it."""
    path = [0]
    while True:
        wanted = best[path[-1]]
        below = [n for n in range(len(tokens)) if parents[n] == path[-1] and valid[n] and tokens[n] == wanted]
        if not below:
            return path, wanted
        path.append(below[0])


@pytest.mark.parametrize("static", [True, False])
def test_greedy_trees_equal_the_oracle(static: bool) -> None:
    rng = np.random.default_rng(0)
    rows, nodes = (1, 7) if static else (300, 7)
    for _ in range(300 // rows):
        parents = np.array([[-1] + [rng.integers(0, n) for n in range(1, nodes)] for _ in range(rows)])
        tokens = rng.integers(0, 2, (rows, nodes)).astype(np.int32)
        for row, of_row in enumerate(parents):  # siblings have different tokens
            for n in range(1, nodes):
                tokens[row, n] = sum(of_row[:n] == of_row[n])
        logits = rng.normal(size=(rows, nodes, 3)).astype(np.float32)
        valid = rng.random((rows, nodes)) < 0.9
        valid[:, 0] = True
        draft = Draft.of_tree(jnp.asarray(tokens), parents[0] if static else jnp.asarray(parents), valid=jnp.asarray(valid))
        keys = jax.random.split(jax.random.key(0), rows)
        verdict = verify(draft, jnp.asarray(logits), Sampling(temperature=0.0).rows(rows), keys)
        emitted = np.asarray(verdict.emitted(draft))
        for row in range(rows):
            path, token = descend(tokens[row], parents[row], valid[row], logits[row].argmax(-1))
            assert np.asarray(verdict.path)[row, : verdict.count[row]].tolist() == path
            assert emitted[row, : verdict.count[row]].tolist() == [*tokens[row, path[1:]], token]
