"""Processes that run one model together: their ranks, their connections, and the loss of one.

A model may need the devices of several hosts. Then a process runs on each host, all processes run
the same command, and JAX joins their devices into one mesh (`specjax.sharding`). JAX requires that
all processes make the same calls in the same order. So the *first* process, number 0, decides
everything that only one process knows, such as new requests or the time, and sends its decisions to
the others.

`rank` finds this process's number in the environment, `rendezvous` connects the processes, and
`group` has the messages that they exchange afterwards.
"""

from specjax.processes.group import (
    Processes,
    join,
    joined,
    meet,
    speaks,
    waiting_for_report,
)
from specjax.processes.rank import ProcessPlace, find
from specjax.processes.rendezvous import Member

__all__ = [
    "Member",
    "ProcessPlace",
    "Processes",
    "find",
    "join",
    "joined",
    "meet",
    "speaks",
    "waiting_for_report",
]
