"""Tests of clients, a network and a process of `specjax serve`, over real sockets.

Every text must be the one that the server writes alone.
"""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from benchmarks.network import Conditions, Proxy
from specjax import SamplingParams, wire
from specjax.cli.main import main
from specjax.client import (
    Client,
    CommittedEvent,
    Patience,
    ProvisionalEvent,
    RetractedEvent,
    connect,
)
from specjax.client.exchange import Exchange, ExchangeRequest
from specjax.client.link import LinkRefusedError, WebSocketLink
from specjax.drafters import Eagle3
from specjax.models.transformer import Target
from tests.conftest import save_tiny
from tests.serving.http.process import Server, serving

KEYS = ("a-key-of-the-tests", "another-key-of-them")
PROMPT = "import os\nimport "
CAPACITY = 96
DRAWN = {"temperature": 0.8, "seed": 3}
IMPATIENT = Patience(
    provisional=0.25, again=0.4, lost=1.0, connecting=2.0, retry=0.05, most_retry=0.3, server=60.0
)


class Served:
    """A server's process, and the files that a client of it needs.

    Attributes:
        server: the process.
        drafter: the drafter, as the command line names it.
        parts: the directory with the client's parts of the target.
        keys: the files with one key each.
    """

    def __init__(self, server: Server, directory: Path) -> None:
        self.server, self.drafter = server, f"eagle3:{directory / 'eagle3'}"
        self.parts = str(directory / "parts")
        self.keys = [str(directory / f"key{number}") for number in range(2)]
        self._texts: dict[str, str] = {}

    def text(self, **parameters: Any) -> str:
        """Return the text that the server writes alone."""
        name = json.dumps(parameters)
        if name not in self._texts:
            body = {
                "model": "tiny",
                "prompt": PROMPT,
                "max_tokens": 40,
                "temperature": 0.0,
            } | parameters
            self._texts[name] = self.server.post("/v1/completions", body)["choices"][0]["text"]
        return self._texts[name]

    def client(self, port: int | None = None, key: str | None = KEYS[0]) -> Client:
        """Return a client with short timeouts."""
        url = f"ws://127.0.0.1:{port or self.server.port}"
        return connect(
            url, self.drafter, self.parts, api_key=key, capacity=CAPACITY, patience=IMPATIENT
        )

    def command(self, capsys, *options: str) -> tuple[int, str, str]:
        """Run ``specjax client``, and return its status and its output."""
        line = [
            "--server",
            f"ws://127.0.0.1:{self.server.port}",
            "--drafter",
            self.drafter,
            "--target-parts",
            self.parts,
        ]
        line += [
            "--capacity",
            str(CAPACITY),
            "--prompt",
            PROMPT,
            "--max-new-tokens",
            "40",
            "--api-key-file",
            self.keys[0],
        ]
        status = main(["client", *line, *options])
        return status, *capsys.readouterr()


@pytest.fixture(scope="module")
def served(tmp_path_factory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("served")
    save_tiny(root / "target")
    Eagle3.init(Target.from_pretrained(root / "target"), jax.random.key(5)).save_pretrained(
        root / "eagle3"
    )
    for number, key in enumerate(KEYS):
        (root / f"key{number}").write_text(key)
    (root / "keys").write_text("\n".join(KEYS))
    models = ["--target", str(root / "target"), "--drafter", f"eagle3:{root / 'eagle3'}"]
    assert main(["convert", "--client-parts", *models, "--output", str(root / "parts")]) == 0
    sizes = ["--rows", "2", "--capacity", str(CAPACITY), "--page", "16", "--chunk", "16"]
    sizes += ["--max-logprobs", "0", "--max-prediction", "0"]
    names = ["--served-model-name", "tiny", "--api-key-file", str(root / "keys")]
    with serving(root / "log", *models, *sizes, *names, "--drafts") as server:
        yield Served(Server(server.address, server.process, KEYS[0]), root)


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.thorough_except("greedy")
@pytest.mark.parametrize("parameters", [{}, DRAWN], ids=["greedy", "drawn"])
def test_the_command_writes_the_servers_text(parameters, served: Served, capsys) -> None:
    options = [word for name, value in parameters.items() for word in (f"--{name}", str(value))]
    status, out, _ = served.command(capsys, "--json", *options)
    output = json.loads(out)
    assert (status, output["finish_reason"]) == (0, "length")
    assert output["text"] == served.text(**parameters)
    assert len(output["tokens"]) == 40 and output["provisional"] == ""
    assert served.text(**parameters)


@pytest.mark.full
def test_the_command_prints_the_text_and_what_it_took(served: Served, capsys) -> None:
    stop = served.text()[10:14]
    status, out, err = served.command(capsys, "--stop", stop)
    assert (status, out) == (0, served.text()[: served.text().index(stop)] + "\n")
    assert "rounds of" in err


@pytest.mark.full
def test_the_command_goes_on_from_its_journal(served: Served, capsys, tmp_path) -> None:
    journal = tmp_path / "text.json"
    options = ["--json", "--journal", str(journal)]
    assert served.command(capsys, *options)[0] == 0
    cut = json.loads(journal.read_text())
    cut["committed"] = cut["committed"][:17]
    journal.write_text(json.dumps(cut))
    status, out, _ = served.command(capsys, *options)
    output = json.loads(out)
    assert (status, output["text"], len(output["tokens"])) == (0, served.text(), 40)
    assert output["rounds"] + output["accepted"] == 23
    output = json.loads(served.command(capsys, *options)[1])
    assert (output["text"], output["rounds"]) == (served.text(), 0)
    status, _, err = served.command(capsys, *options, "--seed", "9")
    assert status == 2 and "journal=" in err


@pytest.mark.full
def test_the_command_without_a_server(served: Served, capsys) -> None:
    status, out, _ = served.command(capsys, "--offline", "--json")
    output = json.loads(out)
    assert (status, output["text"], output["finish_reason"]) == (0, "", "offline")
    assert len(output["provisional_tokens"]) == 40
    nobody = [
        "--server",
        "ws://127.0.0.1:9",
        "--wait-seconds",
        "0.5",
        "--provisional-after",
        "0.1",
        "--json",
    ]
    status, out, _ = served.command(capsys, *nobody)
    assert (status, json.loads(out)["text"]) == (3, "")
    assert json.loads(out)["provisional_tokens"] == output["provisional_tokens"]


@pytest.mark.full
def test_the_command_keeps_a_string_back(served: Served, capsys, tmp_path) -> None:
    (tmp_path / "private").write_text("os\n")
    status, out, _ = served.command(capsys, "--private", str(tmp_path / "private"), "--json")
    output = json.loads(out)
    assert (status, output["text"], len(output["provisional_tokens"])) == (0, "", 40)
    assert output["bytes_up"] > 0 and output["bytes_down"] > 0
    (tmp_path / "private").write_text("not there\n")
    status, _, err = served.command(capsys, "--private", str(tmp_path / "private"))
    assert status == 2 and err.startswith("specjax: error: private: ")


@pytest.mark.full
def test_the_command_without_the_key(served: Served, capsys, tmp_path) -> None:
    (tmp_path / "wrong").write_text("a-wrong-key")
    status, out, err = served.command(capsys, "--api-key-file", str(tmp_path / "wrong"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "a key is missing or wrong" in err


# --- the network ----------------------------------------------------------------------------------


@pytest.fixture
def proxy(served: Served) -> Iterator[Proxy]:
    with Proxy(served.server.port, Conditions(round_trip=0.01)) as proxy:
        yield proxy


@pytest.mark.full
def test_a_black_hole(served: Served, proxy: Proxy) -> None:
    client = served.client(proxy.port)
    events: list[Any] = []
    for event in client.stream(PROMPT, max_new_tokens=40):
        events.append(event)
        kinds = [type(event) for event in events]
        if kinds.count(CommittedEvent) == 8 and ProvisionalEvent not in kinds:
            proxy.cut()
        if kinds.count(ProvisionalEvent) == 8:
            proxy.restore()
    kinds = [type(event) for event in events]
    first = kinds.index(ProvisionalEvent)
    last = len(kinds) - 1 - kinds[::-1].index(ProvisionalEvent)
    assert CommittedEvent in kinds[:first] and CommittedEvent in kinds[last:]
    committed = [event for event in events if isinstance(event, CommittedEvent)]
    assert "".join(event.text for event in committed) == client.report.text == served.text()
    retracted = sum(len(event.tokens) for event in events if isinstance(event, RetractedEvent))
    confirmed = sum(event.confirmed for event in committed)
    assert retracted > 0
    assert retracted + confirmed == kinds.count(ProvisionalEvent)


@pytest.mark.full
def test_resets_and_half_frames(served: Served, proxy: Proxy) -> None:
    client, after = served.client(proxy.port), {}
    after[2] = proxy.reset
    after[6] = lambda: proxy.end_after(30, "down")
    after[10] = lambda: proxy.end_after(70, "up")
    after[14] = lambda: proxy.reset(after=0.01)
    committed = 0
    writer = client.stream(PROMPT, max_new_tokens=40, **DRAWN)
    for event in writer:
        if isinstance(event, CommittedEvent):
            committed += 1
            after.pop(committed, lambda: None)()
    assert not after
    assert client.report.text == served.text(**DRAWN)
    assert client.report.resumes >= 4


# --- several --------------------------------------------------------------------------------------


@pytest.mark.full
def test_two_clients_and_a_request_at_a_time(served: Served) -> None:
    parameters = [{"seed": seed, "temperature": 0.8} for seed in (11, 12, 13)]
    expected = [served.text(**values) for values in parameters]
    assert len(set(expected)) == 3
    clients = [served.client(key=key) for key in KEYS]
    for client in clients:
        client.device.warm_up()
    texts: dict[int, str] = {}

    def write(number: int) -> None:
        if number < 2:
            texts[number] = (
                clients[number].generate(PROMPT, max_new_tokens=40, **parameters[number]).text
            )
        else:
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40} | parameters[number]
            texts[number] = served.server.post("/v1/completions", body)["choices"][0]["text"]

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [texts.get(number) for number in range(3)] == expected
    assert all(client.report.resumes == 0 for client in clients)


# --- who may --------------------------------------------------------------------------------------


def talk(link: WebSocketLink, frame: bytes | None = None) -> Any:
    """Send a frame, if there is one, and return the next message."""
    if frame is not None:
        link.send(frame)
    answer = link.receive(20.0)
    assert answer is not None
    return wire.decode_down(answer)


def connected(served: Served, key: str | None) -> WebSocketLink:
    link = WebSocketLink(f"ws://127.0.0.1:{served.server.port}", key)
    link.connect(5.0)
    while not link.is_open():
        time.sleep(0.01)
    return link


@pytest.mark.full
def test_who_has_no_key_gets_nothing(served: Served) -> None:
    for key in (None, "a-wrong-key"):
        with pytest.raises(LinkRefusedError, match="401"):
            connected(served, key)
        with pytest.raises(LinkRefusedError, match="a key is missing or wrong"):
            served.client(key=key).generate(PROMPT, max_new_tokens=4)


@pytest.mark.thorough
def test_nobody_goes_on_with_the_text_of_another_key(served: Served) -> None:
    mine, foreign = connected(served, KEYS[0]), connected(served, KEYS[1])
    exchange = Exchange(
        ExchangeRequest((5, 6, 7), SamplingParams(max_new_tokens=8, eos_token_ids=()))
    )
    session = talk(mine, exchange.hello()).session
    message: Any = SimpleNamespace()
    while not isinstance(message, wire.ReadyMessage):
        message = talk(mine)
    state = {"session": session, "base": 3, "digest": wire.digest([5, 6, 7]), "known": 2}
    assert talk(
        foreign, wire.encode(wire.ResumeMessage(epoch=1, **state))
    ) == wire.ForgottenMessage(session=session)
    foreign.send(wire.encode(wire.CloseMessage(session=session)))
    again = connected(served, KEYS[0])
    assert talk(again, wire.encode(wire.ResumeMessage(epoch=1, **state))) == wire.ReadyMessage(
        session=session, epoch=1, length=3
    )
    for link in (mine, foreign, again):
        link.close()
