"""The priority of threads that work beside the engine's."""

import os
import sys
import threading
from contextlib import suppress

# A thread with 19, the largest niceness, rarely runs beside other programs, and the engine waits
# while it holds Python's lock: benchmarks/sorting_beside_calls.py had a call of 0.65 s.
_NICENESS = 10


def lower_priority() -> None:
    """Give this thread less of a busy processor, where the system can do it for a thread alone."""
    if sys.platform == "linux":  # elsewhere a priority belongs to the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
