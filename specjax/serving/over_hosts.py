"""An engine over several processes, whose devices hold one model together (`specjax.processes`).

The first process has the engine: it takes the requests, and its clock and queue decide what the
device does next. It sends each device call with its host arguments to the other processes, which
make the same calls in the same order. The results need not be sent, because every device computes
them.

Earlier answers (`specjax.serving.earlier_answers`) are sorted by every process, because their new
texts are much smaller than the sorted index. The first process sends the texts when it begins to
sort them, and later the call that puts the result on the device. A thread of low priority sorts in
each of the others, too. A call waits until the result is there, and so do all texts. A process that
cannot sort ends at that call, and with it the engine: all devices must have the same index.
"""

import logging
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import Any

import jax
import msgspec
import numpy as np

from specjax.decoding import remote_drafts
from specjax.decoding import rows as device_rows
from specjax.drafters import Drafter
from specjax.drafters.pausable import ROOM
from specjax.drafters.suffix_index import SuffixIndex
from specjax.drafts.draft import Draft
from specjax.drafts.tree import chain_parents
from specjax.models.transformer import Target
from specjax.processes import Processes
from specjax.sampling import SAMPLING_NAMES
from specjax.serving.device import ClientDrafts, EngineDevice, Sizes
from specjax.serving.earlier_answers import Changes, EarlierAnswers
from specjax.serving.programs import Programs
from specjax.serving.threads import lower_priority


class HostArray(msgspec.Struct, frozen=True, array_like=True):
    """A host array as it is sent."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(array: Any) -> "HostArray":
        """Pack anything that numpy can convert to an array."""
        array = np.asarray(array)
        return HostArray(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> np.ndarray:
        """Unpack the array. It is read-only."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Admit(msgspec.Struct, frozen=True, tag="Admit"):
    """A call of `EngineDevice.admit`.

    ``prefix_state`` is the index of the read call that returned the prefix state; -1 stands for the
    empty one.
    """

    row: int
    text: dict[str, HostArray]
    start: int
    prefix_state: int = msgspec.field(name="border")
    group: int


class ReadCall(msgspec.Struct, frozen=True, tag="Read"):
    """A call of `EngineDevice.read`.

    ``forget`` has the indices of earlier read calls whose prefix states are not needed any more.
    """

    table: HostArray
    rows: list[int]
    counts: list[int]
    is_last: list[bool]
    width: int
    logprobs: bool
    for_client: bool
    forget: list[int]


class Verify(msgspec.Struct, frozen=True, tag="Verify"):
    """A call of `EngineDevice.verify`."""

    table: HostArray
    rows: list[int]
    drafts: list[tuple[HostArray, HostArray]]
    legal: HostArray | None = None


class Decode(msgspec.Struct, frozen=True, tag="Decode"):
    """A call of `EngineDevice.decode`."""

    number: int
    table: HostArray
    free: HostArray
    steps: int
    until_any_done: bool
    width: int
    logprobs: bool


class Propose(msgspec.Struct, frozen=True, tag="Propose"):
    """A call of `EngineDevice.propose`."""

    index: int
    table: HostArray
    free: HostArray
    width: int


class Advance(msgspec.Struct, frozen=True, tag="Advance"):
    """A call of `EngineDevice.advance`.

    ``chain`` has the tokens and the valid nodes of a draft that the first process has made.
    """

    index: int | None
    table: HostArray
    free: HostArray
    chain: tuple[HostArray, HostArray] | None
    legal: HostArray
    width: int
    logprobs: bool


class CatchUp(msgspec.Struct, frozen=True, tag="CatchUp"):
    """A call of `EngineDevice.catch_up`."""

    table: HostArray
    most: int = ROOM


class CopyRows(msgspec.Struct, frozen=True, tag="CopyRows"):
    """A call of `EngineDevice.copy_rows`. Each process keeps its newest copy."""


class RestoreRows(msgspec.Struct, frozen=True, tag="RestoreRows"):
    """A call of `EngineDevice.restore_rows` with the newest copy."""

    mask: HostArray


class Rearrange(msgspec.Struct, frozen=True, tag="Rearrange"):
    """A call of `EngineDevice.rearrange`."""

    order: HostArray


class SortAnswers(msgspec.Struct, frozen=True, tag="SortAnswers"):
    """The beginning of a sort of a tenant's earlier answers, see `Changes`.

    ``forget`` has the versions of sorted answers that are not needed any more.
    """

    version: int
    sorted_version: int
    texts: list[HostArray]
    begin: int
    end: int
    forget: list[int]


class PutAnswers(msgspec.Struct, frozen=True, tag="PutAnswers"):
    """A call of `EngineDevice.put_answers`."""

    segment: int
    version: int


Call = (
    Admit
    | ReadCall
    | Verify
    | Decode
    | Propose
    | Advance
    | CopyRows
    | RestoreRows
    | CatchUp
    | Rearrange
    | SortAnswers
    | PutAnswers
)
"""A message to the other processes.

It is a call of `specjax.serving.device.EngineDevice`, or `SortAnswers`, which the thread that sorts
sends.
"""

_LOGGER = logging.getLogger(__name__)
_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Call)


class _NumberedState:
    """A prefix state, with the index of the read call by which the other processes find theirs."""

    def __init__(self, index: int, prefix_state: Any) -> None:
        self.index, self.prefix_state = index, prefix_state


class LeadingDevice(EngineDevice):
    """The `EngineDevice` of the first process, which sends each of its calls to the others.

    All processes compile and warm up by themselves, in the same way. Calls are sent from then on.
    """

    def __init__(
        self,
        target: Target,
        drafters: Sequence[Drafter],
        sizes: Sizes,
        clients: ClientDrafts | None = None,
        grammars: bool = False,
        earlier_answers: int = 0,
        *,
        processes: Processes,
    ) -> None:
        """Make the device, while the other processes run `specjax.serving.follow`."""
        self._processes, self._is_warm = processes, False
        super().__init__(
            target, drafters, sizes, clients, grammars, earlier_answers=earlier_answers
        )
        self._reads = 0
        # Indices of prefix states that were freed. Finalizers append to it in any thread, which a
        # deque allows without a lock.
        self._forgotten: deque[int] = deque()

    def warm_up(
        self, settings: dict[str, Any], programs: Programs | None = None
    ) -> dict[tuple[int, int], float]:
        """Warm up as `EngineDevice.warm_up` does, and send all later calls."""
        seconds = super().warm_up(settings, programs)
        self._is_warm = True
        return seconds

    def admit(
        self,
        row: int,
        text: device_rows.Text,
        start: int,
        prefix_state: tuple[Any, np.int32] | None,
    ) -> None:
        """Send the call, and make it as `EngineDevice.admit`."""
        if self._is_warm:
            numbered, group = prefix_state or (_NumberedState(-1, None), np.int32(0))
            fields = dict(vars(text))
            fields |= fields.pop("sampling")  # one level of names
            packed = {
                name: HostArray.of(value) for name, value in fields.items() if value is not None
            }
            self._send(Admit(row, packed, start, numbered.index, int(group)))
            prefix_state = None if prefix_state is None else (numbered.prefix_state, group)
        super().admit(row, text, start, prefix_state)

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
        """Send the call, and make it as `EngineDevice.read`."""
        if not self._is_warm:
            return super().read(table, rows, counts, is_last, size, logprobs, for_client)
        forget = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        self._send(
            ReadCall(
                HostArray.of(table),
                list(rows),
                list(counts),
                list(is_last),
                size,
                logprobs,
                for_client,
                forget,
            )
        )
        prefix_state, token_logprobs, features = super().read(
            table, rows, counts, is_last, size, logprobs, for_client
        )
        numbered = _NumberedState(self._reads, prefix_state)
        # The other processes may free theirs as soon as no prefix and no waiting chunk refers to
        # this one.
        weakref.finalize(numbered, self._forgotten.append, numbered.index).atexit = False
        self._reads += 1
        return numbered, token_logprobs, features

    def verify(
        self,
        table: np.ndarray,
        rows: Sequence[int],
        drafts: Sequence[tuple[np.ndarray, np.ndarray]],
        legal: np.ndarray | None = None,
    ) -> remote_drafts.VerifiedRows:
        """Send the call, and make it as `EngineDevice.verify`."""
        packed = [(HostArray.of(tokens), HostArray.of(parents)) for tokens, parents in drafts]
        masks = None if legal is None else HostArray.of(legal)
        self._send(Verify(HostArray.of(table), list(rows), packed, masks))
        return super().verify(table, rows, drafts, legal)

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
        """Send the call, and make it as `EngineDevice.decode`."""
        self._send(
            Decode(
                index,
                HostArray.of(table),
                HostArray.of(free),
                steps,
                until_any_done,
                width,
                logprobs,
            )
        )
        return super().decode(index, table, free, steps, until_any_done, width, logprobs)

    def propose(self, index: int, table: np.ndarray, free: np.ndarray, width: int) -> Draft:
        """Send the call, and make it as `EngineDevice.propose`."""
        self._send(Propose(index, HostArray.of(table), HostArray.of(free), width))
        return super().propose(index, table, free, width)

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
        """Send the call, and make it as `EngineDevice.advance`."""
        chain = None
        if draft is not None:
            chain = HostArray.of(draft.tokens), HostArray.of(draft.valid)
        arrays = HostArray.of(table), HostArray.of(free), chain, HostArray.of(legal)
        self._send(Advance(index, *arrays, width, logprobs))
        return super().advance(index, table, free, draft, legal, width, logprobs)

    def copy_rows(self) -> Any:
        """Send the call, and make it as `EngineDevice.copy_rows`."""
        self._send(CopyRows())
        return super().copy_rows()

    def restore_rows(self, before: Any, mask: np.ndarray) -> None:
        """Send the call, and make it as `EngineDevice.restore_rows`.

        ``before`` must be the newest copy.
        """
        self._send(RestoreRows(HostArray.of(mask)))
        super().restore_rows(before, mask)

    def catch_up(self, table: np.ndarray, most: int = ROOM) -> None:
        """Send the call, and make it as `EngineDevice.catch_up`."""
        self._send(CatchUp(HostArray.of(table), most))
        super().catch_up(table, most)

    def rearrange(self, order: np.ndarray) -> None:
        """Send the call, and make it as `EngineDevice.rearrange`."""
        self._send(Rearrange(HostArray.of(order)))
        super().rearrange(order)

    def put_answers(self, segment: int, answers: SuffixIndex, version: int) -> None:
        """Send the call, and make it as `EngineDevice.put_answers`."""
        self._send(PutAnswers(segment, version))
        super().put_answers(segment, answers, version)

    def _send(self, call: Call) -> None:
        if self._is_warm:  # until then all processes make the same calls by themselves
            self._processes.send(_ENCODER.encode(call))


class LeadingAnswers(EarlierAnswers):
    """The `EarlierAnswers` of the first process, which lets all others sort what it sorts."""

    def __init__(self, capacity: int, processes: Processes, **options: Any) -> None:
        """Start the thread, with the arguments of `EarlierAnswers`."""
        self._processes = processes
        # The versions of indices that were freed. Finalizers append to it in any thread.
        self._forgotten: deque[int] = deque()
        super().__init__(capacity, **options)

    def _sorted(self, changes: Changes) -> SuffixIndex:
        texts = [HostArray.of(text) for text in changes.texts]
        places = changes.begin, changes.end
        forget = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        call = SortAnswers(changes.version, changes.sorted_version, texts, *places, forget)
        self._processes.send(_ENCODER.encode(call))
        try:
            index = super()._sorted(changes)
        except BaseException:
            self._forgotten.append(changes.version)
            raise
        # The other processes may free theirs when no tenant has this one any more, and it is not on
        # its way to the device.
        weakref.finalize(index, self._forgotten.append, changes.version).atexit = False
        return index


class FollowingAnswers:
    """The sorted earlier answers of a process that repeats the calls of the first one.

    A thread of low priority sorts them, in the order of the calls.

    Examples:
        >>> from specjax.serving.over_hosts import FollowingAnswers, HostArray, SortAnswers
        >>> answers = FollowingAnswers()
        >>> answers.sort(SortAnswers(1, 0, [HostArray.of(np.int32([5, 7, 8]))], 0, 0, []))
        >>> answers.sort(SortAnswers(2, 1, [HostArray.of(np.int32([6]))], 0, 4, []))
        >>> answers.index(2).tokens.tolist()  # with the end of each text, and of the segment
        [5, 7, 8, -1, 6, -1, -1]
        >>> answers.close()
    """

    def __init__(self) -> None:
        """Begin without answers."""
        self._thread = ThreadPoolExecutor(1, "specjax-answers", initializer=lower_priority)
        self._indices: dict[int, Future[SuffixIndex]] = {}  # by version

    def sort(self, call: SortAnswers) -> None:
        """Begin to sort. It returns at once."""
        before = self._indices[call.sorted_version] if call.sorted_version else None
        for version in call.forget:
            del self._indices[version]
        self._indices[call.version] = self._thread.submit(_sorted_after, before, call)

    def index(self, version: int) -> SuffixIndex:
        """Return the sorted answers of a version, as soon as they are there."""
        return self._indices[version].result()

    def close(self) -> None:
        """End the thread, and drop all answers."""
        self._thread.shutdown(cancel_futures=True)
        self._indices.clear()


def _sorted_after(before: Future[SuffixIndex] | None, call: SortAnswers) -> SuffixIndex:
    """Return the sorted answers after a call; ``before`` has the index that it changes."""
    try:
        index = None if before is None else before.result()  # one thread sorts, so it is done
        texts = [text.array() for text in call.texts]
        changes = Changes(call.version, call.sorted_version, index, texts, call.begin, call.end)
        return changes.applied()
    except Exception:
        _LOGGER.exception("earlier answers cannot be sorted; the engine ends when it needs them")
        raise


def repeat_calls(device: EngineDevice, processes: Processes) -> None:
    """Make the calls of the first process on the ``device`` of this one, until it sends no more."""
    with closing(FollowingAnswers()) as answers:
        _repeat_calls(device, processes, answers)
    device.release()


def _repeat_calls(device: EngineDevice, processes: Processes, answers: FollowingAnswers) -> None:
    """Make the calls of the first process, until it sends no more."""
    prefix_states: dict[int, Any] = {}
    reads, before = 0, None
    while (message := processes.receive()) is not None:
        match _DECODER.decode(message):
            case Admit(row, packed, start, prefix_state, group):
                fields: dict[str, Any] = {name: value.array() for name, value in packed.items()}
                text = device_rows.Text(
                    sampling={name: fields.pop(name) for name in SAMPLING_NAMES}, **fields
                )
                device.admit(
                    row,
                    text,
                    start,
                    None if prefix_state < 0 else (prefix_states[prefix_state], np.int32(group)),
                )
            case ReadCall(table, rows, counts, is_last, size, logprobs, for_client, forget):
                for index in forget:
                    prefix_states.pop(index, None)
                prefix_states[reads], _, _ = device.read(
                    table.array(), rows, counts, is_last, size, logprobs, for_client
                )
                reads += 1
            case Verify(table, rows, drafts, legal):
                device.verify(
                    table.array(),
                    rows,
                    [(tokens.array(), parents.array()) for tokens, parents in drafts],
                    None if legal is None else legal.array(),
                )
            case Decode(index, table, free, steps, until_any_done, width, logprobs):
                device.decode(
                    index, table.array(), free.array(), steps, until_any_done, width, logprobs
                )
                device.wait()  # an error of this device is raised here, and not in a later call
            case Propose() | Advance() as call:
                _repeat_masked(device, call)
            case CopyRows():
                before = device.copy_rows()
            case RestoreRows(mask):
                device.restore_rows(before, mask.array())
                before = None
            case CatchUp(table, most):
                device.catch_up(table.array(), most)
            case Rearrange(order):
                device.rearrange(order.array())
            case SortAnswers() | PutAnswers() as call:
                _repeat_with_answers(device, answers, call)


def _repeat_with_answers(
    device: EngineDevice, answers: FollowingAnswers, call: SortAnswers | PutAnswers
) -> None:
    """Begin to sort earlier answers, or put sorted ones on the device."""
    if isinstance(call, SortAnswers):
        answers.sort(call)
    else:
        device.put_answers(call.segment, answers.index(call.version), call.version)


def _repeat_masked(device: EngineDevice, call: Propose | Advance) -> None:
    """Make a call of a masked step."""
    table, free = call.table.array(), call.free.array()
    if isinstance(call, Propose):
        device.propose(call.index, table, free, call.width)
        return
    draft = None
    if call.chain is not None:
        tokens, valid = (part.array() for part in call.chain)
        draft = Draft.of_tree(tokens, chain_parents(tokens.shape[1]), valid=valid)  # pyright: ignore[reportArgumentType]
    device.advance(call.index, table, free, draft, call.legal.array(), call.width, call.logprobs)
    device.wait()  # as after `Decode`
