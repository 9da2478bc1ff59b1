"""Every rule of the scheduler by itself, and all of them together under random schedules."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest

from specjax.errors import InputError
from specjax.serving.pages import PagePool
from specjax.serving.scheduler import PrefillChunk, QueueFullError, Request, Scheduler

PAGE, CHUNK = 2, 4


def scheduler(**changes: Any) -> Scheduler:
    sizes: dict[str, Any] = {"rows": 2, "pages": 16, "page": PAGE, "chunk": CHUNK, "capacity": 32}
    return Scheduler(**(sizes | changes))


def read_all(made: Scheduler, budget: int | None = None) -> list[PrefillChunk]:
    """Everything that can be read now. The prefix state is the text up to there."""
    done = []
    while reads := made.next_reads(budget):
        for read in reads:
            made.was_read(read, prefix_state=tuple(read.request.tokens[: read.start + read.count]))
        done += reads
    return done


def pages_of(made: Scheduler, row: int) -> list[int]:
    return [page for page in made.table[row].tolist() if page < made._pools[0].total]


def finish(made: Scheduler, request: Request) -> None:
    assert request.row is not None
    made.decoded(request.row, [0], done=True)


# --- who has a row --------------------------------------------------------------------------------


def test_rows_are_given_in_the_order_of_submission() -> None:
    made = scheduler()
    first, second, third, fourth = (
        made.submit([token, token], max_new_tokens=2) for token in range(4)
    )
    read_all(made)
    assert [first.row, second.row, third.row, fourth.row] == [0, 1, None, None]
    assert (made.waiting, made.running, made.occupied) == (2, [0, 1], 2)
    finish(made, second)
    read_all(made)
    assert (third.row, fourth.row, made.request_of(1)) == (1, None, third)
    finish(made, first)
    read_all(made)
    assert (fourth.row, made.waiting) == (0, 0)


def test_nobody_passes_the_head_of_the_line() -> None:
    made = scheduler(rows=3, pages=5)
    running = made.submit([1] * 6, max_new_tokens=2)
    read_all(made)
    assert len(pages_of(made, 0)) == 3
    long = made.submit(
        [2] * 5, max_new_tokens=2
    )  # two pages for a chunk, one after it, and one for the text that runs
    short = made.submit([3], max_new_tokens=1)
    assert read_all(made) == []
    assert (long.state, short.state, made.waiting) == ("waiting", "waiting", 2)
    finish(made, running)
    assert [read.request for read in read_all(made)] == [long, short]


def test_prompts_of_one_length_are_read_one_after_another_the_oldest_first() -> None:
    made = scheduler(rows=3)
    requests = [made.submit([token] * 7, max_new_tokens=2) for token in range(3)]
    reads = read_all(made)
    assert [read.request for read in reads] == [request for request in requests for _ in range(2)]
    assert [read.is_first for read in reads] == [True, False] * 3
    assert [read.is_last for read in reads] == [False, True] * 3


def test_the_prompt_with_the_fewest_pieces_left_comes_first() -> None:
    made = scheduler(rows=3, pages=32)
    long = made.submit([1] * 13, max_new_tokens=2)
    (read,) = made.next_reads()
    made.was_read(read, None)
    middle, short = made.submit([2] * 9, max_new_tokens=2), made.submit([3] * 2, max_new_tokens=2)
    reads = read_all(made)
    assert [(read.request, read.start) for read in reads] == [
        *((short, 0), (long, 4), (long, 8)),  # it has as few left as the middle one, and is older
        *((middle, 0), (middle, 4)),
    ]
    assert made.running == [0, 1, 2]


def test_nobody_is_passed_more_often_than_is_said() -> None:
    """Short prompts come all the time; the long one has a turn after each three."""
    made = scheduler(rows=2, pages=32)
    long, order = made.submit([1] * 17, max_new_tokens=1), []
    made.was_read(*made.next_reads(), prefix_state=None)
    while long.state == "reading" and len(order) < 20:
        made.submit([2, len(order) % 2], max_new_tokens=0)
        (read,) = made.next_reads()
        made.was_read(read, None)
        order.append(read.request is long)
    assert order == [
        *[False, False, False, True] * 2,
        True,
    ]  # at last it has as few pieces left as they, and is older


def test_whose_beginning_is_known_has_fewer_pieces_left() -> None:
    made = scheduler(rows=2, pages=32)
    text = list(range(13))
    finish(made, (made.submit(text, max_new_tokens=1), read_all(made))[0])
    middle, known = (
        made.submit([1] * 7, max_new_tokens=1),
        made.submit([*text, 7], max_new_tokens=1),
    )
    assert [(read.request, read.start) for read in read_all(made)] == [
        (known, 12),
        (middle, 0),
        (middle, 4),
    ]


def test_a_prompt_that_waits_for_its_turn_moves_with_its_row() -> None:
    made = scheduler(rows=3, pages=32)
    long = made.submit([1] * 13, max_new_tokens=2)
    made.was_read(*made.next_reads(), prefix_state=None)
    short = made.submit([2] * 2, max_new_tokens=2)
    made.was_read(*made.next_reads(), prefix_state=None)
    assert (long.state, short.state) == ("reading", "running")
    made.swap([1, 0, 2])
    (read,) = made.next_reads()
    assert (read.request, read.row, read.start, read.is_first) == (long, 1, 4, False)


def test_a_prompt_is_read_but_for_its_last_token() -> None:
    made = scheduler(last_widths=(1, 2))
    spans = {}
    for length in (1, 2, 3, 4, 5, 6, 9, 12):
        request = made.submit([length] * length, max_new_tokens=1)
        spans[length] = [(read.start, read.count, read.width) for read in read_all(made)]
        assert request.state == "running"
        finish(made, request)
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
    made = scheduler(last_widths=(1,))
    wide, narrow = made.submit([1] * 5, max_new_tokens=1), made.submit([2] * 2, max_new_tokens=1)
    assert made.next_reads(budget=3) == []
    (read,) = made.next_reads(budget=4)
    assert (read.request, read.width) == (wide, 4)
    made.was_read(read, None)
    (read,) = made.next_reads(budget=1)
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
    made = scheduler(pages=8)
    with pytest.raises(InputError, match=message):
        made.submit([1] * length, max_new_tokens)
    assert made.idle


def test_the_largest_text_that_pages_hold_is_served() -> None:
    made = scheduler(pages=8)
    request = made.submit([1] * 10, max_new_tokens=7)  # the last token is never written
    read_all(made)
    assert made.reserve(100) == []
    assert (request.state, len(pages_of(made, 0))) == ("running", 8)


def test_a_full_line_refuses() -> None:
    made = scheduler(rows=1, max_waiting=1)
    made.submit([1], max_new_tokens=1)  # for the row that is free
    made.submit([2], max_new_tokens=1)
    with pytest.raises(QueueFullError, match="max_waiting"):
        made.submit([3], max_new_tokens=1)
    read_all(made)
    with pytest.raises(QueueFullError, match="1 requests wait"):
        made.submit([3], max_new_tokens=1)
    finish(made, made.request_of(0) or pytest.fail("the row is free"))
    read_all(made)
    made.submit([3], max_new_tokens=1)
    assert made.waiting == 1


def test_rows_that_are_not_given_out_yet_do_not_make_the_line_longer() -> None:
    made = scheduler(rows=4, max_waiting=1)
    made.limit_rows(1)
    made.submit([1], max_new_tokens=1)
    made.submit([2], max_new_tokens=1)
    with pytest.raises(QueueFullError, match="2 requests wait"):
        made.submit([3], max_new_tokens=1)
    made.limit_rows(4)
    made.submit([3], max_new_tokens=1)


# --- pages ----------------------------------------------------------------------------------------


def test_unused_entries_of_the_table_are_out_of_range() -> None:
    made = scheduler()
    assert made.table.shape == (2, 16)
    assert (made.table == 16).all()
    request = made.submit([1] * 6, max_new_tokens=2)
    read_all(made)
    assert (made.table[0, :3] < 16).all()
    assert (made.table[0, 3:] == 16).all()
    assert (made.table[1] == 16).all()
    finish(made, request)
    assert (made.table == 16).all()


def test_running_rows_have_pages_for_what_they_may_become() -> None:
    made = scheduler()
    made.submit([1] * 4, max_new_tokens=10)  # 3 entries, at most 13
    read_all(made)
    for ahead, pages in ((0, 2), (1, 2), (2, 3), (5, 4), (10, 7), (100, 7)):
        assert made.reserve(ahead) == []
        assert len(pages_of(made, 0)) == pages
    made.decoded(0, [5, 6, 7], done=False)
    assert len(pages_of(made, 0)) == 7


def test_the_newest_gives_way_and_is_read_again_with_its_tokens() -> None:
    made = scheduler(pages=8)
    old, new = made.submit([1] * 5, max_new_tokens=9), made.submit([2] * 5, max_new_tokens=4)
    read_all(made)
    assert made.reserve(2) == []
    for row in made.running:
        made.decoded(row, [8, 9], done=False)
    later = made.submit([3], max_new_tokens=1)
    assert made.reserve(5) == [new]
    assert (new.state, new.row, new.preemptions, new.tokens) == (
        "waiting",
        None,
        1,
        [2] * 5 + [8, 9],
    )
    assert (old.preemptions, made.running, made.waiting) == (0, [0], 2)
    finish(made, old)
    reads = read_all(made)
    # It is before those that came later, and its first chunk is where it was left.
    assert [(read.request, read.start, read.count) for read in reads] == [
        (new, 4, 2),
        (later, 0, 0),
    ]
    made.reserve(100)
    assert (
        len(pages_of(made, new.row or 0)) == 4
    )  # of 5 + 4 - 1 entries: the limit stays where it was


def test_who_gave_way_is_the_head_of_the_line_again() -> None:
    """A later request would fit into what is left, and does not pass it."""
    scheduled = scheduler(pages=8)
    scheduled.submit([1] * 5, max_new_tokens=9)
    new = scheduled.submit([2] * 5, max_new_tokens=4)
    read_all(scheduled)
    later = scheduled.submit([3], max_new_tokens=1)
    assert scheduled.reserve(7) == [new]
    assert 1 <= scheduled.free_pages < 3  # enough for one of the two
    assert (scheduled.next_reads(), new.state, later.state) == ([], "waiting", "waiting")


def test_who_reads_gives_way_to_the_older_who_run() -> None:
    made = scheduler(pages=6, capacity=12)
    old = made.submit([1] * 3, max_new_tokens=9)
    read_all(made)
    new = made.submit([2] * 6, max_new_tokens=2)
    (read,) = made.next_reads()
    made.was_read(read, None)
    assert (new.state, made.reserve(9)) == ("reading", [new])
    assert (made.running, old.state, new.state) == ([0], "running", "waiting")


def test_whoever_gives_way_is_not_passed_by_one_who_has_a_row_and_no_pages_yet() -> None:
    made = scheduler(rows=3, pages=7, capacity=14)
    first, second = made.submit([1] * 3, max_new_tokens=9), made.submit([2] * 2, max_new_tokens=9)
    read_all(made)
    third = made.submit([3] * 3, max_new_tokens=2)
    assert made.next_reads(budget=1) == []  # it has a row, and the budget is too small
    assert third.state == "reading"
    assert made.reserve(100) == [second, third]
    assert (first.preemptions, second.preemptions, third.preemptions) == (0, 1, 0)
    finish(made, first)
    assert [read.request for read in read_all(made)] == [second, third]


def test_a_newcomer_leaves_to_those_who_run_what_they_need_next() -> None:
    made = scheduler(rows=3, pages=8)
    for token in (1, 2):
        made.submit([token], max_new_tokens=8)
    read_all(made)
    made.reserve(4)  # 2 pages each
    for row in made.running:
        made.decoded(row, [7, 7, 7], done=False)
    third = made.submit(
        [3] * 4, max_new_tokens=2
    )  # 4 pages are free: it needs 3, and each of the others 2 more
    read_all(made)
    assert third.state == "waiting"
    finish(made, made.request_of(0) or pytest.fail("the row is free"))
    read_all(made)
    assert third.state == "running"


# --- prefixes -------------------------------------------------------------------------------------


def starts(reads: Sequence[PrefillChunk]) -> list[tuple[int, Any]]:
    return [(read.start, read.prefix_state) for read in reads if read.is_first]


def test_a_common_beginning_is_read_once() -> None:
    made = scheduler(rows=4)
    common = [1, 2, 3, 4, 5, 6, 7, 8]
    for token in range(4):
        made.submit([*common, 9, token], max_new_tokens=2)
    reads = read_all(made)
    assert starts(reads) == [(0, None)] + [(8, tuple(common))] * 3
    assert sum(read.count for read in reads) == 9 + 3
    assert {tuple(pages_of(made, row)[:4]) for row in range(4)} == {tuple(pages_of(made, 0)[:4])}
    assert len({page for row in range(4) for page in pages_of(made, row)}) == 4 + 4


def test_a_prefix_holds_only_where_the_token_after_it_is_the_same() -> None:
    made = scheduler(rows=4)
    for after in (5, 6, 5):
        made.submit([1, 2, 3, 4, after, 9], max_new_tokens=2)
    assert starts(read_all(made)) == [
        (0, None),
        (4, (1, 2, 3, 4)),
        (0, None),
    ]  # the third one has less left to read
    assert pages_of(made, 0)[:2] == pages_of(made, 2)[:2] != pages_of(made, 1)[:2]


def test_a_text_goes_on_from_a_prefix_and_extends_it() -> None:
    made = scheduler()
    text = list(range(14))
    for length, start in ((5, 0), (10, 4), (13, 8), (13, 12), (14, 12)):
        request = made.submit(text[:length], max_new_tokens=1)
        reads = read_all(made)
        assert starts(reads) == [(start, tuple(text[:start]) or None)]
        assert sum(read.count for read in reads) == length - 1 - start
        finish(made, request)


def test_a_prompt_that_is_known_is_not_read_at_all() -> None:
    made = scheduler(last_widths=(1,))
    for _ in range(2):
        made.submit([1, 2, 3, 4, 5], max_new_tokens=2)
    first, second = read_all(made)
    assert (first.start, first.count) == (0, 4)
    assert (second.start, second.count, second.width, second.is_first, second.is_last) == (
        4,
        0,
        1,
        True,
        True,
    )


def test_a_prompt_that_is_read_anew_has_its_borders_again_from_then_on() -> None:
    """Of two prompts of three chunks, and room for the prefix states of three."""
    made = scheduler(prefix_states=3, pages=24)
    one, other = [1] * 13, [2] * 13

    def begins_at(tokens: list[int]) -> int:
        request = made.submit(tokens, max_new_tokens=1)
        first, *_ = read_all(made)
        finish(made, request)
        return first.start

    assert begins_at(one) == begins_at(other) == 0
    assert begins_at(one) == 0  # its prefix states went when the other's were made
    assert begins_at(one) == begins_at(one) == 12
    assert made._pools[0].available == 24  # what was read twice takes no pages twice


def test_what_was_generated_is_no_prefix() -> None:
    made = scheduler()
    made.submit([1, 2, 3], max_new_tokens=8)
    read_all(made)
    made.reserve(8)
    made.decoded(0, [4, 5, 6, 7], done=True)
    made.submit([1, 2, 3, 4, 5, 6], max_new_tokens=1)
    assert starts(read_all(made)) == [(0, None)]


def test_prefixes_go_when_pages_are_needed_and_never_one_that_is_held() -> None:
    made = scheduler(rows=3, pages=8)
    forgotten = made.submit([1] * 5, max_new_tokens=1)
    read_all(made)
    finish(made, forgotten)
    held = made.submit([2] * 5, max_new_tokens=1)
    read_all(made)
    assert made.free_pages == 6  # two of them hold a prefix
    long = made.submit([3] * 9, max_new_tokens=2)
    read_all(made)
    made.reserve(100)
    assert (held.preemptions, made.free_pages) == (0, 0)
    finish(made, long)
    again = made.submit([2] * 5, max_new_tokens=1)
    assert starts(read_all(made)) == [(4, (2,) * 4)]
    for request in (held, again):
        finish(made, request)
    made.submit([1] * 5, max_new_tokens=1)
    assert starts(read_all(made)) == [(0, None)]


# --- cancelling -----------------------------------------------------------------------------------


def test_requests_are_cancelled_in_every_state_and_twice() -> None:
    made = scheduler(rows=3, chunk=2)
    done, running, reading, waiting = (
        made.submit([token] * 3, max_new_tokens=4) for token in range(4)
    )
    for _ in range(2):
        made.was_read(*made.next_reads(), prefix_state=None)
    finish(made, done)
    made.cancel(waiting)
    (read,) = made.next_reads()
    assert (read.request, done.state, running.state, reading.state) == (
        reading,
        "done",
        "running",
        "reading",
    )
    for request in (done, running, reading, waiting):
        before = made.free_pages, request.row is not None
        made.cancel(request)
        assert made.free_pages == before[0] + before[1]
        made.cancel(request)
        assert (request.row, made.free_pages) == (None, sum(before))
    assert [request.state for request in (done, running, reading, waiting)] == [
        "done",
        "cancelled",
        "cancelled",
        "cancelled",
    ]
    assert (made.idle, made.free_pages, made.waiting) == (True, 16, 0)
    made.was_read(read, prefix_state=None)  # the device had begun
    assert (made.idle, made.running, made.free_pages) == (True, [], 16)


def test_what_is_read_of_a_cancelled_request_is_not_told_of_the_next_in_its_row() -> None:
    made = scheduler(rows=1)
    cancelled = made.submit([1] * 5, max_new_tokens=2)
    (read,) = made.next_reads()
    made.cancel(cancelled)
    following = made.submit([2] * 9, max_new_tokens=2)
    (first,) = made.next_reads()
    assert (first.row, first.request) == (read.row, following)
    made.was_read(read, prefix_state="of the other")
    assert following.state == "reading"
    made.was_read(first, prefix_state="its own")
    (second,) = made.next_reads()
    assert (second.start, second.is_first) == (4, False)
    made.submit([1] * 5, max_new_tokens=2)
    made.was_read(second, prefix_state=None)
    finish(made, following)
    assert starts(read_all(made)) == [(0, None)]


# --- rows that are rearranged, and shards ---------------------------------------------------------


def test_rows_are_rearranged_with_all_that_they_have() -> None:
    made = scheduler(rows=3)
    first = made.submit([1] * 3, max_new_tokens=4)
    second = made.submit([2] * 9, max_new_tokens=4)
    made.was_read(*made.next_reads(), prefix_state=None)
    made.was_read(*made.next_reads(), prefix_state=None)
    before = [pages_of(made, row) for row in range(3)]
    made.swap([2, 0, 1])
    assert [pages_of(made, row) for row in range(3)] == [before[2], before[0], before[1]]
    assert (first.row, second.row, made.running) == (1, 2, [1])
    assert [made.request_of(row) for row in range(3)] == [None, first, second]
    (read,) = made.next_reads()
    assert (read.row, read.start, read.is_first) == (2, 4, False)
    made.was_read(read, prefix_state=None)
    assert made.running == [1, 2]


def test_shards_have_their_own_pages_prefixes_and_reads() -> None:
    made = scheduler(rows=4, shards=2)
    requests = [made.submit([1] * 6, max_new_tokens=2) for _ in range(4)]
    reads = made.next_reads()
    assert [(read.row, read.start) for read in reads] == [(0, 0), (2, 0)]
    for read in reads:
        made.was_read(read, prefix_state=read.row)
    # Each goes on from what its own shard has read.
    assert starts(read_all(made)) == [(4, 0), (4, 2)]
    assert [request.row for request in requests] == [0, 2, 1, 3]
    assert pages_of(made, 0)[:2] == pages_of(made, 1)[:2] == pages_of(made, 2)[:2]
    finish(made, requests[0])
    finish(made, requests[2])
    following = made.submit([1] * 6, max_new_tokens=2)
    assert starts(read_all(made)) == [(4, 0)]
    assert following.row == 0


def test_requests_that_come_together_are_spread_over_the_shards() -> None:
    made = scheduler(rows=8, shards=2)
    one = made.submit([9] * 3, max_new_tokens=2)
    read_all(made)
    requests = [made.submit([token] * 5, max_new_tokens=2) for token in range(5)]
    made.next_reads()
    assert one.row == 0
    assert [request.row for request in requests] == [4, 1, 5, 2, 6]


def test_texts_that_need_no_pages_yet_are_spread_over_the_shards() -> None:
    made = scheduler(rows=4, shards=2, pages=1, capacity=2)
    requests = [made.submit([token], max_new_tokens=1) for token in range(3)]
    made.next_reads()
    assert [request.row for request in requests] == [0, 2, None]


def test_two_that_read_the_same_at_a_time_mix_nothing() -> None:
    made = scheduler(rows=4, shards=2, pages=13)
    text = [0, 1, 2, 3, 7, 4, 5, 6, 7, 8, 9, 10, 11]
    oldest, passing = made.submit([12], max_new_tokens=14), made.submit([13], max_new_tokens=1)
    old = made.submit(text, max_new_tokens=2)
    read_all(made)
    assert (oldest.row, passing.row, old.row) == (0, 2, 1)
    finish(made, passing)
    new = made.submit(text, max_new_tokens=2)
    made.was_read(*made.next_reads(), prefix_state=(0, 1, 2, 3))
    assert made.reserve(13) == [old]
    # It goes on in the other shard, before the new one, which has begun there.
    reads = [(read.request, read.start) for read in read_all(made)]
    assert reads == [(old, 4), (old, 8), (new, 4), (new, 8)]
    for request in (oldest, old, new):
        finish(made, request)
    made.submit([14] * 9, max_new_tokens=2)  # in the first shard
    last = made.submit([0, 1, 2, 3, 7, 8, 9, 10, 11], max_new_tokens=1)
    assert [read.start for read in read_all(made) if read.request is last] == [4]
    assert last.row == 2


def test_where_a_shard_is_short_of_pages_the_other_gives_nobody_up() -> None:
    made = scheduler(rows=4, shards=2, pages=4, capacity=9)
    requests = [made.submit([token] * 3, max_new_tokens=6) for token in range(4)]
    read_all(made)
    made.swap([0, 1, 3, 2])
    assert [request.row for request in requests] == [0, 3, 1, 2]
    made.decoded(0, [5], done=True)
    assert made.reserve(6) == [requests[3]]
    assert made.running == [1, 3]


# --- clients --------------------------------------------------------------------------------------


def held(made: Scheduler, *requests: Request) -> None:
    read_all(made)
    assert [request.state for request in requests] == ["held"] * len(requests)


def test_a_client_holds_its_row_and_is_not_decoded() -> None:
    made = scheduler()
    request = made.submit([1] * 6, max_new_tokens=4, is_client=True)
    held(made, request)
    assert (made.running, made.held, made.occupied, made.idle, made.can_go_on()) == (
        [],
        [0],
        1,
        True,
        False,
    )
    assert made.make_room(request, ahead=3)
    assert len(pages_of(made, 0)) == 4  # of 5 + 3 entries
    made.decoded(0, [2, 3], done=False)
    assert made.make_room(request, ahead=5)
    assert len(pages_of(made, 0)) == 5  # of no more than 6 + 4 - 1
    made.decoded(0, [4, 5], done=True)
    assert (request.state, made.occupied) == ("done", 0)


def test_a_text_that_is_begun_in_its_middle_keeps_its_limit() -> None:
    made = scheduler(capacity=8)
    request = made.submit([1] * 7, max_new_tokens=5, prompt_length=3, is_client=True)
    assert request.max_length == 8
    held(made, request)
    assert made.make_room(request, ahead=20)
    assert len(pages_of(made, 0)) == 4


def test_prompts_share_what_was_read_with_those_of_the_same_salt_alone() -> None:
    made = scheduler(pages=64)
    prompt = list(range(11))

    def shared(salt: str) -> int:
        request = made.submit(prompt, max_new_tokens=2, salt=salt)
        read_all(made)
        finish(made, request)
        return request.cached

    salts = ["", "mine", "yours", "", "mine", "yours"]
    assert [shared(salt) for salt in salts] == [0, 0, 0, 8, 8, 8]


def test_a_text_that_was_preempted_finds_what_was_read_under_its_salt() -> None:
    made = scheduler(rows=1)
    request = made.submit(list(range(9)), max_new_tokens=2, salt="mine")
    read_all(made)
    made._preempt(request)
    assert read_all(made)[0].start == 8


def test_only_so_much_is_shared_as_may_be() -> None:
    made = scheduler(rows=1, pages=12)
    finish(made, (made.submit([1] * 13, max_new_tokens=1), read_all(made))[0])
    for shares, start in ((0, 0), (3, 0), (4, 4), (11, 8), (None, 12)):
        request = made.submit([1] * 13, max_new_tokens=1, shares=shares)
        assert read_all(made)[0].start == start
        finish(made, request)


def test_the_client_that_is_away_for_the_longest_is_dropped_for_who_waits() -> None:
    made = scheduler(rows=3)
    first, second, third = (
        made.submit([token, token], max_new_tokens=2, is_client=True) for token in range(3)
    )
    held(made, first, second, third)
    waiting = made.submit([4, 4], max_new_tokens=2)
    assert not made.can_go_on()  # they are all there
    made.set_away(third, True)
    made.set_away(first, True)
    made.set_away(third, True)  # still
    made.set_away(second, True)
    made.set_away(second, False)
    assert made.can_go_on()
    assert (made.dropped, third.state, waiting.row) == ([third], "dropped", 2)
    made.set_away(first, False)
    made.submit([5, 5], max_new_tokens=2)
    read_all(made)
    assert (made.dropped, made.waiting) == ([third], 1)


def test_a_client_that_is_away_is_dropped_for_pages() -> None:
    made = scheduler(rows=3, pages=8)
    client = made.submit([1] * 8, max_new_tokens=4, is_client=True)
    held(made, client)
    waiting = made.submit([2] * 9, max_new_tokens=4)
    assert not made.can_go_on()
    made.set_away(client, True)
    assert made.can_go_on()
    assert (client.state, waiting.state) == ("dropped", "reading")


def test_a_running_text_does_not_give_way_to_clients_that_do_nothing() -> None:
    made = scheduler(pages=8)
    client, running = (
        made.submit([1] * 6, max_new_tokens=4, is_client=True),
        made.submit([2] * 2, max_new_tokens=12),
    )
    read_all(made)
    assert made.reserve(8) == []
    assert (client.state, running.state) == ("held", "running")
    assert made.reserve(12) == []
    assert (client.state, running.state) == ("dropped", "running")  # though it is older


def test_a_newer_text_gives_way_to_a_client() -> None:
    made = scheduler(pages=8)
    client, running = (
        made.submit([1] * 6, max_new_tokens=8, is_client=True),
        made.submit([2] * 6, max_new_tokens=4),
    )
    read_all(made)
    assert made.make_room(client, ahead=8)
    assert (client.state, running.state, made.dropped) == ("held", "waiting", [])
    read_all(made)
    assert running.state == "waiting"  # it would only have to give way again


def test_a_client_gives_way_to_what_is_older() -> None:
    made = scheduler(pages=8)
    running, client = (
        made.submit([2] * 6, max_new_tokens=8),
        made.submit([1] * 6, max_new_tokens=4, is_client=True),
    )
    read_all(made)
    made.reserve(5)
    assert not made.make_room(client, ahead=8)
    assert (client.state, running.state, made.dropped) == ("dropped", "running", [client])


def test_a_client_whose_text_is_being_read_is_preempted() -> None:
    made = scheduler(pages=8)
    running = made.submit([2] * 4, max_new_tokens=13)
    read_all(made)
    client = made.submit([1] * 6, max_new_tokens=4, is_client=True)
    (read,) = made.next_reads()
    made.was_read(read, None)
    assert made.reserve(12) == [client]
    assert (client.state, client.preemptions, made.dropped, running.state) == (
        "waiting",
        1,
        [],
        "running",
    )


def test_rows_of_clients_that_are_away_count_as_free_for_those_who_wait() -> None:
    made = scheduler(rows=1, max_waiting=0)
    client = made.submit([1, 1], max_new_tokens=1, is_client=True)
    held(made, client)
    with pytest.raises(QueueFullError):
        made.submit([2], max_new_tokens=1)
    made.set_away(client, True)
    made.submit([2], max_new_tokens=1)


# --- clients that do nothing ----------------------------------------------------------------------


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def with_idle_clients(clock: Clock, count: int, **sizes: Any) -> tuple[Scheduler, list[Request]]:
    """A scheduler, and clients that have been able to draft since one second after another."""
    made = scheduler(**{"rows": count, "clock": clock, **sizes})
    clients = [made.submit([token] * 6, max_new_tokens=6, is_client=True) for token in range(count)]
    held(made, *clients)
    for request in clients:
        made.may_draft(request)
        clock.now += 1.0
    return made, clients


def test_who_waits_has_the_row_of_the_client_that_is_idle_for_the_longest() -> None:
    clock = Clock()
    made, (first, second) = with_idle_clients(clock, 2, idle_seconds=3.0)
    waiting = made.submit([7, 7], max_new_tokens=2)
    clock.now = 2.9
    assert (made.can_go_on(), made.seconds_until_idle()) == (False, pytest.approx(0.1))
    clock.now = 3.0
    assert made.can_go_on()
    assert (first.state, first.row, waiting.row, second.state) == ("suspended", None, 0, "held")
    assert (made.suspensions, made.dropped, made.waiting) == (1, [], 0)
    assert made.seconds_until_idle() is None  # nobody waits
    made.check()


def test_a_client_that_was_suspended_comes_back_with_its_text_behind_those_who_wait() -> None:
    clock = Clock()
    made, (client,) = with_idle_clients(clock, 1)
    made.decoded(0, [8, 9], done=False)
    running, waiting = made.submit([7, 7], max_new_tokens=2), made.submit([6, 6], max_new_tokens=2)
    read_all(made)
    assert (client.state, running.state) == ("suspended", "running")
    made.has_drafted(client)
    made.check()
    assert (client.state, made.waiting) == ("waiting", 2)
    finish(made, running)
    read_all(made)
    assert (waiting.state, client.state) == ("running", "waiting")
    clock.now += 100.0
    finish(made, waiting)
    reads = read_all(made)
    assert [(read.request, read.start, read.count) for read in reads] == [
        (client, 4, 3)
    ]  # its prompt was read already
    assert (client.state, client.tokens) == ("held", [0] * 6 + [8, 9])
    another = made.submit([5, 5], max_new_tokens=2)
    clock.now += 100.0
    assert not made.can_go_on()  # the draft that it came back with has no verdict yet
    made.may_draft(client)
    assert not made.can_go_on()
    clock.now += 1.0
    assert made.can_go_on()
    assert (client.state, another.state) == ("suspended", "reading")


def test_nobody_takes_the_row_of_a_client_that_drafts_or_where_a_row_is_free() -> None:
    clock = Clock()
    made, (client,) = with_idle_clients(clock, 1, rows=2)
    other = made.submit([7, 7], max_new_tokens=2)
    read_all(made)
    assert (client.state, other.state) == ("held", "running")
    made.submit([6, 6], max_new_tokens=2)
    made.has_drafted(client)
    clock.now += 100.0
    assert (made.next_reads(), client.state, made.seconds_until_idle()) == ([], "held", None)


def test_a_client_that_is_idle_loses_its_pages_before_any_text_gives_way() -> None:
    clock = Clock()
    made, (client,) = with_idle_clients(clock, 1, rows=3, pages=8)
    running, newer = made.submit([2] * 2, max_new_tokens=12), made.submit([3, 3], max_new_tokens=4)
    read_all(made)
    assert made.reserve(8) == []
    assert (client.state, running.state, newer.state) == ("suspended", "running", "running")


def test_a_client_that_becomes_idle_between_two_looks_is_looked_at_once_more() -> None:
    """Nobody else would wake the engine: it must not wait for ever."""
    clock = Clock()
    made, (client,) = with_idle_clients(clock, 1, idle_seconds=2.0)
    made.submit([7, 7], max_new_tokens=2)
    clock.now = 1.999
    assert not made.can_go_on()
    clock.now = 2.001
    assert made.seconds_until_idle() == 0.0
    assert made.can_go_on()
    assert client.state == "suspended"


def test_of_one_owners_clients_the_idle_one_goes_before_the_one_that_is_away() -> None:
    """It loses nothing, and the other one its session, although rows are free."""
    clock = Clock()
    made = scheduler(rows=4, client_rows=2, clock=clock)
    away, idle = (
        made.submit([token] * 6, max_new_tokens=6, is_client=True, owner="one")
        for token in range(2)
    )
    held(made, away, idle)
    made.may_draft(idle)
    made.set_away(away, True)
    clock.now += 10.0
    third = made.submit([7] * 6, max_new_tokens=6, is_client=True, owner="one")
    read_all(made)
    assert (away.state, idle.state, third.state) == ("held", "suspended", "held")
    made.submit([8] * 6, max_new_tokens=6, is_client=True, owner="one")
    read_all(made)
    assert away.state == "dropped"


def test_who_is_away_is_dropped_before_anybody_is_suspended() -> None:
    clock = Clock()
    made, (first, second) = with_idle_clients(clock, 2)
    made.set_away(second, True)
    made.submit([7, 7], max_new_tokens=2)
    assert made.can_go_on()
    assert (first.state, second.state) == ("held", "dropped")


def test_rows_of_idle_clients_count_as_free_for_those_who_wait() -> None:
    clock = Clock()
    made, _ = with_idle_clients(clock, 1, max_waiting=0, idle_seconds=5.0)
    with pytest.raises(QueueFullError):
        made.submit([2], max_new_tokens=1)
    clock.now = 5.0
    made.submit([2], max_new_tokens=1)


def test_a_client_that_was_suspended_is_cancelled_and_cleared() -> None:
    made, (first, second) = with_idle_clients(Clock(), 2, idle_seconds=0.0)
    for _ in range(2):
        made.submit([7, 7], max_new_tokens=2)
    assert made.can_go_on()
    assert (first.state, second.state) == ("suspended", "suspended")
    made.cancel(first)
    made.check()
    made.clear()
    made.check()
    assert (first.state, second.state) == ("cancelled", "cancelled")
    made.has_drafted(second)
    assert made.waiting == 0


def test_two_clients_that_take_turns_with_one_row_both_come_to_their_ends() -> None:
    """And so do requests that come all the time: each turn brings a text on."""
    clock = Clock()
    made = scheduler(rows=1, pages=32, clock=clock)
    clients = [made.submit([token] * 4, max_new_tokens=5, is_client=True) for token in range(2)]
    requests = [made.submit([5, 5], max_new_tokens=2)]
    turns = []
    while not all(client.state == "done" for client in clients):
        read_all(made)
        request = made.request_of(0)
        assert request is not None
        turns.append(request)
        if request.is_client:
            made.decoded(
                0, [1], done=len(request.tokens) + 1 == request.max_length
            )  # one verdict for each turn
            made.may_draft(request)
            clock.now += 1.0
        else:
            finish(made, request)
            requests.append(made.submit([5, 5], max_new_tokens=2))
        made.can_go_on()
        for client in clients:
            made.has_drafted(client)
    assert turns[:3] == [*clients, requests[0]]
    # Nobody passes anybody: between two turns of one client there is one of the other, and at least one request.
    for client in clients:
        places = [place for place, request in enumerate(turns) if request is client]
        assert len(places) == 5
        assert max(second - first for first, second in pairwise(places)) == 3


# --- owners of clients ----------------------------------------------------------------------------


def test_clients_of_one_owner_have_so_many_rows_and_others_pass_them() -> None:
    made = scheduler(rows=4, pages=32, client_rows=2)
    mine = [
        made.submit([token] * 2, max_new_tokens=2, is_client=True, owner="me") for token in range(3)
    ]
    yours = made.submit([4, 4], max_new_tokens=2, is_client=True, owner="you")
    plain = made.submit([5, 5], max_new_tokens=2)
    read_all(made)
    assert [request.state for request in (*mine, yours, plain)] == [
        "held",
        "held",
        "waiting",
        "held",
        "running",
    ]
    nobodys = made.submit([6, 6], max_new_tokens=2, is_client=True)
    finish(made, plain)
    read_all(made)
    assert (mine[2].state, nobodys.state) == ("waiting", "held")
    finish(made, mine[0])
    read_all(made)
    assert mine[2].state == "held"


def test_an_idle_client_of_the_same_owner_makes_way_though_a_row_is_free() -> None:
    clock = Clock()
    made = scheduler(rows=3, client_rows=1, clock=clock)
    first, second = (
        made.submit([token] * 2, max_new_tokens=2, is_client=True, owner="me") for token in range(2)
    )
    other = made.submit([2, 2], max_new_tokens=2, is_client=True, owner="you")
    read_all(made)
    made.may_draft(first)
    made.may_draft(other)
    clock.now += 1.0
    read_all(made)
    assert (first.state, second.state, other.state) == ("suspended", "held", "held")


def test_one_owner_does_not_fill_the_line_for_others() -> None:
    made = scheduler(rows=4, pages=32, client_rows=2, max_waiting=3)
    running = [made.submit([5, 5], max_new_tokens=2) for _ in range(4)]
    read_all(made)
    for _ in range(9):
        made.submit([1, 1], max_new_tokens=2, is_client=True, owner="me")
    made.submit([5, 5], max_new_tokens=2)
    with pytest.raises(QueueFullError):
        made.submit([5, 5], max_new_tokens=2)
    assert [request.state for request in running] == ["running"] * 4


# --- all of it, under random schedules ------------------------------------------------------------


def next_token(tokens: Sequence[int]) -> int:
    """The text that a prompt has: the oracle."""
    return hash(tuple(tokens)) % 7


def entry(tokens: Sequence[int], position: int) -> int:
    """What stands in the cache at a position: it depends on all tokens up to there, and on the one after it."""
    return hash(tuple(tokens[: position + 2]))


@dataclass
class Expectation:
    """What a user knows."""

    prompt: list[int]
    max_new_tokens: int
    shown: list[int] = field(default_factory=list)

    @property
    def text(self) -> list[int]:
        return self.prompt + self.shown


class Device:
    """Pages that hold what is written into them, and a schedule of everything that can happen."""

    ends: tuple[str, ...] = ("done", "cancelled")

    def __init__(self, seed: int) -> None:
        self.draw = draw = random.Random(seed)
        self.shards = draw.choice([1, 1, 2])
        self.rows = self.shards * draw.randint(1, 3)
        self.page = draw.choice([1, 2, 4])
        self.chunk = self.page * draw.randint(1, 2)
        self.pages = draw.randint(4, 14)
        self.last_widths = draw.choice([(), (1,)])
        sizes = {
            "rows": self.rows,
            "pages": self.pages,
            "page": self.page,
            "chunk": self.chunk,
            "shards": self.shards,
        }
        self.scheduler = Scheduler(
            **sizes, last_widths=self.last_widths, capacity=28, **self.options()
        )
        self.memory: dict[tuple[int, int, int], int] = {}
        self.begun: dict[
            Request, int
        ] = {}  # how much of its prompt has been read, since it has its row
        self.expectations: dict[Request, Expectation] = {}
        self.started: list[int] = []
        self.seen: Counter[str] = Counter()
        self.common = [[draw.randrange(7) for _ in range(13)] for _ in range(2)]

    def options(self) -> dict[str, Any]:
        """What else the scheduler is given."""
        return {}

    # What the device does.

    def shard(self, row: int) -> int:
        return row // (self.rows // self.shards)

    def place(self, row: int, position: int) -> tuple[int, int, int]:
        page = int(self.scheduler.table[row, position // self.page])
        assert 0 <= page < self.pages, "no page is there"
        return self.shard(row), page, position % self.page

    def write(self, row: int, tokens: Sequence[int], start: int, end: int) -> None:
        shared = shared_pages(self.scheduler, self.shard(row))
        for position in range(start, end):
            place = self.place(row, position)
            assert place[1] not in shared, "a shared page is written"
            self.memory[place] = entry(tokens, position)

    def check_cache(self, row: int, tokens: Sequence[int], count: int) -> None:
        for position in range(count):
            assert self.memory.get(self.place(row, position)) == entry(tokens, position), (
                "the cache is not the text's"
            )

    def read(self, read: PrefillChunk, budget: int | None) -> None:
        tokens, end = read.request.tokens, read.start + read.count
        assert tokens == self.expectations[read.request].text, "tokens are lost"
        assert read.start % self.chunk == 0, "off the grid"
        assert read.width == min(
            width for width in (*self.last_widths, self.chunk) if width >= read.count
        )
        assert budget is None or read.width <= budget
        assert read.is_last == (end == len(tokens) - 1)
        assert read.is_last or read.count == self.chunk, "off the grid"
        self.check_cache(read.row, tokens, read.start)
        self.write(read.row, tokens, read.start, end)
        if read.is_first:
            assert read.prefix_state == (entry(tokens, read.start - 1) if read.start else None)
            self.seen["shared"] += read.start > 0
        else:
            assert self.begun[read.request] == read.start
        self.begun[read.request] = end
        if self.draw.random() < 0.02:
            self.scheduler.cancel(read.request)
        self.scheduler.was_read(read, entry(tokens, end - 1) if end else None)

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
        self.write(row, tokens + new, len(tokens) - 1, len(tokens) + len(new) - 1)
        expectation.shown += new
        self.scheduler.decoded(
            row, new, done=len(expectation.text) == max_length or self.draw.random() < 0.03
        )

    # What happens.

    def submit(self) -> None:
        draw = self.draw
        prompt = draw.choice(self.common)[: draw.randint(1, 13)] + [
            draw.randrange(7) for _ in range(draw.randint(0, 2))
        ]
        max_new_tokens = min(draw.randint(1, 12), self.pages * self.page - len(prompt) + 1)
        if max_new_tokens >= 1:
            self.expectations[self.scheduler.submit(prompt, max_new_tokens)] = Expectation(
                prompt, max_new_tokens
            )

    def swap(self) -> None:
        share = self.rows // self.shards
        order = [
            row
            for first in range(0, self.rows, share)
            for row in self.draw.sample(range(first, first + share), share)
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
        assert given_up == sorted(
            (each for each in before if each.state == "waiting"), key=lambda request: request.order
        )
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
            if self.is_over() and not coming:
                break
        else:
            pytest.fail("somebody starves")
        self.check_end()

    def is_over(self) -> bool:
        return self.scheduler.idle and not self.scheduler.held

    # What must hold.

    def holders(self) -> dict[Request, int]:
        """The shard of each that has a row."""
        held = ((row, self.scheduler.request_of(row)) for row in range(self.rows))
        return {request: self.shard(row) for row, request in held if request is not None}

    def check_order(self, before: dict[Request, int]) -> None:
        """Rows are given to the oldest, and given up by the newest."""
        after = self.holders()
        new = sorted(request.order for request in after if request.order not in self.started)
        self.started += new
        passed = [
            each
            for each in self.expectations
            if each.order < max(self.started, default=0) and each.state == "waiting"
        ]
        assert all(request.order in self.started for request in passed), "the head is passed"
        assert self.started == sorted(self.started), "the head is passed"
        in_line = [
            each.order
            for each in self.expectations
            if each.state == "waiting" and each not in before
        ]
        assert all(
            request.order < min(in_line, default=9**9) for request in after if request not in before
        ), "the head is passed"
        for request, shard in before.items():
            if request.row is None:
                self.seen["for pages"] += 1
                kept = [other for other in after if after[other] == shard]
                assert kept, "the oldest gave way"
                assert all(other.order < request.order for other in kept), "an older one gave way"

    def check_pages(self) -> None:
        """Each page is free, or a row's own, or a prefix's, and held by as many as show it."""
        table = self.scheduler.table
        assert table.dtype == "int32"
        for shard, pool in enumerate(self.scheduler._pools):
            lines = [table[row].tolist() for row in range(self.rows) if self.shard(row) == shard]
            used = [[page for page in line if page != self.pages] for line in lines]
            for line, pages in zip(lines, used, strict=True):
                assert line[: len(pages)] == pages, "an unused entry is not out of range"
            count = Counter(page for pages in used for page in pages)
            shared = shared_pages(self.scheduler, shard)
            own = [page for page in count.elements() if page not in shared]
            assert sorted([*pool._free, *shared, *own]) == list(range(self.pages)), (
                "a page has not one owner"
            )
            for prefix in pool._prefixes:
                assert {count[page] for page in prefix.pages} == {prefix.holders}, (
                    "not as many show it as hold it"
                )
            unheld = sum(len(prefix.pages) for prefix in pool._prefixes if not prefix.holders)
            assert pool.available == len(pool._free) + unheld

    def check_end(self) -> None:
        for request, expectation in self.expectations.items():
            assert request.state in self.ends
            assert request.tokens == expectation.text
            text = list(expectation.prompt)
            while len(text) < len(expectation.text):
                text.append(next_token(text))
            assert expectation.text == text
            self.seen[request.state] += 1
        assert (self.scheduler.table == self.pages).all()
        assert self.scheduler.free_pages == self.pages * self.shards
        for pool in self.scheduler._pools:
            pool.forget_prefixes()
            assert sorted(pool._free) == list(range(self.pages))


class WithClients(Device):
    """Some of the texts are clients': these verify drafts when they like, go away and come back, or never do."""

    ends = ("done", "cancelled", "dropped")

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
        self.check_left(before)

    def check_order(self, before: dict[Request, int]) -> None:
        self.check_left(before)
        for request, shard in before.items():
            if request.state == "waiting":
                kept = [other for other, place in self.holders().items() if place == shard]
                assert any(other.state != "held" for other in kept), "nobody goes on"

    def check_left(self, before: dict[Request, int]) -> None:
        after = self.holders()
        for request in self.scheduler.dropped:
            assert request.is_client and request.state == "dropped"
            self.seen["dropped"] += 1
            self.seen["dropped, being there"] += request.away is None
            if request.away is None:
                left = [
                    other for other in after if after[other] == before[request] and other in before
                ]
                assert all(other.away is None for other in left), "one that is away stays"
        self.scheduler.dropped.clear()
        for request in before:
            if request.state == "waiting":
                assert request.away is None
                self.seen["for pages"] += 1


class WithIdleClients(WithClients):
    """Clients draft when they like, and time passes. Those of one owner have so many rows."""

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
        Device.step(self)
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
                    self.seen["comes back"] += request.state == "suspended"
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
        in_line = [
            request
            for request in self.expectations
            if request.state == "waiting" and request not in before
        ]
        for request in self.holders():
            passed = [
                other for other in in_line if other.order < request.order and request not in before
            ]
            assert all(
                owners[other.owner] == self.client_rows for other in passed if other.owner
            ), "the head is passed"
            assert all(other.owner for other in passed), "the head is passed"

    def check_left(self, before: dict[Request, int]) -> None:
        for request, place in before.items():
            if request.state == "suspended":
                assert request.is_client and request not in self.drafts, (
                    "a client that drafts loses its row"
                )
                self.seen["suspended"] += 1
            if request.state == "dropped" and request.away is None:
                left = [
                    other
                    for other, shard in self.holders().items()
                    if shard == place and other in before
                ]
                assert not any(self.scheduler.is_idle(other) for other in left), "an idle one stays"
        super().check_left(before)


def shared_pages(made: Scheduler, shard: int) -> set[int]:
    pages = [page for prefix in made._pools[shard]._prefixes for page in prefix.pages]
    assert len(pages) == len(set(pages)), "a page has not one owner"
    return set(pages)


def run_schedules(seeds: Sequence[int], kind: type[Device] = Device) -> Counter[str]:
    seen: Counter[str] = Counter()
    for seed in seeds:
        device = kind(seed)
        device.run()
        seen += device.seen
    return seen


def test_random_schedules_lose_nothing_and_mix_nothing() -> None:
    seen = run_schedules(range(1500))
    # Otherwise they would test little.
    assert min(seen[what] for what in ("done", "cancelled", "shared", "for pages")) > 200


def test_random_schedules_with_clients_lose_nothing_and_mix_nothing() -> None:
    seen = run_schedules(range(1000), WithClients)
    assert (
        min(
            seen[what]
            for what in (
                "done",
                "cancelled",
                "shared",
                "for pages",
                "dropped",
                "dropped, being there",
            )
        )
        > 30
    )


def test_random_schedules_with_idle_clients_lose_nothing_and_starve_nobody() -> None:
    seen = run_schedules(range(600), WithIdleClients)
    assert (
        min(
            seen[what]
            for what in (
                "done",
                "cancelled",
                "shared",
                "for pages",
                "dropped",
                "suspended",
                "comes back",
            )
        )
        > 30
    )


class Checking(WithClients):
    """The scheduler looks at itself, too."""

    def check_pages(self) -> None:
        super().check_pages()
        self.scheduler.check()


def test_a_scheduler_that_is_right_never_contradicts_itself() -> None:
    run_schedules(range(2000, 2100), Checking)


# --- a scheduler that contradicts itself ----------------------------------------------------------

Change = Callable[[Scheduler, Request, Request], object]
CONTRADICTIONS: dict[str, tuple[Change, str]] = {
    "a page twice": (
        lambda made, running, _: made._pools[0]._free.append(pages_of(made, 0)[0]),
        "pages: 17 are",
    ),
    "a page is lost": (lambda made, running, _: made._pools[0]._free.pop(), "pages: 15 are"),
    "a prefix that is dropped": (
        lambda made, running, _: made._pools[0]._drop(made._holder(running.row or 0).prefixes[0]),
        "a row uses a prefix that the pool has evicted|pages: ",
    ),
    "a holder too many": (
        lambda made, running, _: setattr(made._holder(running.row or 0).prefixes[0], "holders", 2),
        "1 rows use a prefix that counts 2",
    ),
    "another page in the table": (
        lambda made, running, _: made.table.__setitem__((running.row, 0), 9),
        "row 0: the table",
    ),
    "a free row with pages": (
        lambda made, *_: made.table.__setitem__((1, 0), 3),
        "row 1: the table",
    ),
    "another row": (
        lambda made, running, _: setattr(running, "row", 1),
        "row 0: its request is running, in row 1",
    ),
    "ended, with a row": (
        lambda made, running, _: setattr(running, "state", "done"),
        "row 0: its request is done",
    ),
    "more tokens than it may have": (
        lambda made, running, _: running.tokens.extend([1] * 30),
        "row 0: 5 of 36 tokens are read, and the limit is 8",
    ),
    "more is read than there is": (
        lambda made, running, _: running.tokens.clear(),
        "row 0: 5 of 0 tokens are read",
    ),
    "waits with a row": (lambda made, _, waiting: setattr(waiting, "row", 1), "waiting: requests"),
    "waits and is cancelled": (
        lambda made, _, waiting: setattr(waiting, "state", "cancelled"),
        "waiting: requests",
    ),
    "waits twice": (lambda made, _, waiting: made._waiting.append(waiting), "waiting: requests"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_named_and_clearing_helps(name) -> None:
    change, message = CONTRADICTIONS[name]
    made = scheduler()
    running = made.submit([1] * 6, max_new_tokens=2)
    read_all(made)
    made.limit_rows(1)
    waiting = made.submit([2] * 6, max_new_tokens=2)
    made.check()
    change(made, running, waiting)
    with pytest.raises(RuntimeError, match=message):
        made.check()
    made.clear()
    made.check()
    assert (running.state, running.row, waiting.state, waiting.row) == (
        "cancelled",
        None,
        "cancelled",
        None,
    )
    assert (made.idle, made.occupied, made.free_pages) == (True, 0, 16)
    following = made.submit([1] * 6, max_new_tokens=2)
    assert starts(read_all(made)) == [(0, None)]
    assert following.state == "running"


# --- schedulers that are wrong, and are found out -------------------------------------------------


def without_the_token_after(monkeypatch: pytest.MonkeyPatch) -> None:
    register = PagePool.register

    def find(pool, tokens, chunk, max_length, salt):
        chain, known = [], pool._first
        for end in range(chunk, max_length + 1, chunk):
            if (prefix := known.get(tuple(tokens[end - chunk : end]))) is None:
                break
            chain.append(prefix)
            known = prefix.below
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

    def again(made, read, prefix_state):
        was_read(made, read, prefix_state)
        row = made._rows[read.row]
        if (
            row is not None
            and row.request is read.request
            and read.count == made._chunk
            and not read.is_last
        ):
            row.read = read.start

    monkeypatch.setattr(Scheduler, "was_read", again)


def with_unused_entries_of_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Scheduler._leave

    def leave_zeros(made, request):
        row = request.row
        leave(made, request)
        made.table[row] = 0

    monkeypatch.setattr(Scheduler, "_leave", leave_zeros)


def losing_what_was_generated(monkeypatch: pytest.MonkeyPatch) -> None:
    preemptions = Scheduler._preempt

    def lose(made, request):
        preemptions(made, request)
        del request.tokens[request.prompt_length :]

    monkeypatch.setattr(Scheduler, "_preempt", lose)


def with_a_grid_from_the_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a shared prefix, the first chunk has one page alone."""
    next_read = Scheduler._next_read

    def short(made, shard, budget):
        read = next_read(made, shard, budget)
        if read is not None and read.is_first and read.start and read.count > made._page:
            return replace(read, count=made._page, width=made._chunk, is_last=False)
        return read

    monkeypatch.setattr(Scheduler, "_next_read", short)


def with_the_border_of_the_first_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    next_read = Scheduler._next_read

    def first(made, shard, budget):
        read = next_read(made, shard, budget)
        return read and replace(
            read,
            prefix_state=(
                made._rows[read.row].prefixes[0].prefix_state if read.prefix_state else None
            ),
        )

    monkeypatch.setattr(Scheduler, "_next_read", first)


def with_the_oldest_giving_way(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*items, key=None):
        return max(*items) if key is None else min(*items, key=key)

    monkeypatch.setattr("specjax.serving.scheduler.max", wrong, raising=False)


def without_pages_for_what_is_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = Scheduler.reserve
    monkeypatch.setattr(Scheduler, "reserve", lambda made, ahead: reserve(made, 1))


@pytest.mark.parametrize(
    ("mutant", "message"),
    [
        (without_the_token_after, "the cache is not the text's"),
        (freeing_what_another_holds, "a page has not one owner|the cache is not the text's"),
        (dropping_what_is_held, "a page has not one owner|the cache is not the text's"),
        (reading_into_shared_pages, "a shared page is written"),
        (
            with_unused_entries_of_zero,
            "an unused entry is not out of range|a page has not one owner|not as many show it",
        ),
        (losing_what_was_generated, "tokens are lost"),
        (with_a_grid_from_the_hit, "off the grid"),
        (with_the_border_of_the_first_chunk, "prefix_state"),
        (with_the_oldest_giving_way, "gave way"),
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
            for each in reads:
                scheduler.was_read(each, prefix_state=None)

    read()
    scheduler.decoded(row=0, tokens=[2] * 6, done=False)
    for _ in range(2):
        scheduler._preempt(request)
        read()
    assert (request.preemptions, request.cached) == (2, 0)


def test_no_more_rows_are_given_out_than_the_limit_allows() -> None:
    made = scheduler(rows=3)
    made.limit_rows(1)
    first, second, third = (made.submit([1, 2], 4) for _ in range(3))
    read_all(made)
    assert [request.state for request in (first, second, third)] == [
        "running",
        "waiting",
        "waiting",
    ]
    made.limit_rows(2)
    read_all(made)
    assert [request.state for request in (first, second, third)] == [
        "running",
        "running",
        "waiting",
    ]
    made.limit_rows(1)  # whoever has a row keeps it
    finish(made, first)
    read_all(made)
    assert [request.state for request in (second, third)] == ["running", "waiting"]
    finish(made, second)
    read_all(made)
    assert third.state == "running"


def test_who_is_held_back_lets_others_pass_and_comes_first_afterwards() -> None:
    made = scheduler(rows=2)
    made.hold_back(["logprobs"])
    held, plain = made.submit([1, 2], 4, needs="logprobs"), made.submit([1, 2], 4)
    assert made.can_go_on()
    read_all(made)
    assert (held.state, plain.state, made.waiting) == ("waiting", "running", 1)
    finish(made, plain)
    assert not made.can_go_on()
    later = made.submit([1, 2], 4)
    made.limit_rows(1)
    made.hold_back([])
    read_all(made)
    assert (held.state, later.state) == ("running", "waiting")
