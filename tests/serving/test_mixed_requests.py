"""Requests of every kind in one engine, some of them cancelled: no wrong token.

Requests differ in sampling parameters, penalties, biases, grammars, priorities, tenants,
predictions, log-probabilities, speculation and lengths. There are few pages, so that rows are
preempted.
"""

import threading
import time
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafters import DraftModel
from specjax.drafts.shapes import Chain, DynamicTree
from specjax.sampling import make_key
from specjax.serving import Engine, QueueFullError
from specjax.serving.handle import TextCancelledError
from tests.decoding.test_constrained import END, GRAMMARS, compiler, models
from tests.decoding.test_penalties import options
from tests.grammars.tokenizers_for_tests import small_tokenizer

CLIENTS, NEW, LONGEST = 6, 24, 24
BATCH = 50
"""The rows of a call of `specjax.generate` that computes expected texts."""

PATIENCE = 120.0
BEGINNINGS = np.random.default_rng(3).integers(0, END, (2, LONGEST)).tolist()


@dataclass
class Mixed:
    """A request.

    Attributes:
        prompt: the token ids of the prompt.
        stated: the parameters of the distribution.
        grammar: the name of its grammar among `GRAMMARS`, or None.
        new: the largest number of new tokens.
        seed: the seed.
        call: the arguments of `Engine.submit` on which the text does not depend.
    """

    prompt: list[int]
    stated: dict[str, Any]
    grammar: str | None
    new: int
    seed: int
    call: dict[str, Any]


def random_request(rng: np.random.Generator) -> Mixed:
    beginning = BEGINNINGS[rng.integers(len(BEGINNINGS))][: rng.integers(LONGEST - 5)]
    prompt = [*beginning, *rng.integers(0, END, rng.integers(1, 6)).tolist()]
    stated: dict[str, Any] = {"temperature": float(rng.choice([0.0, 0.7, 1.2]))}
    if rng.random() < 0.4:
        name, value = [("top_k", 4), ("top_p", 0.8), ("min_p", 0.1)][rng.integers(3)]
        stated[name] = value
    if rng.random() < 0.4:
        name = ["presence_penalty", "frequency_penalty", "repetition_penalty"][rng.integers(3)]
        stated[name] = float(rng.choice([0.6, 1.5]))
    if rng.random() < 0.2:
        stated["logit_bias"] = {int(rng.integers(END)): 2.0, int(rng.integers(END)): -3.0}
    if rng.random() < 0.2:
        stated["bad_words"] = [[int(rng.integers(END))], rng.integers(0, END, 2).tolist()]
    if rng.random() < 0.1:
        stated["allowed_token_ids"] = [*range(0, END, 2), END]
    # A grammar may leave no token where tokens are banned, which is an error and no text.
    is_free = "bad_words" in stated or "allowed_token_ids" in stated or rng.random() < 0.6
    call: dict[str, Any] = {
        "priority": int(rng.integers(-2, 3)),
        "tenant": str(rng.choice(["", "a", "b"])),
        "cache_salt": str(rng.choice(["", "", "b"])),
        "logprobs": [None, None, 2][rng.integers(3)],
    }
    if rng.random() < 0.2:
        call["prediction"] = rng.integers(0, END, 9).tolist()
    if rng.random() < 0.4:
        call["speculation"] = ["off", 1, "chain:3"][rng.integers(3)]
    return Mixed(
        prompt,
        stated,
        None if is_free else str(rng.choice(list(GRAMMARS))),
        int(rng.integers(1, NEW + 1)),
        int(rng.integers(2**31)),
        call,
    )


def submit(engine: Engine, request: Mixed) -> Any:
    params = specjax.SamplingParams(
        **request.stated,
        max_new_tokens=request.new,
        eos_token_ids=(END,),
        seed=request.seed,
        grammar=None if request.grammar is None else GRAMMARS[request.grammar],
    )
    while True:
        try:
            return engine.submit(request.prompt, params, **request.call)
        except QueueFullError:
            time.sleep(0.01)


def expected(requests: list[Mixed]) -> list[list[int]]:
    """Return the output of plain `specjax.generate` for each request."""
    outputs = []
    for start in range(0, len(requests), BATCH):
        batch = requests[start : start + BATCH]
        lengths = [len(request.prompt) for request in batch]
        prompts = np.zeros((len(batch), LONGEST), np.int32)
        for row, request in enumerate(batch):
            prompts[row, : lengths[row]] = request.prompt
        keys = [jax.random.fold_in(make_key(request.seed), np.uint32(0)) for request in batch]
        result = specjax.generate(
            models()[0],
            None,
            prompts,
            lengths,
            max_new_tokens=NEW,
            eos_token_ids=(END,),
            rule="coupled",
            key=jnp.stack(keys),
            grammar=[
                None if request.grammar is None else compiler().compile(GRAMMARS[request.grammar])
                for request in batch
            ],
            **options([request.stated for request in batch]),
        )
        outputs += [
            result.tokens[row, lengths[row] : result.lengths[row]].tolist()[: request.new]
            for row, request in enumerate(batch)
        ]
    return outputs


def run(engine: Engine, requests: list[Mixed], seed: int) -> list[tuple[Mixed, Any]]:
    """Submit all requests from several threads, cancel some, and return them with their handles."""
    pairs: list[tuple[Mixed, Any]] = []

    def client(number: int) -> None:
        rng = np.random.default_rng((seed, number))
        for request in requests[number::CLIENTS]:
            handle = submit(engine, request)
            pairs.append((request, handle))
            if rng.random() < 0.15:
                time.sleep(rng.choice([0.0, 0.005, 0.03]))
                handle.cancel()
            elif rng.random() < 0.3:
                time.sleep(rng.choice([0.0, 0.01]))

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for _, handle in pairs:
        try:
            handle.result(PATIENCE)
        except TextCancelledError:
            assert handle.finish_reason == "cancelled"
    return pairs


def check(draft: Any, count: int, seed: int) -> dict[str, int]:
    """Run ``count`` requests, compare every text, and return how often each thing happened."""
    rng = np.random.default_rng(seed)
    requests = [random_request(rng) for _ in range(count)]
    outputs = {
        id(request): output for request, output in zip(requests, expected(requests), strict=True)
    }
    target, model = models()
    with Engine(
        target,
        DraftModel(model, draft=draft),
        tokenizer=small_tokenizer(),
        rows=4,
        widths=(1, 4),
        capacity=56,
        pages=12,
        page=8,
        chunk=8,
        steps=3,
        max_logprobs=2,
        max_prediction=4,
        penalties=True,
        grammars=True,
    ) as engine:
        pairs = run(engine, requests, seed)
        preemptions = engine.statistics.preemptions
    assert len(pairs) == count
    happened = {"whole": 0, "cancelled": 0, "shared": 0, "preempted": preemptions}
    for request, handle in pairs:
        tokens, right = list(handle.tokens), outputs[id(request)]
        if handle.finish_reason == "cancelled":
            happened["cancelled"] += 1
            assert tokens == right[: len(tokens)], request
            continue
        happened["whole"] += 1
        happened["shared"] += handle.cached_tokens > 0
        assert tokens == right, request
        if request.call["logprobs"] is not None:
            reported = [item.token for piece in handle for item in piece.logprobs]
            assert reported == tokens, request
    return happened


@pytest.mark.full
@pytest.mark.thorough_except("draft1-60")
@pytest.mark.represents("requests of every kind beside each other, preempted and cancelled")
@pytest.mark.parametrize(
    ("draft", "count"),
    [
        (Chain(3), 150),
        (DynamicTree(top_k=3, depth=3, nodes=8), 60),
        pytest.param(Chain(3), 1_000, marks=pytest.mark.thorough),
    ],
)
def test_no_text_of_mixed_requests_has_a_wrong_token(draft, count) -> None:
    happened = check(draft, count, seed=11)
    print(happened)
    assert happened["cancelled"] > count / 50
    assert happened["whole"] > count / 2
    assert min(happened["shared"], happened["preempted"]) > count / 50
