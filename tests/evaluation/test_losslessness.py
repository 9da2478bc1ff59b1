"""Check the test of losslessness: right pairs pass it, and broken pairs do not."""

from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct
from scipy import stats

from specjax.decoding import verification
from specjax.drafters import DraftModel, PromptLookup
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree
from specjax.errors import InputError
from specjax.evaluation import drawn_texts, losslessness, same_texts
from specjax.sampling import Sampling
from tests.conftest import EmbeddedPair, tiny_target

VOCAB = 40
TARGET = {"seed": 2, "vocab_size": VOCAB, "scale": 12.0}
PROMPTS = np.random.default_rng(0).integers(0, VOCAB, (8, 6))
PLAIN = (Sampling(),)


def drafter(shape=Chain(3), kind: type[DraftModel] = DraftModel, **options) -> DraftModel:
    return kind(
        tiny_target(seed=5, num_layers=1, vocab_size=VOCAB, scale=12.0), draft=shape, **options
    )


def drawn(
    model, draws: int, seed: int = 0, settings=PLAIN, rule=None, rounding: float = 1e-4
) -> drawn_texts.DistributionResult:
    return drawn_texts.draw_and_test(
        tiny_target(**TARGET),
        model,
        PROMPTS,
        np.full(len(PROMPTS), PROMPTS.shape[1]),
        settings=settings,
        rule=rule,
        draws=draws,
        key=jax.random.key(seed),
        rounding=rounding,
    )


@struct.dataclass
class WrongQ(DraftModel):
    """A drafter that draws from its distribution and passes on another one as q.

    That is the distribution of a higher temperature, or with every other token halved.
    """

    temperature: float = struct.field(pytree_node=False, default=1.0)
    halves: bool = struct.field(pytree_node=False, default=False)

    def propose(self, *arguments, **named):
        draft, state = super().propose(*arguments, **named)
        if draft.q is None:  # chosen tokens have no q
            return draft, state
        q = draft.q ** (1 / self.temperature)
        q = q * jnp.where(self.halves & (jnp.arange(q.shape[-1]) % 2 == 0), 0.5, 1.0)
        return draft.replace(q=q / jnp.maximum(jnp.sum(q, axis=-1, keepdims=True), 1e-30)), state


@pytest.fixture
def accepting(compiled_anew, monkeypatch):
    """Return a function that makes the rules accept too many drawn tokens, by a share.

    The rules alone draw single numbers.
    """

    def patch(share: float) -> None:
        uniform = jax.random.uniform

        def scaled(key, shape=(), *rest, **named):
            return uniform(key, shape, *rest, **named) * (1 / (1 + share) if shape == () else 1.0)

        monkeypatch.setattr(jax.random, "uniform", scaled)

    return patch


TREE = pytest.param(DynamicTree(top_k=3, depth=2, nodes=7), marks=pytest.mark.thorough)


@pytest.mark.full
@pytest.mark.parametrize("shape", [Chain(3), TREE], ids=str)
def test_a_right_pair_passes(shape) -> None:
    verdict = losslessness.check(
        tiny_target(**TARGET),
        drafter(shape),
        PROMPTS,
        max_new_tokens=16,
        draws=4_000,
    )
    assert verdict.lossless, verdict
    assert verdict.greedy.texts == verdict.coupled.texts == 8
    assert not verdict.greedy.partings
    assert not verdict.coupled.partings
    assert 1e-7 < verdict.greedy.rounding < 1e-3
    assert verdict.distribution.draws >= 4_000
    assert verdict.distribution.rule == ("independent" if shape == Chain(3) else "coupled")
    assert set(verdict.distribution.p_values) - {"drafts against q"} == {
        "joint",
        "by preference",
        "towards the drafter",
    }
    assert 0 < verdict.distribution.detectable < 0.5


@pytest.mark.full
def test_a_wrong_q_fails() -> None:
    distribution = drawn(drafter(kind=WrongQ, halves=True), 10_000)
    assert not distribution.passes
    assert distribution.p_values["drafts against q"] == min(distribution.p_values.values())


@pytest.mark.full
def test_a_rule_that_accepts_too_often_fails(accepting) -> None:
    accepting(0.1)
    distribution = drawn(drafter(), 16_000, rule="rejection")
    assert not distribution.passes
    assert distribution.p_values["towards the drafter"] < min(
        distribution.p_values["joint"], distribution.p_values["by preference"]
    )


@pytest.mark.full
def test_which_tokens_count_does_not_depend_on_what_they_are() -> None:
    """Check that texts go on after an end token.

    To leave out the tokens after it would favour texts without one.
    """
    model = drafter()
    with_ends, without = (
        drawn_texts.draw_and_test(
            tiny_target(**TARGET, eos_token_ids=ends),
            model,
            PROMPTS,
            np.full(len(PROMPTS), PROMPTS.shape[1]),
            draws=2_000,
            key=jax.random.key(0),
        )
        for ends in (tuple(range(0, VOCAB, 2)), ())
    )
    assert with_ends == without
    assert with_ends.draws >= 2_000


@pytest.mark.parametrize("more", [1, -1])
def test_tails_of_a_skewed_score(more: int) -> None:
    """Compare a score of two outcomes with the binomial distribution of the rarer one.

    A drafted token scores 1, any other -19. Each of 400 places has another token with 5%, and the
    number of these gives the p-value.
    """
    places, miss = 400, 0.05
    deviation = np.sqrt(places * miss * (1 - miss))
    misses = places * miss + more * np.arange(2, 5) * deviation
    above = (
        stats.binom.sf(misses - 0.5, places, miss)
        if more > 0
        else stats.binom.cdf(misses + 0.5, places, miss)
    )
    skewness = -(1 - 2 * miss) / deviation  # more misses make the score smaller
    tails = [drawn_texts._score_p_value(-more * size, skewness) for size in np.arange(2, 5)]
    normal = [drawn_texts._score_p_value(-more * size, 0.0) for size in np.arange(2, 5)]
    np.testing.assert_allclose(np.log(tails), np.log(2 * above), atol=0.7)
    assert abs(np.log(normal[-1] / above[-1] / 2)) > 1.5


def test_texts_that_part_are_judged_by_their_margin() -> None:
    equal = same_texts.SameTexts(texts=8, tokens=96, partings=(), lag=0.0, rounding=1e-5)
    assert equal.passes
    parted = replace(equal, partings=(same_texts.Parting(0, 3, 1, 2, margin=0.01),), lag=0.01)
    assert not parted.passes
    assert replace(parted, rounding=0.02).passes
    # The texts are wrong after the place where they part.
    assert not replace(parted, rounding=0.02, lag=3.0).passes


def test_where_two_texts_part() -> None:
    texts = [np.array([[1, 2, 3, 4], [5, 6, 0, 0]]), np.array([[1, 2, 9, 9], [5, 0, 0, 0]])]
    lags = [np.zeros((2, 4)), np.array([[0, 0, 0.25, 7], [0, 0, 0, 0]])]
    first, second = same_texts._partings(10, texts, [np.array([4, 2]), np.array([4, 1])], lags)
    assert first == same_texts.Parting(10, 2, 3, 9, margin=0.25)
    assert second == same_texts.Parting(11, 1, 6, -1, margin=float("inf"))


def test_what_cannot_be_tested_is_refused() -> None:
    with pytest.raises(InputError, match="draws=10"):
        losslessness.check(tiny_target(**TARGET), drafter(), PROMPTS, draws=10)
    with pytest.raises(InputError, match="temperature 0"):
        losslessness.check(
            tiny_target(**TARGET), drafter(), PROMPTS, settings=(Sampling(temperature=0.0),)
        )


# --- longer: power and false alarms ---------------------------------------------------------------


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("share", "shape", "rule", "draws"),
    [
        (0.05, Chain(3), "rejection", 50_000),
        (-0.05, Chain(3), "rejection", 50_000),
        (0.05, SampledTree((3, 2)), None, 50_000),
        (0.03, Chain(3), "rejection", 150_000),
        # The block rule judges jointly, so that the same share changes the text less.
        (0.1, Chain(3), "block", 200_000),
    ],
)
def test_small_faults_of_a_rule_fail(accepting, share, shape, rule, draws) -> None:
    accepting(share)
    assert not drawn(drafter(shape), draws, rule=rule).passes


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_another_text_fails_by_its_margin(monkeypatch, temperature) -> None:
    """Verify the drafts of greedy and coupled rows by the logits of another node."""
    target, prompts = tiny_target(**TARGET), [(PROMPTS, np.full(8, 6))]
    follow, rule = verification.follow_argmax, verification.RULES["coupled"]

    def at_another_node(draft, logits, sampling, keys):
        return rule.verify(draft, jnp.roll(logits, 1, axis=1), sampling, keys)

    monkeypatch.setattr(
        verification,
        "follow_argmax",
        lambda draft, best, good: follow(draft, jnp.roll(best, 1, axis=1), good),
    )
    monkeypatch.setitem(verification.RULES, "coupled", replace(rule, verify=at_another_node))
    # Without a drafter there is a single node, and rolling changes nothing.
    options = {"max_new_tokens": 12, "key": jax.random.key(0), "rounding": 1e-3}
    comparison = same_texts.compare(target, drafter(), prompts, temperature=temperature, **options)
    assert comparison.partings
    assert not comparison.passes


@pytest.mark.thorough
@pytest.mark.parametrize(
    "options", [{"temperature": 1.3}, {"temperature": 0.8}, {"halves": True}], ids=str
)
@pytest.mark.parametrize("shape", [Chain(3), SampledTree((3, 2))], ids=str)
def test_every_wrong_q_fails(shape, options) -> None:
    assert not drawn(drafter(shape, WrongQ, **options), 100_000).passes


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shape", [Chain(3), DynamicTree(top_k=3, depth=2, nodes=7), SampledTree((3, 2))], ids=str
)
def test_p_values_of_right_pairs_are_spread_evenly(shape) -> None:
    """Test 40 keys: the Kolmogorov distance of 40 uniform numbers exceeds 0.30 once in 1,000."""
    distributions = [drawn(drafter(shape), 12_000, seed) for seed in range(40)]
    for name in set.intersection(*(set(distribution.p_values) for distribution in distributions)):
        values = np.sort([distribution.p_values[name] for distribution in distributions])
        assert np.abs(values - (np.arange(40) + 0.5) / 40).max() < 0.30, (name, values)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "settings", [(Sampling(0.6),), (Sampling(1.0, top_k=4),), (Sampling(1.5, min_p=0.1),)], ids=str
)
def test_right_pairs_pass_at_other_settings(settings) -> None:
    for model in (
        drafter(),
        drafter(DynamicTree(top_k=3, depth=2, nodes=7)),
        PromptLookup(draft=3),
    ):
        assert drawn(model, 20_000, settings=settings).passes


@pytest.mark.thorough
@pytest.mark.parametrize("shape", [Chain(4), DynamicTree(top_k=4, depth=4, nodes=16)], ids=str)
def test_the_embedded_pair_passes(shape) -> None:
    pair = EmbeddedPair()
    tokens, lengths = pair.prompts(8, 24)
    model = DraftModel.from_pretrained(pair.draft_path, draft=shape, dtype=np.float32)
    verdict = losslessness.check(
        pair.target, model, tokens, lengths, max_new_tokens=32, draws=8_000
    )
    assert verdict.lossless, verdict
    wrong = WrongQ(
        **{field.name: getattr(model, field.name) for field in fields(model)}, temperature=1.5
    )
    if shape == Chain(4):
        assert not losslessness.check(
            pair.target, wrong, tokens, lengths, max_new_tokens=8, draws=8_000
        ).lossless
