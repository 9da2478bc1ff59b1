"""The sampling parameters of one request: what they refuse, and how they reach the device."""

from dataclasses import fields, replace

import numpy as np
import pytest

import specjax
from specjax import Sampling, SamplingParams
from specjax.errors import InputError
from specjax.sampling import GREEDY, SAMPLING_NAMES, RowSampling


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature=-1: must be at least 0"),
        ({"temperature": "hot"}, "temperature='hot': must be a number"),
        ({"temperature": 1e39}, r"temperature=1e\+39: must be at most"),
        ({"temperature": (0.0, 1.0)}, r"temperature=\(0.0, 1.0\): give one number"),
        ({"seed": 2**63}, "seed=9223372036854775808: must be"),
        ({"top_k": 1.5}, "top_k=1.5: must be a whole number"),
        ({"top_k": 2**40}, "top_k=1099511627776: must be at most 2147483647"),
        ({"top_p": 0}, r"top_p=0: must be in \(0, 1\]"),
        ({"min_p": np.nan}, "min_p=nan: must be in"),
        ({"seed": -1}, "seed=-1: must be a whole number"),
        ({"seed": True}, "seed=True: must be a whole number"),
        ({"max_new_tokens": "5"}, "max_new_tokens='5': must be a number"),
        ({"max_new_tokens": 2**40}, "max_new_tokens=1099511627776: must be at most"),
        (
            {"max_new_tokens": -1},
            "max_new_tokens=-1: must be at least 1; with echo, 0 reads the prompt alone",
        ),
        ({"max_new_tokens": 1.5}, "max_new_tokens=1.5: must be a whole number"),
        ({"min_new_tokens": -1}, "min_new_tokens=-1: must be at least 0"),
        ({"eos_token_ids": "a"}, "eos_token_ids='a': give a sequence of ids"),
        ({"eos_token_ids": ((1,), (2,))}, "eos_token_ids="),
    ],
)
def test_what_is_out_of_range_is_refused_by_name_when_it_is_made(values, message) -> None:
    with pytest.raises(InputError, match=message):
        SamplingParams(**values)


def test_numbers_are_pythons_own_so_that_equal_parameters_are_equal() -> None:
    params = SamplingParams(
        temperature=np.float32(0.5),
        top_k=np.int64(3),
        max_new_tokens=np.int32(7),
        eos_token_ids=[np.int32(2)],
    )
    assert params == SamplingParams(temperature=0.5, top_k=3, max_new_tokens=7, eos_token_ids=(2,))
    assert hash(params) == hash(replace(params))
    assert SamplingParams(temperature=[0.5], eos_token_ids=[[2]]) == SamplingParams(
        temperature=0.5, eos_token_ids=(2,)
    )
    assert type(params.temperature) is float and type(params.top_k) is int


def test_every_parameter_of_the_distribution_reaches_the_device() -> None:
    names = [field.name for field in fields(Sampling)]
    assert list(SAMPLING_NAMES) == names
    assert set(names) <= {field.name for field in fields(SamplingParams)}
    assert set(names) <= {field.name for field in fields(RowSampling)}
    values = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1}
    values |= {"presence_penalty": 0.3, "frequency_penalty": -0.4, "repetition_penalty": 1.2}
    assert values.keys() == set(names)  # a new parameter is to be tried here, too
    of_row, rows = SamplingParams(**values).of_row(), SamplingParams(**values).rows_of_any_kind(1)
    for name, value in values.items():
        assert of_row[name] == pytest.approx(value) == float(getattr(rows, name)[0])


def test_a_calls_fields_go_over_its_object_and_defaults_stand_only_without_one() -> None:
    defaults, params = Sampling(temperature=0.6, top_k=20), SamplingParams(temperature=0.9, seed=3)
    assert SamplingParams.of(None, {}, defaults=defaults) == SamplingParams(
        temperature=0.6, top_k=20
    )
    assert SamplingParams.of(
        None, {"temperature": 0.7, "top_p": None}, defaults=defaults
    ) == SamplingParams(temperature=0.7, top_k=20)
    assert SamplingParams.of(None, {"temperature": 0}, defaults=defaults) == SamplingParams()
    assert SamplingParams.of(params, {}, defaults=defaults) is params
    assert SamplingParams.of(params, {"seed": 4}) == replace(params, seed=4)
    assert SamplingParams.of(None, {}) == SamplingParams(**vars(GREEDY))


def test_what_is_no_object_and_no_field_is_refused() -> None:
    with pytest.raises(InputError, match=r"params=.*: give specjax.SamplingParams"):
        SamplingParams.of(Sampling(), {})  # pyright: ignore[reportArgumentType]
    with pytest.raises(
        InputError,
        match=r"max_tokens=8: submit has no argument of that name; did you mean max_new_tokens\?",
    ):
        SamplingParams.of(None, {"max_tokens": 8}, function=specjax.serving.Engine.submit)
    with pytest.raises(
        InputError, match=r"stops='x': submit has no argument of that name; did you mean stop\?"
    ):
        SamplingParams.of(None, {"stops": "x"}, function=specjax.serving.Engine.submit)


def test_a_batch_takes_the_distribution_alone() -> None:
    """Refuse parameters of a request that a batch would leave out without a word."""
    with pytest.raises(InputError, match=r"sampling=.*give a specjax.Sampling"):
        specjax.decoding.GenerationOptions(sampling=SamplingParams(max_new_tokens=8))
    assert SamplingParams(temperature=0.5, seed=3).options().sampling == Sampling(temperature=0.5)
    assert type(SamplingParams(temperature=0.5).with_explicit(top_k=3)) is Sampling


@pytest.mark.full
def test_an_engine_gives_the_same_text_for_the_object_and_for_its_fields() -> None:
    generate = specjax.load("embedded")
    with specjax.serving.Engine(generate, rows=2, widths=(2,), capacity=64, warm=False) as engine:
        values = {"temperature": 0.8, "top_k": 40, "seed": 11, "max_new_tokens": 12}
        by_object = engine.submit("import os\n", SamplingParams(**values))
        by_fields = engine.submit("import os\n", **values)
        assert by_object.result().tokens == by_fields.result().tokens
