"""Objectives by chunks of positions: the loss and gradients of all positions at once."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.training.contract import StudentInputs
from specjax.training.methods import (
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
from specjax.training.objectives import chunks
from specjax.training.objectives.whole_model import ModelSizes
from specjax.training.tokenizer import train_tokenizer
from tests.conftest import tiny_target

WINDOW = 24
MODEL = ModelSizes(
    hidden_size=16,
    intermediate_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=64,
)
BLOCKS: dict[str, Any] = {"target": "here", "layers": 1, "block_size": 4, "anchors": 20}
CONVOLUTIONS: dict[str, Any] = {"conv_group_size": 8, "selector_rank": 3, "selector_top_k": 4}
METHODS = {
    "lm": Lm(model=MODEL),
    "distill": Distill(target="here", model=MODEL),
    "lm+mtp": LmMTP(model=MODEL, modules=2),
    "eagle1": Eagle1Training(target="here"),
    "hass": HassTraining(target="here", top_k=3),
    "eagle3": Eagle3Training(target="here", steps=3),
    "eagle3 of few tokens": Eagle3Training(target="here", steps=3, draft_vocab_size=100),
    "eagle3 hybrid": Eagle3Training(target="here", steps=3, draft_vocab_size=100, loss="hybrid"),
    "mtp": MTPTraining(target="here", modules=2, steps=3),
    "mtp of the target": MTPTraining(target="here", labels="target"),
    "medusa": MedusaTraining(target="here", heads=2),
    "medusa of the target": MedusaTraining(target="here", heads=2, labels="target"),
    "moa": MoATraining(target="here"),
    "gemma4_assistant": Gemma4AssistantTraining(target="here", steps=3),
    "dflash": DFlashTraining(**BLOCKS),
    "dflash hybrid": DFlashTraining(**BLOCKS, labels="target", loss="hybrid"),
    "dflash dpace": DFlashTraining(**BLOCKS, labels="target", loss="acceptance", dpace=0.5),
    "dflash2": DFlash2Training(**BLOCKS, **CONVOLUTIONS, labels="target"),
    "jetspec": JetSpecTraining(**BLOCKS, temperature=2.0),
    "jetspec hybrid": JetSpecTraining(**BLOCKS, loss="hybrid"),
    "dspark": DSparkTraining(**BLOCKS, markov_rank=3, freeze_head=False),
    "dspark hybrid": DSparkTraining(**BLOCKS, markov_rank=3, loss="hybrid", markov="rnn"),
    "peagle": PEagleTraining(target="here", layers=1, depths=3, draft_vocab_size=100),
    "peagle hybrid": PEagleTraining(target="here", layers=1, depths=3, loss="hybrid"),
}
OFTEN = ("eagle3 hybrid", "dflash hybrid")
TOKENIZER = train_tokenizer(["import os"], vocab_size=264)
TARGET = tiny_target(vocab_size=264, bos_token_id=None, eos_token_ids=())


def batch() -> dict[str, Any]:
    random = np.random.default_rng(0)
    segments = np.zeros((2, WINDOW + 1), np.int32)
    segments[0, 10:], segments[1, 19:] = 1, 1
    return {
        "tokens": jnp.asarray(random.integers(0, 264, (2, WINDOW + 1)), jnp.int32),
        "segments": jnp.asarray(segments),
        "loss_mask": jnp.asarray(random.random((2, WINDOW)) < 0.8),
        "key": jax.random.key(2),
        "progress": jnp.array(0.5),
    }


def strong_student(method) -> Any:
    """Return a student with larger matrices, whose predictions differ."""
    counts = np.arange(264)
    inputs = StudentInputs(TOKENIZER, counts, TARGET if method.needs_target else None)
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


def loss_and_gradients(method, student, bound: int, monkeypatch) -> Any:
    """Return loss, metrics, gradients and the program, with chunks of so many bytes."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", bound)
    target = TARGET if method.needs_target else None

    @jax.jit
    def differentiate(student, batch, target):
        return jax.value_and_grad(
            lambda student: method.objective(student, batch, target), has_aux=True, allow_int=True
        )(student)

    lowered = differentiate.lower(student, batch(), target)
    (loss, metrics), gradients = lowered.compile()(student, batch(), target)
    floats = [leaf for leaf in jax.tree.leaves(gradients) if leaf.dtype == jnp.float32]
    return (loss, metrics, floats), lowered.as_text()


@pytest.mark.full
@pytest.mark.thorough_except("lm", "distill", "lm+mtp")
@pytest.mark.parametrize("name", METHODS)
def test_chunks_have_the_loss_and_gradients_of_all_positions_at_once(name, monkeypatch) -> None:
    method = METHODS[name]
    student = strong_student(method)
    whole, program = loss_and_gradients(method, student, 2**30, monkeypatch)
    # Five positions of each window fit, or at least one block.
    vocabulary = getattr(method, "draft_vocab_size", 0) or 264
    parts, chunked = loss_and_gradients(method, student, 5 * 2 * vocabulary * 4, monkeypatch)
    scale = max(float(jnp.abs(leaf).max()) for leaf in whole[2])
    assert scale > 1e-4
    for single, several in zip(jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(several, single, rtol=2e-6, atol=1e-6 * max(scale, 1))
    # Only a single call has the logits of all positions.
    assert largest(chunked) <= 4 * 2 * 264 < 24 * 2 * 264 <= largest(program)


def largest(program: str) -> int:
    """Return the number of elements of the largest array of windows, positions and logits."""
    sizes = [0]
    for piece in program.split("tensor<")[1:]:
        *shape, kind = piece.split(">")[0].split("x")
        if kind == "f32" and len(shape) > 2 and shape[-1] == "264":
            sizes.append(int(np.prod([int(size) for size in shape])))
    return max(sizes)


@pytest.mark.full
@pytest.mark.thorough_except("lm", "distill")
@pytest.mark.parametrize("name", ["lm", "distill", "lm+mtp", "medusa", "dflash", "dspark"])
def test_remat_changes_neither_loss_nor_gradients(name, monkeypatch) -> None:
    method = METHODS[name]
    student = strong_student(method)
    plain, _ = loss_and_gradients(method, student, 2**30, monkeypatch)
    remat = dataclasses.replace(method, remat=True)
    again, _ = loss_and_gradients(remat, student, 2**30, monkeypatch)
    scale = max(float(jnp.abs(leaf).max()) for leaf in plain[2])
    for first, second in zip(jax.tree.leaves(plain), jax.tree.leaves(again), strict=True):
        np.testing.assert_allclose(second, first, rtol=2e-6, atol=1e-6 * max(scale, 1))


def test_every_method_offers_remat() -> None:
    for method in METHODS.values():
        assert dataclasses.replace(method, remat=True).remat
        assert not type(method)().remat


def test_gradients_of_weights_in_bfloat16_are_summed_in_float32(monkeypatch) -> None:
    """Check a thousand equal gradients: a sum in bfloat16 stops to grow at 256."""
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4)

    def total(weight):
        return chunks.by_chunks(
            lambda weight, x: (x * weight).astype(jnp.float32),
            (jnp.ones((1, 1000), jnp.bfloat16),),
            numbers=1,
            student=weight,
        ).sum()

    assert float(jax.grad(total)(jnp.ones((), jnp.bfloat16))) == 1000
