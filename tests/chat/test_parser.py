"""The parser of answers: cuts, broken calls, and the rules for white space."""

import math
import random
import time
from dataclasses import replace
from functools import cache

import pytest

from specjax.chat import (
    AnswerParser,
    ChatAnswer,
    RegionClosed,
    RegionGrew,
    RegionKind,
    RegionOpened,
    ResponseForm,
    ToolCall,
    family_form,
)
from specjax.chat import parser as parser_module
from specjax.chat.forms import MAX_TAG, Delimiter
from tests.chat.chats import ANSWERS, PUBLISHED, TOOLS, Published

SLOW = (
    "llama3_1",
    "llama3_2",
    "llama4",
    "deepseek_v3",
    "phi4_mini",
    "phi4_reasoning",
)  # are downloaded
HERE = [published for published in PUBLISHED if published.template not in SLOW]


def _texts(published: Published) -> list[tuple[str, str]]:
    return _texts_of(published.template)


@cache
def _texts_of(name: str) -> list[tuple[str, str]]:
    (published,) = (published for published in PUBLISHED if published.template == name)
    return [published.written(ANSWERS[name]) for name in published.cases]


def _streamed(parser: AnswerParser, text: str, rng: random.Random, is_cut: bool = False) -> list:
    events, position = [], 0
    longest = rng.choice([1, 3, 12, 200])
    while position < len(text):
        count = rng.randint(1, longest)
        events += parser.feed(text[position : position + count])
        position += count
    return events + parser.finish(is_cut)


def _joined(events: list) -> list:
    """Return the events with adjacent growth joined: how a stream differs from a whole answer."""
    joined: list = []
    for event in events:
        if isinstance(event, RegionGrew) and joined and isinstance(joined[-1], RegionGrew):
            joined[-1] = RegionGrew(event.kind, joined[-1].text + event.text)
        else:
            joined.append(event)
    return joined


def _check_order(events: list) -> None:
    """Check that regions open, grow and close one after the other, and are not empty.

    Calls are numbered from 0.
    """
    region, call_count = None, 0
    for event in events:
        if isinstance(event, RegionOpened):
            assert region is None
            region, size = event.kind, 0
            assert bool(event.name) == (region is RegionKind.TOOL_CALL)
            assert event.index == (call_count if event.name else -1)
            call_count += bool(event.name)
        elif isinstance(event, RegionGrew):
            assert event.kind is region and event.text
            size += len(event.text)
        else:
            assert isinstance(event, RegionClosed) and event.kind is region and size
            assert event.is_complete or region is RegionKind.TOOL_CALL
            region = None
    assert region is None


def _check_cuts(published: Published, rng: random.Random, count: int) -> None:
    form = published.chat_family().form
    texts = _texts(published)
    for _ in range(count):
        prompt, text = rng.choice(texts)
        if rng.random() < 0.5:  # cut, or damaged
            place = rng.randrange(len(text) + 1)
            text = text[:place] + rng.choice(["", text[place + 1 :], rng.choice(texts)[1]])
        is_cut, answers, streamed = rng.random() < 0.5, [], []
        with_calls = rng.random() < 0.7
        for whole_calls in (False, True):
            whole = AnswerParser(form, prompt, TOOLS, with_calls, whole_calls)
            events = whole.feed(text) + whole.finish(is_cut)
            parser = AnswerParser(form, prompt, TOOLS, with_calls, whole_calls)
            streamed = _streamed(parser, text, rng, is_cut)
            assert _joined(streamed) == _joined(events), (prompt[-20:], text)
            _check_order(streamed)
            answers.append(ChatAnswer.from_events(streamed))
        _check_whole_calls(streamed)
        assert with_calls or not answers[0].tool_calls
        assert answers[0] == answers[1], (prompt[-20:], text)


def _check_whole_calls(events: list) -> None:
    """Check that each call is complete and has its arguments in one piece."""
    for place, event in enumerate(events):
        if isinstance(event, RegionOpened) and event.kind is RegionKind.TOOL_CALL:
            grew, closed = events[place + 1 : place + 3]
            assert isinstance(grew, RegionGrew) and closed == RegionClosed(RegionKind.TOOL_CALL)


@pytest.mark.full
@pytest.mark.thorough_except("qwen2_5", "qwen3", "qwen3_5", "qwen3_coder", "granite4", "granite3_3")
@pytest.mark.parametrize("published", HERE, ids=lambda published: published.template)
def test_events_do_not_depend_on_the_cuts(published) -> None:
    _check_cuts(published, random.Random(published.template), 40)


@pytest.mark.full
@pytest.mark.thorough_except("qwen2_5", "qwen3")
@pytest.mark.parametrize("published", PUBLISHED, ids=lambda published: published.template)
def test_events_do_not_depend_on_many_more_cuts(published) -> None:
    """Cut 1,000 texts of each of the 18 templates, with calls that grow and with whole ones."""
    _check_cuts(published, random.Random(published.template), 1000)


TAGS = {
    "the shorter text first": ("a|ab", "c|cab"),
    "the longer text first": ("ab|a", "cab|c"),
    "a second part that may be missing": (r"<a>(?:[ ]{0,3}<b>)?", r"</a>(?:[ ]{0,3}</b>)?"),
    "a look ahead": (r"<a>(?!b)", r"</a>(?=b|<a>)"),
    "a later short match in an earlier long one": (r"<a>[ ab]{0,4}c|b", "c[ab]{3}<|</a>"),
    "the end of a word": (r"ab?\b", r"b\B|c\b"),
    "repeats": ("<+a+", "b*?c+"),
    "texts": (["<a>", "<a>b", "a<"], ["</a>", "</"]),
}


@pytest.mark.parametrize("tags", TAGS.values(), ids=TAGS)
def test_the_tags_of_any_template_do_not_depend_on_the_cuts(tags) -> None:
    suffix = "" if isinstance(tags[0], list) else "_pattern"
    field = {f"open{suffix}": tags[0], f"close{suffix}": tags[1]}
    template = {"start_anchor": "Model:", "fields": {"thinking": field, "content": {}}}
    form = ResponseForm.from_template(template)
    rng = random.Random(0)
    pieces = ["<a>", "</a>", "<b>", "</b>", "a", "b", "c", "<", " ", "\n"]
    kinds = set()
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randint(1, 12)))
        whole = AnswerParser(form)
        events = whole.feed(text) + whole.finish()
        parser = AnswerParser(form)
        streamed = [event for piece in text for event in parser.feed(piece)] + parser.finish()
        assert _joined(streamed) == _joined(events), text
        kinds |= {event.kind for event in events}
    assert kinds == {RegionKind.CONTENT, RegionKind.REASONING}


def _without_first(form: ResponseForm) -> ResponseForm:
    """Return a form whose tags do not say with which characters they begin."""

    def of(tag: Delimiter | None) -> Delimiter | None:
        return None if tag is None else replace(tag, first=None)

    regions = [replace(it, opens=of(it.opens), closes=of(it.closes)) for it in form.regions]
    outside = form.outside and replace(form.outside, closes=of(form.outside.closes))
    return replace(form, regions=tuple(regions), outside=outside)


@pytest.mark.parametrize("published", HERE, ids=lambda published: published.template)
def test_text_in_which_no_tag_begins_is_parsed_as_if_it_were_searched(published) -> None:
    form, rng = published.chat_family().form, random.Random(11)
    for prompt, text in _texts(published):
        for _ in range(3):
            seed = rng.random()
            quick, slow = (
                _streamed(AnswerParser(it, prompt, TOOLS), text, random.Random(seed))
                for it in (form, _without_first(form))
            )
            assert quick == slow


@pytest.mark.parametrize(
    ("pattern", "first"),
    [
        ("<think>", "<"),
        (r"\[TOOL_CALLS\]", "["),
        (r"<f=(?P<name>[^>|]{1,9})>", None),  # the bar in brackets is no choice, but may be one
        (r"<\|a\|>", "<"),
        ("<a>|b", None),
        ("<?a", None),
        ("<{0,2}a", None),
        ("[<]a", None),
        (r"\A<", None),
    ],
)
def test_the_first_character_of_a_tag_is_that_of_a_simple_expression(pattern, first) -> None:
    stated = Delimiter.from_pattern(pattern).first
    assert stated == (None if first is None else {first})


def test_what_is_too_long_for_a_tag_is_content() -> None:
    field = {"open_pattern": "<n[^>]*>", "close": "</n>"}
    template = {"start_anchor": "Model:", "fields": {"thinking": field, "content": {}}}
    form = ResponseForm.from_template(template)
    for length in (MAX_TAG, MAX_TAG + 1):
        text = "a" + "<n" + "x" * (length - 3) + ">b</n>" + "c" * 10
        is_tag = length == MAX_TAG
        for pieces in ([text], text):
            parser = AnswerParser(form)
            events = [event for piece in pieces for event in parser.feed(piece)]
            assert sum(len(event.text) for event in events if isinstance(event, RegionGrew)) > 10
            answer = ChatAnswer.from_events(events + parser.finish())
            expected = ChatAnswer("a" + "c" * 10, "b") if is_tag else ChatAnswer(text)
            assert answer == expected


@pytest.mark.parametrize("published", HERE, ids=lambda published: published.template)
def test_every_prefix_of_an_answer_can_be_parsed(published) -> None:
    prompt, text = _texts(published)[-1]
    form = published.chat_family().form
    growing = AnswerParser(form, prompt, TOOLS)
    for length in range(len(text) + 1):
        answer = AnswerParser(form, prompt, TOOLS).parse(text[:length], is_cut=True)
        assert all(isinstance(call.values(), dict) for call in answer.tool_calls)
        if length:
            growing.feed(text[length - 1])
    assert ChatAnswer.from_events(growing.finish()).content == ""
    assert answer.tool_calls == AnswerParser(form, prompt, TOOLS).parse(text).tool_calls
    assert bool(answer.tool_calls) is bool(ANSWERS[published.cases[-1]].tool_calls)


def test_a_parser_that_holds_nothing_back_is_noticed(monkeypatch) -> None:
    def search(self, text, start, is_last):
        return self.pattern.search(text, start), len(text)

    monkeypatch.setattr(Delimiter, "search", search)
    with pytest.raises(AssertionError):
        test_events_do_not_depend_on_the_cuts(HERE[0])


def test_white_space_that_is_left_in_the_text_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(parser_module, "_without_blank", lambda text: text)
    with pytest.raises(AssertionError):
        test_white_space_next_to_tags_belongs_to_the_tags()


# --- calls that do not parse ----------------------------------------------------------------------

CALL = '{"name": "f", "arguments": {"a": 1}}'

BROKEN = {
    "qwen3": [
        "<tool_call>[1, 2]</tool_call>",
        '<tool_call>\n{"name": "f", "arguments": [1]}\n</tool_call>',
        '<tool_call>{"name": 5, "arguments": {}}</tool_call>',
        '<tool_call>{"name": "", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        '<tool_call>{"name": "f"}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": {"a": "line\nbreak"}}</tool_call>',
        '<tool_call>{"name": "f", "arguments": "no object"}</tool_call>',
        '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
        "<tool_call>get_weather(city='Oslo')</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>" + '{"name": "f", "arguments": ' + "[" * 200,
        '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>',
    ],
    "qwen3_5": [
        "<tool_call>\n<function=f>\nno tags\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n<parameter=a>\n1\n</function>\n</tool_call>",
        "</function></tool_call>",
        "<tool_call>" + CALL + "</tool_call>",
    ],
    "gemma4": ["<|tool_call>call:f{a:}<tool_call|>", "<|tool_call>call:f{a<tool_call|>"],
    "mistral_list": ["[TOOL_CALLS]" + CALL, '[TOOL_CALLS] ["f"]', "[TOOL_CALLS]f"],
    "mistral_named": ["[TOOL_CALLS]f[ARGS]5", "[TOOL_CALLS]f[ARGS][1]", "[TOOL_CALLS]f{}"],
    "gpt_oss": ["<|channel|>commentary to=functions.f <|constrain|>json<|message|>no JSON"],
    "llama3": ['{"name": "Bob", "age": 3}', '{"name": "Bob", "parameters": 5}', "[1, 2]"],
}


@pytest.mark.parametrize(
    ("family", "text"), [(family, text) for family, texts in BROKEN.items() for text in texts]
)
def test_a_call_that_does_not_parse_becomes_content(family, text) -> None:
    before = "" if family == "llama3" else "Well. "
    answer = AnswerParser(family_form(family)).parse(before + text)
    assert answer == ChatAnswer(before + text)
    events = _streamed(AnswerParser(family_form(family)), before + text, random.Random(0))
    _check_order(events)
    assert ChatAnswer.from_events(events) == answer


def test_pieces_of_a_broken_call_are_reported_and_then_taken_back() -> None:
    parser = AnswerParser(family_form("qwen3"))
    events = parser.feed('<tool_call>{"name": "f", "arguments": {"a": 1')
    assert events == [
        RegionOpened(RegionKind.TOOL_CALL, "f", 0),
        RegionGrew(RegionKind.TOOL_CALL, '{"a": 1'),
    ]
    events += parser.feed("x}}</tool_call>") + parser.finish()
    assert RegionClosed(RegionKind.TOOL_CALL, "invalid") in events
    broken = '<tool_call>{"name": "f", "arguments": {"a": 1x}}</tool_call>'
    assert ChatAnswer.from_events(events) == ChatAnswer(broken)


@pytest.mark.parametrize(
    ("family", "text"), [(family, text) for family, texts in BROKEN.items() for text in texts]
)
def test_a_broken_call_leaves_no_trace_but_content_if_calls_are_whole(family, text) -> None:
    before = "" if family == "llama3" else "Well. "
    for pieces in ([before + text], before + text):
        parser = AnswerParser(family_form(family), whole_calls=True)
        events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
        assert _joined(events) == [
            RegionOpened(RegionKind.CONTENT),
            RegionGrew(RegionKind.CONTENT, before + text),
            RegionClosed(RegionKind.CONTENT),
        ]


def test_calls_are_numbered_with_those_that_do_not_parse() -> None:
    broken = '<tool_call>{"name": "f", "arguments": {"a": 1x}}</tool_call>'
    text = f"a{broken}<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    for whole_calls, numbers in ((False, [0, 1, 2]), (True, [0, 1])):
        parser = AnswerParser(family_form("qwen3"), whole_calls=whole_calls)
        opened = [event for event in parser.feed(text) if isinstance(event, RegionOpened)]
        assert [event.index for event in opened if event.name] == numbers
        assert {event.index for event in opened if not event.name} == {-1}


def test_calls_of_the_prompt_have_no_number() -> None:
    prompt = f'[/INST][TOOL_CALLS][{CALL}, {{"name": "g", "arguments": {{"b": '
    for whole_calls in (False, True):
        parser = AnswerParser(family_form("mistral_list"), prompt, whole_calls=whole_calls)
        events = parser.feed("2}}, " + CALL + "]") + parser.finish()
        _check_order(events)
        calls = (ToolCall("g", '{"b": 2}'), ToolCall("f", '{"a": 1}'))
        assert ChatAnswer.from_events(events) == ChatAnswer("", "", calls)


def test_a_call_ends_where_its_first_fault_is() -> None:
    inner = "<tool_call>" + CALL.replace('"', "'") + "</tool_call>"
    broken = f'<tool_call>{{"name": 5, "a": "{inner}"}}</tool_call>'
    strings = '<tool_call>{"arguments": "5", "b": "<think>", "name": "f"}</tool_call>'
    for text in (broken, strings, f'[TOOL_CALLS][{CALL}, 5, "[TOOL_CALLS]", {{}}]'):
        form = family_form("mistral_list" if text.startswith("[") else "qwen3")
        whole, parser = AnswerParser(form), AnswerParser(form)
        events = [event for piece in text for event in parser.feed(piece)] + parser.finish()
        assert _joined(events) == _joined(whole.feed(text) + whole.finish())


def test_what_follows_a_broken_call_is_parsed() -> None:
    text = f"<tool_call>[1]</tool_call>\n<tool_call>{CALL}</tool_call>"
    answer = AnswerParser(family_form("qwen3")).parse(text)
    call = ToolCall("f", '{"a": 1}')
    assert answer == ChatAnswer("<tool_call>[1]</tool_call>", "", (call,))


def test_the_calls_before_a_broken_one_in_a_list_stay() -> None:
    text = f"[TOOL_CALLS][{CALL}, 5]"
    answer = AnswerParser(family_form("mistral_list")).parse(text)
    assert answer == ChatAnswer(", 5]", "", (ToolCall("f", '{"a": 1}'),))


def test_arguments_may_be_the_text_of_an_object_and_come_first() -> None:
    text = r'<tool_call>{"arguments": "{\"a\": [1]}", "name": "f"}</tool_call>'
    answer = AnswerParser(family_form("qwen3")).parse(text)
    assert answer.tool_calls == (ToolCall("f", '{"a": [1]}'),)


def test_a_closing_tag_inside_of_an_argument_does_not_close_the_call() -> None:
    call = '{"name": "f", "arguments": {"a": "</tool_call><tool_call>"}}'
    answer = AnswerParser(family_form("qwen3")).parse(f"<tool_call>{call}</tool_call>")
    assert answer == ChatAnswer("", "", (ToolCall("f", '{"a": "</tool_call><tool_call>"}'),))


def test_a_closing_tag_inside_of_a_parameter_does_not_close_it() -> None:
    call = "<function=f>\n<parameter=a>\nx</parameter>\n  y\n</parameter>\n</function>"
    answer = AnswerParser(family_form("qwen3_5")).parse(f"<tool_call>{call}</tool_call>")
    assert [call.values() for call in answer.tool_calls] == [{"a": "x</parameter>\n  y"}]


def test_arguments_stream_as_the_models_own_characters() -> None:
    parser = AnswerParser(family_form("qwen3"))
    pieces = [
        '<tool_call>{"name":"f","arguments":',
        '{ "a" :  "',
        "x",
        'y\\n"',
        " }}",
        "</tool_call>",
    ]
    texts = [
        "".join(event.text for event in parser.feed(piece) if isinstance(event, RegionGrew))
        for piece in pieces
    ]
    assert texts == ["", '{ "a" :  "', "x", 'y\\n"', " }", ""]


# --- answers that are cut -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family",
    ["qwen3", "qwen3_5", "mistral_list", "mistral_named", "deepseek_v3_1", "gpt_oss", "gemma4"],
)
def test_a_limit_inside_a_call_leaves_no_half_call(family) -> None:
    published = next(published for published in HERE if published.family == family)
    prompt, text = published.written(ANSWERS["call"])
    form = published.chat_family().form
    halves = [
        AnswerParser(form, prompt, TOOLS).parse(text[:length], is_cut=True)
        for length in range(len(text))
    ]
    complete = [answer for answer in halves if answer.tool_calls]
    whole = AnswerParser(form, prompt, TOOLS).parse(text)
    assert [call.values() for call in whole.tool_calls] == [
        call.values() for call in ANSWERS["call"].tool_calls
    ]
    assert all(answer.tool_calls == whole.tool_calls for answer in complete)
    # What was cut inside the first word of the tag is content: nobody can say that it is a tag.
    assert all(len(answer.content) < 22 for answer in halves)
    assert not any("get" in answer.content for answer in halves)
    # If the model itself ended the text there, nothing is dropped but a thought's tags.
    begin = text.index("</think>") + len("</think>") if "</think>" in text else 0
    dropped = 0
    for length in range(begin + 1, len(text)):
        answer = AnswerParser(form, prompt, TOOLS).parse(text[:length])
        assert answer.tool_calls or answer.content.strip() == text[begin:length].strip()
        is_dropped = not halves[length].tool_calls and not halves[length].content
        dropped += is_dropped and not answer.tool_calls
    assert dropped > 50


def test_a_call_that_the_model_itself_does_not_end_is_content() -> None:
    text = '<tool_call>{"name": "f", "arg'
    assert AnswerParser(family_form("qwen3")).parse(text) == ChatAnswer(text)
    assert AnswerParser(family_form("qwen3")).parse(text, is_cut=True) == ChatAnswer()


def test_a_call_that_is_cut_says_so() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a'
    for is_cut, reason in ((True, "cut"), (False, "invalid")):
        parser = AnswerParser(family_form("qwen3"))
        events = parser.feed(text) + parser.finish(is_cut)
        assert RegionClosed(RegionKind.TOOL_CALL, reason) in events
    parser = AnswerParser(family_form("qwen3"), whole_calls=True)
    assert parser.feed(text) + parser.finish(is_cut=True) == []


def test_json_that_looked_like_a_call_is_content_if_it_is_cut() -> None:
    text = '{"name": "Bob", "age'
    assert AnswerParser(family_form("llama3")).parse(text, is_cut=True) == ChatAnswer(text)


def test_a_stop_string_inside_a_thought_leaves_the_thought() -> None:
    answer = AnswerParser(family_form("qwen3")).parse("<think>\nOne, two", is_cut=True)
    assert answer == ChatAnswer("", "One, two")


def test_a_complete_call_without_its_closing_tag_is_a_call() -> None:
    answer = AnswerParser(family_form("qwen3")).parse(f"<tool_call>{CALL}", is_cut=True)
    assert answer.tool_calls == (ToolCall("f", '{"a": 1}'),)


# --- text ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", " ", "\n a\n\n", "<", "a <thin", "</think>", "</tool_call> a"]
)
def test_an_answer_without_tags_is_content_character_by_character(text) -> None:
    assert AnswerParser(family_form("qwen3")).parse(text) == ChatAnswer(text)


def test_white_space_next_to_tags_belongs_to_the_tags() -> None:
    text = f"<think>\n a \n</think>\n\n  b\n\n<tool_call>{CALL}</tool_call>\n"
    answer = AnswerParser(family_form("qwen3")).parse(text)
    assert (answer.reasoning, answer.content) == (" a", "  b")


def test_white_space_between_pieces_of_content_stays() -> None:
    text = f"b\n<tool_call>{CALL}</tool_call>\nc \n"
    assert AnswerParser(family_form("qwen3")).parse(text).content == "b\n\nc \n"


def test_an_empty_thought_of_a_channel_is_no_region() -> None:
    text = "<|channel|>analysis<|message|><|channel|>final<|message|>Hi"
    for is_cut in (False, True):
        assert AnswerParser(family_form("gpt_oss")).parse(text, is_cut) == ChatAnswer("Hi")


def test_an_empty_thought_is_no_region() -> None:
    parser = AnswerParser(family_form("qwen3"))
    events = parser.feed("<think>\n\n</think>\n\nHi") + parser.finish()
    assert {event.kind for event in events} == {RegionKind.CONTENT}
    assert ChatAnswer.from_events(events) == ChatAnswer("Hi")


def test_the_prompt_may_have_begun_the_thought() -> None:
    prompt = "<|im_start|>user\n</think> <|im_end|>\n<|im_start|>assistant\n<think>\n"
    parser = AnswerParser(family_form("qwen3_5"), prompt)
    assert parser.parse("a</think>b") == ChatAnswer("b", "a")


def test_tags_in_the_users_text_open_nothing() -> None:
    prompt = "<|im_start|>user\n<think> <tool_call> {<|im_end|>\n<|im_start|>assistant\n"
    assert AnswerParser(family_form("qwen3"), prompt).parse("Hi") == ChatAnswer("Hi")
    assert AnswerParser(family_form("qwen3"), "<think>").parse("Hi") == ChatAnswer("Hi")


def test_the_prompt_may_have_begun_a_call() -> None:
    prompt = '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {'
    answer = AnswerParser(family_form("qwen3"), prompt).parse('"a": 1}}\n</tool_call>')
    assert answer == ChatAnswer("", "", (ToolCall("f", '{"a": 1}'),))


def test_without_tools_a_call_is_content() -> None:
    text = '{"name": "f", "parameters": {}}'
    assert AnswerParser(family_form("llama3")).parse(text).tool_calls
    assert AnswerParser(family_form("llama3"), with_calls=False).parse(text) == ChatAnswer(text)


def test_a_parser_that_has_finished_says_so() -> None:
    parser = AnswerParser(family_form("qwen3"))
    parser.finish()
    with pytest.raises(RuntimeError, match="make a new parser"):
        parser.feed("a")
    with pytest.raises(RuntimeError, match="make a new parser"):
        parser.finish()


def _seconds(count: int) -> float:
    parser = AnswerParser(family_form("qwen3_5"))
    start = time.process_time()
    for text in ["x", "\n" * 4, "<tool_call>", "\n" * 4, "</think>", "<think>"]:
        for character in text * (count if text.isspace() else 1):
            parser.feed(character)
    parser.finish()
    return time.process_time() - start


def test_white_space_that_is_held_costs_linear_time() -> None:
    _seconds(10)
    short, long = _seconds(500), _seconds(4000)
    assert long < 24 * short  # quadratic time would be 64 times as much


def _seconds_of(family: str, text: str, is_streamed: bool = False) -> float:
    best = math.inf
    for _ in range(3):
        parser = AnswerParser(family_form(family))
        start = time.process_time()
        for piece in text if is_streamed else [text]:
            parser.feed(piece)
        parser.finish()
        best = min(best, time.process_time() - start)
    return best


LINEAR = {
    "strings of Gemma that do not end": (
        "gemma4",
        lambda count: "<|tool_call>call:f{a:" + '<|"|>"' * count + "<tool_call|>",
    ),
    "escaped quotes in a string that does not end": (
        "gemma4",
        lambda count: '<|tool_call>call:f{a:"' + '\\"' * count + "<tool_call|>",
    ),
    "thoughts": ("qwen3", lambda count: "<think>a</think>b" * count),
    "parameters": (
        "qwen3_5",
        lambda count: (
            "<tool_call><function=f>"
            + "".join(f"<parameter=a{i}>1</parameter>\n" for i in range(count))
            + "</function></tool_call>"
        ),
    ),
    "calls": ("qwen3", lambda count: f"<tool_call>{CALL}</tool_call>" * count),
    "calls that do not parse": ("qwen3", lambda count: "<tool_call>[1]</tool_call>" * count),
    "a list of calls": (
        "mistral_list",
        lambda count: "[TOOL_CALLS][" + ", ".join([CALL] * count) + "]",
    ),
}


@pytest.mark.full
@pytest.mark.thorough_except(
    "strings of Gemma that do not end", "escaped quotes in a string that does not end"
)
@pytest.mark.parametrize(("family", "text"), LINEAR.values(), ids=LINEAR)
def test_long_texts_cost_linear_time(family, text) -> None:
    short, long = _seconds_of(family, text(1000)), _seconds_of(family, text(8000))
    assert long < 24 * short + 0.05  # quadratic time would be 64 times as much


@pytest.mark.full
def test_a_long_list_of_calls_that_streams_costs_linear_time() -> None:
    text = LINEAR["a list of calls"][1]
    short = _seconds_of("mistral_list", text(100), is_streamed=True)
    long = _seconds_of("mistral_list", text(800), is_streamed=True)
    assert long < 24 * short


@pytest.mark.full
def test_a_long_key_costs_linear_time() -> None:
    """Break keys that are too long: the newest key is read again with each piece."""
    text = '<tool_call>{"' + "a" * 200_000
    assert ChatAnswer.from_events(AnswerParser(family_form("qwen3")).feed(text)).content
    assert _seconds_of("qwen3", text[:80_000], True) < 24 * _seconds_of(
        "qwen3", text[:10_000], True
    )


SLOW_TAG = "(?:x|xx)+y"  # exponential time in the number of x


@pytest.mark.parametrize("place", ["open", "close", "close of a call", "tag", "anchor"])
def test_an_expression_that_takes_too_long_ends_as_content(place) -> None:
    thinking = {"open": "<t>", "close": "</t>"}
    calls = {
        "open": "<c>",
        "close": "</c>",
        "content": "xml-inline",
        "content_args": {"tag_pattern": "<(?P<key>a)>(?P<value>.*?)</a>"},
        "transform": {"type": "function", "function": {"name": "f", "arguments": "{content}"}},
    }
    x, anchor = "x" * 100, {"start_anchor": "Model:"}
    if place == "open":
        thinking = {"open_pattern": SLOW_TAG, "close": "</t>"}
    elif place == "close":
        thinking = {"open": "<t>", "close_pattern": SLOW_TAG}
    elif place == "close of a call":
        del calls["close"]
        calls["close_pattern"] = SLOW_TAG
    elif place == "tag":
        calls["content_args"]["tag_pattern"] = f"<(?P<key>a)>(?P<value>{SLOW_TAG})</a>"
    else:
        anchor = {"start_anchor_pattern": SLOW_TAG}
    fields = {"thinking": thinking, "tool_calls": calls, "content": {}}
    form = ResponseForm.from_template({**anchor, "fields": fields})
    text = f"b<c><a>{x}</a></c>" if place in ("tag", "close of a call") else f"b<t>{x}"
    start = time.process_time()
    parser = AnswerParser(form, x if place == "anchor" else "")
    events = [event for piece in (text, "d", f"<t>{x}", "e") for event in parser.feed(piece)]
    events += parser.finish()
    _check_order(events)
    assert time.process_time() - start < 2
    answer = ChatAnswer.from_events(events)
    if place == "anchor":
        assert answer == ChatAnswer("b", f"{x}d<t>{x}e")
    elif place == "close":
        assert answer == ChatAnswer(f"b{x}d<t>{x}e")
    else:
        assert answer == ChatAnswer(f"{text}d<t>{x}e")


def test_many_slow_searches_are_given_up(monkeypatch) -> None:
    """Count a search that is slow, but not too slow, against the whole answer."""
    clock = iter(range(10**6))
    monkeypatch.setattr(parser_module.time, "thread_time", lambda: next(clock) * 0.1)
    parser = AnswerParser(family_form("qwen3"))
    events = (
        parser.feed("<a") + parser.feed("<b") + parser.feed("c<think>d") + parser.feed("</think>")
    )
    assert ChatAnswer.from_events(events + parser.finish()) == ChatAnswer("<a<bc<think>d</think>")


def test_the_buffer_does_not_grow_with_the_text() -> None:
    parser = AnswerParser(family_form("llama3"))
    for _ in range(3000):
        parser.feed("word word ")
    assert len(parser._buffer) < 10_000
    assert ChatAnswer.from_events(parser.feed('{"name": "f", "parameters": {}}')).tool_calls == ()
