"""An engine over several processes, whose devices hold one model together (`specjax.processes`).

The first process has the engine: it takes the requests, and its clock and queue decide what the
device does next. It sends each device call with its host arguments to the other processes, which
make the same calls in the same order. The results need not be sent, because every device computes
them.
"""

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import jax
import msgspec
import numpy as np

from specjax.decoding import remote_drafts
from specjax.decoding import rows as device_rows
from specjax.drafters import Drafter
from specjax.drafters.pausable import ROOM
from specjax.drafts.draft import Draft
from specjax.drafts.tree import chain_parents
from specjax.models.transformer import Target
from specjax.processes import Processes
from specjax.sampling import SAMPLING_NAMES
from specjax.serving.device import ClientDrafts, EngineDevice, Sizes
from specjax.serving.programs import Programs


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
)
"""A call of `specjax.serving.device.EngineDevice`, as it is sent to the other processes."""

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
        *,
        processes: Processes,
    ) -> None:
        """Make the device, while the other processes run `specjax.serving.follow`."""
        super().__init__(target, drafters, sizes, clients, grammars)
        self._processes, self._is_warm = processes, False
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

    def _send(self, call: Call) -> None:
        if self._is_warm:  # until then all processes make the same calls by themselves
            self._processes.send(_ENCODER.encode(call))


def repeat_calls(device: EngineDevice, processes: Processes) -> None:
    """Make the calls of the first process on the ``device`` of this one, until it sends no more."""
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
    device.release()


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
