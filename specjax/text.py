"""Between text and tokens: prompts in, a stream of text out."""

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
from specjax.progress import waiting
from specjax.templates import Messages, Render, Settings, read_settings, renderer, settings_of, without_settings


def _is_not_about_torch(record: logging.LogRecord) -> bool:
    return "PyTorch was not found" not in record.getMessage()


# Only transformers' tokenizers are used here, and they need no PyTorch. Its remark, made when it is imported, would stand above
# the output of every program. Whatever else it has to say is let through; commands leave out more (specjax/cli/silence.py).
logging.getLogger("transformers").addFilter(_is_not_about_torch)

# --- tokenizers ------------------------------------------------------------------------------------------------------

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def has_tokenizer(directory: Path) -> bool:
    """Whether a checkpoint directory holds a tokenizer.

    Examples:
        >>> from specjax.assets import embedded
        >>> specjax.text.has_tokenizer(embedded("target"))
        True
    """
    return any((directory / name).is_file() for name in _TOKENIZER_FILES)


_WITH_TOKENIZER = (*_TOKENIZER_FILES, "merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json")
_WITH_TOKENIZER += ("chat_template.jinja", "chat_template.json")


def copy_tokenizer(directory: Path, into: Path) -> None:
    """Copy a checkpoint's tokenizer, with its chat template, to the directory ``into``.

    Raises:
        InputError: it has none.

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
        raise InputError(f"{directory} has no tokenizer (tokenizer.json): copy the one the model was trained with there")


def load_tokenizer(directory: Path) -> Any:
    """The checkpoint's tokenizer, as transformers loads it, without running any code that the checkpoint brings.

    It begins and ends texts as ``add_bos_token`` and ``add_eos_token`` in ``tokenizer_config.json`` say, if they do.

    Raises:
        InputError: it has none, one that is damaged, one that is there as code alone, or one that cannot be made to begin and
            end texts so.

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
        # Without a word on it, transformers asks on stdin whether to run the checkpoint's code.
        tokenizer = AutoTokenizer.from_pretrained(directory, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise whatever a damaged file makes them stumble over
        if "trust_remote_code" in str(error):
            raise InputError(
                f"{directory}: its tokenizer is its own code, which is never run: give a tokenizer whose tokenizer_config.json "
                "names a class of transformers"
            ) from None
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise InputError(
            f"{_damaged_file(directory)}: cannot be read as a tokenizer ({reason}); download the files again"
        ) from None
    _add_what_is_stated(tokenizer, directory / "tokenizer_config.json")
    return tokenizer


def _add_what_is_stated(tokenizer: Any, config: Path) -> None:
    """Make a tokenizer begin and end texts as its configuration says.

    Where there is a tokenizer.json, transformers 5 goes by that alone. DeepSeek-V3's adds nothing, and its configuration says
    that a text has a begin: without it, the model reads every prompt as it read none in training.
    """
    if getattr(tokenizer, "backend_tokenizer", None) is None or not config.is_file():
        return  # without a tokenizer.json, transformers goes by the configuration
    stated = json.loads(config.read_text(encoding="utf-8"))
    own = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    begins = len(whole) > len(own) and whole[0] == begin
    ends = len(whole) > len(own) + begins and whole[-1] == end
    stated_switches = {"add_bos_token": begins, "add_eos_token": ends}
    for name, token in (("add_bos_token", begin), ("add_eos_token", end)):
        if isinstance(stated.get(name), bool) and token is not None:
            stated_switches[name] = stated[name]
    if list(stated_switches.values()) == [begins, ends]:
        return
    if len(whole) > len(own) + begins + ends:
        said = ", ".join(f"{name}={json.dumps(stated[name])}" for name in stated_switches if name in stated)
        raise InputError(f"{config}: {said}, but tokenizer.json adds other tokens than these to a text: make the two agree")
    for name, value in stated_switches.items():
        setattr(tokenizer, name, value)


def _damaged_file(directory: Path) -> Path:
    """The tokenizer's file that is no JSON object, or else its first one."""
    for file in sorted(directory.glob("*token*.json")):
        try:
            if not isinstance(json.loads(file.read_text(encoding="utf-8")), dict):
                return file
        except (ValueError, OSError, RecursionError):
            return file
    return next(directory / name for name in _TOKENIZER_FILES if (directory / name).is_file())


def check_same_tokenizer(target: Any, drafter: Any) -> None:
    """Refuse, with an InputError, a drafter whose tokens are not the target's; see `difference`.

    Examples:
        >>> from specjax.assets import embedded
        >>> from specjax.text import check_same_tokenizer, load_tokenizer
        >>> target_tokenizer = load_tokenizer(embedded("target"))
        >>> check_same_tokenizer(target_tokenizer, load_tokenizer(embedded("draft")))
    """
    if found := difference(target, drafter):
        raise InputError(f"tokenizers: {found}: a drafter must share the target's tokenizer; take one of the target's family")


def difference(target: Any, drafter: Any) -> str | None:
    """What makes the tokens of two tokenizers different, in words; None where they are the same.

    Equal sizes do not show it: two vocabularies may number their tokens differently. Every id that both have must stand for the
    same token, and both must begin and end texts with the same ids. One of them may have more ids at its end.

    Examples:
        >>> from specjax.assets import embedded
        >>> from specjax.text import difference, load_tokenizer
        >>> target_tokenizer = load_tokenizer(embedded("target"))
        >>> difference(target_tokenizer, load_tokenizer(embedded("draft"))) is None
        True
    """
    ours, theirs = (tokenizer.get_vocab() for tokenizer in (target, drafter))
    here, there = ({i: token for token, i in vocabulary.items()} for vocabulary in (ours, theirs))
    for i in sorted(here.keys() | there.keys()):
        left, right = here.get(i), there.get(i)
        if left is None or right is None:  # an id of one of them: its token may not have another id in the other
            token = left if right is None else right
            if ours.get(token, i) == theirs.get(token, i):
                continue
        elif left == right:
            continue
        return f"id {i} is {_shown(left)} for the target and {_shown(right)} for the drafter"
    for role in ("bos_token", "eos_token"):
        left, right = getattr(target, role, None), getattr(drafter, role, None)
        if left is not None and right is not None and left != right:
            here, there = f"{left!r} (id {ours.get(left)})", f"{right!r} (id {theirs.get(right)})"
            return f"{role} is {here} for the target and {there} for the drafter"
    return None


def _shown(token: str | None) -> str:
    return "no token" if token is None else repr(token)


# --- prompts ---------------------------------------------------------------------------------------------------------


def encode(tokenizer: Any, prompt: str, chat: bool = False, chat_template_kwargs: Settings | None = None) -> list[int]:
    """Token ids of a prompt; with ``chat``, as the user's turn in the model's chat template, see `encode_chat`.

    No token that begins a text is put before a prompt that begins with it.

    Raises:
        InputError: the prompt is empty or no Unicode text, or the tokenizer has no chat template.

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
    _check_unicode(prompt)
    tokens = list(tokenizer(prompt, verbose=False)["input_ids"])  # how much fits is said by those who know
    begin = getattr(tokenizer, "bos_token_id", None)
    is_twice = begin is not None and tokens[:2] == [begin, begin] and prompt.startswith(str(tokenizer.bos_token))
    return tokens[1:] if is_twice else tokens


def encode_continuation(tokenizer: Any, continuation: str) -> list[int]:
    """Token ids of a text that stands behind another one: without the tokens that begin a text.

    Raises:
        InputError: it is no Unicode text.

    Examples:
        >>> from specjax.assets import embedded
        >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
        >>> tokens = specjax.text.encode_continuation(tokenizer, "import os")
        >>> tokenizer.decode(tokens)
        'import os'
    """
    _check_unicode(continuation)
    return list(tokenizer(continuation, add_special_tokens=False, verbose=False)["input_ids"])


def encode_chat(tokenizer: Any, messages: Messages, chat_template_kwargs: Settings | None = None) -> list[int]:
    """Token ids of a chat in the model's template, up to where its answer begins.

    The messages of a ``developer`` are a system's where the template knows no developer. What the template is given beside the
    messages, ``chat_template_kwargs``, goes over what the tokenizer has for all chats (`specjax.templates.with_template`).

    Raises:
        InputError: there is no message, the tokenizer has no chat template, or its template refuses the messages or leaves one
            of them out, or does so with what it is given beside them.

    Examples:
        >>> from specjax.assets import embedded
        >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
        >>> messages = [{"role": "user", "content": "Hello"}]
        >>> specjax.text.encode_chat(tokenizer, messages)  # the embedded target is no chat model
        Traceback (most recent call last):
        specjax.errors.InputError: chat=True: this tokenizer has no chat template; leave --chat out, or give the prompt as text
        >>> tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
        >>> tokenizer.decode(specjax.text.encode_chat(tokenizer, messages))
        'user: Hello'
    """
    if not messages:
        raise InputError("messages=[]: empty; give at least one message")
    if not tokenizer.chat_template:
        raise InputError("chat=True: this tokenizer has no chat template; leave --chat out, or give the prompt as text")
    text = _chat_with(tokenizer, messages, read_settings(chat_template_kwargs or {}))
    _check_unicode(text)
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _chat_with(tokenizer: Any, messages: Messages, given: Settings) -> str:
    """Return the text of a chat with what its template is ``given``; an error says so where that is its cause."""
    try:
        return _chat_text(renderer(tokenizer, given), messages)
    except InputError as error:
        settings = dict(given) or settings_of(tokenizer)
        if not settings or not _can_write(renderer(tokenizer) if given else renderer(without_settings(tokenizer)), messages):
            raise
        raise InputError(f"chat_template_kwargs: without {_shortened(str(settings))} it would do, but: {error}") from None


def _can_write(render: Render, messages: Messages) -> bool:
    try:
        _chat_text(render, messages)
    except InputError:
        return False
    return True


def _chat_text(render: Render, messages: Messages) -> str:
    """Return the text of a chat, in which a developer is the system where the template knows no developer."""
    try:
        return _render_chat(render, messages)
    except InputError:
        as_system = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]
        if as_system != list(messages):
            with suppress(InputError):  # the first error is about what was given
                return _render_chat(render, as_system)
        raise


def _render_chat(render: Render, messages: Messages) -> str:
    """Return the text of a chat, in the first form of its messages that the model's template reads all of.

    Calls of tools are a part of that, where there is a form in which the template reads them. Otherwise they are ignored.
    """
    refusal, left_out, without_calls = None, None, None
    for form, with_text in _template_forms(messages):
        try:
            text = render(form)
            if with_text is not None and text.count("None") > render(with_text).count("None"):
                continue  # it writes the None of a content
        except Exception as error:  # a template is code of the checkpoint, and raises whatever messages make it stumble over
            refusal = refusal or error
            continue
        if _first_left_out(render, form) is None:
            return text
        index = _first_left_out(render, form, with_calls=False)
        if index is not None:
            left_out = index if left_out is None else left_out
        elif without_calls is None:
            without_calls = text
    if without_calls is not None:
        return without_calls
    if left_out is None:
        raise InputError(f"messages: the model's chat template refuses them ({refusal}); see the roles and their order")
    raise InputError(
        f"messages[{left_out}]: the model's chat template leaves out this message, of the role "
        f"{_short(str(messages[left_out].get('role')))}; give it another role, or leave it out"
    )


# Under each of these names some template reads what a model has thought before its answer.
_REASONING = ("reasoning_content", "reasoning", "thinking")


def _template_forms(messages: Messages) -> Iterator[tuple[Messages, Messages | None]]:
    """Yield a chat in the forms that templates read, the best first.

    Templates differ in how they read a call of a tool. Most take its arguments as a mapping, and some as the JSON text that
    clients send. A call without text has no content for most, and for some one that is None. Others would write that None:
    beside such a form comes the same one with an empty text.
    """
    calling = [each for each in messages if each.get("tool_calls")]
    for as_mappings in (True, False) if calling else (True,):
        made = [_for_template(each, as_mappings) for each in messages]
        with_text = [{"content": "", **each} for each in made]
        if made != with_text:
            yield made, None
            yield [{"content": None, **each} for each in made], with_text
        yield with_text, None


def _for_template(message: Mapping[str, Any], as_mappings: bool) -> dict[str, Any]:
    """Return a message with its fields as a template expects them, and without content where it only calls tools."""
    made, calls = {name: value for name, value in message.items() if value is not None}, message.get("tool_calls")
    if calls:
        made["tool_calls"] = [_with_arguments(call, as_mappings) for call in calls]
        if not made.get("content"):
            made.pop("content", None)
    else:
        made.pop("tool_calls", None)  # templates only ask whether there is such a field
        made.setdefault("content", "")
    thought = next((made[name] for name in _REASONING if isinstance(made.get(name), str) and made[name]), None)
    if thought is not None:
        made = {**dict.fromkeys(_REASONING, thought), **made}
        if calls and "content" in made:
            made["thinking"] = ""  # gpt-oss's template takes one of the two beside a call: the content is then a thought
    return made


def _with_arguments(call: Mapping[str, Any], as_mapping: bool) -> Mapping[str, Any]:
    """Return a call of a tool whose arguments are a mapping, where they are the JSON text of one; or are as they were sent."""
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
    """Return the number of the first message of which a template writes nothing, None: there is none.

    A message is left out where the text lacks a mark that stands in place of its content. What the template does with a
    content, such as trimming it or dropping the thoughts in it, does not matter. Of a message that only calls tools the names
    of their functions are marked; or without ``with_calls`` a content that it does not have.
    """
    marks = {index: _mark(index) for index, message in enumerate(messages) if _says_something(message)}

    def written(marked: Collection[int]) -> str | None:
        """Return the chat's text with these messages marked, None: the template refuses such a content."""
        chosen = [_marked(each, marks[index], with_calls) if index in marked else each for index, each in enumerate(messages)]
        try:
            return render(chosen).lower()
        except Exception:
            return None

    if (text := written(marks)) is None:
        return None
    found = set(_MARK.findall(text))
    missing = [index for index, mark in marks.items() if mark not in found]
    # A template may go by the contents of other messages: so each is tried alone. Eight in vain are enough.
    for index in missing[:8]:
        if (text := written([index])) is not None and marks[index] not in text:
            return index
    return None


def _says_something(message: Mapping[str, Any]) -> bool:
    content = message.get("content")
    return bool(content.strip()) if content and isinstance(content, str) else not content and bool(message.get("tool_calls"))


_MARK = re.compile("specjaxmark[a-p]{8}")


def _mark(index: int) -> str:
    """Return letters that stand for a message: hexadecimal digits, from a to p."""
    return "specjaxmark" + "".join(chr(ord("a") + int(digit, 16)) for digit in f"{index:08x}")


def _marked(message: Mapping[str, Any], mark: str, with_calls: bool) -> dict[str, Any]:
    """Return a message with a mark in place of what it says."""
    made, calls = dict(message), message.get("tool_calls")
    if made.get("content") or not with_calls:
        made["content"] = mark
    if calls and with_calls:
        made["tool_calls"] = [
            {**call, "function": {**call["function"], "name": mark}} if isinstance(call.get("function"), Mapping) else call
            for call in calls
        ]
    return made


def _check_unicode(prompt: str) -> None:
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair: bytes of a command line that are not UTF-8
        raise InputError(f"prompt: character {error.start} is no Unicode text ({error.reason}); give UTF-8") from None


def pad(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded ``tokens [B, P]`` int32 and their ``lengths [B]``.

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
    """The prompts of a file: one a line, or in a .jsonl file the "prompt" or "text" of the object in each line.

    Raises:
        InputError: it cannot be read, or holds none; names the ``argument`` that gave it, or the file and its line.

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
            prompts = [_prompt_of(record, f"{path}:{number}") for number, record in read_json_lines(path)]
        else:
            prompts = [line for _, line in _lines(path)]
    except OSError as error:
        raise InputError(f"{argument}={_short(name)}: cannot be read ({error.strerror})") from None
    if not prompts:
        raise InputError(f"{argument}={name!r}: holds no prompt")
    return prompts


def read_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """The number of each line that is not blank, from 1, and the JSON value in it.

    Raises:
        InputError: a line is no JSON, or the file no UTF-8 text.

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
    r"""The number of each line that is not blank, and the line.

    Lines end at "\n" or "\r\n" and nowhere else: U+2028 and its like, at which Python also splits, are text.
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


def _shortened(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:77]}…"


# --- text that grows -------------------------------------------------------------------------------------------------


_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
"""A token that stands for one byte, where a vocabulary lacks a character. What a run of them says is known when it ends: one
byte too many, and none of them is text. So a byte that is a character by itself is held back like any other, such as the line
end of Llama 2's vocabulary: a byte after it that is no text would make a replacement character of it, too."""


_MAX_HELD = 16
"""Tokens after which text is given out although a character behind it is not finished. A tokenizer may write bytes that will
never be text: decoding all of them again with every token would take quadratic time."""

_LAST_CHARACTER = 8
"""Tokens that surely hold an unfinished character, which has at most three bytes."""


class TextStream:
    """Turns a growing list of tokens into text, piece by piece, in time that is linear in the number of tokens.

    Text is held back while it ends in an unfinished character, or in single bytes, so that the pieces joined are the whole
    text without the prompt's. Where a prompt itself ends so, what its last tokens have become belongs to the first piece.

    Attributes:
        is_holding: whether some tokens have not become text yet.

    Examples:
        >>> from specjax.assets import embedded
        >>> tokenizer = specjax.text.load_tokenizer(embedded("target"))
        >>> prompt, rest = tokenizer.encode("import os"), tokenizer.encode(", sys")
        >>> stream = specjax.text.TextStream(tokenizer, prompt)
        >>> "".join([stream.push([token]) for token in rest] + [stream.push([], last=True)])
        ', sys'
    """

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        """``prompt`` gives the first pieces their context: many tokenizers drop the space that begins a text."""
        self._decode, self._kinds = _decoder(tokenizer), _kinds_of(tokenizer)
        # Special tokens are left out: decoding would skip them, and in a run of them it would skip all of them every time.
        self._tokens = [token for token in map(int, prompt) if self._kinds[token] != _NO_TEXT]
        self._ends_in_byte = False
        # The single bytes at the end of a prompt are not finished.
        start = len(self._tokens)
        while start and not self._is_text(self._tokens[start - 1]):
            start -= 1
        tail = self._tokens[start:]
        del self._tokens[start:]
        self._append(tail)
        # Tokens from `_context` on are decoded again with every piece: its cost does not grow with the text. What they say has
        # been given out as far as `_given`. The context may next begin at `_end`, where a piece ended.
        self._context, self._given = 0, self._decode(self._tokens)
        self.is_holding = self._ends_in_byte or self._given.endswith(_REPLACEMENT)
        self._end = 0 if self.is_holding else len(self._tokens)

    def push(self, tokens: Iterable[Any], last: bool = False) -> str:
        """The text that ``tokens`` add; ``last`` lets go of what was held back."""
        has_grown = self._append(tokens)
        if not last and (self._ends_in_byte or not has_grown):
            self.is_holding |= self._ends_in_byte
            return ""
        text = self._decode(self._tokens[self._context :])
        self.is_holding = not last and text.endswith(_REPLACEMENT)
        if self.is_holding:
            text = text[:-1]  # one more byte changes at most the last character
            # The prompt may have ended in that character, and then it counts as given.
            if len(self._tokens) - self._end <= _MAX_HELD or len(text) < len(self._given):
                return ""
        piece = text[_common(self._given, text) :]
        if self.is_holding:
            self._context = self._end = len(self._tokens) - _LAST_CHARACTER
            text = self._decode(self._tokens[self._context :])[:-1]
        # A space that begins a text is dropped: tokens that say nothing are no context for what follows them.
        elif newest := self._decode(self._tokens[self._end :]):
            self._context, self._end, text = self._end, len(self._tokens), newest
        self._given = text
        return piece

    def peek(self) -> str:
        """Return the text that is held back, as it is if no more tokens come."""
        text = self._decode(self._tokens[self._context :])
        return text[_common(self._given, text) :]

    def is_end_of_run(self, token: int) -> bool:
        """Return whether the tokens so far end in single bytes, and ``token`` is none and not skipped by decoding."""
        return self._ends_in_byte and self._is_text(token)

    def last_bytes(self, count: int) -> list[tuple[int, int]]:
        """Return the single bytes that the tokens so far end in, each beside ``count``."""
        run = takewhile(lambda byte: byte is not None, map(self.byte_of, reversed(self._tokens)))
        return [(byte, count) for byte in run if byte is not None][::-1]

    def byte_of(self, token: int) -> int | None:
        """Return the byte that a token stands for. None: it is text, or decoding skips it."""
        kind = self._kinds[token]
        return kind if kind >= 0 else None

    def _is_text(self, token: int) -> bool:
        """Return whether a token is neither a single byte nor skipped by decoding."""
        return self._kinds[token] == _TEXT

    def _append(self, tokens: Iterable[Any]) -> bool:
        """Take in tokens; False: decoding skips all of them."""
        has_grown = False
        for token in map(int, tokens):
            kind = self._kinds[token]
            if kind != _NO_TEXT:
                has_grown, self._ends_in_byte = True, kind >= 0
                self._tokens.append(token)
        return has_grown


class FinalChannel:
    """As `TextStream`, but the text is that of a chat's answer in OpenAI's harmony format, as gpt-oss writes it.

    A model writes messages in several channels there, such as its thoughts in ``analysis`` and calls of tools in
    ``commentary``. Only what stands in the channel ``final`` is its answer. The tokens around the messages are no text.

    Examples:
        >>> from specjax.text import FinalChannel
        >>> FinalChannel.reads(specjax.load("embedded").tokenizer, [1, 2])
        False
    """

    _BEGINS = ("<|start|>", "<|channel|>", "<|message|>")
    _ENDS = ("<|end|>", "<|return|>", "<|call|>")

    @staticmethod
    def reads(tokenizer: Any, prompt: Sequence[int]) -> bool:
        """Return whether a chat's prompt is in that format: whether the tokenizer has its tokens, and the prompt begins so."""
        start, *others = (_mark_id(tokenizer, name) for name in (*FinalChannel._BEGINS, "<|end|>"))
        return start is not None and None not in others and start in prompt

    def __init__(self, tokenizer: Any, prompt: Sequence[int]) -> None:
        """``prompt`` is what `TextStream` takes, and says which message is begun."""
        self._tokenizer, self._stream = tokenizer, TextStream(tokenizer, prompt)
        self._start, self._channel, self._message = (_mark_id(tokenizer, name) for name in self._BEGINS)
        ends = (_mark_id(tokenizer, name) for name in self._ENDS)
        self._marks = frozenset([self._start, self._channel, self._message, *ends]) - {None}
        self._name: list[int] = []  # tokens of the channel's name, once there is one
        self._is_named = self._is_final = False
        tokens = [int(token) for token in prompt]
        last = len(tokens) - 1 - tokens[::-1].index(self._start) if self._start in tokens else len(tokens)
        for token in tokens[last:]:
            self._is_text(token)

    @property
    def is_holding(self) -> bool:
        """Whether some tokens of the answer have not become text yet."""
        return self._stream.is_holding

    def push(self, tokens: Iterable[Any], last: bool = False) -> str:
        """The text that ``tokens`` add to the answer; ``last`` lets go of what was held back."""
        return self._stream.push([token for token in map(int, tokens) if self._is_text(token)], last)

    def peek(self) -> str:
        """As `TextStream.peek`."""
        return self._stream.peek()

    def is_end_of_run(self, token: int) -> bool:
        """As `TextStream.is_end_of_run`: what is not the answer's is skipped."""
        return self._is_final and token not in self._marks and self._stream.is_end_of_run(token)

    def last_bytes(self, count: int) -> list[tuple[int, int]]:
        """As `TextStream.last_bytes`."""
        return self._stream.last_bytes(count)

    def byte_of(self, token: int) -> int | None:
        """As `TextStream.byte_of`, of the newest token."""
        return self._stream.byte_of(token) if self._is_final else None

    def _is_text(self, token: int) -> bool:
        """Take in a token. Return whether it belongs to the answer's text."""
        if token not in self._marks:
            if self._is_named and self._tokenizer.decode([token], skip_special_tokens=True):
                self._name.append(token)
            else:
                self._is_named = False  # <|constrain|> stands behind a channel's name
            return self._is_final
        if token == self._message:
            words = self._tokenizer.decode(self._name, skip_special_tokens=True).split()
            self._is_final = words[:1] == ["final"]
        else:
            self._is_final = False
        self._name, self._is_named = [], token == self._channel
        return False


def text_stream(tokenizer: Any, prompt: Sequence[int], is_chat: bool = False) -> "TextStream | FinalChannel":
    """What turns the tokens after a prompt into text; of a chat's answer, those of its final channel, where there are channels.

    Examples:
        >>> from specjax.text import text_stream
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> text_stream(tokenizer, tokenizer.encode("import"), is_chat=True).push(tokenizer.encode(" os"), last=True)
        ' os'
    """
    return (FinalChannel if is_chat and FinalChannel.reads(tokenizer, prompt) else TextStream)(tokenizer, prompt)


def _mark_id(tokenizer: Any, name: str) -> int | None:
    """Return the id of a token that is no text, None: the tokenizer has no such token."""
    return next(iter(_special_tokens(tokenizer, [name])), None)


@lru_cache(maxsize=16)
def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    """Return what turns token ids into text, without special tokens.

    A tokenizer that decodes as the tokenizers library does is asked there: what transformers checks of its arguments takes ten
    times as long as decoding a few tokens, and the engine does so for every token of every text.
    """
    from transformers import PreTrainedTokenizerFast

    made = type(tokenizer)
    if isinstance(tokenizer, PreTrainedTokenizerFast) and all(
        getattr(made, name) is getattr(PreTrainedTokenizerFast, name) for name in ("decode", "_decode")
    ):
        return partial(tokenizer.backend_tokenizer.decode, skip_special_tokens=True)
    decode: Any = tokenizer.decode
    return partial(decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


_TEXT, _NO_TEXT = -1, -2


class _Kinds(dict[int, int]):
    """By token id: the byte that a token stands for, `_TEXT`, or `_NO_TEXT` where decoding skips it. Filled as it is asked."""

    def __init__(self, tokenizer: Any, skipped: Collection[int]) -> None:
        super().__init__(dict.fromkeys(skipped, _NO_TEXT))
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> int:
        name = self._tokenizer.convert_ids_to_tokens(token)
        kind = _NO_TEXT if name is None else int(name[3:5], 16) if _BYTE.fullmatch(name) else _TEXT
        return self.setdefault(token, kind)


def _kinds_of(tokenizer: Any) -> _Kinds:
    """Return the kinds of a tokenizer's tokens, which all texts share."""
    return _shared_kinds(tokenizer, tuple(getattr(tokenizer, "all_special_ids", ())))


@lru_cache(maxsize=16)
def _shared_kinds(tokenizer: Any, special: tuple[int, ...]) -> _Kinds:
    return _Kinds(tokenizer, _skipped_ids(tokenizer, special))


@lru_cache(maxsize=16)
def _skipped_ids(tokenizer: Any, special: tuple[int, ...]) -> frozenset[int]:
    """Return the ids of tokens that decoding skips, among the ``special`` ones and those that were added."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    candidates = {*special, *(token for token, made in added.items() if made.special)}
    # A token of the vocabulary that was named as the one for padding, say, is still text.
    return frozenset(token for token in candidates if not tokenizer.decode([token], skip_special_tokens=True))


def _common(one: str, other: str) -> int:
    """How many characters two texts begin with that are the same."""
    if other.startswith(one):  # nearly always: only a character that was not finished changes
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (left, right) in pairs if left != right), min(len(one), len(other)))


class StopStrings:
    """Ends a text, given piece by piece, before the first of some stop strings.

    The first is the one that is complete first; of two that end together, the longer one. Text that may be the beginning of a
    stop string is held back, so nothing of one is ever given out, however the text is cut into pieces.

    Attributes:
        found: whether one has been met. The text ends there.

    Examples:
        >>> stop = specjax.text.StopStrings(["END"])
        >>> [stop.push(piece) for piece in ("one E", "ND two", "three")]
        ['one ', '', '']
        >>> stop.found
        True
    """

    def __init__(self, stop: Sequence[str]) -> None:
        """``stop`` may be empty: then every piece passes as it is."""
        self._stop = tuple(stop)
        self._held = ""
        self.found = False

    def push(self, piece: str, last: bool = False) -> str:
        """What may be given out now; ``last`` lets go of what was held back."""
        if self.found:
            return ""
        text = self._held + piece
        ends = [(at + len(stop), at) for stop in self._stop if (at := text.find(stop)) >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        kept = len(text) - (0 if last else max((_begun(stop, text) for stop in self._stop), default=0))
        self._held = text[kept:]
        return text[:kept]


def _begun(stop: str, text: str) -> int:
    """Return how many characters of ``stop``, not all of them, a text ends with."""
    count = min(len(stop) - 1, len(text))
    while count > 0 and not text.endswith(stop[:count]):
        count = stop.rfind(text[-1], 0, count - 1) + 1  # where its last character is: most places need no look
    return count


def check_stop(stop: str | Sequence[str]) -> tuple[str, ...]:
    """Return the stop strings that an argument means: one string, or a sequence of strings.

    Raises:
        InputError: they are no strings, or one is empty.

    Examples:
        >>> from specjax.text import check_stop
        >>> check_stop("END"), check_stop(["END", "STOP"])
        (('END',), ('END', 'STOP'))
        >>> check_stop([""])
        Traceback (most recent call last):
        specjax.errors.InputError: stop=['']: give a sequence of strings that are not empty, or one
    """
    strings = (stop,) if isinstance(stop, str) or not isinstance(stop, Iterable) else tuple(stop)
    if not all(isinstance(each, str) and each for each in strings):
        raise InputError(f"stop={stop!r}: give a sequence of strings that are not empty, or one")
    return strings


def _special_tokens(tokenizer: Any, stop: Sequence[str]) -> Iterator[int]:
    """The ids of those strings that are one token without text. No text that they could be looked for in would have them."""
    for each in stop:
        # Tokenizers stumble over half of a surrogate pair, which is no token.
        token = tokenizer.convert_tokens_to_ids(each.encode(errors="replace").decode())
        if token is None or tokenizer.convert_ids_to_tokens(token) != each:  # what is unknown may be a token of its own
            continue
        if not tokenizer.decode([token], skip_special_tokens=True):
            yield token


class GrowingText:
    """What is generated after one prompt, while it grows: tokens become text as soon as they can, up to a stop string.

    Attributes:
        length: tokens of prompt and output that were pushed.
        tokens: generated; the last is the one that completed a stop string.
        pieces: of their text, in order.

    Examples:
        >>> from specjax.text import GrowingText
        >>> tokenizer = specjax.load("embedded").tokenizer
        >>> prompt, rest = tokenizer.encode("import "), tokenizer.encode("os; import sys")
        >>> growing = GrowingText(tokenizer, prompt, stop=[";"])
        >>> growing.push(rest) + growing.finish(), growing.stopped
        ('os', True)
    """

    def __init__(
        self, tokenizer: Any, prompt: Sequence[int], stop: Sequence[str] = (), stop_after: int = 0, is_chat: bool = False
    ) -> None:
        """Of a ``prompt`` of token ids, with strings before the first of which the text ends. They are looked for behind the
        first ``stop_after`` tokens. One that is a special token, which is no text, ends it by that token. Of a chat's answer
        the text is what stands in its final channel, where the model has channels (`FinalChannel`)."""
        self._strings, self._stop_after = stop, stop_after
        self._new_stream = partial(text_stream, tokenizer, prompt, is_chat)
        self._text, self._stop = self._new_stream(), StopStrings(stop)
        self._marks = frozenset(_special_tokens(tokenizer, stop))
        self._is_at_mark = False
        self._said = 0  # generated tokens that have become text
        self.length = len(prompt)
        self.tokens: list[int] = []
        self.pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stop.found or self._is_at_mark

    def push(self, new: Sequence[int]) -> str:
        """The text that is known now that there are ``new`` tokens."""
        self.length += len(new)
        pieces = []
        # One by one, to know which token completed a stop string.
        for part in [[token] for token in new] if self._strings else [new]:
            if self.stopped:
                break
            self.tokens += part
            is_mark = not self._marks.isdisjoint(part) and len(self.tokens) > self._stop_after
            pieces.append(self._take(self._text.push(part, is_mark), is_mark))
            self._is_at_mark = is_mark
        return "".join(pieces)

    def finish(self) -> str:
        """What was held back."""
        return "" if self.stopped else self._take(self._text.push([], last=True), last=True)

    def _take(self, piece: str, last: bool = False) -> str:
        """What may be given out of ``piece``, which is what the newest tokens add to the text."""
        given = self._stop.push(piece, last) if len(self.tokens) > self._stop_after else piece
        self.pieces.append(given)
        if self._stop.found:
            self._drop_held()
        elif not self._text.is_holding:
            self._said = len(self.tokens)
        return given

    def _drop_held(self) -> None:
        """End ``tokens`` with the one that completed the stop string: others came after it while a run was held back."""
        whole = "".join(self.pieces)
        stream, stop = self._new_stream(), StopStrings(self._strings)
        given = stream.push(self.tokens[: self._stop_after])
        said = max(self._said, self._stop_after)
        given += stop.push(stream.push(self.tokens[self._stop_after : said]))
        run = stream.last_bytes(said)
        for count, token in enumerate(self.tokens[said:], said + 1):
            if stream.is_end_of_run(token):
                if (end := _completed_in_run(stop, stream.peek(), run)) is not None:
                    del self.tokens[end:]
                    return
                run = []
            given += stop.push(stream.push([token]))
            if (byte := stream.byte_of(token)) is not None:
                run.append((byte, count))
            elif not run:
                ended = copy(stop)
                if given + ended.push(stream.peek()) == whole and ended.found:
                    del self.tokens[count:]
                    return
        if (end := _completed_in_run(stop, stream.peek(), run)) is not None:
            del self.tokens[end:]


def _completed_in_run(stop: StopStrings, text: str, run: Sequence[tuple[int, int]]) -> int | None:
    """Return how many tokens there are with the one that completes a stop string in a run of bytes. None: none does.

    Args:
        stop: before the run.
        text: the end of the run's text.
        run: the bytes, and of each how many tokens there are with it.
    """

    def is_found(length: int) -> bool:
        ended = copy(stop)
        ended.push(text[:length])
        return ended.found

    if not run or not is_found(len(text)):
        return None
    last = bisect_left(range(len(text) + 1), True, key=is_found) - 1  # the string's last character
    try:
        characters = bytes(byte for byte, _ in run).decode()
    except UnicodeDecodeError:  # each byte is a replacement character, because of the last one
        return run[-1][1]
    ends = list(accumulate(len(character.encode()) for character in characters))
    return run[ends[last - len(text)] - 1][1]
