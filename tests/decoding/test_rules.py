"""The rules of verification, one step of each, against slow walks with the same random numbers.

Whether a rule keeps the distribution is shown in test_verification.py, by counting. These tests are
exact and small: which tokens are accepted, and from which numbers the last token is drawn.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.decoding import verification
from specjax.decoding.loop import _cut_at_end, _keys_of_step
from specjax.decoding.state import DecodeState
from specjax.decoding.stats import Stats, StepInfo
from specjax.decoding.verification import (
    by_rule,
    descend,
    follow_argmax,
    matching,
    recursive_rejection,
    verify,
)
from specjax.drafts.draft import Draft, Verdict
from specjax.sampling import (
    Distributions,
    RowSampling,
    Sampling,
    noise_of_rows,
    position_keys,
    split_keys,
    without_stop_tokens,
)

ROWS, LENGTH, VOCAB = 60, 3, 4
PARENTS = np.array([-1, 0, 0, 1, 0, 1, 3, 4])


def distributions(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Return random distributions over a few tokens, about a third of which have no probability."""
    mass = rng.random((*shape, VOCAB)) ** 2 * (rng.random((*shape, VOCAB)) > 1 / 3)
    mass[..., 0] += mass.sum(axis=-1) == 0
    return (mass / mass.sum(axis=-1, keepdims=True)).astype(np.float32)


def distributions_of(p: np.ndarray, is_certain: np.ndarray) -> Distributions:
    """Return ``p [B, N, V]`` as the rules take it.

    Rows that are certain have only their likeliest token.
    """
    of_nodes = sampling.distributions(jnp.log(p), Sampling().rows(len(p)))
    return of_nodes.replace(is_certain=jnp.broadcast_to(is_certain[:, None], p.shape[:2]))


@pytest.fixture
def drawn_from(monkeypatch) -> list[np.ndarray]:
    """Replace each draw by the likeliest token, and return the list of what is drawn from."""
    masses: list[np.ndarray] = []

    def likeliest(mass: jax.Array, keys: jax.Array) -> jax.Array:
        masses.append(np.asarray(mass, np.float64))
        return jnp.argmax(mass, axis=-1).astype(jnp.int32)

    monkeypatch.setattr(verification, "draw", likeliest)
    return masses


def normalised(mass: np.ndarray) -> np.ndarray:
    return mass / mass.sum(axis=-1, keepdims=True)


# --- chains ---------------------------------------------------------------------------------------


def by_rejection(
    p: np.ndarray, q: np.ndarray, x: list[int], u: list[float]
) -> tuple[int, np.ndarray]:
    """Verify one chain by Leviathan et al., Algorithm 1.

    Returns how many tokens are accepted, and the mass that the next token is drawn from.
    """
    for i, token in enumerate(x):
        if p[i, token] == 0 or u[i] >= min(1.0, p[i, token] / q[i, token]):
            return i, np.maximum(0.0, p[i] - q[i])
    return len(x), p[len(x)]


def by_block(p: np.ndarray, q: np.ndarray, x: list[int], u: list[float]) -> tuple[int, np.ndarray]:
    """Verify one chain by Sun et al., Algorithm 2; the result is as in `by_rejection`."""
    ratio, accepted, mass = 1.0, 0, p[0] if not x else np.maximum(0.0, p[0] - q[0])
    for i, token in enumerate(x, start=1):
        ratio = min(1.0, ratio * p[i - 1, token] / q[i - 1, token])
        residual = ratio * p[i] if i == len(x) else np.maximum(0.0, ratio * p[i] - q[i])
        h = ratio if i == len(x) else residual.sum() / max(residual.sum() + 1 - ratio, 1e-30)
        if u[i - 1] < h:
            accepted, mass = i, residual
    return accepted, mass


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_chains_are_accepted_as_the_papers_algorithms_say(rule, drawn_from, monkeypatch) -> None:
    """Check chains of every length, also with random numbers of 0.

    The number 0 must accept no token that has probability 0 in the target.
    """
    rng = np.random.default_rng(0)
    p, q = distributions(rng, ROWS, LENGTH + 1), distributions(rng, ROWS, LENGTH + 1)

    def drafted_token(of_node: np.ndarray) -> int:
        return rng.choice(VOCAB, p=normalised(of_node.astype(float)))

    x = np.array([[drafted_token(of_node) for of_node in row[:-1]] for row in q])
    u = (rng.random((ROWS, LENGTH)) * (rng.random((ROWS, LENGTH)) > 0.3)).astype(np.float32)
    lengths = np.arange(ROWS) % (LENGTH + 1)
    drafted = np.arange(LENGTH) < lengths[:, None]
    monkeypatch.setattr(verification, "_uniform", lambda keys, count: jnp.asarray(u))
    keys = jax.random.split(jax.random.key(0), ROWS)
    of_target = distributions_of(p, is_certain=np.arange(ROWS) % 3 == 0)
    p = np.asarray(of_target.all())
    judge_chain = verification.RULES[rule].verify.keywords["judge_chain"]  # pyright: ignore[reportFunctionMemberAccess]
    accepted, _ = judge_chain(of_target, jnp.asarray(q), jnp.asarray(x, jnp.int32), drafted, keys)
    slow = {"rejection": by_rejection, "block": by_block}[rule]
    for row, length in enumerate(lengths):
        count, mass = slow(
            p[row].astype(float), q[row].astype(float), x[row, :length].tolist(), u[row].tolist()
        )
        assert accepted[row] == count, row
        if mass.sum() > 1e-6:
            np.testing.assert_allclose(normalised(drawn_from[0][row]), normalised(mass), atol=1e-5)
    assert set(np.asarray(accepted).tolist()) == set(range(LENGTH + 1))


BYTES = {"block": 15, "rejection": 11, "greedy": 3.3}
"""The most bytes that a verdict reads and writes, in units of the size of the logits.

With arrays of p, q and ids it was 27, 19 and 6.
"""


@pytest.mark.full
@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the numbers are those of a CPU")
@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("rule", BYTES)
def test_a_chain_is_judged_without_another_array_of_the_logits_size(rule, batch) -> None:
    """Check the bytes that verification reads, writes and holds beside the logits.

    Writing an array as large as the logits takes most of the time if the vocabulary is large.
    """
    shape = (batch, 9, 2**15)
    tokens = jnp.zeros(shape[:2], jnp.int32)
    draft = Draft.chain(tokens[:, 0], tokens[:, 1:], jnp.zeros((batch, 8, shape[2])))
    rows = (
        Sampling(temperature=0.0).rows(batch)
        if rule == "greedy"
        else Sampling(temperature=0.8).rows(batch, rule)
    )
    keys = jax.random.split(jax.random.key(0), batch)
    program = jax.jit(verify).lower(draft, jnp.zeros(shape), rows, keys).compile()
    size = 4 * math.prod(shape)
    assert program.cost_analysis()["bytes accessed"] < BYTES[rule] * size
    assert program.memory_analysis().temp_size_in_bytes < 0.5 * size


# --- trees ----------------------------------------------------------------------------------------


def siblings_by_rejection(
    p: np.ndarray, q: np.ndarray, x: list[int], u: list[float]
) -> tuple[int, np.ndarray]:
    """Verify the children of one node by SpecInfer, section 4.3.

    Returns the accepted child, or -1 for none, and what the next token is drawn from.
    """
    for child, token in enumerate(x):
        if u[child] * q[token] < p[token]:
            return child, p
        residual, rest = np.maximum(0.0, p - q), np.where(np.arange(VOCAB) == token, 0.0, q)
        p = normalised(residual) if residual.sum() > 0 else p
        q = normalised(rest) if rest.sum() > 0 else rest
    return -1, p


def test_siblings_are_judged_one_after_the_other(drawn_from) -> None:
    """Check three children of the root that are drawn without replacement.

    In some rows the second or the third was not drafted.
    """
    rng = np.random.default_rng(0)
    p, q = distributions(rng, ROWS), distributions(rng, ROWS) + np.float32(0.02)
    q = normalised(q).astype(np.float32)
    x = np.array(
        [rng.choice(VOCAB, 3, replace=False, p=normalised(of_row.astype(float))) for of_row in q]
    )
    is_valid = np.array([True, True, True, False])[(np.arange(ROWS)[:, None] + [1, 2, 3]) % 4]
    drafted = is_valid | (np.arange(3) == 0)
    draft = Draft.of_tree(
        jnp.asarray(np.pad(x, ((0, 0), (1, 0))), jnp.int32),
        np.array([-1, 0, 0, 0]),
        q=jnp.tile(jnp.asarray(q)[:, None], (1, 4, 1)),
        valid=jnp.asarray(np.pad(drafted, ((0, 0), (1, 0)), constant_values=True)),
    )
    keys = jax.random.split(jax.random.key(0), ROWS)
    child, _ = recursive_rejection(draft, jnp.zeros(ROWS, jnp.int32), jnp.asarray(p), keys)

    def uniforms(key: jax.Array) -> jax.Array:
        return jax.vmap(lambda node: jax.random.uniform(jax.random.fold_in(key, node)))(
            jnp.arange(4)
        )

    u = np.asarray(jax.vmap(uniforms)(split_keys(keys, 2)[0]), float)
    for row in range(ROWS):
        offered = x[row, : np.cumprod(drafted[row]).sum()].tolist()
        expected, mass = siblings_by_rejection(
            p[row].astype(float), q[row].astype(float), offered, u[row, 1:].tolist()
        )
        assert child[row] == (expected + 1 if expected >= 0 else -1), row
        np.testing.assert_allclose(normalised(drawn_from[0][row]), normalised(mass), atol=1e-4)
    assert set(np.asarray(child).tolist()) == {-1, 1, 2, 3}


def a_tree(
    rng: np.random.Generator, rows: int, likeliest: np.ndarray, parents: np.ndarray = PARENTS
) -> tuple[Draft, np.ndarray, np.ndarray]:
    """Return a draft of a tree; most nodes hold the ``likeliest [B, N]`` token after the parent."""
    tokens, missed = (
        np.zeros((rows, len(parents)), np.int32),
        rng.random((rows, len(parents))) < 0.3,
    )
    for node, parent in enumerate(parents[1:], 1):
        rank = sum(parents[:node] == parent)  # siblings hold different tokens
        tokens[:, node] = (likeliest[:, parent] + rank + missed[:, parent]) % VOCAB
    valid = rng.random(tokens.shape) < 0.9
    valid[:, 0] = True
    return Draft.of_tree(jnp.asarray(tokens), parents, valid=jnp.asarray(valid)), tokens, valid


def walk(
    tokens: np.ndarray, valid: np.ndarray, best: np.ndarray, parents: np.ndarray = PARENTS
) -> list[int]:
    """Walk from the root of one row as long as a child holds the ``best [N]`` token."""
    path = [0]
    while True:
        below = [
            n
            for n in np.flatnonzero(path[-1] == parents)
            if valid[n] and tokens[n] == best[path[-1]]
        ]
        if not below:
            return path
        path.append(int(below[0]))


@pytest.mark.parametrize("rule", ["argmax", "matching", "coupled"])
def test_chosen_children_are_accepted_where_the_target_goes(rule) -> None:
    """Check argmax, matching with one allowed token, and argmax with the noise of the depth."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(ROWS, len(PARENTS), VOCAB)).astype(np.float32)
    depths = np.array([0, 1, 1, 2, 1, 2, 3, 2])
    keys, depth = jax.random.split(jax.random.key(0), (4, ROWS)), depths.max()
    sampling = Sampling(temperature=1.0).rows(
        ROWS, "coupled" if rule == "coupled" else "independent"
    )
    shown = logits
    if rule == "coupled":
        noise = np.stack(
            [noise_of_rows(keys[level], VOCAB, sampling) for level in range(depth + 1)], axis=1
        )
        shown = logits + noise[:, depths]
    best = shown.argmax(axis=-1)
    draft, tokens, valid = a_tree(rng, ROWS, best)
    if rule == "argmax":
        verdict = follow_argmax(draft, jnp.asarray(best, jnp.int32), jnp.ones(best.shape, bool))
    elif rule == "coupled":
        verdict = verify(draft, jnp.asarray(logits), sampling, keys)
    else:  # whatever is drawn, it is the only token with a chance
        verdict = descend(
            draft, by_rule(matching, jnp.asarray(logits), Sampling(top_k=1).rows(ROWS), keys[0])
        )
    emitted = np.asarray(verdict.emitted(draft))
    for row in range(ROWS):
        path = walk(tokens[row], valid[row], best[row])
        assert verdict.count[row] == len(path) and verdict.path[row, : len(path)].tolist() == path
        assert emitted[row, : len(path)].tolist() == [*tokens[row, path[1:]], best[row, path[-1]]]
    assert set(np.asarray(verdict.count).tolist()) == {1, 2, 3, 4}


def test_of_a_target_that_allows_one_token_that_one_comes_whatever_is_drafted() -> None:
    """Check that also the last token, after all drafted tokens, is warped."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(ROWS, 3, VOCAB)).astype(np.float32)
    x = rng.integers(0, VOCAB, (ROWS, 2))
    x[::2] = logits[::2, :2].argmax(axis=-1)
    draft = Draft.chain(
        jnp.zeros(ROWS, jnp.int32), jnp.asarray(x, jnp.int32), jnp.full((ROWS, 2, VOCAB), 1 / VOCAB)
    )
    keys, sampling = jax.random.split(jax.random.key(0), ROWS), Sampling(top_k=1).rows(ROWS)
    verdict = jax.jit(lambda logits: verify(draft, logits, sampling, keys))(logits)
    best, emitted = logits.argmax(axis=-1), np.asarray(verdict.emitted(draft))
    for row, count in enumerate(np.asarray(verdict.count)):
        assert emitted[row, :count].tolist() == best[row, :count].tolist()
    assert (np.asarray(verdict.count)[::2] == 3).all()


def test_every_depth_of_a_walk_has_random_numbers_of_its_own() -> None:
    numbers = []

    def rule(
        draft: Draft, node: jax.Array, p: jax.Array, keys: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        numbers.append(jax.random.key_data(keys).tolist())
        return node, node

    keys, node = jax.random.split(jax.random.key(0), 2), jnp.zeros(2, jnp.int32)
    draft = Draft.chain(node, jnp.zeros((2, 2), jnp.int32))
    visit = by_rule(rule, jnp.zeros((2, 3, VOCAB)), Sampling().rows(2), keys)
    for depth in (0, 1, 2, 1):
        visit(draft, jnp.zeros((2, 3), jnp.int32), jnp.asarray(depth))
    assert numbers[1] == numbers[3] and len({str(of_depth) for of_depth in numbers}) == 3


# --- a step ---------------------------------------------------------------------------------------


def sampled(rule: str) -> RowSampling:
    return Sampling(temperature=1.0).rows(2, rule)


def key_data(keys: jax.Array) -> list:
    return jax.random.key_data(keys).tolist()


def test_coupled_keys_are_those_of_positions_for_drafter_and_target_alike() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    state = SimpleNamespace(sampling=sampled("coupled"), keys=keys, lengths=jnp.array([7, 3]))
    following, draft_keys, verify_keys = _keys_of_step(state, 2)
    expected = key_data(position_keys(keys, jnp.array([[7, 3], [8, 4], [9, 5]])))
    assert key_data(following) == key_data(keys)
    assert key_data(draft_keys) == expected[:2] and key_data(verify_keys) == expected


def test_other_keys_are_used_once() -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    following, draft_keys, verify_keys = _keys_of_step(
        SimpleNamespace(sampling=sampled("block"), keys=keys), 3
    )
    of_levels = [key for level in key_data(draft_keys) for key in level]
    every = [*key_data(keys), *key_data(following), *of_levels, *key_data(verify_keys)]
    assert len({str(numbers) for numbers in every}) == len(every) == 2 + 2 + 3 * 2 + 2


def cut(
    emitted: list[int], count: int, stop_token_ids: list[int], room: int, done: bool
) -> tuple[int, bool]:
    """Return how many of a row's first ``count`` tokens stay, and whether the row is done then."""
    if done:
        return 0, True
    for number, token in enumerate(emitted[: min(count, room)], 1):
        if token in stop_token_ids:
            return number, True
    return min(count, room), count >= room


def test_a_row_ends_with_its_first_end_token_or_at_its_limit() -> None:
    """Check ends in the middle of the accepted tokens.

    Beyond the accepted tokens anything may stand; an end token there ends nothing.
    """
    rng = np.random.default_rng(0)
    emitted, count = rng.integers(0, 5, (200, 4)), rng.integers(1, 5, 200)
    stop_token_ids = np.stack([rng.integers(0, 5, 200), np.full(200, -1)], axis=1)
    room, done = rng.integers(1, 7, 200), rng.random(200) < 0.1
    state = SimpleNamespace(
        stop_token_ids=jnp.asarray(stop_token_ids),
        lengths=jnp.full(200, 5),
        max_lengths=jnp.asarray(5 + room),
        done=jnp.asarray(done),
    )
    verdict = Verdict(
        path=jnp.zeros((200, 4), jnp.int32),
        count=jnp.asarray(count),
        token=jnp.zeros(200, jnp.int32),
    )
    shorter, is_done, has_failed = _cut_at_end(verdict, jnp.asarray(emitted), state)
    assert not has_failed.any()
    for row in range(200):
        expected = cut(
            emitted[row].tolist(), count[row], stop_token_ids[row].tolist(), room[row], done[row]
        )
        assert (shorter.count[row], is_done[row]) == expected, row
        if expected[0]:
            assert shorter.token[row] == emitted[row, expected[0] - 1]


def test_statistics_count_what_was_emitted() -> None:
    """Count three rows, the last of which is done, in two steps of drafts of depth 2."""
    stats = Stats.zeros(3, 2, parts=2)
    # Both parts offer the first token, and the first part alone offers the second.
    offered = jnp.array([[False, False], [True, True], [True, False]])
    draft = Draft.chain(jnp.zeros(3, jnp.int32), jnp.ones((3, 2), jnp.int32))
    draft = replace(draft, offered_by=jnp.broadcast_to(offered, (3, 3, 2)))
    path = jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (3, 3))
    # In the last step of the second row the limit cuts the bonus token off.
    for emitted, accepted in (([1, 3, 0], [0, 2, 0]), ([2, 2, 0], [1, 2, 0])):
        info = StepInfo(
            active=jnp.array([True, True, False]),
            emitted=jnp.array(emitted),
            accepted=jnp.array(accepted),
            drafted=jnp.array([2, 2, 0]),
            drafted_at=jnp.array([[True, True], [True, True], [False, False]]),
            scored=jnp.array([3, 3, 0]),
            draft=draft,
            path=path,
        )
        stats = stats.add(info)
    assert stats.steps.tolist() == [2, 2, 0] and stats.scored.tolist() == [6, 6, 0]
    assert stats.drafted.tolist() == [4, 4, 0] and stats.accepted.tolist() == [1, 4, 0]
    assert stats.drafted_at.tolist() == [[2, 2], [2, 2], [0, 0]]
    assert stats.accepted_at.tolist() == [[1, 0], [2, 2], [0, 0]]
    assert stats.histogram.tolist() == [[0, 1, 1, 0], [0, 0, 1, 1], [0, 0, 0, 0]]
    assert stats.drafted_by.tolist() == [[4, 2], [4, 2], [0, 0]]
    assert stats.accepted_by.tolist() == [[1, 1], [4, 2], [0, 0]]
    assert stats.accepted_only_by.tolist() == [[0, 0], [2, 0], [0, 0]]


# --- end tokens that are too early ----------------------------------------------------------------


def test_an_end_token_cannot_come_below_nodes_that_are_too_early_and_can_from_then_on() -> None:
    """Check each row and depth: only the row's own end tokens are masked."""
    stop_token_ids, tokens_before_stop = np.array([[2, -1], [0, 3], [1, 2]]), np.array([1, 3, 0])
    sampling = (
        Sampling()
        .rows(3)
        .replace(
            stop_token_ids=jnp.asarray(stop_token_ids),
            tokens_before_stop=jnp.asarray(tokens_before_stop),
        )
    )
    logits = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    masked = np.asarray(without_stop_tokens(jnp.asarray(logits), sampling, np.array([0, 1, 2, 1])))
    for row, node, token in np.ndindex(3, 4, 5):
        is_early = [0, 1, 2, 1][node] < tokens_before_stop[row] and token in stop_token_ids[row]
        assert masked[row, node, token] == (-np.inf if is_early else logits[row, node, token])
    ids = jnp.array([4, 2, 0])  # the vocabulary of a drafter that has three of the tokens
    narrow = np.asarray(without_stop_tokens(jnp.asarray(logits[:, :1, :3]), sampling, 0, ids))
    np.testing.assert_array_equal(
        narrow[:, 0] == -np.inf, [[False, True, False], [False, False, True], [False] * 3]
    )


def test_a_gpu_masks_end_tokens_without_a_branch() -> None:
    """Check that a GPU has no branch here, because it would wait for its host to choose one.

    Other platforms skip the mask if no row needs it.
    """
    sampling = (
        Sampling()
        .rows(2)
        .replace(
            stop_token_ids=jnp.zeros((2, 1), jnp.int32), tokens_before_stop=jnp.ones(2, jnp.int32)
        )
    )
    traced = jax.jit(lambda logits: without_stop_tokens(logits, sampling, 0)).trace(
        jnp.zeros((2, 3, VOCAB))
    )

    def branches(platform: str) -> int:
        """Count the branches of the program, including those that choose by platform."""
        return traced.lower(lowering_platforms=(platform,)).as_text().count("stablehlo.case")

    assert branches("cuda") == branches("rocm") == branches("cpu") - 1 == branches("tpu") - 1


@pytest.mark.full_except("tree-all rows")
@pytest.mark.parametrize("greedy", ["all rows", "some rows"])
@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_greedy_rows_go_where_the_likeliest_token_is_that_may_come_there(shape, greedy) -> None:
    """Check that each node is masked by its own depth.

    An end token that is too early at the root may come further down. A batch of greedy rows only
    has code of its own.
    """
    rng = np.random.default_rng(0)
    parents = PARENTS if shape == "tree" else np.arange(-1, 3)
    depths = np.array([0, 1, 1, 2, 1, 2, 3, 2]) if shape == "tree" else np.arange(4)
    logits = rng.normal(size=(ROWS, len(parents), VOCAB)).astype(np.float32)
    stop_token_ids, tokens_before_stop = (
        np.stack([rng.integers(0, VOCAB, ROWS), rng.integers(-1, VOCAB, ROWS)], axis=1),
        rng.integers(-1, 5, ROWS),
    )
    is_end = (np.arange(VOCAB) == stop_token_ids[..., None]).any(axis=1)
    is_early = depths[None] < tokens_before_stop[:, None]
    best = np.where(is_early[..., None] & is_end[:, None], -np.inf, logits).argmax(axis=-1)
    assert (best != logits.argmax(axis=-1)).sum() > ROWS / 2  # the mask matters
    draft, tokens, valid = a_tree(rng, ROWS, best, parents)
    temperature = np.where(np.arange(ROWS) < ROWS - 2, 0.0, 1.0 if greedy == "some rows" else 0.0)
    sampling = Sampling(temperature=temperature, top_k=3, top_p=0.2).rows(ROWS)
    assert sampling.greedy == (greedy == "all rows")
    sampling = sampling.replace(
        stop_token_ids=jnp.asarray(stop_token_ids),
        tokens_before_stop=jnp.asarray(tokens_before_stop),
    )
    verdict = verify(
        draft, jnp.asarray(logits), sampling, jax.random.split(jax.random.key(0), ROWS)
    )
    emitted = np.asarray(verdict.emitted(draft))
    for row in np.flatnonzero(temperature == 0):
        path = walk(tokens[row], valid[row], best[row], parents)
        assert verdict.path[row, : len(path)].tolist() == path
        assert emitted[row, : verdict.count[row]].tolist() == [
            *tokens[row, path[1:]],
            best[row, path[-1]],
        ]
    assert set(np.asarray(verdict.count).tolist()) == {1, 2, 3, 4}


@pytest.mark.parametrize("rule", ["block", "rejection", "siblings", "matching", "coupled"])
def test_by_every_rule_the_likeliest_token_comes_that_may_come_there(rule) -> None:
    """Check that the only token that truncation leaves comes at every depth.

    This holds for every rule and every draft.
    """
    rng = np.random.default_rng(0)
    is_chain = rule in ("block", "rejection")
    parents = np.arange(-1, 3) if is_chain else PARENTS
    depths = np.arange(4) if is_chain else np.array([0, 1, 1, 2, 1, 2, 3, 2])
    logits = rng.normal(size=(ROWS, len(parents), VOCAB)).astype(np.float32)
    stop_token_ids, tokens_before_stop = rng.integers(0, VOCAB, ROWS), rng.integers(0, 4, ROWS)
    is_early = depths[None] < tokens_before_stop[:, None]
    is_end = np.arange(VOCAB) == stop_token_ids[:, None]
    best = np.where(is_early[..., None] & is_end[:, None], -np.inf, logits).argmax(axis=-1)
    draft, tokens, _ = a_tree(rng, ROWS, best, parents)
    if is_chain or rule == "siblings":
        draft = draft.replace(q=jnp.full((*tokens.shape, VOCAB), 1 / VOCAB))
    sampling = Sampling(top_k=1).rows(
        ROWS, "independent" if rule in ("siblings", "matching") else rule
    )
    sampling = sampling.replace(
        stop_token_ids=jnp.asarray(stop_token_ids)[:, None],
        tokens_before_stop=jnp.asarray(tokens_before_stop),
    )
    keys = jax.random.split(jax.random.key(0), (5, ROWS) if rule == "coupled" else ROWS)
    verdict = jax.jit(lambda logits: verify(draft, logits, sampling, keys))(logits)
    emitted, counts = np.asarray(verdict.emitted(draft)), np.asarray(verdict.count)
    for row, count in enumerate(counts):
        path = verdict.path[row, :count].tolist()
        assert emitted[row, :count].tolist() == best[row, path].tolist(), row
    assert set(counts.tolist()) == {1, 2, 3, 4}


@pytest.mark.parametrize(
    "rule", ["greedy", "block", "rejection", "siblings", "matching", "coupled"]
)
def test_by_every_rule_the_only_legal_token_of_each_node_comes(rule) -> None:
    """Check that each node is judged by its own mask, whatever the logits and the truncation."""
    rng = np.random.default_rng(0)
    is_chain = rule in ("block", "rejection")
    parents = np.arange(-1, 3) if is_chain else PARENTS
    logits = rng.normal(size=(ROWS, len(parents), VOCAB)).astype(np.float32)
    only = rng.integers(0, VOCAB, logits.shape[:2])
    assert (only != logits.argmax(axis=-1)).mean() > 0.5  # the masks matter
    legal = (np.uint32(1) << only.astype(np.uint32))[..., None]
    draft, tokens, _ = a_tree(rng, ROWS, only, parents)
    if is_chain or rule == "siblings":
        draft = draft.replace(q=jnp.full((*tokens.shape, VOCAB), 1 / VOCAB))
    name = "independent" if rule in ("siblings", "matching", "greedy") else rule
    temperature = 0.0 if rule == "greedy" else 0.8
    sampling = Sampling(temperature=temperature, top_p=0.5).rows(ROWS, name)
    keys = jax.random.split(jax.random.key(0), (5, ROWS) if rule == "coupled" else ROWS)
    verdict = jax.jit(lambda logits: verify(draft, logits, sampling, keys, jnp.asarray(legal)))(
        logits
    )
    emitted, counts = np.asarray(verdict.emitted(draft)), np.asarray(verdict.count)
    for row, count in enumerate(counts):
        path = verdict.path[row, :count].tolist()
        assert emitted[row, :count].tolist() == only[row, path].tolist(), row
    assert set(counts.tolist()) == {1, 2, 3, 4}


def test_a_text_may_end_with_its_token_number_min_new_tokens_plus_one() -> None:
    state = SimpleNamespace(
        sampling=sampled("block"),
        stop_token_ids=jnp.array([[2], [3]]),
        min_lengths=jnp.array([9, 5]),
        lengths=jnp.array([7, 5]),
    )
    sampling = DecodeState.next_sampling.fget(state)
    assert sampling.tokens_before_stop.tolist() == [2, 0]
    assert sampling.stop_token_ids.tolist() == [[2], [3]]
