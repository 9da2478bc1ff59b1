"""The regions of a text: its events and its whole are the same, in every interface's terms."""

import random

import pytest

from specjax.chat import ChatAnswer, Event, RegionGrew, RegionKind, RegionOpened, family_form
from specjax.serving.http.regions import AnswerRegions

CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é<tool_call>"}}\n</tool_call>'
TEXTS = (
    "",
    "plain",
    "<think>\nHm.\n</think>\n\nYes.",
    f"<think>Hm.</think>{CALL}",
    f"First.\n{CALL}\n{CALL}",
    f"{CALL}\n" + '<tool_call>{"name": "g", "arguments": {"b": 1',
    '<tool_call>{"name": 1}</tool_call> rest',
)


def pushed(regions: AnswerRegions, text: str, rng: random.Random) -> list[Event]:
    """Return the events of a text in random pieces, without its end."""
    events = []
    while text:
        size = rng.randint(1, 9)
        events += regions.push(text[:size])
        text = text[size:]
    return events


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("whole_calls", [False, True])
def test_the_whole_is_the_sum_of_the_events(text: str, reason: str, whole_calls: bool) -> None:
    for seed in range(20):
        regions = AnswerRegions(family_form("qwen3"), with_calls=True, whole_calls=whole_calls)
        events = pushed(regions, text, random.Random(seed)) + regions.finish(reason)
        answer = ChatAnswer.from_events(events)
        assert (answer.content, answer.reasoning) == (regions.content, regions.reasoning)
        assert answer.tool_calls == tuple(it.call for it in regions.calls)
        opened = [
            event
            for event in events
            if isinstance(event, RegionOpened) and event.kind is RegionKind.TOOL_CALL
        ]
        assert len(regions.call_ids) == len(set(regions.call_ids)) == len(opened)
        for call in regions.calls:
            assert call.id == regions.call_ids[call.index]
            assert opened[call.index].name == call.call.name
        assert regions.finish_reason == (
            "tool_calls" if reason == "stop" and answer.tool_calls else reason
        )


def test_a_text_of_an_unknown_form_is_content_character_by_character() -> None:
    text = f" <think>x</think>\n{CALL} "
    regions = AnswerRegions(None, with_calls=True)
    events = pushed(regions, text, random.Random(0)) + regions.finish("stop")
    assert "".join(event.text for event in events if isinstance(event, RegionGrew)) == text
    assert (regions.content, regions.reasoning, regions.calls) == (text, "", [])
    assert regions.finish_reason == "stop"


def test_without_tools_a_call_is_content() -> None:
    regions = AnswerRegions(family_form("qwen3"))
    regions.push(CALL)
    regions.finish("stop")
    assert regions.content == CALL and not regions.calls


def test_reasoning_that_is_not_wanted_is_dropped() -> None:
    regions = AnswerRegions(family_form("qwen3"), with_reasoning=False)
    events = regions.push("<think>Hm.</think>Yes.") + regions.finish("stop")
    assert {event.kind for event in events} == {RegionKind.CONTENT}
    assert (regions.content, regions.reasoning) == ("Yes.", "")


def test_a_prompt_may_have_opened_the_reasoning() -> None:
    prompt = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n"
    regions = AnswerRegions(family_form("qwen3"), prompt)
    regions.push("Hm.</think>Yes.")
    regions.finish("stop")
    assert (regions.content, regions.reasoning) == ("Yes.", "Hm.")


@pytest.mark.parametrize(("reason", "is_cut"), [("length", False), ("stop", True)])
def test_a_call_that_is_cut_is_no_call_of_the_answer(reason: str, is_cut: bool) -> None:
    regions = AnswerRegions(family_form("qwen3"), with_calls=True)
    regions.push('Yes. <tool_call>{"name": "f", "arguments": {"a')
    regions.finish(reason, is_cut)
    assert (regions.content.strip(), regions.calls, regions.finish_reason) == ("Yes.", [], reason)


def test_a_stop_string_behind_a_call_is_no_end_of_the_model() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for is_cut, reason in ((True, "stop"), (False, "tool_calls")):
        regions = AnswerRegions(family_form("qwen3"), with_calls=True)
        regions.push(call)
        regions.finish("stop", is_cut=is_cut)
        assert (len(regions.calls), regions.finish_reason) == (1, reason)
