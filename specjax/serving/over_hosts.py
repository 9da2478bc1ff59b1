"""An engine over several processes, whose devices hold one model together (`specjax.processes`).

The first process has the engine: it takes requests and decides, by its own clock and queue, what the device does next. Every
such call it tells the others, by name and with the numbers that the host gave it; they make the same calls in the same order.
What a call brings comes from their devices and need not be sent.
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
from specjax.models.transformer import Target
from specjax.processes import Processes
from specjax.sampling import SAMPLING_NAMES
from specjax.serving.device import ClientDrafts, EngineDevice, Sizes
from specjax.serving.programs import Programs


class HostArray(msgspec.Struct, frozen=True, array_like=True):
    """An array of the host, in bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes

    @staticmethod
    def of(array: Any) -> "HostArray":
        """Of anything that numpy makes an array of."""
        array = np.asarray(array)
        return HostArray(array.dtype.str, array.shape, array.tobytes())

    def array(self) -> np.ndarray:
        """What it was made of."""
        return np.frombuffer(self.data, self.dtype).reshape(self.shape)


class Admit(msgspec.Struct, frozen=True, tag="Admit"):
    """`EngineDevice.admit`; ``prefix_state`` is the number of the read that it came out of, -1 where nothing has been read."""

    row: int
    text: dict[str, HostArray]
    start: int
    prefix_state: int = msgspec.field(name="border")
    group: int


class ReadCall(msgspec.Struct, frozen=True, tag="Read"):
    """`EngineDevice.read`, and the numbers of earlier ones whose prefix states nobody will ask for any more."""

    table: HostArray
    rows: list[int]
    counts: list[int]
    is_last: list[bool]
    width: int
    logprobs: bool
    for_client: bool
    forget: list[int]


class Verify(msgspec.Struct, frozen=True, tag="Verify"):
    """`EngineDevice.verify`."""

    table: HostArray
    rows: list[int]
    drafts: list[tuple[HostArray, HostArray]]


class Decode(msgspec.Struct, frozen=True, tag="Decode"):
    """`EngineDevice.decode`."""

    number: int
    table: HostArray
    free: HostArray
    steps: int
    until_any_done: bool
    width: int
    logprobs: bool


class CatchUp(msgspec.Struct, frozen=True, tag="CatchUp"):
    """`EngineDevice.catch_up`."""

    table: HostArray


class Rearrange(msgspec.Struct, frozen=True, tag="Rearrange"):
    """`EngineDevice.rearrange`."""

    order: HostArray


Call = Admit | ReadCall | Verify | Decode | CatchUp | Rearrange
"""What the others are told: a call of `specjax.serving.device.EngineDevice`."""

_ENCODER, _DECODER = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(Call)


class _NumberedState:
    """What came out of a read, with the number by which the others know theirs."""

    def __init__(self, number: int, prefix_state: Any) -> None:
        self.number, self.prefix_state = number, prefix_state


class LeadingDevice(EngineDevice):
    """The first process's `EngineDevice`: it tells the others what it does.

    All compile and warm up by themselves, alike. From then on each of its calls is one of theirs.
    """

    def __init__(
        self,
        target: Target,
        drafters: Sequence[Drafter],
        sizes: Sizes,
        clients: ClientDrafts | None = None,
        *,
        processes: Processes,
    ) -> None:
        """As `EngineDevice`; the others have called `follow`."""
        super().__init__(target, drafters, sizes, clients)
        self._processes, self._is_warm = processes, False
        self._reads = 0
        self._forgotten: deque[int] = deque()  # other threads add to it: a prefix state is forgotten where its last prefix is

    def warm_up(self, settings: dict[str, Any], programs: Programs | None = None) -> dict[tuple[int, int], float]:
        """As `EngineDevice.warm_up`."""
        seconds = super().warm_up(settings, programs)
        self._is_warm = True
        return seconds

    def admit(self, row: int, words: device_rows.Text, start: int, prefix_state: tuple[Any, np.int32] | None) -> None:
        """As `EngineDevice.admit`."""
        if self._is_warm:
            kept, group = prefix_state or (_NumberedState(-1, None), np.int32(0))
            fields = dict(vars(words))
            fields |= fields.pop("sampling")  # one level of names
            text = {name: HostArray.of(value) for name, value in fields.items() if value is not None}
            self._tell(Admit(row, text, start, kept.number, int(group)))
            prefix_state = None if prefix_state is None else (kept.prefix_state, group)
        super().admit(row, words, start, prefix_state)

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
        """As `EngineDevice.read`."""
        if not self._is_warm:
            return super().read(table, rows, counts, is_last, width, logprobs, for_client)
        forget = [self._forgotten.popleft() for _ in range(len(self._forgotten))]
        self._tell(ReadCall(HostArray.of(table), list(rows), list(counts), list(is_last), width, logprobs, for_client, forget))
        prefix_state, said, told = super().read(table, rows, counts, is_last, width, logprobs, for_client)
        kept = _NumberedState(self._reads, prefix_state)
        weakref.finalize(kept, self._forgotten.append, kept.number).atexit = False
        self._reads += 1
        return kept, said, told

    def verify(
        self, table: np.ndarray, rows: Sequence[int], drafts: Sequence[tuple[np.ndarray, np.ndarray]]
    ) -> remote_drafts.VerifiedRows:
        """As `EngineDevice.verify`."""
        packed = [(HostArray.of(tokens), HostArray.of(parents)) for tokens, parents in drafts]
        self._tell(Verify(HostArray.of(table), list(rows), packed))
        return super().verify(table, rows, drafts)

    def decode(
        self, index: int, table: np.ndarray, free: np.ndarray, steps: int, until_any_done: bool, width: int, logprobs: bool
    ) -> device_rows.Progress:
        """As `EngineDevice.decode`."""
        self._tell(Decode(index, HostArray.of(table), HostArray.of(free), steps, until_any_done, width, logprobs))
        return super().decode(index, table, free, steps, until_any_done, width, logprobs)

    def catch_up(self, table: np.ndarray) -> None:
        """As `EngineDevice.catch_up`."""
        self._tell(CatchUp(HostArray.of(table)))
        super().catch_up(table)

    def rearrange(self, order: np.ndarray) -> None:
        """As `EngineDevice.rearrange`."""
        self._tell(Rearrange(HostArray.of(order)))
        super().rearrange(order)

    def _tell(self, call: Call) -> None:
        if self._is_warm:  # until then all do the same by themselves
            self._processes.send(_ENCODER.encode(call))


def repeat_calls(device: EngineDevice, processes: Processes) -> None:
    """Make the calls of the first process on this one's ``device``, until there are no more."""
    prefix_states: dict[int, Any] = {}
    reads = 0
    while (message := processes.receive()) is not None:
        match _DECODER.decode(message):
            case Admit(row, text, start, prefix_state, group):
                fields: dict[str, Any] = {name: packed.array() for name, packed in text.items()}
                words = device_rows.Text(sampling={name: fields.pop(name) for name in SAMPLING_NAMES}, **fields)
                device.admit(row, words, start, None if prefix_state < 0 else (prefix_states[prefix_state], np.int32(group)))
            case ReadCall(table, rows, counts, is_last, width, logprobs, for_client, forget):
                for number in forget:
                    prefix_states.pop(number, None)
                prefix_states[reads], _, _ = device.read(table.array(), rows, counts, is_last, width, logprobs, for_client)
                reads += 1
            case Verify(table, rows, drafts):
                device.verify(table.array(), rows, [(tokens.array(), parents.array()) for tokens, parents in drafts])
            case Decode(number, table, free, steps, until_any_done, width, logprobs):
                device.decode(number, table.array(), free.array(), steps, until_any_done, width, logprobs)
                device.wait()  # what this one's device could not do is raised here
            case CatchUp(table):
                device.catch_up(table.array())
            case Rearrange(order):
                device.rearrange(order.array())
    device.release()
