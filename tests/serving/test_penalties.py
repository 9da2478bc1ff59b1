"""Penalties, biases and banned words in the engine: its texts are those of `specjax.generate`."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

import specjax
from specjax.drafters import DraftModel, PromptLookup
from specjax.drafts.shapes import Chain, DynamicTree
from specjax.errors import InputError
from specjax.serving import Engine
from specjax.serving.config import EngineConfig
from specjax.serving.engine_loop import EngineLoop
from specjax.token_biases import TokenBiases
from tests.conftest import compilations, tiny_target
from tests.decoding.test_penalties import BIASES, STATED, options
from tests.grammars.tokenizers_for_tests import small_tokenizer

VOCABULARY, NEW = 20, 24
PROMPTS = np.random.default_rng(4).integers(0, VOCABULARY, (12, 7))
REQUESTS: list[dict[str, Any]] = [
    {"temperature": 0.0, **STATED["repetition"]},
    {"temperature": 0.8, **STATED["presence"]},
    {"temperature": 0.8},
    {"temperature": 0.9, **STATED["words"]},
    {"temperature": 1.1, "top_p": 0.8, **STATED["frequency"], "bad_words": [[1, 2], [3]]},
    {"temperature": 0.0},
    {"temperature": 0.7, **STATED["bias"]},
    {"temperature": 0.7, "allowed_token_ids": [1, 2, 3, 4, 5, 6, 7], **STATED["negative"]},
]
GRAMMAR = specjax.Regex("(ab|abc|de){2,9}f?")


@pytest.fixture(scope="module")
def target() -> Any:
    return tiny_target(vocab_size=VOCABULARY)


def drafter_of(name: str) -> Any:
    model = tiny_target(seed=5, num_layers=1, vocab_size=VOCABULARY)
    return {
        "none": None,
        "chain": DraftModel(model, draft=Chain(3)),
        "tree": DraftModel(model, draft=DynamicTree(top_k=3, depth=3, nodes=8)),
        "lookup": PromptLookup(draft=3),
    }[name]


def generated(target: Any, request: dict[str, Any], index: int, grammar: Any = None) -> list[int]:
    """Return the output of `specjax.generate` for one request."""
    result = specjax.generate(
        target,
        None,
        PROMPTS[index : index + 1],
        max_new_tokens=NEW,
        eos_token_ids=(),
        rule="coupled",
        key=jax.random.key(index)[None],
        grammar=grammar,
        **options([request]),
    )
    return result.tokens[0, PROMPTS.shape[1] : result.lengths[0]].tolist()


def submitted(engine: Engine, request: dict[str, Any], index: int, **options_of_call: Any) -> Any:
    biases = TokenBiases.of(**{name: request[name] for name in BIASES if name in request})
    params = specjax.SamplingParams(
        **{name: value for name, value in request.items() if name not in BIASES},
        **dataclasses.asdict(biases),
        max_new_tokens=NEW,
        eos_token_ids=(),
        **options_of_call,
    )
    return engine.submit(PROMPTS[index].tolist(), params, key=jax.random.key(index))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("chain", marks=pytest.mark.represents("penalties in the engine")),
        pytest.param("tree", marks=pytest.mark.full),
        pytest.param("none", marks=pytest.mark.thorough),
        pytest.param("lookup", marks=pytest.mark.thorough),
    ],
)
def test_every_text_is_that_of_generate(target, name) -> None:
    """Check more requests than rows and few pages, so that rows are reused and preempted."""
    expected = [generated(target, request, index) for index, request in enumerate(REQUESTS)]
    with Engine(
        *(target, drafter_of(name)),
        rows=3,
        widths=(1, 3),
        capacity=40,
        pages=11,
        page=8,
        chunk=8,
        steps=2,
        penalties=True,
    ) as engine:
        handles = [submitted(engine, request, index) for index, request in enumerate(REQUESTS)]
        texts = [handle.result() and list(handle.tokens) for handle in handles]
        assert texts == expected
        assert engine.statistics.preemptions > 0
        before = compilations()
        again = [submitted(engine, request, index) for index, request in enumerate(REQUESTS[:3])]
        assert [handle.result() and list(handle.tokens) for handle in again] == expected[:3]
        assert compilations() == before


@pytest.mark.thorough
def test_rows_with_a_grammar_and_log_probabilities_have_penalties_too(target) -> None:
    tokenizer = small_tokenizer()
    compiled = specjax.grammars.GrammarCompiler(tokenizer, VOCABULARY).compile(GRAMMAR)
    request = {"temperature": 0.8, "presence_penalty": 0.9, "logit_bias": {3: 1.0}}
    with Engine(
        *(target, drafter_of("chain")),
        tokenizer=tokenizer,
        rows=3,
        widths=(1, 3),
        capacity=40,
        steps=2,
        max_logprobs=2,
        penalties=True,
        grammars=True,
    ) as engine:
        with_grammar = submitted(engine, request, 0, grammar=GRAMMAR)
        reported = engine.submit(
            PROMPTS[1].tolist(),
            max_new_tokens=NEW,
            eos_token_ids=(),
            temperature=0.8,
            presence_penalty=0.9,
            key=jax.random.key(1),
            logprobs=2,
        )
        free = submitted(engine, {"temperature": 0.8}, 2)
        pieces = list(reported)
        texts = [
            list(handle.tokens) for handle in (with_grammar, reported, free) if handle.result()
        ]
    assert texts[0] == generated(target, request, 0, compiled)
    assert texts[1] == generated(target, {"temperature": 0.8, "presence_penalty": 0.9}, 1)
    assert texts[2] == generated(target, {"temperature": 0.8}, 2)
    logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
    # The model's own log-probabilities, before the penalties.
    tokens = np.array([[*PROMPTS[1], *texts[1]]])
    logits = np.asarray(target.forward(tokens)[0].logits[0, PROMPTS.shape[1] - 1 : -1])
    of_model = jax.nn.log_softmax(logits)[np.arange(NEW), texts[1]]
    np.testing.assert_allclose([logprob.logprob for logprob in logprobs], of_model, atol=1e-4)


@pytest.mark.thorough
def test_a_count_that_is_lost_at_a_preemption_changes_the_text(target, monkeypatch) -> None:
    """Check that the tests would notice it, if generated tokens counted as the prompt's."""
    adjustments = EngineLoop._adjustments

    def forgetful(self: Any, request: Any, recipient: Any) -> Any:
        recipient.prompt_tokens = len(request.tokens)
        return adjustments(self, request, recipient)

    monkeypatch.setattr(EngineLoop, "_adjustments", forgetful)
    requests = [{"temperature": 0.8, "frequency_penalty": 1.5}] * 4
    expected = [generated(target, request, index) for index, request in enumerate(requests)]
    with Engine(
        target, rows=3, widths=(3,), capacity=40, pages=8, page=8, chunk=8, steps=2, penalties=True
    ) as engine:
        handles = [submitted(engine, request, index) for index, request in enumerate(requests)]
        texts = [handle.result() and list(handle.tokens) for handle in handles]
        assert engine.statistics.preemptions > 0
    assert texts != expected


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.full
def test_an_engine_without_penalties_refuses_them_by_name(target) -> None:
    with Engine(target, rows=1, capacity=40, warm=False) as engine:
        for name, value in (
            ("presence_penalty", 0.5),
            ("repetition_penalty", 1.1),
            ("logit_bias", {1: 1.0}),
            ("bad_words", [[1]]),
            ("allowed_token_ids", [1]),
        ):
            with pytest.raises(InputError, match=rf"^{name}: .*penalties=True"):
                engine.submit([1, 2], **{name: value})


def test_words_have_bounds(target) -> None:
    with Engine(target, rows=1, capacity=40, warm=False, penalties=True) as engine:
        with pytest.raises(InputError, match="65 words"):
            engine.submit([1, 2], bad_words=[[1, 2]] * 65)
        with pytest.raises(InputError, match="a word has 9 tokens"):
            engine.submit([1, 2], bad_words=[[1] * 9])
        with pytest.raises(InputError, match="'a' needs a tokenizer"):
            engine.submit([1, 2], bad_words=["a"])


def test_a_checkpoints_own_penalty_switches_them_on() -> None:
    generate = specjax.load("embedded")
    with_penalty = dataclasses.replace(
        generate, default_sampling=specjax.Sampling(temperature=0.7, repetition_penalty=1.05)
    )
    sizes: dict[str, Any] = {
        "rows": 1,
        "drafts": None,
        "capacity": 64,
        "pages": None,
        "page": None,
        "chunk": None,
        "steps": 2,
        "tokenizer": None,
        "widths": None,
        "max_logprobs": 0,
        "max_prediction": 0,
        "clients": None,
    }
    assert EngineConfig.of(with_penalty, None, **sizes).penalties
    assert not EngineConfig.of(generate, None, **sizes).penalties
    with pytest.raises(InputError, match="penalties=False: the checkpoint's own"):
        EngineConfig.of(with_penalty, None, **sizes, penalties=False)
