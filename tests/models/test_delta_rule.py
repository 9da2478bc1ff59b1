"""The gated delta rule: chunks and trees against one token after the other, in float64."""

from typing import Any

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
    """Return a random state, and tokens.

    Some heads forget nearly all at every token, and others hardly anything.
    """

    def unit(*shape: int) -> np.ndarray:
        x = rng.normal(size=shape)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    by_value_head = rows, HEADS * GROUP, count
    rate = np.geomspace(1e-3, 10.0, HEADS * GROUP)[None, :, None]
    arrays = (
        rng.normal(size=(rows, HEADS * GROUP, dk, dv)),
        unit(rows, HEADS, count, dk) * dk**-0.5,
        unit(rows, HEADS, count, dk),
        rng.normal(size=(*by_value_head, dv)),
        rng.uniform(size=by_value_head),
        -rate * rng.exponential(size=by_value_head),
    )
    # The oracle gets the numbers in float32 too, so that both sides have the same ones.
    state, *rest = (x.astype(np.float32) for x in arrays)
    return state, DeltaRuleInputs(*rest)


def one_token(state: np.ndarray, q, k, v, beta, log_alpha) -> tuple[np.ndarray, np.ndarray]:
    """Return the state ``[dv, dk]`` of one head after a token, and the output of the token.

    S' = alpha S (I - beta k k^T) + beta v k^T, y = S' q.
    """
    forgets = np.eye(len(k)) - beta * np.outer(k, k)
    state = np.exp(log_alpha) * state @ forgets + beta * np.outer(v, k)
    return state, state @ q


def by_paths(
    state: np.ndarray, tokens: DeltaRuleInputs, paths: list[list[int]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the output of the last token of each path, and the state there.

    Each of the ``paths`` is read from its beginning. The outputs are ``[B, h, paths, dv]``, the
    states ``[B, h, paths, dk, dv]``.
    """
    q, k, v, beta, log_alpha = (np.asarray(x, np.float64) for x in tokens[:5])
    rows, heads = v.shape[:2]
    outputs = np.zeros((rows, heads, len(paths), v.shape[-1]))
    states = np.zeros((rows, heads, len(paths), *state.shape[2:]))
    for row, head, index in np.ndindex(rows, heads, len(paths)):
        key_head = head // (heads // q.shape[1])
        current, y = state[row, head].astype(np.float64).T, np.zeros(v.shape[-1])
        for token in paths[index]:
            query_and_key = q[row, key_head, token], k[row, key_head, token]
            rest = (x[row, head, token] for x in (v, beta, log_alpha))
            current, y = one_token(current, *query_and_key, *rest)
        outputs[row, head, index], states[row, head, index] = y, current.T
    return outputs, states


def by_token(state: np.ndarray, tokens: DeltaRuleInputs) -> tuple[np.ndarray, np.ndarray]:
    """Return the output of each token of a chain, and the state after each.

    The result is that of `by_paths`, with one reading for all tokens.
    """
    q, k, v, beta, log_alpha = (np.asarray(x, np.float64) for x in tokens[:5])
    current, outputs, states = state.astype(np.float64), [], []
    q, k = (np.repeat(x, v.shape[1] // x.shape[1], axis=1) for x in (q, k))
    for i in range(v.shape[2]):
        forgets = (
            np.eye(k.shape[-1])
            - beta[:, :, i, None, None] * k[:, :, i, :, None] * k[:, :, i, None, :]
        )
        decayed = np.exp(log_alpha[:, :, i])[..., None, None] * forgets @ current
        current = decayed + beta[:, :, i, None, None] * k[:, :, i, :, None] * v[:, :, i, None, :]
        outputs.append(np.einsum("bhk,bhkv->bhv", q[:, :, i], current))
        states.append(current)
    return np.stack(outputs, 2), np.stack(states, 2)


def part(tokens: Any, start: int, stop: int) -> Any:
    """Return tokens ``start`` to ``stop`` of inputs or entries."""
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
    """Return the parents of ``count`` nodes.

    Several nodes have none: all of them hang below a committed state.
    """
    return [int(rng.integers(-1, node)) for node in range(count)]


def near(result, expected, tolerance: float = TOLERANCE) -> bool:
    return bool(np.abs(np.asarray(result, np.float64) - expected).max() < tolerance)


def test_two_oracles_agree() -> None:
    state, tokens = drawn(np.random.default_rng(0), 2, 7)
    y, states = by_token(state, tokens)
    expected, expected_states = by_paths(state, tokens, paths_of([-1, 0, 1, 2, 3, 4, 5]))
    assert near(y, expected, 1e-12) and near(states, expected_states, 1e-12)


# --- trees ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 2, 17, 40])
def test_a_tree_in_one_pass_is_as_each_of_its_paths(count) -> None:
    rng = np.random.default_rng(count)
    state, tokens = drawn(rng, 2, count)
    trees = [paths_of(random_tree(rng, count)) for _ in range(2)]  # one for each row
    y, node = READ(state, tokens, np.stack([mask_of(paths) for paths in trees]))
    for row, paths in enumerate(trees):
        one_row = slice(row, row + 1)
        row_tokens = jax.tree.map(lambda x, one_row=one_row: x[one_row], tokens)
        expected, states = by_paths(state[one_row], row_tokens, paths)
        assert near(y[one_row], expected)
        for index in {0, count // 2, count - 1}:
            padded = np.resize(paths[index], count)
            path = Node(*(x[one_row][:, :, padded] for x in map(np.asarray, node.parts)))
            result = WRITE(state[one_row], path, np.array([len(paths[index])]))
            assert near(result, states[:, :, index])


def drawn_by_rows(
    rng: np.random.Generator, count: int, dk: int
) -> tuple[np.ndarray, DeltaRuleInputs]:
    """Return the same as `drawn`, for a table whose rows decay by themselves."""
    state, tokens = drawn(rng, 2, count, dk)
    heads = slice(0, HEADS)
    rates = np.geomspace(1e-3, 10.0, dk)
    log_alpha = (-rates * rng.exponential(size=(2, HEADS, count, dk))).astype(np.float32)
    of_heads = (tokens.v[:, heads], tokens.beta[:, heads], log_alpha)
    return state[:, heads], DeltaRuleInputs(tokens.q, tokens.k, *of_heads)


@pytest.mark.full
@pytest.mark.parametrize("count", [16, 40])
def test_a_tree_of_rows_that_decay_by_themselves_is_as_each_of_its_paths(count) -> None:
    """Also below tokens that were drafted before. Of 40 nodes a few are computed at a time."""
    rng = np.random.default_rng(count)
    drafted = count // 2
    state, tokens = drawn_by_rows(rng, count, 11)
    paths = paths_of(random_tree(rng, count))
    mask = mask_of(paths)
    expected, _ = by_paths(state, tokens, paths)
    y, node = READ(state, tokens, mask[None])
    assert near(y, expected)
    before = part(node, 0, drafted)
    y, _ = READ(
        state,
        part(tokens, drafted, count),
        mask[None, drafted:, drafted:],
        (before, mask[None, drafted:, :drafted]),
    )
    assert near(y, expected[:, :, drafted:])


def test_a_tree_of_such_rows_holds_no_array_of_all_their_shares() -> None:
    """Compare with one number for each row of a table and pair of nodes."""
    dk, count = 128, 64
    _, tokens = drawn_by_rows(np.random.default_rng(0), count, dk)
    state = np.zeros((2, HEADS, dk, DV), np.float32)
    compiled = READ.lower(state, tokens, np.ones((1, count, count), bool)).compile()
    all_shares = 4 * 2 * HEADS * dk * count * count
    assert compiled.memory_analysis().temp_size_in_bytes < all_shares / 2


def ancestors(paths: list[list[int]]) -> np.ndarray:
    return mask_of(paths) & ~np.eye(len(paths), dtype=bool)


def test_a_tree_level_by_level_is_as_each_of_its_paths() -> None:
    """A drafter reads nodes that see themselves, and ancestors that lie in slots."""
    rng = np.random.default_rng(5)
    parents = random_tree(rng, 40)
    state, tokens = drawn(rng, 2, 40)
    paths = paths_of(parents)
    expected, _ = by_paths(state, tokens, paths)
    depths = np.array([len(path) for path in paths])
    shapes = ((HEADS, 40, DK), (6, 40, DV), (6, 40))
    slots = Node(*(np.full((2, *shape), 7.0, np.float32) for shape in shapes))
    for depth in range(1, depths.max() + 1):
        level = np.flatnonzero(depths == depth)
        repeated = np.resize(level, 40)  # nodes are repeated, so that all levels share a program
        y, node = READ(
            state,
            DeltaRuleInputs(*(x[:, :, repeated] for x in tokens[:5])),
            None,
            (slots, ancestors(paths)[None, repeated]),
        )
        assert near(y[:, :, : len(level)], expected[:, :, level])
        for slot, new in zip(slots.parts, node.parts, strict=True):
            slot[:, :, level] = new[:, :, : len(level)]


def test_a_tree_below_drafted_tokens_is_as_each_of_its_paths() -> None:
    """The tokens of a call see each other, and those read before on their paths.

    Some of them see nothing of what was read before.
    """
    rng = np.random.default_rng(6)
    state, tokens = drawn(rng, 2, 24)
    paths, split, unused = paths_of(random_tree(rng, 24)), 11, 3
    mask = mask_of(paths)
    _, node = READ(state, part(tokens, 0, split), mask[None, :split, :split])
    # Slots that no token sees may hold any number.
    arrays = map(np.asarray, node.parts)
    slots = Node(*(np.concatenate([x, np.full_like(x[:, :, :unused], 7.0)], 2) for x in arrays))
    visible = np.pad(mask[split:, :split], ((0, 0), (0, unused)))[None]
    y, _ = READ(state, part(tokens, split, 24), mask[None, split:, split:], (slots, visible))
    assert near(y, by_paths(state, tokens, paths)[0][:, :, split:])


# --- chains ---------------------------------------------------------------------------------------


@pytest.mark.full_except("65")
@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_a_chain_is_as_token_by_token(length) -> None:
    state, tokens = drawn(np.random.default_rng(length), 2, length)
    expected, states = by_token(state, tokens)
    y, node, after = jax.jit(read_chain)(state, tokens)
    assert y.shape == expected.shape
    assert node.k.shape[2] == node.u.shape[2] == node.log_alpha.shape[2] == length
    assert near(y, expected) and near(after, states[:, :, -1])
    counts = np.array([length, length // 2])
    for row, count in enumerate(counts):
        row_state = WRITE(state, node, counts)[row]
        assert near(row_state, states[row, :, count - 1] if count else state[row])


@pytest.mark.full
@pytest.mark.parametrize("length", [64, 200])
def test_rows_count_as_many_of_their_tokens_as_they_are_told(length) -> None:
    counts = np.array([0, 1, 63, length - 1])
    state, tokens = drawn(np.random.default_rng(1), 4, length)
    expected, states = by_token(state, tokens)
    y, node, after = jax.jit(read_chain)(state, tokens, counts)
    written_states = WRITE(state, node, counts)
    np.testing.assert_array_equal(after[0], state[0])  # nothing of it counts: bit for bit
    np.testing.assert_array_equal(written_states[0], state[0])
    for row, count in enumerate(counts[1:], start=1):
        assert near(y[row, :, :count], expected[row, :, :count])
        assert near(after[row], states[row, :, count - 1])
        assert near(written_states[row], states[row, :, count - 1])


def test_what_does_not_count_leaves_no_trace() -> None:
    """Tokens that do not count may hold anything.

    Even infinite updates do not enter the state, not as 0 times infinity either.
    """
    state, tokens = drawn(np.random.default_rng(2), 2, 6)
    counts, read = np.array([2, 0]), jax.jit(read_chain)
    _, node, after = read(state, tokens, counts)
    for name in ("k", "u", "log_alpha"):
        part = np.array(getattr(node, name))
        part[:, :, 2:], part[1] = np.inf, np.nan
        np.testing.assert_array_equal(
            WRITE(state, node._replace(**{name: part}), counts), WRITE(state, node, counts)
        )
    _, padding = drawn(np.random.default_rng(3), 2, 6)
    changed = DeltaRuleInputs(
        *(
            np.concatenate([x[:, :, :2], pad[:, :, 2:]], 2)
            for x, pad in zip(tokens[:5], padding[:5], strict=True)
        )
    )
    np.testing.assert_array_equal(read(state, changed, counts)[2], after)


@pytest.mark.full
def test_a_path_written_in_pieces_is_as_at_once() -> None:
    """Drafts of a text of three chunks follow each other, each from the state before it."""
    state, tokens = drawn(np.random.default_rng(4), 2, 150)
    _, states = by_token(state, tokens)
    current, start = jnp.asarray(state), 0
    for size in (1, 7, 64, 60, 18):
        _, node = READ(
            current, part(tokens, start, start + size), np.tril(np.ones((1, size, size), bool))
        )
        current, start = WRITE(current, node), start + size
        assert near(current, states[:, :, start - 1])
    assert start == 150


@pytest.mark.parametrize("by_rows", [False, True])
def test_a_path_of_thousands_of_tokens_is_written_at_once(by_rows) -> None:
    """Nearly all of them are forgotten, and the last five are not."""
    rng, count = np.random.default_rng(5), 4096
    _, tokens = drawn_by_rows(rng, count, DK) if by_rows else drawn(rng, 2, count)
    log_alpha = np.full_like(tokens.log_alpha, -150.013)
    log_alpha[:, :, -5:] = -0.3
    path = Node(tokens.k, np.asarray(tokens.v), log_alpha)
    shares = np.exp(-0.3 * np.arange(5)[::-1])
    k, v = (np.asarray(part, np.float64)[:, :, -6:] for part in (tokens.k, tokens.v))
    k = np.repeat(k, v.shape[1] // k.shape[1], axis=1)
    # The sixth from the end decays five times by 0.3.
    expected = np.einsum("bhnk,bhnv,n->bhkv", k, v, np.append(np.exp(-1.5), shares))
    assert near(WRITE(np.zeros(expected.shape, np.float32), path), expected)


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
    """The error is small in float32, and no larger than by rounding the inputs in bfloat16.

    It does not grow along the text.
    """
    state, tokens = drawn(np.random.default_rng(8), 1, length, dk=32, dv=32)
    in_bfloat16 = [x.astype(jnp.bfloat16).astype(jnp.float32) for x in tokens[:3]]
    rounded = DeltaRuleInputs(*in_bfloat16, *tokens[3:])
    expected, expected_rounded = by_token(state, tokens), by_token(state, rounded)
    read = jax.jit(read_chain)
    (y, _, after), (coarse, _, coarse_after) = read(state, tokens), read(state, rounded)

    def error(
        y: jax.Array, after: jax.Array, expected: tuple[np.ndarray, np.ndarray]
    ) -> tuple[float, float]:
        outputs, last_state = expected[0], expected[1][:, :, -1]
        return (
            np.abs(y - outputs).max() / np.abs(outputs).max(),
            np.abs(after - last_state).max() / np.abs(last_state).max(),
        )

    exact, by_rounding = error(y, after, expected), error(coarse, coarse_after, expected)
    print(f"{length} tokens, output and state: float32 {exact}, bfloat16 {by_rounding}")
    assert max(exact) < 2e-6 and max(error(coarse, coarse_after, expected_rounded)) < 1e-5
    assert max(by_rounding) < 2e-2
    early, late = np.array_split(np.abs(coarse - expected[0]), 2, axis=2)
    assert late.mean() < 1.5 * early.mean()


@pytest.mark.parametrize("by_rows", [False, True])
def test_few_digits_are_lost_where_every_second_token_forgets_all(by_rows) -> None:
    """The sums of logarithms reach thousands, and those between two tokens a thousandth."""
    rng, count = np.random.default_rng(9), 60
    state, tokens = drawn_by_rows(rng, count, 16) if by_rows else drawn(rng, 2, count)
    forgets_all = (np.arange(count) % 2 == 0)[:, None] if by_rows else np.arange(count) % 2 == 0
    small = -1e-3 * rng.uniform(size=tokens.log_alpha.shape)
    log_alpha = np.where(forgets_all, -150.0, small).astype(np.float32)
    tokens = tokens._replace(log_alpha=log_alpha)
    outputs, states = by_paths(state, tokens, paths_of([*range(-1, count - 1)]))
    y, _, after = jax.jit(read_chain)(state, tokens)
    of_tree, _ = READ(state, tokens, np.tril(np.ones((1, count, count), bool)))
    for ours, exact in ((y, outputs), (of_tree, outputs), (after, states[:, :, -1])):
        assert np.abs(ours - exact).max() < 2e-6 * np.abs(exact).max()


# --- wrong readings -------------------------------------------------------------------------------


def test_wrong_readings_are_far_from_the_oracle() -> None:
    """The tests above would find each of these: it is off by far more than they allow."""
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
    expected_state, length = states[:, :, longest], len(paths[longest])
    # Nothing is forgotten.
    without_decay = path._replace(log_alpha=0 * path.log_alpha)
    assert not near(WRITE(state, without_decay), expected_state, far)
    # Only the last token of the path makes the state decay.
    last_alone = np.where(np.arange(length) < length - 1, 0, path.log_alpha)
    assert not near(WRITE(state, path._replace(log_alpha=last_alone)), expected_state, far)
    # Rejected nodes are written too.
    assert not near(WRITE(state, node), expected_state, far)


@pytest.mark.full
def test_gradients_are_those_of_the_rule() -> None:
    """Gradients along a direction equal differences of the oracle in float64.

    The text reaches beyond the end of a chunk, and it is read as a chain and as a tree.
    """
    rng = np.random.default_rng(10)
    state, tokens = drawn(rng, 1, CHUNK + 3)
    paths = paths_of([-1, *range(CHUNK + 2)])
    weights = rng.normal(size=(1, HEADS * GROUP, CHUNK + 3, DV))
    direction = jax.tree.map(
        lambda x: rng.normal(size=x.shape) * np.abs(np.asarray(x)).mean(), tokens
    )

    def shifted_loss(step: float) -> float:
        shifted = jax.tree.map(lambda x, d: np.asarray(x, np.float64) + step * d, tokens, direction)
        return float(np.sum(weights * by_token(state, shifted)[0]))

    expected = (shifted_loss(1e-5) - shifted_loss(-1e-5)) / 2e-5
    mask = jnp.asarray(mask_of(paths)[None])
    readings = (lambda x: read_chain(state, x)[0], lambda x: read_tree(state, x, mask)[0])
    for reading in readings:
        gradient = jax.jit(
            jax.grad(lambda x, reading=reading: jnp.sum(weights.astype(np.float32) * reading(x)))
        )(tokens)
        result = sum(
            float(np.sum(np.asarray(g, np.float64) * d))
            for g, d in zip(gradient[:5], direction[:5], strict=True)
        )
        assert abs(result - expected) < 1e-3 * abs(expected)


def test_documents_that_lie_end_to_end_are_each_read_from_nothing() -> None:
    _, tokens = drawn(np.random.default_rng(5), 2, 9)
    documents = np.array([[0, 0, 0, 1, 1, 1, 1, 2, 2], [4, 4, 4, 4, 4, 4, 4, 4, 7]])
    result = jax.jit(read_documents)(tokens, documents)
    empty = np.zeros((2, HEADS * GROUP, DK, DV), np.float32)
    for row in range(2):
        for document in set(documents[row].tolist()):
            positions = np.flatnonzero(documents[row] == document)
            alone, _ = by_token(empty, part(tokens, positions[0], positions[-1] + 1))
            assert near(result[row, :, positions].swapaxes(0, 1), alone[row])
