"""Drafts from the earlier answers of a tenant: from its own alone, and never another text."""

from collections.abc import Iterator
from threading import Event
from typing import Any

import numpy as np
import pytest
from flax import struct

from specjax.drafters import (
    Drafter,
    NoDraft,
    PromptLookup,
    Suffix,
    Together,
    TokenRecycling,
    WithPrediction,
)
from specjax.drafters.suffix_index import NO_TOKEN, SuffixIndex
from specjax.drafts.shapes import Chain, DynamicTree
from specjax.errors import InputError
from specjax.serving import Engine
from specjax.serving.earlier_answers import (
    NO_SEGMENT,
    EarlierAnswers,
    TenantSegments,
    check_answers,
    check_capacity,
    with_index,
)
from specjax.serving.pages import Tenant
from tests.conftest import compilations
from tests.decoding.test_constrained import GRAMMARS, compiler, models
from tests.grammars.tokenizers_for_tests import small_tokenizer

A, B, C = Tenant("a"), Tenant("b"), Tenant("a", "salt")
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
CAPACITY = 1024
SUFFIX = Suffix(draft=Chain(4))


@pytest.fixture
def answers() -> Iterator[EarlierAnswers]:
    made_up = EarlierAnswers(capacity=20)
    yield made_up
    made_up.close()


def texts_of(answers: EarlierAnswers, tenant: Tenant) -> list[list[int]]:
    """Return the sorted answers of a tenant."""
    answers.wait()
    if (newest := answers.newest(tenant)) is None:
        return []
    tokens = newest[1].tokens.tolist()
    texts: list[list[int]] = [[]]
    for token in tokens:
        if token == NO_TOKEN:
            texts.append([])
        else:
            texts[-1].append(token)
    return [text for text in texts if text]


def test_the_oldest_answers_of_a_tenant_go_for_its_own_new_ones(answers) -> None:
    answers.add(B, [7] * 10)
    for number in range(5):
        answers.add(A, [number] * 6)
    assert texts_of(answers, A) == [[3] * 6, [4] * 6]
    assert texts_of(answers, B) == [[7] * 10]
    answers.add(A, range(100))  # of a long one the end
    assert texts_of(answers, A) == [list(range(81, 100))]
    assert texts_of(answers, C) == []


def test_an_answer_that_nothing_can_be_copied_from_is_not_kept(answers) -> None:
    answers.add(A, [1, 2])
    assert texts_of(answers, A) == []


def test_a_new_tenant_takes_no_place_of_one_that_is_in_use() -> None:
    now = 0.0
    answers = EarlierAnswers(20, most_tenants=2, idle_seconds=60, clock=lambda: now)
    for tenant in (A, B, C):
        answers.add(tenant, [1, 2, 3])
    assert [len(texts_of(answers, tenant)) for tenant in (A, B, C)] == [1, 1, 0]
    now = 50.0
    answers.add(A, [4, 5, 6])
    now = 70.0
    answers.add(C, [1, 2, 3])  # in place of B, which was idle for longer than 60 seconds
    assert [len(texts_of(answers, tenant)) for tenant in (A, B, C)] == [2, 0, 1]
    answers.close()


def test_many_salts_of_one_name_take_no_place_of_others() -> None:
    answers = EarlierAnswers(20, most_tenants=4, most_salts=3)
    for salt in range(9):
        answers.add(Tenant("a", str(salt)), [1, 2, 3])
    answers.add(B, [1, 2, 3])
    present = [salt for salt in range(9) if texts_of(answers, Tenant("a", str(salt)))]
    assert (present, len(texts_of(answers, B))) == ([6, 7, 8], 1)
    answers.close()


def test_a_tenant_that_comes_back_has_another_version() -> None:
    answers, segments = EarlierAnswers(20, most_salts=1), TenantSegments(2)
    versions = []
    for tenant in (A, C, A):  # C has the name of A
        answers.add(tenant, [1, 2, 3])
        answers.wait()
        newest = answers.newest(tenant)
        assert newest is not None
        versions.append(newest[0])
        assert segments.place(tenant, newest[0], in_use=[])[1]
    assert len(set(versions)) == 3
    answers.close()


def test_answers_are_sorted_as_if_all_of_them_came_at_once() -> None:
    """Add answers one by one and several at a time, of which two remove all the others."""
    rng = np.random.default_rng(0)
    answers, texts = EarlierAnswers(capacity=2048), []
    for number in range(90):
        length = 3000 if number in (0, 40) else 1500 if number == 80 else rng.integers(3, 40)
        texts.append(rng.integers(0, 3, length).tolist())
        answers.add(A, texts[-1])
        if rng.random() < 0.5:
            continue
        answers.wait()
        newest = answers.newest(A)
        assert newest is not None
        texts[-1] = texts[-1][-2047:]
        while sum(len(text) + 1 for text in texts) > 2048:
            texts.pop(0)
        for name, expected in vars(SuffixIndex.on_host(texts)).items():
            np.testing.assert_array_equal(getattr(newest[1], name), expected, name)
    answers.close()


def test_answers_that_come_while_others_are_inserted_are_inserted_next(monkeypatch) -> None:
    """Add an answer during an insertion, which removes one stored answer, and remains to insert."""
    has_begun, may_go_on, with_texts = Event(), Event(), SuffixIndex.with_texts

    def waiting(index: SuffixIndex, *arguments: Any) -> SuffixIndex:
        has_begun.set()
        assert may_go_on.wait(60)
        return with_texts(index, *arguments)

    monkeypatch.setattr(SuffixIndex, "with_texts", waiting)
    answers = EarlierAnswers(capacity=20)  # two answers of six tokens and their ends
    answers.add(A, [0] * 6)
    answers.wait()
    answers.add(A, [1] * 6)
    assert has_begun.wait(60)
    answers.add(A, [2] * 6)
    may_go_on.set()
    answers.wait()
    newest = answers.newest(A)
    assert newest is not None
    for name, expected in vars(SuffixIndex.on_host([[1] * 6, [2] * 6])).items():
        np.testing.assert_array_equal(getattr(newest[1], name), expected, name)
    answers.close()


def test_answers_that_cannot_be_sorted_are_dropped(answers, monkeypatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError

    answers.add(B, [1, 2, 3])
    answers.wait()
    with monkeypatch.context() as patch:
        patch.setattr(SuffixIndex, "on_host", fails)
        answers.add(A, [1, 2, 3])
        assert texts_of(answers, A) == []
        patch.setattr(SuffixIndex, "with_texts", fails)
        answers.add(B, [1, 2, 3])
        assert texts_of(answers, B) == []
    answers.add(B, [1, 2, 3])
    answers.add(A, [4, 5, 6])
    assert (texts_of(answers, A), len(texts_of(answers, B))) == ([[4, 5, 6]], 1)


def test_tenants_of_other_rows_keep_their_segments() -> None:
    segments = TenantSegments(2)
    assert segments.place(A, 1, in_use=[]) == (0, True)
    assert segments.place(B, 1, in_use=[A]) == (1, True)
    assert segments.place(C, 1, in_use=[A, B]) == (NO_SEGMENT, False)
    assert segments.place(C, 1, in_use=[B]) == (0, True)
    assert segments.place(C, 1, in_use=[B]) == (0, False)
    assert segments.place(A, 1, in_use=[C]) == (1, True)


# --- in an engine ---------------------------------------------------------------------------------


def engine(target, drafter: Any = SUFFIX, **options: Any) -> Engine:
    """Return an engine that always drafts, so that the accepted tokens do not depend on time."""
    sizes: dict[str, Any] = {"rows": 2, "widths": (2,), "capacity": 64, "page": 8, "chunk": 8}
    options = sizes | {"steps": 4, "drafts": [drafter.draft_shape]} | options
    return Engine(target, drafter, earlier_answers=CAPACITY, **options)


def drafted(served: Engine, seed: int = 1, **options: Any) -> list[tuple[int, bool]]:
    """Return each token of a text, and whether it was drafted and accepted.

    The next text can draft from this one.
    """
    handle = served.submit(
        PROMPT, max_new_tokens=24, eos_token_ids=(), seed=seed, temperature=1.0, **options
    )
    pieces = list(handle)
    assert served._loop.answers is not None
    served._loop.answers.wait()
    return [pair for piece in pieces for pair in zip(piece.tokens, piece.accepted, strict=True)]


def accepted(pairs: list[tuple[int, bool]]) -> int:
    return sum(was_drafted for _, was_drafted in pairs)


@pytest.fixture(scope="module")
def plain(target) -> list[int]:
    with Engine(target, rows=2, capacity=64, page=8, chunk=8) as served:
        handle = served.submit(PROMPT, max_new_tokens=24, eos_token_ids=(), seed=1, temperature=1.0)
        return list(handle.result().tokens)


@pytest.mark.parametrize(
    ("drafter", "least"),
    [
        pytest.param(
            SUFFIX, 15, marks=pytest.mark.represents("drafts from earlier answers"), id="suffix"
        ),
        pytest.param(
            Together((PromptLookup(draft=Chain(2)), Suffix(draft=DynamicTree(2, 4, 6)))),
            15,
            marks=pytest.mark.full,
            id="together",
        ),
        # Of eleven tokens, each has several followers.
        pytest.param(TokenRecycling(draft=Chain(4)), 14, marks=pytest.mark.full, id="recycling"),
        pytest.param(
            Together((PromptLookup(draft=Chain(2)), TokenRecycling(draft=Chain(4)))),
            14,
            marks=[pytest.mark.full, pytest.mark.thorough],
            id="together with recycling",
        ),
    ],
)
def test_a_text_drafts_from_earlier_answers_of_its_own_tenant_alone(
    target, plain, drafter, least
) -> None:
    with engine(target, drafter) as served:
        first = drafted(served, tenant="a")
        compiled = compilations()
        second = drafted(served, tenant="a")
        assert accepted(second) >= least > accepted(first)
        for name, salt in (("b", ""), ("a", "b"), ("", "")):
            foreign = drafted(served, tenant=name, cache_salt=salt)
            assert foreign == first  # bit for bit
        assert drafted(served, tenant="a") == second
        assert compilations() == compiled
    assert [token for token, _ in first] == [token for token, _ in second] == plain


@struct.dataclass
class OwnDrafter(Drafter[tuple[()]]):
    """A drafter that the engine does not know, with a field for earlier answers."""

    draft: Chain = struct.field(pytree_node=False, default=Chain(2))
    answers: SuffixIndex | None = None


def test_any_drafter_with_a_field_for_answers_has_the_index() -> None:
    index = SuffixIndex.empty(segments=2, capacity=8)
    union = Together((PromptLookup(), OwnDrafter()))
    check_answers(1024, union)
    lookup, own_drafter = with_index(union, index).parts
    assert own_drafter.answers is index
    assert lookup == PromptLookup()
    copying = with_index(WithPrediction(OwnDrafter(), longest=2), index)
    assert copying.drafter.answers is index


def test_a_text_that_is_not_stored_neither_drafts_from_others_nor_is_drafted_from(
    target, plain
) -> None:
    with engine(target) as served:
        first = drafted(served, tenant="a", store=False)
        assert drafted(served, tenant="a") == first
        assert drafted(served, tenant="a", store=False) == first
        assert accepted(drafted(served, tenant="a")) > accepted(first)
    assert [token for token, _ in first] == plain


@pytest.mark.full
def test_a_running_text_keeps_its_segment_while_other_tenants_come(target, monkeypatch) -> None:
    """Check its drafts beside texts of two tenants, which take turns in the second row."""
    options: dict[str, Any] = {"max_new_tokens": 160, "eos_token_ids": (), "seed": 1}

    def flags(served: Engine, beside: int) -> list[bool]:
        """Return which tokens of a text of tenant a were drafted and accepted."""
        handle = served.submit(PROMPT, tenant="a", temperature=1.0, **options)
        # All are submitted at once, so that the engine does not wait for this thread between them.
        short: dict[str, Any] = options | {"max_new_tokens": 2}
        short_texts = [
            served.submit(PROMPT, tenant="bc"[number % 2], **short | {"seed": number})
            for number in range(beside)
        ]
        for short_text in short_texts:
            short_text.result(60)
        assert handle.finish_reason is None or not beside
        pieces = list(handle)
        return [was_drafted for piece in pieces for was_drafted in piece.accepted]

    with engine(target, capacity=256, pages=64, steps=1) as served:
        answers = served._loop.answers
        assert answers is not None
        flags(served, beside=0)
        for name in "bc":
            answers.add(Tenant(name), [*range(11)] * 20)
        answers.wait()
        version = answers.newest(Tenant("a"))
        # From now on no answer is added, so that none of its own changes the drafts.
        monkeypatch.setattr(answers, "add", lambda *_: None)
        alone = flags(served, beside=0)
        assert sum(alone) > 100
        assert flags(served, beside=4) == alone
        assert answers.newest(Tenant("a")) == version


@pytest.mark.thorough
def test_many_tenants_take_turns_in_few_rows(target) -> None:
    """Check that the drafts of each are as if it were alone, and texts that are preempted."""
    tenants = [str(number) for number in range(5)]
    with engine(target) as served:
        alone = [drafted(served, seed, tenant="alone") for seed in (1, 2, 1, 2)]
    with engine(target, pages=6) as served:
        together: dict[str, list[Any]] = {tenant: [] for tenant in tenants}
        for seed in (1, 2, 1, 2):
            for tenant in tenants:
                together[tenant].append(drafted(served, seed, tenant=tenant))
        assert all(texts == alone for texts in together.values())
        # At once, with few pages: drafts differ in time, but no text does.
        handles = [
            served.submit(
                PROMPT,
                max_new_tokens=24,
                eos_token_ids=(),
                seed=seed,
                temperature=1.0,
                tenant=tenant,
            )
            for tenant in tenants
            for seed in (1, 2)
        ]
        texts = [list(handle.result(60).tokens) for handle in handles]
        assert served.statistics.preemptions > 0
    expected = [[token for token, _ in pairs] for pairs in alone[:2]]
    assert texts == expected * len(tenants)


def test_a_segment_of_another_tenant_would_be_noticed(target, monkeypatch) -> None:
    """Break it on purpose: all tenants share the first segment."""
    monkeypatch.setattr(EarlierAnswers, "newest", _newest_of_any(EarlierAnswers.newest))
    with engine(target) as served:
        first = drafted(served, tenant="a")
        assert drafted(served, tenant="b") != first


def _newest_of_any(newest: Any) -> Any:
    def of_any(self: EarlierAnswers, tenant: Tenant) -> Any:
        return newest(self, next(iter(self._tenants), tenant))

    return of_any


@pytest.mark.parametrize(
    ("drafter", "capacity", "message"),
    [
        (SUFFIX, 1023, "earlier_answers=1023: give from 1,024 to"),
        (SUFFIX, -1, "earlier_answers=-1: give from"),
        (PromptLookup(), 1024, "earlier_answers=1024: the drafter does not use them"),
        (NoDraft(), 1024, "earlier_answers=1024: the drafter does not use them"),
        (SUFFIX, 1024.5, "earlier_answers=1024.5: give from"),
    ],
)
def test_what_an_engine_cannot_keep_is_refused(target, drafter, capacity, message) -> None:
    with pytest.raises(InputError, match=message):
        Engine(target, drafter, earlier_answers=capacity, capacity=64)


def test_places_of_an_index_are_32_bit_numbers() -> None:
    check_capacity(2**22, rows=511)
    with pytest.raises(InputError, match="earlier_answers=4194304: too many for rows=512"):
        check_capacity(2**22, rows=512)


@pytest.mark.full
@pytest.mark.thorough
def test_predictions_grammars_and_penalties_beside_earlier_answers() -> None:
    """Check drafters that wrap the suffix drafter: their texts are those of plain decoding."""
    options: dict[str, Any] = {"max_prediction": 4, "penalties": True, "max_logprobs": 1}
    options |= {"grammars": True, "tokenizer": small_tokenizer()}
    stated = [
        {},
        {"grammar": GRAMMARS["schema"]},
        {"grammar": GRAMMARS["regex"], "prediction": [0, 1, 3, 4]},
        {"prediction": [5, 9, 2]},
        {"presence_penalty": 0.7},
        {"logprobs": 1},
    ]
    texts = []
    for drafter, earlier in ((None, 0), (SUFFIX, CAPACITY)):
        with Engine(
            models()[0],
            drafter,
            rows=2,
            capacity=64,
            page=8,
            chunk=8,
            earlier_answers=earlier,
            **options,
        ) as served:
            texts.append(
                [
                    list(
                        served.submit(PROMPT, max_new_tokens=16, eos_token_ids=(), seed=3, **more)
                        .result(60)
                        .tokens
                    )
                    for more in stated * 2
                ]
            )
    assert texts[0] == texts[1]
    for text, more in zip(texts[0], stated * 2, strict=True):
        if "grammar" in more:
            matcher = compiler().compile(more["grammar"]).matcher(())
            assert matcher.count_legal(text) == len(text) > 2
