"""What one request asks of its text, as one object from the HTTP field to the row on the device."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specjax.arguments import LARGEST_FLOAT, check_size, is_whole, one_or_each
from specjax.decoding.options import GenerationOptions, check_ids
from specjax.errors import InputError, check_options
from specjax.sampling import GREEDY, SAMPLING_NAMES, Sampling, check_seed, make_key


@dataclass(frozen=True)
class SamplingParams(Sampling):
    """The sampling parameters of one request, checked when they are made.

    The distribution's own parameters come from `specjax.Sampling`, here with one number each. The engine, the client and the
    server hand this object on unchanged, up to the row on the device. `specjax.generate` decodes a batch at once, and takes
    `specjax.decoding.GenerationOptions` instead, in which each parameter may be one number a row.

    Attributes:
        temperature: 0 is greedy: the likeliest token every time.
        top_k: 0 is no limit.
        top_p: in (0, 1].
        min_p: in [0, 1].
        seed: of the random draws, see `specjax.sampling.make_key`.
        max_new_tokens: most tokens to generate. 0 is for requests that only read their prompt.
        min_new_tokens: as many tokens are generated before an stop token or a stop string may end the text.
        eos_token_ids: ids that end the text; None: the target's own, ``()``: none.

    Raises:
        InputError: a parameter is of the wrong type or out of its range; names it, its value and what it must be.

    Examples:
        >>> params = specjax.SamplingParams(temperature=0.7, top_p=0.9, max_new_tokens=8)
        >>> params.seed, params.top_k
        (0, 0)
        >>> specjax.SamplingParams(top_p=1.5)
        Traceback (most recent call last):
        specjax.errors.InputError: top_p=1.5: must be in (0, 1]; 1 is no limit
    """

    temperature: Any = 0.0
    seed: int = 0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    eos_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        """Check every parameter, and keep plain numbers of Python: so that equal parameters are equal objects."""
        for name in (*SAMPLING_NAMES, "max_new_tokens", "min_new_tokens"):
            object.__setattr__(self, name, _one_number(name, getattr(self, name)))
        check_sizes(self.max_new_tokens, self)
        self.by_row(1)
        _check_count("max_new_tokens", self.max_new_tokens, "at least 1; with echo, 0 reads the prompt alone")
        _check_count("min_new_tokens", self.min_new_tokens, "at least 0")
        check_seed(self.seed)
        object.__setattr__(self, "seed", int(self.seed))
        if self.eos_token_ids is not None:
            object.__setattr__(self, "eos_token_ids", tuple(check_ids(self.eos_token_ids)))

    @classmethod
    def of(
        cls,
        params: "SamplingParams | None",
        stated: Mapping[str, Any],
        *,
        defaults: Sampling | None = None,
        function: Callable[..., Any] | None = None,
    ) -> "SamplingParams":
        """Return the parameters of a call that takes an object, or its fields by name.

        Args:
            params: the call's object. It is complete: no defaults stand for anything in it.
            stated: the fields that the call gives by name. They win over those of ``params``.
            defaults: the distribution's parameters where the call has no object and states none; None is greedy.
            function: the one that is called, whose other arguments errors name, too.

        Raises:
            InputError: there is no such field, or its value cannot be used.

        Examples:
            >>> defaults = specjax.Sampling(temperature=0.6, top_k=20)
            >>> specjax.SamplingParams.of(None, {"seed": 3}, defaults=defaults).top_k
            20
            >>> specjax.SamplingParams.of(None, {"temp": 0.5})
            Traceback (most recent call last):
            specjax.errors.InputError: temp=0.5: SamplingParams has no argument of that name; did you mean temperature?
        """
        if params is not None and not isinstance(params, cls):
            raise InputError(f"params={params!r}: give specjax.SamplingParams(...), or its fields by name")
        if stated:
            others = () if function is None else inspect.signature(function).parameters
            check_options(function.__name__ if function else cls.__name__, stated, cls, *others)
        if params is not None:
            return replace(params, **stated) if stated else params
        of_distribution = {name: stated[name] for name in SAMPLING_NAMES if name in stated}
        others = {name: value for name, value in stated.items() if name not in of_distribution}
        return cls(**vars((defaults or GREEDY).with_explicit(**of_distribution)), **others)

    def options(self) -> GenerationOptions:
        """Return the options of a batch of one row."""
        return GenerationOptions(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            sampling=self.with_explicit(),
            eos_token_ids=self.eos_token_ids,
        )

    def make_key(self) -> Any:
        """Return the random key of the seed."""
        return make_key(self.seed)


def check_sizes(max_new_tokens: Any, sampling: Sampling) -> None:
    """Refuse, with an InputError, numbers of a request or a batch that the arrays on the device cannot hold.

    Examples:
        >>> from specjax.sampling_params import check_sizes
        >>> check_sizes(8, specjax.Sampling(top_k=2**40))
        Traceback (most recent call last):
        specjax.errors.InputError: top_k=1099511627776: must be at most 2147483647
    """
    check_size("max_new_tokens", max_new_tokens)
    check_size("top_k", sampling.top_k)
    check_size("temperature", sampling.temperature, LARGEST_FLOAT)


def _check_count(name: str, value: Any, bounds: str) -> None:
    """Refuse, with an InputError that names the ``bounds``, what is no number of tokens."""
    if not is_whole(value) or value < 0:
        raise InputError(f"{name}={value}: must be {'' if is_whole(value) else 'a whole number, '}{bounds}")


def _one_number(name: str, value: Any) -> Any:
    """Return a number as Python has it. Refuses, with an InputError, what is none, and several."""
    numbers = one_or_each(name, value)
    if numbers.size != 1 or (numbers.ndim and name not in SAMPLING_NAMES):  # of the distribution's a batch of one is one
        raise InputError(f"{name}={value}: give one number")
    return numbers.item()
