"""Test copying from a prediction.

The text stays the target's, and a prediction that is nearly right saves most of its steps.
"""

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
    """Return a target whose greedy texts do not repeat themselves at once."""
    return tiny_target(seed=3, scale=12.0, vocab_size=64)


@pytest.fixture(scope="module")
def text(varied) -> np.ndarray:
    sampling = Sampling(temperature=1.0)
    return specjax.generate(
        varied, None, PROMPT, max_new_tokens=NEW, sampling=sampling, rule="coupled"
    ).tokens[0, PROMPT.size :]


def generate(target, prediction, longest: int = 8, drafter=NoDraft(), **options) -> specjax.Result:
    drafter = WithPrediction(drafter, jnp.asarray(prediction, jnp.int32), longest=longest)
    defaults = {"max_new_tokens": NEW, "sampling": Sampling(temperature=1.0), "rule": "coupled"}
    return specjax.generate(target, drafter, PROMPT, **defaults | options)


def oracle(tokens: list[int], newest: list[int], certain: int) -> tuple[int, int]:
    """Return the place with the most points, and its points.

    Among equal places it is the first from ``certain`` on, and then the nearest before it.
    """

    def points(place: int) -> int:
        pairs = zip(reversed(tokens[:place]), reversed(newest), WEIGHTS, strict=False)
        return sum(weight for predicted, emitted, weight in pairs if predicted == emitted)

    def order(place: int) -> tuple[int, int, int]:
        return -points(place), place < certain, abs(place - certain)

    best = min(range(len(tokens)), key=order)
    return best, points(best)


@pytest.mark.full
@pytest.mark.parametrize("vocab", [2, 5, 40])
def test_the_search_equals_the_oracle(vocab) -> None:
    rng, rows, room = np.random.default_rng(vocab), 200, 24
    tokens = rng.integers(0, vocab, (rows, room))
    lengths = rng.integers(1, room + 1, rows)
    newest = rng.integers(0, vocab, (rows, len(WEIGHTS)))
    newest[:20, :5] = -1  # the output has just begun
    certain = rng.integers(0, lengths)
    arguments = [jnp.asarray(array, jnp.int32) for array in (tokens, lengths, newest, certain)]
    places, points = map(np.asarray, _search(*arguments))
    matches = 0
    for row in range(rows):
        best, most = oracle(
            tokens[row, : lengths[row]].tolist(), newest[row].tolist(), int(certain[row])
        )
        assert points[row] == most
        if most >= FEWEST_POINTS:
            assert places[row] == best
            matches += 1
    assert matches > rows // 4


@pytest.mark.full
def test_a_right_prediction_takes_as_few_steps_as_there_can_be(varied, text) -> None:
    result = generate(varied, text)
    assert np.array_equal(result.tokens[0, PROMPT.size :], text)
    assert result.stats.steps[0] == -(-NEW // 9)  # 8 copied tokens and the bonus


EDITS = {  # a change of the text, and the number of its tokens that the prediction lacks
    "another token": (lambda text: [*text[:20], 63 - text[20], *text[21:]], 1),
    "tokens left out": (lambda text: [*text[:20], *text[25:]], 5),
    "tokens put in": (lambda text: [*text[:20], 1, 2, 3, 4, 5, *text[20:]], 0),
    "both ends missing": (lambda text: text[7:50], 17),
}


@pytest.mark.full
@pytest.mark.thorough_except("another token")
@pytest.mark.parametrize("edit", EDITS)
def test_after_a_mismatch_the_copy_goes_on(varied, text, edit) -> None:
    change, unknown = EDITS[edit]
    result = generate(varied, np.array(change(text.tolist())))
    assert np.array_equal(result.tokens[0, PROMPT.size :], text)
    # A right prediction takes the first number of steps. There is one more for each unknown token,
    # and a few until the place is found again.
    assert result.stats.steps[0] <= -(-NEW // 9) + unknown + 4


@pytest.mark.thorough
@pytest.mark.parametrize(
    "kind",
    [
        "draft model",
        *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("EAGLE-3", "prompt lookup")),
    ],
)
def test_the_contract(target, kind) -> None:
    """Check predictions that are right in part, with drafters of every kind."""
    inner = {
        "draft model": lambda: DraftModel(tiny_target(seed=5, num_layers=1), draft=Chain(2)),
        "EAGLE-3": lambda: specjax.Eagle3.init(target, jax.random.key(5), draft=Chain(3)),
        "prompt lookup": lambda: PromptLookup(draft=2),
    }[kind]()
    prediction = specjax.generate(target, None, PROMPT, max_new_tokens=30).tokens[0, PROMPT.size :]
    prediction[10:12] = 3
    drafter = WithPrediction(inner, jnp.asarray(prediction, jnp.int32), longest=4)
    # An engine pauses the inner drafter, not the wrapper, which would have to guess which tokens
    # were emitted in which step.
    conformance.check(target, drafter, new_tokens=12, come_and_go=False)


@pytest.mark.full
@pytest.mark.parametrize("draws", [10_000, pytest.param(500_000, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "rule", ["independent", pytest.param("rejection", marks=pytest.mark.thorough)]
)
def test_the_distribution_is_the_targets(rule, draws) -> None:
    """Check a batch in which some rows copy while others draw.

    q is one-hot in the former, and the drafter's in the latter.
    """
    few = tiny_target(seed=2, vocab_size=5)
    model = tiny_target(seed=5, num_layers=1, vocab_size=5)
    drafter = WithPrediction(DraftModel(model, draft=Chain(2)), jnp.array([2, 0, 3, 1]), longest=3)
    conformance.check_distribution(few, drafter, rule=rule, draws=draws)


@pytest.mark.full
def test_rows_without_a_prediction_draft_as_always(varied) -> None:
    prompts = np.tile(PROMPT, (2, 1))
    inner = PromptLookup(draft=4)
    drafter = WithPrediction(inner, jnp.zeros((2, 8), jnp.int32), jnp.array([0, 8]), longest=4)
    alone, both = (
        specjax.generate(varied, variant, prompts, max_new_tokens=30)
        for variant in (inner, drafter)
    )
    assert np.array_equal(alone.tokens, both.tokens)
    assert alone.stats.steps[0] == both.stats.steps[0]
    assert alone.stats.drafted[0] == both.stats.drafted[0]


@pytest.mark.full
def test_a_drafter_that_keeps_the_state_changes_nothing(varied, text) -> None:
    """Check ``longest=0``, which takes turns with a wrapper that copies.

    It drafts as the inner drafter does, and follows the text for the other wrapper.
    """
    inner = PromptLookup(draft=4)
    silent = WithPrediction(inner, jnp.asarray(text, jnp.int32), longest=0)
    alone, both = (
        specjax.generate(varied, variant, PROMPT, max_new_tokens=20) for variant in (inner, silent)
    )
    assert np.array_equal(alone.tokens, both.tokens)
    assert alone.stats.steps[0] == both.stats.steps[0]
    assert silent.draft_shape == inner.draft_shape


def test_what_cannot_be_is_refused(target) -> None:
    inner = DraftModel(tiny_target(seed=5, num_layers=1), draft=StaticTree(((0,), (1,))))
    with pytest.raises(InputError, match="give it a Chain"):
        WithPrediction(inner).check(target)
    with pytest.raises(InputError, match="longest=-1"):
        replace(WithPrediction(NoDraft()), longest=-1).check(target)
    with pytest.raises(InputError, match="2 predictions for 1 rows"):
        specjax.generate(target, WithPrediction(NoDraft(), jnp.zeros((2, 4), jnp.int32)), PROMPT)
