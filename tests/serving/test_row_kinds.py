"""Tests of the kinds of rows: regions by token ids, context lengths, and counters by both."""

import random
from typing import Any

import numpy as np
import pytest

import specjax
from specjax.assets import embedded
from specjax.chat import ToolCalls, answer_syntax
from specjax.decoding.stats import Stats
from specjax.drafters import PromptLookup
from specjax.drafts.shapes import Chain
from specjax.errors import LogitsError
from specjax.grammars import ThoughtTokens
from specjax.serving import Engine
from specjax.serving.choice import DraftChoice
from specjax.serving.constrained_choice import ConstrainedChoice
from specjax.serving.handle import EngineError
from specjax.serving.region_marks import region_marks
from specjax.serving.row_kinds import (
    CONTEXTS,
    REGIONS,
    Region,
    RegionMark,
    RegionMarks,
    RegionReader,
    RowKind,
)
from specjax.serving.totals import KindCounts, RowTokens, Totals
from specjax.templates import renderer
from specjax.text import encode_continuation, load_tokenizer
from tests.chat.published_templates import template
from tests.conftest import tiny_target
from tests.decoding.test_constrained import models
from tests.serving.test_constrained import PROMPTS as BROKEN_PROMPTS
from tests.serving.test_constrained import BrokenAtSevens
from tests.serving.test_constrained import engine as broken_engine
from tests.serving.test_thinking import BEGIN, FINISH, NEW, PROMPTS, engine

THOUGHT = ThoughtTokens(BEGIN, FINISH)
ANSWER, CALL, CALL_END = (3, 3), (4, 5), (6,)
MARKS = RegionMarks(
    (
        RegionMark(BEGIN, ("answer",), "thinking"),
        RegionMark(FINISH, ("thinking",), "answer"),
        RegionMark(CALL, ("answer",), "tool_call"),
        RegionMark(CALL_END, ("tool_call",), "answer"),
        RegionMark(ANSWER, REGIONS, "answer"),
    )
)


def regions_of(tokens: list[int]) -> list[Region]:
    """Return the region of each token, and of the one after the last: read again from the start."""
    region: Region = "answer"
    regions: list[Region] = [region]
    for end in range(1, len(tokens) + 1):
        for mark in MARKS.marks:
            if region in mark.inside and tuple(tokens[:end][-len(mark.ids) :]) == mark.ids:
                region = mark.begins
                break
        regions.append(region)
    return regions


# --- regions and lengths --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_a_text_that_comes_in_pieces_has_the_regions_of_the_whole(seed: int) -> None:
    draw = random.Random(seed)
    tokens = draw.choices([0, 3, 4, 5, 6, 12], k=1500)
    prompt = draw.randrange(50)
    expected, reader = regions_of(tokens), RegionReader(MARKS, tokens[:prompt])
    assert set(expected) == set(REGIONS)
    start = prompt
    while start < len(tokens):
        assert reader.region == expected[start]
        piece = tokens[start : start + draw.randrange(6)]
        runs = reader.append(piece)
        assert [region for region, count in runs for _ in range(count)] == expected[
            start : start + len(piece)
        ]
        start += len(piece)
    assert reader.region == expected[-1]


def test_without_marks_all_text_is_an_answer() -> None:
    reader = RegionReader(RegionMarks(), [1, 2])
    assert reader.append([0, 12, 0]) == [("answer", 3)]


def test_ranges_of_lengths_are_powers_of_four() -> None:
    lengths = [1, 256, 257, 1024, 1025, 4096, 4097, 16384, 16385, 65536, 65537, 10**7]
    names = [RowKind.of("answer", length).context for length in lengths]
    assert names == [name for name in CONTEXTS for _ in range(2)]


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "begins"),
    [
        ("qwen3", {"thinking", "tool_call", "answer"}),
        ("gpt_oss", {"thinking", "tool_call", "answer"}),
        ("llama4", {"answer"}),
    ],
)
def test_the_marks_of_published_templates(name: str, begins: set[str]) -> None:
    tokenizer = load_tokenizer(embedded("target"))
    tokenizer.chat_template = template(name)
    marks = region_marks(tokenizer).marks
    assert {mark.begins for mark in marks} == begins
    for mark in marks:
        assert set(mark.inside) != {mark.begins}


@pytest.mark.full
def test_the_regions_of_a_chat_are_those_of_its_last_answer() -> None:
    tokenizer = load_tokenizer(embedded("target"))
    tokenizer.chat_template = template("qwen3")
    marks = region_marks(tokenizer)

    def region(text: str) -> Region:
        return RegionReader(marks, encode_continuation(tokenizer, text)).region

    begin = "<|im_start|>user\nWrite <think> or <tool_call>.<|im_end|>\n<|im_start|>assistant\n"
    for text, expected in {
        "": "answer",
        "<think>\n1": "thinking",
        "<think>\n1\n</think>\n\nx": "answer",
        "<tool_call>\n{": "tool_call",
        "<tool_call>\n{}\n</tool_call>\n": "answer",
    }.items():
        assert region(begin + text) == expected, text


@pytest.mark.full
@pytest.mark.parametrize("name", ["mistral_nemo", "mistral_small_3_2", "ministral_3"])
def test_the_answer_to_a_tools_result_is_no_call(name: str) -> None:
    tokenizer = load_tokenizer(embedded("target"))
    tokenizer.chat_template = template(name)
    tags = "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"
    tokenizer.add_tokens(list(tags), special_tokens=True)
    marks = region_marks(tokenizer)
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "How is the weather?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "id": "call12345", "function": function}],
        },
        {"role": "tool", "name": "weather", "content": "Rain.", "tool_call_id": "call12345"},
    ]
    text = renderer(tokenizer)(messages)
    call = text.index("[TOOL_CALLS]") + len("[TOOL_CALLS]")
    beginnings = {call - len("[TOOL_CALLS]"): "answer", call: "tool_call", call + 9: "tool_call"}
    for length, expected in (beginnings | {len(text): "answer"}).items():
        ids = encode_continuation(tokenizer, text[:length])
        assert RegionReader(marks, ids).region == expected, text[:length]
    reader = RegionReader(marks)
    reader.append(encode_continuation(tokenizer, text + "It rains."))
    assert reader.region == "answer"


@pytest.mark.parametrize("seed", range(20))
def test_a_prompt_is_read_from_its_last_answer_on(seed: int) -> None:
    """Compare with a reader of all tokens. Some marks end as others do, and are longer."""
    draw = random.Random(seed)
    longer = RegionMark((4, 3, 3), ("thinking",), "tool_call")
    marks = RegionMarks((*MARKS.marks, longer))
    for length in (0, 1, 7, 300):
        prompt = draw.choices([0, 3, 4, 5, 6, 12], k=length)
        slow = RegionReader(marks)
        for token in prompt:
            slow.append([token])
        fast = RegionReader(marks, prompt)
        for token in (None, *draw.choices([0, 3, 4, 5, 6, 12], k=5)):
            assert fast.region == slow.region
            if token is not None:
                assert fast.append([token]) == slow.append([token])


# --- counters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_divided_counters_add_up_to_those_of_the_call(seed: int) -> None:
    draw = random.Random(seed)
    steps = [draw.randrange(5) for _ in range(9)]
    accepted = [is_drafted for count in steps for is_drafted in [True] * count + [False]]
    if seed % 2:  # the text ends with a drafted token
        steps, accepted = [*steps, 2], [*accepted, True, True]
    generated, drafted = len(accepted), 4 * len(steps)
    total = KindCounts(len(steps), generated, len(steps), drafted, sum(accepted))
    first, second = sorted(draw.sample(range(generated), 2))
    counts = first, second - first, generated - second
    runs: Any = list(zip(("thinking", "answer", "thinking"), counts, strict=True))
    divided = RowTokens(RowKind("thinking", "256"), runs, accepted).by_region(total)
    assert KindCounts.sum(part for _, part in divided) == total
    assert [part.generated for _, part in divided] == [*counts]
    assert [part.accepted for _, part in divided] == [
        sum(accepted[begin:end])
        for begin, end in ((0, first), (first, second), (second, generated))
    ]
    assert min(min(part) for _, part in divided) >= 0


def test_counters_of_kinds_do_not_overflow() -> None:
    totals, large = Totals(), np.full(3, 2**30, np.int32)
    by_depth = np.repeat(large[:, None], 2, axis=1)
    histogram = np.repeat(large[:, None], 4, axis=1)
    none = np.zeros((3, 0), np.int32)
    counts: Any = (*([large] * 4), by_depth, by_depth, histogram, none, none, none)
    stats = Stats(*counts)
    kinds = [RowKind("answer", "256"), RowKind("answer", "more"), RowKind("thinking", "256")]
    for _ in range(4):
        totals.add(stats)
        totals.add_kinds(stats, kinds)
    of_kind = totals.kinds[kinds[0]]
    assert of_kind == KindCounts(2**32, 6 * 2**32, 2**32, 2**32, 2**32)
    assert KindCounts.sum(totals.kinds.values()).generated == totals.generated


# --- the engine -----------------------------------------------------------------------------------


def check_sums(served: Engine, steps: int | None = None) -> None:
    """Check that the counters by region and by length add up to the totals of the engine.

    ``steps`` are the steps of all texts, from the statistics of each; None: some have none.
    """
    statistics, totals = served.statistics, served._loop._total
    for counts in (statistics.regions, statistics.context_lengths):
        total = KindCounts.sum(counts.values())
        assert total == (
            totals.steps,
            statistics.generated,
            statistics.drafted_steps,
            statistics.drafted,
            statistics.accepted,
        )
        assert total.steps >= total.generated - total.accepted
        assert steps is None or total.steps == steps


@pytest.mark.full
@pytest.mark.thorough_except("dynamic tree-3")
@pytest.mark.parametrize(
    ("drafter", "budget"),
    [("chain", None), ("chain", 3), ("dynamic tree", 3), ("prompt lookup", None), ("none", None)],
)
def test_counters_of_an_engine_add_up_and_regions_are_those_of_an_oracle(
    drafter: str, budget: int | None
) -> None:
    """Check free and masked calls, with so few pages that texts are preempted."""
    with engine(drafter) as served:
        handles = [
            served.submit(prompt, max_new_tokens=NEW, thinking_budget=budget, seed=seed)
            for seed, prompt in enumerate(PROMPTS)
        ]
        results = [handle.result(timeout=300) for handle in handles]
        texts = [list(result.tokens) for result in results]
        statistics = served.statistics
        check_sums(served, sum(result.statistics.steps for result in results))
    thinking, accepted = 0, {"thinking": 0, "answer": 0}
    for prompt, text, handle in zip(PROMPTS, texts, handles, strict=True):
        state = THOUGHT.start(prompt)
        flags = [flag for piece in handle for flag in piece.accepted]
        for token, is_accepted in zip(text, flags, strict=True):
            thinking += state.is_inside
            accepted["thinking" if state.is_inside else "answer"] += is_accepted
            state = THOUGHT.step(state, token)
    regions = statistics.regions
    assert 0 < thinking < sum(map(len, texts))
    assert regions["thinking"].generated == thinking
    assert {name: regions[name].accepted for name in accepted} == accepted
    assert regions["tool_call"] == KindCounts()
    if drafter != "none":
        assert sum(regions[name].drafted for name in accepted) > 0


@pytest.mark.full
def test_calls_of_tools_have_counters_of_their_own() -> None:
    """Let a grammar make the model repeat a call of its prompt, and read the text again."""
    tokenizer = load_tokenizer(embedded("target"))
    tokenizer.chat_template = template("qwen3")
    function = {"name": "weather", "arguments": {"city": "Oslo"}}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "Rain."},
        {"role": "user", "content": "And now?"},
    ]
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}}
    schema |= {"required": ["city"], "additionalProperties": False}
    syntax = answer_syntax(tokenizer).calls
    assert syntax is not None
    sizes: Any = {"rows": 1, "capacity": 512, "page": 64, "chunk": 64, "steps": 4}
    target, drafter = tiny_target(vocab_size=3072, max_positions=512), PromptLookup(draft=3)
    with Engine(
        target, drafter, drafts=[Chain(3)], tokenizer=tokenizer, grammars=True, warm=False, **sizes
    ) as served:
        handle = served.submit(
            messages,
            max_new_tokens=120,
            eos_token_ids=(),
            grammar=ToolCalls(syntax, {"weather": schema}),
            chat_template_kwargs={"enable_thinking": False},
        )
        tokens = list(handle.result(timeout=300).tokens)
        check_sums(served)
        regions = served.statistics.regions
    generated, accepted = {"answer": 0, "tool_call": 0}, {"answer": 0, "tool_call": 0}
    flags = [flag for piece in handle for flag in piece.accepted]
    for place, is_accepted in enumerate(flags):
        text = tokenizer.decode(tokens[:place])
        is_call = text.rfind("<tool_call>") > text.rfind("</tool_call>")
        generated["tool_call" if is_call else "answer"] += 1
        accepted["tool_call" if is_call else "answer"] += is_accepted
    assert {name: regions[name].generated for name in generated} == generated
    assert {name: regions[name].accepted for name in accepted} == accepted
    assert min(accepted.values()) > 0
    assert tokenizer.decode(tokens).count("</tool_call>") > 1
    assert regions["thinking"] == KindCounts()


@pytest.mark.full
@pytest.mark.thorough_except("1")
@pytest.mark.parametrize("steps", [1, 4])
def test_lengths_are_those_at_the_start_of_a_call(steps: int) -> None:
    generate = specjax.load("embedded")
    prompt = generate.encode("import os\nimport sys\n") * 200
    sizes: Any = {"rows": 1, "capacity": 512, "page": 64, "chunk": 64, "steps": steps}
    with Engine(generate.target, **sizes, warm=False) as served:  # a token a step
        assert served.submit(prompt[:250], max_new_tokens=20).result(timeout=300)
        counts = served.statistics.context_lengths
        check_sums(served, steps=20)
    # The calls begin at 250, 251 and so on up to 256 tokens, or at 250 and 254.
    assert counts["256"].generated == counts["256"].steps == (7 if steps == 1 else 8)
    assert counts["1024"].generated == (13 if steps == 1 else 12)


@pytest.mark.full
def test_cancelled_texts_are_counted_up_to_their_end() -> None:
    with engine("chain") as served:
        handles = [
            served.submit(prompt, max_new_tokens=NEW, seed=seed, thinking_budget=budget)
            for budget in (None, 3)
            for seed, prompt in enumerate(PROMPTS)
        ]
        for handle in handles[::3]:
            next(iter(handle), None)
            handle.cancel()
        for number, handle in enumerate(handles):
            if number % 3:
                handle.result(timeout=300)
        assert {handle.finish_reason for handle in handles} >= {"cancelled", "length"}
        served.submit(PROMPTS[0], max_new_tokens=2).result(timeout=300)
        check_sums(served)


@pytest.mark.full
def test_texts_that_fail_are_counted_up_to_their_end() -> None:
    """Let the logits of some texts be NaN, and the host fail to read the results of one text."""
    broken = BrokenAtSevens(**vars(models()[0]))
    with broken_engine(target=broken, drafts=[Chain(3)]) as served:
        record, failing = served._loop._record_row, []

        def record_row(progress: Any, row: int, request: Any, handle: Any) -> Any:
            if handle is failing[0]:
                raise RuntimeError("made up")
            return record(progress, row, request, handle)

        handles = [served.submit(prompt, max_new_tokens=NEW) for prompt in BROKEN_PROMPTS[:8]]
        failed = sum(has_failed(handle) for handle in handles)
        assert 0 < failed < 8
        check_sums(served)
        with served._loop.wake:
            served._loop._record_row = record_row
            handles = [served.submit(prompt, max_new_tokens=NEW) for prompt in BROKEN_PROMPTS[:3]]
            failing.append(handles[1])
        assert [has_failed(handle) for handle in handles][1]
        check_sums(served)


def has_failed(handle: Any) -> bool:
    """Wait for a text, and return whether it ended with an error."""
    try:
        handle.result(timeout=300)
    except (LogitsError, EngineError):
        return True
    return False


@pytest.mark.full
@pytest.mark.parametrize("budget", [None, 3])
def test_the_choice_of_a_draft_gets_the_kinds_of_the_rows(
    budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check calls of free rows, and those of rows with a grammar."""
    with engine("chain", drafts=["chain:3"]) as served:
        loop, passed = served._loop, set()

        def spy(owner: Any, name: str) -> None:
            method = getattr(owner, name)

            def with_kinds(*args: Any, **named: Any) -> Any:
                row_kinds = named.get("row_kinds") or args[-1]
                assert sum(row_kinds.values()) == len(loop.scheduler.running)
                passed.update((type(owner), kind) for kind in row_kinds)
                return method(*args, **named)

            monkeypatch.setattr(owner, name, with_kinds)

        spy(loop.choice, "choose" if budget is None else "fastest")
        spy(loop._constrained._choice, "choose")
        for index in (1, 3):  # an answer, and a thought
            served.submit(
                PROMPTS[index], max_new_tokens=NEW, seed=index, thinking_budget=budget
            ).result(timeout=300)
        thought, answer = (RowKind.of(it, len(PROMPTS[0])) for it in ("thinking", "answer"))
        owners = [DraftChoice] if budget is None else [DraftChoice, ConstrainedChoice]
        assert {(owner, kind) for owner in owners for kind in (thought, answer)} <= passed
        if budget is None:
            of_thought, of_answer = (
                loop.choice.tokens_a_step(0, row_kinds={kind: 1}) for kind in (thought, answer)
            )
            assert of_thought != of_answer
