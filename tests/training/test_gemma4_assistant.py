"""The objective of Gemma 4's assistants, against drafts made token by token with a cache."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import ConfigError
from specjax.drafters import Gemma4Assistant
from specjax.models.transformer import Target
from specjax.training.contract import StudentInputs
from specjax.training.methods import Gemma4AssistantTraining
from specjax.training.methods.gemma4_assistant import draft_along
from specjax.training.objectives.ahead import SIMULATED_STEPS
from specjax.training.objectives.windows import score
from tests.conftest import HYBRID, tiny_target
from tests.models.families import zoo
from tests.training.test_drafter_methods import COUNTED, log_softmax
from tests.training.test_methods import batch_of

DOCUMENTS = [[1, 2, 3, 4, 9, 3, 1], [5, 6, 7, 8]]
BATCH = {**batch_of(DOCUMENTS, [0, 1, 1, 1, 0, 1, 1, 1, 1, 1]), "key": jax.random.key(0)}
STEPS = 3


def of_gemma(directory) -> Target:
    kind, fields = zoo.MODELS["gemma4 E2B"]
    zoo.build(kind, fields).save_pretrained(directory)
    return Target.from_pretrained(directory, dtype=np.float32)


TINY = {"full": {}, "windows": {"sliding_window": 2, "windowed_layers": (0,)}, "hybrid": HYBRID}


@pytest.fixture(
    params=["full", "windows", "gemma4", pytest.param("hybrid", marks=pytest.mark.thorough)],
    scope="module",
)
def target(request, tmp_path_factory):
    if request.param == "gemma4":
        return of_gemma(tmp_path_factory.mktemp("gemma4"))
    return tiny_target(**TINY[request.param])


def strong(target, **shape):
    drafter = Gemma4Assistant.init(target, jax.random.key(1), **shape)
    return drafter.replace(
        params=jax.tree.map(lambda x: x * 8 if x.ndim == 2 else x, drafter.params)
    )


def drafted(target, student, document, read):
    """Return the logits ``[V]`` of each step of a chain along ``document``.

    The target has read ``read`` tokens of it.
    """
    padded = jnp.asarray(document + [0] * (7 + STEPS - len(document)))
    chain = drafted_chain(
        target, student, padded[None, :7], jnp.array([read]), jnp.roll(padded, -read)[:STEPS]
    )
    return [np.asarray(logits, np.float64) for logits in chain[: len(document) - read]]


@jax.jit
def drafted_chain(target, student, text, read, tokens):
    output, cache = target.forward(text, target.new_cache(1, 16), read)
    state = output.hidden[:, read[0] - 1][:, None]
    cache, chain = cache.of_layers(student.reads(target.config)), []
    for token in tokens:
        logits, state = student.read(target, token[None, None], state, cache)
        chain.append(logits[0, 0])
    return chain


def places():
    """Return for each place in the batch its document, and how many tokens were read there."""
    return [(document, read + 1) for document in DOCUMENTS for read in range(len(document))]


@pytest.mark.full
@pytest.mark.thorough_except("full")
def test_every_place_drafts_as_the_assistant_does(target) -> None:
    student = strong(target)
    output, entries = score(target, BATCH)
    along = [
        np.asarray(student.logits(x)[0])
        for x in draft_along(student, BATCH, target, output, entries, STEPS)
    ]
    compared = 0
    for place, (document, read) in enumerate(places()[:-1]):
        for step, logits in enumerate(drafted(target, student, document, read)):
            np.testing.assert_allclose(along[step][place], logits, atol=2e-4)
            compared += 1
    assert compared == (3 * 4 + 2 + 1) + (3 + 2 + 1)


@pytest.mark.full
def test_the_target_s_distribution_is_learnt_at_every_step(target) -> None:
    student = strong(target)
    loss, metrics = jax.jit(Gemma4AssistantTraining(target="here", steps=STEPS).objective)(
        student, BATCH, target
    )
    theirs, expected = np.asarray(score(target, BATCH)[0].logits[0], np.float64), 0.0
    for step in range(STEPS):
        for place in COUNTED[step]:
            ours = drafted(target, student, *places()[place])[step]
            expected -= (
                0.8**step * np.exp(log_softmax(theirs[place + 1 + step])) @ log_softmax(ours)
            )
    np.testing.assert_allclose(loss, expected / 10, rtol=1e-4)
    assert set(metrics) == {"loss", "loss_0", "loss_1", "loss_2"}


@pytest.mark.full
def test_clusters_are_learnt_beside_all_tokens() -> None:
    target = tiny_target(vocab_size=12)
    student = strong(target, centroids=4, centroids_kept=2)
    order = np.random.default_rng(0).permutation(12)
    student.params["order"] = jnp.asarray(order)
    method = Gemma4AssistantTraining(target="here", steps=1)
    loss, _ = method.objective(student, BATCH, target)
    output, entries = score(target, BATCH)
    (x,) = draft_along(student, BATCH, target, output, entries, 1)
    everything = np.asarray(student.all_logits(x)[0], np.float64)
    theirs = np.asarray(output.logits[0], np.float64)
    of_clusters = np.asarray(x[0] @ student.params["centroids"], np.float64)
    expected = 0.0
    for place in COUNTED[0]:
        p = np.exp(log_softmax(theirs[place + 1]))
        shares = [
            sum(p[token] for token in order[3 * cluster : 3 * cluster + 3]) for cluster in range(4)
        ]
        expected -= p @ log_softmax(everything[place]) + np.array(shares) @ log_softmax(
            of_clusters[place]
        )
    np.testing.assert_allclose(loss, expected / 10, rtol=1e-4)
    without = dataclasses.replace(method, centroid_weight=0.0).objective(student, BATCH, target)[0]
    assert without < loss


@pytest.mark.full
@pytest.mark.parametrize("remat", [False, True])
def test_gradients_reach_every_parameter_through_all_steps(remat) -> None:
    target = tiny_target(vocab_size=12, sliding_window=3, windowed_layers=(0,))
    student = strong(target, centroids=4, centroids_kept=2)
    method = Gemma4AssistantTraining(target="here", steps=STEPS, remat=remat)

    def loss(params):
        return method.objective(student.replace(params=params), BATCH, target)[0]

    gradient = jax.grad(loss, allow_int=True)(student.params)
    # A norm follows the last layer, so that the length of its states makes no difference.
    gradient["layers"][-1].pop("scalar")
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert leaf.dtype == jax.dtypes.float0 or np.abs(leaf).max() > 1e-6, path

    def loss_without_remat(params):
        plain = dataclasses.replace(method, remat=False)
        return plain.objective(student.replace(params=params), BATCH, target)[0]

    expected = jax.grad(loss_without_remat, allow_int=True)(student.params)
    # The first step's loss does not depend on "post".
    np.testing.assert_allclose(gradient["post"], expected["post"], atol=1e-5)
    assert method.frozen("params.embed") is False
    assert dataclasses.replace(method, freeze_head=True).frozen("params.embed")


@pytest.mark.full
def test_what_it_would_be_worth_is_simulated(target) -> None:
    metrics = Gemma4AssistantTraining(target="here").evaluation(strong(target), BATCH, target)
    assert 1 <= metrics["acceptance_length"].value < 1 + SIMULATED_STEPS
    assert 0 <= metrics["accuracy_4"].value <= 1


def test_an_earlier_assistant_s_shape_is_kept(tmp_path) -> None:
    target = tiny_target()
    earlier = Gemma4Assistant.init(
        target, jax.random.key(3), num_layers=2, hidden_size=24, num_heads=4, intermediate_size=20
    )
    earlier.save_pretrained(tmp_path)
    inputs = StudentInputs(None, np.ones(11), target, init_from=str(tmp_path))
    student = Gemma4AssistantTraining(target="here").init(jax.random.key(0), inputs)
    assert student.config == earlier.config
    with pytest.raises(
        ConfigError, match=r"init_from=.*its shape is kept; leave out method\.hidden_size"
    ):
        Gemma4AssistantTraining(target="here", hidden_size=24).init(jax.random.key(0), inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": 5}, r"method\.layers=5: an assistant has at most 4"),
        ({"steps": 0}, r"method\.steps=0: must be at least 1"),
        ({"steps": 511}, r"data\.window=512 is too short"),
        ({"hidden_size": -1}, r"method\.hidden_size=-1: must be at least 0"),
        ({"decay": 0.0}, r"method\.decay=0\.0"),
    ],
)
def test_options_out_of_range_are_refused(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        Gemma4AssistantTraining(target="here", **options).check(window=512)
