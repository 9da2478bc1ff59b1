"""Tests of two processes that serve one model together, against one that serves it alone."""

import json
import time

import pytest

from specjax.serving import Engine
from tests.conftest import tiny_target
from tests.processes import processes, wait
from tests.serving import two_processes


@pytest.fixture
def directory(tmp_path):
    sizes = {"num_layers": 1, "vocab_size": 20}
    tiny_target(**sizes).save_pretrained(tmp_path / "target")
    tiny_target(**sizes, scale=22.0).save_pretrained(tmp_path / "draft")
    return tmp_path


@pytest.mark.full
def test_two_processes_serve_the_texts_that_one_does(directory) -> None:
    """Split the rows over ``data``, and the parameters over ``model``.

    The requests use chunks, shared prefixes, log-probabilities, predictions, clients and grammars,
    and a chat goes on from a text that was read once more.
    """
    with processes(two_processes.__name__, directory) as running:
        models, options = two_processes.models(directory, None), two_processes.options(None)
        with Engine(*models, **options) as engine:
            alone = json.loads(json.dumps(two_processes.serve(engine)))
        wait(running, directory)
    together = json.loads((directory / "texts.json").read_text())
    assert alone["shared"] and len(alone["client"]) >= 2
    assert together["model"] == alone
    assert together["data"] == alone | {"client": None}


@pytest.mark.thorough
def test_when_one_is_lost_the_other_says_so_and_ends(directory) -> None:
    (directory / two_processes.DIES).touch()
    with processes(two_processes.__name__, directory) as running:
        running[1].wait(240)
        died = time.monotonic()
        assert running[0].wait(30) == 1
        assert time.monotonic() - died < 30
    host = two_processes.processes.socket.gethostname()
    log = (directory / "0.log").read_text()
    assert f"process 1 ({host}, pid {running[1].pid}) is lost" in log
