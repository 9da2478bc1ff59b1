"""Check that no text ends before its ``min_new_tokens``.

Until then tokens are drawn from the distribution without end tokens.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import conformance
from specjax.decoding import verification
from specjax.decoding.options import GenerationOptions
from specjax.drafters import DraftModel, PromptLookup
from specjax.drafts.shapes import Chain, DynamicTree, SampledTree
from specjax.errors import InputError
from specjax.sampling import Sampling, argmax, perturbed, position_keys, position_noise
from tests.conftest import compilations, tiny_target
from tests.grammars.oracle import all_logits

ENDS, ROWS, NEW = (1, 4, 7), 6, 20
PROMPTS = np.random.default_rng(0).integers(0, 11, (ROWS, 6))
LEAST = np.array([0, 1, 5, 12, 20, 7])
MIXED = Sampling(temperature=np.array([0, 1, 1, 0, 0.7, 1.0]), top_p=np.array([1, 0.8, 1, 1, 1, 1]))


def drafters(target) -> dict:
    model = tiny_target(seed=5, num_layers=1)
    return {
        "none": None,
        "prompt lookup": PromptLookup(draft=3),
        "chain": DraftModel(model, draft=Chain(3)),
        "tree": DraftModel(model, draft=DynamicTree(top_k=3, depth=3, nodes=8)),
        "EAGLE-3 of few tokens": specjax.Eagle3.init(
            target, jax.random.key(5), draft=Chain(3), ids=np.arange(0, 11, 2)
        ),
    }


def oracle(target, prompt: np.ndarray, key: jax.Array, sampling: Sampling, least: int) -> list[int]:
    """Decode token by token: take the likeliest allowed token, noise included."""
    text = prompt.tolist()
    for number in range(NEW):
        padded = np.zeros((1, 32), np.int32)
        padded[0, : len(text)] = text
        logits = np.array(all_logits(target, padded))[0, len(text) - 1]
        if number < least:
            logits[list(ENDS)] = -np.inf
        noise = position_noise(position_keys(key[None], jnp.array([[len(text)]])), 11)[0]
        with_noise = perturbed(jnp.asarray(logits)[None], sampling.rows(1, "coupled"), noise)
        text.append(int(argmax(with_noise)[0]))
        if text[-1] in ENDS:
            break
    return text


@pytest.fixture(scope="module")
def right(target) -> list[list[int]]:
    keys = jax.random.split(jax.random.key(0), ROWS)
    settings = [
        Sampling(float(MIXED.temperature[row]), top_p=float(MIXED.top_p[row]))
        for row in range(ROWS)
    ]
    return [
        oracle(target, PROMPTS[row], keys[row], settings[row], int(LEAST[row]))
        for row in range(ROWS)
    ]


@pytest.mark.full
@pytest.mark.thorough_except("EAGLE-3 of few tokens")
@pytest.mark.parametrize(
    "name",
    [
        "none",
        "tree",
        "EAGLE-3 of few tokens",
        *(pytest.param(n, marks=pytest.mark.thorough) for n in ("prompt lookup", "chain")),
    ],
)
def test_every_text_is_the_oracles(target, right, name) -> None:
    keys = jax.random.split(jax.random.key(0), ROWS)
    options = {
        "max_new_tokens": NEW,
        "min_new_tokens": LEAST,
        "eos_token_ids": ENDS,
        "sampling": MIXED,
    }
    result = specjax.generate(
        target, drafters(target)[name], PROMPTS, key=keys, rule="coupled", **options
    )
    texts = [
        row[:length].tolist() for row, length in zip(result.tokens, result.lengths, strict=True)
    ]
    assert texts == right
    sizes = result.lengths - PROMPTS.shape[1]
    assert (sizes >= LEAST).all() and (sizes < NEW).any()


@pytest.mark.full
def test_without_it_texts_end_sooner_and_with_it_nothing_is_compiled_again(target, right) -> None:
    def run(least):
        return specjax.generate(
            target, None, PROMPTS, max_new_tokens=NEW, min_new_tokens=least, eos_token_ids=ENDS
        )

    early = run(0).lengths
    late = run(6).lengths
    assert (early - PROMPTS.shape[1] < 6).any() and (late - PROMPTS.shape[1] >= 6).all()
    before = compilations()
    run(9)
    assert compilations() == before


FEW = {"vocab_size": 5}
RULES = {
    "block": (lambda model: DraftModel(model, draft=Chain(2)), "block"),
    "rejection": (lambda model: DraftModel(model, draft=Chain(2)), "rejection"),
    "siblings": (lambda model: DraftModel(model, draft=SampledTree((2, 2))), "independent"),
    "matching": (
        lambda model: DraftModel(model, draft=DynamicTree(top_k=2, depth=2, nodes=5)),
        "independent",
    ),
    "coupled": (lambda model: DraftModel(model, draft=Chain(2)), "coupled"),
}


def p_value(rule: str, draws: int) -> float:
    """Compare three tokens, of which the first two must not be 1 or 3, with an enumeration."""
    target, model = tiny_target(seed=2, **FEW), tiny_target(seed=5, num_layers=1, **FEW)
    drafter, rule = RULES[rule][0](model), RULES[rule][1]
    prompt, ends, least, most, vocab = np.array([1, 3, 0, 1]), (1, 3), 2, 3, 5
    continuations = np.array(list(itertools.product(range(vocab), repeat=most)))
    output, _ = jax.jit(target.forward)(
        np.concatenate([np.tile(prompt, (len(continuations), 1)), continuations], axis=1)
    )
    logits = np.array(output.logits, np.float64)[:, len(prompt) - 1 : -1]
    logits[:, :least, list(ends)] = -np.inf
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    exact = np.prod(np.take_along_axis(p, continuations[..., None], axis=-1)[..., 0], axis=1)
    counts = np.zeros(vocab**most)
    for number in range(-(-draws // 50_000)):
        rows = min(draws, 50_000)
        result = specjax.generate(
            target,
            drafter,
            np.tile(prompt, (rows, 1)),
            max_new_tokens=most,
            min_new_tokens=least,
            sampling=Sampling(),
            eos_token_ids=ends,
            key=jax.random.split(jax.random.key(number), rows),
            rule=rule,
        )
        joint = result.tokens[:, len(prompt) :] @ (vocab ** np.arange(most)[::-1])
        counts += np.bincount(joint, minlength=len(counts))
    return conformance.g_test(counts, exact)


@pytest.mark.thorough
@pytest.mark.parametrize("draws", [25_000, 1_000_000])
@pytest.mark.parametrize("rule", list(RULES))
def test_the_distribution_is_the_one_without_ends(rule, draws) -> None:
    assert p_value(rule, draws) >= conformance.FALSE_ALARM


@pytest.mark.thorough
@pytest.mark.usefixtures("compiled_anew")
@pytest.mark.parametrize("rule", ["block", "siblings"])
def test_a_target_that_is_not_masked_fails(rule, monkeypatch) -> None:
    monkeypatch.setattr(verification, "before_temperature", lambda logits, *_, **__: logits)
    assert p_value(rule, 25_000) < conformance.FALSE_ALARM


@pytest.mark.parametrize("least", [-1, 9, 1.5, [1, 2, 3]])
def test_what_cannot_be_is_refused(target, least) -> None:
    with pytest.raises(InputError, match="min_new_tokens"):
        GenerationOptions(max_new_tokens=8, min_new_tokens=least).check(target.config, batch=2)
