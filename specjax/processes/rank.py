"""The index of this process and the number of processes, read from the environment."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from specjax.errors import InputError

JOIN_SECONDS = 300.0
"""Seconds that processes wait for each other at the start; SPECJAX_JOIN_SECONDS overrides it."""

PORT = 8476
"""The default port of the first process."""

_SCHEDULERS = (
    "SLURM_STEP_NODELIST",
    "OMPI_MCA_orte_hnp_uri",
    "TPU_WORKER_HOSTNAMES",
    "JOB_COMPLETION_INDEX",
)
"""A variable each that is set by Slurm steps, Open MPI, TPUs on GKE, and Kubernetes jobs.

JAX's detection runs only if one of them is set, or on a Cloud TPU. In any other Kubernetes pod it
would complain that it cannot query the cluster.
"""


@dataclass(frozen=True)
class ProcessPlace:
    """The index of a process, and how it finds the others.

    Attributes:
        address: host:port of the first process.
        count: the number of processes.
        number: the index of this process, from 0.
        devices: the indices of the host's devices that belong to this process; None: all.

    Examples:
        >>> from specjax.processes import ProcessPlace
        >>> ProcessPlace("10.0.0.1:8476", count=2, number=1)
        ProcessPlace(address='10.0.0.1:8476', count=2, number=1, devices=None)
    """

    address: str
    count: int
    number: int
    devices: tuple[int, ...] | None = None


def find(environment: Mapping[str, str] = os.environ) -> ProcessPlace | None:
    """Read this process's place from the environment; None: the process works alone.

    On any machines, three variables define it: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and
    JAX_PROCESS_ID. LeaderWorkerSets of Kubernetes set LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and
    LWS_WORKER_INDEX. For Slurm, Open MPI, Cloud TPUs and Kubernetes jobs, JAX's own detection is
    used. JAX_COORDINATOR_PORT is the port of the first process if only its host is known. With
    JAX_NUM_PROCESSES=1 the process works alone, whatever started it.

    Raises:
        InputError: a variable is not a number, or has an impossible value.

    Examples:
        >>> from specjax import processes
        >>> leader = {"LWS_LEADER_ADDRESS": "m-0.m"}
        >>> processes.find({**leader, "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"})
        ProcessPlace(address='m-0.m:8476', count=2, number=1, devices=None)
        >>> processes.find({})
    """
    if _number_in(environment, "JAX_NUM_PROCESSES") == 1:
        return None
    if address := environment.get("JAX_COORDINATOR_ADDRESS"):
        count, number = (
            _number_in(environment, name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        )
        if count is not None and number is not None:
            return _checked(ProcessPlace(address, count, number))
        scheduler_place = _of_scheduler(environment)
        if scheduler_place is None:
            raise InputError(
                f"JAX_COORDINATOR_ADDRESS={address!r}: no scheduler gives the number of processes"
                " and the index of this one: set JAX_NUM_PROCESSES and JAX_PROCESS_ID as well"
            )
        count = scheduler_place.count if count is None else count
        number = scheduler_place.number if number is None else number
        return _checked(ProcessPlace(address, count, number, scheduler_place.devices))
    if leader := environment.get("LWS_LEADER_ADDRESS"):
        count, number = (
            _number_in(environment, name) for name in ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX")
        )
        if count is None or number is None:
            raise InputError(
                f"LWS_LEADER_ADDRESS={leader!r}: LWS_GROUP_SIZE or LWS_WORKER_INDEX is missing: set"
                " both"
            )
        port = _number_in(environment, "JAX_COORDINATOR_PORT") or PORT
        return _checked(ProcessPlace(f"{leader}:{port}", count, number))
    return _of_scheduler(environment)


def _checked(place: ProcessPlace) -> ProcessPlace | None:
    host, colon, port = place.address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise InputError(
            f"the address of the first process is {place.address!r}: give HOST:PORT, as"
            " JAX_COORDINATOR_ADDRESS"
        )
    if not 0 <= place.number < place.count:
        raise InputError(
            f"this is process {place.number} of {place.count}: give numbers from 0 to"
            f" {place.count - 1}, each to one process"
        )
    return place if place.count > 1 else None


def _number_in(environment: Mapping[str, str], variable: str) -> int | None:
    value = environment.get(variable)
    if value is not None and not (value.isascii() and value.isdecimal()):
        raise InputError(f"{variable}={value!r}: must be a whole number")
    return None if value is None else int(value)


def _of_scheduler(environment: Mapping[str, str]) -> ProcessPlace | None:
    """Return the place that a scheduler supported by JAX reports; None if there is none."""
    # JAX has no public function for this detection: `jax.distributed.initialize` also connects, and
    # the index and count are needed before that.
    from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm
    from jax._src.clusters import ClusterEnv

    if not running_in_cloud_tpu_vm and not any(name in environment for name in _SCHEDULERS):
        return None
    try:
        detected = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(join_seconds())
        )
    except Exception as error:  # clients of schedulers raise errors of many types
        raise InputError(
            "the scheduler does not report the processes of this run"
            f" ({' '.join(str(error).split())}): set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and"
            " JAX_PROCESS_ID"
        ) from None
    address, count, number, devices = detected
    if address is None or count is None or number is None or count < 2:
        return None
    # JAX assumes one device per task of Slurm. A single task on a node has all devices of the node.
    if environment.get("SLURM_STEP_NUM_NODES") == str(count):
        devices = None
    return ProcessPlace(address, count, number, None if devices is None else tuple(devices))


def join_seconds() -> float:
    """Return how many seconds processes wait for each other at the start.

    Raises:
        InputError: SPECJAX_JOIN_SECONDS is not a positive number of seconds.
    """
    text = os.environ.get("SPECJAX_JOIN_SECONDS", "")
    try:
        seconds = float(text or JOIN_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        raise InputError(f"SPECJAX_JOIN_SECONDS={text!r}: must be a number of seconds above 0")
    return seconds
