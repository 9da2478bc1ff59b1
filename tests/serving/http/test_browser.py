"""Tests of the page in a real browser, with a real server. They need a Chromium.

`make test-browser` runs them. The variable SCREENSHOTS names a folder for screenshots.
"""

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specjax.serving.handle import Piece
from tests.serving.http.chromium import Page, chromium
from tests.serving.http.conftest import KEY
from tests.serving.http.conftest import Server as Shared
from tests.serving.http.interfaces import chat_engine
from tests.serving.http.made_up import Characters, MadeUpEngine
from tests.serving.http.made_up import serving as made_up_serving
from tests.serving.http.process import Server, serving

pytestmark = pytest.mark.browser

PAIR = (
    "--target",
    "embedded",
    "--drafter",
    "embedded:eagle3",
    "--drafts",
    "chain:4",
    "--rows",
    "2",
)
PROMPT = 'class Stack:\n    """Last in, <b>first</b> out."""\n'
ASKED = {"max_tokens": 120, "temperature": 0.7, "top_p": 0.95, "seed": 7, "stop": ["\n\n\n"]}
FIELDS = {
    "#max-tokens": "120",
    "#temperature": "0.7",
    "#top-p": "0.95",
    "#seed": "7",
    "#stop-strings": r"\n\n\n",
}
IDLE = "!document.querySelector('#generate').disabled"
ANSWER = "document.querySelector('#answer').textContent"
STATUS = "document.querySelector('#status').textContent"
ENTER, ESCAPE = ("Enter", 13), ("Escape", 27)

# The contrast of the text in each element with its background, as WCAG defines it.
CONTRASTS = """
(() => {
  const numbers = (colour) => colour.match(/[\\d.]+/g).map(Number);
  const linear = (part) => (part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const luminance = ([r, g, b]) =>
    0.2126 * linear(r / 255) + 0.7152 * linear(g / 255) + 0.0722 * linear(b / 255);
  const behind = (place) => {
    const colour = numbers(getComputedStyle(place).backgroundColor);
    return colour[3] === 0 ? behind(place.parentElement) : colour;
  };
  const places = ["#answer .accepted", "#answer .given", "#answer", "#legend", "#legend .accepted",
    "#legend .own", "dt", "dd", "#status", "#generate", "#stop-note", "#model", "label[for=seed]",
    "summary", "#prompt", "kbd", ".choice label"];
  return Object.fromEntries(places.map((selector) => {
    const place = document.querySelector(selector);
    const colours = [numbers(getComputedStyle(place).color), behind(place)];
    const [lighter, darker] = colours.map(luminance).sort((a, b) => b - a);
    return [selector, (lighter + 0.05) / (darker + 0.05)];
  }));
})()
"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> Path:
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Iterator[Server]:
    with serving(tmp_path_factory.mktemp("server") / "log", *PAIR) as running:
        yield running


@pytest.fixture
def page(tmp_path) -> Iterator[Page]:
    with chromium(tmp_path) as browser:
        yield Page(browser)


def fill_in(page: Page) -> None:
    page.evaluate("document.querySelector('#settings').open = true")
    for field, value in ({"#prompt": PROMPT} | FIELDS).items():
        page.type(field, value)


@pytest.mark.parametrize(
    ("name", "width", "height", "theme"),
    [
        ("desktop-light", 1280, 800, "light"),
        ("desktop-dark", 1280, 800, "dark"),
        ("phone", 360, 740, "light"),
    ],
)
def test_an_answer_streams_in_and_shows_what_was_accepted_of_it(
    page, plain, pictures, name, width, height, theme
):
    page.look(width, height, theme)
    page.open(plain.address)
    page.wait_for("document.querySelector('#model').textContent === 'embedded'")
    assert page.evaluate(STATUS) == ""
    fill_in(page)
    page.evaluate(
        "window.lengths = []; new MutationObserver(() =>"
        " lengths.push(document.querySelector('#answer').textContent.length))"
        ".observe(document.querySelector('#answer'), {childList: true})"
    )
    if name == "phone":
        page.click("#generate")
    else:
        page.press(*ENTER, control=True)
    page.wait_for("document.querySelector('#answer .accepted')")
    page.wait_for(IDLE)

    assert len(set(page.evaluate("lengths"))) > 3  # it came in pieces
    whole = plain.post("/v1/completions", {"model": "embedded", "prompt": PROMPT, **ASKED})
    text = whole["choices"][0]["text"]
    assert page.evaluate(ANSWER) == PROMPT + text  # markup in it is text
    assert page.evaluate("document.querySelector('#answer').children.length") > 10
    accepted = "".join(
        page.evaluate(
            "[...document.querySelectorAll('#answer .accepted')].map((each) => each.textContent)"
        )
    )
    assert 0 < len(accepted) < len(text)

    tokens = whole["usage"]["completion_tokens"]
    assert page.evaluate("document.querySelector('#tokens').textContent") == str(tokens)
    assert 1 < float(page.evaluate("document.querySelector('#acceptance').textContent")) < 5
    assert float(page.evaluate("document.querySelector('#speed').textContent")) > 0
    assert page.evaluate("document.querySelector('#first').textContent").split()[1] in {"ms", "s"}
    page.wait_for("document.querySelector('#running').textContent === '0'")
    assert page.evaluate("document.querySelector('#waiting').textContent") == "0"
    page.wait_for("document.querySelector('#draft').textContent === 'chain of 4'")

    low = {
        selector: contrast
        for selector, contrast in page.evaluate(CONTRASTS).items()
        if contrast < 4.5
    }
    assert not low
    page.screenshot(pictures / f"{name}.png")
    for narrow in (width, min(width, 320)):
        page.look(narrow, height, theme)
        # The page need not scroll sideways.
        assert page.evaluate("document.documentElement.scrollWidth") <= narrow
    assert not page.troubles()
    asked_for = [
        f"{plain.address}/{path}" for path in ("", "metrics", "v1/completions", "v1/models")
    ]
    assert page.requested() == asked_for


def test_stopping_frees_the_row(page, plain):
    page.look(1280, 800)
    page.open(plain.address)
    page.type("#prompt", "import os\n")
    page.type("#max-tokens", "900")
    page.press(*ENTER, control=True)
    page.wait_for("document.querySelector('#answer .accepted')")
    page.press(*ESCAPE)
    page.wait_for(IDLE)
    assert page.evaluate(STATUS) == "Stopped."
    plain.wait_until_idle()
    assert page.evaluate("Number(document.querySelector('#tokens').textContent)") < 900


def test_a_model_without_a_chat_template_has_no_chat(page, plain):
    page.look(1280, 800)
    page.open(plain.address)
    page.wait_for("document.querySelector('#chat').disabled")
    assert "no chat template" in page.evaluate("document.querySelector('#mode-note').textContent")
    assert not page.troubles()


def test_what_the_server_refuses_is_shown_in_its_own_words(page, plain):
    too_long = "import os\n" * 2000
    page.look(1280, 800)
    page.open(plain.address)
    page.type("#prompt", too_long)
    page.press(*ENTER, control=True)
    page.wait_for("!document.querySelector('#error').hidden")
    shown = page.evaluate("document.querySelector('#error').textContent")
    assert "shorten it" in shown
    with pytest.raises(AssertionError) as refused:
        plain.post("/v1/completions", {"model": "embedded", "prompt": too_long, "max_tokens": 128})
    assert json.loads(str(refused.value).partition(": ")[2])["error"]["message"] == shown


def test_a_prediction_changes_nothing_and_is_accounted_for(page, plain):
    page.look(1280, 800)
    page.open(plain.address)
    fill_in(page)
    page.press(*ENTER, control=True)
    page.wait_for(f"{IDLE} && {STATUS}.startsWith('Ended')")
    answer = page.evaluate(ANSWER)
    page.click("#prediction-field summary")
    page.type("#prediction", answer.removeprefix(PROMPT))
    page.press(*ENTER, control=True)
    page.wait_for(f"{IDLE} && {STATUS}.includes('prediction')")
    assert page.evaluate(ANSWER) == answer
    accepted, rejected = (int(word) for word in page.evaluate(STATUS).split() if word.isdigit())
    assert accepted > rejected >= 0
    assert not page.troubles()


def test_a_key_is_asked_for_and_kept_for_the_tab(page, server: Shared):
    page.look(360, 740)
    page.open(server.url)
    page.wait_for("!document.querySelector('#key-field').hidden")
    page.type("#prompt", "import os\n")
    page.type("#key", "wrong")
    page.click("#generate")
    page.wait_for("!document.querySelector('#error').hidden")
    assert "Authorization" in page.evaluate("document.querySelector('#error').textContent")
    assert page.evaluate("sessionStorage.length") == 0
    page.type("#key", KEY)
    page.click("#generate")
    page.wait_for(f"{ANSWER}.length > 20")
    page.wait_for(IDLE)
    page.open(server.url)  # a second time, in the same tab
    page.wait_for("document.querySelector('#running').textContent === '0'")
    assert page.evaluate("document.querySelector('#key-field').hidden")
    assert page.evaluate("localStorage.length") == 0


def test_a_chat_goes_on_until_there_is_a_new_one(page, server: Shared, pictures):
    page.look(1280, 800)
    page.open(server.url)
    page.evaluate(f"sessionStorage.setItem('specjax-api-key', '{KEY}')")
    page.open(server.url)
    page.wait_for("document.querySelector('#model').textContent === 'tiny'")
    page.click("#chat")
    page.type("#max-tokens", "24")
    page.type("#temperature", "0")
    for number, message in enumerate(("Write a class.", "And <i>another</i> one."), 1):
        page.type("#prompt", message)
        page.click("#generate")
        page.wait_for(f"{IDLE} && document.querySelectorAll('.turn').length === {2 * number}")
        assert page.evaluate("document.querySelector('#prompt').value") == ""
    page.screenshot(pictures / "chat.png")
    first, second = page.evaluate(
        "[...document.querySelectorAll('.turn:nth-child(even)')].map((turn) => turn.textContent)"
    )
    body = {"model": "tiny", "max_tokens": 24, "temperature": 0, "messages": []}
    for message, shown in (("Write a class.", first), ("And <i>another</i> one.", second)):
        body["messages"].append({"role": "user", "content": message})
        answer = Server(server.url, server.process.pid, KEY).post("/v1/chat/completions", body)
        body["messages"].append(answer["choices"][0]["message"])
        assert shown == "Model" + answer["choices"][0]["message"]["content"]
    page.click("#clear")
    assert page.evaluate(ANSWER) == ""
    assert page.evaluate("document.querySelector('#clear').hidden")


# --- thoughts and calls of tools ------------------------------------------------------------------

THOUGHT = "The user wants the weather.\nI know a tool for it, <b>get_weather</b>, and call it."
ARGUMENTS = '{"city": "Oslo", "days": [1, 2, 3], "note": "' + "a-long-word-" * 12 + '"}'
CALLING = (
    f"<think>\n{THOUGHT}\n</think>\n\nI look at the weather in Oslo, and then at its forecast.\n"
    f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'
)
TOOLS = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
# What the user sees of the answer's parts.
PARTS = """
(() => {
  const text = (selector) =>
    [...document.querySelectorAll(`#answer ${selector}`)].map((place) => place.textContent);
  return {
    thoughts: text("details.thought > div"), content: text(".content"), names: text(".call .name"),
    calls: text(".call > div:not(.result)"), results: text(".call .result"),
    opened: text("details[open]"), fields: text(".call textarea"),
  };
})()
"""
PART_CONTRASTS = CONTRASTS.replace('"#answer .given"', '".thought > div", ".call .name"')


def calling_engine() -> MadeUpEngine:
    """Return an engine whose answer thinks and calls a tool. Of six tokens, four were accepted."""
    engine = chat_engine(CALLING, pause=0.002)
    count = itertools.count()

    def piece(token: int, settings: dict[str, Any]) -> Piece:
        text, accepted = Characters().decode([token]), next(count) % 6 > 1
        return Piece(text, (token,), (accepted,), (), ((text, accepted),))

    engine._piece = piece  # pyright: ignore[reportAttributeAccessIssue]
    return engine


@pytest.mark.parametrize(
    ("name", "width", "height", "theme"),
    [("desktop", 1280, 800, "light"), ("dark", 1280, 800, "dark"), ("phone", 360, 740, "light")],
)
def test_a_chat_shows_a_folded_thought_and_a_call_whose_result_is_sent_back(
    page, pictures, name, width, height, theme
):
    engine = calling_engine()
    with made_up_serving(engine) as (host, port):
        page.look(width, height, theme)
        page.open(f"http://{host}:{port}")
        page.wait_for("document.querySelector('#model').textContent === 'tiny'")
        page.click("#chat")
        page.evaluate("document.querySelector('#settings').open = true")
        page.type("#max-tokens", "900")
        page.type("#tools", "{")
        page.type("#prompt", "What is the weather in Oslo?")
        page.click("#generate")
        page.wait_for("!document.querySelector('#error').hidden")
        assert "not JSON" in page.evaluate("document.querySelector('#error').textContent")
        assert not engine.submitted

        page.type("#tools", json.dumps(TOOLS))
        page.click("#generate")
        page.wait_for(f"{IDLE} && document.querySelector('.call textarea')")
        assert page.evaluate("document.querySelector('#error').hidden")
        content = "I look at the weather in Oslo, and then at its forecast."
        expected = {
            "thoughts": [THOUGHT],
            "content": [content],
            "names": ["get_weather"],
            "calls": [ARGUMENTS],
            "results": [],
            "opened": [],
            "fields": [""],
        }
        assert page.evaluate(PARTS) == expected
        assert "tool" in page.evaluate(STATUS)
        accepted = page.evaluate(
            "[...document.querySelectorAll('.content .accepted')].map((it) => it.textContent)"
        )
        assert len(content) / 2 < len("".join(accepted)) < len(content)
        page.screenshot(pictures / f"call-{name}.png")
        page.evaluate("document.querySelector('.thought summary').scrollIntoView()")
        page.click(".thought summary")
        page.screenshot(pictures / f"thought-{name}.png")
        assert page.evaluate(PARTS)["opened"] == [f"Thought{THOUGHT}"]
        low = {
            selector: contrast
            for selector, contrast in page.evaluate(PART_CONTRASTS).items()
            if contrast < 4.5
        }
        assert not low

        engine.text = "It is 5 degrees."
        page.evaluate("document.querySelector('.call textarea').scrollIntoView()")
        page.type(".call textarea", "5 <i>degrees</i>")
        page.click(".turn > button")
        page.wait_for(f"{IDLE} && document.querySelectorAll('.turn').length === 3")
        expected |= {
            "content": [content, "It is 5 degrees."],
            "results": ["5 <i>degrees</i>"],
            "opened": [f"Thought{THOUGHT}"],
            "fields": [],
        }
        assert page.evaluate(PARTS) == expected
        assert page.evaluate("document.querySelectorAll('.turn > button').length") == 0
        page.screenshot(pictures / f"result-{name}.png")
        prompt = engine.tokenizer.decode(engine.submitted[-1].prompt)
        assert "<tool_response>\n5 <i>degrees</i>\n</tool_response>" in prompt
        assert ARGUMENTS in prompt and prompt.count("<|im_start|>user") == 2
        for narrow in (width, min(width, 320)):
            page.look(narrow, height, theme)
            assert page.evaluate("document.documentElement.scrollWidth") <= narrow
        assert not page.troubles()


def test_a_call_that_is_stopped_leaves_nothing_to_answer(page):
    engine = calling_engine()
    with made_up_serving(engine) as (host, port):
        page.look(1280, 800)
        page.open(f"http://{host}:{port}")
        page.click("#chat")
        page.type("#max-tokens", str(CALLING.index("I look") + 30))
        page.type("#tools", json.dumps([TOOLS]))
        page.type("#prompt", "What is the weather in Oslo?")
        page.click("#generate")
        page.wait_for(f"{IDLE} && {STATUS}.includes('max tokens')")
        parts = page.evaluate(PARTS)
        assert parts["thoughts"] == [THOUGHT] and parts["content"] and not parts["names"]
        engine.text = "Yes."
        page.type("#prompt", "Go on.")
        page.click("#generate")
        page.wait_for(f"{IDLE} && document.querySelectorAll('.turn').length === 4")
        assert page.evaluate(PARTS)["content"][1:] == ["Yes."]
        assert not page.troubles()
