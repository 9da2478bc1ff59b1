"""The peak memory of this process and of its devices, as the metrics of a training report it."""

from pathlib import Path

import jax


def peak_memory() -> dict[str, float]:
    """Return the peak memory up to now in GB (10^9 bytes), by the name of the metric.

    Returns:
        ``host_memory_gb``: the largest resident memory of this process (Linux's VmHWM).
        ``device_memory_gb``: the most memory in use on a device of this process. A CPU reports
        none. A figure that the system does not report is left out.

    Examples:
        >>> from specjax.training.memory import peak_memory
        >>> 0 < peak_memory()["host_memory_gb"] < 1000
        True
    """
    peaks = {}
    if (host := _resident_peak()) is not None:
        peaks["host_memory_gb"] = host / 1e9
    by_device = [
        statistics["peak_bytes_in_use"]
        for device in jax.local_devices()
        if "peak_bytes_in_use" in (statistics := device.memory_stats() or {})
    ]
    if by_device:
        peaks["device_memory_gb"] = max(by_device) / 1e9
    return peaks


def _resident_peak() -> int | None:
    """Return the peak resident memory of this process in bytes; None if Linux does not report it.

    `resource.getrusage` would include the memory of the process that started this one.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    lines = [line.split() for line in status.splitlines() if line.startswith("VmHWM:")]
    return int(lines[0][1]) * 1024 if lines else None
