"""Requests with a thinking budget: how they are read, and a real engine's answers."""

from typing import Any

import jax
import numpy as np
import pytest

from specjax.sampling import make_key
from specjax.serving import Engine
from tests.decoding.test_constrained import DRAFTERS, models
from tests.grammars.thinking_oracle import ThinkingOracle
from tests.grammars.tokenizers_for_tests import small_tokenizer
from tests.serving.http.test_app import ask, events, service_of
from tests.serving.http.test_requests import both, read, refusal

OPENS = (
    "{% for it in messages %}{% if it.role == 'user' %}{{ it.content }}{% else %}"
    "{% if it.reasoning_content %}a{{ it.reasoning_content }}1a{% endif %}{{ it.content }}"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}:a{% endif %}"
)


@both
def test_a_budget_has_two_names(kind: str) -> None:
    for values, budget in (
        ({}, None),
        ({"thinking_budget": None}, None),
        ({"thinking_budget": 0}, 0),
        ({"thinking_budget": 1000}, 1000),
        ({"thinking_token_budget": 7}, 7),
        ({"thinking_token_budget": -1}, None),
        ({"thinking_budget": 7, "thinking_token_budget": 7}, 7),
    ):
        assert read(kind, **values).params.thinking_budget == budget


@both
def test_a_wrong_budget_is_refused_by_name(kind: str) -> None:
    for name, value in (
        ("thinking_budget", -1),
        ("thinking_budget", 1.5),
        ("thinking_budget", "7"),
        ("thinking_budget", 2**40),
        ("thinking_token_budget", -2),
    ):
        assert refusal(kind, **{name: value}).param == name
    two = refusal(kind, thinking_budget=1, thinking_token_budget=2)
    assert two.param == "thinking_token_budget" and "thinking_budget=1 too" in str(two)


@pytest.mark.thorough
def test_the_answers_of_an_engine_are_the_oracles() -> None:
    """Check a chat whose template opens the thought, a stream, a completion and refusals."""
    target, model = models()
    tokenizer = small_tokenizer()
    tokenizer.chat_template = OPENS
    oracle = ThinkingOracle(target, (0,), (12, 0), 3, (), temperature=1.0)

    def expected(prompt: str, budget: int | None, index: int = 0) -> str:
        oracle.law = (0,), (12, 0), budget
        key = jax.random.fold_in(make_key(7), np.uint32(index))
        tokens = tokenizer.encode(prompt, add_special_tokens=False)
        return tokenizer.decode(oracle.text(tokens, key, 20), skip_special_tokens=True)

    body: dict[str, Any] = {"max_tokens": 20, "seed": 7, "temperature": 1, "stop_token_ids": []}
    body |= {"ignore_eos": True}
    chat: dict[str, Any] = body | {"messages": [{"role": "user", "content": "bcde"}]}
    sizes: dict[str, Any] = {"rows": 2, "capacity": 64, "page": 8, "chunk": 16, "steps": 4}
    with Engine(
        target, DRAFTERS["chain"](target, model), tokenizer=tokenizer, grammars=True, **sizes
    ) as engine:
        service = service_of(engine)  # pyright: ignore[reportArgumentType]
        path = "/v1/chat/completions"
        answer = ask(service, path, **chat, n=2, thinking_budget=3).json()
        texts = [choice["message"]["content"] for choice in answer["choices"]]
        assert texts == [expected("bcde:a", 3, index) for index in range(2)]
        assert "grammar_completed" not in answer["choices"][0]
        assert answer["usage"]["completion_tokens"] == 40
        stream = events(ask(service, path, **chat, stream=True, thinking_token_budget=0))
        pieces = [event["choices"][0]["delta"].get("content", "") for event in stream]
        assert "".join(pieces) == expected("bcde:a", 0)
        free = ask(service, path, **chat).json()
        assert free["choices"][0]["message"]["content"] == expected("bcde:a", None)
        completion = ask(service, prompt="bca", thinking_budget=1, **body).json()
        assert completion["choices"][0]["text"] == expected("bca", 1)
        banned = ask(service, path, **chat, thinking_budget=1, logit_bias={"5": 1})
        assert banned.status_code == 400  # this engine has no penalties
        tokenizer.chat_template = None
    without = Engine(target, drafts=(None,), tokenizer=tokenizer, warm=False, **sizes)
    with without:
        refused = ask(service_of(without), prompt="ab", thinking_budget=1, max_tokens=2)  # pyright: ignore[reportArgumentType]
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "thinking_budget"
        assert "give Engine(grammars=True)" in refused.json()["error"]["message"]
    with Engine(
        target, drafts=(None,), tokenizer=tokenizer, grammars=True, warm=False, **sizes
    ) as it:
        refused = ask(service_of(it), prompt="ab", thinking_budget=1, max_tokens=2)  # pyright: ignore[reportArgumentType]
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "thinking_budget"
        assert "--thought-tokens BEGIN END" in refused.json()["error"]["message"]
