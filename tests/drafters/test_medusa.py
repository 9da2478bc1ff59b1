"""Test the drafts of Medusa's heads, published checkpoints, and which checkpoints are refused."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import specjax
from specjax import decoding
from specjax.decoding.options import GenerationOptions
from specjax.drafters import Medusa
from specjax.drafters.registry import load_drafter
from specjax.drafts.shapes import Chain, DynamicTree, StaticTree
from specjax.errors import InputError
from specjax.models.fields import CheckpointError
from specjax.sampling import Sampling
from tests.conftest import tiny_target


def published(
    rng, heads: int = 3, blocks: int = 1, hidden: int = 16, vocab: int = 11
) -> dict[str, np.ndarray]:
    """Return heads under the names of the authors' checkpoints."""
    tensors = {}
    for head in range(heads):
        for block in range(blocks):
            tensors[f"{head}.{block}.linear.weight"] = rng.normal(size=(hidden, hidden))
            tensors[f"{head}.{block}.linear.bias"] = rng.normal(size=hidden)
        tensors[f"{head}.{blocks}.weight"] = rng.normal(size=(vocab, hidden))
    return {name: array.astype(np.float32) for name, array in tensors.items()}


def write(directory, tensors, kind: str = "safetensors", **config) -> None:
    (directory / "config.json").write_text(
        json.dumps({"medusa_num_heads": 3, "medusa_num_layers": 1} | config)
    )
    file = directory / f"medusa_lm_head.{kind}"
    if kind == "pt":
        from tests.with_torch import torch

        torch.save({name: torch.from_numpy(value) for name, value in tensors.items()}, file)
    else:
        save_file(tensors, file)


def slow_logits(tensors, hidden: np.ndarray, head: int, blocks: int = 1) -> np.ndarray:
    x = hidden
    for block in range(blocks):
        y = tensors[f"{head}.{block}.linear.weight"] @ x + tensors[f"{head}.{block}.linear.bias"]
        x = x + y / (1 + np.exp(-y))
    return tensors[f"{head}.{blocks}.weight"] @ x


@pytest.mark.parametrize("kind", ["safetensors", "pt"])
def test_published_heads_are_read(tmp_path, kind) -> None:
    blocks = 2 if kind == "pt" else 1
    tensors = published(np.random.default_rng(0), blocks=blocks)
    write(tmp_path, tensors, kind, medusa_num_layers=blocks)
    drafter = Medusa.from_pretrained(tmp_path, dtype=jnp.float32)
    state = np.random.default_rng(1).normal(size=16).astype(np.float32)
    for head in range(3):
        np.testing.assert_allclose(
            drafter.head(head, jnp.asarray(state)),
            slow_logits(tensors, state, head, blocks),
            rtol=2e-5,
            atol=2e-5,
        )
    assert isinstance(load_drafter(str(tmp_path), Chain(2), tiny_target().config), Medusa)
    drafter.save_pretrained(tmp_path / "again")
    again = Medusa.from_pretrained(tmp_path / "again", dtype=jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)
    assert again.config == drafter.config


TREE = StaticTree(((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)))


@pytest.mark.full
@pytest.mark.thorough_except("shape2")
@pytest.mark.parametrize(
    "shape", [pytest.param(Chain(3), marks=pytest.mark.thorough), TREE, DynamicTree(3, 3, 9)]
)
def test_a_node_at_depth_d_is_among_the_best_of_head_d(tmp_path, shape) -> None:
    """Check drafts before and after a verdict, in rows of different lengths."""
    target, tensors = tiny_target(), published(np.random.default_rng(0))
    write(tmp_path, tensors)
    drafter = Medusa.from_pretrained(tmp_path, draft=shape, dtype=jnp.float32)
    options = GenerationOptions(max_new_tokens=12, sampling=Sampling(temperature=0.0))
    _, state = decoding.start(
        target, drafter, np.array([[1, 4, 2, 4, 2], [5, 9, 10, 0, 0]]), np.array([5, 3]), options
    )
    propose, advance = jax.jit(decoding.propose_step), jax.jit(decoding.advance)
    for _ in range(3):
        draft, drafting = propose(target, drafter, state)
        for row in range(2):
            text = np.asarray(state.tokens[row, : int(state.lengths[row])])
            hidden = np.asarray(target.forward(text[None, :-1])[0].hidden[0, -1])
            parents = np.broadcast_to(np.asarray(draft.parents), draft.tokens.shape)[row]
            depths = np.broadcast_to(np.asarray(draft.depths), draft.tokens.shape)[row]
            tokens = np.asarray(draft.tokens[row])
            for parent in set(parents[1:].tolist()):
                children = np.flatnonzero(parents == parent)
                best = np.argsort(-slow_logits(tensors, hidden, depths[parent]))[: len(children)]
                assert tokens[children].tolist() == best.tolist()
        state, _ = advance(target, drafter, drafting, draft)
    plain = specjax.generate(target, None, np.array([[1, 4, 2, 4, 2]]), max_new_tokens=8)
    ours = specjax.generate(target, drafter, np.array([[1, 4, 2, 4, 2]]), max_new_tokens=8)
    np.testing.assert_array_equal(ours.tokens, plain.tokens)


def test_a_file_may_hold_more_heads_than_its_config_says(tmp_path) -> None:
    write(tmp_path, published(np.random.default_rng(0)), medusa_num_heads=2)
    drafter = Medusa.from_pretrained(tmp_path)
    assert drafter.config.heads == drafter.draft_shape.depth == 3


def test_what_is_wrong_is_refused_by_name(tmp_path) -> None:
    tensors = published(np.random.default_rng(0))
    write(tmp_path, tensors, medusa_num_layers=2)
    with pytest.raises(CheckpointError, match=r"lack '0\.2\.weight'"):
        Medusa.from_pretrained(tmp_path)
    write(tmp_path, tensors, medusa_num_heads=4)
    with pytest.raises(
        CheckpointError, match="medusa_num_heads=4, but there are tensors of 3 heads"
    ):
        Medusa.from_pretrained(tmp_path)
    write(tmp_path, tensors)
    drafter = Medusa.from_pretrained(tmp_path, draft=Chain(4))
    with pytest.raises(InputError, match="4 deep, but there are 3 heads"):
        drafter.check(tiny_target())
    with pytest.raises(InputError, match="hidden size 16 with 11 tokens"):
        drafter.check(tiny_target(hidden_size=32))
