"""Text generation from text: a target, a drafter and a tokenizer together.

`load` makes a `TextGenerator`. A call of it with a prompt returns a `Generation`.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, overload

import jax
import numpy as np
from jax.sharding import Mesh

from specjax import decoding, text
from specjax.arguments import LARGEST
from specjax.decoding.options import GenerationOptions, Grammars, Speculations, ThinkingBudgets
from specjax.drafters import Drafter
from specjax.drafters.corpus import files_for
from specjax.drafters.registry import load_drafter
from specjax.drafts.names import as_shape
from specjax.drafts.shapes import DraftShape
from specjax.drafts.speculation import DraftLimit, Stated
from specjax.errors import InputError, LogitsError, check_options
from specjax.evaluation import metrics
from specjax.grammars import CompiledGrammar, GrammarCompiler, ThinkingBudget
from specjax.grammars.thoughts import check_texts
from specjax.models import config_json, hub
from specjax.models import generation_config as generation_configs
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.quantization import schemes
from specjax.models.quantized_cache import CacheType, check_cache_type
from specjax.models.transformer import Target
from specjax.processes import meet
from specjax.progress import say
from specjax.reprs import OneLine
from specjax.sampling import GREEDY, PENALTIES, SAMPLING_NAMES, Rule, Sampling, make_key
from specjax.sampling_params import check_sizes
from specjax.sharding import spans_processes
from specjax.templates import Messages, Settings, with_template
from specjax.text import GrowingText
from specjax.thoughts import encoded as encoded_budget
from specjax.token_biases import TokenBiases

LOOK_EVERY = 4
"""The number of steps between two reads of the results, where text is streamed or stop strings are
set.
"""


@dataclass(frozen=True)
class Generation:
    """The generated text of one prompt.

    Attributes:
        text: the text, without the prompt, special tokens, and the stop string that ended it.
        tokens: the token ids, with an end-of-sequence token, up to the token that completed a stop
            string.
        statistics: statistics of all computed tokens, including tokens computed after a stop
            string.
        grammar_completed: whether the text satisfies its grammar as a whole. False if
            ``max_new_tokens`` or a stop string has ended it before. None without a grammar.

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
    grammar_completed: bool | None = None


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
    speculation: Stated = None,
    corpus: str | Path | Sequence[str | Path] = (),
) -> "TextGenerator":
    """Load a target with its tokenizer, and a drafter for it.

    All configurations are checked before any weights are read.

    Args:
        target: a directory, a hub id, a folder in a bucket (``s3://``, ``gs://``), "embedded", or a
            loaded model. A loaded model needs ``tokenizer`` too.
        drafter: a drafter's name as on the command line, such as "Qwen/Qwen3-0.6B", "prompt-lookup"
            or "early-exit:4"; or a drafter object; None is plain decoding.
        tokenizer: a tokenizer of transformers, or its directory; by default the target's own.
        draft: the shape of the drafts, such as ``Chain(4)``, 4 or "chain:4"; None is the drafter's
            default.
        dtype: the data type of params that are loaded here: float32, bfloat16 or float16; None: see
            `Target.from_pretrained`.
        mesh: the mesh for params that are loaded here.
        weights: the quantization of models that are loaded here, such as "int8"; see
            `Target.from_pretrained`.
        cache_dtype: the type of the target's KV cache, "float" or "int8". None keeps that of a
            loaded target; otherwise it is "float".
        chat_template: a file with a Jinja chat template that replaces the tokenizer's own.
        chat_template_kwargs: variables for the template of every chat, such as
            ``{"enable_thinking": False}``, or their JSON text.
        generation_config: "auto" reads default sampling parameters from the target's
            generation_config.json; they apply where a call gives none, see `TextGenerator`. None
            reads nothing, and the default is greedy. A loaded target has no such file.
        speculation: how far calls speculate that do not state it, see `settings`.
        corpus: text files that the drafter "suffix" drafts from, or one of them, of at most 16 MiB
            together.

    Raises:
        InputError: an argument cannot be used. The message has its name, its value and the remedy.

    Examples:
        >>> generate = specjax.load("embedded", "embedded:eagle3", draft="chain:4")
        >>> generate.target.config.vocab_size, generate.drafter.draft
        (3072, Chain(length=4, stop_below=0.0))
        >>> specjax.load("embedded", "early-exit:four")
        Traceback (most recent call last):
        specjax.errors.InputError: drafter='early-exit:four': write early-exit:LAYERS, such as ...
    """
    _check_generation_config(generation_config)
    corpus = files_for(corpus, drafter)
    shape = None if draft is None else as_shape(draft)
    dtype = None if dtype is None else _float_type(dtype)
    schemes.check_weights(weights)
    if cache_dtype is not None:
        check_cache_type(cache_dtype)
    default_sampling = files = None
    if isinstance(target, Target):
        if tokenizer is None:
            raise InputError(
                "tokenizer=None: a loaded target has no tokenizer; give the directory of its"
                " tokenizer"
            )
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
            arguments = dtype, mesh, tokenizer, weights, corpus
            drafter = load_drafter(name, shape, config, *arguments)
    elif isinstance(drafter, Drafter):
        drafter = drafter if shape is None else replace(drafter, draft=shape)  # pyright: ignore[reportArgumentType]
    elif drafter is not None:
        raise InputError(
            f"drafter={drafter!r}: give a name such as 'prompt-lookup', a drafter, or None for"
            " plain decoding"
        )
    if not isinstance(target, Target):
        target = Target.from_pretrained(files or target, dtype=dtype, mesh=mesh, weights=weights)
    shapes = [] if drafter is None else [drafter.draft_shape]
    DraftLimit.of(speculation, shapes)  # raises what a call would raise
    if cache_dtype is not None:
        target = replace(target, cache_dtype=cache_dtype)
    if spans_processes(target.mesh):
        meet("loaded")  # one process may have read from a slower disk or from the network
    return TextGenerator(target, tokenizer, drafter, default_sampling, speculation)


def _check_generation_config(value: Any) -> None:
    """Refuse an invalid argument ``generation_config`` of `load`."""
    if value is not None and value != "auto":
        raise InputError(f"generation_config={value!r}: must be 'auto', or None for greedy")


def _read_default_sampling(
    files: CheckpointFiles, generation_config: str | None
) -> Sampling | None:
    """Return a checkpoint's default sampling parameters; report the fields that are not applied.

    Returns None if the defaults are not read.
    """
    if generation_config is None:
        return None
    source = str(files.directory / generation_configs.FILE)
    defaults = generation_configs.parse_defaults(files.json(generation_configs.FILE, {}), source)
    if defaults.not_applied:
        line = f"{source}: these fields are not applied: {defaults.describe_not_applied()}"
        say(line, unasked=True)
    return defaults.sampling


@dataclass(frozen=True)
class TextGenerator(OneLine):
    """A generator of text from text. `load` makes it.

    Attributes:
        target: the target.
        tokenizer: its tokenizer.
        drafter: the drafter; None is plain decoding.
        default_sampling: sampling parameters that apply, one by one, where a call or `stream` gives
            none: with defaults of temperature 0.6 and top_k 20, a call with ``temperature=0.7``
            also uses top_k 20. `load` reads them from the target's generation_config.json. None is
            greedy.
        speculation: how far calls speculate that do not state it; None is without a limit.

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
    speculation: Stated = None

    def shown_fields(self) -> dict[str, Any]:
        """Return the fields that the repr shows.

        The tokenizer is shown by its class, because its own repr lists all special tokens.
        """
        shown = {"target": self.target, "tokenizer": type(self.tokenizer), "drafter": self.drafter}
        return {**shown, "default_sampling": self.default_sampling}

    @cached_property
    def grammar_compiler(self) -> GrammarCompiler:
        """The compiler of grammars for this tokenizer. It is built when a grammar is first used."""
        return GrammarCompiler(self.tokenizer, self.target.config.vocab_size)

    @overload
    def __call__(self, prompt: str | Messages, **options: Any) -> Generation: ...
    @overload
    def __call__(
        self, prompt: Sequence[str] | Sequence[Messages], **options: Any
    ) -> list[Generation]: ...
    def __call__(self, prompt: Any, **options: Any) -> Any:
        """Generate the text of a prompt, of a chat (a list of messages), or of a list of either.

        A list is decoded as one batch.

        Args:
            prompt: a text, or messages such as ``[{"role": "user", "content": "…"}]``, to which the
                model's chat template is applied.
            options: the arguments of `settings`, and two of text. ``stop`` is a string or a
                sequence of strings: the text ends before the first of them.
                ``chat_template_kwargs`` are variables for the template of these chats, as for
                `encode`. Where temperature, top_k, top_p or min_p is missing or None,
                ``default_sampling`` applies.

        Raises:
            InputError: an argument cannot be used. The message has its name, its value and the
                remedy.
            LogitsError: the target's logits were NaN or +inf in some rows. The error's ``result``
                has the tokens of all rows.
        """
        prompts, is_list = _prompts(prompt)
        stop, chat_template_kwargs, generation_options = _split_options(
            options, self.default_sampling
        )
        chats = [not isinstance(messages, str) for messages in prompts]
        tokens = [
            self.encode(messages, chat_template_kwargs=chat_template_kwargs) for messages in prompts
        ]
        run = self.start(
            tokens, generation_options, stop=stop, steps=LOOK_EVERY if stop else None, is_chat=chats
        )
        for _ in run:
            pass
        return run.generations if is_list else run.generations[0]

    def stream(self, prompt: str | Messages, **options: Any) -> Iterator[str]:
        """Yield the text of one prompt or chat in pieces, as tokens are accepted.

        The arguments are those of a call.
        """
        prompts, is_list = _prompts(prompt)
        if is_list:
            raise InputError(
                f"prompt={prompt!r}: stream takes one prompt; call the generator for a list"
            )
        stop, chat_template_kwargs, generation_options = _split_options(
            options, self.default_sampling
        )
        is_chat = not isinstance(prompts[0], str)
        run = self.start(
            [self.encode(prompts[0], chat_template_kwargs=chat_template_kwargs)],
            generation_options,
            stop=stop,
            steps=LOOK_EVERY,
            is_chat=is_chat,
        )
        return (piece for (piece,) in run if piece)

    def encode(
        self,
        prompt: str | Messages,
        chat: bool = False,
        chat_template_kwargs: Settings | None = None,
    ) -> list[int]:
        """Return the token ids of a prompt or a chat.

        Args:
            prompt: a text, or messages.
            chat: a text is the user's turn of a chat.
            chat_template_kwargs: variables for the chat template. They override those given to
                `load`.
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
        """Check all arguments, prefill the prompts, and return the batch, ready for iteration.

        Args:
            prompts: the token ids of each row.
            options: the options of the generation, see `settings`. They are complete:
                ``default_sampling`` is not applied.
            stop: a string or several strings. A row's text ends before the first of them.
            steps: the number of steps between two reads of the results; None runs to the end at
                once.
            is_chat: for all rows or per row, whether the text is an answer in a chat. If the model
                writes in channels, as gpt-oss does, the text is then that of the final channel.
        """
        stop = text.check_stop(stop)
        options = replace(
            options,
            grammar=self.compile_grammar(options.grammar),
            biases=_encoded(options.biases, self.tokenizer),
            thinking_budget=encoded_budget(options.thinking_budget, self.tokenizer),
            speculation=self.speculation if options.speculation is None else options.speculation,
        )
        results = decoding.stream(
            self.target, self.drafter, *text.pad(prompts), **vars(options), steps=steps or LARGEST
        )
        chats = [is_chat] * len(prompts) if isinstance(is_chat, bool) else is_chat
        texts = [
            GrowingText(self.tokenizer, prompt, stop, is_chat=is_answer)
            for prompt, is_answer in zip(prompts, chats, strict=True)
        ]
        if isinstance(options.grammar, list):
            has_grammar = [grammar is not None for grammar in options.grammar]
        else:
            has_grammar = [options.grammar is not None] * len(prompts)
        return Run(results, texts, has_grammar)

    def compile_grammar(self, grammar: Any) -> Any:
        """Compile one grammar, or a list of grammars in which None stands for no grammar.

        Compiled grammars and None are returned as they are.

        Raises:
            InputError: a grammar has a part that is not supported, or cannot be satisfied.
        """
        if isinstance(grammar, list | tuple):
            return [self.compile_grammar(part) for part in grammar]
        if grammar is None or isinstance(grammar, CompiledGrammar):
            return grammar
        return self.grammar_compiler.compile(grammar)


class Run:
    """A running batch. Iteration continues it, and yields the new text of each row.

    Iteration ends with a `specjax.errors.LogitsError` if a row's logits are invalid.
    ``generations`` then holds what each row had generated.

    Attributes:
        generations: the generation of each row, set at the end.
        statistics: the statistics of all rows together, set at the end.

    Examples:
        >>> generate = specjax.load("embedded", "embedded:eagle3")
        >>> options = specjax.pipeline.settings(max_new_tokens=24)
        >>> run = generate.start([generate.encode("import os\\nimport ")], options, steps=4)
        >>> text = "".join(piece for (piece,) in run)
        >>> run.generations[0].text == text
        True
    """

    def __init__(
        self,
        results: Iterator[decoding.Result],
        rows: Sequence[GrowingText],
        has_grammar: Sequence[bool] | None = None,
    ) -> None:
        """Store the results and the texts; `TextGenerator.start` calls this.

        Args:
            results: the results of the batch so far.
            rows: the text of each row.
            has_grammar: for each row, whether it has a grammar; None: no row has one.
        """
        self._results, self._rows = results, rows
        self._has_grammar = [False] * len(rows) if has_grammar is None else list(has_grammar)
        self.generations: list[Generation] = []
        self.statistics: metrics.Acceptance | None = None

    def __iter__(self) -> Iterator[list[str]]:
        """Yield the new text of each row until every row is finished or has met a stop string."""
        result, failure = None, None
        try:
            for result in self._results:
                lengths = result.lengths.tolist()
                yield [
                    row.push(result.tokens[i, row.length : lengths[i]].tolist())
                    for i, row in enumerate(self._rows)
                ]
                if all(row.stopped for row in self._rows):
                    break
        except LogitsError as error:  # raised after the last result
            # Each text ended before the error.
            is_over = all(self._rows[row].stopped for row in error.rows)
            failure = None if is_over else error
        yield [row.finish() for row in self._rows]
        assert result is not None
        self.statistics = metrics.summarise(result.stats)
        self.generations = [
            Generation(
                "".join(row.pieces),
                tuple(row.tokens),
                metrics.summarise(result.stats, i),
                self._completed(result, i),
            )
            for i, row in enumerate(self._rows)
        ]
        if failure is not None:
            raise failure

    def _completed(self, result: decoding.Result, row: int) -> bool | None:
        """Return whether a row's text is whole by its grammar; None: it has no grammar."""
        if result.grammar_completed is None or not self._has_grammar[row]:
            return None
        return bool(result.grammar_completed[row]) and not self._rows[row].stopped


def settings(
    *,
    max_new_tokens: Any = 128,
    min_new_tokens: Any = 0,
    seed: int = 0,
    key: jax.Array | None = None,
    eos_token_ids: Sequence[int] | None = None,
    rule: Rule | None = None,
    grammar: Grammars = None,
    logit_bias: Any = None,
    allowed_token_ids: Any = None,
    bad_words: Any = None,
    thinking_budget: Any = None,
    thought_tokens: Sequence[str] | None = None,
    speculation: Speculations = None,
    **sampling: Any,
) -> GenerationOptions:
    """Return the options of a generation from plain numbers.

    The default is greedy decoding. A model's own defaults apply only to calls of a `TextGenerator`.

    Args:
        max_new_tokens: the maximum number of tokens to generate; one number, or one per row.
        min_new_tokens: the minimum number of tokens before an end-of-sequence token; one number, or
            one per row.
        seed: the random seed, see `specjax.sampling.make_key`.
        key: a random key, or one per row, instead of a seed.
        eos_token_ids: token ids that end a row; None: the target's own ids, ``()``: none.
        rule: how tokens are sampled and drafts verified, see `specjax.sampling.Rule`. Every rule is
            exact. None is the best rule for the draft shape, see
            `specjax.decoding.options.default_rule`. "block" and "rejection" require chains.
        grammar: the grammar that every text must satisfy, such as ``specjax.JsonSchema(schema)``,
            or one per row, with None for a row without a grammar. Then the default of ``rule`` is
            "coupled".
        logit_bias: numbers that are added to the logits of tokens, by token id, for all rows.
        allowed_token_ids: the only tokens that all rows may generate; None: any.
        bad_words: words that no row may generate, each a string or its token ids.
        thinking_budget: the largest number of tokens of each thought of a text, after which its end
            is forced; one number, or one per row, with None for a row without a budget. Then the
            default of ``rule`` is "coupled".
        thought_tokens: the two texts that begin and end a thought, such as ``("<think>",
            "</think>")``; None: the tokenizer states them, see `specjax.thoughts`.
        speculation: how far rows speculate: "off" for no drafts, "auto" for no limit, or the
            largest depth of a draft; one, or one per row. No distribution depends on it.
        sampling: the fields of `specjax.Sampling` by name, each one number or one per row:
            ``temperature`` (0, the default, is greedy), ``top_k`` (0 is no limit), ``top_p`` in (0,
            1], ``min_p`` in [0, 1], ``presence_penalty`` and ``frequency_penalty`` (0 is none),
            ``repetition_penalty`` (1 is none).

    Raises:
        InputError: an argument has a wrong type or is out of range. The message has its name, its
            value and the valid range.

    Examples:
        >>> options = specjax.pipeline.settings(temperature=0.7, top_p=0.9, seed=3)
        >>> options.sampling
        Sampling(temperature=0.7, top_p=0.9)
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
        grammar=grammar,
        biases=TokenBiases.of(logit_bias, allowed_token_ids, bad_words),
        thinking_budget=_budgets(thinking_budget, thought_tokens),
        speculation=speculation,
    )


def _budgets(budget: Any, thought_tokens: Sequence[str] | None) -> ThinkingBudgets:
    """Return the thinking budget of all rows, or a list with that of each row.

    Raises:
        InputError: a budget cannot be used, or there are tokens of thoughts without one.
    """
    if thought_tokens is not None:
        thought_tokens = check_texts(thought_tokens)
        if budget is None:
            raise InputError(
                f"thought_tokens={thought_tokens!r}: there is no thinking_budget; give one, or"
                " leave them out"
            )
    if isinstance(budget, list | tuple):
        return [row if row is None else _budgets(row, thought_tokens) for row in budget]  # pyright: ignore[reportReturnType]
    if isinstance(budget, ThinkingBudget) and thought_tokens is not None:
        if budget.thought is not None:
            raise InputError(
                f"thought_tokens={thought_tokens!r}: the thinking budget has its own; leave one of"
                " them out"
            )
        return replace(budget, thought=thought_tokens)
    if budget is None or isinstance(budget, ThinkingBudget):
        return budget
    return ThinkingBudget(budget, thought_tokens)  # pyright: ignore[reportArgumentType]


def _encoded(biases: Any, tokenizer: Any) -> Any:
    """Return biases, one or one for each row, whose banned words are token ids."""
    if isinstance(biases, list | tuple):
        return [_encoded(row, tokenizer) for row in biases]
    return biases if biases is None else biases.encoded(tokenizer)


def _split_options(
    options: dict[str, Any], default_sampling: Sampling | None
) -> tuple[Sequence[str], Settings | None, GenerationOptions]:
    """Return ``stop``, ``chat_template_kwargs``, and the `settings` of the remaining options.

    The settings are merged with the defaults. Warns about options that have no effect.
    """
    check_options(
        "the generator", options, settings, "stop", "chat_template_kwargs", *SAMPLING_NAMES
    )
    options = dict(options)
    stop = text.check_stop(options.pop("stop", ()))
    chat_template_kwargs = options.pop("chat_template_kwargs", None)
    stated = {name: options.pop(name, None) for name in SAMPLING_NAMES}
    generation_options = settings(
        **options, **vars((default_sampling or GREEDY).with_explicit(**stated))
    )
    if unread := unread_settings(generation_options.sampling):
        warnings.warn(
            f"{', '.join(unread)}: ignored at temperature 0, which is greedy", stacklevel=3
        )
    return stop, chat_template_kwargs, generation_options


def unread_settings(sampling: Sampling) -> list[str]:
    """List the sampling parameters that were given but have no effect, as all rows are greedy."""
    if np.any(np.asarray(sampling.temperature) != 0):
        return []
    values = {
        name: getattr(sampling, name)
        for name in SAMPLING_NAMES
        if name != "temperature" and name not in PENALTIES
    }
    return [
        name
        for name, value in values.items()
        if np.any(np.asarray(value) != getattr(Sampling, name))
    ]


_FLOAT_TYPES = ("float32", "bfloat16", "float16")


def _float_type(dtype: Any) -> Any:
    """Return a floating-point data type for params, from a type or its name."""
    try:
        name = dtype if isinstance(dtype, str) else jax.numpy.dtype(dtype).name
    except TypeError:
        name = None
    if name not in _FLOAT_TYPES:
        raise InputError(
            f"dtype={dtype!r}: must be {', '.join(_FLOAT_TYPES[:-1])} or {_FLOAT_TYPES[-1]}"
        )
    return jax.numpy.dtype(name)


def _prompts(prompt: Any) -> tuple[list[Any], bool]:
    """Return the prompts and chats of a call, and whether they were a list."""

    def is_chat(value: Any) -> bool:
        return (
            isinstance(value, Sequence)
            and bool(value)
            and all(isinstance(message, Mapping) for message in value)
        )

    if isinstance(prompt, str) or is_chat(prompt):
        return [prompt], False
    if (
        isinstance(prompt, Sequence)
        and prompt
        and all(isinstance(item, str) or is_chat(item) for item in prompt)
    ):
        return list(prompt), True
    raise InputError(
        f"prompt={prompt!r}: give text, a chat such as [{{'role': 'user', 'content': '…'}}], or a"
        " list of either"
    )
