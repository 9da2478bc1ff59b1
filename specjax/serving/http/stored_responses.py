"""The responses that are stored for ``previous_response_id``, in memory, within bounds."""

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

MAX_RESPONSES = 4096
"""The largest number of stored responses."""

MAX_BYTES = 128 * 2**20
"""The largest number of bytes of their JSON, with the items of their conversations."""


@dataclass(frozen=True)
class _Stored:
    salt: str
    response: bytes
    items: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.items)


class StoredResponses:
    """A store of responses by owner. All methods are thread-safe.

    A response can be found only by its owner, with its cache salt. Where there is no room, the
    oldest response goes of the owner who has the most bytes, so no owner can drive out another who
    has less.

    Examples:
        >>> from specjax.serving.http.stored_responses import StoredResponses
        >>> store = StoredResponses()
        >>> store.add("owner", "", {"id": "resp_1"}, [{"role": "user", "content": "Hello"}])
        >>> store.items("owner", "resp_1"), store.items("somebody else", "resp_1")
        ([{'role': 'user', 'content': 'Hello'}], None)
    """

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self._by_owner: dict[str, OrderedDict[str, _Stored]] = {}
        self._sizes: dict[str, int] = {}
        self._lock = threading.Lock()

    def add(
        self,
        owner: str,
        salt: str,
        response: Mapping[str, Any],
        items: Sequence[Mapping[str, Any]],
    ) -> None:
        """Store a response, and the items of its conversation, its own output included."""
        stored = _Stored(salt, msgspec.json.encode(response), msgspec.json.encode(items))
        if stored.size > self._max_bytes:
            return
        with self._lock:
            self._by_owner.setdefault(owner, OrderedDict())[response["id"]] = stored
            self._sizes[owner] = self._sizes.get(owner, 0) + stored.size
            while self._is_full():
                largest = max(self._sizes, key=lambda name: self._sizes[name])
                self._drop(largest, next(iter(self._by_owner[largest])))

    def response(self, owner: str, response_id: str, salt: str = "") -> bytes | None:
        """Return the JSON of a response; None if this owner has none of this id and salt."""
        stored = self._find(owner, response_id, salt)
        return None if stored is None else stored.response

    def items(self, owner: str, response_id: str, salt: str = "") -> list[dict[str, Any]] | None:
        """Return the items of a response's conversation; None as in `response`."""
        stored = self._find(owner, response_id, salt)
        return None if stored is None else msgspec.json.decode(stored.items)

    def delete(self, owner: str, response_id: str, salt: str = "") -> bool:
        """Drop a response, and return whether there was one."""
        with self._lock:
            stored = self._by_owner.get(owner, {}).get(response_id)
            if stored is None or stored.salt != salt:
                return False
            self._drop(owner, response_id)
            return True

    def _find(self, owner: str, response_id: str, salt: str) -> _Stored | None:
        with self._lock:
            stored = self._by_owner.get(owner, {}).get(response_id)
        return stored if stored is not None and stored.salt == salt else None

    def _is_full(self) -> bool:
        count = sum(map(len, self._by_owner.values()))
        return count > self._max_responses or sum(self._sizes.values()) > self._max_bytes

    def _drop(self, owner: str, response_id: str) -> None:
        self._sizes[owner] -= self._by_owner[owner].pop(response_id).size
        if not self._by_owner[owner]:
            del self._by_owner[owner], self._sizes[owner]
