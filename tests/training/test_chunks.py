"""Computations by chunks of positions: the values and gradients of a single call."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specjax.sharding import make_mesh
from specjax.training.objectives import chunks
from specjax.training.objectives.chunks import by_chunks, width_of

HEAD = jax.random.normal(jax.random.key(0), (3, 7))
STATES = jax.random.normal(jax.random.key(1), (2, 10, 3))
LABELS = jnp.arange(20).reshape(2, 10) % 7


def surprise(head, states, labels):
    """Return the cross entropy of each label, and the likeliest token."""
    logits = states @ head
    entropy = (
        jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    )
    return {"entropy": entropy, "best": jnp.argmax(logits, -1)}


def in_chunks(head, states, labels):
    return by_chunks(lambda *chunk: surprise(head, *chunk), (states, labels), numbers=7)


@pytest.mark.full
@pytest.mark.thorough_except("1")
@pytest.mark.parametrize("positions", [1, 2, 4, 8])
def test_chunks_have_the_values_and_gradients_of_a_single_call(positions, monkeypatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", positions * 2 * 7 * 4)
    assert width_of(2, 10, 7) == positions
    whole, parts = surprise(HEAD, STATES, LABELS), in_chunks(HEAD, STATES, LABELS)
    np.testing.assert_allclose(parts["entropy"], whole["entropy"], atol=1e-6)
    np.testing.assert_array_equal(parts["best"], whole["best"])

    def mean_of(computed):
        return lambda head, states: computed(head, states, LABELS)["entropy"].mean()

    for got, expected in zip(
        jax.grad(mean_of(in_chunks), argnums=(0, 1))(HEAD, STATES),
        jax.grad(mean_of(surprise), argnums=(0, 1))(HEAD, STATES),
        strict=True,
    ):
        np.testing.assert_allclose(got, expected, atol=1e-6)


def test_no_array_of_all_logits_is_computed_in_either_pass(monkeypatch) -> None:
    monkeypatch.setattr(chunks, "CHUNK_BYTES", 4 * 2 * 7 * 4)
    program = str(
        jax.make_jaxpr(jax.grad(lambda head: in_chunks(head, STATES, LABELS)["entropy"].sum()))(
            HEAD
        )
    )
    # Neither 10 positions nor the 3 chunks of 4 have an array over the vocabulary.
    assert "[2,4,7]" in program
    assert not any(shape in program for shape in ("[2,10,7]", "[2,12,7]", "[3,2,4,7]"))


def test_the_width_is_that_of_one_device() -> None:
    assert width_of(8, 2048, 151_936) == 64
    mesh = make_mesh(1, 1)
    assert width_of(8, 2048, 151_936, mesh) == 64
    assert width_of(1, 1, 2**40) == 1
