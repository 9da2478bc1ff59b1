"""A server whose engine also answers in its own process, to measure the cost of HTTP.

`benchmarks.serving` starts it. It is ``specjax serve`` with a thread that reads lists of requests
from the standard input and sends them directly to the engine. Both ways share the engine, its
threads and its statistics of drafts.
"""

import asyncio
import json
import sys
import threading
import time

import tyro

from benchmarks.serving_clients import Request, in_process, work_through
from specjax.cli.serve import ServeConfig, make_engine
from specjax.serving import Engine
from specjax.serving.http import run
from specjax.serving.http.service import AppOptions, Service


def answer_lists(engine: Engine) -> None:
    """Answer lists of requests from the standard input with their seconds and tokens."""
    for line in sys.stdin:
        task = json.loads(line)
        requests = [Request(**fields) for fields in task["requests"]]
        began = time.perf_counter()
        answers = asyncio.run(work_through(in_process(engine), requests, task["clients"]))
        seconds = time.perf_counter() - began
        print(
            json.dumps({"seconds": seconds, "texts": [answer.text for answer in answers]}),
            flush=True,
        )


def main(config: ServeConfig) -> int:
    """Serve both ways until the standard input ends and a signal comes."""
    with run.bind(config.host, config.port) as bound, make_engine(config) as engine:
        threading.Thread(target=answer_lists, args=(engine,), daemon=True).start()
        options = AppOptions(
            names=config.served_model_name, max_texts=config.rows + config.max_queue
        )
        return run.serve(Service(engine, options), bound)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(ServeConfig)))
