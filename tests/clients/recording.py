"""Record the bodies of requests, with long texts replaced by texts of our own.

    make test-clients RECORD=1

runs the programs against the engine that follows rules, and writes the bodies of each program into
`tests/clients/bodies`. Keys, types, order and lengths stay. Letters and digits of a text that is
longer than `LONGEST_KEPT` are replaced, and so are the identifiers of installations and sessions.
"""

import hashlib
import itertools
import json
import re
import uuid
from pathlib import Path
from typing import Any

BODIES = Path(__file__).parent / "bodies"
LONGEST_KEPT = 44
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_TEXT = (
    "the river runs past the old mill and under the bridge where boats wait for the tide in the"
    " evening people walk along the bank with their dogs and talk about the weather and the harvest"
)
_LETTERS = _TEXT.replace(" ", "")


def replaced(value: Any) -> Any:
    """Return a value of JSON in which all long texts are replaced. Equal texts stay equal."""
    if isinstance(value, dict):
        return {key: replaced(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [replaced(inner) for inner in value]
    return _replaced_text(value) if isinstance(value, str) else value


def _replaced_text(text: str) -> str:
    if text[:1] in "{[" and (again := _replaced_json(text)) is not None:
        return again
    if _UUID.search(text):
        return _UUID.sub(lambda match: str(_identifier(match[0])), text)
    return text if len(text) <= LONGEST_KEPT else _like(text)


def _replaced_json(text: str) -> str | None:
    """Return a text that is JSON with its texts replaced, or None if it is not JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    for separators in ((", ", ": "), (",", ":")):
        for is_ascii in (True, False):
            options: Any = {"separators": separators, "ensure_ascii": is_ascii}
            if json.dumps(value, **options) == text:
                return json.dumps(replaced(value), **options)
    return None


def _like(text: str) -> str:
    """Return a text of the same length, with the same kinds of characters at the same places."""
    start = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) % len(_LETTERS)
    letters = itertools.islice(itertools.cycle(_LETTERS), start, None)
    return "".join(_character(character, next(letters)) for character in text)


def _identifier(text: str) -> uuid.UUID:
    return uuid.uuid5(uuid.NAMESPACE_OID, text)


def _character(character: str, letter: str) -> str:
    if character.isdigit():
        return str(ord(letter) % 10) if character.isascii() else character
    if not character.isalpha():
        return character
    if not character.isascii():
        return "É" if character.isupper() else "é"
    return letter.upper() if character.isupper() else letter


class Recorder:
    """An ASGI application that passes requests on, and records those with a body.

    Attributes:
        requests: the path and the body of each request.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self.requests: list[tuple[str, Any]] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer a request."""
        parts: list[bytes] = []

        async def receive_and_record() -> Any:
            message = await receive()
            if message["type"] == "http.request":
                parts.append(message.get("body", b""))
                if not message.get("more_body") and any(parts):
                    self.requests.append((scope["path"], json.loads(b"".join(parts))))
            return message

        await self._app(scope, receive_and_record, send)


def write_bodies(name: str, versions: str, requests: list[tuple[str, Any]]) -> Path:
    """Write the bodies of a program, and return the file.

    Of all requests with one path that are streamed or not, the first, the one with the longest
    conversation, and those with other parameters are written.
    """
    chosen: dict[Any, tuple[str, Any]] = {}
    for path, body in requests:
        kind = (path, tuple(sorted(body)), bool(body.get("stream")))
        chosen.setdefault((kind, "first"), (path, body))
        _, longest = chosen.setdefault((kind, "longest"), (path, body))
        if len(json.dumps(body)) > len(json.dumps(longest)):
            chosen[kind, "longest"] = (path, body)
    lines: list[str] = []
    for path, body in chosen.values():
        line = json.dumps({"path": path, "body": replaced(body)}, ensure_ascii=False)
        if line not in lines:
            lines.append(line)
    file = BODIES / f"{name}.json"
    file.parent.mkdir(exist_ok=True)
    requests_text = ",\n    ".join(lines)
    file.write_text(
        f'{{\n  "program": {json.dumps(versions)},\n  "requests": [\n    {requests_text}\n  ]\n}}\n'
    )
    return file
