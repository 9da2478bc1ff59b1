"""Find the rank of this process, and how many processes work together."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from specjax.errors import InputError

JOIN_SECONDS = 300.0
"""How long processes wait for each other at the beginning, unless SPECJAX_JOIN_SECONDS says otherwise."""

PORT = 8476
"""Where the first process listens, where nothing says another port."""

_SCHEDULERS = ("SLURM_STEP_NODELIST", "OMPI_MCA_orte_hnp_uri", "TPU_WORKER_HOSTNAMES", "JOB_COMPLETION_INDEX")
"""A variable that Slurm's steps, Open MPI, TPUs of GKE, and jobs of Kubernetes set. Without one of them, and off a Cloud TPU,
JAX need not look: in a pod of Kubernetes it would complain that it cannot ask the cluster."""


@dataclass(frozen=True)
class ProcessPlace:
    """Where a process stands among those that it works with.

    Attributes:
        address: host:port of the first.
        count: how many there are.
        number: which one this is, from 0.
        devices: numbers of the devices of its host that are its own; None: all.

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
    """What the environment says of this process's place; None: it works alone.

    Three variables say it on any machines: JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID. LeaderWorkerSets of
    Kubernetes say it by LWS_LEADER_ADDRESS, LWS_GROUP_SIZE and LWS_WORKER_INDEX. Slurm, Open MPI, Cloud TPUs and jobs of
    Kubernetes are asked as JAX asks them: by the process's own environment. JAX_COORDINATOR_PORT is the port of the first
    process, where only its host is known. JAX_NUM_PROCESSES=1 says that this process works alone, whatever started it.

    Raises:
        InputError: a variable is no number, or says something that cannot be.

    Examples:
        >>> from specjax import processes
        >>> processes.find({"LWS_LEADER_ADDRESS": "m-0.m", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"})
        ProcessPlace(address='m-0.m:8476', count=2, number=1, devices=None)
        >>> processes.find({})
    """
    if _number_in(environment, "JAX_NUM_PROCESSES") == 1:
        return None
    if address := environment.get("JAX_COORDINATOR_ADDRESS"):
        count, number = (_number_in(environment, name) for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"))
        if count is not None and number is not None:
            return _checked(ProcessPlace(address, count, number))
        found = _of_scheduler(environment)
        if found is None:
            raise InputError(
                f"JAX_COORDINATOR_ADDRESS={address!r}: no scheduler says how many processes there are, and which one this is: "
                "set JAX_NUM_PROCESSES and JAX_PROCESS_ID too"
            )
        count, number = found.count if count is None else count, found.number if number is None else number
        return _checked(ProcessPlace(address, count, number, found.devices))
    if leader := environment.get("LWS_LEADER_ADDRESS"):
        count, number = (_number_in(environment, name) for name in ("LWS_GROUP_SIZE", "LWS_WORKER_INDEX"))
        if count is None or number is None:
            raise InputError(f"LWS_LEADER_ADDRESS={leader!r}: LWS_GROUP_SIZE and LWS_WORKER_INDEX are not both set: set them")
        port = _number_in(environment, "JAX_COORDINATOR_PORT") or PORT
        return _checked(ProcessPlace(f"{leader}:{port}", count, number))
    return _of_scheduler(environment)


def _checked(place: ProcessPlace) -> ProcessPlace | None:
    host, colon, port = place.address.rpartition(":")
    if not (host and colon and port.isdecimal() and 0 < int(port) < 2**16):
        raise InputError(f"the address of the first process is {place.address!r}: give HOST:PORT, as JAX_COORDINATOR_ADDRESS")
    if not 0 <= place.number < place.count:
        raise InputError(
            f"this is process {place.number} of {place.count}: give numbers from 0 to {place.count - 1}, each to one process"
        )
    return place if place.count > 1 else None


def _number_in(environment: Mapping[str, str], variable: str) -> int | None:
    value = environment.get(variable)
    if value is not None and not (value.isascii() and value.isdecimal()):
        raise InputError(f"{variable}={value!r}: must be a whole number")
    return None if value is None else int(value)


def _of_scheduler(environment: Mapping[str, str]) -> ProcessPlace | None:
    """What a scheduler that JAX knows says."""
    # JAX has no public name for what `jax.distributed.initialize` finds, and that alone would not say who is who.
    from jax._src.cloud_tpu_init import running_in_cloud_tpu_vm
    from jax._src.clusters import ClusterEnv

    if not running_in_cloud_tpu_vm and not any(name in environment for name in _SCHEDULERS):
        return None
    try:
        found = ClusterEnv.auto_detect_unset_distributed_params(None, None, None, None, None, int(join_seconds()))
    except Exception as error:  # what the clients of the schedulers raise has no common kind
        raise InputError(
            f"the scheduler does not say which processes work together ({' '.join(str(error).split())}): set "
            "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"
        ) from None
    address, count, number, devices = found
    if address is None or count is None or number is None or count < 2:
        return None
    # JAX takes a task of Slurm's to be one device's. Where a node has one task alone, all of its devices are meant.
    if environment.get("SLURM_STEP_NUM_NODES") == str(count):
        devices = None
    return ProcessPlace(address, count, number, None if devices is None else tuple(devices))


def join_seconds() -> float:
    """Return how many seconds processes wait for each other at the beginning. Raises `InputError`."""
    text = os.environ.get("SPECJAX_JOIN_SECONDS", "")
    try:
        seconds = float(text or JOIN_SECONDS)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 86_400:
        raise InputError(f"SPECJAX_JOIN_SECONDS={text!r}: must be a number of seconds above 0")
    return seconds
