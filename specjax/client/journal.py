"""The file with which another process can continue a text."""

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
    """A file with the committed tokens of a text.

    Examples:
        >>> from pathlib import Path
        >>> from specjax.client.journal import Journal
        >>> from specjax.client.exchange import ExchangeRequest
        >>> journal = Journal(Path("text.json"))
        >>> request = ExchangeRequest((5, 6), specjax.SamplingParams(max_new_tokens=8))
        >>> exchange = journal.open(request)  # the file does not exist
        >>> exchange.tokens.append(7)
        >>> journal.keep(exchange)
        >>> journal.open(request).tokens  # in another process
        [5, 6, 7]
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def open(self, request: ExchangeRequest) -> Exchange:
        """Return the text as the file has it, or a new text if there is no file.

        Raises:
            InputError: The file belongs to another request, or it is not a journal.
        """
        try:
            raw = self._path.read_bytes()
        except FileNotFoundError:
            return Exchange(request)
        except OSError as error:
            raise InputError(
                f"journal={str(self._path)!r}: the file cannot be read ({error})"
            ) from None
        try:
            exchange = Exchange.restored(msgspec.json.decode(raw))
        except (msgspec.MsgspecError, KeyError, TypeError, UnicodeDecodeError, InputError):
            raise InputError(
                f"journal={str(self._path)!r}: the file is not a journal; give another file"
            ) from None
        committed = exchange.tokens[len(exchange.request.prompt) :]
        if len(committed) > exchange.request.params.max_new_tokens or not all(
            0 <= token < 2**31 for token in committed
        ):
            raise InputError(
                f"journal={str(self._path)!r}: the file is not a journal; give another file"
            )
        stored = Exchange(replace(exchange.request, precision=request.precision))
        if stored.snapshot() != Exchange(request).snapshot():
            raise InputError(
                f"journal={str(self._path)!r}: the file has another prompt or other settings; give"
                " another file, or remove it"
            )
        return exchange

    def keep(self, exchange: Exchange) -> None:
        """Store the committed tokens.

        The file is replaced at once, so a crash leaves either the old or the new content.

        Raises:
            InputError: The file cannot be written.
        """
        content = json.dumps(exchange.snapshot())
        temporary = self._path.with_name(self._path.name + ".new")
        try:
            temporary.unlink(missing_ok=True)
            # The file holds the prompt, so no other user may read it. O_EXCL: never write into a
            # file or through a link that somebody else has put there.
            with os.fdopen(
                os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600),
                "w",
                encoding="utf-8",
            ) as file:
                file.write(content)
                file.flush()
                # The content must be on disk before the old file is replaced.
                os.fsync(file.fileno())
            os.replace(temporary, self._path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()  # it may be incomplete
            if is_full_disk(error):
                raise FullDiskError(self._path, len(content.encode())) from None
            raise InputError(
                f"journal={str(self._path)!r}: the file cannot be written ({error})"
            ) from None
