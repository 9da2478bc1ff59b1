"""Rows that come and go.

All unused memory of the caches is filled with NaN: every page without a text, and every slot beyond
a text. So a read outside of a row's text spoils the result.
"""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import Sampling, sharding
from specjax.decoding import remote_drafts, row_arrays, rows
from specjax.drafters import (
    MTP,
    CompressedCache,
    DraftModel,
    Eagle3,
    Medusa,
    MixtureOfAttentions,
    PromptLookup,
    SnapKV,
    Streaming,
)
from specjax.drafters.pausable import ROOM, Pausable
from specjax.models import params
from specjax.models.cache import PagedCache
from tests.conftest import SHAPES, compilations, outputs, tiny_target

ROWS, CAPACITY, PAGE, CHUNK = 4, 48, 8, 16
KEY = jax.random.key(5)
CALL_STEPS = 20
"""The number of steps that `Progress` has room for. Longer calls report only their first tokens."""
NO_STOP_TOKENS = np.full(8, -1, np.int32)
TARGET = tiny_target()
KINDS = {
    "eagle3": lambda target, shape: Eagle3.init(target, KEY, shape),
    "mtp": lambda target, shape: MTP.init(target, KEY, shape, modules=2),
    "medusa": lambda target, shape: Medusa.init(target, KEY, shape),
    "draft model": lambda target, shape: DraftModel.init(target, KEY, shape, num_layers=1),
    "draft model in a ring": lambda target, shape: replace(
        DraftModel.init(target, KEY, shape, num_layers=1), cache=Streaming(sinks=1), budget=12
    ),
    "moa": lambda target, shape: MixtureOfAttentions.init(target, KEY, shape, tli=1),
    "streaming": lambda target, shape: CompressedCache(budget=12, draft=shape),
    "snapkv": lambda target, shape: CompressedCache(
        budget=12, scheme=SnapKV(window=3), draft=shape
    ),
    "prompt lookup": lambda target, shape: PromptLookup(draft=shape),
}
DEFAULT_KIND = "eagle3"
"""The kind that every run covers. The others are thorough here, and full or thorough in
tests/evaluation/test_conformance.py.
"""

ALL_KINDS = [
    pytest.param(kind, marks=[pytest.mark.thorough] * (kind != DEFAULT_KIND)) for kind in KINDS
]


def make(kind: str, shape: str = "chain", target=TARGET) -> Pausable:
    return Pausable(KINDS[kind](target, SHAPES[shape]))


def make_text(
    prompt,
    max_new_tokens: int,
    text_index: int = 0,
    temperature: float = 0.0,
    stop_token_ids=(),
    top_p: float = 0.9,
) -> rows.Text:
    tokens = np.zeros(CAPACITY, np.int32)
    tokens[: len(prompt)] = prompt
    padded = NO_STOP_TOKENS.copy()
    padded[: len(stop_token_ids)] = stop_token_ids
    return rows.Text(
        tokens=tokens,
        length=np.int32(len(prompt)),
        max_length=np.int32(len(prompt) + max_new_tokens),
        key=jax.random.key(100 + text_index),
        stop_token_ids=padded,
        sampling=Sampling(temperature=float(temperature), top_p=top_p).of_row(),
    )


def random_text(
    rng: np.random.Generator, text_index: int, length: int, max_new_tokens: int, stop_token_ids=()
) -> rows.Text:
    return make_text(
        rng.integers(0, 11, length),
        max_new_tokens,
        text_index,
        temperature=text_index % 2,
        stop_token_ids=stop_token_ids,
    )


def expected_text(text: rows.Text, target=TARGET) -> list[int]:
    """Return the whole text that plain decoding writes for ``text`` alone, the reference.

    All texts share a program.
    """
    prompt = np.zeros((1, CHUNK * 2), np.int32)
    prompt[0] = text.tokens[: CHUNK * 2]
    result = specjax.generate(
        target,
        None,
        prompt,
        [int(text.length)],
        max_new_tokens=[int(text.max_length - text.length)],
        sampling=Sampling(**{name: number.item() for name, number in text.sampling.items()}),
        key=text.key[None],
        eos_token_ids=text.stop_token_ids[text.stop_token_ids >= 0].tolist(),
        rule="coupled",
    )
    return outputs(result)[0]


@partial(jax.jit, donate_argnums=0)
def fill_with_nan(state, pages):
    """Write NaN to ``pages`` in all pools; page numbers out of range are ignored."""

    def with_nan(node):
        if not isinstance(node, PagedCache):
            return node
        return node.replace(
            layers=jax.tree.map(lambda pool: pool.at[pages].set(jnp.nan, mode="drop"), node.layers)
        )

    return jax.tree.map(with_nan, state, is_leaf=lambda node: isinstance(node, PagedCache))


class Host:
    """A host that assigns rows and pages, for each group of rows."""

    def __init__(
        self,
        drafter: Pausable,
        target=TARGET,
        count: int = ROWS,
        seed: int = 0,
        depth: int | None = None,
    ) -> None:
        self.target, self.drafter, self.paused = target, drafter, replace(drafter, paused=True)
        self.pages_per_row = CAPACITY // PAGE
        self.groups = 1 if target.mesh is None else target.mesh.shape["data"]
        self.pages = count // self.groups * self.pages_per_row + 1
        sizes = {"capacity": CAPACITY, "pages": self.pages, "page": PAGE}
        self.state = rows.empty(target, drafter, rows=count, depth=depth, **sizes)
        self.state = fill_with_nan(self.state, np.arange(self.groups * self.pages, dtype=np.int32))
        self.no_prefix = rows.empty_prefix_state(target, drafter, **sizes)
        rng = np.random.default_rng(seed)
        self.free = [rng.permutation(self.pages).tolist() for _ in range(self.groups)]
        self.table = np.full((count, self.pages_per_row), self.pages, np.int32)
        self.texts: dict[int, rows.Text] = {}

    def group(self, row: int) -> int:
        return row // (len(self.table) // self.groups)

    def admit(
        self, row: int, text: rows.Text, cached: int = 0, prefix_state=None, pages=()
    ) -> None:
        """Admit a text to a row, with pages of its own for the tokens that are not cached.

        The first ``cached`` tokens lie in ``pages``.
        """
        self.texts[row] = text
        own_pages = [
            self.free[self.group(row)].pop()
            for _ in range(-(-int(text.max_length) // PAGE) - len(pages))
        ]
        self.table[row] = np.resize(
            [*pages, *own_pages, *[self.pages] * self.pages_per_row], self.pages_per_row
        )
        at_group = np.int32(0 if prefix_state is None else self.group(row))
        prefix_state = self.no_prefix if prefix_state is None else prefix_state
        self.state = rows.admit(
            self.target,
            self.drafter,
            self.state,
            np.int32(row),
            text,
            np.int32(cached),
            prefix_state,
            at_group,
        )

    def read(self, *numbers: int, cached: int = 0) -> list:
        """Prefill the prompts of these rows, one row of each group, side by side.

        Returns the prefix states of the chunks.
        """
        ends = [int(self.texts[row].length) - 1 for row in numbers]
        read, prefix_states = [cached] * len(numbers), []
        while True:
            counts = [min(CHUNK, end - done) for end, done in zip(ends, read, strict=True)]
            read = [done + count for done, count in zip(read, counts, strict=True)]
            last = np.array([done == end for end, done in zip(ends, read, strict=True)])
            arguments = np.array(numbers, np.int32), np.array(counts, np.int32), last
            self.state, prefix_state, _, _ = rows.read_chunk(
                self.target, self.drafter, self.state, self.table, *arguments, size=CHUNK
            )
            prefix_states.append(prefix_state)
            if last.all():
                return prefix_states

    def begin(self, row: int, text: rows.Text) -> None:
        self.admit(row, text)
        self.read(row)

    def decode(
        self,
        drafter: Pausable,
        steps: int = 100,
        until_any_done: bool = False,
        width: int | None = None,
    ):
        free = np.array([row not in self.texts for row in range(len(self.table))])
        self.state, progress = rows.decode_rows(
            self.target,
            drafter,
            self.state,
            self.table,
            free,
            np.int32(steps),
            np.bool_(until_any_done),
            width=width or len(self.table),
            call_steps=CALL_STEPS,
        )
        tokens, accepted = self.state.tokens, self.state.accepted
        progress, tokens, accepted = sharding.to_host(
            (progress, tokens, accepted), self.target.mesh
        )
        check_report(progress, tokens, accepted)
        return progress.replace(tokens=tokens, accepted=accepted)

    def catch_up(self) -> None:
        room = self.state.drafter.pending.output.hidden.shape[1]
        self.state = rows.catch_up(
            self.target, self.drafter, self.state, self.table, width=len(self.table), most=room
        )

    def leave(self, row: int) -> None:
        """Free the row, and write NaN to the pages that no other row has."""
        del self.texts[row]
        own_pages = [
            int(page)
            for page in self.table[row]
            if page < self.pages and (self.table == page).sum() == 1
        ]
        self.table[row] = self.pages
        self.free[self.group(row)] += own_pages
        self.state = fill_with_nan(
            self.state,
            np.resize([*own_pages, *[self.pages] * self.pages_per_row], self.pages_per_row).astype(
                np.int32
            ),
        )

    def rearrange(self, order) -> None:
        self.state = rows.rearrange(self.state, np.array(order, np.int32))
        self.table = self.table[order]
        self.texts = {row: self.texts[old] for row, old in enumerate(order) if old in self.texts}


def check_report(progress: rows.Progress, tokens: np.ndarray, accepted: np.ndarray) -> None:
    """Check that the report of a call holds what the call added, as far as there is room."""
    for row, (start, length) in enumerate(zip(progress.starts, progress.lengths, strict=True)):
        end = min(length, start + progress.tokens.shape[1])
        np.testing.assert_array_equal(progress.tokens[row, : end - start], tokens[row, start:end])
        np.testing.assert_array_equal(
            progress.accepted[row, : end - start], accepted[row, start:end]
        )


def row_of(progress, row: int) -> list[int]:
    return progress.tokens[row, : progress.lengths[row]].tolist()


def drafter_state_of_row(host: Host, row: int) -> list[np.ndarray]:
    """Return the drafter's state in a row, with its caches as far as they are filled.

    Slots beyond that have no meaning.
    """
    drafter_state = row_arrays.with_table(host.state.drafter.own, jnp.asarray(host.table))
    arrays = []

    def append(node) -> None:
        if isinstance(node, PagedCache):
            length = int(node.length[row])
            entries = node.gather(
                jnp.broadcast_to(jnp.arange(CAPACITY)[None], (len(host.table), CAPACITY))
            )
            arrays.extend(np.asarray(part[row, :, :length]) for part in jax.tree.leaves(entries))
            arrays.append(np.asarray(length))
        else:
            arrays.append(np.asarray(node[row]))

    jax.tree.map(append, drafter_state, is_leaf=lambda node: isinstance(node, PagedCache))
    return arrays


def assert_same(here: list[np.ndarray], there: list[np.ndarray]) -> None:
    for array, expected in zip(here, there, strict=True):
        np.testing.assert_allclose(array, expected, atol=1e-4)


# --- one by one -----------------------------------------------------------------------------------


@pytest.mark.full
def test_free_rows_do_nothing() -> None:
    host = Host(make("eagle3"))
    assert host.state.done.all() and host.state.cache.table.shape == (ROWS, CAPACITY // PAGE)
    progress = host.decode(host.drafter)
    assert progress.done.all() and progress.lengths.tolist() == [1] * ROWS
    assert not progress.stats.steps.any()


@pytest.mark.full
@pytest.mark.thorough_except("1", "2", "16")
@pytest.mark.parametrize("length", [1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK])
def test_a_prompt_is_read_in_chunks_to_its_last_token_but_one(length) -> None:
    host, text = Host(make("eagle3")), random_text(np.random.default_rng(length), 1, length, 5)
    host.admit(2, text)
    assert bool(host.state.done[2])  # not decoded before it has been read
    prefix_states = host.read(2)
    assert len(prefix_states) == max(1, -(-(length - 1) // CHUNK))
    assert host.state.done.tolist() == [True, True, False, True]
    assert host.state.cache.length.tolist() == [0, 0, length - 1, 0]
    assert row_of(host.decode(host.drafter), 2) == expected_text(text)


@pytest.mark.full
def test_a_row_that_is_read_leaves_the_others_alone() -> None:
    rng, host = np.random.default_rng(0), Host(make("eagle3"))
    first, second = (random_text(rng, number, 2 * CHUNK, 10) for number in (1, 2))
    host.begin(0, first)
    host.admit(3, second)
    before = drafter_state_of_row(host, 0)
    for start in (0, CHUNK):  # half of the prompt, then a few steps of the first row, then the rest
        count = min(CHUNK, int(second.length) - 1 - start)
        arguments = np.array([3], np.int32), np.array([count], np.int32), np.array([start > 0])
        host.state, _, _, _ = rows.read_chunk(
            TARGET, host.drafter, host.state, host.table, *arguments, size=CHUNK
        )
        if not start:
            assert_same(drafter_state_of_row(host, 0), before)
            # The length of the prompt, only half of which is read so far.
            assert host.decode(host.drafter, 2).lengths[3] == 2 * CHUNK
    progress = host.decode(host.drafter)
    assert [row_of(progress, row) for row in (0, 3)] == [
        expected_text(first),
        expected_text(second),
    ]


def test_end_tokens_and_limits() -> None:
    rng, host = np.random.default_rng(1), Host(make("eagle3"))
    texts = [random_text(rng, number, 5, 12) for number in range(4)]
    plain = [expected_text(text) for text in texts]
    # Text 1 stops at one of its own tokens; text 2 has a second stop token besides.
    for number in (1, 2):
        texts[number].stop_token_ids[:number] = [plain[number][8], 10][:number]
        plain[number] = expected_text(texts[number])
        assert len(plain[number]) < 5 + 12
    for row, text in enumerate(texts):
        host.begin(row, text)
    progress = host.decode(host.drafter)
    assert [row_of(progress, row) for row in range(4)] == plain
    assert progress.done.all()


@pytest.mark.full
def test_a_row_that_is_done_ends_the_steps_where_that_is_asked() -> None:
    rng, host = np.random.default_rng(2), Host(make("eagle3"))
    texts = [random_text(rng, number, 4, most) for number, most in enumerate((12, 3, 20))]
    for row, text in enumerate(texts):
        host.begin(row, text)
    progress = host.decode(host.paused, until_any_done=True)
    assert progress.done.tolist() == [False, True, False, True]
    assert progress.lengths.tolist() == [7, 7, 7, 1]
    # A row that was done before does not end the call.
    progress = host.decode(host.paused, 2, until_any_done=True)
    assert progress.lengths.tolist() == [9, 7, 9, 1]
    progress = host.decode(host.paused)
    assert [row_of(progress, row) for row in range(3)] == [expected_text(text) for text in texts]


@pytest.mark.full
def test_rows_beyond_the_width_stay_as_they_are() -> None:
    rng, host = np.random.default_rng(3), Host(make("eagle3"))
    texts = [random_text(rng, number, 9, 10) for number in range(4)]
    for row, text in enumerate(texts):
        host.begin(row, text)
    before = drafter_state_of_row(host, 3)
    progress = host.decode(host.drafter, width=2)
    assert progress.done.tolist() == [True, True, False, False]
    assert progress.lengths[2:].tolist() == [9, 9]
    assert_same(drafter_state_of_row(host, 3), before)
    host.rearrange([3, 1, 0, 2])
    progress = host.decode(host.drafter, 2, width=2)
    assert progress.done.tolist() == [False, True, True, False]
    host.rearrange([0, 3, 1, 2])
    progress = host.decode(host.drafter, width=2)
    assert [row_of(progress, row) for row in range(4)] == [
        expected_text(texts[number]) for number in (3, 2, 1, 0)
    ]


@pytest.mark.full
def test_drafts_from_elsewhere_are_verified_in_some_rows_and_others_stay_as_they_are() -> None:
    """Check correct and wrong drafts side by side, while other rows have none.

    Entries of a call without a draft have the index `ROWS`, which is no row.
    """
    rng, depth = np.random.default_rng(5), 3
    host = Host(make("eagle3"), depth=4)
    texts = [random_text(rng, number, length, 12) for number, length in enumerate((9, 2, 17, 20))]
    expected = [expected_text(text) for text in texts]
    for row, text in enumerate(texts):
        host.begin(row, text)
    before, remote_drafter = (
        [drafter_state_of_row(host, row) for row in range(4)],
        host.drafter.drafter,
    )
    drafted, lengths = [3, 1], [int(text.length) for text in texts]
    while drafted:
        # Nodes 1 to 3 are a chain, whose first ``correct`` tokens are right. Node 4 is a
        # wrong sibling. Node 5 has the right token, but is not valid. Node 0's token is not used.
        tokens, correct = np.zeros((3, 6), np.int32), rng.integers(0, 5, 3)
        for place, row in enumerate(drafted):
            after = np.resize([*expected[row][lengths[row] :], *[0] * depth], depth)
            tokens[place, 1:4] = np.where(
                np.arange(depth) < correct[place], after, (after + 1) % 11
            )
            tokens[place, 4:] = after[0] + np.array([2, 0]) - 11 * (after[0] > 8) * np.array([1, 0])
        arguments = np.array([*drafted, *[ROWS] * (3 - len(drafted))], np.int32), tokens
        parents = np.tile(np.array([-1, 0, 1, 2, 0, 0], np.int32), (3, 1))
        valid = np.tile(np.arange(6) < 5, (3, 1))
        host.state, checked = remote_drafts.verify_rows(
            TARGET, remote_drafter, host.state, host.table, *arguments, parents, valid, depth=depth
        )
        assert checked.count[len(drafted) :].tolist() == [0] * (3 - len(drafted))
        assert host.state.done.tolist() == [False, True, False, True]
        for place, row in enumerate(drafted):
            count = int(checked.count[place])
            accepted = min(int(correct[place]), depth)
            assert count == min(accepted + 1, len(expected[row]) - lengths[row])
            assert checked.path[place, :count].tolist() == list(range(count))
            assert checked.tokens[place, :count].tolist() == expected[row][lengths[row] :][:count]
            assert np.isfinite(checked.told["features"][place, :count]).all()
            lengths[row] += count
            assert bool(checked.done[place]) == (lengths[row] == len(expected[row]))
        assert host.state.lengths.tolist() == lengths
        drafted = [row for row in drafted if lengths[row] < len(expected[row])]
    for row in range(4):
        assert_same(drafter_state_of_row(host, row), before[row])
    progress = host.decode(host.drafter)
    assert [row_of(progress, row) for row in range(4)] == expected


@pytest.mark.full
def test_a_retired_row_reads_and_writes_nothing() -> None:
    rng, host = np.random.default_rng(4), Host(make("eagle3"))
    texts = [random_text(rng, number, 9, 20) for number in range(3)]
    for row in (0, 1):
        host.begin(row, texts[row])
    host.decode(host.drafter, 2)
    host.leave(0)
    progress = host.decode(host.drafter, 1)
    assert progress.done.tolist() == [True, False, True, True] and progress.lengths[0] == 1
    assert host.state.cache.length[0] == 0 and host.state.drafter.own.cache.length[0] == 0
    host.begin(0, texts[2])  # its pages held another text, and now hold NaN
    progress = host.decode(host.drafter)
    assert [row_of(progress, row) for row in (0, 1)] == [
        expected_text(texts[2]),
        expected_text(texts[1]),
    ]


def test_a_preempted_text_continues_unchanged() -> None:
    rng, host = np.random.default_rng(5), Host(make("eagle3"))
    text = random_text(rng, 1, 9, 20)
    host.begin(0, text)
    so_far = row_of(host.decode(host.paused, 6), 0)
    host.leave(0)
    again = make_text(so_far, 0, 1, text.sampling["temperature"])
    host.begin(2, replace(again, max_length=text.max_length))
    assert len(so_far) == 15
    assert row_of(host.decode(host.drafter), 2) == expected_text(text)


# --- a prefix that another text has read ----------------------------------------------------------


@pytest.mark.parametrize("kind", ALL_KINDS)
def test_a_text_goes_on_from_anothers_pages_and_border(kind) -> None:
    """Check the drafter's state and every verdict.

    It is not enough to compare texts: decoding is lossless, so the text is right even if the
    drafter's state is wrong.
    """
    rng, host = np.random.default_rng(6), Host(make(kind))
    first = random_text(rng, 0, 2 * CHUNK, 4)
    # Drafters store a token together with the next one, so the token after the chunk must be the
    # same, too.
    tokens = np.concatenate([first.tokens[: CHUNK + 1], rng.integers(0, 11, 8)])
    second = make_text(tokens, 14, text_index=1, temperature=1.0)
    host.admit(0, first)
    prefix_state = host.read(0)[0]
    host.decode(host.drafter, 2)
    host.begin(1, second)
    host.admit(2, second, CHUNK, prefix_state, pages=host.table[0, : CHUNK // PAGE])
    assert host.state.cache.length[2] == CHUNK
    host.read(2, cached=CHUNK)
    assert_same(drafter_state_of_row(host, 2), drafter_state_of_row(host, 1))
    host.leave(0)  # the pages that row 2 shares stay
    progress = host.decode(host.drafter)
    assert row_of(progress, 1) == row_of(progress, 2) == expected_text(second)
    jax.tree.map(lambda leaf: np.testing.assert_array_equal(leaf[1], leaf[2]), progress.stats)


# --- pausing --------------------------------------------------------------------------------------


def after_pause(host: Host, text: rows.Text, steps: list[int]) -> list[np.ndarray]:
    """Return the drafter's state after paused steps, with `catch_up` after each of ``steps``."""
    host.begin(0, text)
    for count in steps:
        host.decode(host.paused, count)
        host.catch_up()
    state = drafter_state_of_row(host, 0)
    host.leave(0)
    return state


@pytest.mark.full
@pytest.mark.parametrize("kind", ALL_KINDS)
def test_catching_up_is_absorbing_at_every_step(kind) -> None:
    text = random_text(np.random.default_rng(7), 1, 9, 30)
    host = Host(make(kind))
    at_once, one_by_one = after_pause(host, text, [13]), after_pause(host, text, [1] * 13)
    assert_same(at_once, one_by_one)
    with pytest.raises(AssertionError):  # pending tokens show in the state
        assert_same(at_once, after_pause(host, text, [12]))


def test_a_draft_after_a_pause_is_that_of_a_text_read_so_far() -> None:
    """Compare the state and all later verdicts with those of a row that prefilled the same text.

    They are equal only for drafters that treat the tokens of prompt and output alike.
    """
    rng, host = np.random.default_rng(8), Host(make("eagle3"))
    text = random_text(rng, 1, 9, 30)
    host.begin(0, text)
    so_far = row_of(host.decode(host.paused, 11), 0)
    host.catch_up()
    again = make_text(so_far, 0, 1, text.sampling["temperature"])
    host.begin(1, replace(again, max_length=text.max_length))
    assert_same(drafter_state_of_row(host, 0), drafter_state_of_row(host, 1))
    progress = host.decode(host.drafter)
    assert row_of(progress, 0) == row_of(progress, 1) == expected_text(text)
    assert progress.stats.accepted[0] == progress.stats.accepted[1]
    assert progress.stats.steps[0] - 11 == progress.stats.steps[1]


def test_a_drafter_that_was_not_caught_up_shows() -> None:
    """Check that a drafter without the newest tokens has another state, but the same text."""
    rng, host = np.random.default_rng(10), Host(make("eagle3"))
    text = random_text(rng, 1, 9, 30)
    caught_up = after_pause(host, text, [5])
    host.begin(0, text)
    host.decode(host.paused, 5)
    with pytest.raises(AssertionError):
        assert_same(drafter_state_of_row(host, 0), caught_up)
    assert row_of(host.decode(host.drafter), 0) == expected_text(text)


# --- together -------------------------------------------------------------------------------------

TOGETHER = [("eagle3", "chain")]
TOGETHER += [
    pytest.param(*case, marks=pytest.mark.thorough)
    for case in (("eagle3", "dynamic"), ("mtp", "static"))
]
LENGTHS_OF = (1, CHUNK, CHUNK + 1, 5, 2 * CHUNK, 12, 2, 27, 9)


@pytest.mark.parametrize(("kind", "shape"), TOGETHER)
def test_texts_that_come_and_go(kind, shape) -> None:
    """Mix drafted and paused steps at random, rearrange rows, preempt texts and reuse pages."""
    rng = np.random.default_rng(11)
    host = Host(make(kind, shape))
    texts = {
        n: random_text(rng, n, length, int(rng.integers(1, 16)), (7, 3) if n % 3 == 2 else ())
        for n, length in enumerate(LENGTHS_OF)
    }
    waiting, text_of_row, finished, pending, preemptions = list(texts.items()), {}, {}, 0, 0
    while waiting or host.texts:
        for row in range(ROWS):
            if row not in host.texts and waiting:
                number, text = waiting.pop(0)
                host.begin(row, text)
                text_of_row[row] = number
        paused, steps = bool(rng.random() < 0.5), int(rng.integers(1, 4))
        if pending and not paused:
            host.catch_up()
            pending = 0
        pending += steps * paused
        progress = host.decode(
            host.paused if paused else host.drafter, steps, bool(rng.random() < 0.5)
        )
        for row in list(host.texts):
            so_far, text = row_of(progress, row), host.texts[row]
            if progress.done[row]:
                finished[text_of_row[row]] = so_far
                host.leave(row)
            elif rng.random() < 0.08:
                preempted = replace(
                    make_text(so_far, 0, text_of_row[row], text.sampling["temperature"]),
                    max_length=text.max_length,
                    stop_token_ids=text.stop_token_ids,
                )
                waiting.append((text_of_row[row], preempted))
                host.leave(row)
                preemptions += 1
        order = rng.permutation(ROWS).tolist()
        host.rearrange(order)
        text_of_row = {row: text_of_row[old] for row, old in enumerate(order) if old in text_of_row}
    assert preemptions and finished == {
        number: expected_text(text) for number, text in texts.items()
    }


def test_a_second_text_compiles_nothing() -> None:
    """Check a text with another length, other settings and another row.

    The calls include a shared prefix and pausing.
    """
    rng, host = np.random.default_rng(12), Host(make("eagle3"))

    def everything(row: int, text: rows.Text, second: rows.Text, order) -> None:
        host.admit(row, text)
        prefix_state = host.read(row)[0]
        host.admit(row - 1, second, CHUNK, prefix_state, pages=host.table[row, : CHUNK // PAGE])
        host.read(row - 1, cached=CHUNK)
        host.decode(host.paused, row, until_any_done=bool(row % 2))
        host.catch_up()
        host.rearrange(order)
        host.decode(host.drafter, 100)
        for remaining in list(host.texts):
            host.leave(remaining)

    def pair(length: int, most: int, number: int) -> tuple[rows.Text, rows.Text]:
        text = random_text(rng, number, length, most, stop_token_ids=(4, 9)[:number])
        return text, make_text(text.tokens[: CHUNK + 2], 3, number, temperature=0.3 * number)

    everything(1, *pair(2 * CHUNK, 6, 0), order=[0, 1, 2, 3])
    before = compilations()
    everything(3, *pair(CHUNK + 5, 9, 1), order=[2, 3, 0, 1])
    everything(2, *pair(2 * CHUNK - 3, 2, 2), order=[3, 2, 1, 0])
    assert compilations() == before


def test_retired_rows_are_done_and_rearranged_rows_take_along_what_is_theirs() -> None:
    state = rows.empty(
        TARGET, PromptLookup(draft=2), rows=ROWS, capacity=CAPACITY, pages=8, page=PAGE
    )
    committed = jnp.array([5, 9, 2, 7])
    state = replace(
        state,
        lengths=committed + 1,
        done=jnp.zeros(ROWS, bool),
        cache=replace(state.cache, length=committed),
    )
    retired = row_arrays.retire(state, np.array([False, True, False, True]))
    assert retired.done.tolist() == [False, True, False, True]
    assert retired.lengths.tolist() == [6, 1, 3, 1]
    assert retired.cache.length.tolist() == [5, 0, 2, 0]
    table = np.arange(ROWS * 6).reshape(ROWS, 6)
    moved = rows.rearrange(row_arrays.with_table(retired, table), np.array([2, 0, 3, 1]))
    assert moved.lengths.tolist() == [3, 6, 1, 1] and moved.cache.length.tolist() == [2, 5, 0, 0]
    np.testing.assert_array_equal(moved.cache.table, table[[2, 0, 3, 1]])


# --- a mesh ---------------------------------------------------------------------------------------


@pytest.mark.thorough  # with `full`, tests/serving/test_engine.py decodes on a mesh
def test_rows_on_a_mesh_have_the_same_texts() -> None:
    """Check two groups of rows, whose pages are numbered from 0, and heads split by two."""
    mesh = sharding.make_mesh(data=2, model=2)
    places = params.shardings(params.declare(TARGET.config), mesh, TARGET.config.axis_units)
    target = TARGET.replace(params=jax.device_put(TARGET.params, places), mesh=mesh)
    rng, host = np.random.default_rng(13), Host(Pausable(PromptLookup(draft=2)), target)
    assert host.groups == 2
    texts = [random_text(rng, n, length, 9) for n, length in enumerate((20, 5, 1, 2 * CHUNK))]
    for row, text in enumerate(texts):
        host.admit(row, text)
    host.read(0, 2)  # a row of each group side by side
    host.read(1, 3)
    progress = host.decode(host.paused, 3)
    host.catch_up()
    host.leave(0)
    progress = host.decode(host.drafter, 100)
    assert [row_of(progress, row) for row in (1, 2, 3)] == [
        expected_text(text) for text in texts[1:]
    ]


# --- this test frees all compiled programs, so it is the last one ---------------------------------


@pytest.mark.full
@pytest.mark.usefixtures("compiled_anew")
def test_the_buffer_of_pending_tokens_may_be_full(monkeypatch) -> None:
    """Check that the buffer of pending tokens can be full; here it is smaller than the texts."""
    from specjax.drafters import pausable

    assert ROOM == 64
    monkeypatch.setattr(pausable, "ROOM", 12)
    host, text = Host(make("eagle3")), random_text(np.random.default_rng(9), 1, 9, 30)
    assert host.state.drafter.pending.output.hidden.shape[1] == 12
    assert_same(after_pause(host, text, [12]), after_pause(host, text, [1] * 12))
    host.begin(0, text)
    host.decode(host.paused, 12)
    assert host.state.drafter.pending.count[0] == 12
