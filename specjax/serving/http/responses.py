"""The JSON that goes back: OpenAI's objects of completions and chats, whole and in pieces.

An `Answer` knows what was asked and the handles of the texts. It makes the object of a whole answer, and a stream's chunks.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from starlette.responses import Response

from specjax.errors import LogitsError
from specjax.evaluation.metrics import Acceptance
from specjax.serving.handle import EngineError, Handle, Piece
from specjax.serving.http.errors import RequestError
from specjax.serving.http.requests import TextRequest
from specjax.serving.http.tokens import TokenTexts

_ENCODER = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


def encode(value: Any) -> bytes:
    """``value`` as JSON.

    Examples:
        >>> from specjax.serving.http.responses import encode
        >>> encode({"text": "é"}).decode()
        '{"text":"é"}'
    """
    return _ENCODER.encode(value)


def event(value: Any) -> bytes:
    """``value`` as a server-sent event.

    Examples:
        >>> from specjax.serving.http.responses import event
        >>> event({"text": "a"})
        b'data: {"text":"a"}\\n\\n'
    """
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


class Answer:
    """What is said about the texts of a request.

    Attributes:
        asked: the request.
        handles: its texts: ``n`` of the first prompt, then those of the second and so on.
        prompts: ids of each prompt's tokens.

    Examples:
        >>> from specjax.serving import Engine
        >>> from specjax.serving.http.requests import Limits, read_completion
        >>> from specjax.serving.http.responses import Answer
        >>> from specjax.serving.http.tokens import TokenTexts
        >>> generate = specjax.load("embedded")
        >>> body = b'{"model": "tiny", "prompt": "import os", "max_tokens": 4, "temperature": 0}'
        >>> asked = read_completion(body, Limits(names=("tiny",), vocab_size=3072))
        >>> with Engine(generate, rows=1, capacity=64) as engine:
        ...     handle = engine.submit("import os", max_new_tokens=4)
        ...     pieces = list(handle)
        >>> answer = Answer(asked, [handle], [generate.encode("import os")], TokenTexts(generate.tokenizer))
        >>> answer.whole([pieces])["usage"]["total_tokens"]
        7
    """

    def __init__(
        self,
        asked: TextRequest,
        handles: Sequence[Handle],
        prompts: Sequence[Sequence[int]],
        texts: TokenTexts,
        *,
        with_acceptance: bool = False,
    ) -> None:
        """``with_acceptance``: say how the drafts fared, where the request is for one text."""
        self.asked, self.handles, self.prompts = asked, handles, prompts
        self._texts = texts
        self._with_acceptance = with_acceptance
        kind = "chatcmpl" if asked.is_chat else "cmpl"
        self._head = {"id": f"{kind}-{uuid.uuid4().hex}", "object": "", "created": int(time.time()), "model": asked.model}
        # Where each choice's next token begins, for text_offset.
        self._offsets = [0] * len(handles)
        # Tokens of each choice that are in the chunks so far: its handle may know more.
        self._streamed = [0] * len(handles)

    # --- whole ---------------------------------------------------------------------------------------------------------

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """The answer, when all texts have ended; ``pieces`` are those of each."""
        kind = "chat.completion" if self.asked.is_chat else "text_completion"
        choices = [self._choice(index, of_it) for index, of_it in enumerate(pieces)]
        return self._head | {"object": kind, "choices": choices, "usage": self.usage()} | self._metrics()

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        handle, asked = self.handles[index], self.asked
        choice: dict[str, Any] = {"index": index, "finish_reason": handle.finish_reason}
        logprobs = [] if asked.logprobs is None else [each for piece in pieces for each in piece.logprobs]
        logprobs = logprobs[: len(handle.tokens)]  # a stop string takes tokens back
        if asked.is_chat:
            choice["message"] = {"role": "assistant", "content": handle.text, "refusal": None}
            choice["logprobs"] = None if asked.logprobs is None else self._chat_logprobs(logprobs)
            return choice
        text = self.prompt_text(index) + handle.text if asked.echo else handle.text
        choice["text"] = text
        if asked.logprobs is None:
            choice["logprobs"] = None
        else:
            first = [*self._echoed(index)] if asked.echo else []
            choice["logprobs"] = self._completion_logprobs(index, [*first, *map(_entry, logprobs)])
        return choice

    # --- in pieces -----------------------------------------------------------------------------------------------------

    def first(self, index: int) -> dict[str, Any] | None:
        """The chunk that comes before a choice's text: a chat's role, or the prompt that is echoed; None: there is none."""
        if self.asked.is_chat:
            return self._chunk(index, {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None})
        if not self.asked.echo:
            return None
        logprobs = None if self.asked.logprobs is None else self._completion_logprobs(index, [*self._echoed(index)])
        return self._chunk(index, {"text": self.prompt_text(index), "logprobs": logprobs, "finish_reason": None})

    def piece(self, index: int, piece: Piece) -> dict[str, Any] | None:
        """The chunk of a piece; None where there is nothing in it."""
        asked = self.asked
        self._streamed[index] += len(piece.tokens)
        spans = piece.spans if asked.include_accepted else ()
        logprobs: Any = None
        if asked.logprobs is not None and piece.logprobs:
            if asked.is_chat:
                logprobs = self._chat_logprobs(piece.logprobs)
            else:
                logprobs = self._completion_logprobs(index, [*map(_entry, piece.logprobs)])
        if not piece.text and logprobs is None and not (asked.include_accepted and piece.tokens):
            return None
        choice: dict[str, Any] = {"delta": {"content": piece.text}} if asked.is_chat else {"text": piece.text}
        choice |= {"logprobs": logprobs, "finish_reason": None}
        if asked.include_accepted:
            choice["accepted"] = [[text, accepted] for text, accepted in spans]
            choice |= {"tokens": len(piece.tokens), "accepted_tokens": sum(piece.accepted)}
        return self._chunk(index, choice)

    def last(self, index: int) -> dict[str, Any]:
        """The chunk that says why a choice has ended."""
        choice: dict[str, Any] = {"delta": {}} if self.asked.is_chat else {"text": ""}
        self._streamed[index] = len(self.handles[index].tokens)  # a stop string takes tokens back
        return self._chunk(index, choice | {"logprobs": None, "finish_reason": self.handles[index].finish_reason})

    def total(self) -> dict[str, Any]:
        """The chunk with the usage, after all choices."""
        return self._head | {"object": self._chunk_kind, "choices": [], "usage": self.usage()} | self._metrics()

    def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        made = self._head | {"object": self._chunk_kind, "choices": [{"index": index} | choice]}
        if self.asked.continuous_usage:
            return made | {"usage": self._counts(sum(self._streamed))}
        return made | {"usage": None} if self.asked.include_usage else made

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.asked.is_chat else "text_completion"

    # --- usage and acceptance ------------------------------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """How many tokens there were. A prompt counts once, however many texts it has."""
        first = self.handles[:: self.asked.n]
        usage: dict[str, Any] = self._counts(sum(len(handle.tokens) for handle in self.handles))
        usage["prompt_tokens_details"] = {"cached_tokens": sum(handle.cached_tokens for handle in first)}
        if self.asked.prediction is not None:
            # A text that goes through the same part of its prediction twice counts it once.
            accepted = sum(min(handle.predicted_tokens, handle.prediction_length) for handle in self.handles)
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(handle.prediction_length for handle in self.handles) - accepted,
            }
        return usage

    def _counts(self, completion: int) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}

    def _metrics(self) -> dict[str, Any]:
        if not self._with_acceptance:
            return {}
        if len(self.handles) > 1:  # whose steps were these?
            return {"metrics": None}
        return {"metrics": {"speculative_decoding": acceptance_object(self.handles[0].acceptance)}}

    # --- logprobs ------------------------------------------------------------------------------------------------------

    def prompt_text(self, index: int) -> str:
        """The prompt of a choice, as text."""
        prompt_index = index // self.asked.n
        given = self.asked.prompts[prompt_index]
        return given if isinstance(given, str) else self._texts.decode(self.prompts[prompt_index])

    def _echoed(self, index: int) -> Iterable[tuple[int, float | None, Any]]:
        """The prompt's tokens, the first of which nothing comes before."""
        yield self.prompts[index // self.asked.n][0], None, None
        yield from map(_entry, self.handles[index].prompt_logprobs)

    def _completion_logprobs(self, index: int, entries: Sequence[tuple[int, float | None, Any]]) -> dict[str, Any]:
        """``/v1/completions``: the likeliest tokens by their texts, the token itself among them."""
        tokens, values, likeliest, offsets = [], [], [], []
        for token, logprob, top in entries:
            text = self._texts.text(token)
            tokens.append(text)
            values.append(logprob)
            tops = {self._texts.text(each): _finite(value) for each, value in top or ()}
            likeliest.append(None if top is None else {text: logprob} | tops)
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": likeliest, "text_offset": offsets}

    def _chat_logprobs(self, logprobs: Iterable[Any]) -> dict[str, Any]:
        """``/v1/chat/completions``: with the bytes of each token."""
        content = [
            self._token_object(each.token, each.logprob)
            | {"top_logprobs": [self._token_object(token, value) for token, value in each.top]}
            for each in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token_object(self, token: int, logprob: float) -> dict[str, Any]:
        return {"token": self._texts.text(token), "logprob": _finite(logprob), "bytes": list(self._texts.bytes_of(token))}


def _entry(logprobs: Any) -> tuple[int, float, Any]:
    return logprobs.token, _finite(logprobs.logprob), logprobs.top


def _finite(logprob: float) -> float:
    """JSON has no infinity: what is impossible is written as OpenAI writes it."""
    return max(logprob, -9999.0)


def acceptance_object(acceptance: Acceptance | None) -> dict[str, Any]:
    """How the drafts of a text fared, in vLLM's words. Only steps count in which something was drafted.

    Examples:
        >>> from specjax.evaluation.metrics import summarise
        >>> from specjax.serving.http.responses import acceptance_object
        >>> result = specjax.generate(
        ...     target, specjax.PromptLookup(draft=2), prompts, max_new_tokens=8
        ... )
        >>> said = acceptance_object(summarise(result.stats))
        >>> sum(said["acceptance_histogram"]) == said["num_spec_steps"]
        True
    """
    drafted_at = acceptance.drafted_at if acceptance else ()
    accepted_at = acceptance.accepted_at if acceptance else ()
    steps, drafted = max(drafted_at, default=0), acceptance.drafted if acceptance else 0
    at_least = (steps, *accepted_at, 0)  # steps that accepted at least so many
    accepted = sum(accepted_at)
    return {
        "mean_acceptance_length": 1 + accepted / max(steps, 1),
        "draft_acceptance_rate": accepted / max(drafted, 1),
        "acceptance_histogram": [more - less for more, less in pairwise(at_least)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": len(accepted_at),
    }


CLOSE = {"Connection": "close"}
"""The header after which a connection is closed."""

UNEXPECTED = "an error of the server; see its log"
"""The message of an error that is nobody's fault but ours."""


def json_response(value: Any, status: int = 200, headers: Any = None) -> Response:
    """Return an answer whose body is ``value`` as JSON."""
    return Response(encode(value), status, headers, media_type="application/json")


def error_response(error: RequestError) -> Response:
    """Return the answer to a request that cannot be used."""
    return json_response(error.object, error.status, error.headers)


def draining_error() -> RequestError:
    """Return the error of a request that comes while the server shuts down."""
    return RequestError(503, "the server is shutting down", code="draining", headers={"Retry-After": "10"} | CLOSE)


def engine_message(error: EngineError) -> str:
    """Return what a client is told of an engine that could not go on."""
    if error.__cause__ is None or isinstance(error.__cause__, LogitsError):  # whose message says it all
        return str(error)
    return f"{error}: {type(error.__cause__).__name__}"
