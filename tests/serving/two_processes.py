"""One of two processes that serve one model together. `test_over_hosts` starts both.

    python -m tests.serving.two_processes DIRECTORY COORDINATOR PROCESS

The directory holds the models. The first process writes the texts into it as texts.json. If the
directory has a file DIES, the first process kills the second one and submits one more request.
"""

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

import specjax
from specjax import processes
from specjax.drafters import DraftModel
from specjax.drafts.shapes import Chain
from specjax.serving import ClientDrafts, Engine, RowReady, follow
from specjax.sharding import make_mesh
from tests.grammars.tokenizers_for_tests import small_tokenizer

DIES, END = "dies", 19
MESHES = {"data": (2, 1), "model": (1, 2)}
SIZES = {
    "rows": 4,
    "widths": (4,),
    "capacity": 64,
    "page": 8,
    "chunk": 16,
    "steps": 4,
    "drafts": (None, Chain(2)),
}
ASKED = {"max_logprobs": 2, "max_prediction": 3}
CONSTRAINED = {"grammar": specjax.Regex("(ab|abc|de){2,6}f?"), "eos_token_ids": (END,)}
LONG = [int(token) for token in np.random.default_rng(3).integers(1, 12, 40)]  # three chunks
REQUESTS: list[dict[str, Any]] = [
    {"prompt": [1, 4, 2, 4, 2, 7], "max_new_tokens": 30},
    {"prompt": [3, 5, 9], "max_new_tokens": 20, "temperature": 1.0, "seed": 4},
    {"prompt": LONG, "max_new_tokens": 16, "temperature": 0.7, "top_p": 0.9, "seed": 5},
    {"prompt": [8], "max_new_tokens": 12, "temperature": 1.3, "seed": 6, "logprobs": 2},
    {"prompt": [6] * 6, "max_new_tokens": 20, "prediction": [6] * 12},
    {"prompt": [2, 3, 4, 5], "max_new_tokens": 9, "eos_token_ids": (5, 6)},
    {"prompt": LONG[:20], "max_new_tokens": 4, "logprobs": 1, "echo": True},
]
# They are together in the rows only with each other.
WITH_GRAMMARS: list[dict[str, Any]] = [
    {"prompt": [1, 4, 2, 4, 2, 7], "max_new_tokens": 14, **CONSTRAINED},
    {"prompt": LONG, "max_new_tokens": 14, "temperature": 1.0, "seed": 2, **CONSTRAINED},
    {"prompt": [3, 5], "max_new_tokens": 9, "temperature": 1.0, "logprobs": 1, **CONSTRAINED},
    {"prompt": [6] * 6, "max_new_tokens": 12, "prediction": [15, 15, 17, 5], **CONSTRAINED},
    {"prompt": [6] * 6, "max_new_tokens": 12, "prediction": [6] * 12},
]
# It continues from the pages of another text.
GOES_ON = {"prompt": [*LONG, 7], "max_new_tokens": 8, "temperature": 0.7, "seed": 9}
CLIENT = ([3, 5, 9, 1], [5, 5, 5])  # a text, and what a client drafts below its newest token


def models(directory: Path, mesh: jax.sharding.Mesh | None) -> tuple[specjax.Target, DraftModel]:
    target = specjax.Target.from_pretrained(directory / "target", dtype=np.float32, mesh=mesh)
    return target, DraftModel.from_pretrained(
        directory / "draft", draft=Chain(2), dtype=np.float32, mesh=mesh
    )


def options(mesh: jax.sharding.Mesh | None) -> dict[str, Any]:
    """Return the options of an engine, which serves clients if its mesh does not split rows."""
    takes_clients = mesh is None or mesh.shape["data"] == 1
    return {
        **SIZES,
        **ASKED,
        "clients": ClientDrafts(nodes=8, depth=4) if takes_clients else None,
        "grammars": True,
        "tokenizer": small_tokenizer(),
    }


def serve(engine: Engine) -> dict[str, Any]:
    """Return the texts of all requests and a client's verdict, as JSON."""
    handles = [engine.submit(**{"eos_token_ids": (), **request}) for request in REQUESTS]
    texts = [list(handle.result(120).tokens) for handle in handles]
    texts.append(list(engine.submit(**{"eos_token_ids": (), **GOES_ON}).result(120).tokens))
    handles = [engine.submit(**{"eos_token_ids": (), **request}) for request in WITH_GRAMMARS]
    texts += [list(handle.result(120).tokens) for handle in handles]
    shared = engine.statistics.prompt_tokens_shared
    until = time.monotonic() + 60
    while not engine.statistics.tokens_reread:
        assert time.monotonic() < until, "no text is read once more"
        time.sleep(0.01)
    # The next turn of a chat: its prompt begins with the long text and its answer.
    following = {"prompt": [*LONG, *texts[2], 3], "max_new_tokens": 6, "eos_token_ids": ()}
    texts.append(list(engine.submit(**following).result(120).tokens))
    return {"texts": texts, "shared": shared > 0, "client": client(engine)}


def client(engine: Engine) -> list[int] | None:
    """Return the accepted nodes and the token of a client's verdict.

    Return None if the engine serves no clients.
    """
    if engine.client_drafts is None:
        return None
    tokens, drafted = CLIENT
    events: list[Any] = []
    is_ready, is_checked = threading.Event(), threading.Event()

    def listen(event: Any) -> None:
        events.append(event)
        (is_ready if isinstance(event, RowReady) else is_checked).set()

    verdicts = []
    for requests in ({"eos_token_ids": ()}, CONSTRAINED):
        is_ready.clear()
        is_checked.clear()
        row = engine.open_row(tokens, max_new_tokens=8, listener=listen, **requests)
        assert is_ready.wait(60)
        row.verify(np.array([tokens[-1], *drafted]), np.array([-1, 0, 1, 2]))
        assert is_checked.wait(60)
        row.close()
        verdicts += [*events[-1].accepted, events[-1].token]
    return verdicts


def main(directory: Path, coordinator: str, process: int) -> None:
    jax.config.update("jax_num_cpu_devices", 1)
    jax.config.update("jax_default_matmul_precision", "highest")
    together = processes.join(processes.ProcessPlace(coordinator, 2, process))
    assert together is not None
    texts = {}
    for name, sizes in MESHES.items():
        mesh = make_mesh(*sizes)
        pair = models(directory, mesh)
        if not together.is_first:
            follow(*pair, **options(mesh))
            continue
        with Engine(*pair, **options(mesh)) as engine:
            texts[name] = serve(engine)
            if (directory / DIES).exists():
                os.kill(together.roster[1].pid, signal.SIGKILL)
                engine.submit(**REQUESTS[0], eos_token_ids=()).result(120)
    if together.is_first:
        (directory / "texts.json").write_text(json.dumps(texts))
    together.leave()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
