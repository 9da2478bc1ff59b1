"""The priority of threads that work beside the engine's."""

import os
import sys
import threading
from contextlib import suppress

_NICENESS = 10
"""Where other programs keep the processor busy, a thread of the least priority (19) rarely runs. It
may then hold Python's lock for half a second, in which the engine's thread waits for it."""


def lower_priority() -> None:
    """Give this thread less of a busy processor, where the system can do it for a thread alone."""
    if sys.platform == "linux":  # elsewhere a priority belongs to the whole process
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
