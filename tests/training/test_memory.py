"""The peaks of memory that a training reports."""

import os
from pathlib import Path

import jax
import numpy as np
import psutil

from specjax.training.memory import peak_memory


def test_the_peak_of_this_process_covers_what_it_has_and_what_it_freed() -> None:
    process = psutil.Process(os.getpid())
    before = process.memory_info().rss / 1e9
    assert peak_memory()["host_memory_gb"] >= 0.99 * before
    block = np.ones(400_000_000, np.uint8)
    with_block = process.memory_info().rss / 1e9
    assert with_block > before + 0.3
    del block
    assert peak_memory()["host_memory_gb"] >= 0.99 * with_block


def test_the_fullest_device_counts_and_what_is_not_reported_is_left_out(monkeypatch) -> None:
    class Device:
        def __init__(self, peak: int | None) -> None:
            self._peak = peak

        def memory_stats(self) -> dict[str, int] | None:
            return None if self._peak is None else {"peak_bytes_in_use": self._peak}

    devices = [Device(2_000_000_000), Device(3_500_000_000), Device(None)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    assert peak_memory()["device_memory_gb"] == 3.5

    def refuse(path: Path) -> str:
        raise FileNotFoundError(path)

    monkeypatch.setattr(jax, "local_devices", lambda: [Device(None)])
    monkeypatch.setattr(Path, "read_text", refuse)
    assert peak_memory() == {}
