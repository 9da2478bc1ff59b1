"""The objectives of multi-token prediction and Medusa, against formulas position by position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.config import ConfigError
from specjax.drafters import MTP, Medusa
from specjax.models.transformer import Target
from specjax.training import losses
from specjax.training.contract import StudentInputs
from specjax.training.methods import Lm, LmMTP, MedusaTraining, MTPTraining
from specjax.training.objectives.unrolling import unroll
from specjax.training.objectives.windows import forward
from specjax.training.tokenizer import train_tokenizer
from tests.training.packing import pack
from tests.training.sizes import SIZES
from tests.training.test_drafter_methods import BATCH, COUNTED, TARGET, log_softmax, strong
from tests.training.test_methods import batch_of

TOKENS = np.asarray(BATCH["tokens"][0])


def of_labels(labels: str, theirs: np.ndarray, ours: np.ndarray, step: int, t: int) -> float:
    """Return the cross entropy of one prediction.

    The label is token t + 2 + step, or the target's distribution there.
    """
    log_q = log_softmax(ours[t].astype(np.float64))
    if labels == "text":
        return -log_q[TOKENS[t + 2 + step]]
    return -np.exp(log_softmax(theirs[t + 1 + step].astype(np.float64))) @ log_q


@pytest.mark.full_except("target")
@pytest.mark.parametrize("labels", ["text", "target"])
def test_each_head_learns_the_token_that_far_ahead(labels) -> None:
    student = strong(Medusa.init(TARGET, jax.random.key(1), heads=3))
    blocks = [
        {**head, "blocks": [{"linear": jnp.eye(16), "linear_bias": jnp.ones(16)}]}
        for head in student.params["heads"]
    ]
    student = student.replace(params={"heads": blocks})
    loss, metrics = jax.jit(MedusaTraining(target="here", heads=3, labels=labels).objective)(
        student, BATCH, TARGET
    )
    output = forward(TARGET, BATCH)
    theirs = np.asarray(output.logits[0])
    expected = []
    for head in range(3):
        ours = np.asarray(student.head(head, output.hidden)[0])
        expected.append(sum(of_labels(labels, theirs, ours, head, t) for t in COUNTED[head]) / 10)
    np.testing.assert_allclose([metrics[f"loss_{head}"] for head in range(3)], expected, rtol=1e-4)
    np.testing.assert_allclose(
        loss, 0.8 * expected[0] + 0.64 * expected[1] + 0.512 * expected[2], rtol=1e-4
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("labels", "modules", "steps"), [("text", 3, 0), ("target", 3, 0), ("target", 2, 3)]
)
def test_each_module_learns_one_token_further(labels, modules, steps) -> None:
    """Check three tokens; if there are two modules, the second one predicts the last token too.

    `test_features` compares the states with reading token by token.
    """
    student = strong(MTP.init(TARGET, jax.random.key(1), modules=modules))
    method = MTPTraining(target="here", modules=modules, steps=steps, labels=labels)
    loss, metrics = jax.jit(method.objective)(student, BATCH, TARGET)
    output = forward(TARGET, BATCH)
    theirs = np.asarray(output.logits[0])
    states = list(unroll(student, BATCH, TARGET, output.hidden, 3, detach=False))
    expected = []
    for m in range(3):
        ours = np.asarray(student.logits(TARGET, states[m], min(m, modules - 1))[0])
        expected.append(sum(of_labels(labels, theirs, ours, m, t) for t in COUNTED[m]) / 10)
    np.testing.assert_allclose([metrics[f"loss_{m}"] for m in range(3)], expected, rtol=1e-4)
    np.testing.assert_allclose(loss, np.mean(expected), rtol=1e-4)


def test_a_later_module_teaches_the_ones_before_it() -> None:
    student = MTP.init(TARGET, jax.random.key(1), modules=2)

    def second(params):
        method = MTPTraining(target="here", modules=2)
        _, metrics = method.objective(student.replace(params=params), BATCH, TARGET)
        return metrics["loss_1"]

    first, last = jax.jit(jax.grad(second))(student.params)["modules"]
    assert all(np.abs(module["fc"]).max() > 0 for module in (first, last))


@pytest.mark.full
@pytest.mark.parametrize(
    "method", [Lm(), MedusaTraining(target="here", heads=2), MTPTraining(target="here", modules=2)]
)
def test_no_prediction_is_held_against_the_next_document(method) -> None:
    """Check two windows that differ only in the last token, which begins another document."""
    students = {"lm": TARGET, "medusa": Medusa.init(TARGET, jax.random.key(1), heads=2)}
    student = (
        students[method.name]
        if method.name in students
        else MTP.init(TARGET, jax.random.key(1), modules=2)
    )
    objective = jax.jit(method.objective)

    def loss(begin: int | None, first_token: int) -> float:
        batch = pack([[1, 2, 3, 4, 9, 3, 1], [first_token, 6]], window=7, begin=begin)
        return float(objective(student, batch, TARGET)[0])

    assert loss(None, 5) == loss(None, 8)
    assert loss(5, 5) != loss(8, 8)  # a token that separates documents is a label


@pytest.mark.full
def test_model_and_modules_are_trained_together() -> None:
    method = LmMTP(model=SIZES, modules=2)
    inputs = StudentInputs(train_tokenizer(["abc"] * 4, 259), np.ones(259))
    student = method.init(jax.random.key(0), inputs)
    alone = Lm(model=SIZES).init(jax.random.key(0), inputs)
    jax.tree.map(np.testing.assert_array_equal, student.model.params, alone.params)
    batch = batch_of([list(range(1, 9)), [3, 4, 5]])
    objective = jax.jit(
        lambda student, progress: method.objective(student, {**batch, "progress": progress}, None)
    )
    reported = {progress: objective(student, progress) for progress in (0.1, 0.9)}
    lm_loss = losses.mean_over_positions(
        losses.cross_entropy(forward(student.model, batch).logits, batch["tokens"][:, 1:]),
        batch["loss_mask"],
    )
    for progress, weight in ((0.1, 0.3), (0.9, 0.1)):
        loss, metrics = reported[progress]
        np.testing.assert_allclose(metrics["lm_loss"], lm_loss, rtol=1e-6)
        np.testing.assert_allclose(
            loss, lm_loss + weight * (metrics["loss_0"] + metrics["loss_1"]) / 2, rtol=1e-5
        )
    judged = jax.jit(lambda student: method.evaluation(student, {**batch, "progress": 1.0}, None))(
        student
    )
    np.testing.assert_allclose(judged["loss"].value, lm_loss, rtol=1e-6)
    gradient = jax.jit(
        jax.grad(lambda model: objective(student.replace(model=model), 0.1)[1]["loss_0"])
    )(student.model)
    assert np.abs(gradient.params["layers"][0]["q"]).max() > 0  # the modules teach the model


def test_model_and_modules_are_saved_together(tmp_path) -> None:
    method = LmMTP(model=SIZES, modules=2)
    student = method.init(
        jax.random.key(0), StudentInputs(train_tokenizer(["abc"] * 4, 259), np.ones(259))
    )
    student.save_pretrained(tmp_path)
    jax.tree.map(
        np.testing.assert_array_equal, Target.from_pretrained(tmp_path).params, student.model.params
    )
    jax.tree.map(
        np.testing.assert_array_equal,
        MTP.from_pretrained(tmp_path / "mtp").params,
        student.mtp.params,
    )
    again = type(student).from_pretrained(tmp_path, dtype=np.float32)
    # The structure is the same too, as a warm start needs.
    jax.tree.map(np.testing.assert_array_equal, again, student)


@pytest.mark.parametrize(
    ("method", "window", "message"),
    [
        (MTPTraining(target="here", modules=7), 8, "modules=7: data.window=8 is too short"),
        (MTPTraining(target="here", modules=0), 8, "modules=0: must be at least 1"),
        (
            MTPTraining(target="here", modules=2, steps=1),
            8,
            "steps=1: must be 0, or from method.modules=2 to 6",
        ),
        (
            MTPTraining(target="here", steps=7),
            8,
            "steps=7: must be 0, or from method.modules=1 to 6",
        ),
        (LmMTP(model=SIZES, modules=8), 8, "modules=8: data.window=8 is too short"),
        (LmMTP(model=SIZES, weight=-1.0), 8, "weight=-1.0"),
        (LmMTP(model=SIZES, falls_at=67), 8, "falls_at=67"),
        (MedusaTraining(target="here", decay=0.0), 8, "decay=0.0"),
        (MedusaTraining(target="here", heads=7), 8, "heads=7: data.window=8 is too short"),
        (MedusaTraining(target="here", heads=0), 8, "heads=0"),
        (MedusaTraining(), 8, "method.target=''"),
    ],
)
def test_what_cannot_be_trained_is_refused(method, window, message) -> None:
    with pytest.raises(ConfigError, match=message):
        method.check(window)
