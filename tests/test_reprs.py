"""Check that objects with arrays print themselves in one line, without the arrays."""

import dataclasses

import jax
import numpy as np
import pytest

import specjax
from specjax.decoding.stats import Stats
from specjax.drafters import Drafter
from specjax.drafters.registry import METHODS
from specjax.pipeline import TextGenerator
from specjax.reprs import OneLine
from tests.conftest import tiny_target

LONGEST = 700


@pytest.fixture(scope="module")
def target() -> specjax.Target:
    return tiny_target()


def check(instance: object) -> str:
    """Return the repr, after a check that it is one short line."""
    shown = repr(instance)
    assert "\n" not in shown and len(shown) < LONGEST, shown
    assert shown.startswith(f"{type(instance).__name__}(")
    return shown


def subclasses(kind: type) -> set[type]:
    children = kind.__subclasses__()
    return set(children).union(*(subclasses(child) for child in children))


def test_a_target_says_its_sizes_and_how_many_parameters_it_has(target) -> None:
    numbers = sum(leaf.size for leaf in jax.tree.leaves(target.params))
    shown = check(target)
    assert (
        f"{numbers:,} numbers, float32" in shown
        and f"vocab_size={target.config.vocab_size}" in shown
    )
    assert "cache_dtype" not in shown and "cache_dtype='int8'" in check(
        target.replace(cache_dtype="int8")
    )
    check(target.quantize("int8"))


@pytest.mark.parametrize(
    "kind", [method.trained for method in METHODS.values() if method.trained is not None]
)
def test_every_drafter_prints_itself_without_its_weights(kind) -> None:
    """Check that the repr does not grow with the params, which are large here."""
    drafter = object.__new__(kind)
    values = {field.name: None for field in dataclasses.fields(kind)}
    for name, value in {
        **values,
        "params": {"a": np.zeros((300, 300), np.float32)},
        "draft": specjax.Chain(4),
    }.items():
        object.__setattr__(drafter, name, value)
    assert "params=<1 array, 90,000 numbers, float32>" in check(drafter)


def test_no_drafter_has_a_repr_of_its_own_not_even_one_that_a_user_wrote() -> None:
    @dataclasses.dataclass(frozen=True)
    class Own(Drafter):
        weights: np.ndarray
        draft: specjax.Chain = specjax.Chain(2)

    assert repr(Own(np.zeros((50, 50)))).endswith(
        "Own(weights=float64[50, 50], draft=Chain(length=2, stop_below=0.0))"
    )
    for kind in subclasses(Drafter):
        assert kind.__repr__ is OneLine.__repr__, kind


def test_drafters_without_weights_are_shown_whole(target) -> None:
    assert (
        repr(specjax.EarlyExit(layers=1, draft=2))
        == "EarlyExit(layers=1, draft=Chain(length=2, stop_below=0.0))"
    )
    assert "model=Target(" in check(specjax.DraftModel(target))


def test_a_generator_names_what_it_is_made_of(target) -> None:
    class Tokenizer:
        def __repr__(self) -> str:
            return "a token\n" * 1000

    shown = check(TextGenerator(target, Tokenizer(), specjax.DraftModel(target)))
    assert "Tokenizer" in shown and shown.count("Target(") == 2


@pytest.mark.parametrize("rows", [1, 300])
def test_a_result_is_shown_by_its_lengths(rows) -> None:
    lengths = np.full(rows, 14)
    shown = check(specjax.Result(np.zeros((rows, 5000), np.int32), lengths, Stats.zeros(rows, 7)))
    assert f"tokens=int32[{rows}, 5000]" in shown
    assert ("lengths=[14]" if rows == 1 else "lengths=int64[300]") in shown


def test_what_a_transformation_leaves_in_place_of_arrays_is_no_error(target) -> None:
    """Check that the repr works in any state of an object: debuggers and errors show it."""
    shapes = jax.eval_shape(lambda: target)
    check(shapes)
    jax.jit(lambda model: [check(model), model.params][1])(target)
    repr(jax.tree.map(lambda _: None, target))
    (
        repr(jax.random.key(0)),
        check(specjax.Result(jax.random.split(jax.random.key(0), 2), lengths=None, stats=None)),
    )
