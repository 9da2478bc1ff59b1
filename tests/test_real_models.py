"""Trained checkpoints: our greedy tokens are transformers' greedy tokens, whatever drafts."""

import jax
import numpy as np
import pytest

import specjax
from specjax.drafters import DraftModel, EarlyExit, PromptLookup
from specjax.evaluation import metrics
from specjax.sampling import Sampling
from specjax.tree import EAGLE_TREE, Chain, DynamicTree, SampledTree, StaticTree
from tests.conftest import REAL_PAIRS, RealPair

COUNT, LONGEST, NEW = 50, 60, 128


@pytest.fixture(scope="module", params=REAL_PAIRS, ids=lambda pair: pair.__name__)
def case(request) -> tuple[RealPair, np.ndarray, np.ndarray, list[list[int]]]:
    """A pair, its prompts, and transformers' greedy continuation of each prompt alone."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)  # the models are too small to gain from more, and the tests share the machine
    pair = request.param()
    tokens, lengths = pair.prompts(COUNT, LONGEST)
    model = AutoModelForCausalLM.from_pretrained(pair.target_path, dtype=torch.float32)
    expected = []
    for row, length in zip(tokens, lengths, strict=True):
        prompt = torch.tensor(row[None, :length].astype(np.int64))
        generated = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        expected.append(generated[0].tolist())
    return pair, tokens, lengths, expected


def drafters(pair: RealPair) -> dict:
    return {
        "plain": None,
        "draft model": DraftModel.from_pretrained(pair.draft_path, draft=Chain(4), dtype=np.float32),
        "prompt lookup": PromptLookup(draft=Chain(5)),
        "early exit": EarlyExit(layers=2, draft=Chain(3)),
    }


@pytest.mark.parametrize("batch", [pytest.param(1, marks=pytest.mark.thorough), 8])
@pytest.mark.parametrize("name", ["plain", "draft model", "prompt lookup", "early exit"])
def test_greedy_tokens_equal_transformers(case, name, batch) -> None:
    pair, tokens, lengths, expected = case
    drafter = drafters(pair)[name]
    for start in range(0, COUNT, batch):
        rows = [min(start + i, COUNT - 1) for i in range(batch)]  # the last batch repeats the last prompt
        result = specjax.generate(pair.target, drafter, tokens[rows], lengths[rows], max_new_tokens=NEW, eos_token_ids=())
        for i, row in enumerate(rows):
            got = np.asarray(result.tokens[i, : result.lengths[i]]).tolist()
            assert got == expected[row], f"row {row}: {_first_divergence(pair, got, expected[row])}"


SHAPES = {  # of one depth
    "chain": Chain(5),
    "static": StaticTree(EAGLE_TREE),
    "dynamic": DynamicTree(top_k=4, depth=5, nodes=26),
    "sampled": SampledTree((3, 2, 1, 1, 1)),
}


@pytest.mark.thorough
def test_trees_accept_more_than_a_chain_of_their_depth(case) -> None:
    """Greedy with every kind, and the same tokens; at temperature 1 with drawn siblings, for a chain's tokens are drawn too."""
    pair, tokens, lengths, expected = case
    model = DraftModel.from_pretrained(pair.draft_path, dtype=np.float32)
    rows = np.arange(16)
    sampling = Sampling(temperature=np.repeat([0.0, 1.0], 8))
    found = {}
    for name, shape in SHAPES.items():
        result = specjax.generate(
            pair.target,
            model.replace(draft=shape),
            tokens[rows],
            lengths[rows],
            max_new_tokens=NEW,
            sampling=sampling,
            eos_token_ids=(),
        )
        for row in range(8):
            assert np.asarray(result.tokens[row, : result.lengths[row]]).tolist() == expected[row]
        halves = [jax.tree.map(lambda leaf, part=part: leaf[part], result.stats) for part in (slice(0, 8), slice(8, None))]
        found[name] = [metrics.summarise(half).acceptance_length for half in halves]
    for name in ("static", "dynamic", "sampled"):
        assert found[name][0] > found["chain"][0] + 0.3, found
    assert found["sampled"][1] > found["chain"][1] + 0.2, found


def _first_divergence(pair: RealPair, got: list[int], expected: list[int]) -> str:
    """Where two outputs part, and how close the two tokens' logits are there: a near-tie is rounding, not a bug."""
    at = next(i for i, (a, b) in enumerate(zip(got, expected, strict=False)) if a != b)
    logits = pair.target.forward(np.array([expected[:at]]))[0].logits[0, -1]
    return f"position {at}: {got[at]} for {expected[at]}, logit margin {float(logits[expected[at]] - logits[got[at]]):.2e}"


def test_the_draft_model_earns_its_keep(case) -> None:
    """Trained drafts are accepted far more often than random ones, greedy and sampled."""
    pair, tokens, lengths, _ = case
    for temperature in (0.0, 1.0):
        result = specjax.generate(
            pair.target,
            drafters(pair)["draft model"],
            tokens[:8],
            lengths[:8],
            max_new_tokens=NEW,
            sampling=Sampling(temperature=temperature),
            key=jax.random.key(0),
        )
        summary = metrics.summarise(result.stats)
        assert summary.acceptance_length > 1.8
        assert summary.by_position[0] > 0.4
