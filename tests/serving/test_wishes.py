"""Tests of what a request may ask for beside its text.

These are log-probabilities, an echo, spans, a prediction and a minimal length. One engine serves
all tests. It has paused drafts, trees and copies, and too few pages for all rows.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax.drafts.shapes import StaticTree
from specjax.errors import InputError
from specjax.serving.engine import Engine
from specjax.serving.handle import EngineError, Handle
from tests.conftest import compilations, tiny_target
from tests.test_text import of_bytes_and_spaces

PATIENCE, VOCABULARY, TOP = 60.0, 11, 5
PROMPT = [1, 4, 2, 4, 2, 7, 3]
SIZES = {"page": 8, "chunk": 16, "capacity": 64}
TREE = StaticTree(((0,), (1,), (0, 0), (0, 1)))


@pytest.fixture(scope="module")
def engine(target) -> Iterator[Engine]:
    drafter = specjax.Eagle3.init(target, jax.random.key(5))
    options = {"drafts": (None, TREE), "rows": 3, "widths": (3,), "pages": 12, **SIZES}
    with Engine(
        target,
        drafter,
        max_logprobs=TOP,
        max_prediction=4,
        tokenizer=of_bytes_and_spaces("t5"),
        **options,
    ) as engine:
        yield engine


def directly(target, tokens: list[int]) -> np.ndarray:
    """Return the target's log-probabilities ``[T, V]`` after each of ``tokens``, from one pass."""
    output, _ = target.forward(jnp.array([tokens]))
    return np.asarray(jax.nn.log_softmax(output.logits[0].astype(jnp.float32)))


def check_logprobs(reported: list, of: np.ndarray, tokens: list[int], top: int) -> None:
    assert len(reported) == len(tokens) == len(of)
    for entry, right, token in zip(reported, of, tokens, strict=True):
        assert entry.token == token
        assert abs(entry.logprob - right[token]) < 1e-4
        assert len(entry.top) == top
        logprobs = [logprob for _, logprob in entry.top]
        assert logprobs == sorted(logprobs, reverse=True)
        for token_id, logprob in entry.top:
            assert abs(logprob - right[token_id]) < 1e-4
        assert np.allclose(logprobs, np.sort(right)[::-1][:top], atol=1e-4)


def pieces_of(handle: Handle) -> tuple[list[int], list[bool], list]:
    handle.result(PATIENCE)
    pieces = list(handle)
    return (
        [token for piece in pieces for token in piece.tokens],
        [accepted for piece in pieces for accepted in piece.accepted],
        [entry for piece in pieces for entry in piece.logprobs],
    )


@pytest.mark.full
@pytest.mark.parametrize(("temperature", "top"), [(0.0, 3), (0.8, 0), (1.0, TOP)])
def test_logprobs_are_the_targets_own(engine, target, temperature, top) -> None:
    handle = engine.submit(
        PROMPT,
        max_new_tokens=20,
        temperature=temperature,
        top_k=3,
        seed=1,
        eos_token_ids=(),
        logprobs=top,
    )
    alone = engine.submit(
        PROMPT, max_new_tokens=20, temperature=temperature, top_k=3, seed=1, eos_token_ids=()
    )
    tokens, accepted, reported = pieces_of(handle)
    assert tuple(tokens) == alone.result(PATIENCE).tokens
    of = directly(target, [*PROMPT, *tokens])[len(PROMPT) - 1 : -1]
    check_logprobs(reported, of, tokens, top)
    assert sum(accepted) == handle.acceptance.accepted


@pytest.mark.full
def test_many_with_and_without_logprobs_side_by_side_and_nothing_is_compiled(
    engine, target
) -> None:
    """Check more requests than fit the pages.

    Some of them are preempted, and still report each token once.
    """
    wishes = [
        {"logprobs": 2},
        {},
        {"logprobs": 0, "echo": True},
        {"spans": True},
        {"prediction": [4, 2, 7, 1, 5, 5]},
        {},
    ]

    def results(number: int, length: int) -> list[Handle]:
        """Submit ``number`` requests at once, and return their handles when all have ended."""
        handles = [
            engine.submit(
                PROMPT * (1 + i % 4),
                max_new_tokens=length,
                temperature=0.7 * (i % 2),
                seed=i,
                eos_token_ids=(),
                **wishes[i % 6],
            )
            for i in range(number)
        ]
        for handle in handles:
            handle.result(PATIENCE)
        return handles

    # Compile the small programs of every kind of request again: they may have been freed.
    results(12, 2)
    before = compilations()
    handles = results(24, 30)
    assert compilations() == before
    assert engine.statistics.preemptions > 0
    for number, handle in enumerate(handles):
        tokens, accepted, reported = pieces_of(handle)
        assert len(tokens) == len(accepted) == 30
        prompt = PROMPT * (1 + number % 4)
        of = directly(target, [*prompt, *tokens])
        wish = wishes[number % 6]
        if "logprobs" in wish:
            check_logprobs(reported, of[len(prompt) - 1 : -1], tokens, wish["logprobs"])
        else:
            assert not reported
        if wish.get("echo"):
            check_logprobs(handle.prompt_logprobs, of[: len(prompt) - 1], prompt[1:], 0)


@pytest.mark.full
def test_an_echo_reads_the_prompt_and_no_more(engine, target) -> None:
    prompt = (PROMPT * 8)[:34]
    first = engine.submit(prompt, max_new_tokens=1, eos_token_ids=())  # its pages could be shared
    first.result(PATIENCE)
    handle = engine.submit(prompt, max_new_tokens=0, logprobs=2, echo=True)
    generation = handle.result(PATIENCE)
    assert (generation.text, generation.tokens) == ("", ())
    assert (handle.finish_reason, handle.cached_tokens) == ("length", 0)
    check_logprobs(handle.prompt_logprobs, directly(target, prompt)[:-1], prompt[1:], 2)
    again = engine.submit(prompt, max_new_tokens=1, eos_token_ids=())
    assert again.result(PATIENCE).tokens == first.tokens
    assert again.cached_tokens == 32  # shared with the earlier requests
    single = engine.submit([5], max_new_tokens=0, logprobs=0, echo=True)
    single.result(PATIENCE)
    assert single.prompt_logprobs == []


@pytest.mark.full
def test_spans_are_the_text_in_parts(engine) -> None:
    handle = engine.submit(
        "abc", max_new_tokens=24, temperature=0.5, seed=4, eos_token_ids=(), spans=True
    )
    generation = handle.result(PATIENCE)
    pieces = list(handle)
    assert all("".join(text for text, _ in piece.spans) == piece.text for piece in pieces)
    assert "".join(piece.text for piece in pieces) == generation.text
    assert {accepted for piece in pieces for _, accepted in piece.spans} <= {True, False}


@pytest.mark.full
def test_a_right_prediction_saves_steps_and_changes_nothing(engine) -> None:
    request = {"max_new_tokens": 40, "temperature": 0.6, "seed": 9, "eos_token_ids": ()}
    alone = engine.submit(PROMPT, **request).result(PATIENCE)
    for _ in range(3):  # until the choice has measured copies
        handle = engine.submit(PROMPT, prediction=list(alone.tokens), **request)
        assert handle.result(PATIENCE).tokens == alone.tokens
    assert handle.prediction_length == 40 and handle.predicted_tokens == 40
    changed = [*alone.tokens[:15], 0 if alone.tokens[15] else 1, *alone.tokens[16:]]
    handle = engine.submit(PROMPT, prediction=changed, **request)
    assert handle.result(PATIENCE).tokens == alone.tokens
    assert 25 <= handle.predicted_tokens < 40
    nothing = engine.submit(PROMPT, prediction=[], **request)
    assert nothing.result(PATIENCE).tokens == alone.tokens and nothing.predicted_tokens == 0


@pytest.mark.full
def test_no_text_ends_too_early(engine, target) -> None:
    request = {"max_new_tokens": 30, "temperature": 1.0, "seed": 3}
    free = engine.submit(PROMPT, eos_token_ids=(), **request).result(PATIENCE)
    end = free.tokens[4]
    short = engine.submit(PROMPT, eos_token_ids=(end,), **request)
    assert len(short.result(PATIENCE).tokens) <= 5 and short.finish_reason == "stop"
    handle = engine.submit(PROMPT, eos_token_ids=(end,), min_new_tokens=20, **request)
    long = handle.result(PATIENCE)
    assert len(long.tokens) >= 20 and end not in long.tokens[:20]
    same = specjax.generate(
        target,
        None,
        [PROMPT],
        max_new_tokens=30,
        min_new_tokens=20,
        eos_token_ids=(end,),
        sampling=specjax.Sampling(),
        key=jax.random.fold_in(specjax.sampling.make_key(3), 0)[None],
        rule="coupled",
    )
    assert long.tokens == tuple(same.tokens[0, len(PROMPT) : same.lengths[0]].tolist())


@pytest.mark.full
def test_stop_strings_are_looked_for_behind_the_least_length(engine) -> None:
    request = {"max_new_tokens": 30, "temperature": 1.0, "seed": 5, "eos_token_ids": ()}
    text = engine.submit(PROMPT, **request).result(PATIENCE)
    stop = [character for character in dict.fromkeys(text.text) if character.strip()][:1]
    early = engine.submit(PROMPT, stop=stop, **request)
    assert len(early.result(PATIENCE).tokens) < 30 and early.finish_reason == "stop"
    late = engine.submit(PROMPT, stop=stop, min_new_tokens=15, **request)
    assert len(late.result(PATIENCE).tokens) > 15
    assert late.result().text.startswith(early.result().text + stop[0])


@pytest.mark.full
def test_totals_are_those_of_all_texts(engine) -> None:
    # After this request nothing more is counted for texts that were stopped earlier.
    engine.submit(PROMPT, max_new_tokens=1).result(PATIENCE)
    before = engine.statistics
    handles = [
        engine.submit(PROMPT, max_new_tokens=20, seed=i, temperature=0.5, eos_token_ids=())
        for i in range(4)
    ]
    of_texts = [handle.result(PATIENCE).statistics for handle in handles]
    after = engine.statistics
    assert after.generated - before.generated == 80
    assert after.drafted - before.drafted == sum(text.drafted for text in of_texts)
    accepted = after.accepted - before.accepted
    assert accepted == sum(text.accepted for text in of_texts)
    assert accepted == sum(after.accepted_at) - sum(before.accepted_at)
    assert after.draft in {"none", str(TREE), "copies of 4"}


REFUSED = {
    "logprobs=6": {"logprobs": 6},
    "logprobs=-1": {"logprobs": -1},
    "give logprobs, too": {"echo": True},
    "max_new_tokens=0": {"max_new_tokens": 0},
    "min_new_tokens=9": {"max_new_tokens": 8, "min_new_tokens": 9},
    "id 11 is outside": {"prediction": [11]},
}


@pytest.mark.full
@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_is_refused(engine, message) -> None:
    with pytest.raises(InputError, match=message):
        engine.submit(PROMPT, **REFUSED[message])


@pytest.mark.full
def test_an_engine_that_was_not_made_for_it_says_so() -> None:
    with Engine(tiny_target(), rows=1, pages=8, **SIZES) as plain:
        with pytest.raises(InputError, match="max_logprobs=20"):
            plain.submit(PROMPT, logprobs=0)
        with pytest.raises(InputError, match="max_prediction=16"):
            plain.submit(PROMPT, prediction=[1])
        with pytest.raises(InputError, match="tokenizer"):
            plain.submit(PROMPT, spans=True)
    for wrong in ({"max_logprobs": 12}, {"max_logprobs": -1}, {"max_prediction": 64}):
        with pytest.raises(InputError, match="max_"):
            Engine(tiny_target(), rows=1, pages=8, **SIZES, **wrong)


@pytest.mark.full
@pytest.mark.parametrize("most", [0, 4])
def test_a_prompt_whose_logprobs_cannot_be_handed_out_ends_alone(engine, monkeypatch, most) -> None:
    request = {"max_new_tokens": most, "logprobs": 2, "echo": True, "eos_token_ids": ()}
    with engine._loop.wake:
        first, second = (engine.submit(PROMPT, **request) for _ in range(2))

        def fail(*_) -> None:
            raise ValueError("no such token")

        monkeypatch.setattr(first, "prompt_read", fail)
    with pytest.raises(EngineError, match="this text failed") as caught:
        first.result(PATIENCE)
    assert str(caught.value.__cause__) == "no such token"
    assert len(second.result(PATIENCE).tokens) == most
    assert len(second.prompt_logprobs) == len(PROMPT) - 1
    assert engine.state == "running"


def test_who_asks_for_a_prompt_alone_is_answered_while_more_of_them_come(
    engine, monkeypatch
) -> None:
    """Check it while each prefill brings another request, until the first one is answered."""
    request = {"max_new_tokens": 0, "logprobs": 2, "echo": True}
    read, handles = engine._loop._read, []

    def read_and_ask_again(*arguments, **options):
        if handles[0].finish_reason is None and len(handles) < 40:
            handles.append(engine.submit(PROMPT, **request))
        return read(*arguments, **options)

    monkeypatch.setattr(engine._loop, "_read", read_and_ask_again)
    with engine._loop.wake:
        handles.append(engine.submit(PROMPT, **request))
    for handle in handles:
        handle.result(PATIENCE)
    assert len(handles) < 10
    assert {len(handle.prompt_logprobs) for handle in handles} == {len(PROMPT) - 1}
    assert all(
        list(handle.prompt_logprobs) == list(handles[0].prompt_logprobs) for handle in handles
    )
