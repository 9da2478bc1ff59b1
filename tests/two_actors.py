"""Print the tokens of two Ray actors on this machine, and of one process, as JSON.

    python -m tests.two_actors TARGET calm|killed DIRECTORY

With "calm", Ray writes its files into the directory, too. With "killed", one actor is killed.
"""

import json
import os
import signal
import sys
from typing import Any

import numpy as np
import psutil

from specjax.ray import Generate

SETTINGS = {"rows": 2, "max_new_tokens": 24, "capacity": 64}
PROMPTS = [f"def function_{number}(" for number in range(64)]


class Traced(Generate):
    """A generator whose rows say which process wrote them."""

    def __call__(self, batch: Any) -> dict[str, Any]:
        return {**super().__call__(batch), "worker": np.full(len(batch["prompt"]), os.getpid())}


def main(target: str, mode: str, directory: str) -> None:
    import ray

    with Generate(target, **SETTINGS) as generate:
        batch = generate({"prompt": np.array(PROMPTS, object)})
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    dataset = ray.data.from_items(
        [{"prompt": prompt} for prompt in PROMPTS], override_num_blocks=16
    ).map_batches(
        Traced,
        fn_constructor_kwargs={"target": target, **SETTINGS},
        batch_size=4,
        compute=ray.data.ActorPoolStrategy(size=2),
        num_cpus=1,
    )
    if mode == "calm":
        dataset = dataset.materialize()
        for write, kind in ((dataset.write_json, "jsonl"), (dataset.write_parquet, "parquet")):
            write(f"{directory}/{kind}")
    rows, killed = [], None
    for row in dataset.iter_rows():
        rows.append(row)
        if mode == "killed" and killed is None:
            killed = row["worker"]
            assert killed in {child.pid for child in psutil.Process().children(recursive=True)}
            os.kill(killed, signal.SIGKILL)
    ray.shutdown()
    results = {
        "of actors": {row["prompt"]: [int(token) for token in row["tokens"]] for row in rows},
        "of one process": dict(zip(PROMPTS, batch["tokens"].tolist(), strict=True)),
        "workers": sorted({int(row["worker"]) for row in rows}),
    }
    assert len(rows) == len(PROMPTS)
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
