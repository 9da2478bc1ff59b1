"""Options of a generation: values of the wrong type are refused at once and by name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import specjax
from specjax import pipeline
from specjax.decoding.options import GenerationOptions
from specjax.errors import InputError
from specjax.sampling import Sampling, make_key
from tests.test_arguments import NO_NUMBERS

NUMBERS = ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", "min_new_tokens")


@pytest.mark.parametrize("name", NUMBERS)
def test_what_is_no_number_is_refused_by_every_constructor(name) -> None:
    maker = Sampling if name in Sampling.__dataclass_fields__ else GenerationOptions
    for value in NO_NUMBERS:
        for make in (maker, pipeline.settings):
            with pytest.raises(InputError, match=rf"^{name}="):
                make(**{name: value})


WRONG = {
    "key": (3, "k", [1, 2], True, np.zeros(2), jnp.zeros(2), {}),
    "eos_token_ids": (
        "a",
        b"a",
        3,
        True,
        {1},
        {1: 2},
        [1.0],
        ["a"],
        [True],
        [None],
        [[1], 2],
        [[[1]]],
        [["a"]],
    ),
    "rule": ("x", "", 3, True, ["block"], {}, np.array(["block", "block"])),
    "sampling": (3, "x", None, {"temperature": 1.0}, Sampling, (0.7,)),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_of_another_type_is_refused_by_every_constructor(name) -> None:
    for value in WRONG[name]:
        with pytest.raises(InputError, match=rf"^{name}="):
            GenerationOptions(**{name: value})
        if name != "sampling":
            with pytest.raises(InputError, match=rf"^{name}="):
                pipeline.settings(**{name: value})
    if name == "rule":
        with pytest.raises(
            InputError, match=r"^rule='x': must be one of coupled, independent, block, rejection"
        ):
            Sampling().rows(2, "x")


@pytest.mark.parametrize("seed", ["3", 1.0, True, None, [1], -1, 2**63])
def test_what_is_no_seed_is_refused(seed) -> None:
    for make in (make_key, lambda seed: pipeline.settings(seed=seed)):
        with pytest.raises(InputError, match=r"^seed="):
            make(seed)


@pytest.mark.parametrize("call", [specjax.generate, specjax.stream])
def test_calls_refuse_before_anything_is_computed(target, call) -> None:
    for option in (
        {"max_new_tokens": "5"},
        {"min_new_tokens": None},
        {"key": 3},
        {"rule": "x"},
        {"sampling": 0.7},
    ):
        with pytest.raises(InputError, match=rf"^{next(iter(option))}="):
            call(target, None, [[1, 2]], **option)
    for lengths in ("2", [True], [1, [2]], [None], 2):
        with pytest.raises(InputError, match=r"^lengths"):
            call(target, None, [[1, 2]], lengths)


@pytest.mark.parametrize("steps", ["4", None, True, 1.5, 0])
def test_steps_are_a_whole_number(target, steps) -> None:
    with pytest.raises(InputError, match=r"^steps="):
        specjax.stream(target, None, [[1, 2]], steps=steps)


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ((), [[-1], [-1]]),
        ((1,), [[1], [1]]),
        ([np.int64(1), 2], [[1, 2], [1, 2]]),
        (np.array([1, 2]), [[1, 2], [1, 2]]),
        (jnp.array([1, 2]), [[1, 2], [1, 2]]),
        ([jnp.int32(1)], [[1], [1]]),
        (range(2), [[0, 1], [0, 1]]),
        ([[1], (2, 3)], [[1, -1], [2, 3]]),
        ([(), np.array([4])], [[-1], [4]]),
        (jnp.array([[1], [2]]), [[1], [2]]),
    ],
)
def test_end_tokens_are_ids_for_all_rows_or_for_each(target, ids, expected) -> None:
    assert (
        GenerationOptions(eos_token_ids=ids).check(target.config, 2).stop_token_ids.tolist()
        == expected
    )


@pytest.mark.parametrize(
    ("ids", "message"),
    [((11,), "outside"), ([[1], [-1]], "outside"), ([[1]], "1 sequences; give one")],
)
def test_end_tokens_that_do_not_fit_are_refused(target, ids, message) -> None:
    with pytest.raises(InputError, match=message):
        GenerationOptions(eos_token_ids=ids).check(target.config, 2)


def test_keys_of_every_kind_are_taken() -> None:
    for key in (
        None,
        jax.random.key(1),
        jax.random.split(jax.random.key(1)),
        jax.random.PRNGKey(1),
    ):
        GenerationOptions(key=key)


# --- where every token ends the text --------------------------------------------------------------


@pytest.mark.parametrize("ids", [range(11), [(3,), range(11)], [*range(11), 0, 5]])
def test_min_new_tokens_are_refused_where_every_token_ends_the_text(target, ids) -> None:
    """Check the refusal: without end tokens no token would be left to draw."""
    for least in (1, [0, 2]):
        with pytest.raises(
            InputError, match=r"^min_new_tokens=.*: all 11 tokens of the vocabulary end the text"
        ):
            GenerationOptions(max_new_tokens=4, min_new_tokens=least, eos_token_ids=ids).check(
                target.config, 2
            )
    for fine in (
        {"min_new_tokens": 0, "eos_token_ids": ids},
        {"min_new_tokens": [2, 0], "eos_token_ids": [(3,), range(11)]},
        {"min_new_tokens": 2, "eos_token_ids": range(10)},
    ):
        GenerationOptions(max_new_tokens=4, **fine).check(target.config, 2)
