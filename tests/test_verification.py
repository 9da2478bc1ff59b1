"""Losslessness of the rules themselves, on Markov chains whose joint distribution is known exactly.

Every case draws at least a million continuations and compares the joint distribution of the next three tokens with the exact
one. The bound is `statistics.monte_carlo_bound`; rules that are broken on purpose must exceed it.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import verification
from specjax.drafters.base import Draft
from specjax.sampling import RowSampling, Sampling, draw, probabilities, split_keys
from specjax.verification import verify
from tests.statistics import monte_carlo_bound, total_variation

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


def propose(q_table: jax.Array, root: jax.Array, sampling: RowSampling, keys: jax.Array, how: str) -> Draft:
    """A chain of GAMMA tokens from the Markov drafter: drawn from q, or its argmax (``chosen``)."""
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


@pytest.mark.parametrize(("how", "rule"), RULES)
def test_rows_of_one_batch_keep_their_own_settings(how: str, rule: str) -> None:
    settings = list(SAMPLINGS.values())
    mixed = Sampling(
        **{name: np.resize([getattr(s, name) for s in settings], CHUNK) for name in ("temperature", "top_k", "top_p", "min_p")}
    )
    counts, _ = joint_counts(Q_TABLES["unlike"], mixed.rows(CHUNK), how, CHECKS[rule], groups=len(settings))
    for name, group in zip(SAMPLINGS, counts, strict=True):
        exact = exact_joint(SAMPLINGS[name])
        assert total_variation(group, exact) < monte_carlo_bound(exact, int(group.sum())), name


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


def test_a_tree_is_refused_by_chain_rules() -> None:
    draft = Draft(tokens=jnp.zeros((1, 3), jnp.int32), parents=np.array([-1, 0, 0]))
    with pytest.raises(NotImplementedError):
        verify(draft, jnp.zeros((1, 3, V)), Sampling().rows(1), jax.random.split(jax.random.key(0), 1))
