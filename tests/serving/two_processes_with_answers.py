"""One of two processes whose union drafts from earlier answers. `test_over_hosts` starts both.

    python -m tests.serving.two_processes_with_answers DIRECTORY COORDINATOR PROCESS

The directory holds the target. The first process writes what it serves into it as served.json. Each
process writes what it puts on its device as puts0.json and puts1.json.
"""

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import specjax
from specjax import processes
from specjax.drafters import Suffix, Together, TokenRecycling
from specjax.drafts.shapes import Chain
from specjax.serving import Engine, follow
from specjax.serving.device import EngineDevice
from specjax.serving.pages import Tenant
from specjax.sharding import make_mesh
from tests.conftest import compilations
from tests.serving.two_processes import MESHES

CAPACITY = 1024
DRAFTER = Together((TokenRecycling(successors=2, draft=Chain(2)), Suffix(draft=Chain(4))))
OPTIONS: dict[str, Any] = {
    "rows": 2,
    "widths": (2,),
    "capacity": 64,
    "page": 8,
    "chunk": 8,
    "steps": 4,
    "drafts": [DRAFTER.draft_shape],  # so that the accepted tokens do not depend on time
    "earlier_answers": CAPACITY,
    "warm": True,  # so that nothing is compiled later
}
REQUEST: dict[str, Any] = {"max_new_tokens": 24, "eos_token_ids": (), "temperature": 1.0}
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


def models(directory: Path, mesh: jax.sharding.Mesh | None) -> tuple[specjax.Target, Together]:
    target = specjax.Target.from_pretrained(directory / "target", dtype=np.float32, mesh=mesh)
    return target, DRAFTER


def serve(engine: Engine) -> dict[str, Any]:
    """Return texts, and how many of their tokens were drafted and accepted, as JSON.

    The accepted tokens are those of each text, and those that one part of the drafter alone
    offered. After the third text of tenant a, other answers of it remove its earlier ones.
    """
    answers = engine._loop.answers
    assert answers is not None
    texts, accepted, compiled = [], [], 0
    for number, name in enumerate("aabaaba"):
        tenant = Tenant(name)
        if number == 4:
            for seed, length in enumerate((700, 300)):
                foreign = np.random.default_rng(seed).integers(1, 12, length)
                answers.add(tenant, foreign.tolist())
            answers.wait()
        before = answers.newest(tenant)
        pieces = list(engine.submit(PROMPT, tenant=name, seed=1, **REQUEST))
        texts.append([token for piece in pieces for token in piece.tokens])
        accepted.append(sum(sum(piece.accepted) for piece in pieces))
        until = time.monotonic() + 60
        while answers.newest(tenant) == before:  # the answer is added after it is delivered
            assert time.monotonic() < until, "an answer is not sorted"
            time.sleep(0.01)
        compiled = compiled or compilations()
    compiled = compilations() - compiled
    by_part = [part.accepted_only for part in engine.statistics.parts]
    # Several tenants at once, whose answers are sorted while they run.
    handles = [
        engine.submit(PROMPT, tenant="abc"[seed % 3], seed=seed, **REQUEST) for seed in range(9)
    ]
    together = [list(handle.result(120).tokens) for handle in handles]
    return {
        "texts": texts,
        "accepted": accepted,
        "by_part": by_part,
        "compiled": compiled,
        "together": together,
    }


def record_puts(puts: list[str]) -> None:
    """Append a digest of the index on this process's device after each change of it."""
    put_answers = EngineDevice.put_answers

    def recorded(device: EngineDevice, *arguments: Any, **options: Any) -> None:
        put_answers(device, *arguments, **options)
        leaves = jax.tree.leaves(device._answers)
        local = [np.asarray(leaf.addressable_data(0)).tobytes() for leaf in leaves]
        puts.append(hashlib.sha256(b"".join(local)).hexdigest())

    EngineDevice.put_answers = recorded  # pyright: ignore[reportAttributeAccessIssue]


def main(directory: Path, coordinator: str, process: int) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_default_matmul_precision", "highest")
    together = processes.join(processes.ProcessPlace(coordinator, 2, process))
    assert together is not None
    served, puts = {}, []
    record_puts(puts)
    for name, sizes in MESHES.items():
        mesh = make_mesh(*sizes)
        if together.is_first:
            with Engine(*models(directory, mesh), **OPTIONS) as engine:
                served[name] = serve(engine)
        else:
            follow(*models(directory, mesh), **OPTIONS)
    (directory / f"puts{process}.json").write_text(json.dumps(puts))
    if together.is_first:
        (directory / "served.json").write_text(json.dumps(served))
    together.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
