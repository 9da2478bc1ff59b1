"""Copying from a prediction: the text stays the target's, and a prediction that is nearly right saves most of its steps."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import conformance
from specjax.drafters import DraftModel, NoDraft, PromptLookup, WithPrediction
from specjax.drafters.with_prediction import FEWEST_POINTS, WEIGHTS, _search
from specjax.drafts.shapes import Chain, StaticTree
from specjax.errors import InputError
from specjax.sampling import Sampling
from tests.conftest import tiny_target

PROMPT = np.array([[1, 4, 2, 4, 2, 7]])
NEW = 60


@pytest.fixture(scope="module")
def varied() -> specjax.Target:
    """A target whose greedy texts do not repeat themselves at once."""
    return tiny_target(seed=3, scale=12.0, vocab_size=64)


@pytest.fixture(scope="module")
def text(varied) -> np.ndarray:
    sampling = Sampling(temperature=1.0)
    return specjax.generate(
        varied, None, PROMPT, max_new_tokens=NEW, sampling=sampling, rule="coupled"
    ).tokens[0, PROMPT.size :]


def generate(target, prediction, longest: int = 8, drafter=NoDraft(), **options) -> specjax.Result:
    drafter = WithPrediction(drafter, jnp.asarray(prediction, jnp.int32), longest=longest)
    named = {
        "max_new_tokens": NEW,
        "sampling": Sampling(temperature=1.0),
        "rule": "coupled",
        **options,
    }
    return specjax.generate(target, drafter, PROMPT, **named)


def oracle(tokens: list[int], newest: list[int], certain: int) -> tuple[int, int]:
    """The place with the most points; among equals the first from ``certain`` on, and then the nearest before it."""

    def points(place: int) -> int:
        pairs = zip(reversed(tokens[:place]), reversed(newest), WEIGHTS, strict=False)
        return sum(weight for before, said, weight in pairs if before == said)

    def order(place: int) -> tuple[int, int, int]:
        return -points(place), place < certain, abs(place - certain)

    best = min(range(len(tokens)), key=order)
    return best, points(best)


@pytest.mark.parametrize("vocab", [2, 5, 40])
def test_the_search_equals_the_oracle(vocab) -> None:
    rng, rows, room = np.random.default_rng(vocab), 200, 24
    tokens = rng.integers(0, vocab, (rows, room))
    lengths = rng.integers(1, room + 1, rows)
    newest = rng.integers(0, vocab, (rows, len(WEIGHTS)))
    newest[:20, :5] = -1  # the output has just begun
    certain = rng.integers(0, lengths)
    given = (jnp.asarray(each, jnp.int32) for each in (tokens, lengths, newest, certain))
    places, points = map(np.asarray, _search(*given))
    found = 0
    for row in range(rows):
        best, most = oracle(
            tokens[row, : lengths[row]].tolist(), newest[row].tolist(), int(certain[row])
        )
        assert points[row] == most
        if most >= FEWEST_POINTS:
            assert places[row] == best
            found += 1
    assert found > rows // 4


@pytest.mark.full
def test_a_right_prediction_takes_as_few_steps_as_there_can_be(varied, text) -> None:
    result = generate(varied, text)
    assert np.array_equal(result.tokens[0, PROMPT.size :], text)
    assert result.stats.steps[0] == -(-NEW // 9)  # 8 copied tokens and the bonus


EDITS = {  # of the text, and how many of its tokens the prediction does not have
    "another token": (lambda text: [*text[:20], 63 - text[20], *text[21:]], 1),
    "tokens left out": (lambda text: [*text[:20], *text[25:]], 5),
    "tokens put in": (lambda text: [*text[:20], 1, 2, 3, 4, 5, *text[20:]], 0),
    "both ends missing": (lambda text: text[7:50], 17),
}


@pytest.mark.full_except("both ends missing", "tokens left out", "tokens put in")
@pytest.mark.parametrize("edit", EDITS)
def test_after_a_mismatch_the_copy_goes_on(varied, text, edit) -> None:
    change, unknown = EDITS[edit]
    result = generate(varied, np.array(change(text.tolist())))
    assert np.array_equal(result.tokens[0, PROMPT.size :], text)
    # Beside the steps of a right one: one for each unknown token, and a few until the place is found again.
    assert result.stats.steps[0] <= -(-NEW // 9) + unknown + 4


@pytest.mark.full
@pytest.mark.parametrize(
    "kind",
    [
        "draft model",
        *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("EAGLE-3", "prompt lookup")),
    ],
)
def test_the_contract(target, kind) -> None:
    """Predictions that are right here and there, beside drafters of every kind."""
    inner = {
        "draft model": lambda: DraftModel(tiny_target(seed=5, num_layers=1), draft=Chain(2)),
        "EAGLE-3": lambda: specjax.Eagle3.init(target, jax.random.key(5), draft=Chain(3)),
        "prompt lookup": lambda: PromptLookup(draft=2),
    }[kind]()
    prediction = specjax.generate(target, None, PROMPT, max_new_tokens=30).tokens[0, PROMPT.size :]
    prediction[10:12] = 3
    drafter = WithPrediction(inner, jnp.asarray(prediction, jnp.int32), longest=4)
    # The engine pauses the other drafter, and not this one, which then would have to guess what came in which step.
    conformance.check(target, drafter, new_tokens=12, come_and_go=False)


@pytest.mark.full
@pytest.mark.parametrize("draws", [10_000, pytest.param(500_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "rule", ["independent", pytest.param("rejection", marks=pytest.mark.thorough)]
)
def test_the_distribution_is_the_targets(rule, draws) -> None:
    """Some rows copy while others draw: q is one-hot in the first, and the drafter's in the others."""
    few = tiny_target(seed=2, vocab_size=5)
    model = tiny_target(seed=5, num_layers=1, vocab_size=5)
    drafter = WithPrediction(DraftModel(model, draft=Chain(2)), jnp.array([2, 0, 3, 1]), longest=3)
    conformance.check_distribution(few, drafter, rule=rule, draws=draws)


@pytest.mark.full
def test_rows_without_a_prediction_draft_as_always(varied) -> None:
    prompts = np.tile(PROMPT, (2, 1))
    inner = PromptLookup(draft=4)
    drafter = WithPrediction(inner, jnp.zeros((2, 8), jnp.int32), jnp.array([0, 8]), longest=4)
    one, both = (
        specjax.generate(varied, each, prompts, max_new_tokens=30) for each in (inner, drafter)
    )
    assert np.array_equal(one.tokens, both.tokens)
    assert (
        one.stats.steps[0] == both.stats.steps[0] and one.stats.drafted[0] == both.stats.drafted[0]
    )


@pytest.mark.full
def test_a_drafter_that_keeps_the_state_changes_nothing(varied, text) -> None:
    """``longest=0`` takes turns with one that copies: it drafts as the other drafter, and knows where the text is."""
    inner = PromptLookup(draft=4)
    silent = WithPrediction(inner, jnp.asarray(text, jnp.int32), longest=0)
    one, both = (
        specjax.generate(varied, each, PROMPT, max_new_tokens=20) for each in (inner, silent)
    )
    assert np.array_equal(one.tokens, both.tokens) and one.stats.steps[0] == both.stats.steps[0]
    assert silent.draft_shape == inner.draft_shape


def test_what_cannot_be_is_refused(target) -> None:
    inner = DraftModel(tiny_target(seed=5, num_layers=1), draft=StaticTree(((0,), (1,))))
    with pytest.raises(InputError, match="give it a Chain"):
        WithPrediction(inner).check(target)
    with pytest.raises(InputError, match="longest=-1"):
        replace(WithPrediction(NoDraft()), longest=-1).check(target)
    with pytest.raises(InputError, match="2 predictions for 1 rows"):
        specjax.generate(target, WithPrediction(NoDraft(), jnp.zeros((2, 4), jnp.int32)), PROMPT)
