"""An engine that computes nothing: its texts and the times of their pieces are known."""

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from specjax.errors import InputError
from specjax.evaluation.metrics import Acceptance
from specjax.sampling_params import SamplingParams
from specjax.serving.handle import EngineError, Piece, Times, TokenLogprobs
from specjax.serving.http import run
from specjax.serving.http.app import make_app
from specjax.serving.http.protocol import ConnectionLimits
from specjax.serving.http.service import AppOptions, Service
from specjax.serving.row_kinds import RowKind
from specjax.serving.scheduler import QueueFullError
from specjax.serving.statistics import PartStatistics
from specjax.serving.totals import KindCounts

VOCABULARY = 1024
CAPACITY = 64


class Characters:
    """A tokenizer whose tokens are characters.

    Tokens from 1000 on are bytes, as byte-level vocabularies write them.
    """

    chat_template: str | None = "made up"

    def __call__(
        self, text: str, add_special_tokens: bool = True, **_: Any
    ) -> dict[str, list[int]]:
        return {"input_ids": [1] * add_special_tokens + [ord(character) for character in text]}

    def get_vocab(self) -> dict[str, int]:
        return {"a": 97, "<0xC3>": 1003}

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(
            chr(token) if token < 1000 else "\N{REPLACEMENT CHARACTER}" for token in tokens
        )

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(token) if token < 1000 else f"<0x{token - 1000 + 0xC0:02X}>"


def characters(text: str) -> list[int]:
    """Return the tokens of a text."""
    return [min(ord(character), 999) for character in text]


@dataclass
class MadeUpHandle:
    """A text whose next piece comes every ``pause`` seconds."""

    pieces: list[Piece]
    pause: float
    prompt: list[int]
    settings: dict[str, Any]
    error: BaseException | None = None
    times: Times = field(default_factory=lambda: Times(submitted=time.perf_counter()))
    cancelled_at: float | None = None
    cached_tokens: int = 1
    predicted_tokens: int = 0
    prediction_length: int = 0
    acceptance: Any = None
    grammar_completed: bool | None = None
    is_at_stop_string: bool = False
    stop_string: str = ""
    reason: str = "length"

    @property
    def _arrived(self) -> int:
        until = time.perf_counter() if self.cancelled_at is None else self.cancelled_at
        if not self.pause:
            return len(self.pieces)
        return min(int((until - self.times.submitted) / self.pause), len(self.pieces))

    @property
    def finish_reason(self) -> str | None:
        if self._arrived == len(self.pieces):
            return "error" if self.error else self.reason
        return "cancelled" if self.cancelled_at is not None else None

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for piece in self.pieces[: self._arrived] for token in piece.tokens)

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces[: self._arrived])

    @property
    def prompt_logprobs(self) -> tuple[TokenLogprobs, ...]:
        return tuple(logprobs(token, self.settings["logprobs"]) for token in self.prompt[1:])

    def news(self, start: int) -> tuple[list[tuple[float, Piece]], bool]:
        times = itertools.count(self.times.submitted + self.pause, self.pause)
        pieces = [*zip(times, self.pieces[: self._arrived], strict=False)]
        return pieces[start:], self.finish_reason is not None

    def cancel(self) -> None:
        if self.finish_reason is None:
            self.cancelled_at = time.perf_counter()

    async def __aiter__(self) -> AsyncIterator[Piece]:
        from specjax.serving.handle import TextCancelledError

        number = 0
        while True:
            count, reason = self._arrived, self.finish_reason
            for piece in self.pieces[number:count]:
                self.times.first_token = self.times.first_token or time.perf_counter()
                yield piece
            number = count
            if reason == "cancelled":
                raise TextCancelledError("the text was cancelled")
            if reason == "error":
                raise EngineError("the engine failed") from self.error
            if reason is not None and number == len(self.pieces):
                self.times.finished = time.perf_counter()
                return
            await asyncio.sleep(0.001)


def logprobs(token: int, count: int) -> TokenLogprobs:
    return TokenLogprobs(token, -0.5, tuple((token + i, -0.5 - i) for i in range(count)))


class MadeUpEngine:
    """An engine that repeats ``text``, a token per piece.

    Attributes:
        submitted: the handles of all submitted texts.
        room: the largest number of texts that run at once; None: any number.
        error: the error that ends all texts; None: there is none.
        ends: whether a text ends by itself after ``text``, if its limit is not reached before.
        is_down: whether it refuses everything, as an engine that has failed.
        encoded_predictions: how often a prediction was encoded.
    """

    rows, capacity, max_logprobs, max_prediction = 4, CAPACITY, 20, 16
    client_drafts: Any = None
    has_grammars = has_penalties = has_thoughts = False
    default_sampling: Any = None

    def __init__(self, text: str = "The text.", pause: float = 0.0) -> None:
        self.text, self.pause = text, pause
        self.tokenizer = Characters()
        self.target = SimpleNamespace(
            config=SimpleNamespace(vocab_size=VOCABULARY, eos_token_ids=(2,))
        )
        self.submitted: list[MadeUpHandle] = []
        self.room: int | None = None
        self.error: BaseException | None = None
        self.ends = False
        self.is_down = False
        self.encoded_predictions = 0
        self.counted: dict[str, Any] = {
            "drafted_steps": 5,
            "drafted": 15,
            "accepted": 7,
            "accepted_at": (4, 2, 1),
            "parts": (
                PartStatistics("DraftModel", drafted=9, accepted=5, accepted_only=3),
                PartStatistics("Suffix", drafted=8, accepted=4, accepted_only=2),
            ),
            "draft": "chain:3",
            "kinds": {
                RowKind("thinking", "256"): KindCounts(4, 11, 3, 9, 6),
                RowKind("answer", "more"): KindCounts(3, 4, 2, 6, 1),
            },
        }

    @property
    def state(self) -> str:
        return "failed" if self.is_down else "running"

    def encode(self, prompt: Any, chat_template_kwargs: Any = None) -> list[int]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            if any(message["role"] == "nobody" for message in prompt):
                raise InputError("messages: the model's chat template refuses them (no such role)")
            prompt = "".join(f"{message['role']}:{message['content']}\n" for message in prompt)
            prompt += "".join(
                f"{name}={value}\n" for name, value in (chat_template_kwargs or {}).items()
            )
        return characters(prompt) if isinstance(prompt, str) else list(prompt)

    def encode_prediction(self, prediction: str) -> list[int]:
        self.encoded_predictions += 1
        return self.encode(prediction)

    def submit(self, prompt: list[int], params: SamplingParams, **options: Any) -> MadeUpHandle:
        if self.is_down:
            raise EngineError("the engine failed") from RuntimeError("made up")
        if (
            self.room is not None
            and sum(handle.finish_reason is None for handle in self.submitted) >= self.room
        ):
            raise QueueFullError("as many requests wait as may")
        settings = {"logprobs": None, "prediction": None, "spans": False, **vars(params), **options}
        text = characters(self.answer(prompt, params))
        endless = text if self.ends else itertools.cycle(text)
        tokens = itertools.islice(endless, params.max_new_tokens)
        pieces = [self._piece(token, settings) for token in tokens]
        handle = MadeUpHandle(pieces, self.pause, prompt, settings, self.error)
        if self.ends and len(text) <= params.max_new_tokens:
            handle.reason = "stop"
        handle.acceptance = Acceptance(
            9, 14, 15, 7, 0, 14 / 9, 7 / 15, (), (), drafted_at=(5, 5, 5), accepted_at=(4, 2, 1)
        )
        if settings["prediction"] is not None:
            handle.predicted_tokens, handle.prediction_length = 2, len(settings["prediction"])
        self.submitted.append(handle)
        return handle

    def answer(self, prompt: list[int], params: SamplingParams) -> str:
        """Return the text of a request."""
        return self.text

    @staticmethod
    def _piece(token: int, settings: dict[str, Any]) -> Piece:
        count, text = settings["logprobs"], Characters().decode([token])
        reported = () if count is None else (logprobs(token, count),)
        return Piece(
            text, (token,), (True,), reported, ((text, True),) if settings["spans"] else ()
        )

    @property
    def statistics(self) -> Any:
        running = sum(handle.finish_reason is None for handle in self.submitted)
        pages = {
            "free_pages": 3,
            "pages": 4,
            "preemptions": 2,
            "prompt_tokens_read": 8,
            "prompt_tokens_shared": 2,
            "tokens_reread": 16,
        }
        programs = {"compiled": 3, "programs": 5}
        clients = SimpleNamespace(preempted=6)
        grammars = {
            "forced_tokens": 6,
            "illegal_nodes": 4,
            "mask_seconds": 0.5,
            "restored_rows": 3,
        }
        counted = pages | programs | grammars | self.counted
        return SimpleNamespace(running=running, waiting=1, clients=clients, **counted)


@contextmanager
def running(
    engine: Any,
    bounds: ConnectionLimits = ConnectionLimits(),
    drain_seconds: float = 5.0,
    tls: tuple[str, str] | None = None,
    bound: socket.socket | None = None,
    around: Callable[[Any], Any] = lambda app: app,
    **options: Any,
) -> Iterator[tuple[run._Server, tuple[str, int]]]:
    """Run uvicorn in a thread as `specjax serve` does, and yield the server and its address.

    It listens at ``bound``, or at a free port. ``around`` returns the ASGI application that runs,
    which may pass requests on to the one that it is given.
    """
    all_options: dict[str, Any] = {"names": ("tiny",), "only_loopback": True} | options
    service = Service(engine, AppOptions(**all_options))
    with bound or run.bind("127.0.0.1", 0) as listening:
        server = run._Server(
            run._config(around(make_app(service)), bounds, tls, service.drafts),
            service,
            drain_seconds,
            "",
        )
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
        thread.start()
        address = listening.getsockname()
        while not server.started:
            time.sleep(0.01)
        try:
            yield server, address
        finally:
            server.should_exit = server.force_exit = True
            thread.join(20)
            assert not thread.is_alive()


@contextmanager
def serving(
    engine: MadeUpEngine, bounds: ConnectionLimits = ConnectionLimits(), **options: Any
) -> Iterator[tuple[str, int]]:
    """Run a server as `running` does, and yield its address."""
    with running(engine, bounds, **options) as (_, address):
        yield address


def wait_until(happened: Any, seconds: float = 10.0) -> None:
    """Wait until ``happened()`` is true, and fail if it takes too long."""
    until = time.monotonic() + seconds
    while not happened():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.01)


def read_more(connection: socket.socket, most: int = 65536) -> bytes:
    """Return the next bytes of a connection, or fail if the other side has closed it.

    So a loop over the bytes always ends.
    """
    more = connection.recv(most)
    assert more, "the other side has closed the connection"
    return more
