"""Processes that find each other, tell each other what was decided, and end together."""

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
from specjax.processes import Member, ProcessPlace, rendezvous
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
        (
            SLURM | {"SLURM_NTASKS": "1", "SLURM_PROCID": "0"},
            None,
        ),  # a task of an array is one process
        (
            {"SLURM_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"},
            None,
        ),  # a batch script, outside of any step
        (SLURM | {"JAX_COORDINATOR_ADDRESS": "a:1"}, ProcessPlace("a:1", 4, 2, (0,))),
        (
            SLURM | {"SLURM_STEP_NUM_NODES": "4"},
            ProcessPlace(f"node07:{4711 % 4096 + 61440}", 4, 2),
        ),  # a task has all of its node
        (SLURM | {"JAX_NUM_PROCESSES": "1"}, None),  # four that have nothing to do with each other
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, None),  # a pod that is no job's
        (OPEN_MPI, ProcessPlace(f"10.9.0.1:{1314521088 // 4096 % 4096 + 61440}", 2, 1, (1,))),
    ],
)
def test_each_environment_says_its_place(monkeypatch, environment, place) -> None:
    for name in [
        name
        for name in os.environ
        if name.startswith(("JAX_COORD", "JAX_NUM_P", "JAX_PROC", "SLURM", "LWS", "OMPI"))
    ]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)  # JAX reads the process's own
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
    """What each of ``members`` comes to: the roster, or the error."""
    address = free_address()
    found: list = [None] * len(members)

    def run(place: int, member: Member) -> None:
        way = rendezvous.gather if place == 0 else rendezvous.report
        try:
            found[place], links = way(ProcessPlace(address, count, member.number), member, seconds)
            for link in links.values():
                link.close()
        except InputError as error:
            found[place] = error

    threads = [threading.Thread(target=run, args=each) for each in enumerate(members)]
    threads[0].start()
    silent: list[socket.socket] = []
    for number in range(strangers):
        while True:
            try:
                with socket.create_connection(
                    ("localhost", int(address.split(":")[1])), timeout=1
                ) as stranger:
                    stranger.sendall(STRANGE[number % len(STRANGE)])
                    silent.append(stranger.dup())  # it says nothing more, and stays
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
    for thread in threads[1:]:
        thread.start()
    for thread in threads:
        thread.join()
    for stranger in silent:
        stranger.close()
    return found


STRANGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"H\x00\x00\x00\x02[]",
    b"",
    b"H\x7f\xff\xff\xff" + b"x" * 1000,  # it promises two gigabytes
    b"H\x00\x00\xff\x00" + b"[" * 0xFF00,
]
"""What somebody else may say at the port."""


def member(number: int, count: int = 3, versions: str = "specjax 1") -> Member:
    return Member(number, count, f"host-{number}", 100 + number, versions)


def test_all_know_all_whoever_else_comes_to_the_port() -> None:
    roster = [member(0), member(1), member(2)]
    begun = time.monotonic()
    assert meet(member(0), member(2), member(1), count=3, strangers=len(STRANGE)) == [roster] * 3
    assert time.monotonic() - begun < 20  # nobody waits for those who say nothing


def test_one_that_starts_again_while_others_are_awaited_takes_its_place() -> None:
    address = free_address()
    place = ProcessPlace(address, 3, 0)
    rosters: list = []
    first = threading.Thread(
        target=lambda: rosters.append(rendezvous.gather(place, member(0), 60.0)[0])
    )
    first.start()
    earlier = None
    while earlier is None:
        with contextlib.suppress(ConnectionRefusedError):
            earlier = socket.create_connection(("localhost", int(address.split(":")[1])))
    rendezvous.ProcessLink(earlier).send(rendezvous._HELLO, json.dumps(vars(member(1))).encode())
    time.sleep(0.5)  # it is heard
    earlier.close()
    again = Member(1, 3, "host-1", 999, "specjax 1")
    others = [
        threading.Thread(target=rendezvous.report, args=(place, each, 60.0))
        for each in (again, member(2))
    ]
    for thread in others:
        thread.start()
    for thread in (first, *others):
        thread.join(60)
    assert rosters == [[member(0), again, member(2)]]


def test_what_is_no_process_0_is_named() -> None:
    with socket.create_server(("", 0)) as other:
        address = f"localhost:{other.getsockname()[1]}"

        def answer() -> None:
            connection, _ = other.accept()
            connection.recv(1000)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        with pytest.raises(InputError, match=f"{address}: (another program|process 0 ended)"):
            rendezvous.report(ProcessPlace(address, 2, 1), member(1, 2), 5.0)


@pytest.mark.parametrize(
    ("others", "says"),
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
def test_all_hear_why_they_cannot_begin(others, says) -> None:
    found = meet(
        member(0),
        *others,
        count=3,
        seconds=3.0 if len(others) < 2 and "connected" in says else 30.0,
    )
    for error in found:
        assert isinstance(error, InputError)
    assert len({str(error) for error in found}) == 1
    with pytest.raises(InputError, match=says):
        raise found[0]


def test_a_first_process_that_is_not_there_is_named() -> None:
    with pytest.raises(InputError, match=r"localhost:\d+: no answer after 0.3 s"):
        rendezvous.report(ProcessPlace(free_address(), 2, 1), member(1, 2), 0.3)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match=f"{address}: cannot listen at port"):
            rendezvous.gather(ProcessPlace(address, 2, 0), member(0, 2), 1.0)


@pytest.mark.full
def test_three_processes_hear_all_decisions_in_order(tmp_path) -> None:
    with started(three_processes.__name__, tmp_path, count=3) as running:
        wait(running, tmp_path)
    found = [json.loads((tmp_path / f"{process}.json").read_text()) for process in range(3)]
    told = [[str(number), *(["x" * number * 100] if number else [])] for number in range(100)]
    assert [each["heard"] for each in found] == [[], told, told]
    assert [each["rows"] for each in found] == [[1, 2, 3]] * 3
    assert [each["roster"] for each in found] == [[process.pid for process in running]] * 3
    said = (tmp_path / "0.log").read_text()
    assert f"3 processes: 0 is {socket.gethostname()} (pid {running[0].pid}), 1 is" in said


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 2])
def test_when_one_is_lost_all_end_and_say_which(tmp_path, lost) -> None:
    (tmp_path / three_processes.DIES).write_text(str(lost))
    with started(three_processes.__name__, tmp_path, count=3) as running:
        ends_all(running, lost)
        others = [number for number in range(3) if number != lost]
        name = f"process {lost} ({socket.gethostname()}, pid {running[lost].pid}) is lost"
        logs = [(tmp_path / f"{number}.log").read_text() for number in others]
    # Of the first JAX learns as soon as we do, and may end a process before it has said so.
    for log in logs:
        assert name in log or (lost == 0 and "leader task" in log)


@pytest.mark.full
@pytest.mark.parametrize("failing", [0, 1])
def test_when_one_alone_fails_all_end_soon(tmp_path, failing) -> None:
    """The others are in a collective with it; JAX by itself would let them wait for five minutes."""
    (tmp_path / three_processes.FAILS).write_text(str(failing))
    with started(three_processes.__name__, tmp_path, count=3) as running:
        ends_all(running, failing)
    assert "ValueError: this one alone" in (tmp_path / f"{failing}.log").read_text()


def test_nobody_is_joined_here() -> None:
    assert processes.joined() is None and processes.speaks()
    assert jax.process_count() == 1
