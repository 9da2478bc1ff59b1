"""Every numeric option of a training run has a range that is checked before any data is read."""

import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import pytest

from specjax.config import ConfigError
from specjax.errors import InputError
from specjax.training.config import OptimizerConfig, TrainConfig
from specjax.training.methods import AnyMethod

METHODS: list[Any] = [method() for method in typing.get_args(AnyMethod)]
MAY_BE_MINUS_ONE = {"mask_token_id", "dpace"}


def configured(method: Any) -> TrainConfig:
    needs_target = {"target": "embedded"} if method.needs_target else {}
    return TrainConfig(method=replace(method, **needs_target))


def numbers(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the paths of all numeric options of a configuration."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from numbers(value, (*path, field.name))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield (*path, field.name)


def with_value(config: Any, path: tuple[str, ...], value: Any) -> Any:
    first, *rest = path
    inner = with_value(getattr(config, first), tuple(rest), value) if rest else value
    return replace(config, **{first: inner})


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_no_number_may_be_negative_or_not_finite(method: Any) -> None:
    config = configured(method)
    config.check()
    paths = [*numbers(config)]
    assert len(paths) > 10
    for path in paths:
        wrong = [-2, -1, float("nan"), float("inf")]
        if path[-1] in MAY_BE_MINUS_ONE:
            wrong.remove(-1)
        for value in wrong:
            with pytest.raises(InputError, match=rf"{path[-1]}.*{value}"):
                with_value(config, path, value).check()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("learning_rate", 0.0),
        ("clip", 0.0),
        ("b1", 1.0),
        ("b2", 2.0),
        ("final_share", 1.5),
    ],
)
def test_the_optimizer_options_have_bounds(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=rf"optimizer\.{name}"):
        TrainConfig(
            method=configured(METHODS[0]).method, optimizer=OptimizerConfig(**{name: value})
        ).check()
