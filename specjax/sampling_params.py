"""The sampling parameters of one request, as one object from the HTTP field to the device."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from specjax.arguments import LARGEST_FLOAT, check_size, is_whole, one_or_each
from specjax.decoding.options import GenerationOptions, check_ids
from specjax.errors import InputError, check_options
from specjax.grammars import Grammar
from specjax.grammars.grammar import check_grammar
from specjax.grammars.thoughts import check_budget
from specjax.sampling import GREEDY, PENALTIES, SAMPLING_NAMES, Sampling, check_seed, make_key
from specjax.token_biases import TokenBiases


@dataclass(frozen=True, repr=False)
class SamplingParams(Sampling):
    """The sampling parameters of one request, checked when the object is created.

    The parameters of the distribution are those of `specjax.Sampling`, with one number each. The
    engine, the client and the server pass this object on unchanged. `specjax.generate` decodes a
    whole batch and takes `specjax.decoding.GenerationOptions` instead, where each parameter may
    have one number per row.

    Attributes:
        temperature: the temperature; 0 is greedy decoding.
        top_k: the number of most likely tokens to sample from; 0 is no limit.
        top_p: the probability mass of the most likely tokens to sample from, in (0, 1].
        min_p: the minimum probability of a token relative to the most likely one, in [0, 1].
        seed: the random seed; see `specjax.sampling.make_key`.
        max_new_tokens: the maximum number of tokens to generate. 0 is for requests that only
            prefill their prompt.
        min_new_tokens: the minimum number of tokens before a stop token or a stop string may end
            the text.
        eos_token_ids: token ids that end the text; None: the target's own ids, ``()``: none.
        grammar: the grammar that the text must satisfy, such as ``specjax.JsonSchema(schema)``.
        presence_penalty: is subtracted from the logits of generated tokens, from -2 to 2.
        frequency_penalty: is subtracted for each time that a token was generated, from -2 to 2.
        repetition_penalty: divides the positive logits of the tokens of prompt and output, and
            multiplies the others; 1 is none.
        logit_bias: numbers that are added to the logits of tokens, by token id. It is stored as
            sorted pairs.
        allowed_token_ids: the only tokens that may be generated; None: any.
        bad_words: words that must not be generated, each a string or its token ids.
        thinking_budget: the largest number of tokens of each thought, after which its end is
            forced; None: no limit.

    Raises:
        InputError: a parameter has a wrong type or is out of range. The message has its name, its
            value and the valid range.

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
    grammar: Grammar | None = None
    logit_bias: Any = ()
    allowed_token_ids: Any = None
    bad_words: Any = ()
    thinking_budget: int | None = None

    def __post_init__(self) -> None:
        """Check every parameter, and store plain Python numbers.

        So equal parameters are equal objects.
        """
        for name in (*SAMPLING_NAMES, "max_new_tokens", "min_new_tokens"):
            object.__setattr__(self, name, _one_number(name, getattr(self, name)))
        check_sizes(self.max_new_tokens, self)
        self.by_row(1)
        _check_count(
            "max_new_tokens", self.max_new_tokens, "at least 1; with echo, 0 reads the prompt alone"
        )
        _check_count("min_new_tokens", self.min_new_tokens, "at least 0")
        check_seed(self.seed)
        object.__setattr__(self, "seed", int(self.seed))
        if self.grammar is not None:
            check_grammar(self.grammar)
        if self.thinking_budget is not None:
            check_budget(self.thinking_budget)
            object.__setattr__(self, "thinking_budget", int(self.thinking_budget))
        if self.eos_token_ids is not None:
            object.__setattr__(self, "eos_token_ids", tuple(check_ids(self.eos_token_ids)))
        biases = self.biases
        for name, value in vars(biases).items():
            object.__setattr__(self, name, value)

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
            params: the object that the call was given. It is complete, so ``defaults`` do not apply
                to it.
            stated: the fields that the call was given by name. They override those of ``params``.
            defaults: the distribution's parameters if the call has no object; None is greedy.
            function: the function that is called. Error messages also name its other arguments.

        Raises:
            InputError: a field does not exist, or its value cannot be used.

        Examples:
            >>> defaults = specjax.Sampling(temperature=0.6, top_k=20)
            >>> specjax.SamplingParams.of(None, {"seed": 3}, defaults=defaults).top_k
            20
            >>> specjax.SamplingParams.of(None, {"temp": 0.5})
            Traceback (most recent call last):
            specjax.errors.InputError: temp=0.5: SamplingParams has no argument of that name; ...
        """
        if params is not None and not isinstance(params, cls):
            raise InputError(
                f"params={params!r}: give specjax.SamplingParams(...), or its fields by name"
            )
        if stated:
            other_names = () if function is None else inspect.signature(function).parameters
            check_options(
                function.__name__ if function else cls.__name__, stated, cls, *other_names
            )
        if params is not None:
            return replace(params, **stated) if stated else params
        of_distribution = {name: stated[name] for name in SAMPLING_NAMES if name in stated}
        other_fields = {
            name: value for name, value in stated.items() if name not in of_distribution
        }
        return cls(**vars((defaults or GREEDY).with_explicit(**of_distribution)), **other_fields)

    @property
    def biases(self) -> TokenBiases:
        """The biases, allowed tokens and banned words together."""
        return TokenBiases.of(self.logit_bias, self.allowed_token_ids, self.bad_words)

    @property
    def has_adjustments(self) -> bool:
        """True if there is a penalty, a bias, or a token or word that is banned."""
        return self.has_penalties or not self.biases.is_neutral

    @property
    def first_adjustment(self) -> str:
        """The name of the first penalty, bias or ban, for errors; "" if there is none."""
        names = (*PENALTIES, "logit_bias", "allowed_token_ids", "bad_words")
        neutral = {field.name: field.default for field in fields(self)}
        return next((name for name in names if getattr(self, name) != neutral[name]), "")

    def options(self) -> GenerationOptions:
        """Return the options of a batch with one row, without its thinking budget.

        The budget is a number here; the tokens of thoughts are the engine's.
        """
        return GenerationOptions(
            max_new_tokens=self.max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            sampling=self.with_explicit(),
            eos_token_ids=self.eos_token_ids,
            grammar=self.grammar,
            biases=self.biases,
        )

    def make_key(self) -> Any:
        """Return the random key of the seed."""
        return make_key(self.seed)


def check_sizes(max_new_tokens: Any, sampling: Sampling) -> None:
    """Refuse numbers of a request or batch that do not fit in the arrays on the device.

    Raises:
        InputError: a number is too large.

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
    """Refuse, with an InputError, a value that is not a number of tokens.

    ``bounds`` states the valid range.
    """
    if not is_whole(value) or value < 0:
        raise InputError(
            f"{name}={value}: must be {'' if is_whole(value) else 'a whole number, '}{bounds}"
        )


def _one_number(name: str, value: Any) -> Any:
    """Convert a value to a Python number. Refuse, with an InputError, anything else."""
    numbers = one_or_each(name, value)
    # An array of one number is accepted for a sampling parameter alone.
    if numbers.size != 1 or (numbers.ndim and name not in SAMPLING_NAMES):
        raise InputError(f"{name}={value}: give one number")
    return numbers.item()
