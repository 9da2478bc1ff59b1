"""The objectives of EAGLE drafters, against their formulas written out position by position."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import ConfigError
from specjax.drafters import Eagle, Eagle3
from specjax.drafts.shapes import Chain
from specjax.training.contract import StudentInputs
from specjax.training.methods import Eagle1Training, Eagle3Training, HassTraining, eagle3
from specjax.training.objectives import feature_loss
from specjax.training.objectives.ahead import SIMULATED_STEPS
from specjax.training.objectives.draft_vocabulary import most_frequent
from specjax.training.objectives.unrolling import unroll
from specjax.training.objectives.windows import forward
from tests.conftest import tiny_target
from tests.training.test_methods import batch_of

TARGET = tiny_target(num_layers=1)
BATCH = {
    **batch_of([[1, 2, 3, 4, 9, 3, 1], [5, 6, 7, 8]], [0, 1, 1, 1, 0, 1, 1, 1, 1, 1]),
    "key": jax.random.key(0),
}
COUNTED = {0: [0, 1, 2, 4, 5, 7, 8], 1: [0, 1, 3, 4, 7], 2: [0, 2, 3]}
"""The positions by step whose pairs are of one document and whose label is under the mask."""

JUDGED = Eagle1Training(target="here")


def strong(drafter):
    return drafter.replace(
        params=jax.tree.map(lambda x: x * 8 if x.ndim == 2 else x, drafter.params)
    )


def parts(student, steps):
    """Return the states and logits of every step, and the target's hidden states and logits.

    All are numpy arrays without the batch axis.
    """
    output = forward(TARGET, BATCH, student.taps(TARGET.config))
    states = list(unroll(student, BATCH, TARGET, student.features(output), steps, detach=True))
    ours = [np.asarray(student.logits(TARGET, state)[0], np.float64) for state in states]
    return (
        [np.asarray(state[0]) for state in states],
        ours,
        np.asarray(output.hidden[0]),
        np.asarray(output.logits[0]),
    )


def log_softmax(x):
    largest = x.max(-1, keepdims=True)
    return x - np.log(np.exp(x - largest).sum(-1, keepdims=True)) - largest


class Recorder:
    """A drafter whose states are labels, and which records what `unroll` gives it to read.

    The records are by step and place.
    """

    sizes = SimpleNamespace(num_layers=1)

    def __init__(self, modules: int) -> None:
        self.modules, self.calls = modules, []

    def embed(self, target, tokens):
        return tokens[..., None].astype(float)

    def in_window(self, layer, mask, positions, of_pairs):
        return mask  # it has no window

    def run(self, states, embedded, positions, mask, past, module):
        """Record one call, and return its states and entry.

        The state of call c at pair t is 10 (c + 1) + t; an entry is the number of its call.
        """
        call, count = len(self.calls), positions.shape[1]
        own_mask = np.eye(count, dtype=bool) if mask is None else np.asarray(mask[0])
        pieces = [
            (entry, np.eye(count, dtype=bool) if visible is None else np.asarray(visible[0]))
            for entry, visible in past[0]
        ]
        masks = [(call, own_mask), *pieces]
        visible = [
            {(entry, u) for entry, m in masks for u in range(count) if m[t, u]}
            for t in range(count)
        ]
        columns = [states[0, :, 0], embedded[0, :, 0], positions[0]]
        read = np.stack(columns, axis=1).astype(int).tolist()
        self.calls.append((module, read, visible))
        return jnp.arange(count)[None, :, None] + 10 * (call + 1.0), (call,)


@pytest.mark.parametrize("modules", [1, 2])
def test_what_is_read_at_each_step_is_as_the_table_has_it(modules) -> None:
    student, features = Recorder(modules), jnp.arange(5.0)[None, :, None]
    places = list(unroll(student, batch_of([list(range(6))]), None, features, 3, detach=False))
    (first, read_0, seen_0), (second, read_1, seen_1), (third, read_2, seen_2) = student.calls
    moved = modules - 1  # module 1 reads at pair t + 1 what is at place t
    assert (first, second, third) == (0, moved, moved)
    assert read_0 == [[t, t + 1, t] for t in range(5)]
    assert read_1[moved : moved + 4] == [[10 + t, t + 2, t + 1] for t in range(4)]
    assert read_2[:3] == [[20 + t + moved, t + 3, t + 2] for t in range(3)]
    assert seen_0 == [{(0, u) for u in range(t + 1)} for t in range(5)]
    if modules == 1:
        assert seen_1[:4] == [{*seen_0[t], (1, t)} for t in range(4)]
        assert seen_2[:3] == [{*seen_1[t], (2, t)} for t in range(3)]
    else:
        assert seen_1 == [{(1, 0)}, *({(1, u + 1) for u in range(t + 1)} for t in range(4))]
        assert seen_2[:3] == [{*seen_1[t + 1], (2, t)} for t in range(3)]
    assert [states[0, :3, 0].tolist() for states in places] == [
        [10, 11, 12],
        [20 + moved, 21 + moved, 22 + moved],
        [30, 31, 32],
    ]


@pytest.mark.full
@pytest.mark.parametrize(
    ("method", "steps", "top_weight"),
    [
        (Eagle1Training(target="here", noise=0.0), 1, 0.0),
        (HassTraining(target="here", noise=0.0, top_k=3), 3, 1.0),
    ],
)
def test_features_and_tokens_are_learnt(method, steps, top_weight) -> None:
    student = strong(Eagle.init(TARGET, jax.random.key(1), Chain(3)))
    loss, metrics = jax.jit(method.objective)(student, BATCH, TARGET)
    states, ours, hidden, theirs = parts(student, steps)
    expected = 0.0
    for step in range(steps):
        for t in COUNTED[step]:
            gap = np.abs(states[step][t] - hidden[t + 1 + step])
            p = np.exp(log_softmax(theirs[t + 1 + step].astype(np.float64)))
            log_q = log_softmax(ours[step][t])
            best = np.argsort(-p)[:3]
            expected += (
                np.where(gap < 1, gap**2 / 2, gap - 0.5).mean()
                - 0.1 * (p @ log_q)
                - top_weight * (p[best] @ log_q[best])
            )
    # The mean is over all 10 positions, whether they count or not.
    np.testing.assert_allclose(loss, expected / 10 / steps, rtol=1e-4)
    assert set(metrics) >= {"loss", "feature_loss_0", f"token_loss_{steps - 1}"}


@pytest.mark.full
def test_noise_is_of_the_width_that_was_asked_for(monkeypatch) -> None:
    student = strong(Eagle.init(TARGET, jax.random.key(1), Chain(3)))

    def loss(noise, batch):
        return Eagle1Training(target="here", noise=noise).objective(student, batch, TARGET)[0]

    objective = jax.jit(loss, static_argnums=0)
    recorded = []

    def record(student, batch, target, features, *_, **__):
        recorded.append(features)
        return [features]

    with monkeypatch.context() as patched:
        patched.setattr(feature_loss, "unroll", record)
        for noise in (0.0, 0.2):
            loss(noise, BATCH)
    # The noise is uniform, and its width is meant for a window of 512 tokens; this one has 10.
    gap = np.abs(recorded[1] - recorded[0]).max()
    assert 0.9 < gap / (0.2 / 2 * 512 / 10) <= 1
    quiet, noisy = objective(0.0, BATCH), objective(0.2, BATCH)
    assert quiet != noisy
    assert noisy == objective(0.2, BATCH)  # only the step's own key decides the noise
    assert noisy != objective(0.2, {**BATCH, "key": jax.random.key(1)})


def losses_of_acceptance(loss, pairs, eta=3.0):
    """Return the loss of each pair of one depth.

    A pair has all the target's logits, and the drafter's logits of the tokens ``ids``.
    """
    chances, divergences = [], []
    for target_logits, ids, ours in pairs:
        p = np.exp(log_softmax(np.asarray(target_logits, np.float64)))[ids]
        q = np.exp(log_softmax(ours))
        chances.append(sum(min(x, y) for x, y in zip(p, q, strict=True)))
        scaled = p / p.sum()
        divergences.append(sum(x * np.log(x / y) for x, y in zip(scaled, q, strict=True) if x))
    if loss == "acceptance":
        return [-np.log(chance) for chance in chances]
    share = np.exp(-eta * np.mean(chances)) if chances else 1.0
    return [
        share * kl + (1 - share) * (1 - chance)
        for kl, chance in zip(divergences, chances, strict=True)
    ]


@pytest.mark.parametrize("kind", ["cross_entropy", "acceptance", "hybrid"])
@pytest.mark.represents("losses over a draft vocabulary")
def test_tokens_are_learnt_at_every_step_within_the_draft_vocabulary(kind) -> None:
    ids = np.array([0, 2, 3, 4, 6, 8, 10])
    student = strong(Eagle3.init(TARGET, jax.random.key(1), Chain(3), ids=ids))
    loss, _ = jax.jit(Eagle3Training(target="here", steps=3, loss=kind, eta=2.0).objective)(
        student, BATCH, TARGET
    )
    _, ours, _, theirs = parts(student, 3)
    expected, left_out = 0.0, 0
    for step in range(3):
        pairs = []
        for t in COUNTED[step]:
            target_logits = theirs[t + 1 + step]
            if target_logits.argmax() not in ids:
                left_out += 1
                continue
            pairs.append((target_logits, ids, ours[step][t]))
        if kind == "cross_entropy":
            terms = [
                -np.exp(log_softmax(target_logits[ids].astype(np.float64))) @ log_softmax(q)
                for target_logits, ids, q in pairs
            ]
        else:
            terms = losses_of_acceptance(kind, pairs, eta=2.0)
        expected += 0.8**step * sum(terms)
    assert left_out and expected > 1
    np.testing.assert_allclose(loss, expected / 10, rtol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("kind", ["acceptance", "hybrid"])
def test_a_loss_of_acceptance_raises_it(kind) -> None:
    """Check a draft vocabulary and a few steps of plain gradient descent."""
    student = Eagle3.init(TARGET, jax.random.key(1), Chain(3), ids=np.array([0, 2, 3, 4, 6, 8, 10]))
    batch = batch_of([[1, 2, 3, 4, 9, 3, 1, 5, 6, 7, 8, 2, 1, 4]])
    method = Eagle3Training(target="here", steps=2, loss=kind)

    def objective(params):
        return method.objective(student.replace(params=params), batch, TARGET)[0]

    @jax.jit
    def descend(params):
        gradient = jax.grad(objective, allow_int=True)(params)
        return jax.tree.map(
            lambda x, g: x if x.dtype == jnp.int32 else x - 0.3 * g, params, gradient
        )

    params = student.params
    for _ in range(30):
        params = descend(params)
    before, after = (
        method.evaluation(student.replace(params=p), batch, TARGET)
        for p in (student.params, params)
    )
    gain = after["acceptance_length_sampled"].value - before["acceptance_length_sampled"].value
    assert gain > 0.1


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (
            Eagle3Training(target="here", loss="kl"),
            r"method\.loss='kl': must be one of cross_entropy, acceptance, hybrid",
        ),
        (Eagle3Training(target="here", eta=-1.0), r"method\.eta=-1\.0: must be at least 0"),
    ],
)
def test_losses_that_are_none_are_refused(method, message) -> None:
    with pytest.raises(ConfigError, match=message):
        method.check(window=64)


@pytest.mark.full
def test_gradients_go_through_all_steps_of_eagle3_and_stop_between_those_of_hass(
    monkeypatch,
) -> None:
    """Check whether the third step's loss depends on the first step's state.

    Check also which of the two each method chooses.
    """

    def sensitivity(student, detach):
        def last(shift):
            features = student.features(forward(TARGET, BATCH, student.taps(TARGET.config))) + shift
            *_, states = unroll(student, BATCH, TARGET, features, 3, detach=detach)
            return jnp.sum(states)

        return jax.grad(last)(0.0)

    eagle = strong(Eagle.init(TARGET, jax.random.key(1), Chain(3)))
    whole, cut = sensitivity(eagle, False), sensitivity(eagle, True)
    assert whole != cut
    detached = {}
    for module, method, student in (
        (feature_loss, HassTraining(target="here"), eagle),
        (
            eagle3,
            Eagle3Training(target="here", steps=2),
            Eagle3.init(TARGET, jax.random.key(1), Chain(3)),
        ),
    ):
        with monkeypatch.context() as patched:
            name = method.name
            patched.setattr(
                module,
                "unroll",
                lambda student, batch, target, features, *_, detach, name=name, **__: (
                    detached.update({name: detach}) or [features]
                ),
            )
            method.objective(student, BATCH, TARGET)
    assert detached == {"hass": True, "eagle3": False}
    with_remat = Eagle3Training(target="here", steps=2, remat=True)
    without_remat = Eagle3Training(target="here", steps=2)
    student = Eagle3.init(TARGET, jax.random.key(1), Chain(3))
    gradients = [
        jax.grad(lambda p, m=method: m.objective(student.replace(params=p), BATCH, TARGET)[0])(
            student.params
        )
        for method in (with_remat, without_remat)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), *gradients)


@pytest.mark.full
def test_a_drafter_that_says_what_the_target_says_is_simulated_as_always_right(monkeypatch) -> None:
    student = Eagle.init(TARGET, jax.random.key(1), Chain(3))
    batch = batch_of([list(range(1, 11))])
    unsure = JUDGED.evaluation(student, batch, TARGET)
    assert 1 <= unsure["acceptance_length"].value < 1 + SIMULATED_STEPS
    output = forward(TARGET, batch)

    # The target's own logits, shifted by the number of the step.
    def oracle(self, target, states, module):
        oracle.step += 1
        return jnp.roll(output.logits, -oracle.step, axis=1)

    oracle.step = 0
    monkeypatch.setattr(Eagle, "logits", oracle)
    sure = {name: mean.value for name, mean in JUDGED.evaluation(student, batch, TARGET).items()}
    assert sure["acceptance_length"] == sure["accuracy_4"] * SIMULATED_STEPS + 1
    assert sure["acceptance_length"] == 1 + SIMULATED_STEPS
    np.testing.assert_allclose(sure["acceptance_length_sampled"], 1 + SIMULATED_STEPS, rtol=1e-5)


@pytest.mark.full
def test_chains_are_simulated_where_all_their_tokens_count() -> None:
    """Check a mask with two holes: only the first five of ten labels are a chain of five."""
    student = strong(Eagle.init(TARGET, jax.random.key(1), Chain(3)))
    mask = [0, 1, 1, 1, 1, 1, 0, 1, 1, 1]
    tokens = [1, 2, 3, 4, 9, 3, 1, 5, 6, 7, 8]
    metrics = JUDGED.evaluation(student, batch_of([tokens], mask), TARGET)
    alone = JUDGED.evaluation(student, batch_of([tokens], [0, 1, 1, 1, 1, 1, 0, 0, 0, 0]), TARGET)
    sampled = [measured["acceptance_length_sampled"].value for measured in (metrics, alone)]
    assert sampled[0] == sampled[1] > 1


def test_the_draft_vocabulary_is_what_is_said_most() -> None:
    counts = np.array([5, 0, 9, 5, 1, 0, 0, 7, 0, 0, 0])
    assert most_frequent(counts, 4).tolist() == [0, 2, 3, 7]
    student = Eagle3Training(target="here", draft_vocab_size=4).init(
        jax.random.key(0), StudentInputs(None, counts, TARGET)
    )
    assert student.vocabulary(TARGET).ids.tolist() == [0, 2, 3, 7]
    np.testing.assert_array_equal(
        student.params["lm_head"], TARGET.params["lm_head"][:, np.array([0, 2, 3, 7])]
    )
    assert Eagle3Training(target="here", freeze_head=True).frozen("params.lm_head")
    assert not Eagle3Training(target="here").frozen("params.lm_head")
