"""The gated delta rule: chunks and trees against one token after the other, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.delta_rule import (
    CHUNK,
    DeltaRuleInputs,
    Node,
    read_chain,
    read_documents,
    read_tree,
    write,
)

HEADS, GROUP, DK, DV = 2, 3, 8, 5
TOLERANCE = 1e-5
READ, WRITE = jax.jit(read_tree), jax.jit(write)


# --- the oracle: numpy, float64, token by token ---------------------------------------------------


def drawn(
    rng: np.random.Generator, rows: int, count: int, dk: int = DK, dv: int = DV
) -> tuple[np.ndarray, DeltaRuleInputs]:
    """A state, and tokens; some heads forget nearly all at every token, and others hardly anything."""

    def unit(*shape: int) -> np.ndarray:
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    of_values = rows, HEADS * GROUP, count
    rate = np.geomspace(1e-3, 10.0, HEADS * GROUP)[None, :, None]
    given = (
        rng.normal(size=(rows, HEADS * GROUP, dk, dv)),
        unit(rows, HEADS, count, dk) * dk**-0.5,
        unit(rows, HEADS, count, dk),
        rng.normal(size=(*of_values, dv)),
        rng.uniform(size=of_values),
        -rate * rng.exponential(size=of_values),
    )
    state, *rest = (x.astype(np.float32) for x in given)  # both sides are given the same numbers
    return state, DeltaRuleInputs(*rest)


def one_token(state: np.ndarray, q, k, v, beta, log_alpha) -> tuple[np.ndarray, np.ndarray]:
    """Of one head, the state ``[dv, dk]`` and what a token comes to: S' = alpha S (I - beta k k^T) + beta v k^T, y = S' q."""
    forgets = np.eye(len(k)) - beta * np.outer(k, k)
    state = np.exp(log_alpha) * state @ forgets + beta * np.outer(v, k)
    return state, state @ q


def by_paths(
    state: np.ndarray, tokens: DeltaRuleInputs, paths: list[list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """What the last token of each of the ``paths`` comes to, ``[B, h, paths, dv]``, and the state there,
    ``[B, h, paths, dk, dv]``: each path is read from its beginning."""
    q, k, v, beta, log_alpha = (np.asarray(x, np.float64) for x in tokens)
    rows, heads = v.shape[:2]
    found = np.zeros((rows, heads, len(paths), v.shape[-1]))
    states = np.zeros((rows, heads, len(paths), *state.shape[2:]))
    for row, head, (number, path) in (
        (b, h, p) for b in range(rows) for h in range(heads) for p in enumerate(paths)
    ):
        now, y, of_keys = (
            state[row, head].astype(np.float64).T,
            np.zeros(v.shape[-1]),
            (row, head // (heads // q.shape[1])),
        )
        for i in path:
            of_values = row, head, i
            now, y = one_token(
                now,
                q[*of_keys, i],
                k[*of_keys, i],
                v[of_values],
                beta[of_values],
                log_alpha[of_values],
            )
        found[row, head, number], states[row, head, number] = y, now.T
    return found, states


def by_token(state: np.ndarray, tokens: DeltaRuleInputs) -> tuple[np.ndarray, np.ndarray]:
    """Of a chain, what each token comes to, and the state after each: as `by_paths`, with one reading for all."""
    q, k, v, beta, log_alpha = (np.asarray(x, np.float64) for x in tokens)
    now, found, states = state.astype(np.float64), [], []
    q, k = (np.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    for i in range(v.shape[2]):
        forgets = (
            np.eye(k.shape[-1])
            - beta[:, :, i, None, None] * k[:, :, i, :, None] * k[:, :, i, None, :]
        )
        kept = np.exp(log_alpha[:, :, i])[..., None, None] * forgets @ now
        now = kept + beta[:, :, i, None, None] * k[:, :, i, :, None] * v[:, :, i, None, :]
        found.append(np.einsum("bhk,bhkv->bhv", q[:, :, i], now))
        states.append(now)
    return np.stack(found, 2), np.stack(states, 2)


def part(tokens: DeltaRuleInputs, start: int, stop: int) -> DeltaRuleInputs:
    return jax.tree.map(lambda x: x[:, :, start:stop], tokens)


def paths_of(parents: list[int]) -> list[list[int]]:
    paths: list[list[int]] = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    return paths


def mask_of(paths: list[list[int]]) -> np.ndarray:
    mask = np.zeros((len(paths), len(paths)), bool)
    for node, path in enumerate(paths):
        mask[node, path] = True
    return mask


def random_tree(rng: np.random.Generator, count: int) -> list[int]:
    """The parents of ``count`` nodes, several of them without one: all hang below a committed state."""
    return [int(rng.integers(-1, node)) for node in range(count)]


def near(found, expected, tolerance: float = TOLERANCE) -> bool:
    return bool(np.abs(np.asarray(found, np.float64) - expected).max() < tolerance)


def test_two_oracles_agree() -> None:
    state, tokens = drawn(np.random.default_rng(0), 2, 7)
    y, states = by_token(state, tokens)
    expected, at = by_paths(state, tokens, paths_of([-1, 0, 1, 2, 3, 4, 5]))
    assert near(y, expected, 1e-12) and near(states, at, 1e-12)


# --- trees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 17, 40])
def test_a_tree_in_one_pass_is_as_each_of_its_paths(count) -> None:
    rng = np.random.default_rng(count)
    state, tokens = drawn(rng, 2, count)
    trees = [paths_of(random_tree(rng, count)) for _ in range(2)]  # one for each row
    y, node = READ(state, tokens, np.stack([mask_of(paths) for paths in trees]))
    for row, paths in enumerate(trees):
        own = slice(row, row + 1)
        expected, states = by_paths(
            state[own], jax.tree.map(lambda x, own=own: x[own], tokens), paths
        )
        assert near(y[own], expected)
        for number in {0, count // 2, count - 1}:
            padded = np.resize(paths[number], count)
            path = Node(*(x[own][:, :, padded] for x in map(np.asarray, node)))
            assert near(
                WRITE(state[own], path, np.array([len(paths[number])])), states[:, :, number]
            )


def ancestors(paths: list[list[int]]) -> np.ndarray:
    return mask_of(paths) & ~np.eye(len(paths), dtype=bool)


def test_a_tree_level_by_level_is_as_each_of_its_paths() -> None:
    """As a drafter reads it: the nodes of a level see themselves, and their ancestors, which lie in slots."""
    rng = np.random.default_rng(5)
    parents = random_tree(rng, 40)
    state, tokens = drawn(rng, 2, 40)
    paths = paths_of(parents)
    expected, _ = by_paths(state, tokens, paths)
    depths = np.array([len(path) for path in paths])
    slots = Node(
        *(
            np.full((2, *shape), 7.0, np.float32)
            for shape in ((HEADS, 40, DK), (6, 40, DV), (6, 40))
        )
    )
    for depth in range(1, depths.max() + 1):
        level = np.flatnonzero(depths == depth)
        wide = np.resize(
            level, 40
        )  # some of them several times, so that all levels share a program
        y, node = READ(
            state,
            DeltaRuleInputs(*(x[:, :, wide] for x in tokens)),
            None,
            (slots, ancestors(paths)[None, wide]),
        )
        assert near(y[:, :, : len(level)], expected[:, :, level])
        for slot, new in zip(slots, node, strict=True):
            slot[:, :, level] = new[:, :, : len(level)]


def test_a_tree_below_drafted_tokens_is_as_each_of_its_paths() -> None:
    """A call of several tokens that see each other, and of those read before each sees its own path, or nothing."""
    rng = np.random.default_rng(6)
    state, tokens = drawn(rng, 2, 24)
    paths, split, unused = paths_of(random_tree(rng, 24)), 11, 3
    mask = mask_of(paths)
    _, node = READ(state, part(tokens, 0, split), mask[None, :split, :split])
    # Slots of which no token sees anything may hold any number.
    slots = Node(
        *(
            np.concatenate([x, np.full_like(x[:, :, :unused], 7.0)], 2)
            for x in map(np.asarray, node)
        )
    )
    seen = np.pad(mask[split:, :split], ((0, 0), (0, unused)))[None]
    y, _ = READ(state, part(tokens, split, 24), mask[None, split:, split:], (slots, seen))
    assert near(y, by_paths(state, tokens, paths)[0][:, :, split:])


# --- chains ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_a_chain_is_as_token_by_token(length) -> None:
    state, tokens = drawn(np.random.default_rng(length), 2, length)
    expected, states = by_token(state, tokens)
    y, node, after = jax.jit(read_chain)(state, tokens)
    assert (
        y.shape == expected.shape
        and node.k.shape[2] == node.u.shape[2] == node.log_alpha.shape[2] == length
    )
    assert near(y, expected) and near(after, states[:, :, -1])
    some = np.array([length, length // 2])
    for row, count in enumerate(some):
        written = WRITE(state, node, some)[row]
        assert near(written, states[row, :, count - 1] if count else state[row])


@pytest.mark.parametrize("length", [64, 200])
def test_rows_count_as_many_of_their_tokens_as_they_are_told(length) -> None:
    counts = np.array([0, 1, 63, length - 1])
    state, tokens = drawn(np.random.default_rng(1), 4, length)
    expected, states = by_token(state, tokens)
    y, node, after = jax.jit(read_chain)(state, tokens, counts)
    written = WRITE(state, node, counts)
    np.testing.assert_array_equal(after[0], state[0])  # of which nothing counts: bit for bit
    np.testing.assert_array_equal(written[0], state[0])
    for row, count in enumerate(counts[1:], start=1):
        assert near(y[row, :, :count], expected[row, :, :count])
        assert near(after[row], states[row, :, count - 1]) and near(
            written[row], states[row, :, count - 1]
        )


def test_what_does_not_count_leaves_no_trace() -> None:
    """Padding may be of any size: of infinite updates nothing may come in, not even as 0 times that."""
    state, tokens = drawn(np.random.default_rng(2), 2, 6)
    counts, read = np.array([2, 0]), jax.jit(read_chain)
    _, node, after = read(state, tokens, counts)
    for name in ("k", "u", "log_alpha"):
        part = np.array(getattr(node, name))
        part[:, :, 2:], part[1] = np.inf, np.nan
        np.testing.assert_array_equal(
            WRITE(state, node._replace(**{name: part}), counts), WRITE(state, node, counts)
        )
    other = drawn(np.random.default_rng(3), 2, 6)[1]
    changed = DeltaRuleInputs(
        *(np.concatenate([a[:, :, :2], b[:, :, 2:]], 2) for a, b in zip(tokens, other, strict=True))
    )
    np.testing.assert_array_equal(read(state, changed, counts)[2], after)


def test_a_path_written_in_pieces_is_as_at_once() -> None:
    """A draft after the other, each from the state that the one before left, of a text of three chunks."""
    state, tokens = drawn(np.random.default_rng(4), 2, 150)
    _, states = by_token(state, tokens)
    now, start = jnp.asarray(state), 0
    for size in (1, 7, 64, 60, 18):
        _, node = READ(
            now, part(tokens, start, start + size), np.tril(np.ones((1, size, size), bool))
        )
        now, start = WRITE(now, node), start + size
        assert near(now, states[:, :, start - 1])
    assert start == 150


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    state, tokens = drawn(np.random.default_rng(7), 3, 70)
    read = jax.jit(read_chain)
    together = read(state, tokens, np.array([70, 30, 5]))
    alone = read(state[1:2], jax.tree.map(lambda x: x[1:2], tokens), np.array([30]))
    np.testing.assert_array_equal(together[0][1:2, :, :30], alone[0][:, :, :30])
    np.testing.assert_array_equal(together[2][1:2], alone[2])


# --- precision ------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [512, pytest.param(4096, marks=pytest.mark.thorough)])
def test_over_a_long_text_few_digits_are_lost(length) -> None:
    """Of numbers in float32 few; of queries, keys and values in bfloat16 no more than by their own rounding, early or late."""
    state, tokens = drawn(np.random.default_rng(8), 1, length, dk=32, dv=32)
    of_bfloat16 = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in tokens[:3]]
    rounded = DeltaRuleInputs(*of_bfloat16, *tokens[3:])
    expected, same = by_token(state, tokens), by_token(state, rounded)
    read = jax.jit(read_chain)
    (y, _, after), (coarse, _, coarse_after) = read(state, tokens), read(state, rounded)

    def error(
        y: jax.Array, after: jax.Array, expected: tuple[np.ndarray, np.ndarray]
    ) -> tuple[float, float]:
        of_all, last = expected[0], expected[1][:, :, -1]
        return (
            np.abs(y - of_all).max() / np.abs(of_all).max(),
            np.abs(after - last).max() / np.abs(last).max(),
        )

    exact, of_rounding = error(y, after, expected), error(coarse, coarse_after, expected)
    print(f"{length} tokens, output and state: float32 {exact}, bfloat16 {of_rounding}")
    assert max(exact) < 2e-6 and max(error(coarse, coarse_after, same)) < 1e-5
    assert max(of_rounding) < 2e-2
    early, late = np.array_split(np.abs(coarse - expected[0]), 2, axis=2)
    assert late.mean() < 1.5 * early.mean()


# --- wrong readings -------------------------------------------------------------------------------


def test_wrong_readings_are_far_from_the_oracle() -> None:
    """Each of these would be found by the tests above: it is off by far more than they allow."""
    rng = np.random.default_rng(9)
    state, tokens = drawn(rng, 1, 12)
    paths = paths_of(random_tree(rng, 12))
    expected, states = by_paths(state, tokens, paths)
    y, node = READ(state, tokens, mask_of(paths)[None])
    longest = max(range(12), key=lambda node: len(paths[node]))
    path = jax.tree.map(lambda x: x[:, :, np.array(paths[longest])], node)
    assert near(y, expected) and near(WRITE(state, path), states[:, :, longest])
    far = 1000 * TOLERANCE

    siblings_seen, _ = READ(state, tokens, np.tril(np.ones((1, 12, 12), bool)))
    assert not near(siblings_seen, expected, far)
    assert not near(
        WRITE(state, path._replace(log_alpha=0 * path.log_alpha)), states[:, :, longest], far
    )  # nothing forgotten
    last_alone = np.where(
        np.arange(len(paths[longest])) < len(paths[longest]) - 1, 0, path.log_alpha
    )  # not along the path
    assert not near(WRITE(state, path._replace(log_alpha=last_alone)), states[:, :, longest], far)
    assert not near(WRITE(state, node), states[:, :, longest], far)  # the rejected ones too


def test_gradients_are_those_of_the_rule() -> None:
    """Along a direction, against differences of the oracle in float64; over the end of a chunk, and of a tree."""
    rng = np.random.default_rng(10)
    state, tokens = drawn(rng, 1, CHUNK + 3)
    paths = paths_of([-1, *range(CHUNK + 2)])
    weights = rng.normal(size=(1, HEADS * GROUP, CHUNK + 3, DV))
    direction = jax.tree.map(
        lambda x: rng.normal(size=x.shape) * np.abs(np.asarray(x)).mean(), tokens
    )

    def moved(step: float) -> float:
        there = jax.tree.map(lambda x, d: np.asarray(x, np.float64) + step * d, tokens, direction)
        return float(np.sum(weights * by_token(state, there)[0]))

    expected = (moved(1e-5) - moved(-1e-5)) / 2e-5
    mask = jnp.asarray(mask_of(paths)[None])
    readings = (lambda x: read_chain(state, x)[0], lambda x: read_tree(state, x, mask)[0])
    for reading in readings:
        gradient = jax.jit(
            jax.grad(lambda x, reading=reading: jnp.sum(weights.astype(np.float32) * reading(x)))
        )(tokens)
        found = sum(
            float(np.sum(np.asarray(g, np.float64) * d))
            for g, d in zip(gradient, direction, strict=True)
        )
        assert abs(found - expected) < 1e-3 * abs(expected)


def test_documents_that_lie_end_to_end_are_each_read_from_nothing() -> None:
    _, tokens = drawn(np.random.default_rng(5), 2, 9)
    documents = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2], [4, 4, 4, 4, 4, 4, 4, 4, 7]])
    result = jax.jit(read_documents)(tokens, documents)
    empty = np.zeros((2, HEADS * GROUP, DK, DV), np.float32)
    for row in range(2):
        for document in set(documents[row].tolist()):
            places = np.flatnonzero(documents[row] == document)
            alone, _ = by_token(empty, part(tokens, places[0], places[-1] + 1))
            assert near(result[row, :, places].swapaxes(0, 1), alone[row])
