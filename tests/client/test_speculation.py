"""Tests of the drafts that remain after a verdict, with a device that drafts random trees."""

import random
from types import SimpleNamespace

import pytest

from specjax.client.speculation import Speculation
from tests.client.test_trees import drawn, paths


class MadeUpDevice:
    """A device that drafts at random and records the requests.

    Its state is the number of tokens that were appended.
    """

    def __init__(self, seed: int) -> None:
        self.draw, self.asked = random.Random(seed), []

    def start(self) -> int:
        return 0

    def append_remote(self, state, tokens, following, arrays) -> int:
        assert len(tokens) == len(following)
        return state + len(tokens)

    def append_unverified(self, state, tokens, following) -> int:
        assert len(tokens) == len(following) > 0
        assert list(tokens[1:]) == list(following[:-1])
        return state + len(tokens)

    def propose(self, state, root, length, settings, depth):
        assert state == length - 1  # all tokens but the root
        self.asked.append((root, length, depth))
        return drawn(self.draw, root=root)


def begun(seed: int, stretches: int) -> Speculation:
    speculation = Speculation(MadeUpDevice(seed), SimpleNamespace(), [9, 8, 7])
    speculation.append_remote([9, 8], [8, 7], {})
    for _ in range(stretches):
        speculation.draft(4)
    return speculation


def believed(speculation: Speculation) -> set[tuple[int, ...]]:
    """Return all texts of the stretches.

    Each stretch follows the likeliest path of the one before.
    """
    texts, above = set(), ()
    for stretch in speculation.stretches:
        texts |= {(*above, *path) for path in paths(stretch.tree)}
        above = (*above, *stretch.path)
    return texts


@pytest.mark.parametrize("stretches", [0, 1, 2, 3])
def test_what_is_kept_is_what_was_drafted_below_the_emitted_tokens(stretches: int) -> None:
    remained = hopped = 0
    for seed in range(150):
        draw = random.Random(seed)
        speculation = begun(seed, stretches)
        first = len(speculation.stretches[0].path) if stretches else 0
        before = believed(speculation)
        emitted = list(draw.choice([*sorted(before), (1,)])) or [2]
        if draw.random() < 0.3:
            emitted.append(draw.randrange(4))
        if draw.random() < 0.3:
            emitted = [*speculation.path, draw.randrange(4)][: draw.randint(1, 8)]
        expected = {
            path[len(emitted) :] for path in before if list(path[: len(emitted)]) == emitted
        }
        speculation.tokens += emitted
        is_left = speculation.commit(emitted)
        assert is_left == bool(speculation.stretches)
        # A root alone is not a draft.
        assert (believed(speculation) if is_left else set()) == (
            expected if expected > {()} else set()
        ), seed
        if is_left:
            assert speculation.stretches[0].tree.root == emitted[-1]
            remained, hopped = remained + 1, hopped + (len(emitted) > first)
    assert (remained > 10) == (stretches > 0)
    assert (hopped > 5) == (stretches > 1)


def test_the_likeliest_path_goes_on_where_it_was_right() -> None:
    for seed in range(60):
        speculation = begun(seed, 3)
        path = speculation.path
        for count in range(1, len(path)):
            committed = begun(seed, 3)
            committed.tokens += path[:count]
            if committed.commit(path[:count]):
                assert committed.path == path[count:]


@pytest.mark.parametrize("seed", range(20))
def test_what_is_sent_is_in_bounds(seed: int) -> None:
    speculation = begun(seed, 2)
    root, path = speculation.tokens[-1], speculation.path
    for nodes in range(1, 9):
        for depth in range(5):
            chain = speculation.to_send(nodes, depth, as_chain=True)
            assert (chain.root, chain.path) == (root, path[: min(depth, nodes - 1)])
            tree = speculation.to_send(nodes, depth, as_chain=False)
            assert tree.root == root and len(tree.tokens) <= nodes and tree.depth <= depth
            assert set(paths(tree)) <= believed(speculation)
            assert len(tree.path) == min(len(path), depth, nodes - 1)


def test_it_drafts_below_all_that_it_believes_and_anew_below_what_is_committed() -> None:
    speculation = begun(3, 1)
    device, first = speculation._device, speculation.path
    speculation.draft(2)
    assert device.asked == [(7, 3, 4), ((7, *first)[-1], 3 + len(first), 2)]
    speculation.redraft(4)
    assert device.asked[-1] == (7, 3, 4)
    assert len(speculation.stretches) == 1
    speculation.append_unverified([7], [5])
    speculation.tokens.append(5)
    speculation.redraft(4)
    assert (device.asked[-1], speculation.heard) == ((5, 4, 4), 3)
