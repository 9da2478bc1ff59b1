"""The ids by which the results of tool calls name their calls."""

import hashlib
import re
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

_CHARACTERS = string.ascii_letters + string.digits


def new_call_id(length: int | None = None) -> str:
    """Return a random id of a call.

    Args:
        length: the number of letters and digits; None: 24 behind ``call_``, as OpenAI's.

    Examples:
        >>> from specjax.chat.call_ids import new_call_id
        >>> len(new_call_id(9)), len(new_call_id())
        (9, 29)
    """
    letters = "".join(secrets.choice(_CHARACTERS) for _ in range(length or 24))
    return letters if length else f"call_{letters}"


def with_ids_of_length(messages: Sequence[Any], length: int) -> list[Any]:
    """Return a chat whose ids of calls have a length, as some chat templates want it.

    An id of another form becomes one that is made from it, the same in a call and in its result. So
    a conversation that began elsewhere can go on.

    Args:
        messages: the messages.
        length: the number of letters and digits.

    Examples:
        >>> from specjax.chat.call_ids import with_ids_of_length
        >>> (message,) = with_ids_of_length([{"role": "tool", "tool_call_id": "call_1"}], 9)
        >>> len(message["tool_call_id"])
        9
    """
    return [_with_ids(message, length) for message in messages]


def _with_ids(message: Any, length: int) -> Any:
    if not isinstance(message, Mapping):
        return message
    changed = dict(message)
    if isinstance(message.get("tool_call_id"), str):
        changed["tool_call_id"] = _short(message["tool_call_id"], length)
    if isinstance(message.get("tool_calls"), list):
        changed["tool_calls"] = [
            {**call, "id": _short(call["id"], length)}
            if isinstance(call, Mapping) and isinstance(call.get("id"), str)
            else call
            for call in message["tool_calls"]
        ]
    return changed


def _short(call_id: str, length: int) -> str:
    if re.fullmatch(rf"[a-zA-Z0-9]{{{length}}}", call_id):
        return call_id
    digest = hashlib.sha256(call_id.encode(errors="replace")).digest()
    return "".join(_CHARACTERS[byte % len(_CHARACTERS)] for byte in digest[:length])
