"""From text to text: a target, a drafter and a tokenizer bound together, as notebooks want them.

`load` makes a `TextGenerator`; calling it with a prompt gives a `Generation`.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, overload

import jax
import numpy as np
from jax.sharding import Mesh

from specjax import decoding, text
from specjax.arguments import LARGEST
from specjax.decoding.options import GenerationOptions
from specjax.drafters import Drafter
from specjax.drafters.registry import load_drafter
from specjax.drafts.names import as_shape
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError, LogitsError, check_options
from specjax.evaluation import metrics
from specjax.models import config_json, hub
from specjax.models import generation_config as generation_configs
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.quantization import schemes
from specjax.models.quantized_cache import CacheType, check_cache_type
from specjax.models.transformer import Target
from specjax.processes import meet
from specjax.progress import say
from specjax.reprs import OneLine
from specjax.sampling import GREEDY, SAMPLING_NAMES, Rule, Sampling, make_key
from specjax.sampling_params import check_sizes
from specjax.sharding import spans_processes
from specjax.templates import Messages, Settings, with_template
from specjax.text import GrowingText

LOOK_EVERY = 4
"""Steps between two looks at what there is, where somebody waits for the text or for a stop string."""


@dataclass(frozen=True)
class Generation:
    """What was generated after one prompt.

    Attributes:
        text: without the prompt, special tokens, and the stop string that ended it.
        tokens: their ids, an end-of-sequence token included; up to the token that completed a stop string.
        statistics: of all that was computed, also of what came after a stop string before that was seen.

    Examples:
        >>> generate = specjax.load("embedded", "embedded:eagle3")
        >>> answer = generate("import os\\nimport ", max_new_tokens=24)
        >>> len(answer.tokens), answer.statistics.emitted
        (24, 24)
        >>> answer.statistics.acceptance_length > 1.5  # plain decoding has 1
        True
    """

    text: str
    tokens: tuple[int, ...]
    statistics: metrics.Acceptance


def load(
    target: str | Path | Target,
    drafter: str | Path | Drafter | None = None,
    *,
    tokenizer: Any = None,
    draft: DraftShape | int | str | None = None,
    dtype: Any = None,
    mesh: Mesh | None = None,
    weights: schemes.Weights = schemes.AS_STORED,
    cache_dtype: CacheType | None = None,
    chat_template: str | Path = "",
    chat_template_kwargs: str | Settings = "",
    generation_config: Literal["auto"] | None = "auto",
) -> "TextGenerator":
    """A target with its tokenizer, and a drafter for it. All configurations are checked before any weights are read.

    Args:
        target: a directory, a hub id, "embedded", or a model that is loaded already (then give ``tokenizer`` too).
        drafter: as on the command line, such as "Qwen/Qwen3-0.6B", "prompt-lookup" or "early-exit:4"; or a drafter that is made
            already; None is plain decoding.
        tokenizer: a tokenizer of transformers, or the directory of one; by default the target's own.
        draft: the shape of the drafts, such as ``Chain(4)``, 4 or "chain:4"; None is the drafter's own.
        dtype: of the params that are loaded here: float32, bfloat16 or float16; None: as for `Target.from_pretrained`.
        mesh: of the params that are loaded here.
        weights: of the models that are loaded here, the quantized ones such as "int8": as for `Target.from_pretrained`.
        cache_dtype: how the target remembers tokens, "float" or "int8"; None: as it does, if it is loaded already, or "float".
        chat_template: a file with a Jinja chat template, in place of the tokenizer's own.
        chat_template_kwargs: what the template of every chat is given beside the messages, such as ``{"enable_thinking":
            False}``, or the JSON text of it.
        generation_config: "auto": the sampling parameters that the target's generation_config.json has in force stand for
            those that a call does not state, see `TextGenerator`; None: they are not read, and greedy is the default. A target
            that is loaded already has no such file.

    Raises:
        InputError: something cannot be used; names it, its value and what to give instead.

    Examples:
        >>> generate = specjax.load("embedded", "embedded:eagle3", draft="chain:4")
        >>> generate.target.config.vocab_size, generate.drafter.draft
        (3072, Chain(length=4, stop_below=0.0))
        >>> specjax.load("embedded", "early-exit:four")
        Traceback (most recent call last):
        specjax.errors.InputError: drafter='early-exit:four': write early-exit:LAYERS, such as early-exit:4
    """
    _check_generation_config(generation_config)
    shape = None if draft is None else as_shape(draft)
    dtype = None if dtype is None else _float_type(dtype)
    schemes.check_weights(weights)
    if cache_dtype is not None:
        check_cache_type(cache_dtype)
    default_sampling = files = None
    if isinstance(target, Target):
        if tokenizer is None:
            raise InputError("tokenizer=None: a target that is loaded already does not bring one; give its directory")
        config = target.config
    else:
        files = hub.open_checkpoint(target, weights=False)
        config_json.check_whole(files)
        config = config_json.read_config(files)
        default_sampling = _read_default_sampling(files, generation_config)
        tokenizer = files.directory if tokenizer is None else tokenizer
    if isinstance(tokenizer, str | Path):
        tokenizer = text.load_tokenizer(hub.locate(tokenizer, weights=False))
    tokenizer = with_template(tokenizer, str(chat_template), chat_template_kwargs)
    if isinstance(drafter, str | Path):
        mesh = target.mesh if isinstance(target, Target) and mesh is None else mesh
        name, drafter = str(drafter), None
        if name != "none":
            drafter = load_drafter(name, shape, config, dtype, mesh, tokenizer, weights)
    elif isinstance(drafter, Drafter):
        drafter = drafter if shape is None else replace(drafter, draft=shape)  # pyright: ignore[reportArgumentType]
    elif drafter is not None:
        raise InputError(f"drafter={drafter!r}: give a name such as 'prompt-lookup', a drafter, or None for plain decoding")
    if not isinstance(target, Target):
        target = Target.from_pretrained(files or target, dtype=dtype, mesh=mesh, weights=weights)
    if cache_dtype is not None:
        target = replace(target, cache_dtype=cache_dtype)
    if spans_processes(target.mesh):
        meet("loaded")  # one may have read from a slower disk, or from the network
    return TextGenerator(target, tokenizer, drafter, default_sampling)


def _check_generation_config(generation_config: Any) -> None:
    """Refuse what `load` does not take."""
    if generation_config is not None and generation_config != "auto":
        raise InputError(f"generation_config={generation_config!r}: must be 'auto', or None for greedy")


def _read_default_sampling(files: CheckpointFiles, generation_config: str | None) -> Sampling | None:
    """Return a checkpoint's own sampling parameters, if they are wanted, and say which fields of its file are not applied."""
    if generation_config is None:
        return None
    source = str(files.directory / generation_configs.FILE)
    defaults = generation_configs.parse_defaults(files.json(generation_configs.FILE, {}), source)
    if defaults.not_applied:
        line = f"{source}: not applied to its texts: {defaults.describe_not_applied()}"
        say(line, unasked=True)
    return defaults.sampling


@dataclass(frozen=True)
class TextGenerator(OneLine):
    """Generates text from text. Made by `load`.

    Attributes:
        target: the model that the text is from.
        tokenizer: its tokenizer.
        drafter: None is plain decoding.
        default_sampling: the settings that stand where a call or `stream` states none, one by one: with a default of
            temperature 0.6 and top_k 20, a call with ``temperature=0.7`` has top_k 20 too. `load` takes them from the target's
            generation_config.json. None is greedy.

    Examples:
        >>> generate = specjax.load("embedded", "embedded:eagle3")
        >>> answer = generate("import os\\nimport ", max_new_tokens=24)
        >>> pieces = list(generate.stream("import os\\nimport ", max_new_tokens=24))
        >>> "".join(pieces) == answer.text
        True
    """

    target: Target
    tokenizer: Any
    drafter: Drafter | None = None
    default_sampling: Sampling | None = None

    def shown_fields(self) -> dict[str, Any]:
        """Return what the repr shows: of the tokenizer, whose own repr lists all special tokens, the class."""
        shown = {"target": self.target, "tokenizer": type(self.tokenizer), "drafter": self.drafter}
        return {**shown, "default_sampling": self.default_sampling}

    @overload
    def __call__(self, prompt: str | Messages, **options: Any) -> Generation: ...
    @overload
    def __call__(self, prompt: Sequence[str] | Sequence[Messages], **options: Any) -> list[Generation]: ...
    def __call__(self, prompt: Any, **options: Any) -> Any:
        """What the target says after a prompt, a chat (a list of messages), or each of a list of either: one batch.

        Args:
            prompt: text, or messages such as ``[{"role": "user", "content": "…"}]``, which the model's chat template is put
                around.
            options: see `settings`, and ``stop``, a string or a sequence of strings: the text ends before the first of them.
                Where temperature, top_k, top_p or min_p is absent or None, ``default_sampling`` has it.

        Raises:
            InputError: an argument cannot be used; names it, its value and what to give instead.
            LogitsError: the target's logits were NaN or +inf in some rows; its ``result`` has the tokens of all rows.
        """
        prompts, is_list = _prompts(prompt)
        stop, made = _split_options(options, self.default_sampling)
        tokens, steps = [self.encode(each) for each in prompts], LOOK_EVERY if stop else None
        run = self.start(tokens, made, stop=stop, steps=steps, is_chat=[not isinstance(each, str) for each in prompts])
        for _ in run:
            pass
        return run.generations if is_list else run.generations[0]

    def stream(self, prompt: str | Messages, **options: Any) -> Iterator[str]:
        """The text of one prompt or chat, piece by piece as it is accepted. Arguments as for a call."""
        prompts, is_list = _prompts(prompt)
        if is_list:
            raise InputError(f"prompt={prompt!r}: stream takes one prompt; call the generator for a list")
        stop, made = _split_options(options, self.default_sampling)
        is_chat = not isinstance(prompts[0], str)
        run = self.start([self.encode(prompts[0])], made, stop=stop, steps=LOOK_EVERY, is_chat=is_chat)
        return (piece for (piece,) in run if piece)

    def encode(self, prompt: str | Messages, chat: bool = False, chat_template_kwargs: Settings | None = None) -> list[int]:
        """Token ids of a prompt or a chat; with ``chat``, a prompt is the user's turn of one.

        ``chat_template_kwargs`` are given to the template of a chat, and go over those that `load` was given.
        """
        if isinstance(prompt, str):
            return text.encode(self.tokenizer, prompt, chat, chat_template_kwargs)
        return text.encode_chat(self.tokenizer, prompt, chat_template_kwargs)

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        options: GenerationOptions = GenerationOptions(),
        *,
        stop: str | Sequence[str] = (),
        steps: int | None = None,
        is_chat: bool | Sequence[bool] = False,
    ) -> "Run":
        """Check every argument, and read the prompts: a batch to be iterated over.

        Args:
            prompts: token ids of each row.
            options: of the generation, see `settings`. They are complete: ``default_sampling`` is not read.
            stop: a string, or several, before the first of which a row's text ends.
            steps: between two looks at what there is; None runs to the end at once.
            is_chat: whether texts are answers in chats, of all rows or of each: of a model that writes in channels, such as
                gpt-oss, the final channel alone.
        """
        stop = text.check_stop(stop)
        results = decoding.stream(self.target, self.drafter, *text.pad(prompts), **vars(options), steps=steps or LARGEST)
        chats = [is_chat] * len(prompts) if isinstance(is_chat, bool) else is_chat
        rows = zip(prompts, chats, strict=True)
        return Run(results, [GrowingText(self.tokenizer, prompt, stop, is_chat=each) for prompt, each in rows])


class Run:
    """A batch that is being generated. Iterating over it goes on with it, and yields for each row the text that came in.

    Iterating ends with a `specjax.errors.LogitsError` where no token can be drawn from the target's logits in a row. By then
    ``generations`` has what each row has come to.

    Attributes:
        generations: when it is over, each row's.
        statistics: when it is over, of all rows together.

    Examples:
        >>> generate = specjax.load("embedded", "embedded:eagle3")
        >>> options = specjax.pipeline.settings(max_new_tokens=24)
        >>> run = generate.start([generate.encode("import os\\nimport ")], options, steps=4)
        >>> text = "".join(piece for (piece,) in run)
        >>> run.generations[0].text == text
        True
    """

    def __init__(self, results: Iterator[decoding.Result], rows: Sequence[GrowingText]) -> None:
        """Made by `TextGenerator.start`."""
        self._results, self._rows = results, rows
        self.generations: list[Generation] = []
        self.statistics: metrics.Acceptance | None = None

    def __iter__(self) -> Iterator[list[str]]:
        """The pieces, until every row is done or has met a stop string."""
        result, failure = None, None
        try:
            for result in self._results:
                lengths = result.lengths.tolist()
                yield [row.push(result.tokens[i, row.length : lengths[i]].tolist()) for i, row in enumerate(self._rows)]
                if all(row.stopped for row in self._rows):
                    break
        except LogitsError as error:  # after the last result
            is_over = all(self._rows[row].stopped for row in error.rows)  # before what went wrong
            failure = None if is_over else error
        yield [row.finish() for row in self._rows]
        assert result is not None
        self.statistics = metrics.summarise(result.stats)
        self.generations = [
            Generation("".join(row.pieces), tuple(row.tokens), metrics.summarise(result.stats, i))
            for i, row in enumerate(self._rows)
        ]
        if failure is not None:
            raise failure


def settings(
    *,
    max_new_tokens: Any = 128,
    min_new_tokens: Any = 0,
    seed: int = 0,
    key: jax.Array | None = None,
    eos_token_ids: Sequence[int] | None = None,
    rule: Rule | None = None,
    **sampling: Any,
) -> GenerationOptions:
    """The options of a generation from plain numbers. The defaults are greedy: a model's own are for calls of `TextGenerator`.

    Args:
        max_new_tokens: most tokens to generate; one number, or one a row.
        min_new_tokens: as many tokens are generated before an end-of-sequence token may come; one number, or one a row.
        seed: of the random draws, see `specjax.sampling.make_key`.
        key: a random key, or one a row, instead of a seed.
        eos_token_ids: ids that end a row; None: the target's own, ``()``: none.
        rule: how tokens are drawn and drafts verified, see `specjax.sampling.Rule`; every one is exact. None is the one
            that suits the shape of the drafts, `specjax.decoding.options.default_rule`; "block" and "rejection" take chains.
        sampling: the fields of `specjax.Sampling` by name, each one number, or one a row: ``temperature`` (0, the default, is
            greedy), ``top_k`` (0 is no limit), ``top_p`` in (0, 1], ``min_p`` in [0, 1].

    Raises:
        InputError: an argument is of the wrong type or out of its range; names it, its value and what it must be.

    Examples:
        >>> options = specjax.pipeline.settings(temperature=0.7, top_p=0.9, seed=3)
        >>> options.sampling
        Sampling(temperature=0.7, top_k=0, top_p=0.9, min_p=0.0)
    """
    check_options("settings", sampling, settings, *SAMPLING_NAMES)
    parameters = replace(GREEDY, **sampling)
    check_sizes(max_new_tokens, parameters)
    return GenerationOptions(
        max_new_tokens=max_new_tokens,
        min_new_tokens=min_new_tokens,
        sampling=parameters,
        key=make_key(seed) if key is None else key,
        eos_token_ids=eos_token_ids,
        rule=rule,
    )


def _split_options(options: dict[str, Any], default_sampling: Sampling | None) -> tuple[Sequence[str], GenerationOptions]:
    """``stop``, and the `settings` of the others and the defaults; warns of those that are not read."""
    check_options("the generator", options, settings, "stop", *SAMPLING_NAMES)
    options = dict(options)
    stop = text.check_stop(options.pop("stop", ()))
    stated = {name: options.pop(name, None) for name in SAMPLING_NAMES}
    made = settings(**options, **vars((default_sampling or GREEDY).with_explicit(**stated)))
    if unread := unread_settings(made.sampling):
        warnings.warn(f"{', '.join(unread)}: not read at temperature 0, which is greedy", stacklevel=3)
    return stop, made


def unread_settings(sampling: Sampling) -> list[str]:
    """Names of the settings that were given but are not read, since every row is greedy."""
    if np.any(np.asarray(sampling.temperature) != 0):
        return []
    others = {name: getattr(sampling, name) for name in SAMPLING_NAMES if name != "temperature"}
    return [name for name, value in others.items() if np.any(np.asarray(value) != getattr(Sampling, name))]


_FLOAT_TYPES = ("float32", "bfloat16", "float16")


def _float_type(dtype: Any) -> Any:
    """A data type for params, given by name or as one."""
    try:
        name = dtype if isinstance(dtype, str) else jax.numpy.dtype(dtype).name
    except TypeError:
        name = None
    if name not in _FLOAT_TYPES:
        raise InputError(f"dtype={dtype!r}: must be {', '.join(_FLOAT_TYPES[:-1])} or {_FLOAT_TYPES[-1]}")
    return jax.numpy.dtype(name)


def _prompts(prompt: Any) -> tuple[list[Any], bool]:
    """The prompts and chats of a call, and whether they came in a list."""

    def is_chat(value: Any) -> bool:
        return isinstance(value, Sequence) and bool(value) and all(isinstance(each, Mapping) for each in value)

    if isinstance(prompt, str) or is_chat(prompt):
        return [prompt], False
    if isinstance(prompt, Sequence) and prompt and all(isinstance(each, str) or is_chat(each) for each in prompt):
        return list(prompt), True
    raise InputError(f"prompt={prompt!r}: give text, a chat such as [{{'role': 'user', 'content': '…'}}], or a list of either")
