"""Rewrite a data set with a target's answers: for ``specjax regenerate`` and for Ray.

Up to rounding, an answer depends only on the content of its prompt, the sampling parameters and the
seed. It does not depend on the order of the data or on other requests.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import jax

from specjax import decoding, pipeline
from specjax.chat import AnswerParser, AnswerText, ChatAnswer, prompt_text, response_form
from specjax.drafters import NoDraft
from specjax.errors import InputError
from specjax.sampling import named_key
from specjax.sampling_params import SamplingParams
from specjax.serving.engine import Engine
from specjax.serving.handle import Handle
from specjax.sharding import on_host
from specjax.templates import settings_of
from specjax.text import encode_chat
from specjax.training import fingerprint
from specjax.training.records import Message
from specjax.training.written import WrittenTokens, variables_record

NOT_ENCODED = "it cannot be encoded"
"""The beginning of the reason for a prompt that the tokenizer or the chat template refuses."""


class AnswerWriter(AbstractContextManager["AnswerWriter"]):
    """An engine that answers prompts, with the prompts' random keys and the answers' records.

    Attributes:
        capacity: the maximum number of tokens of a prompt with its answer.

    Examples:
        >>> from specjax.regeneration import AnswerWriter
        >>> params = specjax.SamplingParams(max_new_tokens=4)
        >>> with AnswerWriter(specjax.load("embedded"), params, rows=2, capacity=64) as writer:
        ...     prompt, why_not = writer.encode("import os")
        ...     answer = writer.submit(prompt, writer.key("00000000000000ff", copy=0)).result()
        >>> len(answer.tokens), sorted(writer.text_record(prompt, answer))
        (4, ['loss_spans', 'text', 'tokenizer_fingerprint', 'tokens'])
    """

    def __init__(
        self, generator: pipeline.TextGenerator, params: SamplingParams, *, rows: int, capacity: int
    ) -> None:
        """Start an engine with ``rows`` rows.

        The engine always drafts in the same way. Choosing the fastest draft by the clock could
        change the rounding, and a run that is continued must write what it would have written.
        """
        self._generator, self._params = generator, params
        with on_host():
            self._root = params.make_key()
        self._fingerprints = {
            is_chat: fingerprint.of_tokenizer(generator.tokenizer, is_chat)
            for is_chat in (False, True)
        }
        self._variables = settings_of(generator.tokenizer)
        self._form = response_form(generator.tokenizer)
        drafts = (None if generator.drafter is None else generator.drafter.draft_shape,)
        self._engine = Engine(
            generator,
            rows=rows,
            drafts=drafts,
            widths=(rows,),
            capacity=capacity,
            grammars=params.grammar is not None,
            penalties=params.has_adjustments or None,
        )
        self.capacity = self._engine.capacity

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the engine, and cancel its requests."""
        self._engine.close()

    def key(self, identity: str, copy: int, turn: int | None = None) -> jax.Array:
        """Return the random key of an answer.

        The key is computed on the host, because a device would finish its running call first.

        Args:
            identity: the document's hash, a hexadecimal number
                (`specjax.training.documents.identities`).
            copy: the index of the copy of the document.
            turn: the index of the answer in a conversation; None for a text, which has a single
                answer.
        """
        with on_host():
            key = jax.random.fold_in(named_key(self._root, identity), copy)
            return key if turn is None else jax.random.fold_in(key, turn)

    def encode(
        self, prompt: Any, most: int | None = None, tools: Sequence[Mapping[str, Any]] = ()
    ) -> tuple[list[int], str]:
        """Encode a prompt.

        Args:
            prompt: a text, messages or token ids.
            most: the prompt is cut to this many tokens; None keeps all.
            tools: declarations of tools for messages, as in OpenAI's API.

        Returns:
            The token ids, and the reason why the prompt cannot be answered, or "". There are no
            token ids if the prompt cannot be encoded at all.
        """
        try:
            if tools:
                prompt = encode_chat(self._generator.tokenizer, prompt, tools=tools)
            tokens = self._engine.encode(prompt)[:most]
        # An error of this prompt: its characters, or the order of its roles.
        except InputError as error:
            return [], f"{NOT_ENCODED} ({error})"
        if len(tokens) + self._params.max_new_tokens > self.capacity:
            return (
                [],
                (
                    f"there is no room for max_new_tokens={self._params.max_new_tokens} in"
                    f" {self.capacity} tokens"
                ),
            )
        return tokens, ""

    def submit(
        self, prompt: list[int], key: jax.Array, stop: Sequence[str] = (), *, is_chat: bool = False
    ) -> Handle:
        """Submit a prompt to the engine without waiting for the answer."""
        return self._engine.submit(prompt, self._params, key=key, stop=stop, is_chat=is_chat)

    def message(
        self,
        prompt: Sequence[int],
        answer: pipeline.Generation,
        stop: Sequence[str] = (),
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Message:
        """Return an answer as a message: its content, its reasoning and its tool calls.

        If it is not known how the model writes these, all text is content.

        Args:
            prompt: the tokens of the prompt, which may have begun the reasoning.
            answer: the answer.
            stop: strings, before the first of which the content ends.
            tools: the declarations of tools that the prompt has. Without any, what looks like a
                call is content.
        """
        if self._form is None:
            return {"role": "assistant", "content": answer.text}
        tokenizer = self._generator.tokenizer
        text = AnswerText(tokenizer, self._form, prompt).push(answer.tokens, last=True)
        parser = AnswerParser(
            self._form,
            prompt_text(tokenizer, prompt),
            tools,
            with_calls=bool(tools),
            whole_calls=True,
        )
        whole = ChatAnswer.from_events([*parser.feed(text), *parser.finish()])
        content = whole.content
        for end in stop:
            content = content.partition(end)[0]
        message: Message = {"role": "assistant", "content": content}
        if whole.reasoning:
            message["thinking"] = whole.reasoning
        if whole.tool_calls:
            message["tool_calls"] = [
                {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in whole.tool_calls
            ]
        return message

    def text_record(self, prompt: list[int], answer: pipeline.Generation) -> dict[str, Any]:
        """Return the record of a continued text: the text, and its tokens for training."""
        # Both are decoded together, because a character may span the cut between them.
        text = self._generator.tokenizer.decode([*prompt, *answer.tokens], skip_special_tokens=True)
        return {"text": text, **self.tokens_record([(prompt, answer.tokens)], is_chat=False)}

    def tokens_record(
        self, turns: Sequence[tuple[list[int], tuple[int, ...]]], *, is_chat: bool
    ) -> dict[str, Any]:
        """Return the record of the tokens of prompts and answers, turn by turn, for training."""
        variables = self._variables if is_chat else None
        return WrittenTokens.of_turns(turns, self._fingerprints[is_chat], variables).record()

    def empty_record(self, *, is_chat: bool) -> dict[str, Any]:
        """Return the token record of a prompt that is left out."""
        return {
            "tokens": [],
            "loss_spans": [[0, 0]],
            "tokenizer_fingerprint": self._fingerprints[is_chat],
            **variables_record(self._variables if is_chat else None),
        }


def positions_of(generator: pipeline.TextGenerator) -> int:
    """Return the maximum number of tokens of a text that a generator's models support."""
    return decoding.most_positions(generator.target, generator.drafter or NoDraft())
