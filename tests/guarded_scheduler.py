"""Fail a test in which a thread uses an engine's scheduler without the engine's lock.

The scheduler is not for several threads at once. An engine uses it under its lock alone, and a use
without the lock goes wrong so rarely that tests would not see it. `guard_schedulers` is a fixture
for the packages whose tests make engines.
"""

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from specjax.serving import engine
from specjax.serving.clients import Clients
from specjax.serving.scheduler import Scheduler

_uses: list[str] = []
"""The uses without the lock. The engine's thread cannot fail a test, so the test looks here."""


class GuardedScheduler(Scheduler):
    """A scheduler whose public methods and attributes need the lock, once ``guard`` is set."""

    guard: threading.Condition

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("_"):
            guard = object.__getattribute__(self, "__dict__").get("guard")
            if guard is not None and not guard._is_owned():
                _uses.append(f"Scheduler.{name} by {threading.current_thread().name}")
                raise AssertionError(f"Scheduler.{name} is used without the engine's lock")
        return object.__getattribute__(self, name)


@pytest.fixture(scope="package", autouse=True)
def guard_schedulers() -> Iterator[None]:
    """Guard the schedulers of all engines that are made from here on."""
    begin = Clients.__init__

    def begin_guarded(
        clients: Clients, device: Any, scheduler: Scheduler, wake: threading.Condition
    ) -> None:
        begin(clients, device, scheduler, wake)
        if isinstance(scheduler, GuardedScheduler):
            scheduler.guard = wake

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "Scheduler", GuardedScheduler)
        # An engine passes its scheduler and its lock to the constructor of `Clients`.
        patch.setattr(Clients, "__init__", begin_guarded)
        yield


@pytest.fixture(autouse=True)
def unguarded_uses() -> Iterator[list[str]]:
    """Yield the uses without the lock so far; a test that leaves any fails."""
    _uses.clear()
    yield _uses
    assert not _uses
