"""Processes that find each other, share decisions, and end together."""

import contextlib
import json
import os
import socket
import threading
import time
from dataclasses import replace

import jax
import pytest

from specjax import processes
from specjax.errors import InputError
from specjax.processes import Member, ProcessPlace, group, rendezvous
from tests import three_processes
from tests.processes import ends_all, free_port, wait
from tests.processes import processes as started

SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_NODELIST": "node[07-09],other",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
}
OPEN_MPI = {
    "OMPI_MCA_orte_hnp_uri": "1314521088.0;tcp://10.9.0.1:3",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
}


@pytest.mark.parametrize(
    ("environment", "place"),
    [
        ({}, None),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "3", "JAX_PROCESS_ID": "2"},
            ProcessPlace("a:1", 3, 2),
        ),
        ({"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "1", "JAX_PROCESS_ID": "0"}, None),
        (
            {"LWS_LEADER_ADDRESS": "m-0.m.ns", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "0"},
            ProcessPlace("m-0.m.ns:8476", 2, 0),
        ),
        (
            {
                "LWS_LEADER_ADDRESS": "m",
                "LWS_GROUP_SIZE": "2",
                "LWS_WORKER_INDEX": "1",
                "JAX_COORDINATOR_PORT": "99",
            },
            ProcessPlace("m:99", 2, 1),
        ),
        ({"LWS_LEADER_ADDRESS": "m-0.m.ns", "LWS_GROUP_SIZE": "1", "LWS_WORKER_INDEX": "0"}, None),
        (SLURM, ProcessPlace(f"node07:{4711 % 4096 + 61440}", 4, 2, (0,))),
        # A task of an array is one process.
        (SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"}, None),
        # A batch script runs outside of any step.
        ({"SLURM_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}, None),
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "a:1"}, ProcessPlace("a:1", 4, 2, (0,))),
        # A task has all devices of its node.
        (
            SLURM | {"SLURM_STEP_NUM_NODES": "4"},
            ProcessPlace(f"node07:{4711 % 4096 + 61440}", 4, 2),
        ),
        (SLURM | {"JAX_NUM_PROCESSES": "1"}, None),  # four independent processes
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod outside of a job
        (OPEN_MPI, ProcessPlace(f"10.9.0.1:{1314521088 // 4096 % 4096 + 61440}", 2, 1, (1,))),
    ],
)
def test_each_environment_says_its_place(monkeypatch, environment, place) -> None:
    prefixes = ("JAX_COORD", "JAX_NUM_P", "JAX_PROC", "SLURM", "LWS", "OMPI")
    for name in [name for name in os.environ if name.startswith(prefixes)]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)  # JAX reads the environment of the process
    assert processes.find() == place


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "set JAX_NUM_PROCESSES and JAX_PROCESS_ID as well"),
        (
            {"JAX_COORDINATOR_ADDRESS": "a", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0"},
            "'a': give HOST:PORT",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"},
            "process 2 of 2: .* 0 to 1",
        ),
        (
            {"JAX_COORDINATOR_ADDRESS": "a:1", "JAX_NUM_PROCESSES": "two", "JAX_PROCESS_ID": "0"},
            "JAX_NUM_PROCESSES='two'",
        ),
        ({"LWS_LEADER_ADDRESS": "m-0.m"}, "LWS_GROUP_SIZE or LWS_WORKER_INDEX"),
    ],
)
def test_what_an_environment_says_wrongly_is_refused(environment, says) -> None:
    with pytest.raises(InputError, match=says):
        processes.find(environment)


def free_address() -> str:
    return f"localhost:{free_port()}"


def meet(*members: Member, count: int, seconds: float = 30.0, strangers: int = 0) -> list:
    """Return the outcome of each of ``members``: the roster, or the error."""
    address = free_address()
    outcomes: list = [None] * len(members)

    def run(place: int, member: Member) -> None:
        connect = rendezvous.gather if place == 0 else rendezvous.report
        try:
            outcomes[place], links = connect(
                ProcessPlace(address, count, member.number), member, seconds
            )
            for link in links.values():
                link.close()
        except InputError as error:
            outcomes[place] = error

    threads = [threading.Thread(target=run, args=place) for place in enumerate(members)]
    threads[0].start()
    silent: list[socket.socket] = []
    for number in range(strangers):
        while True:
            try:
                with socket.create_connection(
                    ("localhost", int(address.split(":")[1])), timeout=1
                ) as stranger:
                    stranger.sendall(STRANGE[number % len(STRANGE)])
                    silent.append(stranger.dup())  # it stays connected, and sends nothing more
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    for stranger in silent:
        stranger.close()
    return outcomes


STRANGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"H\x00\x00\x00\x02[]",
    b"",
    b"H\x7f\xff\xff\xff" + b"x" * 1000,  # it announces two gigabytes
    b"H\x00\x00\xff\x00" + b"[" * 0xFF00,
]
"""What a stranger may send to the port."""


def member(number: int, count: int = 3, versions: str = "specjax 1") -> Member:
    return Member(number, count, f"host-{number}", 100 + number, versions)


def test_all_know_all_whoever_else_comes_to_the_port() -> None:
    roster = [member(0), member(1), member(2)]
    start = time.monotonic()
    assert meet(member(0), member(2), member(1), count=3, strangers=len(STRANGE)) == [roster] * 3
    assert time.monotonic() - start < 20  # nobody waits for a stranger that sends nothing


def test_one_that_starts_again_while_others_are_awaited_takes_its_place() -> None:
    address = free_address()
    place = ProcessPlace(address, 3, 0)
    rosters: list = []
    first = threading.Thread(
        target=lambda: rosters.append(rendezvous.gather(place, member(0), 60.0)[0])
    )
    first.start()
    earlier_connection = None
    while earlier_connection is None:
        with contextlib.suppress(ConnectionRefusedError):
            earlier_connection = socket.create_connection(("localhost", int(address.split(":")[1])))
    rendezvous.ProcessLink(earlier_connection).send(
        rendezvous._HELLO, json.dumps(vars(member(1))).encode()
    )
    time.sleep(0.5)  # until it has been received
    earlier_connection.close()
    restarted = Member(1, 3, "host-1", 999, "specjax 1")
    reporting = [
        threading.Thread(target=rendezvous.report, args=(place, process, 60.0))
        for process in (restarted, member(2))
    ]
    for thread in reporting:
        thread.start()
    for thread in (first, *reporting):
        thread.join(60)
    assert rosters == [[member(0), restarted, member(2)]]


def test_what_is_no_process_0_is_named() -> None:
    with socket.create_server(("", 0)) as listening:
        address = f"localhost:{listening.getsockname()[1]}"

        def answer() -> None:
            connection, _ = listening.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(InputError, match=f"{address}: (another program|process 0 ended)"):
            rendezvous.report(ProcessPlace(address, 2, 1), member(1, 2), 5.0)


@pytest.mark.parametrize(
    ("members", "says"),
    [
        (
            [],
            (
                r"after 3 s processes 1, 2 of 3 had not connected to localhost:\d+ \(process 0"
                r" \(host-0, pid 100\) had\)"
            ),
        ),
        (
            [member(2)],
            (
                r"1 of 3 had not connected .*\(process 0 \(host-0, pid 100\), process 2 \(host-2,"
                r" pid 102\) had\)"
            ),
        ),
        (
            [member(1), member(1)],
            r"process 1 \(host-1, pid 101\) and process 1 .* have the same number",
        ),
        (
            [member(1, count=2)],
            (
                r"process 1 \(host-1, pid 101\) is one of 2, and process 0 \(host-0, pid 100\) one"
                r" of 3"
            ),
        ),
        (
            [replace(member(1), task="train")],
            r"process 1 \(host-1, pid 101\) and .* run different commands or options",
        ),
        (
            [member(1, versions="specjax 2")],
            r"process 1 \(host-1, pid 101\) has specjax 2, and process 0 .* has specjax 1",
        ),
    ],
)
def test_all_hear_why_they_cannot_begin(members, says) -> None:
    misses_some = len(members) < 2 and "connected" in says
    errors = meet(member(0), *members, count=3, seconds=3.0 if misses_some else 30.0)
    for error in errors:
        assert isinstance(error, InputError)
    assert len({str(error) for error in errors}) == 1
    with pytest.raises(InputError, match=says):
        raise errors[0]


def test_a_first_process_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"localhost:\d+: no answer after 0.3 s"):
        rendezvous.report(ProcessPlace(free_address(), 2, 1), member(1, 2), 0.3)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("", 0)) as listening:
        address = f"localhost:{listening.getsockname()[1]}"
        with pytest.raises(InputError, match=f"{address}: cannot listen at port"):
            rendezvous.gather(ProcessPlace(address, 2, 0), member(0, 2), 1.0)


@pytest.mark.full
def test_three_processes_hear_all_decisions_in_order(tmp_path) -> None:
    with started(three_processes.__name__, tmp_path, count=3) as running:
        wait(running, tmp_path)
    results = [json.loads((tmp_path / f"{process}.json").read_text()) for process in range(3)]
    decisions = [[str(number), *(["x" * number * 100] if number else [])] for number in range(100)]
    assert [result["heard"] for result in results] == [[], decisions, decisions]
    assert [result["rows"] for result in results] == [[1, 2, 3]] * 3
    assert [result["roster"] for result in results] == [[process.pid for process in running]] * 3
    log = (tmp_path / "0.log").read_text()
    assert f"3 processes: 0 is {socket.gethostname()} (pid {running[0].pid}), 1 is" in log


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 2])
def test_when_one_is_lost_all_end_and_say_which(tmp_path, lost) -> None:
    (tmp_path / three_processes.DIES).write_text(str(lost))
    with started(three_processes.__name__, tmp_path, count=3) as running:
        ends_all(running, lost)
        survivors = [number for number in range(3) if number != lost]
        name = f"process {lost} ({socket.gethostname()}, pid {running[lost].pid}) is lost"
        logs = [(tmp_path / f"{number}.log").read_text() for number in survivors]
    # JAX notices the loss of the first process as soon as we do, and may end a process before its
    # line is printed.
    for log in logs:
        assert name in log or (lost == 0 and "leader task" in log)


def test_what_the_loss_of_a_process_breaks_is_reported_after_the_loss(monkeypatch) -> None:
    """Check that a failed collective leaves the time to hear which process is lost."""
    seconds: list[float] = []
    monkeypatch.setattr(time, "sleep", seconds.append)
    of_device = jax.errors.JaxRuntimeError("Gloo")
    for error, cause, waits in (
        (of_device, None, True),
        (ValueError("the engine failed"), of_device, True),
        (ValueError("another error"), None, False),
    ):
        seconds.clear()
        with pytest.raises(type(error)), processes.waiting_for_report():
            raise error from cause
        assert seconds == [group._REPORT_SECONDS] * waits


@pytest.mark.full
@pytest.mark.parametrize("failing", [0, 1])
def test_when_one_alone_fails_all_end_soon(tmp_path, failing) -> None:
    """Check that the processes that wait in a collective end soon, too.

    JAX by itself would let them wait for five minutes.
    """
    (tmp_path / three_processes.FAILS).write_text(str(failing))
    with started(three_processes.__name__, tmp_path, count=3) as running:
        ends_all(running, failing)
    assert "ValueError: this one alone" in (tmp_path / f"{failing}.log").read_text()


def test_nobody_is_joined_here() -> None:
    assert processes.joined() is None and processes.speaks()
    assert jax.process_count() == 1
