"""The priority of threads that work beside the engine's."""

import os
import sys
import threading
from contextlib import suppress

BESIDE_CALLS = 10
"""The niceness of work that a request waits for, such as a program's compilation."""

LEAST = 19
"""The niceness of work that nothing waits for."""


def lower_priority(niceness: int = BESIDE_CALLS) -> None:
    """Give this thread less of a busy processor, where the system can do it for a thread alone."""
    if sys.platform == "linux":  # elsewhere a priority belongs to the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
