"""The engine's rows on the device: their state, and every program that works on them, compiled before the first request."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from specjax import sharding, wire
from specjax.decoding import remote_drafts
from specjax.decoding import rows as device_rows
from specjax.drafters import Drafter, NoDraft, WithPrediction
from specjax.drafters.base import remote_input_shapes
from specjax.drafters.pausable import Pausable
from specjax.errors import InputError
from specjax.models.cache import groups_of
from specjax.models.transformer import Target
from specjax.processes import meet
from specjax.progress import track
from specjax.serving.memory import prefix_states_kept
from specjax.serving.programs import EngineProgram, Programs

MAX_STOP_TOKENS = 8
"""End-of-sequence ids that a request may have."""

MAX_READS = 2
"""Pieces of prompts that the device may be at: one that it computes, and one that waits, so that it never stands idle. A prompt
that is cancelled keeps it for no longer."""

_TIMED_STEPS = 4
# A read has no result of its own to wait for: the state is given away to the next call, and the rest may be empty. So this
# follows each read, and nobody else takes its result.
_mark = jax.jit(lambda lengths: lengths + 1)
_NO_DRAFT = np.zeros(1, np.int32), np.full(1, -1, np.int32)  # a root


@dataclass(frozen=True)
class ClientDrafts:
    """Drafts that come from clients, for `specjax.serving.Engine`: what programs are compiled for.

    Attributes:
        drafter: the clients' own, or one like it, whose `Drafter.remote_inputs` they are sent. None: the tokens are all that
            they need.
        nodes: most nodes of a draft, the root among them.
        depth: of the deepest node that there may be.

    Examples:
        >>> from specjax.serving import ClientDrafts
        >>> drafter = specjax.Eagle3.init(target, jax.random.key(1))
        >>> drafts = ClientDrafts(drafter, nodes=16, depth=4)
        >>> drafts.check(target)
        >>> drafts.tells(target)
        {'features': (16,)}
    """

    drafter: Drafter | None = None
    nodes: int = 64
    depth: int = 16

    def check(self, target: Target) -> None:
        """Refuse what cannot be served.

        Raises:
            InputError: says why.
        """
        if not 0 < self.depth < self.nodes:
            raise InputError(
                f"clients: nodes={self.nodes} and depth={self.depth}: a draft has a root, and at least a node at each depth; "
                "give a depth of at least 1, and more nodes"
            )
        if self.nodes > wire.MOST_NODES:
            raise InputError(f"clients: nodes={self.nodes}: a draft that is sent has at most {wire.MOST_NODES}; give fewer")
        if groups_of(target.mesh) > 1:
            raise InputError(
                f"clients: the mesh splits rows ({groups_of(target.mesh)} groups), and drafts of clients are verified for rows "
                "of one group: give a mesh whose data axis is 1"
            )
        if isinstance(self.drafter, NoDraft) or self.drafter is None:
            return
        if not self.drafter.drafts_elsewhere:
            raise InputError(
                f"clients: a {type(self.drafter).__name__} of this kind does not draft on another machine than its target's: "
                "give another drafter"
            )
        self.drafter.check(target)
        self._check_told(self.tells(target))

    def _check_told(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Refuse where what a verdict tells of does not fit a frame, however deep the draft was accepted."""
        sizes = {name: 4 * (self.depth + 1) * math.prod(shape) for name, shape in shapes.items()}
        largest, total = max(sizes.values(), default=0), sum(sizes.values()) + 2**16
        if largest > wire.MOST_ARRAY or total > wire.MOST_DOWN:
            raise InputError(
                f"clients: with depth={self.depth}, a client is told up to {total:,} bytes at a time, {largest:,} in an array, "
                f"and a frame takes {wire.MOST_DOWN:,}, {wire.MOST_ARRAY:,} in an array: give a smaller depth, or a drafter "
                "that is told less"
            )
        if len(shapes) > wire.MOST_ARRAYS or any(len(shape) > 3 for shape in shapes.values()):
            raise InputError(
                f"clients: a {type(self.drafter).__name__} of this kind is told {len(shapes)} arrays of each token, and a "
                f"frame takes {wire.MOST_ARRAYS}, of at most 3 axes: give a drafter that is told less"
            )

    def tells(self, target: Target) -> dict[str, tuple[int, ...]]:
        """The shapes of what clients are told of one token, by name."""
        return {} if self.drafter is None else remote_input_shapes(self.drafter, target)


@dataclass(frozen=True)
class Sizes:
    """What programs are compiled for.

    Attributes:
        rows: texts at a time.
        widths: numbers of rows that may be computed, ascending; the last is ``rows``.
        capacity: most tokens of a text.
        pages: of each group of rows.
        page: tokens of a page.
        chunk: tokens of a prompt that are read at a time.
        steps: most steps of a decode call.
        max_logprobs: likeliest tokens that are reported in each place; 0: no log-probabilities are.
    """

    rows: int
    widths: tuple[int, ...]
    capacity: int
    pages: int
    page: int
    chunk: int
    steps: int
    max_logprobs: int

    @property
    def read_widths(self) -> tuple[int, int]:
        """Numbers of tokens that a piece of a prompt is computed as: the last piece may be a short one."""
        return max(self.chunk // 4, 1), self.chunk


class EngineDevice:
    """A state of `specjax.decoding.rows`, and the programs for it.

    Its methods start the device without waiting for it, unless they say so.

    Attributes:
        drafters: to decode with, by number. All have one state.
        sizes: what programs are compiled for.
        groups: of rows, on a mesh that splits them.
        reporting: the number of the drafter with which log-probabilities are reported: for one alone that is compiled.
        plain: the number of the drafter that drafts nothing, or of the first one where all draft.
        paused: a drafter that is paused, where there is one.
        clients: drafts that come from clients; None: there are none.
        remote_drafter: by which they are told of the text; None: nothing is told.
        depth: of the deepest drafts that there are.
        state: None once `release` was called.
    """

    def __init__(self, target: Target, drafters: Sequence[Drafter], sizes: Sizes, clients: ClientDrafts | None = None) -> None:
        """Free rows. Nothing is compiled yet but what makes them. Refuses ``clients`` that cannot be served."""
        self.target, self.drafters, self.sizes = target, drafters, sizes
        self.groups = groups_of(target.mesh)
        # The shortest chain, for each node is scored; what copies predictions is for those alone.
        chains = [index for index, drafter in enumerate(drafters) if _is_chain(drafter) and not copies(drafter)]
        self.reporting = min(chains, key=lambda index: drafters[index].draft_shape.depth, default=0)
        self.plain = next((index for index, drafter in enumerate(drafters) if drafter.draft_shape.depth == 0), 0)
        self.paused = next((drafter for drafter in drafters if is_paused(drafter)), None)
        if clients is not None:
            clients.check(target)
        self.clients = clients
        self.remote_drafter = clients.drafter if clients is not None and clients.tells(target) else None
        deepest = [drafter.draft_shape.depth for drafter in drafters] + ([clients.depth] if clients else [])
        self.depth = max(deepest)
        pools = {"capacity": sizes.capacity, "pages": sizes.pages, "page": sizes.page}
        self.state: Any = device_rows.empty(
            target, drafters[0], rows=sizes.rows, max_stop_tokens=MAX_STOP_TOKENS, depth=self.depth, **pools
        )
        self._fresh = device_rows.empty_prefix_state(target, drafters[0], **pools)
        self._mark = _mark
        self._marks: deque[jax.Array] = deque([self._mark(self.state.lengths)], maxlen=MAX_READS)

    def release(self) -> None:
        """The caches are free, whoever still holds this."""
        self.state = self._fresh = None
        self._marks.clear()

    def widths_of(self, index: int) -> tuple[int, ...]:
        """The numbers of rows for which a drafter was compiled: of one that copies predictions, the fewest and the most."""
        widths = self.sizes.widths
        return tuple(dict.fromkeys((widths[0], widths[-1]))) if copies(self.drafters[index]) else widths

    def most_prefix_states(self) -> int | None:
        """`specjax.serving.memory.prefix_states_kept`, of each group of rows."""
        prefix_state = sum(leaf.nbytes for leaf in jax.tree.leaves(self._fresh))
        pool = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state.cache.layers)) // self.groups
        chunk = pool // self.sizes.pages * (self.sizes.chunk // self.sizes.page)
        return prefix_states_kept(prefix_state, pool, chunk=chunk, rows=self.sizes.rows // self.groups)

    # --- what the engine asks for ----------------------------------------------------------------------------------------

    def is_busy(self) -> bool:
        """Whether it is still at what was asked for last."""
        return not self.state.lengths.is_ready()

    def wait_for_reads(self) -> None:
        """Wait until the device is at fewer than `MAX_READS` pieces of prompts."""
        while len(self._marks) >= MAX_READS:
            self._marks.popleft().block_until_ready()

    def wait(self) -> None:
        """Wait until it has done all that was asked for."""
        jax.block_until_ready(self.state.lengths)

    def admit(self, row: int, words: device_rows.Text, start: int, prefix_state: tuple[Any, np.int32] | None) -> None:
        """`specjax.decoding.rows.admit`; ``prefix_state`` is of a chunk and its group, None where nothing has been read."""
        kept, group = prefix_state or (self._fresh, np.int32(0))
        self.state = device_rows.admit(*self._own, np.int32(row), words, np.int32(start), kept, group)

    def read(
        self,
        table: np.ndarray,
        rows: Sequence[int],
        counts: Sequence[int],
        is_last: Sequence[bool],
        width: int,
        logprobs: bool,
        for_client: bool = False,
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        """Call `specjax.decoding.rows.read_chunk`.

        Returns:
            the prefix state; the log-probabilities, with ``logprobs``; and what is sent to a client, with ``for_client``.
        """
        given, named = self._of_read(table, rows, counts, is_last, width, logprobs, for_client)
        self.state, *read = device_rows.read_chunk(*given, **named)
        self._marks.append(self._mark(self.state.lengths))
        prefix_state, said, told = read
        return prefix_state, *sharding.everywhere((said, told), self.target.mesh)

    def verify(
        self, table: np.ndarray, rows: Sequence[int], drafts: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> remote_drafts.VerifiedRows:
        """`specjax.decoding.remote_drafts.verify_rows`; of each row's draft the ``tokens [n]`` and ``parents [n]``."""
        width = next(width for width in self.sizes.widths if width >= len(rows))
        given = self._of_verify(table, width, rows, drafts)
        self.state, checked = remote_drafts.verify_rows(*given, depth=self._clients.depth)
        return sharding.everywhere(checked, self.target.mesh)

    def decode(
        self, index: int, table: np.ndarray, free: np.ndarray, steps: int, until_any_done: bool, width: int, logprobs: bool
    ) -> device_rows.Progress:
        """`specjax.decoding.rows.decode_rows` with a drafter, by its number."""
        given = table, free, np.int32(steps), np.bool_(until_any_done)
        self.state, progress = device_rows.decode_rows(
            *self._with(index), *given, width=width, call_steps=self.sizes.steps, logprobs=self._top(logprobs)
        )
        return sharding.everywhere(progress, self.target.mesh)

    def catch_up(self, table: np.ndarray) -> None:
        """Tell the paused drafter of its pending tokens, in all rows."""
        assert self.paused is not None
        self.state = device_rows.catch_up(self.target, self.paused, self.state, table, width=self.sizes.rows)

    def rearrange(self, order: np.ndarray) -> None:
        """`specjax.decoding.rows.rearrange`."""
        self.state = device_rows.rearrange(self.state, order)

    # --- before the first request ----------------------------------------------------------------------------------------

    def warm_up(self, settings: dict[str, Any], programs: Programs | None = None) -> dict[tuple[int, int], float]:
        """Compile all programs, several at a time, and run each of them.

        Args:
            settings: of a text, as `specjax.decoding.rows.Text` has them, without an end.
            programs: to compile, and to be asked how many are; None: `programs`, whose count is not needed.

        Returns:
            The seconds of a step, by number of rows and number of drafter.
        """
        table, words = self._placeholders(settings)
        (programs or Programs(self.programs(settings), threading.Condition())).compile_stage(
            None, f"compiling, {self.sizes.rows} rows"
        )
        if sharding.spans_processes(self.target.mesh):
            meet("compiled")  # one may have found its programs compiled
        calls = [(width, index) for index in range(len(self.drafters)) for width in self.widths_of(index)]
        seconds = {}
        for width, index in track(calls, f"timing decoding, {self.sizes.rows} rows"):
            prefix_state = self._begin_in_all_rows(words, table)
            seconds[width, index] = min([self._time_call(width, index, words, table) for _ in range(3)][1:])
            if self.paused is not None:
                self.catch_up(table)
            if len(self.sizes.widths) > 1:
                self.rearrange(np.arange(self.sizes.rows, dtype=np.int32))
        nothing = [0] * self.groups
        if self.remote_drafter is not None:
            for width in self.sizes.read_widths:
                self.read(table, nothing, nothing, [False], width, logprobs=False, for_client=True)
        if self.clients is not None:
            for width in self.sizes.widths:
                self.verify(table, [self.sizes.rows] * width, [_NO_DRAFT] * width)
        if self.sizes.max_logprobs:
            self.read(table, nothing, nothing, [False] * self.groups, self.sizes.chunk, logprobs=True)
            self.decode(self.reporting, table, self._none(), 1, False, self.sizes.rows, logprobs=True)
        # A prefix state that came out of a chunk, in place of the empty one, is the same program.
        self.admit(0, words, 0, (prefix_state, np.int32(0)))
        self.wait()
        return seconds

    def programs(self, settings: dict[str, Any]) -> list[EngineProgram]:
        """Every program, in stages: what a plain request in one row needs comes first, copies of predictions come last.

        Args:
            settings: as for `warm_up`.
        """
        table, words = self._placeholders(settings)
        rows, widths = self.sizes.rows, self.sizes.widths
        nothing, last = [0] * self.groups, [False] * self.groups

        def read(stage: int, width: int, logprobs: bool = False, for_client: bool = False) -> EngineProgram:
            def lower() -> Any:
                given, named = self._of_read(table, nothing, nothing, last, width, logprobs, for_client)
                return device_rows.read_chunk.lower(*given, **named)

            return EngineProgram("read", (width, logprobs, for_client), stage, lower)

        def decode(stage: int, width: int, index: int, logprobs: bool = False) -> EngineProgram:
            return EngineProgram(
                "decode", (width, index, logprobs), stage, lambda: self._lower_decode(table, index, width, logprobs)
            )

        def verify(stage: int, width: int) -> EngineProgram:
            def lower() -> Any:
                return remote_drafts.verify_rows.lower(*self._of_verify(table, width, [], []), depth=self._clients.depth)

            return EngineProgram("verify", (width,), stage, lower)

        def admit() -> Any:
            return device_rows.admit.lower(*self._own, np.int32(0), words, np.int32(0), self._fresh, np.int32(0))

        listed = [EngineProgram("admit", (), 0, admit)]
        listed += [read(0 if width == self.sizes.chunk else 1, width) for width in self.sizes.read_widths]
        listed += [decode(0 if width == widths[0] else 2, width, self.plain) for width in widths]
        if self.paused is not None:
            listed.append(EngineProgram("catch_up", (), 1, self._lower_catch_up(table)))
        if len(widths) > 1:
            order = np.arange(rows, dtype=np.int32)
            listed.append(EngineProgram("rearrange", (), 1, lambda: device_rows.rearrange.lower(self.state, order)))
        others = [index for index in range(len(self.drafters)) if index != self.plain]
        for width in widths:
            listed += [decode(3, width, index) for index in others if not copies(self.drafters[index])]
        if self.sizes.max_logprobs:
            listed += [read(4, self.sizes.chunk, logprobs=True), decode(4, rows, self.reporting, logprobs=True)]
        if self.remote_drafter is not None:
            listed += [read(5, width, for_client=True) for width in self.sizes.read_widths]
        if self.clients is not None:
            listed += [verify(5, width) for width in widths]
        for index in others:
            listed += [decode(6, width, index) for width in self.widths_of(index) if copies(self.drafters[index])]
        return listed

    def time_decoding(self, settings: dict[str, Any], width: int, index: int) -> float:
        """Measure the seconds of a step, as `warm_up` does, and wait for it. Nobody may have a row; pages stay as they are."""
        table, words = self._placeholders(settings)
        table = np.full_like(table, self.sizes.pages)  # no page: what is written goes nowhere
        self._begin_in_all_rows(words, table)
        seconds = min([self._time_call(width, index, words, table) for _ in range(3)][1:])
        if self.paused is not None:
            self.catch_up(table)
        self.wait()
        return seconds

    def _lower_catch_up(self, table: np.ndarray) -> Callable[[], Any]:
        return lambda: device_rows.catch_up.lower(self.target, self.paused, self.state, table, width=self.sizes.rows)

    def _lower_decode(self, table: np.ndarray, index: int, width: int, logprobs: bool) -> Any:
        given = table, self._none(), np.int32(1), np.bool_(False)
        return device_rows.decode_rows.lower(
            *self._with(index), *given, width=width, call_steps=self.sizes.steps, logprobs=self._top(logprobs)
        )

    @property
    def _own(self) -> tuple[Target, Drafter, Any]:
        """What prompts are read with: the first drafter, for all have one state."""
        return self._with(0)

    def _with(self, index: int) -> tuple[Target, Drafter, Any]:
        return self.target, self.drafters[index], self.state

    def _top(self, logprobs: bool) -> int | None:
        return self.sizes.max_logprobs if logprobs else None

    def _none(self) -> np.ndarray:
        return np.zeros(self.sizes.rows, bool)

    @property
    def _clients(self) -> ClientDrafts:
        assert self.clients is not None
        return self.clients

    def _of_verify(
        self, table: np.ndarray, width: int, rows: Sequence[int], drafts: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[Any, ...]:
        """What `specjax.decoding.remote_drafts.verify_rows` is given, for ``width`` rows."""
        numbers = np.full(width, self.sizes.rows, np.int32)
        numbers[: len(rows)] = rows
        tokens = np.zeros((width, self._clients.nodes), np.int32)
        parents, valid = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
        parents[:, 0], valid[:, 0] = -1, True
        for index, (own, above) in enumerate(drafts):
            tokens[index, : len(own)], parents[index, : len(own)], valid[index, : len(own)] = own, above, True
        remote_drafter = NoDraft() if self.remote_drafter is None else self.remote_drafter
        return self.target, remote_drafter, self.state, table, numbers, tokens, parents, valid

    def _of_read(
        self,
        table: np.ndarray,
        rows: Sequence[int],
        counts: Sequence[int],
        is_last: Sequence[bool],
        width: int,
        logprobs: bool,
        for_client: bool,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What `specjax.decoding.rows.read_chunk` is given, by place and by name."""
        given = np.array(rows, np.int32), np.array(counts, np.int32), np.array(is_last)
        named = {"width": width, "logprobs": self.sizes.max_logprobs if logprobs else None}
        remote_drafter = {"remote_drafter": self.remote_drafter} if for_client and self.remote_drafter is not None else {}
        return (*self._own, table, *given), named | remote_drafter

    def _placeholders(self, settings: dict[str, Any]) -> tuple[np.ndarray, device_rows.Text]:
        """Pages for all rows, and a text that goes on as long as they last."""
        sizes, share = self.sizes, self.sizes.rows // self.groups
        columns = -(-sizes.capacity // sizes.page)
        each = min(columns, sizes.pages // share)
        table = np.full((sizes.rows, columns), sizes.pages, np.int32)
        for row in range(sizes.rows):
            table[row, :each] = np.arange(each) + row % share * each
        max_length = max(min(sizes.capacity, each * sizes.page), 3)
        tokens = np.ones(sizes.capacity, np.int32)
        return table, device_rows.Text(tokens=tokens, length=np.int32(2), max_length=np.int32(max_length), **settings)

    def _begin_in_all_rows(self, words: device_rows.Text, table: np.ndarray) -> Any:
        """Admit a text in every row, and read it, with every program for that. The prefix state that came out of it."""
        share, prefix_state = self.sizes.rows // self.groups, None
        for row in range(self.sizes.rows):
            self.admit(row, words, 0, None)
        for row in range(share):
            rows = [group * share + row for group in range(self.groups)]
            short, whole = self.sizes.read_widths
            for width in (short, whole) if row == 0 else (short,):
                counts = [int(width == short)] * self.groups
                prefix_state, _, _ = self.read(table, rows, counts, [True] * self.groups, width, logprobs=False)
        return prefix_state

    def _time_call(self, width: int, index: int, words: device_rows.Text, table: np.ndarray) -> float:
        """Seconds of a step of a decode call that goes on with all rows."""
        done, before = sharding.to_host((self.state.done, self.state.stats.steps), self.target.mesh)
        if done[:width].all():  # there is little room
            self._begin_in_all_rows(words, table)
            before = sharding.to_host(self.state.stats.steps, self.target.mesh)
        started = time.perf_counter()
        progress = self.decode(index, table, self._none(), _TIMED_STEPS, False, width, logprobs=False)
        steps = jax.device_get(progress).stats.steps - before
        return (time.perf_counter() - started) / int(steps.max())


def copies(drafter: Drafter) -> bool:
    """Whether a drafter copies predictions."""
    return isinstance(drafter, WithPrediction) and drafter.longest > 0


def _is_chain(drafter: Drafter) -> bool:
    shape = drafter.draft_shape
    return 0 < shape.depth == shape.nodes - 1


def is_paused(drafter: Drafter) -> bool:
    """Whether a drafter is one of those that are paused."""
    own = drafter.drafter if isinstance(drafter, WithPrediction) else drafter
    return isinstance(own, Pausable) and own.paused
