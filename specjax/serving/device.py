"""The engine's rows on the device: their state, and the compiled programs that work on it."""

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from specjax import sharding, wire
from specjax.adjustments import Adjustments
from specjax.decoding import adjusted_rows, constrained_rows, remote_drafts
from specjax.decoding import rows as device_rows
from specjax.decoding.constrained import FORCED, forced_draft, legal_tokens, reader
from specjax.drafters import Drafter, NoDraft, WithPrediction
from specjax.drafters.base import remote_input_shapes
from specjax.drafters.pausable import ROOM, Pausable
from specjax.drafters.suffix_index import SuffixIndex
from specjax.drafts.draft import Draft
from specjax.errors import InputError
from specjax.grammars.matcher import Matcher, mask_words
from specjax.models.cache import groups_of
from specjax.models.transformer import Target
from specjax.processes import meet
from specjax.progress import track
from specjax.serving.earlier_answers import with_index
from specjax.serving.memory import prefix_states_kept
from specjax.serving.programs import EngineProgram, Programs

MAX_STOP_TOKENS = 8
"""The largest number of stop tokens of a request."""

MAX_READS = 2
"""The largest number of prefill chunks that are queued on the device.

It computes one while the next one waits, so it is never idle. More would delay other requests after
the prompt is cancelled.
"""

FEW_PENDING = 2 * FORCED
"""The pending tokens up to which catching up has a smaller program, in engines with grammars."""

ADJUSTING = ("decode_adjusted", "propose_adjusted", "advance_adjusted")
"""The kinds of programs for rows some of which have penalties or biases."""

MAX_WORDS = 64
"""The largest number of banned words of several tokens in a row."""

MAX_WORD_TOKENS = 8
"""The largest number of tokens of such a word."""

MASKED, COPYING = ("propose", "advance"), ("propose_copies", "advance_copies")
"""The kinds of programs of masked steps, and of those that copy predictions."""

_TIMED_STEPS = 4
# The host waits for a prefill chunk by this small program, which follows it. The chunk has no
# result to wait for: its state is donated to the next call, and its other results may be empty.
_mark = jax.jit(lambda lengths: lengths + 1)
_put_answers = jax.jit(SuffixIndex.put)
_NO_DRAFT = np.zeros(1, np.int32), np.full(1, -1, np.int32)  # a root


@dataclass(frozen=True)
class ClientDrafts:
    """The bounds of drafts that clients may send to a `specjax.serving.Engine`.

    Attributes:
        drafter: a drafter of the clients' kind. Clients are sent its `Drafter.remote_inputs`. None:
            they need the tokens alone.
        nodes: the largest number of nodes of a draft, the root included.
        depth: the largest depth of a node.

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
        """Check that an engine with this target can serve such drafts.

        Raises:
            InputError: It cannot. The message says why.
        """
        if not 0 < self.depth < self.nodes:
            raise InputError(
                f"clients: nodes={self.nodes} and depth={self.depth}: a draft has a root, and at"
                " least one node per depth; give a depth of at least 1, and more nodes than that"
            )
        if self.nodes > wire.MOST_NODES:
            raise InputError(
                f"clients: nodes={self.nodes}: a message holds at most {wire.MOST_NODES} nodes;"
                " give fewer"
            )
        if groups_of(target.mesh) > 1:
            raise InputError(
                f"clients: the mesh splits the rows into {groups_of(target.mesh)} groups, but"
                " drafts of clients are verified in one group only; give a mesh whose data axis"
                " is 1"
            )
        if isinstance(self.drafter, NoDraft) or self.drafter is None:
            return
        if not self.drafter.drafts_elsewhere:
            raise InputError(
                f"clients: a {type(self.drafter).__name__} of this kind cannot draft on another"
                " machine than its target's; give another drafter"
            )
        self.drafter.check(target)
        self._check_frame(self.tells(target))

    def _check_frame(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Raise InputError if the hidden states of the longest verdict do not fit one frame."""
        sizes = {name: 4 * (self.depth + 1) * math.prod(shape) for name, shape in shapes.items()}
        largest, total = max(sizes.values(), default=0), sum(sizes.values()) + 2**16
        if largest > wire.MOST_ARRAY or total > wire.MOST_DOWN:
            raise InputError(
                f"clients: with depth={self.depth}, a client is sent up to {total:,} bytes at a"
                f" time, {largest:,} per array, but a frame holds {wire.MOST_DOWN:,},"
                f" {wire.MOST_ARRAY:,} per array; give a smaller depth, or a drafter that needs"
                " less"
            )
        if len(shapes) > wire.MOST_ARRAYS or any(len(shape) > 3 for shape in shapes.values()):
            raise InputError(
                f"clients: a {type(self.drafter).__name__} of this kind is sent {len(shapes)}"
                f" arrays per token, but a frame holds {wire.MOST_ARRAYS}, of at most 3 axes; give"
                " a drafter that needs less"
            )

    def tells(self, target: Target) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the arrays that clients are sent for one token, by name."""
        return {} if self.drafter is None else remote_input_shapes(self.drafter, target)


@dataclass(frozen=True)
class Sizes:
    """The sizes that programs are compiled for.

    Attributes:
        rows: the number of rows.
        widths: the numbers of rows that a call may compute, ascending; the last is ``rows``.
        capacity: the maximal length of a text in tokens, prompt and output.
        pages: the number of pages of each group of rows.
        page: tokens per page.
        chunk: tokens per chunk of prefill.
        steps: the largest number of steps of a decode call.
        max_logprobs: the number of top log-probabilities per token; 0: none are reported.
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
        """The tokens per chunk that prefill is compiled for: a short last chunk, and a full one."""
        return max(self.chunk // 4, 1), self.chunk


class EngineDevice:
    """A decode state of `specjax.decoding.rows`, and the programs for it.

    The methods enqueue work on the device and return without waiting for it, unless they say so.

    Attributes:
        drafters: the drafters to decode with. They share one state.
        sizes: the sizes that programs are compiled for.
        groups: the number of groups that the mesh splits the rows into.
        reporting: the index of the drafter that is compiled with log-probabilities. All rows decode
            with it as long as one of them reports log-probabilities.
        plain: the index of the drafter that drafts nothing; 0 if all of them draft.
        clients: the bounds of drafts that clients may send; None: there are no clients.
        remote_drafter: the drafter that decides which hidden states clients are sent; None: they
            are sent none.
        grammars: whether texts may have grammars, so that masked steps are compiled.
        masked: the index of the drafter that drafts in masked steps; None: only forced text is
            drafted.
        copying: the index of the drafter that copies predictions; None: there is none.
        adjustments: what rows have generated and what they ban, for penalties and biases; None: no
            text may have any.
        is_adjusting: whether the next call is for rows some of which have penalties or biases.
        depth: the depth of the deepest draft.
        state: the decode state; None after `release`.
    """

    def __init__(
        self,
        target: Target,
        drafters: Sequence[Drafter],
        sizes: Sizes,
        clients: ClientDrafts | None = None,
        grammars: bool = False,
        penalties: bool = False,
        earlier_answers: int = 0,
    ) -> None:
        """Make the state, with free rows. Only the programs for that are compiled.

        Raises:
            InputError: The drafts of ``clients`` cannot be served. The message says why.
        """
        self._answers: SuffixIndex | None = None
        if earlier_answers:
            self._answers = SuffixIndex.empty(sizes.rows, earlier_answers)
            if target.mesh is not None:  # once, and not in every call
                everywhere = jax.sharding.NamedSharding(target.mesh, jax.sharding.PartitionSpec())
                self._answers = jax.tree.map(
                    partial(sharding.put, sharding=everywhere), self._answers
                )
            drafters = with_index(list(drafters), self._answers)
        self.target, self.drafters, self.sizes = target, drafters, sizes
        self.groups = groups_of(target.mesh)
        # The shortest chain is best for log-probabilities, which are computed for every node of a
        # draft.
        chains = [
            index
            for index, drafter in enumerate(drafters)
            if _drafts_chains(drafter) and not copies(drafter)
        ]
        self.reporting = min(chains, key=lambda index: drafters[index].draft_shape.depth, default=0)
        self.plain = next(
            (index for index, drafter in enumerate(drafters) if drafter.draft_shape.depth == 0), 0
        )
        if clients is not None:
            clients.check(target)
        self.clients = clients
        self.remote_drafter = (
            clients.drafter if clients is not None and clients.tells(target) else None
        )
        deepest = [drafter.draft_shape.depth for drafter in drafters] + (
            [clients.depth] if clients else []
        )
        self.grammars = grammars
        # The shortest chain, because many drafted tokens are not legal; without chains a tree.
        drafting = [
            index
            for index, drafter in enumerate(drafters)
            if drafter.draft_shape.depth > 0 and not copies(drafter)
        ]
        is_chain = self.reporting in drafting
        self.masked = self.reporting if is_chain else next(iter(drafting), None)
        self.copying = next(
            (index for index, drafter in enumerate(drafters) if copies(drafter)), None
        )
        if grammars:
            deepest.append(FORCED)
        self.depth = max(deepest)
        self.part_names = drafters[0].part_names  # all drafters are the same but for their drafts
        pools = {"capacity": sizes.capacity, "pages": sizes.pages, "page": sizes.page}
        self.state: Any = device_rows.empty(
            target,
            drafters[0],
            rows=sizes.rows,
            max_stop_tokens=MAX_STOP_TOKENS,
            depth=self.depth,
            **pools,
        )
        self._empty_prefix_state = device_rows.empty_prefix_state(target, drafters[0], **pools)
        self.adjustments: Adjustments | None = None
        if penalties:
            self.adjustments = adjusted_rows.empty(
                target, rows=sizes.rows, words=MAX_WORDS, word_tokens=MAX_WORD_TOKENS
            )
        self.is_adjusting = False
        self._adjusted_rows: set[int] = set()
        # The decode state, the drafter's state and the draft between `propose` and `advance`.
        # ``state`` stays what it was, because another thread may lower programs for it at any time.
        self._between: tuple[Any, Any, Draft] | None = None
        if self._answers is not None:  # so that the program is compiled
            self.put_answers(0, SuffixIndex.on_host([]), version=0)
        self._mark = _mark
        self._marks: deque[jax.Array] = deque([self._mark(self.state.lengths)], maxlen=MAX_READS)

    @property
    def paused(self) -> Drafter | None:
        """A drafter that is paused; None: there is none."""
        return next((drafter for drafter in self.drafters if is_paused(drafter)), None)

    def put_answers(self, segment: int, answers: SuffixIndex, version: int) -> None:
        """Put the earlier answers of a tenant into a segment of the drafters' index.

        Args:
            segment: the number of the segment.
            answers: an index of a single segment in numpy arrays, of at most the same capacity.
            version: the version of the answers, by which other processes find theirs; 0: the empty
                index of the warm-up, which is not sent.
        """
        assert self._answers is not None
        padded = answers.padded(self._answers.capacity)
        self._answers = _put_answers(self._answers, np.int32(segment), padded)
        # Not in place: another thread may lower programs for the drafters at any time.
        self.drafters = with_index(self.drafters, self._answers)

    def release(self) -> None:
        """Free the caches, even if something still refers to this object."""
        self.state = self._empty_prefix_state = self.adjustments = self._answers = None
        self.drafters = with_index(self.drafters, None)
        self._marks.clear()

    def widths_of(self, index: int) -> tuple[int, ...]:
        """Return the numbers of rows that a drafter is compiled for.

        A drafter that copies predictions is rarely used, so it has the smallest and largest only.
        """
        widths = self.sizes.widths
        if copies(self.drafters[index]):
            return tuple(dict.fromkeys((widths[0], widths[-1])))
        return widths

    @property
    def masked_widths(self) -> tuple[int, ...]:
        """The numbers of rows that masked steps are compiled for: the smallest and the largest."""
        return tuple(dict.fromkeys((min(self.sizes.widths), self.sizes.rows)))

    def most_prefix_states(self) -> int | None:
        """Return the largest number of prefix states in each group of rows; None: no limit.

        See `specjax.serving.memory.prefix_states_kept`.
        """
        prefix_state = sum(leaf.nbytes for leaf in jax.tree.leaves(self._empty_prefix_state))
        pool = sum(leaf.nbytes for leaf in jax.tree.leaves(self.state.cache.layers)) // self.groups
        chunk = pool // self.sizes.pages * (self.sizes.chunk // self.sizes.page)
        return prefix_states_kept(
            prefix_state, pool, chunk=chunk, rows=self.sizes.rows // self.groups
        )

    # --- the engine's calls ----------------------------------------------------------------------

    def is_busy(self) -> bool:
        """Return whether the device is still computing the newest call."""
        return not self.state.lengths.is_ready()

    def wait_for_reads(self) -> None:
        """Wait until fewer than `MAX_READS` chunks of prefill are queued on the device."""
        while len(self._marks) >= MAX_READS:
            self._marks.popleft().block_until_ready()

    def wait(self) -> None:
        """Wait until the device has finished all calls."""
        jax.block_until_ready(self.state.lengths)

    def admit(
        self,
        row: int,
        text: device_rows.Text,
        start: int,
        prefix_state: tuple[Any, np.int32] | None,
    ) -> None:
        """Put a text into a free row, by `specjax.decoding.rows.admit`.

        Args:
            row: the row.
            text: the text and its settings.
            start: the number of tokens whose pages the row shares.
            prefix_state: the prefix state at ``start``, and the group of rows that it comes from;
                None: the prompt is prefilled from its beginning.
        """
        initial_state, group = prefix_state or (self._empty_prefix_state, np.int32(0))
        # Numbers of numpy's types: with those of Python JAX would compile another program.
        self.state = device_rows.admit(
            *self._reading, np.int32(row), text, np.int32(start), initial_state, group
        )

    def read(
        self,
        table: np.ndarray,
        rows: Sequence[int],
        counts: Sequence[int],
        is_last: Sequence[bool],
        size: int,
        logprobs: bool,
        for_client: bool = False,
    ) -> tuple[Any, Any, dict[str, jax.Array]]:
        """Prefill one chunk per group of rows, by `specjax.decoding.rows.read_chunk`.

        Returns:
            The prefix state; with ``logprobs`` the log-probabilities; and with ``for_client`` the
            hidden states for the client.
        """
        arguments, options = self._read_arguments(
            table, rows, counts, is_last, size, logprobs, for_client
        )
        self.state, *results = device_rows.read_chunk(*arguments, **options)
        self._marks.append(self._mark(self.state.lengths))
        prefix_state, token_logprobs, features = results
        return prefix_state, *sharding.everywhere((token_logprobs, features), self.target.mesh)

    def verify(
        self,
        table: np.ndarray,
        rows: Sequence[int],
        drafts: Sequence[tuple[np.ndarray, np.ndarray]],
        legal: np.ndarray | None = None,
    ) -> remote_drafts.VerifiedRows:
        """Verify the drafts of clients, by `specjax.decoding.remote_drafts.verify_rows`.

        Args:
            table: ``[rows, n]`` the pages of all rows.
            rows: the rows of the drafts.
            drafts: the ``tokens [n]`` and ``parents [n]`` of each row's draft.
            legal: the result of `legal_after`; None if no row has a grammar.
        """
        width = next(width for width in self.sizes.widths if width >= len(rows))
        if legal is not None:
            width = legal.shape[0]
        arguments = self._verify_arguments(table, width, rows, drafts)
        self.state, checked = remote_drafts.verify_rows(
            *arguments, legal=legal, depth=self._clients.depth
        )
        return sharding.everywhere(checked, self.target.mesh)

    def legal_after(
        self,
        drafts: Sequence[tuple[np.ndarray, np.ndarray]],
        matchers: Sequence[Matcher | None],
        on_error: Callable[[int, Exception], None],
    ) -> np.ndarray:
        """Return the legal tokens after each node of the drafts of clients, for `verify`.

        Args:
            drafts: the drafts, as for `verify`.
            matchers: the matcher of each row, None for a row without a grammar.
            on_error: as for `specjax.decoding.constrained.legal_tokens`.
        """
        width = next(width for width in self.masked_widths if width >= len(drafts))
        tokens, parents, valid = self._padded_drafts(width, drafts)
        draft = Draft(tokens=tokens, grown=parents, valid=valid, levels=self._clients.depth)  # pyright: ignore[reportArgumentType]
        return legal_tokens(matchers, draft, self.target.config.vocab_size, on_error)[0]

    def decode(
        self,
        index: int,
        table: np.ndarray,
        free: np.ndarray,
        steps: int,
        until_any_done: bool,
        width: int,
        logprobs: bool,
    ) -> device_rows.Progress:
        """Decode with the drafter of an ``index``, by `specjax.decoding.rows.decode_rows`."""
        limits = np.int32(steps), np.bool_(until_any_done)
        state, progress = device_rows.decode_rows(
            *self._with(index, self.is_adjusting),
            table,
            free,
            *limits,
            width=width,
            call_steps=self.sizes.steps,
            logprobs=self._top(logprobs),
        )
        self._set_state(state)
        return sharding.everywhere(progress, self.target.mesh)

    def propose(self, index: int, table: np.ndarray, free: np.ndarray, width: int) -> Draft:
        """Begin a masked step with the drafter of an ``index``.

        It is `specjax.decoding.constrained_rows.propose_rows`, with ``masked`` or ``copying``.

        Returns:
            The draft, without q, for the host. `advance` must be the next call.
        """
        state, draft, drafted = constrained_rows.propose_rows(
            *self._with(index, self.is_adjusting), table, free, width=width
        )
        self._between = state, drafted, draft
        return sharding.everywhere(replace(draft, q=None), self.target.mesh)

    def advance(
        self,
        index: int | None,
        table: np.ndarray,
        free: np.ndarray,
        draft: Draft | None,
        legal: np.ndarray,
        width: int,
        logprobs: bool,
    ) -> device_rows.Progress:
        """Complete a masked step, by `specjax.decoding.constrained_rows.advance_rows`.

        Args:
            index: the index that `propose` was called with; None: the draft comes from the host.
            table: ``[rows, n]`` the pages of all rows.
            free: ``[rows]`` bool, rows without a text.
            draft: a chain in numpy arrays; None: the draft of `propose` as it is.
            legal: ``[width, N, words]`` the legal tokens.
            width: the number of rows.
            logprobs: whether to report log-probabilities.
        """
        state, drafted = self._adjusted_state(self.is_adjusting), None
        if self._between is not None:
            state, drafted, proposed = self._between
            draft = proposed if draft is None else self._with_tokens(proposed, draft)
        assert draft is not None
        self._between = None
        state, progress, _ = constrained_rows.advance_rows(
            self.target,
            self._masked_drafter(index),
            state,
            table,
            free,
            draft,
            legal,
            drafted,
            width=width,
            logprobs=self._top(logprobs),
        )
        self._set_state(state)
        return sharding.everywhere(progress, self.target.mesh)

    def _with_tokens(self, draft: Draft, on_host: Draft) -> Draft:
        """Return a draft with the tokens and valid nodes of one on the host."""
        tokens, valid = on_host.tokens, on_host.valid
        if self.target.mesh is not None:  # `advance_rows` is compiled for arrays that are placed so
            tokens, valid = jax.device_put((tokens, valid), draft.tokens.sharding)
        return replace(draft, tokens=tokens, valid=valid)

    def adjust(self, row: int, text: Adjustments | None) -> None:
        """Set what a row has generated and what it bans; None: its text has no penalty or bias.

        ``text`` is an `Adjustments` of one row, on the host.
        """
        if self.adjustments is None or (text is None and row not in self._adjusted_rows):
            return
        self._adjusted_rows -= {row}
        if text is not None:
            self._adjusted_rows.add(row)
        text = adjusted_rows.neutral(self.adjustments) if text is None else text
        self.adjustments = adjusted_rows.put(self.adjustments, np.int32(row), text)

    def _adjusted_state(self, is_adjusted: bool) -> Any:
        """Return the state, for a call with adjustments or one without."""
        if not is_adjusted:
            return self.state
        return adjusted_rows.with_adjustments(self.state, self.adjustments)

    def _set_state(self, state: Any) -> None:
        """Store the state after a call, and its adjustments if it has any."""
        if state.sampling.adjustments is not None:
            self.adjustments = state.sampling.adjustments
        self.state = adjusted_rows.with_adjustments(state, None)

    def _masked_drafter(self, index: int | None) -> Drafter:
        """Return the drafter of a masked step; None: the reader of a draft from the host.

        The reader stores the tokens for a drafter that may be paused. Others read them at once.
        """
        if index is not None:
            return self.drafters[index]
        if self.masked is None or self.paused is not None:
            return reader(self.drafters[self.plain])
        return reader(self.drafters[self.masked])

    def copy_rows(self) -> Any:
        """Return a copy of all rows, by `specjax.decoding.constrained_rows.copy_rows`."""
        return constrained_rows.copy_rows(self.state)

    def restore_rows(self, before: Any, mask: np.ndarray) -> None:
        """Put back the rows of ``mask [rows]``, by `constrained_rows.restore_rows`."""
        self.state = constrained_rows.restore_rows(self.target, self.state, before, mask)

    def catch_up(self, table: np.ndarray, most: int = ROOM) -> None:
        """Let the paused drafter read its pending tokens, at most ``most``, in all rows."""
        assert self.paused is not None
        self.state = device_rows.catch_up(
            self.target, self.paused, self.state, table, width=self.sizes.rows, most=most
        )

    def rearrange(self, order: np.ndarray) -> None:
        """Reorder the rows, by `specjax.decoding.rows.rearrange`."""
        self.state = device_rows.rearrange(self.state, order)
        if self.adjustments is not None and self._adjusted_rows:
            self.adjustments = adjusted_rows.rearrange(self.adjustments, order)
            self._adjusted_rows = {
                new for new, old in enumerate(order.tolist()) if old in self._adjusted_rows
            }

    # --- before the first request ----------------------------------------------------------------

    def warm_up(
        self, settings: dict[str, Any], programs: Programs | None = None
    ) -> dict[tuple[int, int], float]:
        """Compile all programs, several at a time, and run each of them.

        Args:
            settings: the settings of a text without stop tokens, as `specjax.decoding.rows.Text`
                stores them.
            programs: the programs to compile; None: those that the method `programs` returns.

        Returns:
            The seconds of a step, by number of rows and index of the drafter.
        """
        self.is_adjusting = False
        table, text = self._placeholders(settings)
        (programs or Programs(self.programs(settings), threading.Condition())).compile_stage(
            None, f"compiling, {self.sizes.rows} rows"
        )
        if sharding.spans_processes(self.target.mesh):
            # A collective fails if one process enters it long before another, and compiling takes
            # one of them seconds that finds its programs in the persistent cache, and another
            # minutes.
            meet("compiled")
        calls = [
            (width, index) for index in range(len(self.drafters)) for width in self.widths_of(index)
        ]
        seconds = {}
        for width, index in track(calls, f"timing decoding, {self.sizes.rows} rows"):
            prefix_state = self._begin_in_all_rows(text, table)
            seconds[width, index] = min(
                [self._time_call(width, index, text, table) for _ in range(3)][1:]
            )
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
            self.read(
                table, nothing, nothing, [False] * self.groups, self.sizes.chunk, logprobs=True
            )
            self.decode(
                self.reporting, table, self._none(), 1, False, self.sizes.rows, logprobs=True
            )
        # `_begin_in_all_rows` admits with the empty prefix state. One that a chunk returned must
        # not compile another program.
        self.admit(0, text, 0, (prefix_state, np.int32(0)))
        self.wait()
        return seconds

    def programs(self, settings: dict[str, Any]) -> list[EngineProgram]:
        """Return all programs, in stages.

        The first stage has the programs that a plain request in one row needs. The last stage has
        those that copy predictions.

        Args:
            settings: the settings of a text without stop tokens, as for `warm_up`.
        """
        table, text = self._placeholders(settings)
        rows, widths = self.sizes.rows, self.sizes.widths
        nothing, last, zero = [0] * self.groups, [False] * self.groups, np.int32(0)

        def read(
            stage: int, width: int, logprobs: bool = False, for_client: bool = False
        ) -> EngineProgram:
            def lower() -> Any:
                arguments, options = self._read_arguments(
                    table, nothing, nothing, last, width, logprobs, for_client
                )
                return device_rows.read_chunk.lower(*arguments, **options)

            return EngineProgram("read", (width, logprobs, for_client), stage, lower)

        def decode(stage: int, width: int, index: int, logprobs: bool = False) -> EngineProgram:
            return EngineProgram(
                "decode",
                (width, index, logprobs),
                stage,
                lambda: self._lower_decode(table, index, width, logprobs),
            )

        def verify(stage: int, width: int, is_masked: bool = False) -> EngineProgram:
            def lower() -> Any:
                arguments = self._verify_arguments(table, width, [], [])
                words = mask_words(self.target.config.vocab_size)
                masks = np.zeros((width, self._clients.nodes, words), np.uint32)
                legal = masks if is_masked else None
                return remote_drafts.verify_rows.lower(
                    *arguments, legal=legal, depth=self._clients.depth
                )

            return EngineProgram("verify_masked" if is_masked else "verify", (width,), stage, lower)

        def admit() -> Any:
            return device_rows.admit.lower(
                *self._reading, zero, text, zero, self._empty_prefix_state, zero
            )

        listed = [EngineProgram("admit", (), 0, admit)]
        listed += [
            read(0 if width == self.sizes.chunk else 1, width) for width in self.sizes.read_widths
        ]
        listed += [decode(0 if width == widths[0] else 2, width, self.plain) for width in widths]
        if self.paused is not None:
            listed.append(EngineProgram("catch_up", (ROOM,), 1, self._lower_catch_up(table, ROOM)))
        if len(widths) > 1:
            order = np.arange(rows, dtype=np.int32)
            listed.append(
                EngineProgram(
                    "rearrange", (), 1, lambda: device_rows.rearrange.lower(self.state, order)
                )
            )
        drafting = [index for index in range(len(self.drafters)) if index != self.plain]
        for width in widths:
            listed += [
                decode(3, width, index) for index in drafting if not copies(self.drafters[index])
            ]
        if self.sizes.max_logprobs:
            listed += [
                read(4, self.sizes.chunk, logprobs=True),
                decode(4, rows, self.reporting, logprobs=True),
            ]
        if self.grammars:
            for width in self.masked_widths:
                listed += self._masked_programs(table, width)
            listed += self._programs_of_copies()
            if self.paused is not None:
                lower = self._lower_catch_up(table, FEW_PENDING)
                listed.append(EngineProgram("catch_up", (FEW_PENDING,), 4, lower))
        if self.adjustments is not None:
            listed += self._adjusting_programs(table)
        if self.remote_drafter is not None:
            listed += [read(5, width, for_client=True) for width in self.sizes.read_widths]
        if self.clients is not None:
            listed += [verify(5, width) for width in widths]
        if self.clients is not None and self.grammars:
            listed += [verify(5, width, is_masked=True) for width in self.masked_widths]
        for index in drafting:
            listed += [
                decode(6, width, index)
                for width in self.widths_of(index)
                if copies(self.drafters[index])
            ]
        return listed

    def _adjusting_programs(self, table: np.ndarray) -> list[EngineProgram]:
        """Return the programs for rows some of which have penalties or biases."""
        kind, adjustments = ADJUSTING[0], self.adjustments
        assert adjustments is not None
        listed = [
            EngineProgram(
                kind,
                (width, self.adjusting, False),
                5,
                partial(self._lower_decode, table, self.adjusting, width, False, True),
            )
            for width in self.masked_widths
        ]
        if self.sizes.max_logprobs:
            rows = self.sizes.rows
            lower = partial(self._lower_decode, table, self.reporting, rows, True, True)
            listed.append(EngineProgram(kind, (rows, self.reporting, True), 5, lower))
        if self.grammars:
            for width in self.masked_widths:
                listed += self._masked_programs(table, width, is_adjusted=True)
        order = np.arange(self.sizes.rows, dtype=np.int32)
        neutral = adjusted_rows.neutral(adjustments)
        return [
            *listed,
            EngineProgram(
                "adjust",
                (),
                5,
                lambda: adjusted_rows.put.lower(self.adjustments, np.int32(0), neutral),
            ),
            EngineProgram(
                "rearrange_adjusted",
                (),
                5,
                lambda: adjusted_rows.rearrange.lower(self.adjustments, order),
            ),
        ]

    @property
    def adjusting(self) -> int:
        """The index of the drafter that drafts beside penalties: that of masked steps, if any."""
        return self.plain if self.masked is None else self.masked

    def _masked_programs(
        self, table: np.ndarray, width: int, is_adjusted: bool = False
    ) -> list[EngineProgram]:
        """Return the programs of masked steps for a number of rows."""
        free, words = self._none(), mask_words(self.target.config.vocab_size)

        def lower_propose(index: int) -> Any:
            return constrained_rows.propose_rows.lower(
                *self._with(index, is_adjusted), table, free, width=width
            )

        def lower_advance(index: int | None, logprobs: bool) -> Any:
            state, draft, drafted = (
                self._adjusted_state(is_adjusted),
                forced_draft([()] * width),
                None,
            )
            if index is not None:
                state, draft, drafted = _shapes_of_results(
                    lower_propose(index), has_mesh=self.target.mesh is not None
                )
            legal = np.zeros((width, *draft.tokens.shape[1:], words), np.uint32)
            return constrained_rows.advance_rows.lower(
                self.target,
                self._masked_drafter(index),
                state,
                table,
                free,
                draft,
                legal,
                drafted,
                width=width,
                logprobs=self._top(logprobs),
            )

        def advance(kind: str, index: int | None, logprobs: bool, stage: int) -> EngineProgram:
            lower = partial(lower_advance, index, logprobs)
            return EngineProgram(kind, (width, index is None, logprobs), stage, lower)

        # Requests with log-probabilities decode with all rows, and without copies.
        reports = [False, True] if self.sizes.max_logprobs and width == self.sizes.rows else [False]
        (_, propose, verify), stage = (ADJUSTING, 5) if is_adjusted else (("", *MASKED), 4)
        listed = [advance(verify, None, logprobs, stage) for logprobs in reports]
        ways = [(self.masked, propose, verify, stage)]
        if not is_adjusted:  # rows with predictions draft like the others beside penalties
            ways.append((self.copying, *COPYING, 6))
        for index, propose, verify, stage in ways:
            if index is None:
                continue
            listed += [
                advance(verify, index, logprobs, stage)
                for logprobs in (reports if index == self.masked else [False])
            ]
            listed.append(EngineProgram(propose, (width,), stage, partial(lower_propose, index)))
        return listed

    def _programs_of_copies(self) -> list[EngineProgram]:
        """Return the programs that copy rows before a free call, and put them back."""

        def lower_copy() -> Any:
            return constrained_rows.copy_rows.lower(self.state)

        def lower_restore() -> Any:
            before = _shapes_of_results(lower_copy(), has_mesh=self.target.mesh is not None)
            return constrained_rows.restore_rows.lower(
                self.target, self.state, before, self._none()
            )

        return [
            EngineProgram("copy_rows", (), 4, lower_copy),
            EngineProgram("restore_rows", (), 4, lower_restore),
        ]

    def time_decoding(self, settings: dict[str, Any], width: int, index: int) -> float:
        """Measure the seconds of a step, as `warm_up` does, and wait for the result.

        All rows must be free. The KV cache is not changed.
        """
        self.is_adjusting = False
        table, text = self._placeholders(settings)
        # Out of range, so that nothing is written to any page.
        table = np.full_like(table, self.sizes.pages)
        self._begin_in_all_rows(text, table)
        seconds = min([self._time_call(width, index, text, table) for _ in range(3)][1:])
        if self.paused is not None:
            self.catch_up(table)
        self.wait()
        return seconds

    def _lower_catch_up(self, table: np.ndarray, most: int) -> Callable[[], Any]:
        return lambda: device_rows.catch_up.lower(
            self.target, self.paused, self.state, table, width=self.sizes.rows, most=most
        )

    def _lower_decode(
        self,
        table: np.ndarray,
        index: int,
        width: int,
        logprobs: bool,
        is_adjusted: bool = False,
    ) -> Any:
        arguments = table, self._none(), np.int32(1), np.bool_(False)
        return device_rows.decode_rows.lower(
            *self._with(index, is_adjusted),
            *arguments,
            width=width,
            call_steps=self.sizes.steps,
            logprobs=self._top(logprobs),
        )

    @property
    def _reading(self) -> tuple[Target, Drafter, Any]:
        """The target, the first drafter, whose state all drafters share, and the state."""
        return self._with(0)

    def _with(self, index: int, is_adjusted: bool = False) -> tuple[Target, Drafter, Any]:
        return self.target, self.drafters[index], self._adjusted_state(is_adjusted)

    def _top(self, logprobs: bool) -> int | None:
        return self.sizes.max_logprobs if logprobs else None

    def _none(self) -> np.ndarray:
        return np.zeros(self.sizes.rows, bool)

    @property
    def _clients(self) -> ClientDrafts:
        assert self.clients is not None
        return self.clients

    def _verify_arguments(
        self,
        table: np.ndarray,
        width: int,
        rows: Sequence[int],
        drafts: Sequence[tuple[np.ndarray, np.ndarray]],
    ) -> tuple[Any, ...]:
        """Return the arguments of `remote_drafts.verify_rows` for ``width`` rows."""
        # Out of range where there is no draft.
        padded_rows = np.full(width, self.sizes.rows, np.int32)
        padded_rows[: len(rows)] = rows
        remote_drafter = NoDraft() if self.remote_drafter is None else self.remote_drafter
        padded = self._padded_drafts(width, drafts)
        return self.target, remote_drafter, self.state, table, padded_rows, *padded

    def _padded_drafts(
        self, width: int, drafts: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the tokens, the parents and the valid nodes of ``width`` rows, ``[width, N]``."""
        tokens = np.zeros((width, self._clients.nodes), np.int32)
        parents, valid = np.zeros_like(tokens), np.zeros(tokens.shape, bool)
        parents[:, 0], valid[:, 0] = -1, True
        for index, (draft_tokens, draft_parents) in enumerate(drafts):
            count = len(draft_tokens)
            tokens[index, :count], parents[index, :count], valid[index, :count] = (
                draft_tokens,
                draft_parents,
                True,
            )
        return tokens, parents, valid

    def _read_arguments(
        self,
        table: np.ndarray,
        rows: Sequence[int],
        counts: Sequence[int],
        is_last: Sequence[bool],
        size: int,
        logprobs: bool,
        for_client: bool,
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments of `specjax.decoding.rows.read_chunk`."""
        arguments = np.array(rows, np.int32), np.array(counts, np.int32), np.array(is_last)
        options: dict[str, Any] = {"size": size, "logprobs": self._top(logprobs)}
        if for_client and self.remote_drafter is not None:
            options["remote_drafter"] = self.remote_drafter
        return (*self._reading, table, *arguments), options

    def _placeholders(self, settings: dict[str, Any]) -> tuple[np.ndarray, device_rows.Text]:
        """Return pages for all rows, and a text that is as long as these pages allow."""
        sizes, share = self.sizes, self.sizes.rows // self.groups
        columns = -(-sizes.capacity // sizes.page)
        pages_per_row = min(columns, sizes.pages // share)
        table = np.full((sizes.rows, columns), sizes.pages, np.int32)
        for row in range(sizes.rows):
            table[row, :pages_per_row] = np.arange(pages_per_row) + row % share * pages_per_row
        max_length = max(min(sizes.capacity, pages_per_row * sizes.page), 3)
        tokens = np.ones(sizes.capacity, np.int32)
        return table, device_rows.Text(
            tokens=tokens, length=np.int32(2), max_length=np.int32(max_length), **settings
        )

    def _begin_in_all_rows(self, text: device_rows.Text, table: np.ndarray) -> Any:
        """Admit a text to every row and prefill it, with all programs for that.

        Returns:
            The prefix state after the newest chunk.
        """
        share, prefix_state = self.sizes.rows // self.groups, None
        for row in range(self.sizes.rows):
            self.admit(row, text, 0, None)
        for row in range(share):
            rows = [group * share + row for group in range(self.groups)]
            short, whole = self.sizes.read_widths
            for width in (short, whole) if row == 0 else (short,):
                counts = [int(width == short)] * self.groups
                prefix_state, _, _ = self.read(
                    table, rows, counts, [True] * self.groups, width, logprobs=False
                )
        return prefix_state

    def _time_call(
        self, width: int, index: int, text: device_rows.Text, table: np.ndarray
    ) -> float:
        """Make a decode call with ``width`` rows, and return the seconds of one of its steps."""
        done, before = sharding.to_host((self.state.done, self.state.stats.steps), self.target.mesh)
        if done[:width].all():  # all texts have reached their pages' end, so that they begin anew
            self._begin_in_all_rows(text, table)
            before = sharding.to_host(self.state.stats.steps, self.target.mesh)
        started = time.perf_counter()
        progress = self.decode(
            index, table, self._none(), _TIMED_STEPS, False, width, logprobs=False
        )
        steps = jax.device_get(progress).stats.steps - before
        return (time.perf_counter() - started) / int(steps.max())


def _shapes_of_results(lowered: jax.stages.Lowered, has_mesh: bool) -> Any:
    """Return the results of a program as shapes, on a mesh with the compiler's shardings.

    Without a mesh, a sharding would make the next program another one than that of plain arrays.
    """
    if not has_mesh:
        return jax.tree.map(
            lambda shape: jax.ShapeDtypeStruct(shape.shape, shape.dtype), lowered.out_info
        )
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        lowered.out_info,
        lowered.compile().output_shardings,
    )


def copies(drafter: Drafter) -> bool:
    """Return whether a drafter copies predictions."""
    return isinstance(drafter, WithPrediction) and drafter.longest > 0


def _drafts_chains(drafter: Drafter) -> bool:
    return drafter.draft_shape.depth > 0 and drafter.draft_shape.is_chain


def is_paused(drafter: Drafter) -> bool:
    """Return whether a drafter is paused."""
    wrapped = drafter.drafter if isinstance(drafter, WithPrediction) else drafter
    return isinstance(wrapped, Pausable) and wrapped.paused
