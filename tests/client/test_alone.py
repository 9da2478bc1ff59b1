"""Tests of a client without a server: the drafter writes alone, and ends."""

from typing import Any

import pytest

import specjax
from specjax import text
from specjax.assets import embedded
from specjax.client import Client, ProvisionalEvent, connect
from specjax.errors import InputError
from tests.conftest import tiny_target


@pytest.fixture(scope="module")
def looking_up() -> Client:
    return connect("ws://127.0.0.1:9", specjax.PromptLookup(draft=2), tiny_target(), capacity=32)


def test_a_drafter_that_has_nothing_to_offer_ends_the_text(looking_up) -> None:
    """Check that a drafter without proposals is not called for ever."""
    assert not list(looking_up.stream([5, 3, 1], max_new_tokens=4, is_offline=True))
    assert looking_up.report.finish_reason == "offline"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0: it must be at least 1"),
        ({"min_new_tokens": 3}, "min_new_tokens=3: the client protocol does not support it"),
        ({"stops": "x"}, r"stops='x': stream has no argument of that name; did you mean stop\?"),
    ],
)
def test_what_no_text_can_be_asked_with_is_refused_at_once(
    looking_up, values, message, tmp_path
) -> None:
    with pytest.raises(InputError, match=message):
        looking_up.stream([5, 3, 1], is_offline=True, journal=tmp_path / "text.json", **values)
    assert not list(tmp_path.iterdir())


def test_it_writes_as_far_as_it_is_asked_to(looking_up) -> None:
    prompt = [5, 3, 1, 5, 3, 1, 5]
    events = list(looking_up.stream(prompt, max_new_tokens=3, is_offline=True, eos_token_ids=()))
    assert events == [ProvisionalEvent((token,), "") for token in (3, 1, 5)]
    assert looking_up.report.provisional_tokens == (3, 1, 5)
    assert looking_up.report.tokens == ()


@pytest.mark.full
def test_a_client_drafts_from_text_files(tmp_path) -> None:
    """Without a server the drafter writes what follows the prompt in the file."""
    tokenizer = text.load_tokenizer(embedded("target"))
    target = tiny_target(vocab_size=len(tokenizer))
    (tmp_path / "notes.txt").write_text("import os\nimport sys\nimport json, random\n")
    prompt, rest = "import os\nimport sys\n", "import json, random\n"
    options: dict[str, Any] = {"tokenizer": tokenizer, "capacity": 64}
    files = [tmp_path / "notes.txt"]
    with_files = connect("ws://127.0.0.1:9", "suffix", target, corpus=files, **options)
    count = len(tokenizer.encode(rest))
    report = with_files.generate(prompt, max_new_tokens=count, is_offline=True)
    assert report.provisional == rest
    without = connect("ws://127.0.0.1:9", "suffix", target, **options)
    assert without.generate(prompt, max_new_tokens=count, is_offline=True).provisional != rest
    with pytest.raises(InputError, match=r"corpus=.*: it applies to drafters by name"):
        connect("ws://127.0.0.1:9", specjax.PromptLookup(), target, corpus=files, **options)
