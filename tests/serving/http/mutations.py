"""Bodies of requests in which values are exchanged, left out, or have bytes changed."""

import copy
import json
import random
from typing import Any

VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**63, 1e300, "", "a", "\ud800", "x" * 300, [], [None], {}),
    *([{}], {"type": "text"}, {"type": "function"}, [{"type": "image"}], [[]], "auto", "user"),
)


def mutated_body(rng: random.Random, body: dict[str, Any]) -> bytes:
    """Return the JSON of a body with up to three mutations, and sometimes with other bytes."""
    body = copy.deepcopy(body)
    for _ in range(rng.randint(0, 3)):
        place, key = rng.choice([*places(body)])
        if rng.random() < 0.3:
            del place[key]
        else:
            place[key] = copy.deepcopy(rng.choice(VALUES))
        if not body:
            break
    raw = bytearray(json.dumps(body).encode())
    if rng.random() < 0.2:
        at = rng.randrange(len(raw))
        raw[at : at + rng.randint(0, 2)] = rng.choice((b"", b"\xff", b'"', b"}", b"[[", b"9"))
    return bytes(raw)


def places(value: Any) -> Any:
    """Yield each container in a value with each of its keys or indices."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from places(value[key])
