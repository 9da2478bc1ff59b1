"""Stopping a training after its running step, in all of its processes after the same step."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from specjax.training.contract import Batch

_SECONDS_OF_ONE_SIGNAL = 1.0
"""Signals within so many seconds count as one: a terminal, a shell and a launcher may each send it.
"""


class StopRequest:
    """A request to stop a training, which another thread may make at any time.

    The training finishes the running step, saves, and returns. On several processes the request of
    one stops all of them after the same step.

    Attributes:
        number: the number of the signal that the request comes from; 0 before a request. After a
            stop it is the same in all processes.
        is_heeded: whether a training has something to save, and heeds a request.
        stopped_after: the step after which the training stopped; None if it came to its end.

    Examples:
        >>> import signal
        >>> from specjax.training.stopping import StopRequest
        >>> stop = StopRequest()  # an argument of specjax.training.loop.train
        >>> stop.request(signal.SIGTERM)  # no training heeds it
        False
    """

    def __init__(self) -> None:
        self.number = 0
        self.is_heeded = False
        self.stopped_after: int | None = None
        self._requested_at: float | None = None

    @contextmanager
    def heeded_until_the_end(self) -> Iterator[None]:
        """Forget earlier requests, and heed no request any more after the block."""
        self.number, self.stopped_after, self._requested_at = 0, None, None
        try:
            yield
        finally:
            self.is_heeded = False

    def request(self, number: int = 1) -> bool:
        """Ask the training to stop.

        Args:
            number: the number of the signal.

        Returns:
            Whether it will stop. False before its first step and after its end, and for a second
            request a second or more after the first: the caller should end the process.
        """
        if not self.is_heeded:
            return False
        now = time.monotonic()
        # `number` may be that of another process, which had its signal earlier than this one.
        self.number = self.number or int(number)
        self._requested_at = now if self._requested_at is None else self._requested_at
        return now - self._requested_at < _SECONDS_OF_ONE_SIGNAL


class StoppedError(Exception):
    """Ends an evaluation that a request to stop interrupts."""


def until_stopped(batches: Iterator[Batch], agreement: "Agreement") -> Iterator[Batch]:
    """Yield batches. Raise StoppedError before one if the training stops."""
    for batch in batches:
        if agreement.reached():
            raise StoppedError
        yield batch


class Agreement:
    """Decides whether a training stops, alike in all of its processes.

    Each process contributes its own request to a small computation on all devices. Several
    processes read its result one call late, so that no device waits for it. So they stop a step
    later than a single process.

    Args:
        stop: the request of this process.
        mesh: the mesh of the training; None for one device.
    """

    def __init__(self, stop: StopRequest, mesh: Mesh | None) -> None:
        self._stop, self._mesh = stop, mesh
        self._pending: jax.Array | None = None
        if mesh is not None:
            self._shards = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
            self._largest = jax.jit(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

    def reached(self) -> bool:
        """Return whether the training stops here. All processes must call this alike."""
        if self._mesh is None or not self._mesh.is_multi_process:
            return self._stop.number != 0
        earlier, self._pending = self._pending, self._largest(self._numbers())
        if earlier is None:
            return False
        if number := int(earlier):
            self._stop.number = number
        return number != 0

    def _numbers(self) -> jax.Array:
        """Return an array with one element per device: the number of its process's request."""
        assert self._mesh is not None
        local = np.array([self._stop.number], np.int32)
        return jax.make_array_from_callback((self._mesh.size,), self._shards, lambda _: local)
