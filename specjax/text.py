"""Tokenizers, prompts as token ids, and generated tokens as text."""

import json
import logging
import re
import shutil
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import lru_cache, partial
from itertools import accumulate, takewhile
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.message_tags import ChatText, chat_text
from specjax.plain_text import check_unicode, encode_with_plain
from specjax.progress import waiting
from specjax.templates import (
    ChatEnd,
    Messages,
    Render,
    Settings,
    answer_spans,
    check_is_chat,
    read_settings,
    renderer,
    settings_of,
    takes_tools,
    without_settings,
)


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


# Only tokenizers of transformers are used here, and they need no PyTorch. Without this filter every
# program would print the warning of the import. Other messages pass; commands suppress more of them
# (specjax/cli/silence.py).
logging.getLogger("transformers").addFilter(_is_not_about_torch)

# --- tokenizers -----------------------------------------------------------------------------------

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def has_tokenizer(directory: Path) -> bool:
    """Return True if a checkpoint directory has a tokenizer.

    Examples:
        >>> from specjax.assets import embedded
        >>> specjax.text.has_tokenizer(embedded("target"))
        True
    """
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


_WITH_TOKENIZER = (
    *_TOKENIZER_FILES,
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
)
_WITH_TOKENIZER += ("chat_template.jinja", "chat_template.json")


def copy_tokenizer(directory: Path, into: Path) -> None:
    """Copy a checkpoint's tokenizer, with its chat template, to the directory ``into``.

    Raises:
        InputError: the checkpoint has no tokenizer.

    Examples:
        >>> from pathlib import Path
        >>> from specjax.assets import embedded
        >>> Path("copy").mkdir()
        >>> specjax.text.copy_tokenizer(embedded("target"), Path("copy"))
        >>> len(specjax.text.load_tokenizer(Path("copy")))
        3072
    """
    _check_has_tokenizer(directory)
    for name in _WITH_TOKENIZER:
        if (directory / name).is_file():
            shutil.copyfile(directory / name, into / name)


def _check_has_tokenizer(directory: Path) -> None:
    if not has_tokenizer(directory):
        raise InputError(
            f"{directory} has no tokenizer (tokenizer.json): copy the one the model was trained"
            " with there"
        )


def load_tokenizer(directory: Path) -> Any:
    """Load the tokenizer of a checkpoint with transformers, without running code of the checkpoint.

    The tokenizer adds a begin token and an end token to texts if ``add_bos_token`` and
    ``add_eos_token`` in ``tokenizer_config.json`` say so.

    Raises:
        InputError: the tokenizer is missing, is damaged, exists only as code, or cannot add these
            tokens.

    Examples:
        >>> from specjax.assets import embedded
        >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
        >>> len(tokenizer)
        3072
    """
    _check_has_tokenizer(directory)
    with waiting("loading the tokenizers of transformers"):  # for a second or two
        from transformers import AutoTokenizer

    try:
        # Without this argument, transformers asks on stdin whether to run the checkpoint's code.
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    # Damaged files cause errors of many types in transformers and tokenizers.
    except Exception as error:
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{directory}: its tokenizer is code, which is never run: give a tokenizer whose"
                " tokenizer_config.json names a class of transformers"
            ) from None
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(
            f"{_damaged_file(directory)}: cannot be read as a tokenizer ({reason}); download the"
            " files again"
        ) from None
    _add_what_is_stated(tokenizer, directory / "tokenizer_config.json")
    return tokenizer


def _add_what_is_stated(tokenizer: Any, config: Path) -> None:
    """Apply ``add_bos_token`` and ``add_eos_token`` of a tokenizer's configuration.

    If there is a tokenizer.json, transformers 5 ignores them. DeepSeek-V3's tokenizer.json adds
    nothing, although its configuration asks for a begin token. Without that token, prompts would
    differ from all texts of the training.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None or not config.is_file():
        return  # without a tokenizer.json, transformers reads the configuration itself
    stated = json.loads(config.read_text(encoding="utf-8"))
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    tokens = list(tokenizer("a")["input_ids"])
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    adds_bos = len(tokens) > len(plain) and tokens[0] == bos
    adds_eos = len(tokens) > len(plain) + adds_bos and tokens[-1] == eos
    options = {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
    for name, token in (("add_bos_token", bos), ("add_eos_token", eos)):
        if isinstance(stated.get(name), bool) and token is not None:
            options[name] = stated[name]
    if list(options.values()) == [adds_bos, adds_eos]:
        return
    if len(tokens) > len(plain) + adds_bos + adds_eos:
        listed = ", ".join(
            f"{name}={json.dumps(stated[name])}" for name in options if name in stated
        )
        raise InputError(
            f"{config}: {listed}, but tokenizer.json adds other tokens to a text: make the two"
            " agree"
        )
    for name, value in options.items():
        setattr(tokenizer, name, value)


def _damaged_file(directory: Path) -> Path:
    """Return the tokenizer's file that is not a JSON object, or else its first file."""
    for file in sorted(directory.glob("*token*.json")):
        try:
            if not isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
                return file
        except (ValueError, OSError, RecursionError):
            return file
    return next(directory / name for name in _TOKENIZER_FILES if (directory / name).is_file())


def check_same_tokenizer(target: Any, drafter: Any) -> None:
    """Refuse, with an InputError, a drafter with other tokens than the target; see `difference`.

    Examples:
        >>> from specjax.assets import embedded
        >>> from specjax.text import check_same_tokenizer, load_tokenizer
        >>> target_tokenizer = load_tokenizer(embedded("target"))
        >>> check_same_tokenizer(target_tokenizer, load_tokenizer(embedded("draft")))
    """
    if mismatch := difference(target, drafter):
        raise InputError(
            f"tokenizers: {mismatch}: a drafter must share the target's tokenizer; take one of its"
            " family"
        )


def difference(target: Any, drafter: Any) -> str | None:
    """Describe the first difference between two tokenizers' tokens; None if they agree.

    Equal sizes are not enough, because two vocabularies may number their tokens differently. Every
    id that both have must stand for the same token, and both must have the same begin and end
    tokens. One of them may have more ids at its end.

    Examples:
        >>> from specjax.assets import embedded
        >>> from specjax.text import difference, load_tokenizer
        >>> target_tokenizer = load_tokenizer(embedded("target"))
        >>> difference(target_tokenizer, load_tokenizer(embedded("draft"))) is None
        True
    """
    target_ids, draft_ids = (tokenizer.get_vocab() for tokenizer in (target, drafter))
    here, there = (
        {i: token for token, i in vocabulary.items()} for vocabulary in (target_ids, draft_ids)
    )
    for i in sorted(here.keys() | there.keys()):
        target_token, draft_token = here.get(i), there.get(i)
        if target_token is None or draft_token is None:  # compare the ids of the token in both
            token = target_token if draft_token is None else draft_token
            if target_ids.get(token, i) == draft_ids.get(token, i):
                continue
        elif target_token == draft_token:
            continue
        return (
            f"id {i} is {_shown(target_token)} for the target and {_shown(draft_token)} for the"
            " drafter"
        )
    for role in ("bos_token", "eos_token"):
        target_token, draft_token = getattr(target, role, None), getattr(drafter, role, None)
        if target_token is not None and draft_token is not None and target_token != draft_token:
            ours = f"{target_token!r} (id {target_ids.get(target_token)})"
            return (
                f"{role} is {ours} for the target and {draft_token!r} (id"
                f" {draft_ids.get(draft_token)}) for the drafter"
            )
    return None


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)


# --- prompts --------------------------------------------------------------------------------------


def encode(
    tokenizer: Any, prompt: str, chat: bool = False, chat_template_kwargs: Settings | None = None
) -> list[int]:
    """Return the token ids of a prompt.

    With ``chat``, the prompt is the user's turn in the model's chat template, see `encode_chat`.
    Only then may there be ``chat_template_kwargs``. If the prompt begins with the begin token, no
    second one is added.

    Raises:
        InputError: the prompt is empty or not valid Unicode, the tokenizer has no chat template, or
            there are variables for a template that is not used.

    Examples:
        >>> from specjax.assets import embedded
        >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
        >>> tokens = specjax.text.encode(tokenizer, "import os")
        >>> tokenizer.decode(tokens, skip_special_tokens=True)
        'import os'
    """
    if not prompt:
        raise InputError("prompt='': empty; give at least one character")
    if chat:
        return encode_chat(tokenizer, [{"role": "user", "content": prompt}], chat_template_kwargs)
    check_is_chat(False, "", chat_template_kwargs or {})
    check_unicode(prompt)
    # Without a warning about the length, which the models check.
    tokens = list(tokenizer(prompt, verbose=False)["input_ids"])
    begin = getattr(tokenizer, "bos_token_id", None)
    is_twice = (
        begin is not None
        and tokens[:2] == [begin, begin]
        and prompt.startswith(str(tokenizer.bos_token))
    )
    return tokens[1:] if is_twice else tokens


def encode_continuation(tokenizer: Any, continuation: str) -> list[int]:
    """Return the token ids of a text that follows another text, without a begin token.

    Raises:
        InputError: the text is not valid Unicode.

    Examples:
        >>> from specjax.assets import embedded
        >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
        >>> tokens = specjax.text.encode_continuation(tokenizer, "import os")
        >>> tokenizer.decode(tokens)
        'import os'
    """
    check_unicode(continuation)
    return list(tokenizer(continuation, add_special_tokens=False, verbose=False)["input_ids"])


def count_tokens(tokenizer: Any, text: str) -> int:
    """Return the number of tokens of a text that follows another text.

    It is the length of `encode_continuation`, in half of the time.

    Examples:
        >>> from specjax.text import count_tokens
        >>> count_tokens(specjax.load("embedded").tokenizer, "import os")
        2
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or backend.truncation or backend.padding:
        return len(encode_continuation(tokenizer, text))
    (encoding,) = backend.encode_batch_fast([text], add_special_tokens=False)
    return len(encoding)


def beginning_of_texts(tokenizer: Any) -> list[int]:
    """Return the tokens that a tokenizer writes before a text, such as a begin token.

    Examples:
        >>> from specjax.text import beginning_of_texts
        >>> beginning_of_texts(specjax.load("embedded").tokenizer)
        [0]
    """
    alone = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    starts = range(len(whole) - len(alone) + 1)
    start = next((it for it in starts if whole[it : it + len(alone)] == alone), 0)
    return whole[:start]


def encode_chat(
    tokenizer: Any,
    messages: Messages,
    chat_template_kwargs: Settings | None = None,
    end: ChatEnd = "answer",
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Return the token ids of a chat in the model's template.

    If the template does not know the role ``developer``, these messages become system messages.
    ``chat_template_kwargs`` are variables for the template. They override those that the tokenizer
    has for all chats (`specjax.templates.with_template`). ``end`` is where the text ends: by
    default where the answer begins. ``tools`` are declarations of tools, as in OpenAI's API.

    Text of messages and tools that spells a special token is text, and no token. Tags that the
    tokenizer does not call special, such as Qwen's ``<tool_call>``, are tokens in messages of the
    system, developers and assistants, and text everywhere else.

    Raises:
        InputError: there are no messages, the tokenizer has no chat template, or the template
            refuses the messages or the variables, leaves out a message, or takes no tools.

    Examples:
        >>> from specjax.assets import embedded
        >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
        >>> messages = [{"role": "user", "content": "Hello"}]
        >>> specjax.text.encode_chat(tokenizer, messages)  # the embedded target is no chat model
        Traceback (most recent call last):
        specjax.errors.InputError: chat=True: this tokenizer has no chat template; ...
        >>> of_message = "{{ message.role }}: {{ message.content }}"
        >>> tokenizer.chat_template = f"{{% for message in messages %}}{of_message}{{% endfor %}}"
        >>> tokenizer.decode(specjax.text.encode_chat(tokenizer, messages))
        'user: Hello'
    """
    _check_chat(tokenizer, messages)
    _check_tools(tokenizer, tools)
    settings = read_settings(chat_template_kwargs or {})
    rendered = _rendered(tokenizer, messages, settings, end, tools)
    if rendered.spans:
        return encode_with_plain(tokenizer, rendered.text, rendered.spans)[0]
    return list(tokenizer(rendered.text, add_special_tokens=False, verbose=False)["input_ids"])


def encode_conversation(
    tokenizer: Any,
    messages: Messages,
    chat_template_kwargs: Settings | None = None,
    tools: Sequence[Mapping[str, Any]] = (),
    not_counted: Collection[int] = (),
) -> tuple[list[int], np.ndarray]:
    """Return the token ids of a chat with its answers, and which of them the assistant writes.

    The ids are those of `encode_chat` with ``end="messages"``. The template must mark what the
    assistant writes, with ``{% generation %}`` and ``{% endgeneration %}``. A token counts if a
    part of its text does.

    Args:
        tokenizer: a tokenizer of transformers, with a tokenizer.json.
        messages: the chat.
        chat_template_kwargs: variables for the template, as for `encode_chat`.
        tools: declarations of tools, as for `encode_chat`.
        not_counted: the indices of assistant messages whose tokens do not count.

    Returns:
        The token ids, and ``[tokens]`` bool which of them the assistant writes.

    Raises:
        InputError: as `encode_chat`; or some messages do not count, and the template does not mark
            one part for each message of the assistant.

    Examples:
        >>> from specjax.text import encode_conversation
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> marked = "{% generation %}{{ m.content }}{% endgeneration %}"
        >>> tokenizer.chat_template = "{% for m in messages %}> " + marked + "{% endfor %}"
        >>> messages = [{"role": "assistant", "content": "Hello"}]
        >>> ids, is_answer = encode_conversation(tokenizer, messages)
        >>> tokenizer.decode(ids), tokenizer.decode(np.array(ids)[is_answer])
        ('> Hello', ' Hello')
    """
    _check_chat(tokenizer, messages)
    _check_tools(tokenizer, tools)
    settings = read_settings(chat_template_kwargs or {})
    rendered = _rendered(tokenizer, messages, settings, "messages", tools)
    answers = rendered.places(answer_spans(tokenizer, rendered.messages, settings, tools or None))
    if not_counted:
        answers = _counted(answers, messages, not_counted)
    ids, places = encode_with_plain(tokenizer, rendered.text, rendered.spans)
    begins, ends = np.array(places).reshape(-1, 2).T
    # The begins and ends of the answers, with an answer after the text, so that each token has a
    # next one.
    starts, stops = np.array([*answers, (len(rendered.text), len(rendered.text))]).T
    next_answer = np.searchsorted(stops[:-1], begins, side="right")
    return ids, starts[next_answer] < ends


def _check_chat(tokenizer: Any, messages: Messages) -> None:
    if not messages:
        raise InputError("messages=[]: empty; give at least one message")
    if not tokenizer.chat_template:
        raise InputError(
            "chat=True: this tokenizer has no chat template; leave --chat out, or give the prompt"
            " as text"
        )


def _check_tools(tokenizer: Any, tools: Sequence[Mapping[str, Any]]) -> None:
    if tools and not takes_tools(tokenizer):
        raise InputError(
            "tools: the model's chat template takes no tools; leave them out, or describe them in a"
            " message"
        )


def _counted(
    answers: Sequence[tuple[int, int]], messages: Messages, not_counted: Collection[int]
) -> list[tuple[int, int]]:
    """Return the parts of a chat's text that count, without those of some messages."""
    indices = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(indices) != len(answers):
        raise InputError(
            f"weight: the chat template marks {len(answers)} parts for {len(indices)} messages of"
            " the assistant, so it is not clear which of them do not count"
        )
    return [
        answer for index, answer in zip(indices, answers, strict=True) if index not in not_counted
    ]


_A_MARK = "specjaxmarkcall"


def writes_calls(tokenizer: Any) -> bool:
    """Return True if a model's chat template writes the tool calls of an assistant's message.

    Examples:
        >>> from specjax.text import writes_calls
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = "{{ messages[0].content }}"
        >>> writes_calls(tokenizer)
        False
        >>> tokenizer.chat_template += "{{ messages[1].tool_calls | tojson }}"
        >>> writes_calls(tokenizer)
        True
    """
    call = {"type": "function", "id": "a23456789", "function": {"name": _A_MARK, "arguments": "{}"}}
    return _writes_into(tokenizer, {"content": "", "tool_calls": [call]}, _A_MARK)


def writes_reasoning(tokenizer: Any) -> bool:
    """Return True if a model's chat template writes the reasoning before the last answer.

    Examples:
        >>> from specjax.text import writes_reasoning
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> tokenizer.chat_template = "{{ messages[0].content }}{{ messages[1].content }}"
        >>> writes_reasoning(tokenizer)
        False
        >>> tokenizer.chat_template += "{{ messages[1].reasoning_content }}"
        >>> writes_reasoning(tokenizer)
        True
    """
    return _writes_into(tokenizer, {"content": "b", "thinking": _A_MARK}, _A_MARK)


def _writes_into(tokenizer: Any, answer: Mapping[str, Any], mark: str) -> bool:
    """Return whether a chat with this answer has the mark in its text."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", **answer}]
    try:
        return mark in _chat_text(renderer(tokenizer, end="messages"), chat)[0]
    except InputError:
        return False


def _rendered(
    tokenizer: Any,
    messages: Messages,
    settings: Settings,
    end: ChatEnd,
    tools: Sequence[Mapping[str, Any]],
) -> ChatText:
    """Return the text of a chat, with the places where tags in it are text."""
    text, form = _chat_with(tokenizer, messages, settings, end, tools)
    check_unicode(text)

    def render(chat: Messages, declared: Sequence[Mapping[str, Any]]) -> str:
        return renderer(tokenizer, settings, end, declared or None)(chat)

    return chat_text(tokenizer, text, form, tools, render)


def _chat_with(
    tokenizer: Any,
    messages: Messages,
    settings: Settings,
    end: ChatEnd,
    tools: Sequence[Mapping[str, Any]],
) -> tuple[str, Messages]:
    """Return the text of a chat, and the messages in the form that the template reads.

    An error names the template's variables if they cause it.
    """
    try:
        return _chat_text(renderer(tokenizer, settings, end, tools or None), messages)
    except InputError as error:
        usual = renderer(tokenizer, settings, tools=tools or None)
        if end == "last message" and _can_write(usual, messages):
            raise InputError(
                "continue_final_message=true: the model's chat template changes the last message,"
                " or leaves out a part of it; leave out its reasoning, or give"
                " continue_final_message=false"
            ) from None
        variables = dict(settings) or settings_of(tokenizer)
        plain = tokenizer if settings else without_settings(tokenizer)
        without = renderer(plain, end=end, tools=tools or None)
        if not variables or not _can_write(without, messages):
            raise
        raise InputError(
            f"chat_template_kwargs: {_shortened(str(variables))} cause an error: {error}"
        ) from None


def _can_write(render: Render, messages: Messages) -> bool:
    try:
        _chat_text(render, messages)
    except InputError:
        return False
    return True


def _chat_text(render: Render, messages: Messages) -> tuple[str, Messages]:
    """Return the text of a chat and its form, with developer messages as system if necessary."""
    try:
        return _render_chat(render, messages)
    except InputError:
        as_system = [
            {**message, "role": "system"} if message.get("role") == "developer" else message
            for message in messages
        ]
        if as_system != list(messages):
            with suppress(InputError):  # the first error, about the original messages, is reported
                return _render_chat(render, as_system)
        raise


def _render_chat(render: Render, messages: Messages) -> tuple[str, Messages]:
    """Return the text of a chat, and the first form of its messages that the template reads whole.

    This includes tool calls, if the template reads them in any form. Otherwise they are ignored.
    """
    refusal, left_out, without_calls = None, None, None
    for form, with_text in _template_forms(messages):
        try:
            text = render(form)
            if with_text is not None and text.count("None") > render(with_text).count("None"):
                continue  # the template prints None for a missing content
        except Exception as error:  # a template is code of the checkpoint and may raise any error
            refusal = refusal or error
            continue
        if _first_left_out(render, form) is None:
            return text, form
        index = _first_left_out(render, form, with_calls=False)
        if index is not None:
            left_out = index if left_out is None else left_out
        elif without_calls is None:
            without_calls = text, form
    if without_calls is not None:
        return without_calls
    if left_out is None:
        raise InputError(
            f"messages: the model's chat template refuses them ({_shortened(str(refusal), 160)});"
            " check the roles and their order"
        )
    raise InputError(
        f"messages[{left_out}]: the model's chat template leaves out this message, with role "
        f"{_short(str(messages[left_out].get('role')))}; give it another role, or leave it out"
    )


REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")
"""The names under which templates read and write the reasoning of a model."""


def _template_forms(messages: Messages) -> Iterator[tuple[Messages, Messages | None]]:
    """Yield a chat in the forms that templates read, the best first.

    Templates differ in how they read a tool call. Most expect its arguments as a mapping, and some
    as the JSON text that clients send. For a call without text, most expect no content, and some
    expect the content None. The latter form comes with the same messages with empty text, to detect
    templates that would print the None.
    """
    calling = [message for message in messages if message.get("tool_calls")]
    for as_mappings in (True, False) if calling else (True,):
        forms = [_for_template(message, as_mappings) for message in messages]
        with_text = [{"content": "", **message} for message in forms]
        if forms != with_text:
            yield forms, None
            yield [{"content": None, **message} for message in forms], with_text
        yield with_text, None


def _for_template(message: Mapping[str, Any], as_mappings: bool) -> dict[str, Any]:
    """Return a message with the fields that a template expects.

    A message that only calls tools has no content.
    """
    result = {name: value for name, value in message.items() if value is not None}
    calls = message.get("tool_calls")
    if calls:
        result["tool_calls"] = [_with_arguments(call, as_mappings) for call in calls]
        if not result.get("content"):
            result.pop("content", None)
    else:
        result.pop("tool_calls", None)  # some templates only check whether the field exists
        result.setdefault("content", "")
    thought = next(
        (
            result[name]
            for name in REASONING_FIELDS
            if isinstance(result.get(name), str) and result[name]
        ),
        None,
    )
    if thought is not None:
        result = {**dict.fromkeys(REASONING_FIELDS, thought), **result}
        if calls and "content" in result:
            # gpt-oss's template allows only one of the two in a call, and reads content as
            # reasoning.
            result["thinking"] = ""
    return result


def _with_arguments(call: Mapping[str, Any], as_mapping: bool) -> Mapping[str, Any]:
    """Return a tool call with its arguments as a mapping, if they are the JSON text of one."""
    function = call.get("function")
    if not isinstance(function, Mapping):
        return call
    arguments = function.get("arguments") or "{}"
    if as_mapping and isinstance(arguments, str):
        try:
            value = json.loads(arguments)
        except (ValueError, RecursionError):
            value = None
        arguments = value if isinstance(value, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _first_left_out(render: Render, messages: Messages, with_calls: bool = True) -> int | None:
    """Return the index of the first message that a template leaves out; None if there is none.

    A message is left out if the text lacks a mark that replaces the message's content. So it does
    not matter what the template does with a content, such as trimming it or dropping the reasoning
    in it. In a message that only calls tools, the names of the functions are marked. Without
    ``with_calls``, the message is given a marked content instead.
    """
    marks = {
        index: _mark(index) for index, message in enumerate(messages) if _says_something(message)
    }

    def written(marked: Collection[int]) -> str | None:
        """Return the chat's text with these messages marked; None if the template fails."""
        chosen = [
            _marked(message, marks[index], with_calls) if index in marked else message
            for index, message in enumerate(messages)
        ]
        try:
            return render(chosen).lower()
        except Exception:
            return None

    if (text := written(marks)) is None:
        return None
    found_marks = set(_MARK.findall(text))
    missing = [index for index, mark in marks.items() if mark not in found_marks]
    # Marks in other messages may change what a template writes, so each missing message is also
    # marked alone. Rendering is slow, so at most eight are tried.
    for index in missing[:8]:
        if (text := written([index])) is not None and marks[index] not in text:
            return index
    return None


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    if content and isinstance(content, str):
        return bool(content.strip())
    return not content and bool(message.get("tool_calls"))


_MARK = re.compile("specjaxmark[a-p]{8}")


def _mark(number: int) -> str:
    """Return the mark of a message: its index in hexadecimal digits, written as letters a to p."""
    return "specjaxmark" + "".join(chr(ord("a") + int(digit, 16)) for digit in f"{number:08x}")


def _marked(message: Mapping[str, Any], mark: str, with_calls: bool) -> dict[str, Any]:
    """Return a message with a mark in place of its content."""
    result, calls = dict(message), message.get("tool_calls")
    if result.get("content") or not with_calls:
        result["content"] = mark
    if calls and with_calls:
        result["tool_calls"] = [
            (
                {**call, "function": {**call["function"], "name": mark}}
                if isinstance(call.get("function"), Mapping)
                else call
            )
            for call in calls
        ]
    return result


def pad(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Return the prompts as right-padded ``tokens [B, P]`` int32, and their ``lengths [B]``.

    Examples:
        >>> tokens, lengths = specjax.text.pad([[5, 6, 7], [8]])
        >>> tokens
        array([[5, 6, 7],
               [8, 0, 0]], dtype=int32)
        >>> lengths
        array([3, 1], dtype=int32)
    """
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), int(lengths.max(initial=0))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def read_prompts(argument: str, name: str) -> list[str]:
    """Read the prompts of a file.

    There is one prompt per line. In a .jsonl file it is the "prompt" or "text" of the object in
    each line.

    Raises:
        InputError: the file cannot be read, or has no prompts. The message names the ``argument``
            that gave the file, or the file and its line.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("prompts.jsonl").write_text('{"prompt": "one"}\\n{"text": "two"}\\n')
        >>> specjax.text.read_prompts("prompts_file", "prompts.jsonl")
        ['one', 'two']
    """
    path = Path(name)
    try:
        if not path.is_file():
            raise InputError(f"{argument}={name!r}: no such file")
        if path.suffix == ".jsonl":
            prompts = [
                _prompt_of(record, f"{path}:{number}") for number, record in read_json_lines(path)
            ]
        else:
            prompts = [line for _, line in _lines(path)]
    except OSError as error:
        raise InputError(f"{argument}={_short(name)}: cannot be read ({error.strerror})") from None
    if not prompts:
        raise InputError(f"{argument}={name!r}: the file has no prompts")
    return prompts


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the line number, from 1, and the JSON value of each line that is not blank.

    Raises:
        InputError: a line is not JSON, or the file is not UTF-8 text.

    Examples:
        >>> from pathlib import Path
        >>> _ = Path("records.jsonl").write_text('{"a": 1}\\n\\n{"a": 2}\\n')
        >>> list(specjax.text.read_json_lines(Path("records.jsonl")))
        [(1, {'a': 1}), (3, {'a': 2})]
    """
    for number, line in _lines(path):
        try:
            yield number, json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}:{number}: not JSON ({error})") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    r"""Yield the number and the text of each line that is not blank.

    Lines end only at "\n" or "\r\n". Python's ``splitlines`` also splits at characters such as
    U+2028, which belong to the text.
    """
    try:
        lines = path.read_bytes().decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text ({error})") from None
    for number, line in enumerate(lines, 1):
        if line.strip():
            yield number, line.removesuffix("\r")


def _prompt_of(record: Any, where: str) -> str:
    try:
        return _text(record.get("prompt") or record["text"])
    except (KeyError, AttributeError, TypeError):
        raise InputError(f'{where}: not a JSON object with "prompt" or "text"') from None


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise TypeError
    return value


def _short(name: str) -> str:
    return repr(_shortened(name))


def _shortened(text: str, limit: int = 80) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}…"


# --- text that grows ------------------------------------------------------------------------------


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""A token that stands for a single byte, for characters that the vocabulary lacks.

The text of a run of such tokens is known only when the run ends: one invalid byte makes all of them
replacement characters. So every such token is held back, even if its byte is a character by itself,
such as the line end in Llama 2's vocabulary.
"""


_MAX_HELD = 16
"""The number of tokens after which text is returned even if its last character is unfinished.

A model may write bytes that never become text. Decoding all of them again with every token would
take quadratic time.
"""

_LAST_CHARACTER = 8
"""A number of tokens that certainly contains an unfinished character, which has at most 3 bytes."""


class TextStream:
    """A decoder of a growing list of tokens. It returns text piece by piece, in linear time.

    Text that ends in an unfinished character or in single bytes is held back. So the joined pieces
    are the whole text after the prompt. If the prompt itself ends in an unfinished character, that
    character belongs to the first piece.

    Attributes:
        is_holding: whether the text of some tokens is held back.

    Examples:
        >>> from specjax.assets import embedded
        >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
        >>> prompt, rest = tokenizer.encode("import os"), tokenizer.encode(", sys")
        >>> stream = specjax.text.TextStream(tokenizer, prompt)
        >>> "".join([stream.push([token]) for token in rest] + [stream.push([], last=True)])
        ', sys'
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        """Start after a prompt, the context of the first piece.

        Many tokenizers drop the space at the start of a text, so the first piece depends on its
        context.
        """
        self._decode, self._kinds = _decoder(tokenizer), _kinds_of(tokenizer)
        # Special tokens are left out. Decoding skips them, but a long run of them would be read
        # again with every piece.
        self._tokens = [token for token in map(int, prompt) if self._kinds[token] != _NO_TEXT]
        self._ends_in_byte = False
        # Single bytes at the end of the prompt may continue in the output.
        start = len(self._tokens)
        while start and not self._is_text(self._tokens[start - 1]):
            start -= 1
        tail = self._tokens[start:]
        del self._tokens[start:]
        self._append(tail)
        # Only the tokens from `_context` on are decoded with every piece, so that its cost does not
        # grow with the text. `_emitted` is the part of their text that has been returned. The
        # context may next begin at `_end`, where a piece ended.
        self._context, self._emitted = 0, self._decode(self._tokens)
        self.is_holding = self._ends_in_byte or self._emitted.endswith(_REPLACEMENT)
        self._end = 0 if self.is_holding else len(self._tokens)

    def push(self, tokens: Iterable[Any], last: bool = False) -> str:
        """Append tokens and return the new text. ``last`` also returns what was held back."""
        has_grown = self._append(tokens)
        if not last and (self._ends_in_byte or not has_grown):
            self.is_holding |= self._ends_in_byte
            return ""
        text = self._decode(self._tokens[self._context :])
        self.is_holding = not last and text.endswith(_REPLACEMENT)
        if self.is_holding:
            text = text[:-1]  # one more byte changes at most the last character
            # If the prompt ended in that character, it counts as returned.
            if len(self._tokens) - self._end <= _MAX_HELD or len(text) < len(self._emitted):
                return ""
        piece = text[_common(self._emitted, text) :]
        if self.is_holding:
            self._context = self._end = len(self._tokens) - _LAST_CHARACTER
            text = self._decode(self._tokens[self._context :])[:-1]
        # Tokens without text cannot be the context: decoders drop the space at the start of a text.
        elif newest := self._decode(self._tokens[self._end :]):
            self._context, self._end, text = self._end, len(self._tokens), newest
        self._emitted = text
        return piece

    def peek(self) -> str:
        """Return the text that is held back, as it is if no more tokens come."""
        text = self._decode(self._tokens[self._context :])
        return text[_common(self._emitted, text) :]

    def is_end_of_run(self, token: int) -> bool:
        """Return True if a run of single bytes ends before ``token``, a token with text."""
        return self._ends_in_byte and self._is_text(token)

    def last_bytes(self, count: int) -> list[tuple[int, int]]:
        """Return the single bytes at the end of the tokens so far, each paired with ``count``."""
        run = takewhile(lambda byte: byte is not None, map(self.byte_of, reversed(self._tokens)))
        return [(byte, count) for byte in run if byte is not None][::-1]

    def byte_of(self, token: int) -> int | None:
        """Return the byte that a token stands for; None if it is text or skipped by decoding."""
        kind = self._kinds[token]
        return kind if kind >= 0 else None

    def _is_text(self, token: int) -> bool:
        """Return True if a token is neither a single byte nor skipped by decoding."""
        return self._kinds[token] == _TEXT

    def _append(self, tokens: Iterable[Any]) -> bool:
        """Append tokens, and return False if decoding skips all of them."""
        has_grown = False
        for token in map(int, tokens):
            kind = self._kinds[token]
            if kind != _NO_TEXT:
                has_grown, self._ends_in_byte = True, kind >= 0
                self._tokens.append(token)
        return has_grown


class FinalChannel:
    """A `TextStream` of the final channel of an answer in OpenAI's harmony format (gpt-oss).

    In this format a model writes messages in several channels, such as its reasoning in
    ``analysis`` and tool calls in ``commentary``. Only the channel ``final`` is the answer. The
    tokens that delimit messages are not text.

    Examples:
        >>> from specjax.text import FinalChannel
        >>> FinalChannel.reads(specjax.load("embedded").tokenizer, [1, 2])
        False
    """

    _BEGINS = ("<|start|>", "<|channel|>", "<|message|>")
    _ENDS = ("<|end|>", "<|return|>", "<|call|>")

    @staticmethod
    def reads(tokenizer: Any, prompt: Sequence[int]) -> bool:
        """Return True if a chat's prompt is in this format.

        That is the case if the tokenizer has the format's tokens, and the prompt contains the first
        of them.
        """
        start, *marks = (_mark_id(tokenizer, name) for name in (*FinalChannel._BEGINS, "<|end|>"))
        return start is not None and None not in marks and start in prompt

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        """Start after a prompt, which may end within a message."""
        self._tokenizer, self._stream = tokenizer, TextStream(tokenizer, prompt)
        self._start, self._channel, self._message = (
            _mark_id(tokenizer, name) for name in self._BEGINS
        )
        end_marks = (_mark_id(tokenizer, name) for name in self._ENDS)
        self._marks = frozenset([self._start, self._channel, self._message, *end_marks]) - {None}
        self._name: list[int] = []  # the tokens of the channel's name so far
        self._is_named = self._is_final = False
        tokens = [int(token) for token in prompt]
        if self._start in tokens:
            last = len(tokens) - 1 - tokens[::-1].index(self._start)
        else:
            last = len(tokens)
        for token in tokens[last:]:
            self._is_text(token)

    @property
    def is_holding(self) -> bool:
        """True if the text of some tokens is held back."""
        return self._stream.is_holding

    def push(self, tokens: Iterable[Any], last: bool = False) -> str:
        """Append tokens and return the new text of the answer.

        ``last`` also returns what was held back.
        """
        return self._stream.push(
            [token for token in map(int, tokens) if self._is_text(token)], last
        )

    def peek(self) -> str:
        """Return what `TextStream.peek` returns."""
        return self._stream.peek()

    def is_end_of_run(self, token: int) -> bool:
        """Return what `TextStream.is_end_of_run` returns; False for tokens outside the answer."""
        return self._is_final and token not in self._marks and self._stream.is_end_of_run(token)

    def last_bytes(self, count: int) -> list[tuple[int, int]]:
        """Return what `TextStream.last_bytes` returns."""
        return self._stream.last_bytes(count)

    def byte_of(self, token: int) -> int | None:
        """Return what `TextStream.byte_of` returns for the newest token, if it is of the answer."""
        return self._stream.byte_of(token) if self._is_final else None

    def _is_text(self, token: int) -> bool:
        """Process a token, and return True if it belongs to the answer's text."""
        if token not in self._marks:
            if self._is_named and self._tokenizer.decode([token], skip_special_tokens=True):
                self._name.append(token)
            else:
                self._is_named = False  # <|constrain|> ends the channel's name
            return self._is_final
        if token == self._message:
            words = self._tokenizer.decode(self._name, skip_special_tokens=True).split()
            self._is_final = words[:1] == ["final"]
        else:
            self._is_final = False
        self._name, self._is_named = [], token == self._channel
        return False


class TaggedStream:
    """A `TextStream` in which some special tokens are text, such as the tags of an answer.

    Examples:
        >>> from specjax.text import TaggedStream
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> stream = TaggedStream(tokenizer, [], {0: "<|endoftext|>"})
        >>> stream.push([*tokenizer.encode("import", add_special_tokens=False), 0])
        'import<|endoftext|>'
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int], tags: Mapping[int, str]) -> None:
        """Start after a prompt. ``tags`` are the texts of special tokens, by id."""
        self._tokenizer, self._tags = tokenizer, tags
        self._stream = TextStream(tokenizer, prompt)
        self._is_at_tag = False
        self._context: list[int] = []

    @property
    def is_holding(self) -> bool:
        """True if the text of some tokens is held back."""
        return self._stream.is_holding

    def push(self, tokens: Iterable[Any], last: bool = False) -> str:
        """Append tokens and return the new text. ``last`` also returns what was held back."""
        pieces: list[str] = []
        plain: list[int] = []
        for token in map(int, tokens):
            if (tag := self._tags.get(token)) is None:
                plain.append(token)
            else:
                pieces += [self._push_plain(plain), self._end_character(), tag]
                plain, self._is_at_tag = [], True
        return "".join([*pieces, self._push_plain(plain, last)])

    def _push_plain(self, tokens: list[int], last: bool = False) -> str:
        if tokens:
            self._is_at_tag = False
            text = [token for token in tokens if self._stream._is_text(token)]
            self._context = [*self._context, *text][-_LAST_CHARACTER:]
        return self._stream.push(tokens, last)

    def _end_character(self) -> str:
        """Return what is held back: a tag ends a character that is not whole."""
        if not self._stream.is_holding:
            return ""
        text = self._stream.push([], last=True)
        # Bytes behind the tag are no part of that character.
        self._stream = TextStream(self._tokenizer, self._context)
        return text

    def peek(self) -> str:
        """Return what `TextStream.peek` returns."""
        return self._stream.peek()

    def is_end_of_run(self, token: int) -> bool:
        """Return True if a run of single bytes ends before a tag or a token with text."""
        if token in self._tags:
            return self._stream._ends_in_byte and not self._is_at_tag
        return self._stream.is_end_of_run(token)

    def last_bytes(self, count: int) -> list[tuple[int, int]]:
        """Return what `TextStream.last_bytes` returns; nothing behind a tag."""
        return [] if self._is_at_tag else self._stream.last_bytes(count)

    def byte_of(self, token: int) -> int | None:
        """Return what `TextStream.byte_of` returns."""
        return self._stream.byte_of(token)


def text_stream(
    tokenizer: Any,
    prompt: Sequence[int],
    is_chat: bool = False,
    tags: Mapping[int, str] | None = None,
) -> "TextStream | FinalChannel | TaggedStream":
    """Return the decoder of the tokens after a prompt.

    With ``tags``, the texts of the special tokens that are text, it is a `TaggedStream`. Otherwise
    it is a `FinalChannel` if the text is an answer in a chat and the model writes in channels, or
    else a `TextStream`.

    Examples:
        >>> from specjax.text import text_stream
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> stream = text_stream(tokenizer, tokenizer.encode("import"), is_chat=True)
        >>> stream.push(tokenizer.encode(" os"), last=True)
        ' os'
    """
    if tags is not None:
        return TaggedStream(tokenizer, prompt, tags)
    if is_chat and FinalChannel.reads(tokenizer, prompt):
        return FinalChannel(tokenizer, prompt)
    return TextStream(tokenizer, prompt)


def special_texts(tokenizer: Any) -> dict[int, str]:
    """Return the texts of a tokenizer's special tokens, by id.

    Examples:
        >>> from specjax.text import special_texts
        >>> special_texts(specjax.load("embedded").tokenizer)
        {0: '<|endoftext|>'}
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    ids = {
        *(int(token) for token in getattr(tokenizer, "all_special_ids", ())),
        *(token for token, added_token in added.items() if added_token.special),
    }
    names = {token: tokenizer.convert_ids_to_tokens(token) for token in sorted(ids)}
    return {token: name for token, name in names.items() if name}


def _mark_id(tokenizer: Any, name: str) -> int | None:
    """Return the id of a special token; None if the tokenizer does not have it."""
    return next(iter(_special_tokens(tokenizer, [name])), None)


@lru_cache(maxsize=16)
def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Return a function that converts token ids to text, without special tokens.

    If the tokenizer decodes as the tokenizers library does, that library is called directly. The
    checks of transformers take ten times as long as decoding a few tokens, and the engine decodes
    every token of every sequence.
    """
    from transformers import PreTrainedTokenizerFast

    tokenizer_class = type(tokenizer)
    if isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(tokenizer_class, name) is getattr(PreTrainedTokenizerFast, name)
        for name in ("decode", "_decode")
    ):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    decode: Any = tokenizer.decode
    return partial(decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


_TEXT, _NO_TEXT = -1, -2


class _Kinds(dict[int, int]):
    """The kind of each token id, computed at first use.

    It is the byte that the token stands for, `_TEXT`, or `_NO_TEXT` if decoding skips the token.
    """

    def __init__(self, tokenizer: Any, skipped: Collection[int]) -> None:
        super().__init__(dict.fromkeys(skipped, _NO_TEXT))
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> int:
        name = self._tokenizer.convert_ids_to_tokens(token)
        kind = _NO_TEXT if name is None else int(name[3:5], 16) if _BYTE.fullmatch(name) else _TEXT
        return self.setdefault(token, kind)


def _kinds_of(tokenizer: Any) -> _Kinds:
    """Return the token kinds of a tokenizer, which all texts share."""
    return _shared_kinds(tokenizer, tuple(getattr(tokenizer, "all_special_ids", ())))


@lru_cache(maxsize=16)
def _shared_kinds(tokenizer: Any, special: tuple[int, ...]) -> _Kinds:
    return _Kinds(tokenizer, _skipped_ids(tokenizer, special))


@lru_cache(maxsize=16)
def _skipped_ids(tokenizer: Any, special: tuple[int, ...]) -> frozenset[int]:
    """Return the ids that decoding skips, among the special and the added tokens."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    candidates = {*special, *(token for token, added_token in added.items() if added_token.special)}
    # A token of the vocabulary that is also the padding token, for example, still has text.
    return frozenset(
        token for token in candidates if not tokenizer.decode([token], skip_special_tokens=True)
    )


def _common(before: str, after: str) -> int:
    """Return the length of the common prefix of two texts."""
    if after.startswith(before):  # the usual case: only an unfinished character changes
        return len(before)
    pairs = enumerate(zip(before, after, strict=False))
    return next(
        (index for index, pair in pairs if len(set(pair)) > 1), min(len(before), len(after))
    )


class StopStrings:
    """A filter that ends a text, given in pieces, before the first of some stop strings.

    The first stop string is the one that is complete first; of two that end together, the longer
    one. Text that may be the beginning of a stop string is held back. So no part of a stop string
    is ever returned, however the text is cut into pieces.

    Attributes:
        found: whether the text has reached a stop string. It ends there.
        string: the stop string that ended the text; "" before that.

    Examples:
        >>> stop = specjax.text.StopStrings(["END"])
        >>> [stop.push(piece) for piece in ("one E", "ND two", "three")]
        ['one ', '', '']
        >>> stop.found
        True
    """

    def __init__(self, stop: Sequence[str], is_included: bool = False) -> None:
        """Set the stop strings. With none, every piece passes unchanged.

        Args:
            stop: the stop strings.
            is_included: whether the text ends behind its stop string, not before it.
        """
        self._stop, self._is_included = tuple(stop), is_included
        self._pending = ""
        self.found, self.string = False, ""

    def push(self, piece: str, last: bool = False) -> str:
        """Append a piece and return the text that is safe to show.

        ``last`` also returns the text that was held back.
        """
        if self.found:
            return ""
        if not self._stop:
            return piece
        text = self._pending + piece
        ends = [
            (start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0
        ]
        if ends:
            self.found, self._pending = True, ""
            end, start = min(ends)
            self.string = text[start:end]
            return text[: end if self._is_included else start]
        safe = len(text) - (
            0 if last else max((_begun(stop, text) for stop in self._stop), default=0)
        )
        self._pending = text[safe:]
        return text[:safe]


def _begun(stop: str, text: str) -> int:
    """Return the length of the longest proper prefix of ``stop`` with which ``text`` ends."""
    count = min(len(stop) - 1, len(text))
    while count > 0 and not text.endswith(stop[:count]):
        count = stop.rfind(text[-1], 0, count - 1) + 1  # skips counts whose last character differs
    return count


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return an argument ``stop``, a string or a sequence of strings, as a tuple.

    Raises:
        InputError: it is anything else, or a string is empty.

    Examples:
        >>> from specjax.text import check_stop
        >>> check_stop("END"), check_stop(["END", "STOP"])
        (('END',), ('END', 'STOP'))
        >>> check_stop([""])
        Traceback (most recent call last):
        specjax.errors.InputError: stop=['']: give a string or a sequence of strings, none of ...
    """
    strings = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    if not all(isinstance(string, str) and string for string in strings):
        raise InputError(
            f"stop={stop!r}: give a string or a sequence of strings, none of them empty"
        )
    return strings


def _special_tokens(tokenizer: Any, stop: Sequence[str]) -> Iterator[int]:
    """Yield the ids of the strings that are special tokens, which never appear in decoded text."""
    for string in stop:
        # Tokenizers raise errors for a lone surrogate, which is not a token.
        token = tokenizer.convert_tokens_to_ids(string.encode(errors="replace").decode())
        # Then it is the unknown token.
        if token is None or tokenizer.convert_ids_to_tokens(token) != string:
            continue
        if not tokenizer.decode([token], skip_special_tokens=True):
            yield token


class GrowingText:
    """The generated text of one prompt while it grows, up to a stop string.

    Attributes:
        length: the number of tokens of the prompt and the output so far.
        tokens: the generated tokens, up to the one that completed a stop string.
        pieces: the pieces of their text, in order.

    Examples:
        >>> from specjax.text import GrowingText
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> prompt, rest = tokenizer.encode("import "), tokenizer.encode("os; import sys")
        >>> growing = GrowingText(tokenizer, prompt, stop=[";"])
        >>> growing.push(rest) + growing.finish(), growing.stopped
        ('os', True)
    """

    def __init__(
        self,
        tokenizer: Any,
        prompt: Sequence[int],
        stop: Sequence[str] = (),
        stop_after: int = 0,
        is_chat: bool = False,
        tags: Mapping[int, str] | None = None,
        with_stop: bool = False,
    ) -> None:
        """Start after a prompt.

        Args:
            tokenizer: the tokenizer.
            prompt: the token ids of the prompt.
            stop: the text ends before the first of these strings. If one of them is a special
                token, which has no text, the text ends at that token.
            stop_after: stop strings are ignored in this many tokens at the start.
            is_chat: whether the text is an answer in a chat; see `FinalChannel`.
            tags: the texts of special tokens that are text, by id; see `TaggedStream`. None: no
                special token is text.
            with_stop: whether the text ends behind the stop string, not before it.
        """
        self._strings, self._stop_after = stop, stop_after
        self._new_stream = partial(text_stream, tokenizer, prompt, is_chat, tags)
        self._new_stop = partial(StopStrings, stop, with_stop)
        self._text, self._stop = self._new_stream(), self._new_stop()
        self._marks = frozenset(_special_tokens(tokenizer, stop)) - (tags or {}).keys()
        self._is_at_mark, self._mark = False, ""
        self._tokenizer = tokenizer
        self._emitted = 0  # the number of generated tokens whose text has been returned
        self.length = len(prompt)
        self.tokens: list[int] = []
        self.pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        """True if the text has reached a stop string."""
        return self._stop.found or self._is_at_mark

    @property
    def stop_string(self) -> str:
        """The stop string that the text has reached; "" before that."""
        return self._mark if self._is_at_mark else self._stop.string

    def push(self, new: Sequence[int]) -> str:
        """Append tokens and return the new text."""
        self.length += len(new)
        pieces = []
        # Tokens are pushed one by one, to know which of them completed a stop string.
        for part in [[token] for token in new] if self._strings else [new]:
            if self.stopped:
                break
            self.tokens += part
            is_mark = not self._marks.isdisjoint(part) and len(self.tokens) > self._stop_after
            pieces.append(self._take(self._text.push(part, is_mark), is_mark))
            if is_mark:
                self._is_at_mark, self._mark = (
                    True,
                    str(self._tokenizer.convert_ids_to_tokens(part[0])),
                )
        return "".join(pieces)

    def finish(self) -> str:
        """Return the text that was held back."""
        return "" if self.stopped else self._take(self._text.push([], last=True), last=True)

    def _take(self, piece: str, last: bool = False) -> str:
        """Return the part of the newest piece that is safe to show."""
        text = self._stop.push(piece, last) if len(self.tokens) > self._stop_after else piece
        self.pieces.append(text)
        if self._stop.found:
            self._drop_held()
        elif not self._text.is_holding:
            self._emitted = len(self.tokens)
        return text

    def _drop_held(self) -> None:
        """Cut ``tokens`` after the token that completed the stop string.

        While a run of single bytes is held back, tokens may have been appended after it.
        """
        whole = "".join(self.pieces)
        stream, stop = self._new_stream(), self._new_stop()
        text = stream.push(self.tokens[: self._stop_after])
        emitted = max(self._emitted, self._stop_after)
        text += stop.push(stream.push(self.tokens[self._stop_after : emitted]))
        run = stream.last_bytes(emitted)
        for count, token in enumerate(self.tokens[emitted:], emitted + 1):
            if stream.is_end_of_run(token):
                if (end := _completed_in_run(stop, stream.peek(), run)) is not None:
                    del self.tokens[end:]
                    return
                run = []
            text += stop.push(stream.push([token]))
            if (byte := stream.byte_of(token)) is not None:
                run.append((byte, count))
            elif not run:
                ended = copy(stop)
                if text + ended.push(stream.peek()) == whole and ended.found:
                    del self.tokens[count:]
                    return
        if (end := _completed_in_run(stop, stream.peek(), run)) is not None:
            del self.tokens[end:]


def _completed_in_run(stop: StopStrings, text: str, run: Sequence[tuple[int, int]]) -> int | None:
    """Return the number of tokens up to the one that completes a stop string in a run of bytes.

    Args:
        stop: the state of the stop strings before the run.
        text: the text of the run.
        run: the bytes, each with the number of tokens up to it.

    Returns:
        The number of tokens; None if the run completes no stop string.
    """

    def is_found(length: int) -> bool:
        ended = copy(stop)
        ended.push(text[:length])
        return ended.found

    if not run or not is_found(len(text)):
        return None
    # The index of the string's last character.
    last = bisect_left(range(len(text) + 1), True, key=is_found) - 1
    try:
        characters = bytes(byte for byte, _ in run).decode()
    except UnicodeDecodeError:  # the run becomes one replacement character per byte
        return run[-1][1]
    ends = list(accumulate(len(character.encode()) for character in characters))
    return run[ends[last - len(text)] - 1][1]
