"""The JSON of the answers: OpenAI's objects of completions and chats, whole and in chunks.

An `Answer` has the request and the handles of its texts. It makes the object of a whole answer, or
the chunks of a stream.
"""

import time
import uuid
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import msgspec
from starlette.responses import Response

from specjax.chat import Event, RegionGrew, RegionKind, RegionOpened
from specjax.errors import InputError, LogitsError
from specjax.evaluation.metrics import Acceptance
from specjax.serving.handle import EngineError, Handle, Piece, TokenLogprobs
from specjax.serving.http.errors import RequestError, error_body
from specjax.serving.http.regions import AnswerRegions, IdentifiedCall
from specjax.serving.http.requests import TextRequest
from specjax.serving.http.tokens import TokenTexts

_ENCODER = msgspec.json.Encoder()

DONE = b"data: [DONE]\n\n"
"""The last event of a stream."""


def encode(value: Any) -> bytes:
    """Return ``value`` as JSON.

    Examples:
        >>> from specjax.serving.http.responses import encode
        >>> encode({"text": "é"}).decode()
        '{"text":"é"}'
    """
    return _ENCODER.encode(value)


def event(value: Any) -> bytes:
    """Return ``value`` as a server-sent event.

    Examples:
        >>> from specjax.serving.http.responses import event
        >>> event({"text": "a"})
        b'data: {"text":"a"}\\n\\n'
    """
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


class Answer:
    """The answer to a request, as JSON objects.

    Attributes:
        request: the request.
        handles: the handles of its texts: ``n`` of the first prompt, then those of the second, and
            so on.
        prompts: the token ids of each prompt.
        regions: the regions of each text.

    Examples:
        >>> from specjax.serving import Engine
        >>> from specjax.serving.http.regions import AnswerRegions
        >>> from specjax.serving.http.requests import Limits, read_completion
        >>> from specjax.serving.http.responses import Answer
        >>> from specjax.serving.http.tokens import TokenTexts
        >>> generate = specjax.load("embedded")
        >>> body = b'{"model": "tiny", "prompt": "import os", "max_tokens": 4, "temperature": 0}'
        >>> request = read_completion(body, Limits(names=("tiny",), vocab_size=3072))
        >>> with Engine(generate, rows=1, capacity=64) as engine:
        ...     handle = engine.submit("import os", max_new_tokens=4)
        ...     pieces = list(handle)
        >>> tokens, texts = generate.encode("import os"), TokenTexts(generate.tokenizer)
        >>> answer = Answer(request, [handle], [tokens], texts, [AnswerRegions(None)])
        >>> answer.whole([pieces])["usage"]["total_tokens"]
        7
    """

    def __init__(
        self,
        request: TextRequest,
        handles: Sequence[Handle],
        prompts: Sequence[Sequence[int]],
        texts: TokenTexts,
        regions: Sequence[AnswerRegions],
        *,
        with_acceptance: bool = False,
    ) -> None:
        """Make the answer of a submitted request.

        Args:
            request: the request.
            handles: the handles of its texts.
            prompts: the token ids of each prompt.
            texts: the texts of single tokens.
            regions: the regions of each text, before its first token.
            with_acceptance: whether to report the acceptance of drafts, for a request with one
                text.
        """
        self.request, self.handles, self.prompts = request, handles, prompts
        self.regions = regions
        self._texts = texts
        self._with_acceptance = with_acceptance
        kind = "chatcmpl" if request.is_chat else "cmpl"
        self._head = {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "object": "",
            "created": int(time.time()),
            "model": request.model,
        }
        head = self._head | {"object": "chat.completion.chunk" if request.is_chat else _COMPLETION}
        self._event_head = b"data: " + encode(head)[:-1] + b","
        # Whether chunks say something of each token beside its text.
        self._reports_tokens = (
            request.logprobs is not None or request.include_accepted or request.return_token_ids
        )
        # The offset of each choice's next token in its text, for text_offset.
        self._offsets = [0] * len(handles)
        # The tokens of each choice in the chunks so far. Its handle may have more.
        self._streamed = [0] * len(handles)
        # The number of each choice's call that has opened last.
        self._newest_call = [-1] * len(handles)

    # --- whole ------------------------------------------------------------------------------------

    def whole(self, pieces: Sequence[Sequence[Piece]]) -> dict[str, Any]:
        """Return the whole answer, after all texts have ended, from the pieces of each text."""
        request = self.request
        kind = "chat.completion" if request.is_chat else _COMPLETION
        choices = [self._choice(index, text_pieces) for index, text_pieces in enumerate(pieces)]
        answer = self._head | {"object": kind, "choices": choices, "usage": self.usage()}
        if request.is_chat:  # it has one prompt
            answer |= self._of_prompt(0)
        else:
            for index, choice in enumerate(choices):
                choice.update(self._of_prompt(index))
        return answer | self._metrics()

    def _of_prompt(self, index: int) -> dict[str, Any]:
        """Return what an answer says about the prompt of a choice."""
        request, parts = self.request, {}
        if request.return_token_ids:
            parts["prompt_token_ids"] = list(self.prompts[index // request.n])
        if (count := request.prompt_logprobs) is not None:
            parts["prompt_logprobs"] = [None] + [
                self._by_token(logprobs, count) for logprobs in self.handles[index].prompt_logprobs
            ]
        return parts

    def _by_token(self, logprobs: TokenLogprobs, count: int) -> dict[str, Any]:
        """Return the log-probabilities at a position by token id, as vLLM does."""
        top = dict(logprobs.top[:count])
        ranks = {token: rank for rank, (token, _) in enumerate(logprobs.top, 1)}
        return {
            str(token): {
                "logprob": _finite(value),
                "rank": ranks.get(token),
                "decoded_token": self._texts.text(token),
            }
            for token, value in ({logprobs.token: logprobs.logprob} | top).items()
        }

    def _choice(self, index: int, pieces: Sequence[Piece]) -> dict[str, Any]:
        handle, request, regions = self.handles[index], self.request, self.regions[index]
        if request.is_chat:
            for piece in pieces:
                regions.push(piece.text)
            self._finish(index)
        choice: dict[str, Any] = {"index": index, "finish_reason": self._reason(index)}
        choice |= self._completed(index)
        if request.return_token_ids:
            choice["token_ids"] = list(handle.tokens)
        if request.logprobs is None:
            logprobs = []
        else:
            logprobs = [logprob for piece in pieces for logprob in piece.logprobs]
        logprobs = logprobs[: len(handle.tokens)]  # a stop string removes the tokens after it
        if request.is_chat:
            choice["message"] = _message(regions)
            choice["logprobs"] = None if request.logprobs is None else self._chat_logprobs(logprobs)
            return choice
        text = self.prompt_text(index) + handle.text if request.echo else handle.text
        choice["text"] = text
        if request.logprobs is None:
            choice["logprobs"] = None
        else:
            first = [*self._echoed(index)] if request.echo else []
            entries = map(self._entry, logprobs)
            choice["logprobs"] = self._completion_logprobs(index, [*first, *entries])
        return choice

    def _finish(self, index: int) -> list[Event]:
        """End the regions of a chat's text, and return the last events."""
        handle = self.handles[index]
        return self.regions[index].finish(str(handle.finish_reason), handle.is_at_stop_string)

    def _reason(self, index: int) -> str | None:
        """Return why a text ended, in OpenAI's words."""
        return self.regions[index].finish_reason or self.handles[index].finish_reason

    # --- in chunks --------------------------------------------------------------------------------

    def event(self, chunk: dict[str, Any]) -> bytes:
        """Return a chunk as a server-sent event, with the fields that all chunks have in common.

        These are encoded once, not for each token.
        """
        return self._event_head + _ENCODER.encode(chunk)[1:] + b"\n\n"

    def first(self, index: int) -> dict[str, Any] | None:
        """Return the chunk before a choice's text, or None; `event` completes each chunk.

        It has a chat's role, the echoed prompt, or the prompt's token ids.
        """
        request = self.request
        choice: dict[str, Any] = {"logprobs": None, "finish_reason": None}
        if request.is_chat:
            choice |= {"delta": {"role": "assistant", "content": ""}}
            return self._chunk(index, choice) | self._of_prompt(index)
        if not request.echo and not request.return_token_ids:
            return None
        choice |= {"text": self.prompt_text(index) if request.echo else ""}
        if request.echo and request.logprobs is not None:
            choice["logprobs"] = self._completion_logprobs(index, [*self._echoed(index)])
        return self._chunk(index, choice | self._of_prompt(index))

    def piece(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """Return the chunks of a piece: one for each region of a chat, and none if it is empty.

        The first of them has what belongs to the piece's tokens, such as their log-probabilities.
        """
        request = self.request
        self._streamed[index] += len(piece.tokens)
        if request.is_chat and not self._reports_tokens:
            return self._of_deltas(index, self._deltas(index, self.regions[index].push(piece.text)))
        deltas: list[tuple[dict[str, Any], list[Any]]] = []
        if request.is_chat:
            deltas = self._deltas_with_spans(index, piece)
        elif piece.text:
            deltas = [({}, [[text, accepted] for text, accepted in piece.spans])]
        logprobs: Any = None
        if request.logprobs is not None and piece.logprobs:
            if request.is_chat:
                logprobs = self._chat_logprobs(piece.logprobs)
            else:
                logprobs = self._completion_logprobs(index, [*map(self._entry, piece.logprobs)])
        lists_tokens = request.include_accepted or request.return_token_ids
        if not deltas and logprobs is None and not (lists_tokens and piece.tokens):
            return []
        chunks = []
        for delta, spans in deltas or [({"content": ""}, [])]:
            choice: dict[str, Any] = {"delta": delta} if request.is_chat else {"text": piece.text}
            choice |= {"logprobs": None, "finish_reason": None}
            if request.include_accepted:
                choice |= {"accepted": spans, "tokens": 0, "accepted_tokens": 0}
            if not chunks:  # what belongs to the tokens
                choice["logprobs"] = logprobs
                if request.include_accepted:
                    choice["tokens"] = len(piece.tokens)
                    choice["accepted_tokens"] = sum(piece.accepted)
                if request.return_token_ids:
                    choice["token_ids"] = list(piece.tokens)
            chunks.append(self._chunk(index, choice))
        return chunks

    def _deltas_with_spans(
        self, index: int, piece: Piece
    ) -> list[tuple[dict[str, Any], list[Any]]]:
        """Return the deltas of a piece of a chat's text, each with its parts by acceptance.

        A delta of a call has no parts. Text that was held back, as it might have begun a tag, is in
        the part with which it comes.
        """
        deltas: list[tuple[dict[str, Any], list[Any]]] = []
        for text, accepted in piece.spans or [(piece.text, False)]:
            for delta in self._deltas(index, self.regions[index].push(text)):
                texts = [part for part in delta.values() if isinstance(part, str)]
                if texts and deltas and deltas[-1][0].keys() == delta.keys():
                    last, spans = deltas[-1]
                    last.update({name: last[name] + part for name, part in delta.items()})
                else:
                    spans = []
                    deltas.append((delta, spans))
                if texts:
                    spans.append([texts[0], accepted])
        return deltas

    def _of_deltas(self, index: int, deltas: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return chunks with deltas alone."""
        return [
            self._chunk(index, {"delta": delta, "logprobs": None, "finish_reason": None})
            for delta in deltas
        ]

    def _deltas(self, index: int, events: Iterable[Event]) -> list[dict[str, Any]]:
        """Return the deltas of a chat's events, one for each region and for each call."""
        deltas: list[dict[str, Any]] = []
        last: Any = None
        for event in events:
            if event.kind is RegionKind.TOOL_CALL:
                deltas += self._call_delta(index, event)
                last = None
            elif isinstance(event, RegionGrew):
                names = ("content",) if event.kind is RegionKind.CONTENT else _REASONING
                if event.kind is last:  # more of the same region
                    deltas[-1] = {name: deltas[-1][name] + event.text for name in names}
                else:
                    deltas.append(dict.fromkeys(names, event.text))
                last = event.kind
        return deltas

    def _call_delta(self, index: int, event: Event) -> list[dict[str, Any]]:
        """Return the delta of an event of a call, in a list; none for its end."""
        ids = self.regions[index].call_ids
        if isinstance(event, RegionOpened):
            self._newest_call[index] = number = event.index
            function = {"name": event.name, "arguments": ""}
            call = {"index": number, "id": ids[number], "type": "function", "function": function}
        elif isinstance(event, RegionGrew):
            call = {"index": self._newest_call[index], "function": {"arguments": event.text}}
        else:
            return []
        return [{"tool_calls": [call]}]

    def last(self, index: int) -> list[dict[str, Any]]:
        """Return the chunks with the rest of a choice's text, and with its finish reason."""
        deltas = self._deltas(index, self._finish(index)) if self.request.is_chat else []
        return [*self._of_deltas(index, deltas), self._end(index)]

    def _end(self, index: int) -> dict[str, Any]:
        """Return the chunk with a choice's finish reason."""
        choice: dict[str, Any] = {"delta": {}} if self.request.is_chat else {"text": ""}
        # A stop string removes the tokens after it.
        self._streamed[index] = len(self.handles[index].tokens)
        choice |= {"logprobs": None, "finish_reason": self._reason(index)}
        return self._chunk(index, choice | self._completed(index))

    def total(self) -> dict[str, Any]:
        """Return the chunk with the usage, after all choices."""
        return {"choices": [], "usage": self.usage()} | self._metrics()

    def _chunk(self, index: int, choice: dict[str, Any]) -> dict[str, Any]:
        chunk: dict[str, Any] = {"choices": [{"index": index, **choice}]}
        if self.request.continuous_usage:
            chunk["usage"] = self._counts(sum(self._streamed))
        elif self.request.include_usage:
            chunk["usage"] = None
        return chunk

    def _completed(self, index: int) -> dict[str, bool | None]:
        """Return whether a choice satisfies its grammar as a whole, if the request has one."""
        if self.request.params.grammar is None:
            return {}
        return {"grammar_completed": self.handles[index].grammar_completed}

    # --- usage and acceptance ---------------------------------------------------------------------

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens. A prompt counts once, however many texts it has."""
        first = self.handles[:: self.request.n]
        usage: dict[str, Any] = self._counts(sum(len(handle.tokens) for handle in self.handles))
        usage["prompt_tokens_details"] = {
            "cached_tokens": sum(handle.cached_tokens for handle in first)
        }
        if self.request.is_chat:
            usage["completion_tokens_details"] = {
                "reasoning_tokens": sum(
                    regions.reasoning_tokens(len(handle.tokens))
                    for regions, handle in zip(self.regions, self.handles, strict=True)
                )
            }
        if self.request.prediction is not None:
            # A text may match the same part of its prediction twice, which must not exceed its
            # length.
            accepted = sum(
                min(handle.predicted_tokens, handle.prediction_length) for handle in self.handles
            )
            usage["completion_tokens_details"] = usage.get("completion_tokens_details", {}) | {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": sum(
                    handle.prediction_length for handle in self.handles
                )
                - accepted,
            }
        return usage

    def _counts(self, completion: int) -> dict[str, int]:
        prompt = sum(map(len, self.prompts))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
        }

    def _metrics(self) -> dict[str, Any]:
        if not self._with_acceptance:
            return {}
        if len(self.handles) > 1:  # the object describes one text, as in vLLM
            return {"metrics": None}
        return {"metrics": {"speculative_decoding": acceptance_object(self.handles[0].acceptance)}}

    # --- logprobs ---------------------------------------------------------------------------------

    def prompt_text(self, index: int) -> str:
        """Return the prompt of a choice, as text."""
        prompt_index = index // self.request.n
        prompt = self.request.prompts[prompt_index]
        return prompt if isinstance(prompt, str) else self._texts.decode(self.prompts[prompt_index])

    def _echoed(self, index: int) -> Iterable[tuple[int, float | None, Any]]:
        """Yield the entries of the prompt's tokens. The first one has no log-probability."""
        yield self.prompts[index // self.request.n][0], None, None
        yield from map(self._entry, self.handles[index].prompt_logprobs)

    def _completion_logprobs(
        self, index: int, entries: Sequence[tuple[int, float | None, Any]]
    ) -> dict[str, Any]:
        """Return the log-probabilities in the format of ``/v1/completions``.

        The top tokens are named by their texts, and the chosen token is one of them.
        """
        tokens, values, top_logprobs, offsets = [], [], [], []
        for token, logprob, top in entries:
            text = self._texts.text(token)
            tokens.append(text)
            values.append(logprob)
            tops = {self._texts.text(top_token): _finite(value) for top_token, value in top or ()}
            top_logprobs.append(None if top is None else {text: logprob} | tops)
            offsets.append(self._offsets[index])
            self._offsets[index] += len(text)
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": top_logprobs,
            "text_offset": offsets,
        }

    def _chat_logprobs(self, logprobs: Iterable[Any]) -> dict[str, Any]:
        """Return the log-probabilities in the format of ``/v1/chat/completions``."""
        content = [
            self._token_object(chosen.token, chosen.logprob)
            | {
                "top_logprobs": [
                    self._token_object(token, value)
                    for token, value in chosen.top[: self.request.logprobs]
                ]
            }
            for chosen in logprobs
        ]
        return {"content": content, "refusal": None}

    def _entry(self, logprobs: TokenLogprobs) -> tuple[int, float, Any]:
        # The engine reports more of them if the request's prompt_logprobs is larger.
        return logprobs.token, _finite(logprobs.logprob), logprobs.top[: self.request.logprobs]

    def _token_object(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._texts.text(token),
            "logprob": _finite(logprob),
            "bytes": list(self._texts.bytes_of(token)),
        }


_COMPLETION = "text_completion"
"""The kind of a completion's object, whole and in chunks."""

_REASONING = ("reasoning", "reasoning_content")
"""The names of the reasoning: the newer one, and that of older clients."""


def _message(regions: AnswerRegions) -> dict[str, Any]:
    """Return the message of a chat's answer."""
    has_parts = regions.reasoning or regions.calls
    content = None if has_parts and not regions.content else regions.content
    message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if regions.reasoning:
        message |= dict.fromkeys(_REASONING, regions.reasoning)
    if regions.calls:
        message["tool_calls"] = [_call_object(call) for call in regions.calls]
    return message


def _call_object(identified: IdentifiedCall) -> dict[str, Any]:
    call = identified.call
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": identified.id, "type": "function", "function": function}


def _finite(logprob: float) -> float:
    """Return -9999 for minus infinity, as OpenAI does, because JSON has no infinity."""
    return max(logprob, -9999.0)


def acceptance_object(acceptance: Acceptance | None) -> dict[str, Any]:
    """Return the acceptance of a text's drafts, under vLLM's names.

    Steps without a draft are left out.

    Examples:
        >>> from specjax.evaluation.metrics import summarise
        >>> from specjax.serving.http.responses import acceptance_object
        >>> result = specjax.generate(
        ...     target, specjax.PromptLookup(draft=2), prompts, max_new_tokens=8
        ... )
        >>> counts = acceptance_object(summarise(result.stats))
        >>> sum(counts["acceptance_histogram"]) == counts["num_spec_steps"]
        True
    """
    drafted_at = acceptance.drafted_at if acceptance else ()
    accepted_at = acceptance.accepted_at if acceptance else ()
    steps, drafted = max(drafted_at, default=0), acceptance.drafted if acceptance else 0
    at_least = (steps, *accepted_at, 0)  # entry k: the steps that accepted at least k tokens
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
"""The header that makes the client close the connection."""

UNEXPECTED = "an error of the server; see its log"
"""The message of an error of the server itself, without details."""


def json_response(value: Any, status: int = 200, headers: Any = None) -> Response:
    """Return a response whose body is ``value`` as JSON."""
    return Response(encode(value), status, headers, media_type="application/json")


def error_response(error: RequestError, path: str) -> Response:
    """Return the response to a request with an error, in the form of the path's interface."""
    return json_response(error_body(error, path), error.status, error.headers)


def draining_error() -> RequestError:
    """Return the error of a request that arrives while the server shuts down."""
    return RequestError(
        503, "the server is shutting down", code="draining", headers={"Retry-After": "10"} | CLOSE
    )


def engine_status(error: EngineError) -> int:
    """Return the status of an error of the engine: 400 where the request's grammar is the cause."""
    return 400 if isinstance(error.__cause__, InputError) else 500


def engine_message(error: EngineError) -> str:
    """Return the message for clients about an error of the engine."""
    # The message of such a cause is in the error's own message already.
    if error.__cause__ is None or isinstance(error.__cause__, LogitsError | InputError):
        return str(error)
    return f"{error}: {type(error.__cause__).__name__}"
