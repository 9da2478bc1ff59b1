"""A file by which a text outlives the process that writes it."""

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from specjax.client.exchange import Exchange, ExchangeRequest
from specjax.errors import InputError
from specjax.files import FullDiskError, is_full_disk


class Journal:
    """A file that has a text as far as it is committed.

    Examples:
        >>> from pathlib import Path
        >>> from specjax.client.journal import Journal
        >>> from specjax.client.exchange import ExchangeRequest
        >>> journal, request = Journal(Path("text.json")), ExchangeRequest((5, 6), specjax.SamplingParams(max_new_tokens=8))
        >>> exchange = journal.open(request)  # nothing is there
        >>> exchange.tokens.append(7)
        >>> journal.keep(exchange)
        >>> journal.open(request).tokens  # of another process
        [5, 6, 7]
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, request: ExchangeRequest) -> Exchange:
        """The text, from where it was left.

        Raises:
            InputError: the file is of another request, or no journal.
        """
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return Exchange(request)
        except OSError as error:
            raise InputError(f"journal={str(self._path)!r}: cannot be read ({error})") from None
        try:
            exchange = Exchange.restored(msgspec.json.decode(raw))
        except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError):
            raise InputError(f"journal={str(self._path)!r}: is no journal of a text; give another file") from None
        committed = exchange.tokens[len(exchange.request.prompt) :]
        if len(committed) > exchange.request.params.max_new_tokens or not all(0 <= token < 2**31 for token in committed):
            raise InputError(f"journal={str(self._path)!r}: is no journal of a text; give another file")
        if replace(exchange.request, precision=request.precision) != request:
            raise InputError(
                f"journal={str(self._path)!r}: is of another prompt, or of other settings; give another file, or remove it"
            )
        return exchange

    def keep(self, exchange: Exchange) -> None:
        """What is committed now. All of it or nothing is in the file at any time.

        Raises:
            InputError: it cannot be written.
        """
        content = json.dumps(exchange.snapshot())
        beside = self._path.with_name(self._path.name + ".new")
        try:
            beside.unlink(missing_ok=True)
            # It holds the prompt: nobody else may read it, and it is nobody else's file.
            with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self._path)
        except OSError as error:
            with suppress(OSError):
                beside.unlink()  # half of it
            if is_full_disk(error):
                raise FullDiskError(self._path, len(content.encode())) from None
            raise InputError(f"journal={str(self._path)!r}: cannot be written ({error})") from None
