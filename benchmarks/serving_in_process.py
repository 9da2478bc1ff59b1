"""A server whose engine can also be asked in its own process: what HTTP costs is the difference.

Started by `benchmarks.serving`. It is ``specjax serve`` with a thread beside it, which reads lists of requests from standard
input and answers them straight from the engine. Both ways share the engine, its threads and what it has learnt of its drafts.
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
    """For each line of standard input, a list of requests and a number of clients: the seconds and tokens that they took."""
    for line in sys.stdin:
        asked = json.loads(line)
        requests = [Request(**each) for each in asked["requests"]]
        began = time.perf_counter()
        answers = asyncio.run(work_through(in_process(engine), requests, asked["clients"]))
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "texts": [answer.text for answer in answers]}), flush=True)


def main(config: ServeConfig) -> int:
    """Serve both ways until standard input ends and a signal comes."""
    with run.bind(config.host, config.port) as bound, make_engine(config) as engine:
        threading.Thread(target=answer_lists, args=(engine,), daemon=True).start()
        options = AppOptions(names=config.served_model_name, max_texts=config.rows + config.max_queue)
        return run.serve(Service(engine, options), bound)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(ServeConfig)))
