"""Tests of each rule of the scheduler, and of all rules together under random schedules."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from specjax.errors import InputError
from specjax.serving.ended_texts import EndedText, EndedTexts
from specjax.serving.pages import NO_TENANT, PagePool, Tenant, chunk_key
from specjax.serving.scheduler import PrefillChunk, QueueFullError, Request, Scheduler

PAGE, CHUNK = 2, 4


def make_scheduler(**changes: Any) -> Scheduler:
    sizes: dict[str, Any] = {"rows": 2, "pages": 16, "page": PAGE, "chunk": CHUNK, "capacity": 32}
    return Scheduler(**(sizes | changes))


def read_all(scheduler: Scheduler, budget: int | None = None) -> list[PrefillChunk]:
    """Prefill everything that can be prefilled now, and return the chunks.

    The prefix state of a chunk is the text up to its end.
    """
    done = []
    while reads := scheduler.next_reads(budget):
        for read in reads:
            scheduler.was_read(
                read, prefix_state=tuple(read.request.tokens[: read.start + read.count])
            )
        done += reads
    return done


def pages_of(scheduler: Scheduler, row: int) -> list[int]:
    return [page for page in scheduler.table[row].tolist() if page < scheduler._pools[0].total]


def request_in(scheduler: Scheduler, row: int) -> Request:
    request = scheduler.request_of(row)
    assert request is not None
    return request


def finish(scheduler: Scheduler, request: Request) -> None:
    assert request.row is not None
    scheduler.decoded(request.row, [0], done=True)


# --- who has a row --------------------------------------------------------------------------------


def test_rows_are_given_in_the_order_of_submission() -> None:
    scheduler = make_scheduler()
    first, second, third, fourth = (
        scheduler.submit([token, token], max_new_tokens=2) for token in range(4)
    )
    read_all(scheduler)
    assert [first.row, second.row, third.row, fourth.row] == [0, 1, None, None]
    assert (scheduler.waiting, scheduler.running, scheduler.occupied) == (2, [0, 1], 2)
    finish(scheduler, second)
    read_all(scheduler)
    assert (third.row, fourth.row, scheduler.request_of(1)) == (1, None, third)
    finish(scheduler, first)
    read_all(scheduler)
    assert (fourth.row, scheduler.waiting) == (0, 0)


def test_nobody_passes_the_head_of_the_line() -> None:
    scheduler = make_scheduler(rows=3, pages=5)
    running = scheduler.submit([1] * 6, max_new_tokens=2)
    read_all(scheduler)
    assert len(pages_of(scheduler, 0)) == 3
    # `long` needs three pages: two for its first chunk, and one for the rest. The running text
    # needs one more. Only two are free.
    long = scheduler.submit([2] * 5, max_new_tokens=2)
    short = scheduler.submit([3], max_new_tokens=1)
    assert read_all(scheduler) == []
    assert (long.state, short.state, scheduler.waiting) == ("waiting", "waiting", 2)
    finish(scheduler, running)
    assert [read.request for read in read_all(scheduler)] == [long, short]


def test_prompts_of_one_length_are_read_one_after_another_the_oldest_first() -> None:
    scheduler = make_scheduler(rows=3)
    requests = [scheduler.submit([token] * 7, max_new_tokens=2) for token in range(3)]
    reads = read_all(scheduler)
    assert [read.request for read in reads] == [request for request in requests for _ in range(2)]
    assert [read.is_first for read in reads] == [True, False] * 3
    assert [read.is_last for read in reads] == [False, True] * 3


def test_the_prompt_with_the_fewest_pieces_left_comes_first() -> None:
    scheduler = make_scheduler(rows=3, pages=32)
    long = scheduler.submit([1] * 13, max_new_tokens=2)
    (read,) = scheduler.next_reads()
    scheduler.was_read(read, None)
    middle = scheduler.submit([2] * 9, max_new_tokens=2)
    short = scheduler.submit([3] * 2, max_new_tokens=2)
    reads = read_all(scheduler)
    # Then the long one has as few pieces left as the middle one, and is older.
    assert [(read.request, read.start) for read in reads] == [
        *((short, 0), (long, 4), (long, 8)),
        *((middle, 0), (middle, 4)),
    ]
    assert scheduler.running == [0, 1, 2]


def test_nobody_is_passed_more_often_than_is_said() -> None:
    """Check that a long prompt has a turn after each three of many short ones."""
    scheduler = make_scheduler(rows=2, pages=32)
    long, order = scheduler.submit([1] * 17, max_new_tokens=1), []
    scheduler.was_read(*scheduler.next_reads(), prefix_state=None)
    while long.state == "reading" and len(order) < 20:
        scheduler.submit([2, len(order) % 2], max_new_tokens=0)
        (read,) = scheduler.next_reads()
        scheduler.was_read(read, None)
        order.append(read.request is long)
    # At last it has as few pieces left as the short ones, and is older.
    assert order == [*[False, False, False, True] * 2, True]


def test_a_cached_prefix_counts_for_the_order_of_prefill() -> None:
    scheduler = make_scheduler(rows=2, pages=32)
    text = list(range(13))
    first = scheduler.submit(text, max_new_tokens=1)
    read_all(scheduler)
    finish(scheduler, first)
    middle = scheduler.submit([1] * 7, max_new_tokens=1)
    cached = scheduler.submit([*text, 7], max_new_tokens=1)
    order = [(read.request, read.start) for read in read_all(scheduler)]
    assert order == [(cached, 12), (middle, 0), (middle, 4)]


def test_a_prompt_that_waits_for_its_turn_moves_with_its_row() -> None:
    scheduler = make_scheduler(rows=3, pages=32)
    long = scheduler.submit([1] * 13, max_new_tokens=2)
    scheduler.was_read(*scheduler.next_reads(), prefix_state=None)
    short = scheduler.submit([2] * 2, max_new_tokens=2)
    scheduler.was_read(*scheduler.next_reads(), prefix_state=None)
    assert (long.state, short.state) == ("reading", "running")
    scheduler.swap([1, 0, 2])
    (read,) = scheduler.next_reads()
    assert (read.request, read.row, read.start, read.is_first) == (long, 1, 4, False)


def test_a_prompt_is_read_but_for_its_last_token() -> None:
    scheduler = make_scheduler(last_widths=(1, 2))
    spans = {}
    for length in (1, 2, 3, 4, 5, 6, 9, 12):
        request = scheduler.submit([length] * length, max_new_tokens=1)
        spans[length] = [(read.start, read.count, read.width) for read in read_all(scheduler)]
        assert request.state == "running"
        finish(scheduler, request)
    assert spans == {
        1: [(0, 0, 1)],
        2: [(0, 1, 1)],
        3: [(0, 2, 2)],
        4: [(0, 3, 4)],
        5: [(0, 4, 4)],
        6: [(0, 4, 4), (4, 1, 1)],
        9: [(0, 4, 4), (4, 4, 4)],
        12: [(0, 4, 4), (4, 4, 4), (8, 3, 4)],
    }


def test_the_budget_is_kept_and_the_oldest_prompt_is_not_passed() -> None:
    scheduler = make_scheduler(last_widths=(1,))
    wide = scheduler.submit([1] * 5, max_new_tokens=1)
    narrow = scheduler.submit([2] * 2, max_new_tokens=1)
    assert scheduler.next_reads(budget=3) == []
    (read,) = scheduler.next_reads(budget=4)
    assert (read.request, read.width) == (wide, 4)
    scheduler.was_read(read, None)
    (read,) = scheduler.next_reads(budget=1)
    assert (read.request, read.width) == (narrow, 1)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "max_new_tokens", "message"),
    [
        (0, 3, "prompt of 0 tokens"),
        (3, -1, "max_new_tokens=-1"),
        (30, 3, r"prompt \(30 tokens\) plus max_new_tokens=3 make 33 tokens.*room for 32"),
        (10, 8, "need 9 pages of 2 tokens, but there are 8"),
    ],
)
def test_what_can_never_be_served_is_refused(length, max_new_tokens, message) -> None:
    scheduler = make_scheduler(pages=8)
    with pytest.raises(InputError, match=message):
        scheduler.submit([1] * length, max_new_tokens)
    assert scheduler.idle


def test_the_largest_text_that_pages_hold_is_served() -> None:
    scheduler = make_scheduler(pages=8)
    request = scheduler.submit([1] * 10, max_new_tokens=7)  # the last token is never written
    read_all(scheduler)
    assert scheduler.reserve(100) == []
    assert (request.state, len(pages_of(scheduler, 0))) == ("running", 8)


def test_a_full_line_refuses() -> None:
    scheduler = make_scheduler(rows=1, max_waiting=1)
    # No row is given yet: both requests wait, and the free row counts for one of them.
    scheduler.submit([1], max_new_tokens=1)
    scheduler.submit([2], max_new_tokens=1)
    with pytest.raises(QueueFullError, match="max_waiting"):
        scheduler.submit([3], max_new_tokens=1)
    read_all(scheduler)
    with pytest.raises(QueueFullError, match="1 requests wait"):
        scheduler.submit([3], max_new_tokens=1)
    finish(scheduler, request_in(scheduler, 0))
    read_all(scheduler)
    scheduler.submit([3], max_new_tokens=1)
    assert scheduler.waiting == 1


def test_rows_that_are_not_given_out_yet_do_not_make_the_line_longer() -> None:
    scheduler = make_scheduler(rows=4, max_waiting=1)
    scheduler.limit_rows(1)
    scheduler.submit([1], max_new_tokens=1)
    scheduler.submit([2], max_new_tokens=1)
    with pytest.raises(QueueFullError, match="2 requests wait"):
        scheduler.submit([3], max_new_tokens=1)
    scheduler.limit_rows(4)
    scheduler.submit([3], max_new_tokens=1)


# --- pages ----------------------------------------------------------------------------------------


def test_unused_entries_of_the_table_are_out_of_range() -> None:
    scheduler = make_scheduler()
    assert scheduler.table.shape == (2, 16)
    assert (scheduler.table == 16).all()
    request = scheduler.submit([1] * 6, max_new_tokens=2)
    read_all(scheduler)
    assert (scheduler.table[0, :3] < 16).all()
    assert (scheduler.table[0, 3:] == 16).all()
    assert (scheduler.table[1] == 16).all()
    finish(scheduler, request)
    assert (scheduler.table == 16).all()


def test_running_rows_have_pages_for_what_they_may_become() -> None:
    scheduler = make_scheduler()
    scheduler.submit([1] * 4, max_new_tokens=10)  # 3 entries, at most 13
    read_all(scheduler)
    for ahead, pages in ((0, 2), (1, 2), (2, 3), (5, 4), (10, 7), (100, 7)):
        assert scheduler.reserve(ahead) == []
        assert len(pages_of(scheduler, 0)) == pages
    scheduler.decoded(0, [5, 6, 7], done=False)
    assert len(pages_of(scheduler, 0)) == 7


def test_the_newest_gives_way_and_is_read_again_with_its_tokens() -> None:
    scheduler = make_scheduler(pages=8)
    old = scheduler.submit([1] * 5, max_new_tokens=9)
    new = scheduler.submit([2] * 5, max_new_tokens=4)
    read_all(scheduler)
    assert scheduler.reserve(2) == []
    for row in scheduler.running:
        scheduler.decoded(row, [8, 9], done=False)
    later = scheduler.submit([3], max_new_tokens=1)
    assert scheduler.reserve(5) == [new]
    assert (new.state, new.row, new.preemptions) == ("waiting", None, 1)
    assert new.tokens == [2] * 5 + [8, 9]
    assert (old.preemptions, scheduler.running, scheduler.waiting) == (0, [0], 2)
    finish(scheduler, old)
    reads = read_all(scheduler)
    # It comes before later requests, and its first chunk is still in the cache.
    assert [(read.request, read.start, read.count) for read in reads] == [
        (new, 4, 2),
        (later, 0, 0),
    ]
    scheduler.reserve(100)
    # The pages of 5 + 4 - 1 entries: its limit has not changed.
    assert len(pages_of(scheduler, new.row or 0)) == 4


def test_who_gave_way_is_the_head_of_the_line_again() -> None:
    """Check that a later request, which would fit into the free pages, does not pass it."""
    scheduler = make_scheduler(pages=8)
    scheduler.submit([1] * 5, max_new_tokens=9)
    new = scheduler.submit([2] * 5, max_new_tokens=4)
    read_all(scheduler)
    later = scheduler.submit([3], max_new_tokens=1)
    assert scheduler.reserve(7) == [new]
    assert 1 <= scheduler.free_pages < 3  # enough for one of the two
    assert (scheduler.next_reads(), new.state, later.state) == ([], "waiting", "waiting")


def test_who_reads_gives_way_to_the_older_who_run() -> None:
    scheduler = make_scheduler(pages=6, capacity=12)
    old = scheduler.submit([1] * 3, max_new_tokens=9)
    read_all(scheduler)
    new = scheduler.submit([2] * 6, max_new_tokens=2)
    (read,) = scheduler.next_reads()
    scheduler.was_read(read, None)
    assert (new.state, scheduler.reserve(9)) == ("reading", [new])
    assert (scheduler.running, old.state, new.state) == ([0], "running", "waiting")


def test_a_preempted_request_comes_before_a_newer_one_with_a_row_but_no_pages() -> None:
    scheduler = make_scheduler(rows=3, pages=7, capacity=14)
    first = scheduler.submit([1] * 3, max_new_tokens=9)
    second = scheduler.submit([2] * 2, max_new_tokens=9)
    read_all(scheduler)
    third = scheduler.submit([3] * 3, max_new_tokens=2)
    assert scheduler.next_reads(budget=1) == []  # it has a row, but the budget is too small
    assert third.state == "reading"
    assert scheduler.reserve(100) == [second, third]
    assert (first.preemptions, second.preemptions, third.preemptions) == (0, 1, 0)
    finish(scheduler, first)
    assert [read.request for read in read_all(scheduler)] == [second, third]


def test_a_newcomer_leaves_to_those_who_run_what_they_need_next() -> None:
    scheduler = make_scheduler(rows=3, pages=8)
    for token in (1, 2):
        scheduler.submit([token], max_new_tokens=8)
    read_all(scheduler)
    scheduler.reserve(4)  # 2 pages each
    for row in scheduler.running:
        scheduler.decoded(row, [7, 7, 7], done=False)
    # 4 pages are free: it needs 3, and each running text needs 2 more.
    third = scheduler.submit([3] * 4, max_new_tokens=2)
    read_all(scheduler)
    assert third.state == "waiting"
    finish(scheduler, request_in(scheduler, 0))
    read_all(scheduler)
    assert third.state == "running"


# --- prefixes -------------------------------------------------------------------------------------


def first_chunks(reads: Sequence[PrefillChunk]) -> list[tuple[int, Any]]:
    return [(read.start, read.prefix_state) for read in reads if read.is_first]


def test_a_common_beginning_is_read_once() -> None:
    scheduler = make_scheduler(rows=4)
    common = [1, 2, 3, 4, 5, 6, 7, 8]
    for token in range(4):
        scheduler.submit([*common, 9, token], max_new_tokens=2)
    reads = read_all(scheduler)
    assert first_chunks(reads) == [(0, None)] + [(8, tuple(common))] * 3
    assert sum(read.count for read in reads) == 9 + 3
    assert {tuple(pages_of(scheduler, row)[:4]) for row in range(4)} == {
        tuple(pages_of(scheduler, 0)[:4])
    }
    assert len({page for row in range(4) for page in pages_of(scheduler, row)}) == 4 + 4


def test_a_prefix_holds_only_where_the_token_after_it_is_the_same() -> None:
    scheduler = make_scheduler(rows=4)
    for after in (5, 6, 5):
        scheduler.submit([1, 2, 3, 4, after, 9], max_new_tokens=2)
    # The third one comes before the second, because it has less left to read.
    assert first_chunks(read_all(scheduler)) == [(0, None), (4, (1, 2, 3, 4)), (0, None)]
    assert pages_of(scheduler, 0)[:2] == pages_of(scheduler, 2)[:2] != pages_of(scheduler, 1)[:2]


def test_a_text_goes_on_from_a_prefix_and_extends_it() -> None:
    scheduler = make_scheduler()
    text = list(range(14))
    for length, start in ((5, 0), (10, 4), (13, 8), (13, 12), (14, 12)):
        request = scheduler.submit(text[:length], max_new_tokens=1)
        reads = read_all(scheduler)
        assert first_chunks(reads) == [(start, tuple(text[:start]) or None)]
        assert sum(read.count for read in reads) == length - 1 - start
        finish(scheduler, request)


def test_a_prompt_that_is_known_is_not_read_at_all() -> None:
    scheduler = make_scheduler(last_widths=(1,))
    for _ in range(2):
        scheduler.submit([1, 2, 3, 4, 5], max_new_tokens=2)
    first, second = read_all(scheduler)
    assert (first.start, first.count) == (0, 4)
    assert (second.start, second.count, second.width) == (4, 0, 1)
    assert (second.is_first, second.is_last) == (True, True)


def test_prefix_states_that_were_dropped_are_stored_again_after_a_new_prefill() -> None:
    """Check two prompts of three chunks, with room for the prefix states of three chunks."""
    scheduler = make_scheduler(prefix_states=3, pages=24)
    ones, twos = [1] * 13, [2] * 13

    def begins_at(tokens: list[int]) -> int:
        request = scheduler.submit(tokens, max_new_tokens=1)
        first, *_ = read_all(scheduler)
        finish(scheduler, request)
        return first.start

    assert begins_at(ones) == begins_at(twos) == 0
    assert begins_at(ones) == 0  # the other prompt's states replaced its states
    assert begins_at(ones) == begins_at(ones) == 12
    assert scheduler._pools[0].available == 24  # no chunk has pages twice


def test_what_was_generated_is_no_prefix() -> None:
    scheduler = make_scheduler()
    scheduler.submit([1, 2, 3], max_new_tokens=8)
    read_all(scheduler)
    scheduler.reserve(8)
    scheduler.decoded(0, [4, 5, 6, 7], done=True)
    scheduler.submit([1, 2, 3, 4, 5, 6], max_new_tokens=1)
    assert first_chunks(read_all(scheduler)) == [(0, None)]


def test_prefixes_go_when_pages_are_needed_and_never_one_that_is_held() -> None:
    scheduler = make_scheduler(rows=3, pages=8)
    forgotten = scheduler.submit([1] * 5, max_new_tokens=1)
    read_all(scheduler)
    finish(scheduler, forgotten)
    in_use = scheduler.submit([2] * 5, max_new_tokens=1)
    read_all(scheduler)
    assert scheduler.free_pages == 6  # two of them hold a prefix
    long = scheduler.submit([3] * 9, max_new_tokens=2)
    read_all(scheduler)
    scheduler.reserve(100)
    assert (in_use.preemptions, scheduler.free_pages) == (0, 0)
    finish(scheduler, long)
    again = scheduler.submit([2] * 5, max_new_tokens=1)
    assert first_chunks(read_all(scheduler)) == [(4, (2,) * 4)]
    for request in (in_use, again):
        finish(scheduler, request)
    scheduler.submit([1] * 5, max_new_tokens=1)
    assert first_chunks(read_all(scheduler)) == [(0, None)]


# --- cancelling -----------------------------------------------------------------------------------


def test_requests_are_cancelled_in_every_state_and_twice() -> None:
    scheduler = make_scheduler(rows=3, chunk=2)
    done, running, reading, waiting = (
        scheduler.submit([token] * 3, max_new_tokens=4) for token in range(4)
    )
    for _ in range(2):
        scheduler.was_read(*scheduler.next_reads(), prefix_state=None)
    finish(scheduler, done)
    scheduler.cancel(waiting)
    (read,) = scheduler.next_reads()
    assert read.request is reading
    assert [done.state, running.state, reading.state] == ["done", "running", "reading"]
    for request in (done, running, reading, waiting):
        before = scheduler.free_pages, request.row is not None
        scheduler.cancel(request)
        assert scheduler.free_pages == before[0] + before[1]
        scheduler.cancel(request)
        assert (request.row, scheduler.free_pages) == (None, sum(before))
    states = [request.state for request in (done, running, reading, waiting)]
    assert states == ["done", "cancelled", "cancelled", "cancelled"]
    assert (scheduler.idle, scheduler.free_pages, scheduler.waiting) == (True, 16, 0)
    scheduler.was_read(read, prefix_state=None)  # the device had begun this chunk
    assert (scheduler.idle, scheduler.running, scheduler.free_pages) == (True, [], 16)


def test_a_chunk_of_a_cancelled_request_is_not_recorded_for_the_next_request_in_its_row() -> None:
    scheduler = make_scheduler(rows=1)
    cancelled = scheduler.submit([1] * 5, max_new_tokens=2)
    (read,) = scheduler.next_reads()
    scheduler.cancel(cancelled)
    following = scheduler.submit([2] * 9, max_new_tokens=2)
    (first,) = scheduler.next_reads()
    assert (first.row, first.request) == (read.row, following)
    scheduler.was_read(read, prefix_state="of the other")
    assert following.state == "reading"
    scheduler.was_read(first, prefix_state="its own")
    (second,) = scheduler.next_reads()
    assert (second.start, second.is_first) == (4, False)
    scheduler.submit([1] * 5, max_new_tokens=2)
    scheduler.was_read(second, prefix_state=None)
    finish(scheduler, following)
    assert first_chunks(read_all(scheduler)) == [(0, None)]


# --- rows that are rearranged, and shards ---------------------------------------------------------


def test_rows_are_rearranged_with_all_that_they_have() -> None:
    scheduler = make_scheduler(rows=3)
    first = scheduler.submit([1] * 3, max_new_tokens=4)
    second = scheduler.submit([2] * 9, max_new_tokens=4)
    scheduler.was_read(*scheduler.next_reads(), prefix_state=None)
    scheduler.was_read(*scheduler.next_reads(), prefix_state=None)
    before = [pages_of(scheduler, row) for row in range(3)]
    scheduler.swap([2, 0, 1])
    assert [pages_of(scheduler, row) for row in range(3)] == [before[2], before[0], before[1]]
    assert (first.row, second.row, scheduler.running) == (1, 2, [1])
    assert [scheduler.request_of(row) for row in range(3)] == [None, first, second]
    (read,) = scheduler.next_reads()
    assert (read.row, read.start, read.is_first) == (2, 4, False)
    scheduler.was_read(read, prefix_state=None)
    assert scheduler.running == [1, 2]


def test_shards_have_their_own_pages_prefixes_and_reads() -> None:
    scheduler = make_scheduler(rows=4, shards=2)
    requests = [scheduler.submit([1] * 6, max_new_tokens=2) for _ in range(4)]
    reads = scheduler.next_reads()
    assert [(read.row, read.start) for read in reads] == [(0, 0), (2, 0)]
    for read in reads:
        scheduler.was_read(read, prefix_state=read.row)
    # Each continues from the prefix in its own shard.
    assert first_chunks(read_all(scheduler)) == [(4, 0), (4, 2)]
    assert [request.row for request in requests] == [0, 2, 1, 3]
    assert pages_of(scheduler, 0)[:2] == pages_of(scheduler, 1)[:2] == pages_of(scheduler, 2)[:2]
    finish(scheduler, requests[0])
    finish(scheduler, requests[2])
    following = scheduler.submit([1] * 6, max_new_tokens=2)
    assert first_chunks(read_all(scheduler)) == [(4, 0)]
    assert following.row == 0


def test_requests_that_come_together_are_spread_over_the_shards() -> None:
    scheduler = make_scheduler(rows=8, shards=2)
    running = scheduler.submit([9] * 3, max_new_tokens=2)
    read_all(scheduler)
    requests = [scheduler.submit([token] * 5, max_new_tokens=2) for token in range(5)]
    scheduler.next_reads()
    assert running.row == 0
    assert [request.row for request in requests] == [4, 1, 5, 2, 6]


def test_texts_that_need_no_pages_yet_are_spread_over_the_shards() -> None:
    scheduler = make_scheduler(rows=4, shards=2, pages=1, capacity=2)
    requests = [scheduler.submit([token], max_new_tokens=1) for token in range(3)]
    scheduler.next_reads()
    assert [request.row for request in requests] == [0, 2, None]


def test_two_that_read_the_same_at_a_time_mix_nothing() -> None:
    scheduler = make_scheduler(rows=4, shards=2, pages=13)
    text = [0, 1, 2, 3, 7, 4, 5, 6, 7, 8, 9, 10, 11]
    oldest = scheduler.submit([12], max_new_tokens=14)
    passing = scheduler.submit([13], max_new_tokens=1)
    old = scheduler.submit(text, max_new_tokens=2)
    read_all(scheduler)
    assert (oldest.row, passing.row, old.row) == (0, 2, 1)
    finish(scheduler, passing)
    new = scheduler.submit(text, max_new_tokens=2)
    scheduler.was_read(*scheduler.next_reads(), prefix_state=(0, 1, 2, 3))
    assert scheduler.reserve(13) == [old]
    # It continues in the other shard, before the new one, which has begun there.
    reads = [(read.request, read.start) for read in read_all(scheduler)]
    assert reads == [(old, 4), (old, 8), (new, 4), (new, 8)]
    for request in (oldest, old, new):
        finish(scheduler, request)
    scheduler.submit([14] * 9, max_new_tokens=2)  # in the first shard
    last = scheduler.submit([0, 1, 2, 3, 7, 8, 9, 10, 11], max_new_tokens=1)
    assert [read.start for read in read_all(scheduler) if read.request is last] == [4]
    assert last.row == 2


def test_where_a_shard_is_short_of_pages_the_other_gives_nobody_up() -> None:
    scheduler = make_scheduler(rows=4, shards=2, pages=4, capacity=9)
    requests = [scheduler.submit([token] * 3, max_new_tokens=6) for token in range(4)]
    read_all(scheduler)
    scheduler.swap([0, 1, 3, 2])
    assert [request.row for request in requests] == [0, 3, 1, 2]
    scheduler.decoded(0, [5], done=True)
    assert scheduler.reserve(6) == [requests[3]]
    assert scheduler.running == [1, 3]


# --- clients --------------------------------------------------------------------------------------


def read_all_and_hold(scheduler: Scheduler, *requests: Request) -> None:
    read_all(scheduler)
    assert [request.state for request in requests] == ["held"] * len(requests)


def test_a_client_holds_its_row_and_is_not_decoded() -> None:
    scheduler = make_scheduler()
    request = scheduler.submit([1] * 6, max_new_tokens=4, is_client=True)
    read_all_and_hold(scheduler, request)
    assert (scheduler.running, scheduler.held, scheduler.occupied) == ([], [0], 1)
    assert (scheduler.idle, scheduler.can_go_on()) == (True, False)
    assert scheduler.make_room(request, ahead=3)
    assert len(pages_of(scheduler, 0)) == 4  # for 5 + 3 entries
    scheduler.decoded(0, [2, 3], done=False)
    assert scheduler.make_room(request, ahead=5)
    assert len(pages_of(scheduler, 0)) == 5  # for at most 6 + 4 - 1 entries
    scheduler.decoded(0, [4, 5], done=True)
    assert (request.state, scheduler.occupied) == ("done", 0)


def test_a_text_that_is_begun_in_its_middle_keeps_its_limit() -> None:
    scheduler = make_scheduler(capacity=8)
    request = scheduler.submit([1] * 7, max_new_tokens=5, prompt_length=3, is_client=True)
    assert request.max_length == 8
    read_all_and_hold(scheduler, request)
    assert scheduler.make_room(request, ahead=20)
    assert len(pages_of(scheduler, 0)) == 4


def test_a_text_that_was_preempted_finds_what_its_tenant_has() -> None:
    scheduler = make_scheduler(rows=1)
    request = scheduler.submit(list(range(9)), max_new_tokens=2, tenant=Tenant("mine"))
    read_all(scheduler)
    scheduler._preempt(request)
    assert read_all(scheduler)[0].start == 8


def test_only_so_much_is_shared_as_may_be() -> None:
    scheduler = make_scheduler(rows=1, pages=12)
    first = scheduler.submit([1] * 13, max_new_tokens=1)
    read_all(scheduler)
    finish(scheduler, first)
    for shares, start in ((0, 0), (3, 0), (4, 4), (11, 8), (None, 12)):
        request = scheduler.submit([1] * 13, max_new_tokens=1, shares=shares)
        assert read_all(scheduler)[0].start == start
        finish(scheduler, request)


def test_the_client_that_is_away_for_the_longest_is_dropped_for_who_waits() -> None:
    scheduler = make_scheduler(rows=3)
    first, second, third = (
        scheduler.submit([token, token], max_new_tokens=2, is_client=True) for token in range(3)
    )
    read_all_and_hold(scheduler, first, second, third)
    waiting = scheduler.submit([4, 4], max_new_tokens=2)
    assert not scheduler.can_go_on()  # all clients are connected
    scheduler.set_away(third, True)
    scheduler.set_away(first, True)
    scheduler.set_away(third, True)  # no change
    scheduler.set_away(second, True)
    scheduler.set_away(second, False)
    assert scheduler.can_go_on()
    assert (scheduler.dropped, third.state, waiting.row) == ([third], "dropped", 2)
    scheduler.set_away(first, False)
    scheduler.submit([5, 5], max_new_tokens=2)
    read_all(scheduler)
    assert (scheduler.dropped, scheduler.waiting) == ([third], 1)


def test_a_client_that_is_away_is_dropped_for_pages() -> None:
    scheduler = make_scheduler(rows=3, pages=8)
    client = scheduler.submit([1] * 8, max_new_tokens=4, is_client=True)
    read_all_and_hold(scheduler, client)
    waiting = scheduler.submit([2] * 9, max_new_tokens=4)
    assert not scheduler.can_go_on()
    scheduler.set_away(client, True)
    assert scheduler.can_go_on()
    assert (client.state, waiting.state) == ("dropped", "reading")


def test_a_running_text_does_not_give_way_to_clients_that_do_nothing() -> None:
    scheduler = make_scheduler(pages=8)
    client = scheduler.submit([1] * 6, max_new_tokens=4, is_client=True)
    running = scheduler.submit([2] * 2, max_new_tokens=12)
    read_all(scheduler)
    assert scheduler.reserve(8) == []
    assert (client.state, running.state) == ("held", "running")
    assert scheduler.reserve(12) == []
    assert (client.state, running.state) == ("dropped", "running")  # although it is older


def test_a_newer_text_gives_way_to_a_client() -> None:
    scheduler = make_scheduler(pages=8)
    client = scheduler.submit([1] * 6, max_new_tokens=8, is_client=True)
    running = scheduler.submit([2] * 6, max_new_tokens=4)
    read_all(scheduler)
    assert scheduler.make_room(client, ahead=8)
    assert (client.state, running.state, scheduler.dropped) == ("held", "waiting", [])
    read_all(scheduler)
    assert running.state == "waiting"  # it would only be preempted again


def test_a_client_gives_way_to_what_is_older() -> None:
    scheduler = make_scheduler(pages=8)
    running = scheduler.submit([2] * 6, max_new_tokens=8)
    client = scheduler.submit([1] * 6, max_new_tokens=4, is_client=True)
    read_all(scheduler)
    scheduler.reserve(5)
    assert not scheduler.make_room(client, ahead=8)
    assert (client.state, running.state, scheduler.dropped) == ("dropped", "running", [client])


def test_a_client_whose_text_is_being_read_is_preempted() -> None:
    scheduler = make_scheduler(pages=8)
    running = scheduler.submit([2] * 4, max_new_tokens=13)
    read_all(scheduler)
    client = scheduler.submit([1] * 6, max_new_tokens=4, is_client=True)
    (read,) = scheduler.next_reads()
    scheduler.was_read(read, None)
    assert scheduler.reserve(12) == [client]
    assert (client.state, client.preemptions) == ("waiting", 1)
    assert (scheduler.dropped, running.state) == ([], "running")


def test_rows_of_clients_that_are_away_count_as_free_for_those_who_wait() -> None:
    scheduler = make_scheduler(rows=1, max_waiting=0)
    client = scheduler.submit([1, 1], max_new_tokens=1, is_client=True)
    read_all_and_hold(scheduler, client)
    with pytest.raises(QueueFullError):
        scheduler.submit([2], max_new_tokens=1)
    scheduler.set_away(client, True)
    scheduler.submit([2], max_new_tokens=1)


# --- clients that do nothing ----------------------------------------------------------------------


class Clock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def with_idle_clients(clock: Clock, count: int, **sizes: Any) -> tuple[Scheduler, list[Request]]:
    """Return a scheduler, and clients that became able to draft one second after another."""
    scheduler = make_scheduler(**{"rows": count, "clock": clock, **sizes})
    clients = [
        scheduler.submit([token] * 6, max_new_tokens=6, is_client=True) for token in range(count)
    ]
    read_all_and_hold(scheduler, *clients)
    for request in clients:
        scheduler.may_draft(request)
        clock.now += 1.0
    return scheduler, clients


def test_who_waits_has_the_row_of_the_client_that_is_idle_for_the_longest() -> None:
    clock = Clock()
    scheduler, (first, second) = with_idle_clients(clock, 2, idle_seconds=3.0)
    waiting = scheduler.submit([7, 7], max_new_tokens=2)
    clock.now = 2.9
    assert (scheduler.can_go_on(), scheduler.seconds_until_idle()) == (False, pytest.approx(0.1))
    clock.now = 3.0
    assert scheduler.can_go_on()
    assert (first.state, first.row, waiting.row, second.state) == ("suspended", None, 0, "held")
    assert (scheduler.suspensions, scheduler.dropped, scheduler.waiting) == (1, [], 0)
    assert scheduler.seconds_until_idle() is None  # nobody waits
    scheduler.check()


def test_a_client_that_was_suspended_comes_back_with_its_text_behind_those_who_wait() -> None:
    clock = Clock()
    scheduler, (client,) = with_idle_clients(clock, 1)
    scheduler.decoded(0, [8, 9], done=False)
    running = scheduler.submit([7, 7], max_new_tokens=2)
    waiting = scheduler.submit([6, 6], max_new_tokens=2)
    read_all(scheduler)
    assert (client.state, running.state) == ("suspended", "running")
    scheduler.has_drafted(client)
    scheduler.check()
    assert (client.state, scheduler.waiting) == ("waiting", 2)
    finish(scheduler, running)
    read_all(scheduler)
    assert (waiting.state, client.state) == ("running", "waiting")
    clock.now += 100.0
    finish(scheduler, waiting)
    reads = read_all(scheduler)
    # The chunk of its prompt is still in the cache.
    assert [(read.request, read.start, read.count) for read in reads] == [(client, 4, 3)]
    assert (client.state, client.tokens) == ("held", [0] * 6 + [8, 9])
    another = scheduler.submit([5, 5], max_new_tokens=2)
    clock.now += 100.0
    assert not scheduler.can_go_on()  # its draft has no verdict yet
    scheduler.may_draft(client)
    assert not scheduler.can_go_on()
    clock.now += 1.0
    assert scheduler.can_go_on()
    assert (client.state, another.state) == ("suspended", "reading")


def test_a_client_keeps_its_row_while_it_drafts_or_while_another_row_is_free() -> None:
    clock = Clock()
    scheduler, (client,) = with_idle_clients(clock, 1, rows=2)
    running = scheduler.submit([7, 7], max_new_tokens=2)
    read_all(scheduler)
    assert (client.state, running.state) == ("held", "running")
    scheduler.submit([6, 6], max_new_tokens=2)
    scheduler.has_drafted(client)
    clock.now += 100.0
    assert scheduler.next_reads() == []
    assert (client.state, scheduler.seconds_until_idle()) == ("held", None)


def test_a_client_that_is_idle_loses_its_pages_before_any_text_gives_way() -> None:
    clock = Clock()
    scheduler, (client,) = with_idle_clients(clock, 1, rows=3, pages=8)
    running = scheduler.submit([2] * 2, max_new_tokens=12)
    newer = scheduler.submit([3, 3], max_new_tokens=4)
    read_all(scheduler)
    assert scheduler.reserve(8) == []
    assert (client.state, running.state, newer.state) == ("suspended", "running", "running")


def test_a_client_that_becomes_idle_between_two_looks_is_looked_at_once_more() -> None:
    """Check that the time until it is idle is 0: nothing else would wake the engine's thread."""
    clock = Clock()
    scheduler, (client,) = with_idle_clients(clock, 1, idle_seconds=2.0)
    scheduler.submit([7, 7], max_new_tokens=2)
    clock.now = 1.999
    assert not scheduler.can_go_on()
    clock.now = 2.001
    assert scheduler.seconds_until_idle() == 0.0
    assert scheduler.can_go_on()
    assert client.state == "suspended"


def test_of_one_owners_clients_the_idle_one_goes_before_the_one_that_is_away() -> None:
    """Check a third client of an owner who is at the limit, while other rows are free.

    The idle client loses nothing if it is suspended, but the one that is away would lose its
    session.
    """
    clock = Clock()
    scheduler = make_scheduler(rows=4, client_rows=2, clock=clock)
    away, idle = (
        scheduler.submit([token] * 6, max_new_tokens=6, is_client=True, owner="one")
        for token in range(2)
    )
    read_all_and_hold(scheduler, away, idle)
    scheduler.may_draft(idle)
    scheduler.set_away(away, True)
    clock.now += 10.0
    third = scheduler.submit([7] * 6, max_new_tokens=6, is_client=True, owner="one")
    read_all(scheduler)
    assert (away.state, idle.state, third.state) == ("held", "suspended", "held")
    scheduler.submit([8] * 6, max_new_tokens=6, is_client=True, owner="one")
    read_all(scheduler)
    assert away.state == "dropped"


def test_who_is_away_is_dropped_before_anybody_is_suspended() -> None:
    clock = Clock()
    scheduler, (first, second) = with_idle_clients(clock, 2)
    scheduler.set_away(second, True)
    scheduler.submit([7, 7], max_new_tokens=2)
    assert scheduler.can_go_on()
    assert (first.state, second.state) == ("held", "dropped")


def test_rows_of_idle_clients_count_as_free_for_those_who_wait() -> None:
    clock = Clock()
    scheduler, _ = with_idle_clients(clock, 1, max_waiting=0, idle_seconds=5.0)
    with pytest.raises(QueueFullError):
        scheduler.submit([2], max_new_tokens=1)
    clock.now = 5.0
    scheduler.submit([2], max_new_tokens=1)


def test_a_client_that_was_suspended_is_cancelled_and_cleared() -> None:
    scheduler, (first, second) = with_idle_clients(Clock(), 2, idle_seconds=0.0)
    for _ in range(2):
        scheduler.submit([7, 7], max_new_tokens=2)
    assert scheduler.can_go_on()
    assert (first.state, second.state) == ("suspended", "suspended")
    scheduler.cancel(first)
    scheduler.check()
    scheduler.clear()
    scheduler.check()
    assert (first.state, second.state) == ("cancelled", "cancelled")
    scheduler.has_drafted(second)
    assert scheduler.waiting == 0


def test_two_clients_that_take_turns_with_one_row_both_come_to_their_ends() -> None:
    """Check it while new requests keep arriving.

    Each time that a client gets the row, its text grows by one token.
    """
    clock = Clock()
    scheduler = make_scheduler(rows=1, pages=32, clock=clock)
    clients = [
        scheduler.submit([token] * 4, max_new_tokens=5, is_client=True) for token in range(2)
    ]
    requests = [scheduler.submit([5, 5], max_new_tokens=2)]
    turns = []
    while not all(client.state == "done" for client in clients):
        read_all(scheduler)
        request = scheduler.request_of(0)
        assert request is not None
        turns.append(request)
        if request.is_client:
            # A client gets one verdict each time that it has the row.
            scheduler.decoded(0, [1], done=len(request.tokens) + 1 == request.max_length)
            scheduler.may_draft(request)
            clock.now += 1.0
        else:
            finish(scheduler, request)
            requests.append(scheduler.submit([5, 5], max_new_tokens=2))
        scheduler.can_go_on()
        for client in clients:
            scheduler.has_drafted(client)
    assert turns[:3] == [*clients, requests[0]]
    # Between two turns of one client there is one of the other, and one of a request.
    for client in clients:
        places = [place for place, request in enumerate(turns) if request is client]
        assert len(places) == 5
        assert max(second - first for first, second in pairwise(places)) == 3


# --- owners of clients ----------------------------------------------------------------------------


def test_clients_of_one_owner_have_so_many_rows_and_others_pass_them() -> None:
    scheduler = make_scheduler(rows=4, pages=32, client_rows=2)
    mine = [
        scheduler.submit([token] * 2, max_new_tokens=2, is_client=True, owner="me")
        for token in range(3)
    ]
    yours = scheduler.submit([4, 4], max_new_tokens=2, is_client=True, owner="you")
    plain = scheduler.submit([5, 5], max_new_tokens=2)
    read_all(scheduler)
    states = [request.state for request in (*mine, yours, plain)]
    assert states == ["held", "held", "waiting", "held", "running"]
    nobodys = scheduler.submit([6, 6], max_new_tokens=2, is_client=True)
    finish(scheduler, plain)
    read_all(scheduler)
    assert (mine[2].state, nobodys.state) == ("waiting", "held")
    finish(scheduler, mine[0])
    read_all(scheduler)
    assert mine[2].state == "held"


def test_an_idle_client_of_the_same_owner_makes_way_though_a_row_is_free() -> None:
    clock = Clock()
    scheduler = make_scheduler(rows=3, client_rows=1, clock=clock)
    first, second = (
        scheduler.submit([token] * 2, max_new_tokens=2, is_client=True, owner="me")
        for token in range(2)
    )
    foreign = scheduler.submit([2, 2], max_new_tokens=2, is_client=True, owner="you")
    read_all(scheduler)
    scheduler.may_draft(first)
    scheduler.may_draft(foreign)
    clock.now += 1.0
    read_all(scheduler)
    assert (first.state, second.state, foreign.state) == ("suspended", "held", "held")


def test_one_owner_does_not_fill_the_line_for_others() -> None:
    scheduler = make_scheduler(rows=4, pages=32, client_rows=2, max_waiting=3)
    running = [scheduler.submit([5, 5], max_new_tokens=2) for _ in range(4)]
    read_all(scheduler)
    for _ in range(9):
        scheduler.submit([1, 1], max_new_tokens=2, is_client=True, owner="me")
    scheduler.submit([5, 5], max_new_tokens=2)
    with pytest.raises(QueueFullError):
        scheduler.submit([5, 5], max_new_tokens=2)
    assert [request.state for request in running] == ["running"] * 4


# --- texts that are read once more after their end ------------------------------------------------


def reread_all(scheduler: Scheduler) -> list[tuple[int, list[int]]]:
    """Read ended texts once more, and return the start and the tokens of each chunk."""
    chunks = []
    while reads := scheduler.next_rereads():
        for chunk in reads:
            end = chunk.start + chunk.count
            chunks.append((chunk.start, chunk.request.tokens[chunk.start : end]))
            scheduler.was_reread(chunk, prefix_state=("state", end))
            scheduler.check()
    return chunks


def end_text(
    scheduler: Scheduler, prompt: Sequence[int], output: Sequence[int], tenant: Tenant = NO_TENANT
) -> Request:
    """Submit a request, read it, and generate its output."""
    request = scheduler.submit(prompt, len(output), tenant=tenant)
    read_all(scheduler)
    scheduler.reserve(len(output))
    assert request.row is not None
    scheduler.decoded(request.row, output, done=True)
    return request


def cached_tokens(scheduler: Scheduler, tokens: Sequence[int], tenant: Tenant = NO_TENANT) -> int:
    """Return how many tokens of a prompt are shared, and cancel its request."""
    request = scheduler.submit(tokens, 1, tenant=tenant)
    scheduler.next_reads()
    scheduler.cancel(request)
    return request.cached


def test_an_ended_text_is_read_once_more_in_full_chunks_as_a_prompt_is() -> None:
    scheduler = make_scheduler()
    prompt, output = [1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12, 13]
    end_text(scheduler, prompt, output)
    # 13 tokens: the chunks end at 8 and 12, and the token after each is known.
    assert cached_tokens(scheduler, [*prompt, *output, 5, 5]) == 4
    assert scheduler.has_ended_texts
    assert reread_all(scheduler) == [(4, [5, 6, 7, 8]), (8, [9, 10, 11, 12])]
    assert not scheduler.has_ended_texts
    assert cached_tokens(scheduler, [*prompt, *output, 5, 5]) == 12
    following = scheduler.submit([*prompt, *output, 5, 5], 2)
    assert [(chunk.start, chunk.count) for chunk in read_all(scheduler)] == [(12, 2)]
    assert following.cached == 12


def test_a_chunk_is_not_read_once_more_before_the_token_after_it_is_known() -> None:
    scheduler = make_scheduler()
    end_text(scheduler, [1] * 6, [2] * 2)  # 8 tokens
    assert not scheduler.has_ended_texts and scheduler.next_rereads() == []
    end_text(scheduler, [1] * 6, [2] * 3)
    assert reread_all(scheduler) == [(4, [1, 1, 2, 2])]


def test_texts_are_read_once_more_only_while_nothing_else_is_to_do() -> None:
    scheduler = make_scheduler()
    end_text(scheduler, [1] * 6, [2] * 6)
    request = scheduler.submit([3] * 6, 2)
    assert scheduler.next_rereads() == []  # it waits
    (read,) = scheduler.next_reads()
    assert scheduler.next_rereads() == []  # it is prefilled
    scheduler.was_read(read, None)
    read_all(scheduler)
    assert request.state == "running" and scheduler.next_rereads() == []
    scheduler.cancel(request)
    assert len(reread_all(scheduler)) == 1


def test_between_two_chunks_of_an_ended_text_no_row_and_no_page_is_held() -> None:
    scheduler = make_scheduler(rows=1, max_waiting=0)
    end_text(scheduler, [1] * 6, [2] * 10)
    (chunk,) = scheduler.next_rereads()
    scheduler.check()
    assert not scheduler.idle and scheduler.occupied == 0
    request = scheduler.submit([1] * 6 + [2] * 9 + [5], 2)  # no row is in use: it need not wait
    scheduler.was_reread(chunk, "state")
    assert scheduler.free_pages == 16 and scheduler.next_rereads() == []
    assert read_all(scheduler)[0].start == request.cached == 8  # also what was read a moment ago
    assert request.row == 0


def test_rereading_takes_free_pages_and_evicts_nothing() -> None:
    scheduler = make_scheduler(pages=13)
    end_text(scheduler, [3] * 18, [4])  # four chunks stay, and five pages are free
    end_text(scheduler, [1] * 2, [2] * 5)
    before = set(scheduler._pools[0]._prefixes)
    assert len(before) == 4 and reread_all(scheduler) == [(0, [1, 1, 2, 2])]
    scheduler._ended.add(EndedText([5] * 14, NO_TENANT, 0))
    # One chunk takes two of the three free pages. For the next one there are too few.
    assert reread_all(scheduler) == [(0, [5] * 4)]
    assert scheduler._pools[0]._prefixes > before and not scheduler.has_ended_texts
    assert cached_tokens(scheduler, [3] * 18) == 16


def test_no_chunk_of_an_ended_text_is_read_once_more_twice() -> None:
    scheduler = make_scheduler()
    end_text(scheduler, [1] * 6, [2] * 10)
    for chunk in scheduler.next_rereads():
        scheduler.was_reread(chunk, "state")
    scheduler._pools[0].forget_prefixes()  # as if requests had needed the pages
    assert scheduler.has_ended_texts
    assert scheduler.next_rereads() == [] and not scheduler.has_ended_texts


def test_each_tenant_has_its_own_ended_texts() -> None:
    scheduler, mine = make_scheduler(), Tenant("mine")
    end_text(scheduler, [1] * 3, [2] * 8, mine)
    assert len(reread_all(scheduler)) == 2
    assert cached_tokens(scheduler, [*[1] * 3, *[2] * 8]) == 0
    assert cached_tokens(scheduler, [*[1] * 3, *[2] * 8], mine) == 8


def test_which_texts_are_read_once_more() -> None:
    scheduler = make_scheduler()
    # A stop string cuts a text; what follows it is not read.
    request = scheduler.submit([3] * 6, 8)
    read_all(scheduler)
    scheduler.reserve(8)
    scheduler.decoded(0, [4] * 7, done=False)
    scheduler.cut(request, 10)
    scheduler.cut(request, 10)
    assert request.state == "cancelled" and reread_all(scheduler) == [(4, [3, 3, 4, 4])]
    # Texts that fail or are cancelled are not read, and no prompt that nothing follows.
    for end in ("failed", "cancelled"):
        request = scheduler.submit([5] * 6, 8)
        read_all(scheduler)
        scheduler.reserve(8)
        scheduler.decoded(0, [6] * 7, done=end == "failed", has_failed=end == "failed")
        scheduler.cancel(request)
    scheduler.submit([7] * 10, 0)
    read_all(scheduler)
    assert scheduler.idle and not scheduler.has_ended_texts
    silent = make_scheduler(reread=False)
    end_text(silent, [1] * 6, [2] * 8)
    assert not silent.has_ended_texts


def test_a_text_gives_way_to_its_next_turn_and_the_oldest_to_many() -> None:
    texts = EndedTexts(most=3)
    for tokens in ([1, 2], [1, 2, 3], [1, 2], [1, 2, 4]):
        texts.add(EndedText(tokens, NO_TENANT, 0))
    assert [text.tokens for text in texts._texts] == [[1, 2, 3], [1, 2, 4]]
    texts.add(EndedText([1, 2, 3, 4], Tenant("mine"), 0))
    texts.add(EndedText([1, 2, 3, 4], NO_TENANT, 1))
    assert [text.tokens for text in texts._texts] == [[1, 2, 4], [1, 2, 3, 4], [1, 2, 3, 4]]
    assert texts.first(2) is None
    few = EndedTexts(most_tokens=8)
    for token in (1, 2, 3):
        few.add(EndedText([token] * 4, NO_TENANT, 0))
    assert [text.tokens[0] for text in few._texts] == [2, 3]
    few.add(EndedText([4] * 9, NO_TENANT, 0))
    assert [text.tokens[0] for text in few._texts] == [4]


def test_an_ended_text_takes_the_place_of_one_prefix_state() -> None:
    scheduler = make_scheduler(pages=32, capacity=80, prefix_states=5)
    end_text(scheduler, [3] * 6, [4])
    prompt, output = [1] * 14, [2] * 20
    end_text(scheduler, prompt, output)
    assert len(reread_all(scheduler)) == 5
    # The states at the end of the text, at that of its prompt and of another prompt have stayed.
    assert cached_tokens(scheduler, [*prompt, *output, 5]) == 32
    assert cached_tokens(scheduler, [*prompt, 5, 5]) == 12
    assert cached_tokens(scheduler, [*prompt, *output[:10]]) == 12
    assert cached_tokens(scheduler, [3] * 6) == 4


def test_each_shard_reads_its_own_ended_texts() -> None:
    scheduler = make_scheduler(rows=2, shards=2)
    requests = [scheduler.submit([i] * 6, 8) for i in (1, 2)]
    read_all(scheduler)
    scheduler.reserve(8)
    for request in requests:
        assert request.row is not None
        scheduler.decoded(request.row, [3] * 8, done=True)
    chunks = scheduler.next_rereads()
    assert [(chunk.row, chunk.start) for chunk in chunks] == [(0, 4), (1, 4)]
    scheduler.check()
    scheduler.clear()
    scheduler.check()
    assert scheduler.idle and not scheduler.has_ended_texts


# --- all of it, under random schedules ------------------------------------------------------------


def next_token(tokens: Sequence[int]) -> int:
    """Return the next token of a text. This is the oracle."""
    return hash(tuple(tokens)) % 7


def expected_entry(tokens: Sequence[int], position: int) -> int:
    """Return what the cache holds at a position.

    It depends on all tokens up to the position, and on the token after it.
    """
    return hash(tuple(tokens[: position + 2]))


@dataclass
class Expectation:
    """A request and its text, as the user knows them."""

    prompt: list[int]
    max_new_tokens: int
    shown: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.shown


class Simulation:
    """A made-up device that records what is written into its pages, with random events."""

    final_states: tuple[str, ...] = ("done", "cancelled")

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.shards = draw.choice([1, 1, 2])
        self.rows = self.shards * draw.randint(1, 3)
        self.page = draw.choice([1, 2, 4])
        self.chunk = self.page * draw.randint(1, 2)
        self.pages = draw.randint(4, 14)
        self.last_widths = draw.choice([(), (1,)])
        self.capacity = 28
        sizes = {
            "rows": self.rows,
            "pages": self.pages,
            "page": self.page,
            "chunk": self.chunk,
            "shards": self.shards,
        }
        self.scheduler = Scheduler(
            **sizes, last_widths=self.last_widths, capacity=self.capacity, **self.options()
        )
        self.memory: dict[tuple[int, int, int], int] = {}
        self.decoded: set[tuple[int, int, int]] = set()  # the places that decoding wrote
        # The number of tokens of each request that were prefilled in its newest row.
        self.prefilled: dict[Request, int] = {}
        self.expectations: dict[Request, Expectation] = {}
        self.started: list[int] = []
        self.events: Counter[str] = Counter()
        self.common = [[draw.randrange(7) for _ in range(13)] for _ in range(2)]

    def options(self) -> dict[str, Any]:
        """Return further arguments of the scheduler."""
        return {}

    # What the device does.

    def shard(self, row: int) -> int:
        return row // (self.rows // self.shards)

    def place(self, row: int, position: int) -> tuple[int, int, int]:
        page = int(self.scheduler.table[row, position // self.page])
        assert 0 <= page < self.pages, "no page is there"
        return self.shard(row), page, position % self.page

    def write(self, row: int, tokens: Sequence[int], start: int, end: int) -> None:
        self.fill([self.place(row, position) for position in range(start, end)], tokens, start)

    def fill(
        self, places: Sequence[tuple[int, int, int]], tokens: Sequence[int], start: int
    ) -> None:
        """Write the entries from ``start`` on."""
        shards = range(self.shards)
        shared = {(shard, page) for shard in shards for page in shared_pages(self.scheduler, shard)}
        for position, place in enumerate(places, start):
            assert place[:2] not in shared, "a shared page is written"
            self.memory[place] = expected_entry(tokens, position)
            self.decoded.discard(place)

    def check_cache(self, row: int, tokens: Sequence[int], count: int) -> None:
        self.check_places([self.place(row, position) for position in range(count)], tokens)

    def check_places(self, places: Sequence[tuple[int, int, int]], tokens: Sequence[int]) -> None:
        for position, place in enumerate(places):
            assert self.memory.get(place) == expected_entry(tokens, position), (
                "the cache is not the text's"
            )

    def read(self, read: PrefillChunk, budget: int | None) -> None:
        tokens, end = read.request.tokens, read.start + read.count
        assert tokens == self.expectations[read.request].text, "tokens are lost"
        assert read.start % self.chunk == 0, "a chunk does not begin at a multiple"
        assert read.width == min(
            width for width in (*self.last_widths, self.chunk) if width >= read.count
        )
        assert budget is None or read.width <= budget
        assert read.is_last == (end == len(tokens) - 1)
        assert read.is_last or read.count == self.chunk, "a chunk is not full"
        self.check_cache(read.row, tokens, read.start)
        places = (self.place(read.row, position) for position in range(read.start))
        assert self.decoded.isdisjoint(places), "what decoding wrote is shared"
        self.write(read.row, tokens, read.start, end)
        if read.is_first:
            assert read.prefix_state == (
                expected_entry(tokens, read.start - 1) if read.start else None
            )
            self.events["shared"] += read.start > 0
        else:
            assert self.prefilled[read.request] == read.start
        self.prefilled[read.request] = end
        if self.draw.random() < 0.02:
            self.scheduler.cancel(read.request)
        self.scheduler.was_read(read, expected_entry(tokens, end - 1) if end else None)

    def decode(self, row: int, ahead: int) -> None:
        request = self.scheduler.request_of(row)
        assert request is not None
        expectation = self.expectations[request]
        tokens = expectation.text
        max_length = len(expectation.prompt) + expectation.max_new_tokens
        assert (request.tokens, request.row) == (tokens, row), "tokens are lost"
        self.check_cache(row, tokens, len(tokens) - 1)
        for position in range(min(len(tokens) - 1 + ahead, max_length - 1)):
            self.place(row, position)
        new: list[int] = []
        for _ in range(min(self.draw.randint(1, ahead), max_length - len(tokens))):
            new.append(next_token(tokens + new))
        start, end = len(tokens) - 1, len(tokens) + len(new) - 1
        self.write(row, tokens + new, start, end)
        self.decoded |= {self.place(row, position) for position in range(start, end)}
        expectation.shown += new
        self.scheduler.decoded(
            row, new, done=len(expectation.text) == max_length or self.draw.random() < 0.03
        )

    def reread(self, coming: int = 0) -> int:
        """Read chunks of ended texts once more; perhaps one of those ``coming`` comes meanwhile.

        Return how many are still to come.
        """
        prefixes = [set(pool._prefixes) for pool in self.scheduler._pools]
        preemptions, ended = self.scheduler.preemptions, list(self.scheduler._ended._texts)
        was_idle = all(
            request.state not in ("waiting", "reading", "running") for request in self.expectations
        )
        chunks = self.scheduler.next_rereads()
        assert was_idle or not chunks, "a text is read once more beside others"
        assert len({self.shard(chunk.row) for chunk in chunks}) == len(chunks)
        texts = [expectation.text for expectation in self.expectations.values()]
        for chunk in chunks:
            self.scheduler.check()
            tokens, end = chunk.request.tokens, chunk.start + chunk.count
            assert chunk.text in ended and tokens in texts, "nobody's text is read"
            assert self.scheduler.request_of(chunk.row) is None, "the row is not free"
            assert chunk.start % self.chunk == 0, "a chunk does not begin at a multiple"
            assert chunk.width == chunk.count == self.chunk, "a chunk is not full"
            assert end < len(tokens), "the token after the chunk is not known"
            assert not chunk.is_last and chunk.is_first
            places = [
                (self.shard(chunk.row), page, place)
                for page in chunk.pages
                for place in range(self.page)
            ]
            self.check_places(places[: chunk.start], tokens)
            assert self.decoded.isdisjoint(places[: chunk.start]), "what decoding wrote is shared"
            assert chunk.prefix_state == (
                expected_entry(tokens, chunk.start - 1) if chunk.start else None
            )
            self.fill(places[chunk.start :], tokens, chunk.start)
            if coming and self.draw.random() < 0.2:
                self.submit()
                coming -= 1
            self.scheduler.was_reread(chunk, expected_entry(tokens, end - 1))
            self.events["reread"] += 1
        for pool, before in zip(self.scheduler._pools, prefixes, strict=True):
            assert pool._prefixes >= before, "a prefix is evicted for a text that is read once more"
        assert self.scheduler.preemptions == preemptions
        self.check_pages()
        self.scheduler.check()
        return coming

    # What happens.

    def submit(self) -> None:
        draw = self.draw
        beginning = draw.choice(self.common)[: draw.randint(1, 13)]
        if self.expectations and draw.random() < 0.3:  # the next turn of a chat
            text = draw.choice(list(self.expectations.values())).text
            beginning = text[: draw.randint(1, 18)]
        prompt = beginning + [draw.randrange(7) for _ in range(draw.randint(0, 2))]
        room = min(self.capacity, self.pages * self.page + 1) - len(prompt)
        max_new_tokens = min(draw.randint(1, 12), room)
        if max_new_tokens >= 1:
            self.expectations[self.scheduler.submit(prompt, max_new_tokens)] = Expectation(
                prompt, max_new_tokens
            )

    def swap(self) -> None:
        rows_per_shard = self.rows // self.shards
        order = [
            row
            for first in range(0, self.rows, rows_per_shard)
            for row in self.draw.sample(range(first, first + rows_per_shard), rows_per_shard)
        ]
        self.scheduler.swap(order)

    def step(self) -> None:
        draw, scheduler = self.draw, self.scheduler
        if self.expectations and draw.random() < 0.03:
            scheduler.cancel(draw.choice(list(self.expectations)))
        for _ in range(draw.randint(1, 3)):
            budget = draw.choice([None, self.chunk, 1])
            before = self.holders()
            reads = scheduler.next_reads(budget)
            self.check_order(before)
            assert len({self.shard(read.row) for read in reads}) == len(reads)
            for read in reads:
                self.read(read, budget)
        before, ahead = self.holders(), draw.randint(1, 6)
        given_up = scheduler.reserve(ahead)
        waiting = [request for request in before if request.state == "waiting"]
        assert given_up == sorted(waiting, key=lambda request: request.order)
        self.check_order(before)
        if draw.random() < 0.2:
            self.swap()
        for row in scheduler.running:
            self.decode(row, ahead)
        self.check_pages()

    def run(self) -> None:
        coming = self.draw.randint(1, 8)
        for _ in range(400):
            if coming and self.draw.random() < 0.5:
                coming -= 1
                self.submit()
            self.step()
            if self.draw.random() < 0.5:
                coming = self.reread(coming)
            if self.is_over() and not coming:
                break
        else:
            pytest.fail("somebody starves")
        for _ in range(1000):
            if not self.scheduler.has_ended_texts:
                break
            self.reread()
        else:
            pytest.fail("a text is never read once more, and never dropped")
        self.check_end()

    def is_over(self) -> bool:
        return self.scheduler.idle and not self.scheduler.held

    # What must hold.

    def holders(self) -> dict[Request, int]:
        """Return every request that has a row, with the shard of the row."""
        pairs = ((row, self.scheduler.request_of(row)) for row in range(self.rows))
        return {request: self.shard(row) for row, request in pairs if request is not None}

    def check_order(self, before: dict[Request, int]) -> None:
        """Check that the oldest requests get rows, and the newest give them up."""
        after = self.holders()
        new = sorted(request.order for request in after if request.order not in self.started)
        self.started += new
        newest = max(self.started, default=0)
        passed = [
            request
            for request in self.expectations
            if request.order < newest and request.state == "waiting"
        ]
        assert all(request.order in self.started for request in passed), (
            "the head of the queue is passed"
        )
        assert self.started == sorted(self.started), "the head of the queue is passed"
        waiting = [
            request.order
            for request in self.expectations
            if request.state == "waiting" and request not in before
        ]
        head = min(waiting, default=9**9)
        admitted = [request for request in after if request not in before]
        assert all(request.order < head for request in admitted), "the head of the queue is passed"
        for request, shard in before.items():
            if request.row is None:
                self.events["preempted"] += 1
                remaining = [holder for holder in after if after[holder] == shard]
                assert remaining, "the oldest was preempted"
                assert all(holder.order < request.order for holder in remaining), (
                    "an older one was preempted"
                )

    def check_pages(self) -> None:
        """Check that each page is free, or in one row, or in a prefix.

        A prefix must have as many holders as rows use it.
        """
        table = self.scheduler.table
        assert table.dtype == "int32"
        for shard, pool in enumerate(self.scheduler._pools):
            lines = [table[row].tolist() for row in range(self.rows) if self.shard(row) == shard]
            used = [[page for page in line if page != self.pages] for line in lines]
            for line, pages in zip(lines, used, strict=True):
                assert line[: len(pages)] == pages, "an unused entry is not out of range"
            count = Counter(page for pages in used for page in pages)
            shared = shared_pages(self.scheduler, shard)
            unshared = [page for page in count.elements() if page not in shared]
            assert sorted([*pool._free, *shared, *unshared]) == list(range(self.pages)), (
                "a page is in no place, or in several: free, a prefix, a row"
            )
            for prefix in pool._prefixes:
                assert {count[page] for page in prefix.pages} == {prefix.holders}, (
                    "the rows that use a prefix's pages are not as many as its holders"
                )
            unheld = sum(len(prefix.pages) for prefix in pool._prefixes if not prefix.holders)
            assert pool.available == len(pool._free) + unheld

    def check_end(self) -> None:
        for request, expectation in self.expectations.items():
            assert request.state in self.final_states
            assert request.tokens == expectation.text
            text = list(expectation.prompt)
            while len(text) < len(expectation.text):
                text.append(next_token(text))
            assert expectation.text == text
            self.events[request.state] += 1
        assert (self.scheduler.table == self.pages).all()
        assert self.scheduler.free_pages == self.pages * self.shards
        for pool in self.scheduler._pools:
            pool.forget_prefixes()
            assert sorted(pool._free) == list(range(self.pages))


class SimulationWithClients(Simulation):
    """A device on which some texts are clients'.

    Clients have drafts verified at any time, and go away and come back, or stay away.
    """

    final_states = ("done", "cancelled", "dropped")

    def submit(self) -> None:
        before = set(self.expectations)
        super().submit()
        for new in set(self.expectations) - before:
            new.is_client, new.shares = self.draw.random() < 0.5, self.draw.choice([None, 0, 5])

    def step(self) -> None:
        super().step()
        for request in [request for request in self.expectations if request.is_client]:
            if self.draw.random() < 0.1:
                self.scheduler.set_away(request, self.draw.random() < 0.6)
            if request.state == "held" and self.draw.random() < 0.5:
                self.verify(request)
        self.check_pages()

    def verify(self, request: Request) -> None:
        ahead, before = self.draw.randint(1, 6), self.holders()
        if self.scheduler.make_room(request, ahead):
            self.decode(request.row or 0, ahead)
        self.check_lost_rows(before)

    def check_order(self, before: dict[Request, int]) -> None:
        """Check that in every shard in which a request was preempted another one can go on.

        This replaces the check of `Simulation`, which does not hold with clients.
        """
        self.check_lost_rows(before)
        for request, shard in before.items():
            if request.state == "waiting":
                remaining = [holder for holder, place in self.holders().items() if place == shard]
                assert any(holder.state != "held" for holder in remaining), "nobody goes on"

    def check_lost_rows(self, before: dict[Request, int]) -> None:
        after = self.holders()
        for request in self.scheduler.dropped:
            assert request.is_client and request.state == "dropped"
            self.events["dropped"] += 1
            self.events["dropped while connected"] += request.away is None
            if request.away is None:
                remaining = [
                    holder
                    for holder in after
                    if after[holder] == before[request] and holder in before
                ]
                assert all(holder.away is None for holder in remaining), (
                    "a client that is away keeps its row"
                )
        self.scheduler.dropped.clear()
        for request in before:
            if request.state == "waiting":
                assert request.away is None
                self.events["preempted"] += 1


class SimulationWithIdleClients(SimulationWithClients):
    """A device with idle clients, and with a limited number of rows for each owner."""

    def options(self) -> dict[str, Any]:
        self.clock, self.client_rows = Clock(), self.draw.randint(1, self.rows)
        self.drafts: set[Request] = set()
        return {
            "clock": self.clock,
            "idle_seconds": self.draw.choice([0.0, 1.0, 5.0]),
            "client_rows": self.client_rows,
        }

    def submit(self) -> None:
        before = set(self.expectations)
        super().submit()
        for new in set(self.expectations) - before:
            new.owner = self.draw.choice(["", "one", "another"]) if new.is_client else ""

    def step(self) -> None:
        self.clock.now += self.draw.choice([0.0, 0.5, 2.0])
        Simulation.step(self)
        for request in [request for request in self.expectations if request.is_client]:
            if self.draw.random() < 0.05:
                self.scheduler.set_away(request, self.draw.random() < 0.5)
            if (
                request.state == "held"
                and request not in self.drafts
                and request.idle_since is None
            ):
                self.scheduler.may_draft(request)
            if request.state == "suspended" or request.idle_since is not None:
                if self.draw.random() < 0.4:
                    self.events["resumed"] += request.state == "suspended"
                    self.scheduler.has_drafted(request)
                    self.drafts.add(request)
            elif request.state == "held" and self.draw.random() < 0.5:
                self.drafts.remove(request)
                self.verify(request)
        self.check_pages()
        self.scheduler.check()

    def is_over(self) -> bool:
        return super().is_over() and not any(
            request.state == "suspended" for request in self.expectations
        )

    def check_order(self, before: dict[Request, int]) -> None:
        super().check_order(before)
        owners = Counter(request.owner for request in self.holders() if request.owner)
        assert max(owners.values(), default=0) <= self.client_rows, "an owner has too many rows"
        waiting = [
            request
            for request in self.expectations
            if request.state == "waiting" and request not in before
        ]
        for request in self.holders():
            passed = [
                earlier
                for earlier in waiting
                if earlier.order < request.order and request not in before
            ]
            assert all(
                owners[earlier.owner] == self.client_rows for earlier in passed if earlier.owner
            ), "the head of the queue is passed"
            assert all(earlier.owner for earlier in passed), "the head of the queue is passed"

    def check_lost_rows(self, before: dict[Request, int]) -> None:
        for request, place in before.items():
            if request.state == "suspended":
                assert request.is_client and request not in self.drafts, (
                    "a client that drafts loses its row"
                )
                self.events["suspended"] += 1
            if request.state == "dropped" and request.away is None:
                remaining = [
                    holder
                    for holder, shard in self.holders().items()
                    if shard == place and holder in before
                ]
                assert not any(self.scheduler.is_idle(holder) for holder in remaining), (
                    "an idle client keeps its row"
                )
        super().check_lost_rows(before)


def shared_pages(scheduler: Scheduler, shard: int) -> set[int]:
    pages = [page for prefix in scheduler._pools[shard]._prefixes for page in prefix.pages]
    assert len(pages) == len(set(pages)), "a page is in several prefixes"
    return set(pages)


def run_schedules(seeds: Sequence[int], kind: type[Simulation] = Simulation) -> Counter[str]:
    events: Counter[str] = Counter()
    for seed in seeds:
        device = kind(seed)
        device.run()
        events += device.events
    return events


def test_random_schedules_lose_nothing_and_mix_nothing() -> None:
    events = run_schedules(range(600))
    # Each of these must happen often, or the schedules would test little.
    names = ("done", "cancelled", "shared", "preempted", "reread")
    assert min(events[name] for name in names) > 80


@pytest.mark.full
def test_random_schedules_with_clients_lose_nothing_and_mix_nothing() -> None:
    events = run_schedules(range(400), SimulationWithClients)
    names = ("done", "cancelled", "shared", "preempted", "reread", "dropped")
    names = (*names, "dropped while connected")
    assert min(events[name] for name in names) > 15


@pytest.mark.full
def test_random_schedules_with_idle_clients_lose_nothing_and_starve_nobody() -> None:
    events = run_schedules(range(350), SimulationWithIdleClients)
    names = (
        "done",
        "cancelled",
        "shared",
        "preempted",
        "reread",
        "dropped",
        "suspended",
        "resumed",
    )
    assert min(events[name] for name in names) > 20


class CheckedSimulation(SimulationWithClients):
    """A device whose scheduler also checks itself."""

    def check_pages(self) -> None:
        super().check_pages()
        self.scheduler.check()


def test_a_scheduler_that_is_right_never_contradicts_itself() -> None:
    run_schedules(range(2000, 2100), CheckedSimulation)


# --- a scheduler that contradicts itself ----------------------------------------------------------

Change = Callable[[Scheduler, Request, Request], object]
CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "a page twice": (
        lambda scheduler, running, _: scheduler._pools[0]._free.append(pages_of(scheduler, 0)[0]),
        "pages: 17 are",
    ),
    "a page is lost": (
        lambda scheduler, running, _: scheduler._pools[0]._free.pop(),
        "pages: 15 are",
    ),
    "a prefix that is dropped": (
        lambda scheduler, running, _: scheduler._pools[0]._drop(
            scheduler._contents(running.row or 0).prefixes[0]
        ),
        "a row uses a prefix that the pool has evicted|pages: ",
    ),
    "a holder too many": (
        lambda scheduler, running, _: setattr(
            scheduler._contents(running.row or 0).prefixes[0], "holders", 2
        ),
        "1 rows use a prefix that counts 2",
    ),
    "another page in the table": (
        lambda scheduler, running, _: scheduler.table.__setitem__((running.row, 0), 9),
        "row 0: the table",
    ),
    "a free row with pages": (
        lambda scheduler, *_: scheduler.table.__setitem__((1, 0), 3),
        "row 1: the table",
    ),
    "another row": (
        lambda scheduler, running, _: setattr(running, "row", 1),
        "row 0: its request is running, in row 1",
    ),
    "ended, with a row": (
        lambda scheduler, running, _: setattr(running, "state", "done"),
        "row 0: its request is done",
    ),
    "more tokens than it may have": (
        lambda scheduler, running, _: running.tokens.extend([1] * 30),
        "row 0: 5 of 36 tokens are read, and the limit is 8",
    ),
    "more is read than there is": (
        lambda scheduler, running, _: running.tokens.clear(),
        "row 0: 5 of 0 tokens are read",
    ),
    "waits with a row": (
        lambda scheduler, _, waiting: setattr(waiting, "row", 1),
        "waiting: requests",
    ),
    "waits and is cancelled": (
        lambda scheduler, _, waiting: setattr(waiting, "state", "cancelled"),
        "waiting: requests",
    ),
    "waits twice": (
        lambda scheduler, _, waiting: scheduler._waiting.append(waiting),
        "waiting: requests",
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_named_and_clearing_helps(name) -> None:
    change, message = CONTRADICTIONS[name]
    scheduler = make_scheduler()
    running = scheduler.submit([1] * 6, max_new_tokens=2)
    read_all(scheduler)
    scheduler.limit_rows(1)
    waiting = scheduler.submit([2] * 6, max_new_tokens=2)
    scheduler.check()
    change(scheduler, running, waiting)
    with pytest.raises(RuntimeError, match=message):
        scheduler.check()
    scheduler.clear()
    scheduler.check()
    assert (running.state, running.row) == ("cancelled", None)
    assert (waiting.state, waiting.row) == ("cancelled", None)
    assert (scheduler.idle, scheduler.occupied, scheduler.free_pages) == (True, 0, 16)
    following = scheduler.submit([1] * 6, max_new_tokens=2)
    assert first_chunks(read_all(scheduler)) == [(0, None)]
    assert following.state == "running"


# --- schedulers that are wrong, and are found out -------------------------------------------------


def without_the_token_after(monkeypatch: pytest.MonkeyPatch) -> None:
    register = PagePool.register

    def find(pool, tokens, chunk, max_length, tenant):
        chain, children = [], pool._first
        for end in range(chunk, max_length + 1, chunk):
            if (prefix := children.get(chunk_key(tokens, end - chunk, end, tenant)[:-1])) is None:
                break
            chain.append(prefix)
            children = prefix.below
        return chain

    monkeypatch.setattr(PagePool, "find", find)
    monkeypatch.setattr(
        PagePool, "register", lambda pool, above, key, *rest: register(pool, above, key[:-1], *rest)
    )


def freeing_what_another_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    let_go = PagePool.let_go

    def let_go_for_all(pool, prefix):
        let_go(pool, prefix)
        if prefix.holders and not prefix.below:
            pool._drop(prefix)

    monkeypatch.setattr(PagePool, "let_go", let_go_for_all)


def dropping_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    def take(pool, count):
        while count > len(pool._free) and pool._prefixes:
            leaves = (prefix for prefix in pool._prefixes if not prefix.below)
            pool._drop(min(leaves, key=lambda prefix: prefix.used))
        return [pool._free.pop() for _ in range(count)] if count <= len(pool._free) else None

    monkeypatch.setattr(PagePool, "take", take)


def reading_into_shared_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    was_read = Scheduler.was_read

    def again(scheduler, read, prefix_state):
        was_read(scheduler, read, prefix_state)
        contents = scheduler._rows[read.row]
        if (
            contents is not None
            and contents.request is read.request
            and read.count == scheduler._chunk
            and not read.is_last
        ):
            contents.prefilled = read.start

    monkeypatch.setattr(Scheduler, "was_read", again)


def with_unused_entries_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    free_row = Scheduler._free_row

    def leave_zeros(scheduler, request):
        row = request.row
        free_row(scheduler, request)
        scheduler.table[row] = 0

    monkeypatch.setattr(Scheduler, "_free_row", leave_zeros)


def losing_what_was_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    preemptions = Scheduler._preempt

    def lose(scheduler, request):
        preemptions(scheduler, request)
        del request.tokens[request.prompt_length :]

    monkeypatch.setattr(Scheduler, "_preempt", lose)


def with_a_first_chunk_of_one_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the first chunk after a shared prefix to one page."""
    next_chunk = Scheduler._next_chunk

    def short(scheduler, shard, budget):
        read = next_chunk(scheduler, shard, budget)
        if read is not None and read.is_first and read.start and read.count > scheduler._page:
            return replace(read, count=scheduler._page, width=scheduler._chunk, is_last=False)
        return read

    monkeypatch.setattr(Scheduler, "_next_chunk", short)


def with_the_prefix_state_of_the_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    next_chunk = Scheduler._next_chunk

    def first(scheduler, shard, budget):
        read = next_chunk(scheduler, shard, budget)
        return read and replace(
            read,
            prefix_state=(
                scheduler._rows[read.row].prefixes[0].prefix_state if read.prefix_state else None
            ),
        )

    monkeypatch.setattr(Scheduler, "_next_chunk", first)


def with_the_oldest_giving_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*items, key=None):
        return max(*items) if key is None else min(*items, key=key)

    monkeypatch.setattr("specjax.serving.scheduler.max", wrong, raising=False)


def without_pages_for_what_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Scheduler.reserve
    monkeypatch.setattr(Scheduler, "reserve", lambda scheduler, ahead: reserve(scheduler, 1))


def sharing_what_decoding_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    def register(scheduler, request, length):
        contents, pool = scheduler._contents(request.row), scheduler._pool(request.row)
        count = scheduler._chunk // scheduler._page
        for start in range(
            len(contents.prefixes) * scheduler._chunk, length - scheduler._chunk, scheduler._chunk
        ):
            end = start + scheduler._chunk
            above = contents.prefixes[-1] if contents.prefixes else None
            key = chunk_key(request.tokens, start, end, request.tenant)
            entry = expected_entry(request.tokens, end - 1)
            contents.prefixes.append(
                pool.register(above, key, tuple(contents.pages[:count]), entry)
            )
            del contents.pages[:count]

    monkeypatch.setattr(Scheduler, "_note_end", register)


def rereading_with_evictions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PagePool, "take_free", PagePool.take)


def rereading_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    next_rereads = Scheduler.next_rereads

    def always(scheduler):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Scheduler, "idle", True)
            return next_rereads(scheduler)

    monkeypatch.setattr(Scheduler, "next_rereads", always)


def rereading_from_one_page_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    next_reread = Scheduler._next_reread

    def late(scheduler, shard):
        chunk = next_reread(scheduler, shard)
        return chunk and replace(chunk, start=chunk.start + scheduler._page)

    monkeypatch.setattr(Scheduler, "_next_reread", late)


def rereading_the_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read a chunk that ends with its text, so that the token after it is not known."""
    next_reread = Scheduler._next_reread

    def one_more(scheduler, shard):
        if (text := scheduler._ended.first(shard)) is None:
            return None
        extended = EndedText([*text.tokens, 0], text.tenant, shard)
        scheduler._ended._texts[scheduler._ended._texts.index(text)] = extended
        chunk = next_reread(scheduler, shard)
        if extended in scheduler._ended._texts:
            extended.tokens = text.tokens
        if chunk is not None and chunk.text is extended:
            return replace(chunk, request=replace(chunk.request, tokens=list(text.tokens)))
        return chunk

    monkeypatch.setattr(Scheduler, "_next_reread", one_more)


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (sharing_what_decoding_wrote, "what decoding wrote is shared"),
        (rereading_with_evictions, "a prefix is evicted"),
        (rereading_beside_others, "beside others"),
        (rereading_from_one_page_too_late, "a chunk does not begin at a multiple|not the text's"),
        (rereading_the_last_token, "nobody's text is read|the token after the chunk"),
        (without_the_token_after, "the cache is not the text's"),
        (freeing_what_another_holds, "a page is in |the cache is not the text's"),
        (dropping_what_is_held, "a page is in |the cache is not the text's"),
        (reading_into_shared_pages, "a shared page is written"),
        (
            with_unused_entries_of_zero,
            "an unused entry is not out of range|a page is in |the rows that use a prefix's pages",
        ),
        (losing_what_was_generated, "tokens are lost"),
        (with_a_first_chunk_of_one_page, "a chunk is not full"),
        (with_the_prefix_state_of_the_first_chunk, "prefix_state"),
        (with_the_oldest_giving_way, "was preempted"),
        (without_pages_for_what_is_ahead, "no page is there"),
    ],
)
def test_a_wrong_scheduler_is_found_out(mutant, message, monkeypatch) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=message):
        run_schedules(range(200))


def test_what_a_text_has_read_itself_is_not_another_ones() -> None:
    scheduler = Scheduler(rows=1, pages=4, page=4, chunk=4, capacity=16)
    request = scheduler.submit([1] * 6, max_new_tokens=10)

    def read() -> None:
        while reads := scheduler.next_reads():
            for chunk in reads:
                scheduler.was_read(chunk, prefix_state=None)

    read()
    scheduler.decoded(row=0, tokens=[2] * 6, done=False)
    for _ in range(2):
        scheduler._preempt(request)
        read()
    assert (request.preemptions, request.cached) == (2, 0)


def test_no_more_rows_are_given_out_than_the_limit_allows() -> None:
    scheduler = make_scheduler(rows=3)
    scheduler.limit_rows(1)
    first, second, third = (scheduler.submit([1, 2], 4) for _ in range(3))
    read_all(scheduler)
    states = [request.state for request in (first, second, third)]
    assert states == ["running", "waiting", "waiting"]
    scheduler.limit_rows(2)
    read_all(scheduler)
    states = [request.state for request in (first, second, third)]
    assert states == ["running", "running", "waiting"]
    scheduler.limit_rows(1)  # running requests keep their rows
    finish(scheduler, first)
    read_all(scheduler)
    assert [request.state for request in (second, third)] == ["running", "waiting"]
    finish(scheduler, second)
    read_all(scheduler)
    assert third.state == "running"


def test_who_is_held_back_lets_others_pass_and_comes_first_afterwards() -> None:
    scheduler = make_scheduler(rows=2)
    scheduler.hold_back(["logprobs"])
    with_logprobs = scheduler.submit([1, 2], 4, needs="logprobs")
    plain = scheduler.submit([1, 2], 4)
    assert scheduler.can_go_on()
    read_all(scheduler)
    assert (with_logprobs.state, plain.state, scheduler.waiting) == ("waiting", "running", 1)
    finish(scheduler, plain)
    assert not scheduler.can_go_on()
    later = scheduler.submit([1, 2], 4)
    scheduler.limit_rows(1)
    scheduler.hold_back([])
    read_all(scheduler)
    assert (with_logprobs.state, later.state) == ("running", "waiting")


# --- priority -------------------------------------------------------------------------------------


def started(scheduler: Scheduler) -> list[Request]:
    """Give rows to waiting requests, and return all that have one, by row."""
    scheduler.can_go_on()
    requests = (scheduler.request_of(row) for row in range(scheduler.table.shape[0]))
    return [request for request in requests if request is not None]


def one_row(**options: Any) -> Scheduler:
    return Scheduler(rows=1, pages=8, page=8, chunk=8, capacity=64, **options)


def test_the_lowest_number_gets_a_row_first_and_equals_in_their_order() -> None:
    scheduler = one_row()
    numbers = [0, 5, -3, 0, -3, 2]
    requests = [scheduler.submit([1, 2], 4, priority=number) for number in numbers]
    order = []
    for _ in requests:
        (running,) = started(scheduler)
        order.append(requests.index(running))
        scheduler.cancel(running)
    assert order == [2, 4, 0, 3, 5, 1]


def test_a_row_is_not_taken_by_a_lower_number_alone() -> None:
    scheduler = one_row()
    first = scheduler.submit([1, 2], 4, priority=9)
    assert started(scheduler) == [first]
    scheduler.submit([1, 2], 4, priority=-9)
    assert started(scheduler) == [first]


def test_where_pages_run_out_the_highest_number_is_preempted_first() -> None:
    scheduler = Scheduler(rows=3, pages=6, page=8, chunk=8, capacity=48)
    requests = [scheduler.submit([1, 2], 40, priority=number) for number in (1, 9, 0)]
    assert len(started(scheduler)) == 3
    while chunks := scheduler.next_reads():
        for chunk in chunks:
            scheduler.was_read(chunk, None)
    while not scheduler.preemptions:
        scheduler.reserve(8)
        for row in scheduler.running:
            scheduler.decoded(row, [3] * 8, done=False)
        scheduler.check()
    assert [request.state for request in requests] == ["running", "waiting", "running"]


def test_who_has_waited_for_long_goes_before_all_numbers() -> None:
    scheduler = one_row(urgent_after=3)
    first = scheduler.submit([1, 2], 4)
    started(scheduler)
    late = scheduler.submit([1, 2], 4, priority=100)
    for _ in range(3):
        scheduler.reserve(1)
    favoured = scheduler.submit([1, 2], 4, priority=-100)
    scheduler.cancel(first)
    assert started(scheduler) == [late]
    scheduler.cancel(late)
    assert started(scheduler) == [favoured]


@pytest.mark.parametrize("seed", range(8))
def test_random_priorities_starve_nobody(seed) -> None:
    """Check that each request ends while requests with lower numbers keep coming."""
    rng = random.Random(seed)
    scheduler = Scheduler(rows=2, pages=7, page=8, chunk=8, capacity=48, urgent_after=20)
    slow = [scheduler.submit([1, 2, 3], 30, priority=50) for _ in range(3)]
    for _ in range(2000):
        if scheduler.waiting < 6:
            scheduler.submit([1] * rng.randint(1, 8), 20, priority=rng.randint(0, 3))
        scheduler.can_go_on()
        for chunk in scheduler.next_reads():
            scheduler.was_read(chunk, None)
        if not scheduler.running:
            continue
        scheduler.reserve(4)
        for row in scheduler.running:
            request = scheduler.request_of(row)
            room = request.max_length - len(request.tokens)
            count = min(rng.randint(1, 4), room)
            scheduler.decoded(row, [4] * count, done=count == room)
        scheduler.check()
        if all(request.state == "done" for request in slow):
            return
    raise AssertionError([request.state for request in slow])
