"""A client that has no server: the drafter writes alone, and comes to an end."""

import pytest

import specjax
from specjax.client import Client, ProvisionalEvent, connect
from tests.conftest import tiny_target


@pytest.fixture(scope="module")
def looking_up() -> Client:
    return connect("ws://127.0.0.1:9", specjax.PromptLookup(draft=2), tiny_target(), capacity=32)


def test_a_drafter_that_has_nothing_to_offer_ends_the_text(looking_up) -> None:
    """Or it would be asked for ever."""
    assert not list(looking_up.stream([5, 3, 1], max_new_tokens=4, is_offline=True))
    assert looking_up.report.finish_reason == "offline"


def test_it_writes_as_far_as_it_is_asked_to(looking_up) -> None:
    prompt = [5, 3, 1, 5, 3, 1, 5]
    events = list(looking_up.stream(prompt, max_new_tokens=3, is_offline=True, eos_token_ids=()))
    assert events == [ProvisionalEvent((token,), "") for token in (3, 1, 5)]
    assert looking_up.report.provisional_tokens == (3, 1, 5)
    assert looking_up.report.tokens == ()
