"""A lock whose owner may die, with a clock that stands still until the waiting process sleeps."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from specjax.training import cache_lock
from specjax.training.cache_lock import only_one


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "data.lock"


class Clock:
    """A clock that advances by sleeping, and calls ``look`` each time."""

    def __init__(self, monkeypatch, look=lambda: None) -> None:
        self.now = 0.0
        self.look = look
        monkeypatch.setattr(
            cache_lock, "time", SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        )

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        self.look()


def test_one_process_has_the_lock_and_gives_it_up(lock) -> None:
    with only_one(lock, lambda: False, "building") as is_mine:
        assert is_mine and cache_lock._is_mine(lock.read_text())
    assert not list(lock.parent.iterdir())
    with pytest.raises(KeyError), only_one(lock, lambda: False, "building"):
        raise KeyError
    assert not list(lock.parent.iterdir())


def test_nobody_works_when_the_work_is_done(lock, monkeypatch) -> None:
    with only_one(lock, lambda: True, "building") as is_mine:
        assert not is_mine
    lock.write_text("elsewhere 7 0")
    clock = Clock(monkeypatch)
    with only_one(lock, lambda: clock.now > 3, "building") as is_mine:
        assert not is_mine and lock.exists()
    assert clock.now < 5


def test_an_owner_on_another_machine_keeps_the_lock_while_it_writes(lock, monkeypatch) -> None:
    lock.write_text("elsewhere 7 0")
    last = 200.0

    def look() -> None:
        if clock.now < last:
            lock.write_text(f"elsewhere 7 {clock.now // 80}")

    clock = Clock(monkeypatch, look)
    with only_one(lock, lambda: False, "building") as is_mine:
        assert is_mine
    waited = clock.now - last // 80 * 80
    assert cache_lock._PATIENCE <= waited <= cache_lock._PATIENCE + 2
    assert not list(lock.parent.iterdir())


@pytest.mark.parametrize("content", ["", "nonsense", "elsewhere"])
def test_a_lock_of_a_process_that_died_while_it_wrote_is_taken_over(
    content, lock, monkeypatch
) -> None:
    lock.write_text(content)
    clock = Clock(monkeypatch)
    with only_one(lock, lambda: False, "building") as is_mine:
        assert is_mine
    assert clock.now >= cache_lock._PATIENCE


def test_an_owner_that_has_ended_on_this_machine_is_not_waited_for(lock, monkeypatch) -> None:
    process = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True
    )
    lock.write_text(f"{cache_lock._machine()} {int(process.stdout)} 3")
    clock = Clock(monkeypatch)
    with only_one(lock, lambda: False, "building") as is_mine:
        assert is_mine
    assert clock.now == 0


def test_a_lock_that_another_process_has_just_taken_over_stays(lock, tmp_path) -> None:
    lock.write_text("elsewhere 8 0")
    cache_lock._remove(lock, "elsewhere 7 0")
    assert [path.name for path in tmp_path.iterdir()] == [lock.name]
    assert lock.read_text() == "elsewhere 8 0"


def test_an_owner_writes_signs_of_life_into_its_own_lock_alone(lock, monkeypatch) -> None:
    monkeypatch.setattr(cache_lock, "_BEAT", 0.01)

    def beats() -> int:
        content = lock.read_text().rsplit(" ", 1)  # empty while it is being written
        return int(content[1]) if content[0] == cache_lock._identity() else 0

    with only_one(lock, lambda: False, "building"):
        while beats() < 2:
            pass
    monkeypatch.setattr(cache_lock, "_BEAT", 1000.0)
    with only_one(lock, lambda: False, "building"):
        lock.write_text("elsewhere 7 0")  # a process that waited has taken it over
        cache_lock._write_sign(lock, 3)
    assert lock.read_text() == "elsewhere 7 0"
