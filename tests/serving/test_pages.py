"""Tests of the pages of one pool, and of the prefixes in them."""

import pytest

from specjax.serving.pages import DROPPED, NO_TENANT, PagePool, Prefix

CHUNK = 2


def registered(pool: PagePool, tokens: list[int], above: Prefix | None = None) -> Prefix:
    """Register a chunk in a new page, and hold it.

    The last of ``tokens`` is the token after the chunk.
    """
    (page,) = pool.take(1) or pytest.fail("no page is left")
    key = tuple(tokens) if above else (NO_TENANT, *tokens)
    return pool.register(above, key, (page,), prefix_state=tuple(tokens))


def test_pages_are_taken_all_or_none() -> None:
    pool = PagePool(3)
    assert pool.take(2) == [0, 1]
    assert (pool.take(2), pool.available) == (None, 1)
    pool.give_back([0, 1])
    assert sorted(pool.take(3) or []) == [0, 1, 2]
    assert (pool.take(0), pool.take(1)) == ([], None)


def test_a_chunk_is_known_by_its_tokens_and_the_one_after_it() -> None:
    pool = PagePool(3)
    prefix = registered(pool, [5, 6, 7])
    assert pool.find([5, 6, 7, 8], CHUNK, max_length=3) == [prefix]
    assert pool.find([5, 6, 8], CHUNK, max_length=2) == []
    assert pool.find([5, 5, 7], CHUNK, max_length=2) == []
    assert pool.find([5, 6, 7], CHUNK, max_length=1) == []


def test_a_chain_goes_on_as_long_as_chunks_are_known_above_each_other() -> None:
    pool = PagePool(4)
    first = registered(pool, [1, 2, 3])
    second = registered(pool, [3, 4, 5], above=first)
    sibling = registered(pool, [3, 4, 6], above=first)
    assert pool.find([1, 2, 3, 4, 5, 9], CHUNK, max_length=5) == [first, second]
    assert pool.find([1, 2, 3, 4, 6], CHUNK, max_length=4) == [first, sibling]
    assert pool.find([1, 2, 3, 4, 5], CHUNK, max_length=3) == [first]
    assert pool.find([1, 2, 3, 4, 7], CHUNK, max_length=4) == [first]
    # The same chunk at another position is another prefix.
    assert pool.find([3, 4, 5, 6], CHUNK, max_length=3) == []


def test_who_has_read_a_chunk_that_is_known_holds_that_one_and_its_own_pages_are_free() -> None:
    pool = PagePool(4)
    prefix = registered(pool, [1, 2, 3])
    assert registered(pool, [1, 2, 3]) is prefix
    assert pool.find([1, 2, 3], CHUNK, max_length=2) == [prefix]
    assert (prefix.holders, pool.available) == (2, 3)


def test_what_nobody_holds_stays_until_its_pages_are_needed() -> None:
    pool = PagePool(2)
    prefix = registered(pool, [1, 2, 3])
    assert pool.available == 1
    pool.let_go(prefix)
    assert (pool.available, pool.find([1, 2, 3], CHUNK, max_length=2)) == (2, [prefix])
    assert pool.take(1) is not None
    assert pool.find([1, 2, 3], CHUNK, max_length=2) == [prefix]
    assert pool.take(1) == list(prefix.pages)
    assert pool.find([1, 2, 3], CHUNK, max_length=2) == []


def test_the_least_recently_used_goes_first() -> None:
    pool = PagePool(3)
    a, b, c = (registered(pool, [token, 0, 0]) for token in (1, 2, 3))
    for prefix in (c, b, a):
        pool.let_go(prefix)
    pool.go_on_from([b])
    pool.let_go(b)
    assert [pool.take(1) for _ in range(3)] == [list(prefix.pages) for prefix in (c, a, b)]


def test_a_chunk_outlives_those_that_extend_it() -> None:
    pool = PagePool(3)
    first = registered(pool, [1, 2, 3])
    second = registered(pool, [3, 4, 5], above=first)
    third = registered(pool, [5, 6, 7], above=second)
    for prefix in (first, second, third):  # the first is the least recently used
        pool.let_go(prefix)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    for remaining in ([first, second], [first], []):
        assert pool.take(1) is not None
        assert pool.find(tokens, CHUNK, max_length=6) == remaining


def test_what_is_held_never_goes() -> None:
    pool = PagePool(3)
    in_use = registered(pool, [1, 2, 3])
    unused = registered(pool, [2, 2, 3])
    pool.go_on_from([in_use])
    pool.let_go(in_use)  # one of two holders
    pool.let_go(unused)
    assert (pool.available, pool.take(3)) == (2, None)
    assert pool.find([2, 2, 3], CHUNK, max_length=2) == [unused]  # a failed take drops nothing
    assert pool.take(2) is not None
    assert (pool.take(1), pool.find([1, 2, 3], CHUNK, max_length=2)) == (None, [in_use])


def test_all_that_nobody_holds_is_forgotten_at_once() -> None:
    pool = PagePool(5)
    first = registered(pool, [1, 2, 3])
    second = registered(pool, [3, 4, 5], above=first)
    third = registered(pool, [5, 6, 7], above=second)
    in_use = registered(pool, [9, 9, 9])
    for prefix in (third, second, first):
        pool.let_go(prefix)
    pool.forget_prefixes()
    assert pool.find([1, 2, 3], CHUNK, max_length=2) == []
    assert pool.find([9, 9, 9], CHUNK, max_length=2) == [in_use]
    assert sorted(pool.take(4) or []) == sorted(set(range(5)) - set(in_use.pages))


# --- prefix states --------------------------------------------------------------------------------


def has_states(*prefixes: Prefix) -> list[bool]:
    return [prefix.prefix_state is not DROPPED for prefix in prefixes]


@pytest.mark.parametrize("most", [1, 2, 3, 8])
def test_as_many_borders_are_kept_as_there_is_room_for(most) -> None:
    pool = PagePool(20, prefix_states=most)
    prefixes: list[Prefix] = []
    for token in range(20):
        prefixes.append(registered(pool, [token, 0, 0]))
        assert sum(has_states(*prefixes)) == min(len(prefixes), most)
    assert has_states(*prefixes) == [False] * (20 - most) + [True] * most


def test_a_chain_ends_with_a_border() -> None:
    pool = PagePool(4, prefix_states=2)
    first = registered(pool, [1, 2, 3])
    second = registered(pool, [3, 4, 5], above=first)
    third = registered(pool, [5, 6, 7], above=second)
    assert has_states(first, second, third) == [False, True, True]
    assert pool.find([1, 2, 3, 4, 5, 6, 7], CHUNK, max_length=6) == [first, second, third]
    # The first chunk has no prefix state to continue from.
    assert pool.find([1, 2, 3, 4, 9], CHUNK, max_length=4) == []
    # Prefilling the first chunk again restores its prefix state. The oldest one is dropped for it.
    assert registered(pool, [1, 2, 3]) is first
    assert has_states(first, second, third) == [True, False, True]
    assert pool.find([1, 2, 3, 4, 9], CHUNK, max_length=4) == [first]


def test_the_border_that_a_text_went_on_from_last_stays() -> None:
    """Check that the states before it in its chain are dropped, although the row holds them."""
    pool = PagePool(6, prefix_states=2)
    first = registered(pool, [1, 2, 3])
    second = registered(pool, [3, 4, 5], above=first)
    pool.go_on_from([first, second])
    unrelated = registered(pool, [9, 9, 9])
    assert has_states(first, second, unrelated) == [False, True, True]
    pool.go_on_from([first, second])
    newest = registered(pool, [8, 8, 8])
    assert has_states(first, second, unrelated, newest) == [False, True, False, True]


def test_of_a_text_that_ended_the_last_border_outlives_the_others() -> None:
    """Check the prefix states of a text that has ended.

    The next turn of its chat continues from the last one. Pages are dropped in the other order,
    from the end.
    """
    pool = PagePool(9, prefix_states=3)
    chain: list[Prefix] = []
    for token in (1, 3, 5):
        above = chain[-1] if chain else None
        chain.append(registered(pool, [token, token + 1, token + 2], above=above))
    for prefix in chain[::-1]:
        pool.let_go(prefix)
    unrelated = [registered(pool, [token, 0, 0]) for token in (7, 8)]
    assert has_states(*chain, *unrelated) == [False, False, True, True, True]
    assert pool.find([1, 2, 3, 4, 5, 6, 7], CHUNK, max_length=6) == chain
