import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax import sampling
from specjax.evaluation.conformance import FALSE_ALARM, g_test
from specjax.sampling import Sampling, draw, probabilities, split_keys


def oracle(logits: np.ndarray, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0) -> np.ndarray:
    """Compute the definition, token by token, for one vector of distinct logits."""
    if temperature == 0:
        return np.eye(len(logits))[np.argmax(logits)]
    p = np.exp(logits / temperature - np.max(logits / temperature))
    order = np.argsort(-p)
    if top_k:
        p[order[top_k:]] = 0
    p /= p.sum()
    if top_p < 1:
        mass = 0.0
        for token in order:
            if mass >= top_p:
                p[token] = 0
            mass += p[token]
    p[p < min_p * p.max()] = 0
    return p / p.sum()


SETTINGS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 2.0, "top_k": 3},
    {"top_k": 1},
    {"top_k": 100},
    {"top_p": 0.5},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.5, "top_k": 7, "top_p": 0.8},
    {"min_p": 0.3},
    {"temperature": 1.4, "top_k": 9, "top_p": 0.95, "min_p": 0.1},
    {"top_p": 1e-6},
    {"min_p": 1.0},
]


@pytest.mark.full_except("False")
@pytest.mark.parametrize("mixed", [False, True])
def test_probabilities_equal_the_definition(mixed) -> None:
    logits = (
        jnp.asarray(np.random.default_rng(0).normal(size=(len(SETTINGS), 4, 12)), jnp.float32) * 2
    )
    if mixed:
        usual = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
        settings = {name: [(usual | setting)[name] for setting in SETTINGS] for name in usual}
        p = np.asarray(probabilities(logits, Sampling(**settings).rows(len(SETTINGS))))
    else:
        p = np.concatenate(
            [
                probabilities(logits[row : row + 1], Sampling(**setting).rows(1))
                for row, setting in enumerate(SETTINGS)
            ]
        )
    for row, setting in enumerate(SETTINGS):
        for node in range(4):
            np.testing.assert_allclose(
                p[row, node], oracle(np.asarray(logits[row, node], float), **setting), atol=2e-6
            )


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS[2:])
def test_probabilities_equal_transformers_warpers(setting) -> None:
    from transformers import generation

    from tests.with_torch import torch

    logits = np.random.default_rng(1).normal(size=(5, 30)).astype(np.float32) * 3
    scores = torch.tensor(logits)
    for name, warper in (
        ("temperature", generation.TemperatureLogitsWarper),
        ("top_k", generation.TopKLogitsWarper),
        ("top_p", generation.TopPLogitsWarper),
        ("min_p", generation.MinPLogitsWarper),
    ):
        if name in setting:
            scores = warper(setting[name])(None, scores)
    expected = torch.softmax(scores, -1).numpy()
    np.testing.assert_allclose(
        probabilities(jnp.asarray(logits), Sampling(**setting).rows(5)), expected, atol=2e-6
    )


def test_ties_are_kept_together_and_argmax_is_the_lowest() -> None:
    logits = jnp.array([[1.0, 3.0, 3.0, 0.0]])
    np.testing.assert_allclose(probabilities(logits, Sampling(top_k=1).rows(1)), [[0, 0.5, 0.5, 0]])
    np.testing.assert_array_equal(
        probabilities(logits, Sampling(temperature=0).rows(1)), [[0, 1, 0, 0]]
    )


# The sizes divide into blocks of every kind: one block, blocks of one token, a prime number.
@pytest.mark.parametrize("vocab", [1, 2, 5, 11, 257, 997, 3072, 32001])
def test_the_lowest_of_equal_tokens_is_the_likeliest(vocab) -> None:
    """Check argmax in every dtype.

    If all logits are minus infinity it is the first token, and with NaN any token of the
    vocabulary.
    """
    rng = np.random.default_rng(vocab)
    logits = rng.integers(-3, 4, (6, 2, vocab)).astype(np.float32)
    logits[0] = -np.inf
    logits[1, :, :: max(1, vocab // 3)] = np.inf
    expected = np.argmax(logits, axis=-1)
    for search in (sampling.argmax, sampling._argmax_by_passes):  # on a CPU, and on other devices
        for dtype in (jnp.float32, jnp.bfloat16):
            np.testing.assert_array_equal(search(jnp.asarray(logits, dtype)), expected)
        np.testing.assert_array_equal(search(jnp.asarray(logits[2:], jnp.int32)), expected[2:])
    logits[2, :, vocab // 2] = np.nan
    assert np.all(np.asarray(sampling.argmax(jnp.asarray(logits))) < vocab)
    assert np.asarray(sampling.can_be_drawn(jnp.asarray(logits))).tolist() == [
        [row > 2] * 2 for row in range(6)
    ]


@pytest.mark.parametrize("truncated", [False, True])
def test_of_distributions_everything_is_as_of_the_probabilities_written_out(truncated) -> None:
    """Compare with probabilities written out, for greedy rows and others together.

    Tested are the probability of a token, the distribution of a node, and its excess over another
    one.
    """
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(6, 3, 32)).astype(np.float32) * 2
    q = np.array(jax.nn.softmax(logits + rng.normal(size=logits.shape), axis=-1))
    rows = Sampling(
        temperature=(0.0, 1.0, 0.6, 0.0, 2.0, 1.0), top_k=(0, 5, 0, 5, 9, 0) if truncated else 0
    ).rows(6)
    p = np.asarray(probabilities(jnp.asarray(logits), rows), np.float64)
    of_nodes = sampling.distributions(jnp.asarray(logits), rows)
    tokens, node = rng.integers(0, 32, (6, 3)), np.arange(6) % 3
    tokens[:, 0] = logits[:, 0].argmax(-1)
    np.testing.assert_allclose(
        of_nodes.of(jnp.asarray(tokens)),
        np.take_along_axis(p, tokens[..., None], -1)[..., 0],
        rtol=1e-5,
    )
    np.testing.assert_allclose(of_nodes.at(jnp.asarray(node)), p[np.arange(6), node], rtol=1e-5)
    ratio = rng.random((6, 3)).astype(np.float32)
    expected = np.maximum(0.0, ratio[..., None] * p - q).sum(-1)
    np.testing.assert_allclose(
        of_nodes.excess(jnp.asarray(ratio), jnp.asarray(q)), expected, rtol=1e-5, atol=1e-6
    )


EXTREMES = [
    {"top_p": 1e-37},
    {"top_p": 1e-38},  # below the smallest normal float32, which devices flush to 0
    {"top_p": 1e-45},
    {"top_p": 1e-300},  # 0 in float32
    {"top_p": 1e-38, "min_p": 1.0, "top_k": 1},
    {"temperature": 1e-37, "top_p": 1e-38},
    {"temperature": 1e-38},
    {"temperature": 1e-45, "min_p": 1.0},
    {"temperature": 1e-300},
]


@pytest.mark.full
def test_the_most_probable_token_survives_every_setting() -> None:
    """Check that the smallest settings leave exactly the likeliest token.

    Once they left none, and drew token 0 for ever.
    """
    names = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    rows = Sampling(
        **{name: [(names | setting)[name] for setting in EXTREMES] for name in names}
    ).rows(len(EXTREMES))
    logits = jnp.tile(jnp.array([-3.0, 1.0, 2.5, -jnp.inf, 40.0, 39.9]), (len(EXTREMES), 1))
    p = probabilities(logits, rows)
    np.testing.assert_array_equal(p, np.tile(np.eye(6)[4], (len(EXTREMES), 1)))
    assert set(
        np.asarray(draw(p, jax.random.split(jax.random.key(0), len(EXTREMES)))).tolist()
    ) == {4}


def test_the_largest_temperatures_draw_evenly() -> None:
    logits = jnp.array([[-3.0, 1.0, -jnp.inf, 40.0]])
    # The reciprocal of the first is not normal in float32; the second is infinite.
    for temperature in (1e38, 1e300):
        np.testing.assert_allclose(
            probabilities(logits, Sampling(temperature=temperature).rows(1)),
            [[1 / 3, 1 / 3, 0, 1 / 3]],
        )


def test_settings_that_are_known_to_be_unused_cost_nothing() -> None:
    assert Sampling(temperature=0).rows(3).greedy
    assert not Sampling(temperature=[0, 0, 1]).rows(3).greedy
    assert not Sampling(temperature=0.5).rows(3).truncated
    assert Sampling(top_p=[1, 1, 0.9]).rows(3).truncated

    def program(sampling):
        return str(jax.make_jaxpr(probabilities)(jnp.zeros((3, 7)), sampling.rows(3)))

    assert "scan" not in program(Sampling(temperature=0.5))
    assert "scan" in program(Sampling(top_p=0.5))
    assert "exp" not in program(Sampling(temperature=0))


@pytest.mark.full
def test_where_a_row_could_ask_for_a_truncation_and_none_does_no_threshold_is_looked_for(
    monkeypatch,
) -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(3, 2, 7)), jnp.float32)
    rows = Sampling(temperature=0.7).rows(3)
    expected = probabilities(logits, rows)
    monkeypatch.setattr(
        sampling,
        "_threshold",
        lambda scaled, rows, bits: jnp.full((*scaled.shape[:-1], 1), jnp.nan),
    )
    np.testing.assert_array_equal(probabilities(logits, rows.replace(truncated=True)), expected)
    truncated = Sampling(temperature=0.7, top_k=(0, 2, 0)).rows(3)
    # A threshold that is looked for changes the result.
    assert (np.asarray(probabilities(logits, truncated)) != expected).any()


@pytest.mark.full
@pytest.mark.parametrize("vocab", [512, 301])
def test_draws_follow_the_probabilities_and_never_hit_zero(vocab) -> None:
    """Draw from a vocabulary of several blocks, and from one that no number of blocks divides.

    Some blocks are empty, and the vocabulary ends in zeros.
    """
    p = np.random.default_rng(0).random(vocab) ** 4
    p[[0, 3, 63, 148, 149, vocab - 2, vocab - 1]] = 0
    p[64:128] = 0
    p /= p.sum()
    n = 100_000
    unnormalised = jnp.broadcast_to(p.astype(np.float32), (n, vocab)) * 7
    tokens = draw(unnormalised, jax.random.split(jax.random.key(0), n))
    counts = np.bincount(np.asarray(tokens), minlength=vocab)
    assert counts[p == 0].sum() == 0
    assert g_test(counts, p) >= FALSE_ALARM


@pytest.mark.full_except("512-2")
@pytest.mark.parametrize(("vocab", "size"), [(6, 3), (64, 1), (301, 2), (512, 2)])
def test_a_grid_of_random_numbers_draws_every_token_exactly_as_often_as_it_is_likely(
    vocab, size, monkeypatch
) -> None:
    """Draw with a grid of numbers, also in the last block and the last token.

    A token of mass 15 must be drawn 15 times. A block of ``size`` tokens has mass 60, or nothing,
    and the grid has 60 points in it, each with another number for the second draw. No point is
    nearer to an edge than half a step. So rounding changes nothing, and a mass that is wrong by a
    fiftieth changes a count.
    """
    blocks = -(-vocab // size)
    splits = {
        1: [[60]],
        2: [[20, 40], [60, 0], [15, 45], [0, 60], [30, 30]],
        3: [[10, 20, 30], [15, 0, 45]],
    }[size]
    mass = np.array([splits[block % len(splits)] for block in range(blocks)])
    if blocks > 2:
        mass[1] = 0
    mass = mass.reshape(-1)[:vocab]
    mass[-1] += -mass.sum() % 60  # if the last block is not whole
    total = mass.sum()
    step = np.arange(total)
    numbers = np.stack([(step + 0.5) / total, (step % 60 + 0.5) / 60], axis=1)
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape, dtype: key.astype(dtype))
    tokens = draw(
        jnp.broadcast_to(mass.astype(np.float32), (total, vocab)), jnp.asarray(numbers, jnp.float32)
    )
    np.testing.assert_array_equal(np.bincount(np.asarray(tokens), minlength=vocab), mass)


HALVES = -np.log(2) * np.array([1, 2, 3, 4, 4])
"""Logits of tokens of probability 1/2, 1/4, 1/8, 1/16 and 1/16, whose sums floats hold exactly."""


@pytest.mark.parametrize(
    ("setting", "count"),
    [
        ({"top_p": 0.5}, 1),
        ({"top_p": 0.75}, 2),
        ({"top_p": 0.875}, 3),
        ({"top_p": 0.9}, 5),  # the last two tie
        ({"min_p": 0.5}, 2),
        ({"min_p": 0.25}, 3),
        ({"min_p": 0.125}, 5),
        ({"top_k": 2}, 2),
        ({"top_k": 4}, 5),
        ({"top_k": 3, "top_p": 4 / 7 - 1e-6}, 1),  # top-k leaves 4/7, 2/7 and 1/7
        ({"top_k": 3, "top_p": 4 / 7 + 1e-6}, 2),
    ],
)
def test_a_token_that_reaches_a_bound_exactly_is_the_last_one_kept(setting, count) -> None:
    order = np.array([3, 0, 4, 2, 1])  # the likeliest token is number 1
    p = probabilities(jnp.asarray(HALVES[order], jnp.float32)[None], Sampling(**setting).rows(1))[0]
    expected = np.where(order < count, np.exp(HALVES[order]), 0.0)
    np.testing.assert_allclose(p, expected / expected.sum(), rtol=1e-6)


def test_a_rows_keys_do_not_depend_on_its_neighbours() -> None:
    keys = jax.random.split(jax.random.key(0), 5)
    together, alone = split_keys(keys, 3), split_keys(keys[2:3], 3)
    assert together.shape == (3, 5)
    np.testing.assert_array_equal(
        jax.random.key_data(together[:, 2]), jax.random.key_data(alone[:, 0])
    )


@pytest.mark.full
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_the_threshold_is_the_same_however_many_bits_a_pass_finds(bits) -> None:
    """Compare thresholds with ties, and with tokens that cannot be drawn."""
    logits = np.random.default_rng(0).integers(-6, 6, (7, 3, 200)).astype(np.float32)
    logits[:, :, ::5] = -np.inf
    settings = {
        "top_k": [0, 1, 5, 0, 30, 200, 0],
        "top_p": [1, 1, 1, 0.5, 0.9, 1e-40, 1e-3],
        "min_p": [0, 0, 0.1, 0, 0, 0, 0.5],
    }
    rows = Sampling(temperature=1.0, **settings).rows(7)
    one_bit = sampling._threshold(jnp.asarray(logits), rows, bits=1)
    np.testing.assert_array_equal(
        sampling._threshold(jnp.asarray(logits), rows, bits=bits), one_bit
    )


def test_the_likeliest_are_found_in_arrays_of_any_rank() -> None:
    values = np.random.default_rng(0).integers(0, 30, (3, 2, 64)).astype(np.float32)  # with ties
    values[0, 0, ::7] = -np.inf
    for array in (values, values[0], values[0, 0]):
        for likeliest, expected in zip(
            sampling.likeliest(array, 9), jax.lax.top_k(array, 9), strict=True
        ):
            np.testing.assert_array_equal(likeliest, expected)
