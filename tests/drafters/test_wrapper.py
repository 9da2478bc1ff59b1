"""Test drafters that wrap another one.

Every hook of `Drafter` reaches the wrapped drafter with the same arguments.
"""

import inspect
from dataclasses import dataclass
from typing import Any

import jax
import pytest

import specjax
from specjax.demo.on_inflated import OnInflated
from specjax.drafters import NoDraft
from specjax.drafters.base import _OLD_METHODS, Drafter
from specjax.drafters.pausable import Pausable
from specjax.drafters.with_prediction import WithPrediction
from specjax.drafters.wrapper import Wrapper

# These follow from the wrapper's own fields.
OF_EVERY_DRAFTER = {"draft_shape", "draft", "shown_fields", *_OLD_METHODS}
HOOKS = [
    name for name in vars(Drafter) if not name.startswith("_") and name not in OF_EVERY_DRAFTER
]
PROPERTIES = [name for name in HOOKS if not callable(getattr(Drafter, name))]
METHODS = [name for name in HOOKS if name not in PROPERTIES]
RETURN_STATES = {
    "append_committed",
    "append_remote",
    "in_segment",
    "prompts_read",
    "update",
    "from_prefix_state",
}
RETURN_STATES |= {"after_merge"}
STATES = {"state", "fresh", "before", "proposed"}
RETURN_STATE_SECOND = {"propose"}
RETURN_STATE_FIRST = {"append_unverified"}


@dataclass(frozen=True)
class State:
    own: Any
    count: int = 0


class Recorder:
    """A stand-in for a wrapped drafter.

    It records every call, and answers with the name of the method.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        if name in PROPERTIES:
            return f"the {name}"

        def answer(*arguments: Any, **named: Any) -> Any:
            self.calls.append((name, arguments, named))
            state, result = f"state after {name}", f"result of {name}"
            if name in RETURN_STATE_SECOND:
                return result, state
            return (state, result) if name in RETURN_STATE_FIRST else state

        return answer


class Plain(Wrapper[Any]):
    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter


def parameters(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name != "self"]


def test_the_base_has_every_hook() -> None:
    examples = {"check", "taps", "reads", "start", "append_committed", "propose", "update"}
    assert examples | {"max_positions"} < set(HOOKS)
    assert set(METHODS) >= RETURN_STATES | RETURN_STATE_FIRST | RETURN_STATE_SECOND
    assert all(name in vars(Wrapper) for name in HOOKS), (
        "a hook that the base of wrappers does not pass on"
    )


@pytest.mark.parametrize("name", PROPERTIES)
def test_a_property_is_the_wrapped_drafters(name: str) -> None:
    # A drafter on another machine would lack what the wrapper adds.
    expected = False if name == "drafts_elsewhere" else f"the {name}"
    assert getattr(Plain(Recorder()), name) == expected


@pytest.mark.parametrize("name", [name for name in METHODS if name != "start"])
def test_a_method_is_passed_on_with_its_arguments_and_the_wrapped_drafters_state(name: str) -> None:
    inner = Recorder()
    outer_arguments = [
        State("own state", count=3) if parameter in STATES else f"the {parameter}"
        for parameter in parameters(getattr(Drafter, name))
    ]
    returned = getattr(Plain(inner), name)(*outer_arguments)
    ((called, arguments, named),) = inner.calls
    expected = ["own state" if isinstance(value, State) else value for value in outer_arguments]
    assert (called, [*arguments, *named.values()]) == (name, expected)
    state, result = State(f"state after {name}", count=3), f"result of {name}"
    if name in RETURN_STATES:
        assert returned == state
    elif name in RETURN_STATE_SECOND:
        assert returned == (result, state)
    elif name in RETURN_STATE_FIRST:
        assert returned == (state, result)
    else:
        assert returned == (None if name == "check" else f"state after {name}")


def test_a_cache_reaches_the_wrapped_drafters_propose() -> None:
    inner = Recorder()
    Plain(inner).propose(
        "target", State("own"), "root", "sampling", "keys", "active", cache="the cache"
    )  # pyright: ignore
    assert inner.calls[0][2] == {"cache": "the cache"}


@pytest.mark.parametrize("kind", [Wrapper, Pausable, WithPrediction, OnInflated])
def test_an_override_takes_what_the_hook_takes(kind: type) -> None:
    assert {Pausable, WithPrediction, OnInflated} <= set(Wrapper.__subclasses__())
    for name in METHODS:
        if name in vars(kind):
            of_hook = parameters(getattr(Drafter, name))
            assert parameters(getattr(kind, name))[: len(of_hook)] == of_hook, name


def test_a_wrapper_says_what_its_drafter_reads_and_grows(target) -> None:
    drafter = specjax.DraftModel.init(target, jax.random.key(1), num_layers=1)
    for wrapper in (Pausable(drafter), WithPrediction(drafter, longest=0)):
        state = wrapper.start(target, 1, 16)
        assert wrapper.grows_trees == drafter.grows_trees
        assert wrapper.drafting_reads(target, state) == drafter.drafting_reads(target, state.own)
        assert wrapper.drafting_reads(target) == drafter.drafting_reads(target)
    assert not Pausable(NoDraft()).grows_trees
