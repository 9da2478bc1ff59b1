"""Tests that the text of the events always equals the text of their tokens."""

import random

import pytest

from specjax import text
from specjax.assets import embedded
from specjax.client.display import Display
from specjax.client.events import CommittedEvent, ProvisionalEvent, RetractedEvent, TextEvent
from tests.test_text import ANSWERS, ASKED, ids_of, with_marks

PROMPT = "x = '"
BROKEN = "\N{REPLACEMENT CHARACTER}"
BYTES = "é€😀"
"""Characters of two to four tokens."""


@pytest.fixture(scope="module")
def tokenizer():
    return text.load_tokenizer(embedded("target"))


class Reader:
    """A reader that collects the tokens and the text of all events."""

    def __init__(self) -> None:
        self.committed: list[int] = []
        self.text = ""
        self.shown: list[tuple[tuple[int, ...], str]] = []

    def read(self, events: list[TextEvent]) -> None:
        for event in events:
            if isinstance(event, ProvisionalEvent):
                self.shown.append((event.tokens, event.text))
            elif isinstance(event, RetractedEvent):
                begin = len(self.shown) - len(event.tokens)
                assert begin >= 0
                wrong, self.shown = self.shown[begin:], self.shown[:begin]
                assert tuple(token for tokens, _ in wrong for token in tokens) == event.tokens
                assert "".join(piece for _, piece in wrong) == event.text
            else:
                assert isinstance(event, CommittedEvent)
                assert [tokens for tokens, _ in self.shown[: event.confirmed]] == [
                    (t,) for t in event.tokens[: event.confirmed]
                ]
                del self.shown[: event.confirmed]
                self.committed += event.tokens
                self.text += event.text

    @property
    def shown_tokens(self) -> list[int]:
        return [token for tokens, _ in self.shown for token in tokens]

    @property
    def shown_text(self) -> str:
        return "".join(piece for _, piece in self.shown)


def drawn_events(
    display: Display,
    reader: Reader,
    draw: random.Random,
    truth: list[int],
    wrong: list[int],
    after,
) -> None:
    """Commit the truth in pieces, and show right and wrong tokens in between."""
    done = 0
    while done < len(truth) and not display.has_stopped:
        if draw.random() < 0.7:
            shown = len(display.provisional)
            right = truth[done + shown : done + shown + draw.randint(0, 6)]
            is_right = [token for token, _ in display.provisional] == truth[done : done + shown]
            wrong_token = [draw.choice(wrong)] if draw.random() < 0.4 else []
            reader.read(display.show([*(right if is_right else []), *wrong_token]))
            after(done)
        count = min(draw.randint(1, 5), len(truth) - done)
        done += count
        reader.read(display.commit(truth[done - count : done], is_last=done == len(truth)))
        after(done)


@pytest.mark.parametrize("seed", range(30))
def test_what_is_shown_is_what_the_tokens_say(tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    prompt = text.encode(tokenizer, PROMPT)
    alphabet = [BYTES, "abc def\n    ", BYTES + "import os; "][seed % 3]
    characters = "".join(draw.choice(alphabet) for _ in range(30))
    truth = tokenizer(characters, add_special_tokens=False)["input_ids"]
    display, reader = Display(tokenizer, prompt), Reader()

    def said(tokens: list[int]) -> str:
        """Return the text of tokens after the prompt, without an incomplete last character."""
        whole = tokenizer.decode(
            [*prompt, *tokens], skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return whole[len(PROMPT) :].rstrip(BROKEN)

    def check(done: int) -> None:
        assert reader.committed == truth[:done]
        assert reader.shown_tokens == [token for token, _ in display.provisional]
        if done < len(truth):
            # A wrong token may follow the first part of a character, which then is not shown.
            expected = said(truth[:done] + reader.shown_tokens)
            visible = reader.text + reader.shown_text
            assert visible.replace(BROKEN, "") == expected.replace(BROKEN, "")
            assert reader.text == said(truth[:done])

    drawn_events(display, reader, draw, truth, tokenizer(BYTES + "xyz ")["input_ids"], check)
    assert (reader.committed, reader.shown) == (truth, [])
    assert reader.text == display.text == said(truth)
    assert display.tokens == tuple(truth)


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_left_behind_a_stop_string(tokenizer, seed: int) -> None:
    draw = random.Random(seed)
    prompt = text.encode(tokenizer, PROMPT)
    words = "one two; three é four. five\nsix seven"
    truth = tokenizer(words, add_special_tokens=False)["input_ids"]
    stop = draw.choice([";", "é f", "five\ns", "not there", "t"])
    display, reader = Display(tokenizer, prompt, [stop]), Reader()
    drawn_events(display, reader, draw, truth, tokenizer("a b")["input_ids"], lambda _: None)
    assert reader.text == display.text == words.partition(stop)[0]
    assert display.has_stopped == (stop in words)
    assert tuple(reader.committed) == display.tokens == tuple(truth[: len(display.tokens)])
    assert (reader.shown, display.provisional) == ([], [])


def test_without_a_tokenizer_there_are_tokens(tokenizer) -> None:
    display, reader = Display(None, [1, 2], stop=["x"]), Reader()
    reader.read(display.show([3, 4, 5]))
    reader.read(display.commit([3]))
    assert (reader.committed, reader.shown_tokens) == ([3], [4, 5])
    reader.read(display.commit([4, 6, 7], is_last=True))
    assert (display.tokens, display.text) == ((3, 4, 6, 7), "")
    assert (reader.committed, reader.shown) == ([3, 4, 6, 7], [])


def test_a_text_that_is_written_alone_ends_at_a_stop_string(tokenizer) -> None:
    display = Display(tokenizer, tokenizer.encode("import "), stop=[";"], is_alone=True)
    tokens = tokenizer.encode("os; import sys")
    events = display.show(tokens)
    assert display.has_stopped and "".join(event.text for event in events) == "os"
    assert display.show(tokens) == []


@pytest.mark.parametrize(("output", "answer"), ANSWERS)
def test_of_a_chat_in_channels_the_final_one_is_shown(output: str, answer: str) -> None:
    tokenizer = with_marks()
    prompt, truth = ids_of(tokenizer, ASKED), ids_of(tokenizer, output)
    display, reader = Display(tokenizer, prompt, is_chat=True), Reader()
    for at in range(0, len(truth), 3):
        new = truth[at : at + 3]
        # The second token is retracted, whichever channel it appeared in.
        reader.read(display.show([*new[:1], *prompt[:1]]))
        reader.read(display.commit(new))
    reader.read(display.commit([], is_last=True))
    assert reader.text == display.text == answer
    alone = Display(tokenizer, prompt, ["never"], is_alone=True, is_chat=True)
    events = alone.show(truth)
    shown = "".join(event.text for event in events if isinstance(event, ProvisionalEvent))
    assert answer.startswith(shown.rstrip("\N{REPLACEMENT CHARACTER}"))
