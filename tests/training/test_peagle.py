"""The objective of P-EAGLE, against blocks that the drafter writes one place at a time."""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import ConfigError
from specjax.drafters import PEagle
from specjax.drafters.base import RemoteFeatures
from specjax.training.contract import StudentInputs
from specjax.training.methods import PEagleTraining
from specjax.training.methods.peagle import draw, read_depths
from specjax.training.objectives.ahead import SIMULATED_STEPS
from specjax.training.objectives.windows import forward
from tests.conftest import tiny_target
from tests.training.test_drafter_methods import COUNTED, log_softmax, losses_of_acceptance
from tests.training.test_methods import batch_of

DOCUMENTS = [[1, 2, 3, 4, 9, 3, 1], [5, 6, 7, 8]]
BATCH = {**batch_of(DOCUMENTS, [0, 1, 1, 1, 0, 1, 1, 1, 1, 1]), "key": jax.random.key(0)}
TARGET = tiny_target(num_layers=1)
IDS = np.array([0, 2, 3, 4, 6, 8, 10])
PLACES, DEPTHS = 10, 3
KINDS = {
    "plain": {},
    "own vocabulary": {"ids": IDS},
    "norms": {"variant": {"fc_norm": True, "norm_before_residual": True}},
    "windows": {"sliding_window": 3, "windowed_layers": (1,)},
}


def strong(**options) -> PEagle:
    drafter = PEagle.init(
        TARGET, jax.random.key(1), DEPTHS, mask_token_id=10, num_layers=2, **options
    )
    # With weights near 0 the states of all depths would be alike over so few places.
    return drafter.replace(
        params=jax.tree.map(lambda x: x * 8 if x.ndim == 2 else x, drafter.params)
    )


@jax.jit
def block_logits(student: PEagle, text, read):
    """Return the logits ``[D, Vd]`` of the block that the drafter writes.

    The target has read ``read`` tokens of the text.
    """
    output, entries = TARGET.read(text, taps=student.taps(TARGET.config))
    received = RemoteFeatures(
        text, jnp.roll(text, -1, axis=1), student.remote_inputs(TARGET, output, entries), read[None]
    )
    state = student.append_remote(TARGET, student.start(TARGET, 1, 16), received)
    return student.logits(TARGET, student.block(TARGET, state))[0]


def drafted(student: PEagle) -> dict[tuple[int, int], np.ndarray]:
    """Return the drafter's logits by place in the batch and depth.

    The root is the document's token after the place.
    """
    logits_by_place, first = {}, 0
    for document in DOCUMENTS:
        padded = jnp.asarray(document + [0] * (8 - len(document)))[None]
        for read in range(1, len(document)):  # after the last token there is no root
            logits = np.asarray(block_logits(student, padded, jnp.array(read)), np.float64)
            logits_by_place |= {(first + read - 1, depth): logits[depth] for depth in range(DEPTHS)}
        first += len(document)
    return logits_by_place


def learnt(batch, sizes) -> dict[int, list[int]]:
    """Return the places that are learnt from, by depth."""
    places, reach = (np.asarray(array)[0] for array in draw(batch, sizes))
    for depth, size in enumerate(sizes, 1):  # all places of a depth are among the first
        assert not np.any(reach[size:] >= depth)
    return {
        0: COUNTED[0],
        **{depth: places[reach >= depth].tolist() for depth in range(1, len(sizes) + 1)},
    }


@pytest.mark.full
@pytest.mark.thorough_except("plain")
@pytest.mark.parametrize("kind", KINDS)
def test_every_place_drafts_as_the_drafter_does(kind) -> None:
    """Check all places at depth 0, and some in another order at the other depths."""
    student = strong(**KINDS[kind])
    places, sizes = np.random.default_rng(0).permutation(PLACES)[:9], (9, 8)
    features = student.features(forward(TARGET, BATCH, student.taps(TARGET.config)))
    states = list(read_depths(student, TARGET, BATCH, features, jnp.asarray(places)[None], sizes))
    expected, compared = drafted(student), 0
    for depth in range(DEPTHS):
        ours = np.asarray(student.logits(TARGET, states[depth]))[0]
        assert len(ours) == PLACES - depth
        for place, logits in zip(places if depth else range(PLACES), ours, strict=False):
            if (place, depth) in expected:
                np.testing.assert_allclose(logits, expected[place, depth], atol=2e-4)
                compared += 1
    assert compared > 20
    differences = (
        np.abs(expected[2, 1] - expected[3, 1]).max(),
        np.abs(expected[3, 1] - expected[3, 2]).max(),
    )
    assert min(differences) > 1e-2  # places and depths differ


@pytest.mark.full
@pytest.mark.thorough_except("plain-False-cross_entropy")
@pytest.mark.parametrize(
    ("kind", "remat", "loss"),
    [
        ("plain", False, "cross_entropy"),
        ("plain", True, "cross_entropy"),
        ("own vocabulary", False, "cross_entropy"),
        ("own vocabulary", True, "hybrid"),
        ("own vocabulary", False, "acceptance"),
        ("plain", False, "hybrid"),
    ],
)
def test_the_target_s_distribution_is_learnt_at_every_depth(kind, remat, loss) -> None:
    method = PEagleTraining(target="here", depths=DEPTHS, kept=0.6, remat=remat, loss=loss)
    sizes, student = method.places(PLACES), strong(**KINDS[kind])
    assert sizes == (10, 6, 3)
    value, metrics = jax.jit(method.objective)(student, BATCH, TARGET)
    theirs = np.asarray(forward(TARGET, BATCH).logits[0], np.float64)
    ours, ids, terms = drafted(student), KINDS[kind].get("ids", np.arange(11)), {}
    left_out = 0
    for depth, places in learnt(BATCH, sizes[1:]).items():
        pairs = []
        for place in places:
            target_logits = theirs[place + 1 + depth]
            if target_logits.argmax() not in ids:
                left_out += 1
                continue
            pairs.append((target_logits, ids, ours[place, depth]))
        if loss == "cross_entropy":
            terms[depth] = [
                -np.exp(log_softmax(target_logits[ids])) @ log_softmax(q)
                for target_logits, _, q in pairs
            ]
        else:
            terms[depth] = losses_of_acceptance(loss, pairs)
    assert (left_out > 0) == (kind == "own vocabulary")
    assert all(terms[depth] for depth in (0, 1))
    np.testing.assert_allclose(value, sum(map(sum, terms.values())) / sum(sizes), rtol=1e-4)
    for depth, of_depth in terms.items():
        np.testing.assert_allclose(
            metrics[f"loss_{depth}"], np.mean(of_depth) if of_depth else 0.0, rtol=1e-4
        )


def test_all_places_are_learnt_where_none_are_dropped() -> None:
    everything = learnt(BATCH, (PLACES, PLACES))
    # A place has depth 2 only if it has depth 1. Place 2 does not, because the label between is not
    # under the mask.
    assert {depth: sorted(places) for depth, places in everything.items()} == {
        0: COUNTED[0],
        1: COUNTED[1],
        2: [0, 3],
    }


def test_places_are_drawn_fairly_and_go_on_together() -> None:
    """Check which places go on to greater depths.

    Of the 5 places that count, 3 go on to depth 1. One of these goes on to depth 2, if it counts
    there.
    """
    drawing = jax.jit(lambda key: draw({**BATCH, "key": key}, (3, 1)))
    chosen, deeper = Counter(), Counter()
    for seed in range(600):
        places, reach = (np.asarray(array)[0].tolist() for array in drawing(jax.random.key(seed)))
        assert len(set(places)) == 3
        assert reach == [1 + bool({0, 3} & set(places)), 1, 1]
        chosen.update(places)
        deeper.update(places[: reach[0] - 1])
    assert set(chosen) == set(COUNTED[1])
    assert all(abs(chosen[place] / 600 - 3 / 5) < 0.1 for place in COUNTED[1])
    assert set(deeper) == {0, 3}
    assert abs(deeper[0] - deeper[3]) < 120


@pytest.mark.full
def test_nothing_is_learnt_across_a_document_s_end() -> None:
    """Check that the second document's tokens do not change the loss of the first.

    The target's logits change with them.
    """
    method = PEagleTraining(target="here", depths=DEPTHS, kept=1.0)
    student, mask = strong(), [1] * 6 + [0] * 4
    batches = [
        {**batch_of([DOCUMENTS[0], second], mask), "key": jax.random.key(0)}
        for second in (DOCUMENTS[1], [9, 9, 2, 0])
    ]
    losses = [method.objective(student, batch, TARGET)[0] for batch in batches]
    assert losses[0] == losses[1] > 0
    alone = [batch_of([DOCUMENTS[0]], mask[:6])]
    shorter = method.objective(student, {**alone[0], "key": jax.random.key(0)}, TARGET)[0]
    np.testing.assert_allclose(losses[0] * PLACES, shorter * 6, rtol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("remat", [False, True])
def test_gradients_reach_every_parameter(remat) -> None:
    method, student = (
        PEagleTraining(target="here", depths=DEPTHS, remat=remat),
        strong(**KINDS["norms"]),
    )
    gradient = jax.jit(
        jax.grad(lambda params: method.objective(student.replace(params=params), BATCH, TARGET)[0])
    )(student.params)
    for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
        assert np.abs(leaf).max() > 1e-7, path
    assert np.abs(gradient["embed"][10]).max() > 1e-7  # the row of the mask token
    shallow = dataclasses.replace(method, depths=1)
    first = jax.grad(
        lambda params: shallow.objective(student.replace(params=params), BATCH, TARGET)[0]
    )(student.params)
    assert not np.any(first["mask_hidden"])  # placeholders begin at depth 1


def test_the_head_may_stay_as_it_is() -> None:
    assert PEagleTraining(target="here", freeze_head=True).frozen("params.lm_head")
    assert not PEagleTraining(target="here", freeze_head=True).frozen("params.embed")
    assert not PEagleTraining(target="here").frozen("params.lm_head")


@pytest.mark.full
def test_what_it_would_be_worth_is_simulated() -> None:
    method = PEagleTraining(target="here")
    student = strong(ids=IDS)
    metrics = jax.jit(method.evaluation)(
        student, {**batch_of([list(range(1, 11))]), "key": jax.random.key(0)}, TARGET
    )
    assert 1 <= metrics["acceptance_length"].value < 1 + SIMULATED_STEPS
    assert 1 < metrics["acceptance_length_sampled"].value < 1 + SIMULATED_STEPS
    assert "accuracy_4" in metrics


def test_a_student_is_as_its_options_say() -> None:
    inputs = StudentInputs(None, np.arange(11), TARGET)
    method = PEagleTraining(
        target="here", draft_vocab_size=4, layers=3, depths=6, mask_token_id=5, fc_norm=True
    )
    student = method.init(jax.random.key(0), inputs)
    assert student.vocabulary(TARGET).ids.tolist() == [7, 8, 9, 10]
    assert student.config.mask_token_id == 5
    assert (student.sizes.num_layers, student.draft_shape.depth) == (3, 6)
    assert student.config.fc_norm
    np.testing.assert_array_equal(student.params["lm_head"], TARGET.params["lm_head"][:, 7:])
    np.testing.assert_array_equal(student.params["embed"], TARGET.params["embed"])
    assert PEagleTraining(target="here").init(jax.random.key(0), inputs).config.mask_token_id == 10
    with pytest.raises(ConfigError, match=r"method\.mask_token_id=11: the target has 11 tokens"):
        PEagleTraining(target="here", mask_token_id=11).init(jax.random.key(0), inputs)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": 0}, r"method\.depths=0: must be at least 1"),
        ({"layers": 0}, r"method\.layers=0: must be at least 1"),
        ({"depths": 512}, r"method\.depths=512: data\.window=512 is too short"),
        ({"draft_vocab_size": -1}, r"method\.draft_vocab_size=-1"),
        ({"mask_token_id": -2}, r"method\.mask_token_id=-2"),
        ({"kept": 0.0}, r"method\.kept=0\.0"),
        ({"kept": 1.5}, r"method\.kept=1\.5"),
        ({"kept_at_least": -0.1}, r"method\.kept_at_least=-0\.1"),
        ({"loss": "tv"}, r"method\.loss='tv': must be one of cross_entropy, acceptance, hybrid"),
    ],
)
def test_options_out_of_range_are_refused(options, message) -> None:
    with pytest.raises(ConfigError, match=message):
        PEagleTraining(target="here", **options).check(window=512)
