"""The parsing and checking of request bodies, for `specjax.serving.Engine.submit`.

A body is decoded in two passes: first its names, then the value of each known name as that name's
type. So every error names its parameter. Unknown names are ignored, and reported in a header.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from specjax.arguments import LARGEST, LARGEST_FLOAT
from specjax.errors import InputError
from specjax.sampling import SAMPLING_NAMES, Sampling
from specjax.sampling_params import SamplingParams
from specjax.serving.http.bodies import check_neutral, read_names, read_value, shown, types_of
from specjax.serving.http.errors import RequestError, invalid
from specjax.serving.http.grammars import PARAMETERS as GRAMMAR_PARAMETERS
from specjax.serving.http.grammars import read_grammar
from specjax.serving.http.tools import ToolChoice, read_tool_choice, read_tools
from specjax.templates import ChatEnd, Messages, Settings, read_settings
from specjax.text import REASONING_FIELDS

MAX_PROMPTS = 64
"""The largest number of prompts of a request."""

MAX_CHOICES = 16
"""The largest number of texts for a prompt, ``n``."""

MAX_TEXTS = 128
"""The largest number of texts of a request: prompts times ``n``."""

MAX_MESSAGES = 1024
"""The largest number of messages of a chat."""

MAX_STOPS = 64
"""The largest number of stop strings."""

MAX_STOP_CHARACTERS = 256
"""The largest number of characters of a stop string."""

MAX_SALT_CHARACTERS = 256
"""The largest number of characters of a ``cache_salt``."""

MAX_GRAMMAR_BYTES = 2**20
"""The largest number of bytes of a parameter that states a grammar."""

MAX_BIASES = 1024
"""The largest number of tokens of a ``logit_bias``."""

MAX_BAD_WORDS = 32
"""The largest number of ``bad_words``."""

MAX_STOP_TOKENS = 8
"""The largest number of stop tokens: those of ``stop_token_ids`` and the model's own."""

MAX_LOGPROBS = 20
"""The largest number of top log-probabilities per token."""


# --- the parsed requests --------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """The limits and defaults of the served model.

    Attributes:
        names: the names of the model. Answers have the first one.
        vocab_size: the size of the vocabulary.
        max_logprobs: the largest number of top log-probabilities per token.
        max_prediction: the largest number of tokens of a prediction that are copied per step; 0:
            requests may not have a prediction.
        capacity: the maximal length of a text in tokens, prompt and output; None: it is unknown.
        has_chat: whether the tokenizer has a chat template.
        has_grammars: whether requests may state a grammar.
        has_penalties: whether requests may have penalties, biases and banned words.
        takes_tools: whether the chat template writes tools into a prompt.
        can_require_calls: whether an answer can be forced to be a call of a tool.
        template_names: the variables that the chat template reads; None: they are unknown.
        thinking_switch: the variable of the chat template that switches the reasoning; None: it has
            none.
        has_thoughts: whether the tokens of the model's thoughts are known, so that they may have a
            budget.
        eos_token_ids: the model's end-of-sequence ids.
        default_sampling: the temperature, top_k, top_p, min_p and penalties of requests that do
            not state them: the model's own, or else OpenAI's temperature 1 alone.

    Examples:
        >>> from specjax.serving.http.requests import Limits
        >>> Limits(names=("tiny",), vocab_size=3072).names[0]
        'tiny'
    """

    names: tuple[str, ...]
    vocab_size: int
    max_logprobs: int = MAX_LOGPROBS
    max_prediction: int = 16
    capacity: int | None = None
    has_chat: bool = True
    has_grammars: bool = True
    has_penalties: bool = True
    takes_tools: bool = True
    can_require_calls: bool = True
    template_names: frozenset[str] | None = None
    thinking_switch: str | None = None
    has_thoughts: bool = False
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: Sampling = Sampling(temperature=1.0)


@dataclass(frozen=True)
class TextRequest:
    """A request for completions or a chat completion.

    Attributes:
        is_chat: whether it is a chat completion.
        model: the name of the model in the request.
        prompts: texts, lists of token ids, or one chat.
        n: the number of texts for each prompt.
        max_tokens: the largest number of tokens of each text; None: as many as fit.
        seed: the seed; None: a random one.
        params: the sampling parameters and the grammar, except for ``max_tokens`` and ``seed``.
            Those that the request leaves out are those of `Limits.default_sampling`.
        grammar_name: the parameter that states the grammar, such as "response_format"; "" if none
            does.
        stop: stop strings. The text ends before the first of them.
        logprobs: the number of top log-probabilities per token; None: no log-probabilities.
        prompt_logprobs: the number of top log-probabilities per token of the prompt; None: none of
            the prompt.
        echo: whether the answer begins with the prompt.
        suffix: the text after the gap that the model fills; the prompt is the text before it.
        return_token_ids: whether the answer has the token ids of prompts and texts.
        prediction: the expected text.
        speculation: how far the request speculates, as for `specjax.serving.Engine.submit`.
        stream: whether to stream the answer.
        include_usage: whether the stream ends with the usage.
        continuous_usage: whether each chunk of the stream has the usage so far.
        include_accepted: whether the stream marks the parts of the text that were accepted drafts.
        add_special_tokens: whether to begin a prompt with the special tokens of the tokenizer. A
            chat's template writes them itself.
        chat_template_kwargs: the arguments of the chat template beside the messages.
        chat_end: where the text of the chat ends, see `specjax.templates.ChatEnd`.
        tools: the tools that the model may call, in OpenAI's form.
        tool_choice: which calls the answer may have.
        parallel_tool_calls: whether it may have more than one.
        include_reasoning: whether the answer has the model's reasoning.
        include_stop: whether the text ends behind its stop string, not before it.
        skip_special_tokens: whether special tokens are left out of the text.
        cache_salt: a string that divides the tenant further.
        store: whether the text may draft from earlier answers of the tenant, and later ones from
            it.
        priority: the number by which waiting requests are ordered, the lower first.
        ignored: the unknown names in the request, in its order.

    Examples:
        >>> from specjax.serving.http.requests import Limits, read_completion
        >>> limits = Limits(names=("tiny",), vocab_size=3072)
        >>> request = read_completion(b'{"model": "tiny", "prompt": ["a", "b"], "n": 2}', limits)
        >>> request.prompts, request.n, request.max_tokens
        (('a', 'b'), 2, 16)
    """

    is_chat: bool
    model: str
    prompts: tuple[Any, ...]
    n: int = 1
    max_tokens: int | None = None
    seed: int | None = None
    params: SamplingParams = SamplingParams(temperature=1.0)
    grammar_name: str = ""
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    suffix: str = ""
    return_token_ids: bool = False
    prediction: str | None = None
    speculation: str | int | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    include_accepted: bool = False
    add_special_tokens: bool = True
    chat_template_kwargs: Settings = field(default_factory=dict)
    chat_end: ChatEnd = "answer"
    tools: tuple[Mapping[str, Any], ...] = ()
    tool_choice: ToolChoice = ToolChoice()
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    include_stop: bool = False
    skip_special_tokens: bool = True
    cache_salt: str = ""
    store: bool = True
    priority: int = 0
    ignored: tuple[str, ...] = ()

    @property
    def top_count(self) -> int | None:
        """The number of top log-probabilities that the engine reports; None: none at all."""
        return max(
            (count for count in (self.logprobs, self.prompt_logprobs) if count is not None),
            default=None,
        )

    @property
    def scores_prompt(self) -> bool:
        """True if the answer has the log-probabilities of the prompt."""
        return self.prompt_logprobs is not None or (self.echo and self.logprobs is not None)


@dataclass(frozen=True)
class TokenizeRequest:
    """A request for the token ids of a text or a chat.

    Attributes:
        prompt: the text or the chat.
        param: its parameter in the request, "prompt" or "messages".
        add_special_tokens: whether to begin a text with the tokenizer's special tokens.
        chat_template_kwargs: the arguments of the chat template beside the messages.
        chat_end: as in `TextRequest`.
        tools: as in `TextRequest`.
        ignored: the unknown names in the request, in its order.

    Examples:
        >>> from specjax.serving.http.requests import Limits, read_tokenize
        >>> limits = Limits(names=("tiny",), vocab_size=3072)
        >>> read_tokenize(b'{"prompt": "import os"}', limits).prompt
        'import os'
    """

    prompt: str | Messages
    param: str
    add_special_tokens: bool = True
    chat_template_kwargs: Settings = field(default_factory=dict)
    chat_end: ChatEnd = "answer"
    tools: tuple[Mapping[str, Any], ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class DetokenizeRequest:
    """A request for the text of token ids.

    Attributes:
        tokens: the token ids.
        ignored: the unknown names in the request, in its order.

    Examples:
        >>> from specjax.serving.http.requests import Limits, read_detokenize
        >>> read_detokenize(b'{"tokens": [5, 6]}', Limits(names=("tiny",), vocab_size=3072)).tokens
        [5, 6]
    """

    tokens: list[int]
    ignored: tuple[str, ...] = ()


# --- names and types ------------------------------------------------------------------------------


class _Part(msgspec.Struct):
    """A part of a message's content. Further fields, such as ``cache_control``, are ignored."""

    type: str
    text: str | None = None


class _Function(msgspec.Struct, omit_defaults=True):
    """The function of a tool call. Its arguments are an object, or the object's JSON text."""

    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct, omit_defaults=True):
    """A tool call in a message of the assistant."""

    function: _Function
    id: str | None = None
    type: str | None = None


class _ChatMessage(msgspec.Struct):
    """A message of a chat, with the fields that templates read. Further fields are ignored."""

    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    # Some clients send values that are not text under these names. They are ignored.
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None


class _Prediction(msgspec.Struct):
    """The expected text, as in OpenAI's Predicted Outputs."""

    type: str
    content: str | list[_Part]


class _StreamOptions(msgspec.Struct):
    """The options of a stream."""

    include_usage: bool | None = None
    include_accepted: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


_Tokens = Annotated[int, Meta(ge=0, le=LARGEST)]
_Share = Annotated[float, Meta(ge=0, le=1)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]


class _TextFields(msgspec.Struct, kw_only=True):
    """The parameters of both completions and chats, with their types and bounds.

    A null is treated as a missing value, except for the model. The two names of the limit of tokens
    have no bounds here: `_max_tokens` checks the one that counts.
    """

    model: str | UnsetType = UNSET
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    min_tokens: _Tokens | None = None
    thinking_budget: _Tokens | None = None
    # vLLM's name. There -1 is no budget.
    thinking_token_budget: (
        Annotated[int, Meta(ge=-1, le=LARGEST, description=f"from 0 to {LARGEST}")] | None
    ) = None
    temperature: Annotated[float, Meta(ge=0, le=LARGEST_FLOAT)] | None = None
    top_p: _Share | None = None
    # -1 means 0, as in vLLM.
    top_k: Annotated[int, Meta(ge=-1, le=LARGEST, description=f"from 0 to {LARGEST}")] | None = None
    min_p: _Share | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: (
        Annotated[float, Meta(ge=0.01, le=10, description="from 0.01 to 10")] | None
    ) = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    seed: (
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="from -2**63 to 2**63 - 1")]
        | None
    ) = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: (
        Annotated[int, Meta(ge=-(2**31), le=2**31 - 1, description="from -2**31 to 2**31 - 1")]
        | None
    ) = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    store: bool | None = None
    add_special_tokens: bool | None = None
    prediction: _Prediction | None = None
    speculation: str | int | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | bool | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class _CompletionFields(_TextFields, kw_only=True):
    """The parameters of ``/v1/completions``."""

    prompt: str | list[int | str | list[int]] | UnsetType = UNSET
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None


class _ChatFields(_TextFields, kw_only=True):
    """The parameters of ``/v1/chat/completions``."""

    messages: list[_ChatMessage] | UnsetType = UNSET
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class _TokenizeFields(msgspec.Struct, kw_only=True):
    """The parameters of ``/tokenize``."""

    model: str | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    messages: list[_ChatMessage] | UnsetType = UNSET
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | UnsetType | None = UNSET
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[Any] | None = None


class _DetokenizeFields(msgspec.Struct, kw_only=True):
    """The parameters of ``/detokenize``."""

    model: str | UnsetType = UNSET
    tokens: list[int] | UnsetType = UNSET


_OF_ANOTHER_PATH: Mapping[str, tuple[Any, ...]] = {
    "prompt": (),
    "echo": (False,),
    "messages": (),
    "top_logprobs": (0,),
    "suffix": ("",),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (True, False),
    "include_reasoning": (True, False),
    "reasoning_effort": (),
}
"""The parameters of either completions or chats, with the values that the other path accepts.

Null is accepted, too.
"""

_OBJECTS: Mapping[str, Any] = {"stream_options": _StreamOptions, "prediction": _Prediction}
"""The parameters that are objects, in which unknown names are reported, too."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "guided_decoding_backend": ("", "auto", "guidance"),
    "guided_whitespace_pattern": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_strs": (False,),
    "chat_template": ("",),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "verbosity": ("medium",),
    "moderation": (),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "top_a": (0,),
    "typical_p": (1,),
    "mirostat_mode": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
}
"""The unsupported parameters that would change the answer or its time, with accepted values.

An accepted value, or null, changes nothing. Any other value is refused.
"""

IGNORED = frozenset(
    [
        "user",
        "metadata",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "request_id",
    ]
)
"""The parameters that do not change the text. They are accepted and ignored."""


# --- parsing --------------------------------------------------------------------------------------


def read_completion(body: bytes, limits: Limits) -> TextRequest:
    """Parse the body of ``/v1/completions``.

    Raises:
        RequestError: The body is invalid. The message names the parameter, its value and a remedy.

    Examples:
        >>> from specjax.serving.http.requests import Limits, read_completion
        >>> limits = Limits(names=("tiny",), vocab_size=3072)
        >>> read_completion(b'{"model": "tiny", "prompt": "a", "n": 0}', limits)
        Traceback (most recent call last):
        specjax.serving.http.errors.RequestError: n=0: must be from 1 to 16
    """
    fields, ignored = _read(body, _CompletionFields, limits)
    echo, suffix = bool(fields.echo), fields.suffix or ""
    if suffix and (echo or not isinstance(fields.prompt, str)):
        reason = "it does not go with echo" if echo else "the prompt must be a text"
        raise invalid("suffix", f"suffix={shown(suffix)}: {reason}; leave one of them out")
    # With a suffix the gap may be at the beginning of the text.
    prompts = (str(fields.prompt),) if suffix else _prompts(fields.prompt, limits)
    logprobs = None if fields.logprobs is None else _top_count("logprobs", fields.logprobs, limits)
    scores_prompt = fields.prompt_logprobs is not None or (echo and logprobs is not None)
    name, max_tokens = _max_tokens(fields, minimum=0)
    max_tokens = 16 if max_tokens is None else max_tokens
    if max_tokens == 0 and not scores_prompt:
        message = (
            f"{name}=0: there is nothing to compute; give at least 1, or prompt_logprobs, or echo"
            " with logprobs"
        )
        raise invalid(name, message)
    return _request(
        fields,
        limits,
        is_chat=False,
        prompts=prompts,
        max_tokens=max_tokens,
        logprobs=logprobs,
        echo=echo,
        suffix=suffix,
        add_special_tokens=_or(fields.add_special_tokens, True),
        ignored=ignored,
    )


def read_chat(body: bytes, limits: Limits) -> TextRequest:
    """Parse the body of ``/v1/chat/completions``.

    Raises:
        RequestError: The body is invalid. The message names the parameter, its value and a remedy.

    Examples:
        >>> from specjax.serving.http.requests import Limits, read_chat
        >>> limits = Limits(names=("tiny",), vocab_size=3072)
        >>> body = b'{"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}'
        >>> request = read_chat(body, limits)
        >>> request.prompts, request.max_tokens
        (([{'role': 'user', 'content': 'Hello'}],), None)
    """
    fields, ignored = _read(body, _ChatFields, limits)
    prompts = (_messages(fields.messages, limits),)
    top_count, logprobs = _or(fields.top_logprobs, 0), None
    if fields.logprobs:
        logprobs = _top_count("top_logprobs", top_count, limits, asks="logprobs")
    elif top_count:
        raise invalid(
            "top_logprobs", f"top_logprobs={shown(top_count)}: it needs logprobs=true; give both"
        )
    if fields.add_special_tokens:
        message = (
            "add_special_tokens=true: the chat template writes them; leave it out, or give false"
        )
        raise invalid("add_special_tokens", message, code="unsupported_parameter")
    settings, unread = _template_settings(fields.chat_template_kwargs, limits)
    tools = read_tools(fields.tools, takes_tools=limits.takes_tools)
    return _request(
        fields,
        limits,
        is_chat=True,
        prompts=prompts,
        max_tokens=_max_tokens(fields, minimum=1)[1],
        logprobs=logprobs,
        chat_template_kwargs=with_effort(settings, fields.reasoning_effort, limits),
        chat_end=_chat_end(fields),
        tools=tools,
        tool_choice=read_tool_choice(
            fields.tool_choice, tools, can_require=limits.can_require_calls
        ),
        parallel_tool_calls=_or(fields.parallel_tool_calls, True),
        include_reasoning=_or(fields.include_reasoning, True),
        ignored=(*ignored, *unread),
    )


def read_tokenize(body: bytes, limits: Limits) -> TokenizeRequest:
    """Parse the body of ``/tokenize``: a prompt or messages.

    Raises:
        RequestError: The body is invalid. The message names the parameter, its value and a remedy.

    Examples:
        >>> from specjax.serving.http.requests import Limits, read_tokenize
        >>> limits = Limits(names=("tiny",), vocab_size=3072, has_chat=False)
        >>> read_tokenize(b'{"messages": []}', limits)
        Traceback (most recent call last):
        specjax.serving.http.errors.RequestError: messages: this model has no chat template; ...
    """
    fields, ignored = _read(body, _TokenizeFields, limits)
    template_kwargs = fields.chat_template_kwargs
    if fields.messages is not UNSET and fields.prompt is UNSET:
        settings, unread = _template_settings(
            None if template_kwargs is UNSET else template_kwargs, limits
        )
        return TokenizeRequest(
            _messages(fields.messages, limits),
            "messages",
            chat_template_kwargs=settings,
            chat_end=_chat_end(fields),
            tools=read_tools(fields.tools, takes_tools=limits.takes_tools),
            ignored=(*ignored, *unread),
        )
    if fields.prompt is UNSET or fields.messages is not UNSET:
        raise invalid("prompt", "prompt: give either prompt or messages")
    if template_kwargs is not UNSET:
        ignored = (*ignored, "chat_template_kwargs")
    has_special = _or(fields.add_special_tokens, True)
    return TokenizeRequest(_text("prompt", fields.prompt), "prompt", has_special, ignored=ignored)


def read_detokenize(body: bytes, limits: Limits) -> DetokenizeRequest:
    """Parse the body of ``/detokenize``: token ids.

    Raises:
        RequestError: The body is invalid. The message names the parameter, its value and a remedy.

    Examples:
        >>> from specjax.serving.http.requests import Limits, read_detokenize
        >>> read_detokenize(b'{"tokens": [9000]}', Limits(names=("tiny",), vocab_size=3072))
        Traceback (most recent call last):
        specjax.serving.http.errors.RequestError: tokens: token id 9000 does not exist; ...
    """
    fields, ignored = _read(body, _DetokenizeFields, limits)
    if fields.tokens is UNSET:
        raise invalid("tokens", "tokens: it is missing; give a list of token ids")
    _check_tokens("tokens", fields.tokens, limits)
    return DetokenizeRequest(fields.tokens, ignored)


def _chat_end(fields: _ChatFields | _TokenizeFields) -> ChatEnd:
    """Return where the text of a chat ends."""
    if not fields.continue_final_message:
        return "messages" if fields.add_generation_prompt is False else "answer"
    if fields.add_generation_prompt:
        message = (
            "continue_final_message=true: the last message goes on, so no answer begins; give"
            " add_generation_prompt=false, or leave it out"
        )
        raise invalid("continue_final_message", message)
    return "last message"


Fields = TypeVar("Fields", _CompletionFields, _ChatFields, _TokenizeFields, _DetokenizeFields)


def _read(body: bytes, kind: type[Fields], limits: Limits) -> tuple[Fields, tuple[str, ...]]:
    """Return the parameters of a body, and the unknown names in it.

    The model is checked first: a request for another model gets no other error.
    """
    raw = read_names(body)
    types, is_text = types_of(kind), issubclass(kind, _TextFields)
    ignored = []
    for name, value in raw.items():
        if name in types or name in IGNORED:
            continue
        if name in UNSUPPORTED:
            check_neutral(name, value, UNSUPPORTED[name], "it is not supported")
        elif name in _OF_ANOTHER_PATH and is_text:
            check_neutral(name, value, _OF_ANOTHER_PATH[name], "it belongs to another path")
        else:
            ignored.append(name)
    _check_counts({name: value for name, value in raw.items() if name in types}, limits)
    for name in GRAMMAR_PARAMETERS:
        if (size := len(bytes(raw.get(name, b"")))) > MAX_GRAMMAR_BYTES:
            raise invalid(name, f"{name}: it has {size} bytes; give at most {MAX_GRAMMAR_BYTES}")
    model = read_value("model", raw["model"], types["model"]) if "model" in raw else UNSET
    check_model(model, limits, may_be_left_out=not is_text)
    fields = kind(
        **{name: read_value(name, raw[name], types[name]) for name in types if name in raw}
    )
    for name, inner_kind in _OBJECTS.items():
        if getattr(fields, name, None) is not None:
            ignored += [
                f"{name}.{inner}"
                for inner in read_names(raw[name])
                if inner not in inner_kind.__struct_fields__
            ]
    return fields, tuple(ignored)


def check_model(model: Any, limits: Limits, *, may_be_left_out: bool) -> None:
    """Raise RequestError if a request names another model or none."""
    if model is UNSET:
        if may_be_left_out:
            return
        raise invalid("model", f"model: it is missing; give {limits.names[0]!r}")
    if model not in limits.names:
        message = f"model={shown(model)}: the server does not have it; give {limits.names[0]!r}"
        raise RequestError(404, message, param="model", code="model_not_found")


def _check_counts(raw: Mapping[str, msgspec.Raw], limits: Limits) -> None:
    """Raise RequestError for lists of ids that are far too long.

    It counts their commas, before memory is allocated for the ids.
    """
    for name in ("prompt", "tokens", "stop_token_ids"):
        text = bytes(raw.get(name, b""))
        first = text[1:].lstrip()[:1]
        if not (text.startswith(b"[") and first and first in b"[-0123456789"):
            continue
        maximum = MAX_TEXTS
        if name != "stop_token_ids":
            if limits.capacity is None:
                maximum = math.inf
            else:
                maximum = limits.capacity * (MAX_PROMPTS if first == b"[" else 1)
        if (count := text.count(b",") + 1) > maximum:
            code = "context_length_exceeded" if name == "prompt" else None
            raise invalid(name, f"{name}: there are {count} ids; give at most {maximum}", code=code)


# --- checks ---------------------------------------------------------------------------------------


def _request(
    fields: _CompletionFields | _ChatFields,
    limits: Limits,
    *,
    prompts: tuple[Any, ...],
    max_tokens: int | None,
    **checked: Any,
) -> TextRequest:
    """Check the parameters of both completions and chats, and return the request.

    The caller has ``checked`` the other fields of `TextRequest`.
    """
    n = _or(fields.n, 1)
    if n * len(prompts) > MAX_TEXTS:
        raise invalid(
            "n",
            f"n={n}: with {len(prompts)} prompts it makes more than {MAX_TEXTS} texts; give fewer"
            " at a time",
        )
    if fields.best_of not in (None, n):
        raise invalid(
            "best_of", f"best_of={fields.best_of}: it is not supported; leave it out, or give n={n}"
        )
    min_tokens = _or(fields.min_tokens, 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise invalid(
            "min_tokens", f"min_tokens={min_tokens}: it must not exceed max_tokens={max_tokens}"
        )
    stream = bool(fields.stream)
    if fields.stream_options is not None and not stream:
        raise invalid("stream_options", "stream_options: it needs stream=true; leave it out")
    options = fields.stream_options or _StreamOptions()
    # Negative seeds map to the largest ones: -1 to 2**63 - 1, -2 to 2**63 - 2, and so on.
    seed = None if fields.seed is None else fields.seed & (2**63 - 1)
    stop, stop_token_ids = _stop(fields.stop), _stop_token_ids(fields, limits)
    grammar_name, grammar = read_grammar(
        {name: getattr(fields, name) for name in GRAMMAR_PARAMETERS},
        is_supported=limits.has_grammars,
    )
    try:
        sampling = _sampling(fields, limits)
        params = SamplingParams(
            **vars(sampling),
            max_new_tokens=LARGEST,
            min_new_tokens=min_tokens,
            eos_token_ids=stop_token_ids,
            grammar=grammar,
            thinking_budget=_thinking_budget(fields),
            **_biases(fields, limits),
        )
    except InputError as error:  # an error of the defaults, because stated values are within bounds
        raise RequestError(400, str(error)) from None
    if params.has_adjustments and not limits.has_penalties:
        name = params.first_adjustment
        message = f"{name}: this server has no penalties; leave it out"
        raise invalid(name, message, code="unsupported_parameter")
    return TextRequest(
        model=str(fields.model),
        prompts=prompts,
        n=n,
        max_tokens=max_tokens,
        seed=seed,
        params=params,
        grammar_name=grammar_name,
        stop=stop,
        prompt_logprobs=_prompt_logprobs(fields, limits),
        return_token_ids=bool(fields.return_token_ids),
        prediction=_prediction(fields.prediction, limits),
        speculation=fields.speculation,
        stream=stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        include_accepted=bool(options.include_accepted),
        include_stop=bool(fields.include_stop_str_in_output),
        skip_special_tokens=_or(fields.skip_special_tokens, True),
        cache_salt=fields.cache_salt or "",
        store=_or(fields.store, True),
        priority=fields.priority or 0,
        **checked,
    )


def _sampling(fields: _TextFields, limits: Limits) -> Sampling:
    """Return the fields of `Sampling`: the stated ones, and the defaults."""
    stated = {name: getattr(fields, name, None) for name in SAMPLING_NAMES}
    if stated["top_k"] == -1:
        stated["top_k"] = 0
    if stated["top_p"] == 0:
        raise invalid("top_p", "top_p=0: must be above 0; for greedy sampling give temperature 0")
    return limits.default_sampling.with_explicit(**stated)


def _biases(fields: _TextFields, limits: Limits) -> dict[str, Any]:
    """Return the biases, allowed tokens and banned words that a request states."""
    bias = fields.logit_bias or {}
    if len(bias) > MAX_BIASES:
        raise invalid(
            "logit_bias", f"logit_bias: it has {len(bias)} tokens; give at most {MAX_BIASES}"
        )
    for token in bias:
        # Its own digits: "07" would be a second name of token 7.
        is_id = token.isascii() and token.isdigit() and len(token) < 20 and str(int(token)) == token
        if not is_id or int(token) >= limits.vocab_size:
            message = (
                f"logit_bias: {shown(token)} is not a token id; give ids from 0 to"
                f" {limits.vocab_size - 1}"
            )
            raise invalid("logit_bias", message)
    words = fields.bad_words or []
    if len(words) > MAX_BAD_WORDS:
        raise invalid(
            "bad_words", f"bad_words: there are {len(words)}; give at most {MAX_BAD_WORDS}"
        )
    if too_long := [word for word in words if not 1 <= len(word) <= MAX_STOP_CHARACTERS]:
        message = (
            f"bad_words: {shown(too_long[0])} has {len(too_long[0])} characters; give from 1 to"
            f" {MAX_STOP_CHARACTERS}"
        )
        raise invalid("bad_words", message)
    allowed = fields.allowed_token_ids or None
    _check_tokens("allowed_token_ids", allowed or [], limits)
    # vLLM restricts biases so. Beyond that, a bias bans or forces a token anyway.
    restricted = {int(token): min(max(value, -100.0), 100.0) for token, value in bias.items()}
    return {"logit_bias": restricted, "allowed_token_ids": allowed, "bad_words": words}


def _thinking_budget(fields: _TextFields) -> int | None:
    """Return the thinking budget under either of its names; None: there is none."""
    budget, by_vllm = fields.thinking_budget, fields.thinking_token_budget
    by_vllm = None if by_vllm == -1 else by_vllm
    if budget is not None and by_vllm not in (None, budget):
        raise invalid(
            "thinking_token_budget",
            f"thinking_token_budget={by_vllm}: the request has thinking_budget={budget} too; give"
            " one of them",
        )
    return by_vllm if budget is None else budget


def _max_tokens(fields: _TextFields, minimum: int) -> tuple[str, int | None]:
    """Return the name and value of the limit of tokens; None: there is none.

    Of its two names, OpenAI's newer one takes precedence.
    """
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    count = getattr(fields, name)
    return name, None if count is None else _whole(name, count, minimum, LARGEST)


def _whole(name: str, value: int, minimum: int, maximum: int) -> int:
    """Check the bounds of a whole number whose type does not state them, and return it."""
    if not minimum <= value <= maximum:
        raise invalid(name, f"{name}={shown(value)}: must be from {minimum} to {maximum}")
    return value


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _top_count(name: str, count: int, limits: Limits, asks: str = "") -> int:
    """Check the number of top log-probabilities, and return it.

    ``asks`` is the parameter that asks for log-probabilities, if it is another one than ``name``.
    """
    if limits.max_logprobs < 1:
        name = asks or name
        raise invalid(name, f"{name}: this server has none (--max-logprobs 0); leave it out")
    return _whole(name, count, 0, limits.max_logprobs)


def _prompt_logprobs(fields: _TextFields, limits: Limits) -> int | None:
    """Return the number of top log-probabilities per token of the prompt; None: none."""
    if fields.prompt_logprobs is None:
        return None
    if fields.stream:
        message = (
            f"prompt_logprobs={shown(fields.prompt_logprobs)}: a stream has none; leave it out, or"
            " give stream=false"
        )
        raise invalid("prompt_logprobs", message)
    return _top_count("prompt_logprobs", fields.prompt_logprobs, limits)


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    """Check the stop strings, and return them."""
    strings = [stop] if isinstance(stop, str) else stop or []
    if len(strings) > MAX_STOPS:
        raise invalid("stop", f"stop: there are {len(strings)} strings; give at most {MAX_STOPS}")
    for string in strings:
        if not 1 <= len(string) <= MAX_STOP_CHARACTERS:
            message = (
                f"stop={shown(string)}: it has {len(string)} characters; give from 1 to"
                f" {MAX_STOP_CHARACTERS}"
            )
            raise invalid("stop", message)
    return tuple(strings)


def _stop_token_ids(fields: _TextFields, limits: Limits) -> tuple[int, ...] | None:
    """Return the stop tokens; None: the model's end-of-sequence ids."""
    stated = fields.stop_token_ids or []
    of_model = () if fields.ignore_eos else limits.eos_token_ids
    if not stated and of_model:
        return None
    if len(stated) > MAX_TEXTS:  # duplicates are allowed, but not a million of them
        message = f"stop_token_ids: there are {len(stated)} ids; give at most {MAX_STOP_TOKENS}"
        raise invalid("stop_token_ids", message)
    _check_tokens("stop_token_ids", stated, limits)
    ids = tuple(dict.fromkeys((*of_model, *stated)))
    if len(ids) > MAX_STOP_TOKENS:
        maximum = MAX_STOP_TOKENS - len(of_model)
        message = (
            f"stop_token_ids: there are {len(ids)} ids, {len(of_model)} of them the model's; give"
            f" at most {maximum}"
        )
        raise invalid("stop_token_ids", message)
    return ids


def _prediction(prediction: _Prediction | None, limits: Limits) -> str | None:
    """Check the prediction, and return its text."""
    if prediction is None:
        return None
    if prediction.type != "content":
        raise invalid("prediction", f"prediction.type={shown(prediction.type)}: must be 'content'")
    if limits.max_prediction < 1:
        raise invalid(
            "prediction", "prediction: this server accepts none (--max-prediction 0); leave it out"
        )
    return _joined("prediction", prediction.content) or None


def _prompts(prompt: Any, limits: Limits) -> tuple[str | list[int], ...]:
    """Check one or several prompts, texts or token ids, and return them."""
    if prompt is UNSET:
        raise invalid("prompt", "prompt: it is missing; give text, token ids, or a list of either")
    if isinstance(prompt, str):
        return (_text("prompt", prompt),)
    kinds = set(map(type, prompt))
    if not prompt or len(kinds) > 1:
        raise invalid(
            "prompt",
            "prompt: give text, token ids, a list of texts, or a list of lists of token ids",
        )
    if kinds == {int}:
        _check_tokens("prompt", prompt, limits)
        return (prompt,)
    if len(prompt) > MAX_PROMPTS:
        raise invalid(
            "prompt", f"prompt: there are {len(prompt)} prompts; give at most {MAX_PROMPTS}"
        )
    for text_or_ids in prompt:
        if isinstance(text_or_ids, str):
            _text("prompt", text_or_ids)
        elif not text_or_ids:
            raise invalid("prompt", "prompt=[]: it is empty; give at least one token id")
        else:
            _check_tokens("prompt", text_or_ids, limits)
    return tuple(prompt)


def _text(name: str, text: str) -> str:
    if not text:
        raise invalid(name, f"{name}='': it is empty; give at least one character")
    return text


def _check_tokens(name: str, tokens: Sequence[int], limits: Limits) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < limits.vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < limits.vocab_size)
        message = (
            f"{name}: token id {shown(wrong)} does not exist; give ids from 0 to"
            f" {limits.vocab_size - 1}"
        )
        raise invalid(name, message)


def _messages(messages: list[_ChatMessage] | UnsetType, limits: Limits) -> Messages:
    """Check the messages of a chat, and return them. The chat template checks roles and order."""
    if not limits.has_chat:
        message = "messages: this model has no chat template; give text to /v1/completions"
        raise invalid("messages", message, code="no_chat_template")
    if messages is UNSET or not messages:
        raise invalid("messages", "messages: it is missing or empty; give at least one message")
    if len(messages) > MAX_MESSAGES:
        raise invalid(
            "messages", f"messages: there are {len(messages)}; give at most {MAX_MESSAGES}"
        )
    return [_message(index, message) for index, message in enumerate(messages)]


def _template_settings(
    kwargs: dict[str, Any] | None, limits: Limits
) -> tuple[dict[str, Any], list[str]]:
    """Return the arguments of the chat template, and the names among them that it does not read."""
    try:
        settings = read_settings(kwargs or {})
    except InputError as error:
        raise invalid("chat_template_kwargs", str(error), code="unsupported_parameter") from None
    read_names = settings.keys() if limits.template_names is None else limits.template_names
    return settings, [f"chat_template_kwargs.{name}" for name in settings if name not in read_names]


EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
"""The values of ``reasoning_effort``."""


def with_effort(settings: Settings, effort: str | None, limits: Limits) -> Settings:
    """Return the arguments of the chat template with a ``reasoning_effort``, if there is one.

    It is the template's own variable of that name. Templates that can only switch the reasoning on
    or off switch it off for "none".

    Raises:
        RequestError: the effort is not valid, or the template has nothing for it.

    Examples:
        >>> from specjax.serving.http.requests import Limits, with_effort
        >>> limits = Limits(names=("tiny",), vocab_size=3072, thinking_switch="enable_thinking")
        >>> with_effort({}, "none", limits)
        {'enable_thinking': False}
    """
    if effort is None:
        return settings
    name, value = "reasoning_effort", effort
    if effort not in EFFORTS:
        raise invalid(name, f"{name}={shown(effort)}: give one of {', '.join(EFFORTS)}")
    if name not in (limits.template_names or ()):
        if limits.thinking_switch is None:
            message = f"{name}={effort!r}: the model's chat template reads none; leave it out"
            raise invalid(name, message, code="unsupported_parameter")
        name, value = limits.thinking_switch, effort != "none"
    if settings.get(name, value) != value:
        raise invalid(
            "reasoning_effort",
            f"reasoning_effort={effort!r}: chat_template_kwargs has {name}={shown(settings[name])};"
            " give one of them",
        )
    return {**settings, name: value}


# The roles whose messages may have no content: an assistant may only call a tool, and a tool may
# return nothing.
_MAY_BE_SILENT = ("assistant", "tool", "function")


def _message(index: int, message: _ChatMessage) -> dict[str, Any]:
    """Return a message as `specjax.text.encode_chat` expects it, without null fields."""
    if message.content is None and message.role not in _MAY_BE_SILENT:
        reason = (
            f"messages[{index}].content: it is missing or null; give text, or parts of type 'text'"
        )
        raise invalid("messages", reason)
    result: dict[str, Any] = {"role": message.role}
    result["content"] = None if message.content is None else _joined("messages", message.content)
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            result[name] = value
    if message.tool_calls:
        result["tool_calls"] = msgspec.to_builtins(message.tool_calls)
    if message.function_call is not None:
        result["function_call"] = msgspec.to_builtins(message.function_call)
    for name in REASONING_FIELDS:
        if isinstance(value := getattr(message, name), str) and value:
            result[name] = value
    return result


def _joined(name: str, content: str | list[_Part]) -> str:
    """Return the text of a content. Its parts, if it has any, become lines."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text":
            raise invalid(
                name, f"{name}: a part has type {shown(part.type)}; give parts of type 'text'"
            )
        if part.text is None:
            raise invalid(name, f"{name}: a part has no text; give its text")
    return "\n".join(part.text or "" for part in content)
