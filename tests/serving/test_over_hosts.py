"""Tests of two processes that serve one model together, against one that serves it alone."""

import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from specjax.drafters.suffix_index import SuffixIndex
from specjax.serving import Engine, over_hosts
from specjax.serving.over_hosts import FollowingAnswers, LeadingAnswers
from specjax.serving.pages import Tenant
from tests.conftest import tiny_target
from tests.processes import processes, wait
from tests.serving import two_processes, two_processes_with_answers


@pytest.fixture
def directory(tmp_path):
    sizes = {"num_layers": 1, "vocab_size": 20}
    tiny_target(**sizes).save_pretrained(tmp_path / "target")
    tiny_target(**sizes, scale=22.0).save_pretrained(tmp_path / "draft")
    return tmp_path


@pytest.mark.thorough
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
    host = socket.gethostname()
    log = (directory / "0.log").read_text()
    assert f"process 1 ({host}, pid {running[1].pid}) is lost" in log


# --- earlier answers ------------------------------------------------------------------------------


class Wire:
    """The messages from the first process to another one, which sorts earlier answers."""

    def __init__(self) -> None:
        self.following = FollowingAnswers()

    def send(self, message: bytes) -> None:
        call = over_hosts._DECODER.decode(message)
        assert isinstance(call, over_hosts.SortAnswers)
        self.following.sort(call)

    def check(self, version: int, index: SuffixIndex) -> None:
        """Check that the other process has an index, and that it is equal."""
        for name, value in vars(self.following.index(version)).items():
            np.testing.assert_array_equal(value, getattr(index, name), name)

    @property
    def versions(self) -> set[int]:
        return set(self.following._indices)


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.following.close()


def sorted_answers(answers: LeadingAnswers, tenant: Tenant) -> tuple[int, SuffixIndex]:
    answers.wait()
    newest = answers.newest(tenant)
    assert newest is not None
    return newest


def test_other_processes_sort_what_the_first_one_sorts(wire) -> None:
    """Add answers of three tenants, of which two have a place, so that texts and tenants go."""
    rng, present = np.random.default_rng(0), {}
    answers = LeadingAnswers(2048, wire, most_tenants=2, idle_seconds=0)
    for number in range(120):
        tenant = Tenant("abc"[rng.choice(3, p=[0.8, 0.15, 0.05])])
        length = 1500 if number in (0, 60) else rng.integers(3, 40)
        answers.add(tenant, rng.integers(0, 3, length).tolist())
        if rng.random() < 0.5:
            continue
        answers.wait()
        present = {name: answers.newest(Tenant(name)) for name in "abc"}
        present = {name: newest for name, newest in present.items() if newest is not None}
        assert len(present) <= 2
        for newest in present.values():
            wire.check(*newest)
    assert len(present) == 2
    answers.close()


def test_other_processes_free_indices_that_nobody_needs(wire) -> None:
    """Hold one as the engine does on its way to the device, and let more answers come."""
    answers = LeadingAnswers(2048, wire, most_tenants=1, idle_seconds=0)
    a, b = Tenant("a"), Tenant("b")
    answers.add(a, [1, 2, 3])
    on_its_way = sorted_answers(answers, a)
    for number in range(4):
        answers.add(a, [number, 4, 5])
        answers.wait()
    wire.check(*on_its_way)
    version = on_its_way[0]
    del on_its_way
    newest = sorted_answers(answers, a)[0]
    answers.add(b, [1, 2, 3])  # in place of a
    of_b = sorted_answers(answers, b)[0]
    answers.add(b, [1, 2, 4])
    newest_of_b = sorted_answers(answers, b)[0]
    assert version not in wire.versions and newest not in wire.versions
    assert wire.versions == {of_b, newest_of_b}
    answers.close()


def test_answers_that_the_first_process_cannot_sort_are_dropped_by_all(wire, monkeypatch) -> None:
    """Let the sort fail in both, as by too little memory."""

    def fails(*_: Any) -> None:
        raise MemoryError

    answers, tenant = LeadingAnswers(2048, wire), Tenant("a")
    answers.add(tenant, [1, 2, 3])
    before, _ = sorted_answers(answers, tenant)
    with monkeypatch.context() as patch:
        patch.setattr(SuffixIndex, "with_texts", fails)
        answers.add(tenant, [1, 2, 4])
        answers.wait()
        assert answers.newest(tenant) is None
        (failed,) = wire.versions - {before}
        with pytest.raises(MemoryError):
            wire.following.index(failed)
    answers.add(tenant, [1, 2, 5])
    newest = sorted_answers(answers, tenant)
    wire.check(*newest)
    assert failed not in wire.versions
    answers.close()


@pytest.mark.full
def test_two_processes_draft_from_earlier_answers_as_one_does(directory) -> None:
    """Compare the texts and accepted tokens of a union, and what each process has on its device."""
    module = two_processes_with_answers
    with processes(module.__name__, directory) as running:
        with Engine(*module.models(directory, None), **module.OPTIONS) as engine:
            alone = module.serve(engine)
        wait(running, directory)
    served = json.loads((directory / "served.json").read_text())
    first, second, of_b, third, without, second_of_b, last = alone["accepted"]
    assert min(second, third, second_of_b, last) >= 15 > max(first, of_b, without)
    assert first == of_b  # tenants are apart
    assert min(alone["by_part"]) > 0
    assert all(text == alone["texts"][0] for text in alone["texts"])
    assert served["model"] == served["data"] == alone
    assert alone["compiled"] == 0
    of_first, of_second = (
        json.loads((directory / f"puts{number}.json").read_text()) for number in range(2)
    )
    assert of_first == of_second
    assert len(set(of_first)) >= 6  # the empty one, and one for each of five texts
