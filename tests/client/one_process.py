"""A server or a client as a process that starts quickly, for `test_kills` to kill.

    python -m tests.client.one_process server DIRECTORY PORT
    python -m tests.client.one_process client DIRECTORY PORT SEED

The directory holds a target without a tokenizer, a drafter, a key and a certificate. A client
appends its events to SEED.events, one per line, and keeps its journal in SEED.json.
"""

import json
import sys
from dataclasses import asdict
from pathlib import Path

from specjax.client import Patience, connect
from specjax.drafters import Eagle3
from specjax.models.transformer import Target

CAPACITY = 96
PROMPT = (5, 3, 1, 9)
LENGTH = 60
PATIENCE = Patience(
    provisional=0.3, again=0.5, lost=2.0, connecting=2.0, retry=0.05, most_retry=0.5, server=240.0
)


def settings(seed: int) -> dict[str, float]:
    """Return the sampling parameters of a text."""
    return {
        "seed": seed,
        "temperature": [1.0, 0.0, 0.7][seed % 3],
        "top_p": [1.0, 1.0, 0.9][seed % 3],
    }


def models(directory: Path) -> tuple[Target, Eagle3]:
    return Target.from_pretrained(directory / "target"), Eagle3.from_pretrained(
        directory / "eagle3"
    )


def serve(directory: Path, port: int) -> int:
    """Serve until the process is killed."""
    from specjax.serving import ClientDrafts, Engine
    from specjax.serving.http import run
    from specjax.serving.http.service import AppOptions, Service
    from tests.serving.http.made_up import Characters

    target, drafter = models(directory)
    clients = ClientDrafts(drafter, nodes=8, depth=4)
    sizes = {"rows": 1, "widths": (1,), "capacity": CAPACITY, "page": 16, "chunk": 16}
    keys = tuple((directory / "key").read_text().split())
    tls = (str(directory / "certificate.pem"), str(directory / "private.pem"))
    with (
        run.bind("127.0.0.1", port) as bound,
        Engine(target, drafts=(None,), tokenizer=Characters(), clients=clients, **sizes) as engine,
    ):
        service = Service(engine, AppOptions(names=("tiny",), api_keys=keys))
        return run.serve(service, bound, tls=tls, message="ready")


def write(directory: Path, port: int, seed: int) -> int:
    """Generate a text, or continue it from its journal."""
    target, drafter = models(directory)
    client = connect(
        f"wss://127.0.0.1:{port}",
        drafter,
        target,
        api_key=(directory / "key").read_text().split()[0],
        certificate=directory / "certificate.pem",
        draft=2,
        capacity=CAPACITY,
        patience=PATIENCE,
    )
    options = {
        "max_new_tokens": LENGTH,
        "eos_token_ids": (),
        "journal": directory / f"{seed}.json",
        **settings(seed),
    }
    writer = client.stream(PROMPT, **options)
    with (directory / f"{seed}.events").open("a") as events:
        print("begin", file=events, flush=True)
        for event in writer:
            print(json.dumps([type(event).__name__, asdict(event)]), file=events, flush=True)
        print("end", writer.report.finish_reason, file=events, flush=True)
    return 0


if __name__ == "__main__":
    role, where, *numbers = sys.argv[1:]
    sys.exit({"server": serve, "client": write}[role](Path(where), *map(int, numbers)))
