"""The acceptance of a server with an OpenAI-compatible API, measured through its counters.

The counters are those of the whole server. So requests are sent one at a time, and the growth of
the counters between two of them belongs to one answer, unless others use the server as well. This
shows in the number of generated tokens, and is reported.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any
from urllib.parse import urlsplit

from specjax.errors import InputError
from specjax.evaluation.counters import Counters, read_counters
from specjax.evaluation.questions import Question

ANSWER_SECONDS = 3600.0
"""The maximum number of seconds to wait for an answer."""

SETTLE_SECONDS = 10.0
"""The maximum number of seconds to wait until the counters include an answer."""

_PAUSE_SECONDS = 0.05
_WARM_UP = [{"role": "user", "content": "Count from one to ten."}]
_WARM_UP_TOKENS = 16


_REFUSALS = (400, 413, 422)
"""The codes with which servers refuse one request, such as one that is too long for the model."""


class RefusedRequestError(InputError):
    """The error that a server refuses a request, and may answer others."""


@dataclass(frozen=True)
class ServedAnswer:
    """A server's answer to one turn of a question.

    Attributes:
        question: the index of the question.
        category: the category of the question.
        seconds: the seconds from the request to the end of the answer.
        tokens: the number of its tokens, as the server states it.
        growth: what the counters grew by.
    """

    question: int
    category: str
    seconds: float
    tokens: int
    growth: Counters

    @property
    def tokens_of_strangers(self) -> int:
        """The number of tokens that the server generated meanwhile for other requests."""
        return max(0, self.growth.generated - self.tokens)


class MeasuredServer:
    """A server that is measured, and the model that it answers with.

    Attributes:
        url: the address of the server, without ``/v1``.
        name: the name of the model, in requests.
        chat: whether the server applies its chat template.
    """

    def __init__(
        self, url: str, name: str = "", api_key: str | None = None, chat: bool = True
    ) -> None:
        """Connect, and choose the model.

        Args:
            url: the address of the server, with or without ``/v1``.
            name: the name of the model; empty: the first one that the server lists.
            api_key: the key that the server requires; None: it requires none.
            chat: whether the server applies its chat template.

        Raises:
            InputError: the address is not one of HTTP, or the server cannot be used.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InputError(f"server={url!r}: give an address such as http://localhost:8000")
        self.url = url.rstrip("/").removesuffix("/v1").rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.chat = chat
        self.name = name or self._first_name()

    def counters(self) -> Counters:
        """Return the server's counters now."""
        return read_counters(self._request("/metrics").decode(errors="replace"))

    def complete(
        self, messages: Sequence[Mapping[str, str]], fields: Mapping[str, Any]
    ) -> tuple[str, int]:
        """Return the text of an answer, without its reasoning, and the number of its tokens.

        Args:
            messages: the messages of the chat. Without a chat template their texts are joined.
            fields: more fields of the request.
        """
        if self.chat:
            path, content = "/v1/chat/completions", {"messages": list(messages)}
        else:
            prompt = "\n".join(message["content"] for message in messages)
            path, content = "/v1/completions", {"prompt": prompt}
        answer = self._json(path, {"model": self.name, **content, **fields})
        try:
            choice = answer["choices"][0]
            text = choice["message"].get("content") if self.chat else choice["text"]
            return text or "", int(answer["usage"]["completion_tokens"])
        except (KeyError, IndexError, TypeError, AttributeError):
            raise InputError(
                f"server={self.url!r}: its answer is not a completion with a usage"
                f" ({json.dumps(answer)[:200]}); name an OpenAI-compatible server"
            ) from None

    def _first_name(self) -> str:
        models = self._json("/v1/models")
        try:
            return str(models["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise InputError(
                f"server={self.url!r}: /v1/models lists no model; name one with --served-model-name"
            ) from None

    def _json(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        content = self._request(path, body)
        try:
            return json.loads(content)
        except ValueError:
            raise InputError(
                f"server={self.url!r}: {path} answers no JSON; name an OpenAI-compatible server"
            ) from None

    def _request(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        request = urllib.request.Request(
            self.url + path,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", **self._headers},
        )
        try:
            with urllib.request.urlopen(request, timeout=ANSWER_SECONDS) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            explanation = error.read(300).decode(errors="replace")
            kind = RefusedRequestError if error.code in _REFUSALS else InputError
            raise kind(
                f"server={self.url!r}: {path} answers {error.code}: {explanation!r}; correct"
                " the option that it names, or the address"
            ) from None
        except OSError as error:
            raise InputError(
                f"server={self.url!r}: cannot be reached at {path} ({error}); check the address,"
                " and that the server runs"
            ) from None


def ask(
    model: MeasuredServer,
    questions: Sequence[Question],
    fields: Mapping[str, Any],
    refusals: list[str] | None = None,
    track: Callable[[Sequence[Question]], Iterable[Question]] = lambda questions: questions,
) -> list[ServedAnswer]:
    """Ask a server all turns of all questions, one at a time, and return how it answered.

    Each turn follows the server's own answer to the turn before. A short request comes first, which
    does not count: some counters appear only then.

    Args:
        model: the model.
        questions: the questions.
        fields: the fields of the requests beside the model and the messages.
        refusals: a list for the texts of errors with which the server refuses turns, such as those
            that are too long. A question ends before such a turn. None: the first one is raised.
        track: returns the questions and shows the progress.

    Raises:
        InputError: the server cannot be used, or its counters do not follow its answers.
    """
    model.complete(_WARM_UP, {**fields, "max_tokens": _WARM_UP_TOKENS})
    answers = []
    before = _settled(model, None, 0)
    for index, question in enumerate(track(questions)):
        messages: list[Mapping[str, str]] = []
        for turn in question.turns:
            messages.append({"role": "user", "content": turn})
            started = time.perf_counter()
            try:
                text, tokens = model.complete(messages, fields)
            except RefusedRequestError as error:
                if refusals is None:
                    raise
                refusals.append(str(error))
                break
            seconds = time.perf_counter() - started
            messages.append({"role": "assistant", "content": text})
            after = _settled(model, before, tokens)
            growth = after.since(before)
            answers.append(ServedAnswer(index, question.category, seconds, tokens, growth))
            before = after
    if refusals and not answers:
        raise InputError(refusals[0])
    return answers


def total_growth(answers: Sequence[ServedAnswer]) -> Counters:
    """Return what the counters grew by for several answers together."""
    return reduce(Counters.plus, (answer.growth for answer in answers))


def _settled(model: MeasuredServer, before: Counters | None, tokens: int) -> Counters:
    """Return the counters once they include ``tokens`` more, and two readings are equal."""
    until = time.monotonic() + SETTLE_SECONDS
    counters = model.counters()
    while True:
        time.sleep(_PAUSE_SECONDS)
        previous, counters = counters, model.counters()
        grown = counters.generated - (before.generated if before else 0)
        is_in = before is None or grown >= tokens
        if is_in and (counters == previous or time.monotonic() > until):
            return counters
        if time.monotonic() > until:
            raise InputError(
                f"server={model.url!r}: its /metrics counted {grown} tokens in the"
                f" {SETTLE_SECONDS:g} seconds after an answer of {tokens}; name the server that"
                " generates the answers itself, not one before it"
            )
