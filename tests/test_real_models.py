"""Trained checkpoints: our greedy tokens equal those of transformers with every drafter."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import numpy as np
import pytest
from transformers import AutoModelForCausalLM

import specjax
from specjax.drafters import DraftModel, EarlyExit, PromptLookup
from specjax.drafts.published import EAGLE_TREE
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree, StaticTree
from specjax.evaluation import metrics
from specjax.sampling import Sampling, perturbed, position_keys, position_noise
from tests.conftest import REAL_PAIRS, RealPair, outputs
from tests.with_torch import torch

COUNT, LONGEST, NEW = 50, 60, 64


@dataclass(frozen=True)
class Case:
    """A pair, its prompts, and the model of transformers of the target."""

    pair: RealPair
    tokens: np.ndarray
    lengths: np.ndarray
    reference: Any

    @cached_property
    def continued(self) -> list[list[int]]:
        """Return each prompt with its greedy continuation by transformers.

        Each is generated alone.
        """
        return [
            self._generated(self.tokens[row, : self.lengths[row]])
            for row in range(len(self.tokens))
        ]

    def _generated(self, prompt: np.ndarray) -> list[int]:
        ids = torch.tensor(prompt[None].astype(np.int64))
        generated = self.reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            min_new_tokens=NEW,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return generated[0].tolist()

    def check_greedy(self, output: np.ndarray, lengths: np.ndarray, rows: Any) -> None:
        """Check that ``output [B, L]`` continues prompts ``rows [B]`` as transformers does.

        One pass over the output is enough: if every token is the likeliest after those before it,
        they are the tokens that transformers would have generated.
        """
        with torch.no_grad():
            logits = self.reference(torch.tensor(output.astype(np.int64))).logits.numpy()
        for row, (logits_of_row, tokens, length) in enumerate(
            zip(logits, output, lengths, strict=True)
        ):
            start = self.lengths[rows[row]]
            assert length == start + NEW
            best, got = logits_of_row[start - 1 : length - 1].argmax(-1), tokens[start:length]
            assert np.array_equal(got, best), (
                f"row {row}: {_first_divergence(logits_of_row[start - 1 :], got, best)}"
            )


def _first_divergence(logits: np.ndarray, got: np.ndarray, best: np.ndarray) -> str:
    """Describe the first token that differs, and how close the two tokens' logits are there.

    A near-tie is due to rounding.
    """
    at = int(np.argmax(got != best))
    margin = logits[at, best[at]] - logits[at, got[at]]
    return f"new token {at}: {got[at]} for {best[at]}, whose logit is larger by {margin:.2e}"


@pytest.fixture(scope="module", params=REAL_PAIRS)
def case(request) -> Case:
    # The models are too small to gain from more threads, and the tests share the machine.
    torch.set_num_threads(1)
    pair = request.param()
    reference = AutoModelForCausalLM.from_pretrained(
        pair.target_path, dtype=torch.float32, trust_remote_code=False
    )
    return Case(pair, *pair.prompts(COUNT, LONGEST), reference)


def drafters(pair: RealPair) -> dict:
    return {
        "plain": None,
        "draft model": DraftModel.from_pretrained(
            pair.draft_path, draft=Chain(4), dtype=np.float32
        ),
        "prompt lookup": PromptLookup(draft=Chain(5)),
        "early exit": EarlyExit(layers=2, draft=Chain(3)),
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "batches"),
    [
        ("plain", 1),
        ("draft model", 1),
        *[
            pytest.param(name, 5, marks=pytest.mark.thorough)
            for name in ("plain", "draft model", "prompt lookup", "early exit")
        ],
    ],
)
def test_greedy_tokens_are_those_that_transformers_finds_likeliest(case, name, batches) -> None:
    drafter = drafters(case.pair)[name]
    for rows in np.arange(COUNT).reshape(5, 10)[:batches]:
        result = generated(case, drafter, rows)
        case.check_greedy(result.tokens, result.lengths, rows)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["plain", "draft model", "prompt lookup", "early exit"])
def test_greedy_tokens_of_a_prompt_alone_are_those_that_transformers_generates(case, name) -> None:
    drafter = drafters(case.pair)[name]
    for row in range(COUNT):
        assert outputs(generated(case, drafter, [row])) == [case.continued[row]]


def generated(case: Case, drafter: Any, rows: Any, **settings: Any) -> specjax.Result:
    return specjax.generate(
        case.pair.target,
        drafter,
        case.tokens[rows],
        case.lengths[rows],
        max_new_tokens=NEW,
        eos_token_ids=(),
        **settings,
    )


SHAPES = {  # all of one depth
    "chain": Chain(5),
    "static": StaticTree(EAGLE_TREE),
    "dynamic": DynamicTree(top_k=4, depth=5, nodes=26),
    "sampled": SampledTree((3, 2, 1, 1, 1)),
}


@pytest.mark.thorough
def test_trees_accept_more_than_a_chain_of_their_depth(case) -> None:
    """Compare greedy rows of every shape, and at temperature 1 rows with drawn siblings.

    Greedy rows have the same tokens. At temperature 1 the tokens of the chain are drawn, too.
    """
    model = DraftModel.from_pretrained(case.pair.draft_path, dtype=np.float32)
    rows = np.arange(16)
    acceptance_lengths = {}
    for name, shape in SHAPES.items():
        result = generated(
            case,
            model.replace(draft=shape),
            rows,
            sampling=Sampling(temperature=np.repeat([0.0, 1.0], 8)),
        )
        case.check_greedy(result.tokens[:8], result.lengths[:8], rows)
        halves = [
            jax.tree.map(lambda leaf, part=part: leaf[part], result.stats)
            for part in (slice(0, 8), slice(8, None))
        ]
        acceptance_lengths[name] = [metrics.summarise(half).acceptance_length for half in halves]
    for name in ("static", "dynamic", "sampled"):
        assert acceptance_lengths[name][0] > acceptance_lengths["chain"][0] + 0.3, (
            acceptance_lengths
        )
    assert acceptance_lengths["sampled"][1] > acceptance_lengths["chain"][1] + 0.2, (
        acceptance_lengths
    )


CUTS = ((0, 1.0, 0.0), (0, 0.9, 0.0), (5, 1.0, 0.05))  # top-k, top-p, min-p
SETTINGS = np.array([(temperature, *cut) for temperature in (0.6, 1.0, 1.5) for cut in CUTS])
COUPLED = {
    **{f"draft model, {name}": shape for name, shape in SHAPES.items()},
    "draft model, adaptive": Chain(8, stop_below=0.4),
    "early exit, static": StaticTree(EAGLE_TREE),
    "prompt lookup": Chain(5),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", COUPLED)
def test_a_coupled_text_is_the_same_with_every_drafter(case, name) -> None:
    """Compare 64 prompts at every temperature with every truncation, side by side.

    Two tokens may change places if the largest values of log p + G differ by a rounding error. The
    texts part there, and what comes after says nothing.
    """
    method = name.split(",")[0]
    drafter = drafters(case.pair)[method].replace(draft=COUPLED[name])
    rows = np.resize(np.arange(COUNT), 64)
    sampling = Sampling(*np.resize(SETTINGS, (64, 4)).T)
    keys = jax.random.split(jax.random.key(11), 64)
    plain, drafted = (
        generated(case, d, rows, sampling=sampling, key=keys, rule="coupled")
        for d in (None, drafter)
    )
    for row in range(64):
        differs = plain.tokens[row] != drafted.tokens[row]
        if differs.any():
            at = int(np.argmax(differs))
            margin = _margin(case.pair.target, plain.tokens[row], at, sampling, row, keys[row])
            print(f"{name}, row {row}: parts at token {at}, margin {margin:.2e}")
            assert margin < 1e-4, (
                f"row {row} differs at {at}, where the two largest of log p + G are {margin:.2e}"
                " apart"
            )


def _margin(
    target: specjax.Target, text: np.ndarray, at: int, sampling: Sampling, row: int, key: jax.Array
) -> float:
    """Return how far the two largest of log p + G at position ``at`` of a text are apart."""
    logits = target.forward(text[None, :at])[0].logits[:, -1]
    sampling_of_row = Sampling(
        *(np.asarray(getattr(sampling, field))[row] for field in Sampling.__dataclass_fields__)
    ).rows(1, "coupled")
    noise = position_noise(position_keys(key[None], np.array([[at]])), logits.shape[-1])[0]
    best, second = jax.lax.top_k(perturbed(logits, sampling_of_row, noise), 2)[0][0]
    return float(best - second)


@pytest.mark.thorough  # a figure of one pair, and no claim of losslessness
def test_the_draft_model_earns_its_keep(case) -> None:
    """Check that trained drafts are accepted far more often than random ones."""
    rows = np.arange(16)
    sampling = Sampling(temperature=np.repeat([0.0, 1.0], 8))
    stats = generated(
        case, drafters(case.pair)["draft model"], rows, sampling=sampling, key=jax.random.key(0)
    ).stats
    for half in (slice(0, 8), slice(8, None)):
        summary = metrics.summarise(jax.tree.map(lambda leaf, half=half: leaf[half], stats))
        assert summary.acceptance_length > 1.8
        assert summary.by_position[0] > 0.4
