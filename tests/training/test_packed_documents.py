"""Documents that share a window are learnt as each of them would be alone.

The target's queries grow with their positions, as those of Ministral 3, so that its output depends
on positions and not only on distances.
"""

from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.models.config import Rope
from specjax.training.contract import Batch, StudentInputs, TrainingMethod
from specjax.training.methods import (
    AnyMethod,
    DFlash2Training,
    DFlashTraining,
    Distill,
    DSparkTraining,
    Eagle1Training,
    Eagle3Training,
    Gemma4AssistantTraining,
    HassTraining,
    JetSpecTraining,
    Lm,
    LmMTP,
    MedusaTraining,
    MoATraining,
    MTPTraining,
    PEagleTraining,
)
from specjax.training.objectives.windows import positions, read
from tests.conftest import tiny_target
from tests.training import test_chunked_objectives
from tests.training.packing import pack, sequence
from tests.training.sizes import SIZES

LENGTHS = (9, 5, 12)
WINDOW = sum(LENGTHS)  # one place stays empty
ROPE = Rope(query_growth=0.5, original_max_positions=2)
MODEL = replace(SIZES, rope=ROPE)
TARGET = tiny_target(vocab_size=264, rope=ROPE, num_layers=2, bos_token_id=None, eos_token_ids=())
# A block at every place, so that chance has nothing to choose.
BLOCKS: dict[str, Any] = {"target": "here", "layers": 1, "block_size": 4, "anchors": WINDOW}
CONVOLUTIONS: dict[str, Any] = {"conv_group_size": 8, "selector_rank": 3, "selector_top_k": 4}
DRAFTS: dict[str, Any] = {"shortest_block": 4, "longest_block": 4, "staircase_until": 0.0}
METHODS: dict[str, TrainingMethod] = {
    "lm": Lm(model=MODEL),
    "lm with remat": Lm(model=MODEL, remat=True),
    "distill": Distill(target="here", model=MODEL),
    "lm+mtp": LmMTP(model=MODEL, modules=2),
    "eagle1": Eagle1Training(target="here", noise=0.0),
    "hass": HassTraining(target="here", top_k=3, noise=0.0),
    "eagle3": Eagle3Training(target="here", steps=3, draft_vocab_size=100),
    "mtp": MTPTraining(target="here", modules=2, steps=3),
    "medusa": MedusaTraining(target="here", heads=2),
    "moa": MoATraining(target="here", **DRAFTS),
    "moa with tli": MoATraining(target="here", tli=1, **DRAFTS),
    "gemma4_assistant": Gemma4AssistantTraining(target="here", steps=3),
    "dflash": DFlashTraining(**BLOCKS),
    "dflash dpace": DFlashTraining(**BLOCKS, labels="target", loss="acceptance", dpace=0.5),
    "dflash2": DFlash2Training(**BLOCKS, **CONVOLUTIONS),
    "jetspec": JetSpecTraining(**BLOCKS),
    "dspark": DSparkTraining(**BLOCKS, markov_rank=3),
    "peagle": PEagleTraining(target="here", layers=1, depths=3, kept=1.0),
}


def documents() -> list:
    random = np.random.default_rng(0)
    return [
        sequence(random.integers(0, 264, length), random.random(length) < 0.8) for length in LENGTHS
    ]


def batch_of(rows: list[list]) -> Batch:
    """Return a batch whose rows have these documents."""
    packed = [pack(row, WINDOW, packing="documents") for row in rows]
    assert all(len(row["tokens"]) == 1 for row in packed)
    return {
        **{name: jnp.concatenate([row[name] for row in packed]) for name in packed[0]},
        "key": jax.random.key(2),
        "progress": jnp.array(0.5),
    }


TOGETHER, ALONE = batch_of([documents()]), batch_of([[document] for document in documents()])


def student_of(method: TrainingMethod) -> Any:
    """Return a student whose predictions differ from each other."""
    target = TARGET if method.needs_target else None
    inputs = StudentInputs(test_chunked_objectives.TOKENIZER, np.arange(264), target)
    leaves, tree = jax.tree.flatten(method.init(jax.random.key(1), inputs))
    keys = jax.random.split(jax.random.key(7), len(leaves))
    return jax.tree.unflatten(
        tree,
        [
            x + 0.2 * jax.random.normal(key, x.shape)
            if jnp.issubdtype(x.dtype, jnp.floating) and x.ndim > 1
            else x
            for x, key in zip(leaves, keys, strict=True)
        ],
    )


def test_all_methods_are_tried() -> None:
    assert {type(method) for method in METHODS.values()} == set(get_args(AnyMethod))


def test_documents_start_at_position_0_and_have_the_entries_that_they_have_alone() -> None:
    assert positions(TOGETHER["segments"])[0].tolist() == [
        place for length in LENGTHS for place in range(length)
    ] + [0]
    together, alone = (jax.jit(read)(TARGET, batch) for batch in (TOGETHER, ALONE))
    begin = 0
    for row, length in enumerate(LENGTHS):
        for ours, theirs in zip(jax.tree.leaves(together), jax.tree.leaves(alone), strict=True):
            axis = ours.shape.index(WINDOW)
            part = jnp.take(ours[0], jnp.arange(begin, begin + length), axis - 1)
            expected = jnp.take(theirs[row], jnp.arange(length), axis - 1)
            np.testing.assert_allclose(part, expected, atol=1e-5)
        begin += length


@pytest.mark.full
@pytest.mark.thorough_except("lm", "lm with remat")
@pytest.mark.parametrize("name", METHODS)
def test_the_loss_of_a_window_is_the_sum_of_its_documents(name) -> None:
    method = METHODS[name]
    student, target = student_of(method), TARGET if method.needs_target else None

    @jax.jit
    def compute(batch):
        loss, metrics = method.objective(student, batch, target)
        rows = batch["tokens"].shape[0]
        return rows * loss, method.evaluation(student, batch, target), metrics

    (loss, evaluation, _), (expected, evaluation_alone, _) = compute(TOGETHER), compute(ALONE)
    assert expected > 0.1
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for metric, mean in evaluation.items():
        np.testing.assert_allclose(mean.total, evaluation_alone[metric].total, rtol=1e-5)
        if metric != "loss":  # its count is that of all places with a token
            assert mean.count == evaluation_alone[metric].count
