"""Held-out metrics: those of whole logits, however many rows and positions are read at once."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sharding import make_mesh
from specjax.training import losses, step
from specjax.training.contract import Mean, StudentInputs
from specjax.training.methods import (
    DFlash2Training,
    DFlashTraining,
    Distill,
    DSparkTraining,
    Eagle1Training,
    Eagle3Training,
    Gemma4AssistantTraining,
    Lm,
    LmMTP,
    MedusaTraining,
    MoATraining,
    MTPTraining,
    PEagleTraining,
)
from specjax.training.methods.gemma4_assistant import draft_along
from specjax.training.methods.moa import draft_everywhere
from specjax.training.methods.peagle import read_depths
from specjax.training.objectives import chunks
from specjax.training.objectives.ahead import SIMULATED_STEPS, ahead, counted
from specjax.training.objectives.blocks import BlockMethod, read_blocks
from specjax.training.objectives.unrolling import unroll
from specjax.training.objectives.windows import score
from specjax.training.step import evaluate, evaluation_batches, evaluation_rows, evaluation_step
from specjax.training.tokenizer import train_tokenizer
from tests.conftest import tiny_target
from tests.training.sizes import SIZES

METHODS = {
    "lm": Lm(model=SIZES),
    "distill": Distill(target="here", model=SIZES),
    "eagle1": Eagle1Training(target="here"),
    "eagle1 with lsa": Eagle1Training(target="here", lsa=True),
    "eagle3": Eagle3Training(target="here", draft_vocab_size=7),
    "peagle": PEagleTraining(target="here", layers=1, draft_vocab_size=7),
    "mtp": MTPTraining(target="here", modules=2),
    "lm+mtp": LmMTP(model=SIZES, modules=1),
    "medusa": MedusaTraining(target="here", heads=3),
    "moa": MoATraining(target="here"),
    "assistant": Gemma4AssistantTraining(target="here", layers=2),
    "dflash": DFlashTraining(target="here", layers=1, block_size=4),
    "dflash2": DFlash2Training(
        target="here",
        layers=1,
        block_size=4,
        conv_group_size=8,
        selector_rank=3,
        selector_top_k=4,
    ),
    "dspark": DSparkTraining(target="here", layers=1, block_size=7, markov_rank=3, markov="rnn"),
}
ROWS, WINDOW = 5, 12
RANDOM = np.random.default_rng(0)
WINDOWS = {
    "tokens": RANDOM.integers(0, 11, (ROWS, WINDOW + 1)).astype(np.int32),
    # Documents of uneven lengths; the last two rows have a single one.
    "segments": np.stack(
        [np.searchsorted([4 * row + 2, 4 * row + 5], range(WINDOW + 1)) for row in range(ROWS)]
    ).astype(np.int32),
    "loss_mask": RANDOM.random((ROWS, WINDOW)) < 0.8,
}
WINDOWS["loss_mask"][4] = True


@cache
def student_and_target(name: str):
    method = METHODS[name]
    target = tiny_target(num_layers=3) if method.needs_target else None
    inputs = StudentInputs(train_tokenizer(["abc"] * 4, 259), np.arange(11), target)
    student = method.init(jax.random.key(1), inputs)
    leaves, tree = jax.tree.flatten(student)
    keys = jax.random.split(jax.random.key(7), len(leaves))
    # With layer attention, EAGLE-1's states grow in each step it reads its own: with 0.3 the last
    # logits would be 787, too large for float32 to keep five digits of a probability.
    scale = 0.1 if name == "eagle1 with lsa" else 0.3
    strong = [
        x + jax.random.normal(key, x.shape) * scale if jnp.issubdtype(x.dtype, jnp.floating) else x
        for key, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, strong), target


def predictions(method, student, batch, target):
    """Yield all logits ``[B, T, Vd]`` of each step."""
    taps = student.taps(target.config) if hasattr(student, "taps") else ()
    output, entries = score(target, batch, taps)
    window = output.hidden.shape[1]
    every = jnp.broadcast_to(jnp.arange(window), output.hidden.shape[:2])
    if isinstance(method, BlockMethod):
        states = read_blocks(student, target, batch, output, every)
        before = [ahead(batch["tokens"], 1 + k)[:, :window] for k in range(student.config.depth)]
        yield from method.expected(student, target, states, jnp.stack(before, axis=-1))
    elif isinstance(method, MedusaTraining):
        yield from (student.head(head, output.hidden) for head in range(method.heads))
    elif isinstance(method, MoATraining):
        for hidden in draft_everywhere(student, batch, target, output, entries, SIMULATED_STEPS):
            yield ahead(target.head(hidden), 1)
    elif isinstance(method, Gemma4AssistantTraining):
        for x in draft_along(student, batch, target, output, entries, SIMULATED_STEPS):
            yield student.logits(x)
    elif isinstance(method, PEagleTraining):
        sizes = (window,) * (SIMULATED_STEPS - 1)
        features = student.features(output)
        for states in read_depths(student, target, batch, features, every, sizes):
            yield student.logits(target, states)
    else:
        features = student.features(output, entries)
        steps = unroll(student, batch, target, features, SIMULATED_STEPS, detach=True)
        for k, states in enumerate(steps):
            yield student.logits(target, states, min(k, student.modules - 1))


def simulated(method, student, batch, target) -> dict[str, jax.Array]:
    """Return the metrics of chains, from whole arrays of logits."""
    output, _ = score(target, batch)
    vocabulary = student.vocabulary(target) if hasattr(student, "vocabulary") else None
    whole = jnp.stack([counted(batch, k) for k in range(SIMULATED_STEPS)]).all(axis=0)
    alive, probability = jnp.where(whole, 1.0, 0.0), jnp.where(whole, 1.0, 0.0)
    metrics = {"acceptance_length": jnp.ones(()), "acceptance_length_sampled": jnp.ones(())}
    for k, logits in enumerate(predictions(method, student, batch, target)):
        if k == SIMULATED_STEPS:
            break
        target_logits = ahead(output.logits, 1 + k)
        best, q = jnp.argmax(logits, axis=-1), jax.nn.softmax(logits)
        if vocabulary is not None:
            best, q = vocabulary.ids[best], vocabulary.widen(q)
        right = best == jnp.argmax(target_logits, axis=-1)
        accepted = jnp.minimum(jax.nn.softmax(target_logits), q).sum(axis=-1)
        alive, probability = alive * right, probability * accepted
        metrics["acceptance_length"] += losses.mean_over_labels(alive, whole)
        metrics["acceptance_length_sampled"] += losses.mean_over_labels(probability, whole)
        metrics[f"accuracy_{k}"] = losses.mean_over_labels(right, counted(batch, k))
        metrics[f"acceptance_{k}"] = losses.mean_over_labels(accepted, counted(batch, k))
    return metrics


def oracle(name: str) -> dict[str, jax.Array]:
    """Return the metrics of all windows in one batch, with all logits at once."""
    method, (student, target) = METHODS[name], student_and_target(name)
    batch = {**jax.tree.map(jnp.asarray, WINDOWS), "key": jax.random.key(0), "progress": 1.0}
    if isinstance(method, LmMTP):
        loss = Lm(model=SIZES).objective(student.model, batch, None)[1]["loss"]
        return {"loss": loss, **simulated(method, student.mtp, batch, student.model)}
    if isinstance(method, Lm | Distill):
        return method.objective(student, batch, target)[1]
    return simulated(method, student, batch, target)


def measured(name: str, rows: int, mesh=None, **options) -> dict[str, float]:
    student, target = student_and_target(name)
    batches = evaluation_batches(WINDOWS, rows, mesh)
    return evaluate(student, batches, target, METHODS[name], mesh=mesh, **options)


def check_equal(metrics, expected) -> None:
    assert metrics.keys() == expected.keys()
    for metric, value in expected.items():
        np.testing.assert_allclose(metrics[metric], value, rtol=1e-5, atol=1e-6, err_msg=metric)


@pytest.mark.full
@pytest.mark.thorough_except("lm", "distill")
@pytest.mark.parametrize("name", METHODS)
def test_metrics_are_those_of_whole_logits_however_much_is_read_at_once(name, monkeypatch) -> None:
    """Check all rows with all positions, and 2 of 5 rows, the last filled up, 4 positions each."""
    expected = oracle(name)
    if "acceptance_length" in expected:
        assert 1 < expected["acceptance_length_sampled"] < 1 + SIMULATED_STEPS
    check_equal(measured(name, ROWS), expected)
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 1)
    check_equal(measured(name, 2), expected)


@pytest.mark.full
def test_rows_do_not_change_a_number() -> None:
    whole = measured("eagle1", ROWS)
    for rows in (1, 2, 4, 8):
        check_equal(measured("eagle1", rows), whole)


@pytest.mark.full
def test_a_mesh_does_not_change_a_number() -> None:
    mesh = make_mesh(2, 1)
    assert evaluation_rows(4, 4, mesh) == 2
    assert evaluation_rows(4, 2, mesh) == 2
    assert evaluation_rows(8, 1, mesh) == 8
    assert evaluation_rows(4, 4) == 1
    check_equal(measured("eagle1", 2, mesh), measured("eagle1", 4))


def test_every_window_up_to_64_counts_once() -> None:
    windows = {name: np.repeat(array[:1], 70, axis=0) for name, array in WINDOWS.items()}
    windows["tokens"] = windows["tokens"] + np.arange(70, dtype=np.int32)[:, None]
    batches = list(evaluation_batches(windows, 12))
    assert [len(batch["tokens"]) for batch in batches] == [12] * 6
    tokens = np.concatenate([batch["tokens"] for batch in batches])
    np.testing.assert_array_equal(tokens[:64], windows["tokens"][:64])
    assert not np.concatenate([batch["loss_mask"] for batch in batches])[64:].any()
    assert (np.concatenate([batch["segments"] for batch in batches])[64:] == -1).all()


@pytest.mark.full
def test_products_are_of_the_compute_type_and_sums_of_float32() -> None:
    student, target = student_and_target("eagle3")
    (batch,) = evaluation_batches(WINDOWS, ROWS)
    options = {"method": METHODS["eagle3"], "compute_dtype": jnp.bfloat16}
    metrics = jax.eval_shape(
        lambda batch: evaluation_step(student, batch, step.cast(target, jnp.bfloat16), **options),
        batch,
    )
    assert {mean.total.dtype.name for mean in metrics.values()} == {"float32"}
    rounded, exact = (measured("eagle3", ROWS, compute_dtype=x) for x in (jnp.bfloat16, "float32"))
    assert rounded != exact
    np.testing.assert_allclose(rounded["acceptance_0"], exact["acceptance_0"], atol=0.02)


def test_numbers_of_a_method_count_as_means() -> None:
    """Check a method that returns plain numbers, as methods outside the library may."""

    class Plain(Lm):
        def evaluation(self, student, batch, target):
            return self.objective(student, batch, target)[1]

    student, _ = student_and_target("lm")
    batches = list(evaluation_batches(WINDOWS, 2))
    check_equal(evaluate(student, batches, None, Plain(model=SIZES)), measured("lm", 2))


def test_a_mean_of_nothing_is_its_base() -> None:
    nothing = Mean.over_labels(jnp.ones((1, 2)), jnp.zeros((1, 2), bool), base=1.0)
    assert nothing.value == 1
