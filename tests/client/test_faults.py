"""Tests that a client commits the target's text under all faults, each schedule from its seed."""

import random
from dataclasses import replace

import jax
import msgspec
import pytest

from specjax import Chain, DraftModel, DynamicTree, Eagle3, MixtureOfAttentions, SamplingParams
from specjax.client.events import ProvisionalEvent
from specjax.client.exchange import Exchange, ExchangeRequest
from specjax.serving import ClientDrafts, Engine
from specjax.serving.sessions import Terms
from tests.client.simulation import Faults, SlowDevice, reference, run
from tests.conftest import tiny_target

CAPACITY = 64
SHAPES = [Chain(2), DynamicTree(top_k=2, depth=4, nodes=8)]
DRAFTERS = {
    "moa": lambda target: MixtureOfAttentions.init(target, jax.random.key(5), tli=1),
    "eagle3": lambda target: Eagle3.init(target, jax.random.key(5)),
    "draft model": lambda target: DraftModel.init(target, jax.random.key(5), num_layers=1),
}


class Place:
    """An engine and a client's device with one drafter."""

    def __init__(self, name: str) -> None:
        target = tiny_target(num_layers=2)
        drafter = DRAFTERS[name](target)
        clients = ClientDrafts(drafter, nodes=8, depth=4)
        sizes = {"rows": 1, "widths": (1,), "capacity": CAPACITY, "page": 8, "chunk": 8}
        # The client is never idle, because the engine's clock is not the simulated one.
        self.engine = Engine(
            target, drafts=(None,), clients=clients, client_idle_seconds=1e9, **sizes
        )
        self.terms = Terms(nodes=8, depth=4, capacity=CAPACITY, tells=clients.tells(target))
        self.device = SlowDevice(target, drafter, SHAPES, CAPACITY)
        self._expected: dict[ExchangeRequest, list[int]] = {}

    def check(self, seed: int, faults: Faults | None = None):
        request = drawn_request(seed)
        if request not in self._expected:
            self._expected[request] = reference(self.engine, request)
        expected = self._expected[request]
        outcome = run(
            self.engine,
            self.device,
            self.terms,
            request,
            seed,
            faults or Faults.drawn(seed),
            expected,
        )
        assert outcome.tokens == expected, f"seed {seed}"
        return outcome


def drawn_request(seed: int) -> ExchangeRequest:
    """Draw one of 40 requests."""
    draw = random.Random(seed % 40)
    return ExchangeRequest(
        prompt=tuple(draw.randint(1, 10) for _ in range(draw.choice([1, 5, 12, 20]))),
        params=SamplingParams(
            max_new_tokens=draw.choice([6, 24]),
            temperature=draw.choice([0.0, 1.0]),
            top_p=draw.choice([1.0, 0.9]),
            seed=seed % 40,
            eos_token_ids=(3,) if draw.random() < 0.3 else (),
        ),
        precision=draw.choice(["float32", "float16", "int8"]),
    )


@pytest.fixture(scope="module")
def places():
    places: dict[str, Place] = {}

    def of(name: str) -> Place:
        if name not in places:
            places[name] = Place(name)
        return places[name]

    yield of
    for place in places.values():
        place.engine.close()


@pytest.mark.thorough
@pytest.mark.parametrize("name", DRAFTERS)
def test_without_faults_drafts_are_accepted_and_the_text_is_the_targets(places, name) -> None:
    for seed in range(4):
        outcome = places(name).check(seed, Faults())
        assert outcome.lives == 1 and outcome.report.resumes == 0
        assert outcome.report.finish_reason in ("stop", "length")


@pytest.mark.full
@pytest.mark.thorough_except("moa")
@pytest.mark.parametrize("name", DRAFTERS)
def test_what_is_committed_is_the_targets_text_whatever_goes_wrong(places, name) -> None:
    for seed in range(40):
        places(name).check(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("first", range(0, 10_000, 500))
def test_so_it_is_for_ten_thousand_schedules(places, first) -> None:
    for seed in range(first, first + 500):
        places(list(DRAFTERS)[seed % 3]).check(seed)


@pytest.mark.full
def test_a_schedule_is_the_same_whenever_it_is_run(places) -> None:
    first, second = (places("draft model").check(11) for _ in range(2))
    assert first.seconds == second.seconds
    assert first.frames == second.frames
    assert first.events == second.events


@pytest.mark.full
def test_faults_do_what_they_are_called(places) -> None:
    """Check that each kind of fault has an effect, without which the tests above prove nothing."""
    calm = places("draft model").check(3, Faults())
    lossy = places("draft model").check(3, Faults(lost=0.3))
    assert lossy.seconds > calm.seconds and lossy.report.bytes_up > calm.report.bytes_up
    cut = places("draft model").check(3, Faults(holes=[(0.2, 3.0)]))
    assert cut.seconds > 3 and any(isinstance(event, ProvisionalEvent) for event in cut.events)
    killed = places("draft model").check(3, Faults(kills=[0.2, 0.4]))
    assert killed.lives == 3
    restarted = places("draft model").check(3, Faults(restarts=[(0.2, 0.5)]))
    assert restarted.report.resumes >= 1 and restarted.seconds > 0.7


@pytest.mark.full
@pytest.mark.parametrize("wrong", ["another key", "a verdict of another draft"])
def test_a_wrong_one_is_found(places, monkeypatch, wrong) -> None:
    """Check that the tests above fail if a client accepts what it must not."""
    if wrong == "another key":
        request = drawn_request(1)
        place = places("draft model")
        expected = reference(place.engine, request)
        wrong_request = replace(
            request, params=replace(request.params, seed=request.params.seed + 1, temperature=1.0)
        )
        with pytest.raises(AssertionError, match="is no beginning of"):
            run(place.engine, place.device, place.terms, wrong_request, 1, Faults(), expected)
    else:
        verdict = Exchange._verdict

        def careless(self, message):
            if self._sent is not None:  # take it as the verdict of the newest draft
                message = msgspec.structs.replace(
                    message, sequence=self._sent.sequence, epoch=self._epoch
                )
            return verdict(self, message)

        monkeypatch.setattr(Exchange, "_verdict", careless)
        with pytest.raises(AssertionError):
            for seed in range(200):
                places("draft model").check(seed, Faults(doubled=1.0, delay=(0.01, 0.2)))
