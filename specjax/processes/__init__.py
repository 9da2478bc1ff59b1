"""Several processes that work on one model: who is who, how they find each other, and what happens when one is lost.

A model may need the devices of several hosts. A process then runs on each host, all of them run the same command, and JAX joins
their devices into one mesh (`specjax.sharding`). JAX requires that all of them make the same calls in the same order. So the
*first* process, number 0, decides whatever only one process knows, such as a new request or the time, and tells the others.

`rank` finds this process's number in the environment, `rendezvous` connects the processes, and `group` has what they send
each other from then on.
"""

from specjax.processes.group import Processes, join, joined, meet, speaks
from specjax.processes.rank import ProcessPlace, find
from specjax.processes.rendezvous import Member

__all__ = ["Member", "ProcessPlace", "Processes", "find", "join", "joined", "meet", "speaks"]
