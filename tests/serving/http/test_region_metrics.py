"""The regions of a real engine's answers in ``/metrics``."""

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

import specjax
from specjax.serving import Engine
from tests.chat.published_templates import template
from tests.serving.http.test_app import ask, service_of


def counts_of(text: str) -> dict[str, dict[str, float]]:
    """Return the counters of a server by name and region."""
    counts: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if "region" in sample.labels:
                by_region = counts.setdefault(family.name.removeprefix("specjax:"), {})
                region = sample.labels["region"]
                by_region[region] = by_region.get(region, 0) + sample.value
    return counts


@pytest.mark.thorough
def test_thoughts_answers_and_calls_have_counters_of_their_own() -> None:
    generate = specjax.load("embedded")
    generate.tokenizer.chat_template = template("qwen3")
    sizes: dict[str, Any] = {"rows": 2, "capacity": 128, "page": 64, "chunk": 64}
    drafter = specjax.PromptLookup(draft=3)
    with Engine(
        generate.target,
        drafter,
        drafts=("chain:3",),
        tokenizer=generate.tokenizer,
        grammars=True,
        warm=False,
        **sizes,
    ) as engine:
        service = service_of(engine)  # pyright: ignore[reportArgumentType]

        def counts() -> dict[str, dict[str, float]]:
            return counts_of(ask(service, "/metrics", "GET").text)

        body = {"temperature": 0, "ignore_eos": True}
        prompts = {
            "answer": "x = 1\nx = 1\n",
            "thinking": "x = 1\n<think>\nx = 1\nx = 1\n",
            "tool_call": "x = 1\n<tool_call>\nx = 1\nx = 1\n",
        }
        for region, prompt in prompts.items():
            before = counts()["generation_tokens"]
            answer = ask(service, prompt=prompt, max_tokens=24, **body).json()
            assert "</" not in answer["choices"][0]["text"]
            after = counts()["generation_tokens"]
            grown = {name: after[name] - before[name] for name in after}
            assert grown == dict.fromkeys(prompts, 0) | {region: 24}
        # The budget ends the thought within the text. Its end counts as a part of it.
        before, end = counts()["generation_tokens"], engine._region_marks.marks[-1].ids
        answer = ask(
            service, prompt=prompts["thinking"], max_tokens=24, thinking_budget=3, **body
        ).json()
        assert "</think>" in answer["choices"][0]["text"]
        after = counts()["generation_tokens"]
        assert after["thinking"] - before["thinking"] == 3 + len(end)
        assert after["answer"] - before["answer"] == 24 - 3 - len(end)
        final, statistics = counts(), engine.statistics
    for name, total in {
        "generation_tokens": statistics.generated,
        "spec_decode_num_drafts": statistics.drafted_steps,
        "spec_decode_num_draft_tokens": statistics.drafted,
        "spec_decode_num_accepted_tokens": statistics.accepted,
    }.items():
        assert min(final[name].values()) > 0, name
        assert sum(final[name].values()) == total
