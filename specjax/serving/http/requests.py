"""From the bytes of a request to what `specjax.serving.Engine.submit` takes. What cannot be used is refused by its name.

A body is taken apart twice: its names first, then the value of each name that is known, which must be of that name's type. So
every error can say which parameter it is about. Names that are not known are passed over, and told to whoever asks.
"""

import math
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Annotated, Any, TypeVar, Union, get_args, get_type_hints

import msgspec
from msgspec import UNSET, Meta, UnsetType

from specjax.arguments import LARGEST, LARGEST_FLOAT
from specjax.errors import InputError
from specjax.sampling import SAMPLING_NAMES, Sampling
from specjax.sampling_params import SamplingParams
from specjax.serving.http.errors import RequestError
from specjax.templates import Messages, Settings, read_settings

MAX_PROMPTS = 64
"""Prompts of a request."""

MAX_CHOICES = 16
"""Texts for a prompt, ``n``."""

MAX_TEXTS = 128
"""Texts of a request: prompts times ``n``."""

MAX_MESSAGES = 1024
"""Messages of a chat."""

MAX_STOPS = 64
"""Stop strings."""

MAX_STOP_CHARACTERS = 256
"""Characters of a stop string."""

MAX_SALT_CHARACTERS = 256
"""Characters of a ``cache_salt``."""

MAX_STOP_TOKENS = 8
"""Token ids that end a text: those of ``stop_token_ids`` and the model's own."""

MAX_LOGPROBS = 20
"""Likeliest tokens that may be asked for."""


# --- what is asked for -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limits:
    """What the served model can do.

    Attributes:
        names: of the model, the first of which is the one it goes by.
        vocab_size: its token ids are below it.
        max_logprobs: most likeliest tokens that the engine reports.
        max_prediction: most tokens of a prediction that are copied in a step; 0: none may be given.
        capacity: most tokens of a text with its prompt; None: that is not known.
        has_chat: whether its tokenizer has a chat template.
        template_names: what the template reads; None: that is not known.
        eos_token_ids: its own end-of-sequence ids.
        default_sampling: what stands where a request states no temperature, top_k, top_p or min_p: the model's own where it
            has them, otherwise OpenAI's temperature 1, without truncation.

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
    template_names: frozenset[str] | None = None
    eos_token_ids: tuple[int, ...] = ()
    default_sampling: Sampling = Sampling(temperature=1.0)


@dataclass(frozen=True)
class TextRequest:
    """A completion or a chat completion that is asked for.

    Attributes:
        is_chat: which of the two.
        model: by which of its names.
        prompts: texts, token ids, or one chat.
        n: texts for each prompt.
        max_tokens: of each text; None: as many as fit.
        seed: None: any.
        params: the sampling parameters, but for ``max_tokens`` and ``seed``, which the request may leave open. What it leaves
            out of the distribution's is `Limits.default_sampling`.
        stop: strings before the first of which a text ends.
        logprobs: how many of the likeliest tokens to report for each token; None: nothing.
        echo: whether the prompt comes first.
        prediction: what the text is expected to be.
        stream: whether the answer comes piece by piece.
        include_usage: whether the stream ends with the usage.
        continuous_usage: whether each chunk of the stream has the usage so far.
        include_accepted: whether the stream tells which of its text was accepted from drafts.
        add_special_tokens: whether what begins a text is put before a prompt; not before a chat, whose template writes it.
        chat_template_kwargs: what a chat's template is given beside the messages.
        cache_salt: the prompt is shared only with requests that have the same one.
        ignored: names in the request that are not known, in its order.

    Examples:
        >>> from specjax.serving.http.requests import Limits, read_completion
        >>> limits = Limits(names=("tiny",), vocab_size=3072)
        >>> asked = read_completion(b'{"model": "tiny", "prompt": ["a", "b"], "n": 2}', limits)
        >>> asked.prompts, asked.n, asked.max_tokens
        (('a', 'b'), 2, 16)
    """

    is_chat: bool
    model: str
    prompts: tuple[Any, ...]
    n: int = 1
    max_tokens: int | None = None
    seed: int | None = None
    params: SamplingParams = SamplingParams(temperature=1.0)
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    echo: bool = False
    prediction: str | None = None
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    include_accepted: bool = False
    add_special_tokens: bool = True
    chat_template_kwargs: Settings = field(default_factory=dict)
    cache_salt: str = ""
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class TokenizeRequest:
    """A text or a chat of which the token ids are asked for.

    Attributes:
        prompt: it.
        param: what it was called in the request.
        add_special_tokens: as in `TextRequest`.
        chat_template_kwargs: as in `TextRequest`.
        ignored: names in the request that are not known, in its order.

    Examples:
        >>> from specjax.serving.http.requests import Limits, read_tokenize
        >>> read_tokenize(b'{"prompt": "import os"}', Limits(names=("tiny",), vocab_size=3072)).prompt
        'import os'
    """

    prompt: str | Messages
    param: str
    add_special_tokens: bool = True
    chat_template_kwargs: Settings = field(default_factory=dict)
    ignored: tuple[str, ...] = ()


# --- names and types -------------------------------------------------------------------------------------------------


class _Part(msgspec.Struct):
    """A part of a message's content. What else it has, such as ``cache_control``, is not read."""

    type: str
    text: str | None = None


class _Function(msgspec.Struct, omit_defaults=True):
    """The function of a call, whose arguments are the JSON text of an object, or the object."""

    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct, omit_defaults=True):
    """A call of a tool in a message of the assistant's."""

    function: _Function
    id: str | None = None
    type: str | None = None


class _ChatMessage(msgspec.Struct):
    """A message of a chat: what templates read of it. What else it has is not read."""

    role: str
    content: str | list[_Part] | None = None
    name: str | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    # Some clients have something else than a text under these names. That is not read.
    reasoning_content: Any = None
    reasoning: Any = None
    thinking: Any = None


class _Prediction(msgspec.Struct):
    """What a text is expected to be."""

    type: str
    content: str | list[_Part]


class _StreamOptions(msgspec.Struct):
    """What comes with a stream beside its text."""

    include_usage: bool | None = None
    include_accepted: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


_Tokens = Annotated[int, Meta(ge=0, le=LARGEST)]
_Share = Annotated[float, Meta(ge=0, le=1)]


class _TextFields(msgspec.Struct, kw_only=True):
    """The parameters that completions and chats have in common, each with its type and its bounds.

    null is as if left out, but for the model. Of the two names of the limit only one counts: its bounds are checked then.
    """

    model: str | UnsetType = UNSET
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    best_of: int | None = None
    min_tokens: _Tokens | None = None
    temperature: Annotated[float, Meta(ge=0, le=LARGEST_FLOAT)] | None = None
    top_p: _Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=LARGEST, description=f"from 0 to {LARGEST}")] | None = None  # -1 is 0, as in vLLM
    min_p: _Share | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1, description="from -2**63 to 2**63 - 1")] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = None
    add_special_tokens: bool | None = None
    prediction: _Prediction | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = None
    stream_options: _StreamOptions | None = None


class _CompletionFields(_TextFields, kw_only=True):
    """The parameters of ``/v1/completions``."""

    prompt: str | list[int | str | list[int]] | UnsetType = UNSET
    logprobs: int | None = None
    echo: bool | None = None


class _ChatFields(_TextFields, kw_only=True):
    """The parameters of ``/v1/chat/completions``."""

    messages: list[_ChatMessage] | UnsetType = UNSET
    chat_template_kwargs: dict[str, Any] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class _TokenizeFields(msgspec.Struct, kw_only=True):
    """The parameters of ``/tokenize``."""

    model: str | UnsetType = UNSET
    prompt: str | UnsetType = UNSET
    messages: list[_ChatMessage] | UnsetType = UNSET
    add_special_tokens: bool | None = None
    chat_template_kwargs: dict[str, Any] | UnsetType | None = UNSET


_OF_ANOTHER_PATH: Mapping[str, tuple[Any, ...]] = {"prompt": (), "echo": (False,), "messages": (), "top_logprobs": (0,)}
"""Parameters of either completions or chats: the values with which they change nothing in the other, beside null."""

_OBJECTS: Mapping[str, Any] = {"stream_options": _StreamOptions, "prediction": _Prediction}
"""Parameters with names in them."""

UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "logit_bias": ({},),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "guided_json": (),
    "guided_regex": ("",),
    "guided_choice": ([],),
    "guided_grammar": ("",),
    "guided_decoding_backend": ("",),
    "guided_whitespace_pattern": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "truncate_prompt_tokens": (),
    "prompt_logprobs": (),
    "return_tokens_as_token_ids": (False,),
    "return_token_ids": (False,),
    "return_token_strs": (False,),
    "chat_template": ("",),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": ("medium",),
    "moderation": (),
    "logits_processors": ([],),
    "prompt_embeds": (),
    "mm_processor_kwargs": ({},),
    "priority": (0,),
    "top_a": (0,),
    "typical_p": (1,),
    "mirostat_mode": (0,),
    "dry_multiplier": (0,),
    "xtc_probability": (0,),
}
"""Parameters that would change the answer, or when it comes, and are not supported: the values with which they change nothing,
beside null."""

IGNORED = frozenset(
    [
        "user",
        "store",
        "metadata",
        "service_tier",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "request_id",
    ]
)
"""Parameters that do not change the text: they are taken, and not read."""


# --- reading ---------------------------------------------------------------------------------------------------------


def read_completion(body: bytes, limits: Limits) -> TextRequest:
    """The body of ``/v1/completions``.

    Raises:
        RequestError: it cannot be used; names the parameter and its value.

    Examples:
        >>> from specjax.serving.http.requests import Limits, read_completion
        >>> limits = Limits(names=("tiny",), vocab_size=3072)
        >>> read_completion(b'{"model": "tiny", "prompt": "a", "n": 0}', limits)
        Traceback (most recent call last):
        specjax.serving.http.errors.RequestError: n=0: must be from 1 to 16
    """
    fields, ignored = _read(body, _CompletionFields, limits)
    prompts = _prompts(fields.prompt, limits)
    logprobs = None if fields.logprobs is None else _likeliest("logprobs", fields.logprobs, limits)
    echo = bool(fields.echo)
    name, max_tokens = _max_tokens(fields, minimum=0)
    max_tokens = 16 if max_tokens is None else max_tokens
    if max_tokens == 0 and not echo:
        raise RequestError(400, f"{name}=0: only with echo, for the prompt's own logprobs; give at least 1", param=name)
    if max_tokens == 0 and logprobs is None:
        raise RequestError(400, f"{name}=0: with echo, give logprobs too; there is nothing else to compute", param=name)
    return _request(
        fields,
        limits,
        is_chat=False,
        prompts=prompts,
        max_tokens=max_tokens,
        logprobs=logprobs,
        echo=echo,
        add_special_tokens=_or(fields.add_special_tokens, True),
        ignored=ignored,
    )


def read_chat(body: bytes, limits: Limits) -> TextRequest:
    """The body of ``/v1/chat/completions``.

    Raises:
        RequestError: it cannot be used; names the parameter and its value.

    Examples:
        >>> from specjax.serving.http.requests import Limits, read_chat
        >>> limits = Limits(names=("tiny",), vocab_size=3072)
        >>> body = b'{"model": "tiny", "messages": [{"role": "user", "content": "Hello"}]}'
        >>> asked = read_chat(body, limits)
        >>> asked.prompts, asked.max_tokens
        (([{'role': 'user', 'content': 'Hello'}],), None)
    """
    fields, ignored = _read(body, _ChatFields, limits)
    prompts = (_messages(fields.messages, limits),)
    likeliest, logprobs = _or(fields.top_logprobs, 0), None
    if fields.logprobs:
        logprobs = _likeliest("top_logprobs", likeliest, limits)
    elif likeliest:
        raise RequestError(400, f"top_logprobs={_shown(likeliest)}: needs logprobs=true", param="top_logprobs")
    if fields.add_special_tokens:
        message = "add_special_tokens=true: a chat's template writes them; leave it out, or give false"
        raise RequestError(400, message, param="add_special_tokens", code="unsupported_parameter")
    settings, unread = _template_settings(fields.chat_template_kwargs, limits)
    return _request(
        fields,
        limits,
        is_chat=True,
        prompts=prompts,
        max_tokens=_max_tokens(fields, minimum=1)[1],
        logprobs=logprobs,
        chat_template_kwargs=settings,
        ignored=(*ignored, *unread),
    )


def read_tokenize(body: bytes, limits: Limits) -> TokenizeRequest:
    """The body of ``/tokenize``: a prompt or messages.

    Raises:
        RequestError: it cannot be used; names the parameter and its value.

    Examples:
        >>> from specjax.serving.http.requests import Limits, read_tokenize
        >>> limits = Limits(names=("tiny",), vocab_size=3072, has_chat=False)
        >>> read_tokenize(b'{"messages": []}', limits)
        Traceback (most recent call last):
        specjax.serving.http.errors.RequestError: messages: this model has no chat template; give text to /v1/completions
    """
    fields, ignored = _read(body, _TokenizeFields, limits)
    given = fields.chat_template_kwargs
    if fields.messages is not UNSET and fields.prompt is UNSET:
        settings, unread = _template_settings(None if given is UNSET else given, limits)
        return TokenizeRequest(
            _messages(fields.messages, limits), "messages", chat_template_kwargs=settings, ignored=(*ignored, *unread)
        )
    if fields.prompt is UNSET or fields.messages is not UNSET:
        raise RequestError(400, "prompt: give either prompt or messages", param="prompt")
    if given is not UNSET:
        ignored = (*ignored, "chat_template_kwargs")
    has_special = _or(fields.add_special_tokens, True)
    return TokenizeRequest(_text("prompt", fields.prompt), "prompt", has_special, ignored=ignored)


_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_DECODERS: dict[Any, Callable[[Any], Any]] = {}

Fields = TypeVar("Fields", _CompletionFields, _ChatFields, _TokenizeFields)


def _read(body: bytes, kind: type[Fields], limits: Limits) -> tuple[Fields, tuple[str, ...]]:
    """Return the parameters of a body, and the names in it that are not known.

    The model is checked, too: nothing else is said about another model.
    """
    try:
        raw = _NAMES.decode(body)
    except msgspec.ValidationError:
        raise RequestError(400, "the body must be a JSON object") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is no JSON: {_reason(error, body)}") from None
    types, is_text = _types(kind), issubclass(kind, _TextFields)
    ignored = []
    for name, value in raw.items():
        if name in types or name in IGNORED:
            continue
        if name in UNSUPPORTED:
            _check_neutral(name, value, UNSUPPORTED[name], "not supported")
        elif name in _OF_ANOTHER_PATH and is_text:
            _check_neutral(name, value, _OF_ANOTHER_PATH[name], "is of another path's")
        else:
            ignored.append(name)
    _check_counts(raw, limits)
    model = _value("model", raw["model"], types["model"]) if "model" in raw else UNSET
    _check_model(model, limits, may_be_left_out=not is_text)
    fields = kind(**{name: _value(name, raw[name], types[name]) for name in types if name in raw})
    for name, inner_kind in _OBJECTS.items():
        if getattr(fields, name, None) is not None:
            ignored += [f"{name}.{inner}" for inner in _NAMES.decode(raw[name]) if inner not in inner_kind.__struct_fields__]
    return fields, tuple(ignored)


def _check_model(model: Any, limits: Limits, *, may_be_left_out: bool) -> None:
    """Refuse a request for another model, before anything else in it is looked at."""
    if model is UNSET:
        if may_be_left_out:
            return
        raise RequestError(400, f"model: missing; give {limits.names[0]!r}", param="model")
    if model not in limits.names:
        message = f"model={_shown(model)}: not served here; the model is {limits.names[0]!r}"
        raise RequestError(404, message, param="model", code="model_not_found")


@cache
def _types(kind: type) -> dict[str, Any]:
    """Return the type of each field, with its bounds."""
    return get_type_hints(kind, include_extras=True)


def _check_counts(raw: Mapping[str, msgspec.Raw], limits: Limits) -> None:
    """Refuse lists of ids that are far too long, by their commas, before anything is made of them."""
    for name in ("prompt", "stop_token_ids"):
        text = bytes(raw.get(name, b""))
        first = text[1:].lstrip()[:1]
        if not (text.startswith(b"[") and first and first in b"[-0123456789"):
            continue
        maximum = MAX_TEXTS
        if name == "prompt":
            maximum = math.inf if limits.capacity is None else limits.capacity * (MAX_PROMPTS if first == b"[" else 1)
        if (count := text.count(b",") + 1) > maximum:
            code = "context_length_exceeded" if name == "prompt" else None
            raise RequestError(400, f"{name}: {count} ids, and no more than {maximum} can be used", param=name, code=code)


def _value(name: str, raw: msgspec.Raw, kind: Any) -> Any:
    """Return a parameter's value, which must be of a ``kind`` and within its bounds."""
    try:
        return _decode(raw, kind)
    except (ValueError, RecursionError) as error:
        reason = _reason(error, bytes(raw))
    bounds = next((meta for each in get_args(kind) for meta in getattr(each, "__metadata__", ())), None)
    if bounds is not None and (value := _unbounded(raw, kind)) is not None:
        raise RequestError(400, f"{name}={_shown(value)}: {_range(bounds, value)}", param=name)
    raise RequestError(400, f"{name}: {reason}", param=name)


def _unbounded(raw: msgspec.Raw, kind: Any) -> Any:
    """Return the value of a field that may be null, whatever its bounds; None: it is of another type."""
    bare = Union[tuple(getattr(each, "__origin__", each) for each in get_args(kind))]  # noqa: UP007 - made at run time
    try:
        return _decode(raw, bare)
    except (ValueError, RecursionError):
        return None


def _range(bounds: Meta, value: Any) -> str:
    """Return what is wrong with a value beyond its bounds."""
    if isinstance(value, str):
        return f"{len(value)} characters; give from {bounds.min_length} to {bounds.max_length}"
    minimum, maximum = (str(bound) if isinstance(bound, int) else f"{bound:g}" for bound in (bounds.ge, bounds.le))
    return f"must be {bounds.description or f'from {minimum} to {maximum}'}"


def _decode(raw: msgspec.Raw, kind: Any) -> Any:
    if kind not in _DECODERS:
        _DECODERS[kind] = msgspec.json.Decoder(kind).decode
    return _DECODERS[kind](raw)


def _check_neutral(name: str, raw: msgspec.Raw, neutral: Sequence[Any], reason: str) -> None:
    """Refuse a parameter for a ``reason``, unless it has a value with which it changes nothing."""
    value = _value(name, raw, Any)
    if value is None or any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in neutral):
        return
    allowed = " or ".join(msgspec.json.encode(each).decode() for each in (*neutral, None))
    message = f"{name}={_shown(value)}: {reason}; leave it out, or give {allowed}"
    raise RequestError(400, message, param=name, code="unsupported_parameter")


# An escape of a JSON string, and half of a pair that stands for a character beyond the first 65,536.
_ESCAPES = re.compile(rb"\\(?:u(?P<code>[0-9a-fA-F]{4})|.)", re.DOTALL)
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)


def _lone_surrogate(body: bytes) -> str | None:
    """Return the first escape in a body that is half of a pair without the other half; None: there is none."""
    before: re.Match[bytes] | None = None  # a first half
    for escape in _ESCAPES.finditer(body):
        code = int(escape["code"] or b"0", 16)
        if before is not None:
            if code in _LOW and escape.start() == before.end():
                before = None
                continue
            break
        if code in _LOW:
            before = escape
            break
        before = escape if code in _HIGH else None
    return None if before is None else before[0].decode()


def _reason(error: BaseException, body: bytes) -> str:
    """What a decoder says of a body, or a part of one, in a short line of text that is Unicode."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8 ({error.reason} at byte {error.start})"
    if not isinstance(error, msgspec.ValidationError) and (half := _lone_surrogate(body)) is not None:
        return f"{half} is half of a character: its other half is missing"  # the decoder calls that truncated, or malformed
    return str(error)[:200].encode(errors="replace").decode()


_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = 80


def _shown(value: Any) -> str:
    return _BRIEF.repr(value)


# --- checks ----------------------------------------------------------------------------------------------------------


def _request(
    fields: _CompletionFields | _ChatFields, limits: Limits, *, prompts: tuple[Any, ...], max_tokens: int | None, **others: Any
) -> TextRequest:
    """Return the request, whose fields that completions and chats have in common are checked here."""
    n = _or(fields.n, 1)
    if n * len(prompts) > MAX_TEXTS:
        raise RequestError(
            400, f"n={n}: with {len(prompts)} prompts more than {MAX_TEXTS} texts; ask for fewer at a time", param="n"
        )
    if fields.best_of not in (None, n):
        raise RequestError(400, f"best_of={fields.best_of}: not supported; leave it out, or give n={n}", param="best_of")
    min_tokens = _or(fields.min_tokens, 0)
    if max_tokens is not None and min_tokens > max_tokens:
        raise RequestError(400, f"min_tokens={min_tokens}: more than max_tokens={max_tokens}", param="min_tokens")
    stream = bool(fields.stream)
    if fields.stream_options is not None and not stream:
        raise RequestError(400, "stream_options: only with stream=true; leave it out", param="stream_options")
    options = fields.stream_options or _StreamOptions()
    seed = None if fields.seed is None else fields.seed & (2**63 - 1)  # -1 is 2**63 - 1, -2 is 2**63 - 2 and so on
    stop, stop_token_ids = _stop(fields.stop), _stop_token_ids(fields, limits)
    try:
        params = SamplingParams(
            **vars(_sampling(fields, limits)), max_new_tokens=LARGEST, min_new_tokens=min_tokens, eos_token_ids=stop_token_ids
        )
    except InputError as error:  # of the defaults: what a request states has its bounds
        raise RequestError(400, str(error)) from None
    return TextRequest(
        model=str(fields.model),
        prompts=prompts,
        n=n,
        max_tokens=max_tokens,
        seed=seed,
        params=params,
        stop=stop,
        prediction=_prediction(fields.prediction, limits),
        stream=stream,
        include_usage=bool(options.include_usage),
        continuous_usage=bool(options.continuous_usage_stats),
        include_accepted=bool(options.include_accepted),
        cache_salt=fields.cache_salt or "",
        **others,
    )


def _sampling(fields: _TextFields, limits: Limits) -> Sampling:
    """Return the distribution's parameters: what the request states, and the defaults."""
    stated = {name: getattr(fields, name, None) for name in SAMPLING_NAMES}
    if stated["top_k"] == -1:
        stated["top_k"] = 0
    if stated["top_p"] == 0:
        raise RequestError(400, "top_p=0: must be above 0; for the likeliest token give temperature 0", param="top_p")
    return limits.default_sampling.with_explicit(**stated)


def _max_tokens(fields: _TextFields, minimum: int) -> tuple[str, int | None]:
    """Return how many tokens are asked for, None: it is not said; and under which of two names. The newer one goes first."""
    name = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    count = getattr(fields, name)
    return name, None if count is None else _whole(name, count, minimum, LARGEST)


def _whole(name: str, value: int, minimum: int, maximum: int) -> int:
    """Return a whole number that is within bounds which its field does not know."""
    if not minimum <= value <= maximum:
        raise RequestError(400, f"{name}={_shown(value)}: must be from {minimum} to {maximum}", param=name)
    return value


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def _likeliest(name: str, count: int, limits: Limits) -> int:
    """Return the checked number of likeliest tokens whose log-probabilities are asked for."""
    if limits.max_logprobs < 1:
        raise RequestError(400, "logprobs: this server gives none (--max-logprobs 0); leave it out", param="logprobs")
    return _whole(name, count, 0, limits.max_logprobs)


def _stop(given: str | list[str] | None) -> tuple[str, ...]:
    """Return the stop strings, checked."""
    stop = [given] if isinstance(given, str) else given or []
    if len(stop) > MAX_STOPS:
        raise RequestError(400, f"stop: {len(stop)} strings; give at most {MAX_STOPS}", param="stop")
    for each in stop:
        if not 1 <= len(each) <= MAX_STOP_CHARACTERS:
            message = f"stop={_shown(each)}: {len(each)} characters; give from 1 to {MAX_STOP_CHARACTERS}"
            raise RequestError(400, message, param="stop")
    return tuple(stop)


def _stop_token_ids(fields: _TextFields, limits: Limits) -> tuple[int, ...] | None:
    """Return the ids that end a text; None: the model's own."""
    asked = fields.stop_token_ids or []
    own = () if fields.ignore_eos else limits.eos_token_ids
    if not asked and own:
        return None
    if len(asked) > MAX_TEXTS:  # the same id may be named twice, and not a million times
        raise RequestError(400, f"stop_token_ids: {len(asked)} ids; give at most {MAX_STOP_TOKENS}", param="stop_token_ids")
    _check_tokens("stop_token_ids", asked, limits)
    ids = tuple(dict.fromkeys((*own, *asked)))
    if len(ids) > MAX_STOP_TOKENS:
        message = (
            f"stop_token_ids: {len(ids)} ids, {len(own)} of the model among them; give at most {MAX_STOP_TOKENS - len(own)}"
        )
        raise RequestError(400, message, param="stop_token_ids")
    return ids


def _prediction(prediction: _Prediction | None, limits: Limits) -> str | None:
    """Return the text that a request expects, checked."""
    if prediction is None:
        return None
    if prediction.type != "content":
        raise RequestError(400, f"prediction.type={_shown(prediction.type)}: must be 'content'", param="prediction")
    if limits.max_prediction < 1:
        raise RequestError(400, "prediction: this server takes none (--max-prediction 0); leave it out", param="prediction")
    return _joined("prediction", prediction.content) or None


def _prompts(given: Any, limits: Limits) -> tuple[str | list[int], ...]:
    """Return one or several prompts, each text or token ids."""
    if given is UNSET:
        raise RequestError(400, "prompt: missing; give text, token ids, or a list of either", param="prompt")
    if isinstance(given, str):
        return (_text("prompt", given),)
    kinds = set(map(type, given))
    if not given or len(kinds) > 1:
        raise RequestError(
            400, "prompt: give text, token ids, a list of texts, or a list of lists of token ids", param="prompt"
        )
    if kinds == {int}:
        _check_tokens("prompt", given, limits)
        return (given,)
    if len(given) > MAX_PROMPTS:
        raise RequestError(400, f"prompt: {len(given)} prompts; give at most {MAX_PROMPTS}", param="prompt")
    for each in given:
        if isinstance(each, str):
            _text("prompt", each)
        elif not each:
            raise RequestError(400, "prompt=[]: empty; give at least one token id", param="prompt")
        else:
            _check_tokens("prompt", each, limits)
    return tuple(given)


def _text(name: str, text: str) -> str:
    if not text:
        raise RequestError(400, f"{name}='': empty; give at least one character", param=name)
    return text


def _check_tokens(name: str, tokens: Sequence[int], limits: Limits) -> None:
    if tokens and not 0 <= min(tokens) <= max(tokens) < limits.vocab_size:
        wrong = next(token for token in tokens if not 0 <= token < limits.vocab_size)
        message = f"{name}: token id {_shown(wrong)} is none; the model's are from 0 to {limits.vocab_size - 1}"
        raise RequestError(400, message, param=name)


def _messages(messages: list[_ChatMessage] | UnsetType, limits: Limits) -> Messages:
    """Return the chat. What roles there are, and their order, is for the model's template to say."""
    if not limits.has_chat:
        message = "messages: this model has no chat template; give text to /v1/completions"
        raise RequestError(400, message, param="messages", code="no_chat_template")
    if messages is UNSET or not messages:
        raise RequestError(400, "messages: missing or empty; give at least one message", param="messages")
    if len(messages) > MAX_MESSAGES:
        raise RequestError(400, f"messages: {len(messages)}; give at most {MAX_MESSAGES}", param="messages")
    return [_message(index, each) for index, each in enumerate(messages)]


def _template_settings(given: dict[str, Any] | None, limits: Limits) -> tuple[dict[str, Any], list[str]]:
    """Return what a chat's template is given beside the messages, and what it does not read of that: this changes nothing."""
    try:
        settings = read_settings(given or {})
    except InputError as error:
        raise RequestError(400, str(error), param="chat_template_kwargs", code="unsupported_parameter") from None
    known = settings.keys() if limits.template_names is None else limits.template_names
    return settings, [f"chat_template_kwargs.{name}" for name in settings if name not in known]


# Only these may say nothing: an assistant that calls a tool, for example, and a tool that gives nothing back.
_MAY_BE_SILENT = ("assistant", "tool", "function")


def _message(index: int, given: _ChatMessage) -> dict[str, Any]:
    """Return a message as `specjax.text.encode_chat` takes it, without what is null."""
    if given.content is None and given.role not in _MAY_BE_SILENT:
        message = f"messages[{index}].content: missing or null; give text, or parts of type 'text'"
        raise RequestError(400, message, param="messages")
    made: dict[str, Any] = {"role": given.role}
    made["content"] = None if given.content is None else _joined("messages", given.content)
    for name in ("name", "tool_call_id"):
        if (value := getattr(given, name)) is not None:
            made[name] = value
    if given.tool_calls:
        made["tool_calls"] = msgspec.to_builtins(given.tool_calls)
    if given.function_call is not None:
        made["function_call"] = msgspec.to_builtins(given.function_call)
    for name in ("reasoning_content", "reasoning", "thinking"):
        if isinstance(value := getattr(given, name), str) and value:
            made[name] = value
    return made


def _joined(name: str, content: str | list[_Part]) -> str:
    """The text of a content, which may come in parts: a line each."""
    if isinstance(content, str):
        return content
    for part in content:
        if part.type != "text":
            raise RequestError(400, f"{name}: a part of type {_shown(part.type)}; give parts of type 'text'", param=name)
        if part.text is None:
            raise RequestError(400, f"{name}: a part without text; give its text", param=name)
    return "\n".join(part.text or "" for part in content)
