"""Regeneration of data sets with Ray, by as many processes as a cluster has room for.

`Generate` is a class for ``ray.data.Dataset.map_batches``. It does not need Ray itself: a
dictionary of columns is enough.
"""

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from specjax import pipeline
from specjax.errors import InputError
from specjax.regeneration import AnswerWriter, positions_of
from specjax.sampling_params import SamplingParams
from specjax.serving.memory import USUAL_CAPACITY
from specjax.sharding import make_mesh
from specjax.templates import Settings
from specjax.text import check_stop
from specjax.training.documents import find_origin, hash_of, identities
from specjax.training.records import REGENERATED_FROM, Document, parse_record


class Generate:
    """A generator of answers to the prompts of a batch, for ``ray.data.Dataset.map_batches``.

    Ray makes one per actor, which loads the model once.

    A prompt is a text, a conversation (a list of messages) or token ids. Up to rounding, an answer
    depends only on the prompt's content, the settings and the seed. It does not depend on the
    number of actors, on the batches or on other answers. Ray replaces an actor that dies and
    repeats its batches, with the same answers. So rows of equal content get equal answers. For
    several answers to one prompt, number its rows in a column of their own (``copy``).

    These columns are added, or replace columns of the same name. ``specjax train`` reads files that
    have them:

    - ``answer``: the text of the answer.
    - ``text``: for a text or token ids, the prompt and the answer. A conversation has ``messages``
      instead, with the answer at the end.
    - ``tokens``: the ids of the prompt and the answer, with an end token.
    - ``loss_spans``: where in ``tokens`` the answer begins and ends.
    - ``tokenizer_fingerprint``: identifies the tokenizer of the ids.
    - ``chat_template_kwargs``: for a conversation, the variables of the chat template, as JSON
      text.
    - ``regenerated_from``: identifies the original prompt, so that training holds out all answers
      to it, or none.
    - ``left_out``: why there is no answer, if the prompt cannot be encoded or leaves no room for an
      answer; else empty. Such a row has no tokens, and ``train`` refuses it: filter it out.

    Examples:
        >>> from specjax.ray import Generate
        >>> settings = {"rows": 2, "max_new_tokens": 8, "temperature": 0.0, "capacity": 64}
        >>> with Generate("embedded", **settings) as generate:
        ...     batch = generate({"prompt": np.array(["import os", "class Stack:"])})
        >>> sorted(set(batch) - {"prompt"})[:4]
        ['answer', 'left_out', 'loss_spans', 'regenerated_from']
        >>> spans = [row[0] for row in batch["loss_spans"]]
        >>> [len(tokens) - start for tokens, (start, _) in zip(batch["tokens"], spans)]
        [8, 8]

        With Ray on four GPUs; ``dataset`` is a ``ray.data.Dataset`` with a column ``prompt``::

            dataset.map_batches(
                Generate,
                fn_constructor_kwargs={"target": "Qwen/Qwen3-8B", "rows": 64},
                batch_size=512,
                compute=ray.data.ActorPoolStrategy(size=4),
                num_gpus=1,
            )
    """

    def __init__(
        self,
        target: str,
        *,
        drafter: str = "none",
        draft: str = "",
        column: str = "prompt",
        copy: str = "",
        rows: int = 16,
        capacity: int | None = None,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        top_p: float = 1.0,
        seed: int = 0,
        chat_template: str = "",
        chat_template_kwargs: str | Settings = "",
        stop: str | Sequence[str] = (),
        mesh: tuple[int, int] = (1, 1),
    ) -> None:
        """Load the model, and compile all programs.

        Args:
            target: a directory or hub id of the model that writes the answers. Every machine must
                have access to it.
            drafter: the drafter. It makes generation faster and does not change the distribution.
                "none" is plain decoding.
            draft: the shape of the drafts; empty is the drafter's default.
            column: the column with the prompts.
            copy: a column with the index of each row among rows of equal content; empty: all rows
                have index 0.
            rows: the number of sequences that are decoded together. A finished sequence is replaced
                by the next of the batch, so ``batch_size`` should be several times as large.
            capacity: the maximum number of tokens of a prompt with its answer. None is what the
                models support, at most `specjax.serving.memory.USUAL_CAPACITY`.
            max_new_tokens: the maximum number of tokens of an answer.
            temperature: the temperature; 0 is greedy decoding.
            top_p: the probability mass to sample from, in (0, 1].
            seed: the random seed.
            chat_template: a file with a Jinja chat template that replaces the tokenizer's own.
            chat_template_kwargs: variables for the chat template, such as ``{"enable_thinking":
                False}``.
            stop: a string or several strings. An answer ends before the first of them.
            mesh: the number of devices of each mesh axis, data and model, if a model uses several.

        Raises:
            InputError: an argument cannot be used. The message has its name, its value and the
                remedy.
        """
        stop = check_stop(stop)
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens}: must be at least 1")
        self.column, self.copy, self._stop = column, copy, stop
        stated = {
            "temperature": temperature,
            "top_p": top_p,
            "seed": seed,
            "max_new_tokens": max_new_tokens,
        }
        params = SamplingParams.of(None, stated)
        devices = None if mesh == (1, 1) else make_mesh(*mesh)
        generator = pipeline.load(
            target,
            drafter=None if drafter == "none" else drafter,
            draft=draft or None,
            mesh=devices,
            chat_template=chat_template,
            chat_template_kwargs=chat_template_kwargs,
            generation_config=None,
        )
        capacity = min(positions_of(generator), USUAL_CAPACITY) if capacity is None else capacity
        self._writer = AnswerWriter(generator, params, rows=rows, capacity=capacity)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return the batch with the new columns. Every column is an array ``[B]``.

        Raises:
            InputError: a column does not exist, or a row of it is not a prompt.
        """
        for name in (self.column, *([self.copy] if self.copy else [])):
            if name not in batch:
                raise InputError(
                    f"column={name!r}: the batch has {', '.join(batch)}: name one of these"
                )
        copies = (
            [int(copy) for copy in batch[self.copy]] if self.copy else [0] * len(batch[self.column])
        )
        rows = [
            _PromptRow(value, f"{self.column} of row {row}")
            for row, value in enumerate(batch[self.column])
        ]
        pending = [self._begin(row, copy) for row, copy in zip(rows, copies, strict=True)]
        return {**batch, **_columns([end() for end in pending])}

    def close(self) -> None:
        """Close the engine. At the end of the process it is closed in any case."""
        self._writer.close()

    def __enter__(self) -> "Generate":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _begin(self, row: "_PromptRow", copy: int) -> Callable[[], dict[str, Any]]:
        """Submit a prompt, and return a function that waits for the row's new columns."""
        prompt, why_not = self._writer.encode(row.prompt)
        if why_not:
            return lambda: self._left_out(row, why_not)
        key = self._writer.key(row.identity, copy, row.answers if row.is_chat else None)
        handle = self._writer.submit(prompt, key, self._stop, is_chat=row.is_chat)
        return lambda: self._written(row, prompt, handle.result())

    def _written(
        self, row: "_PromptRow", prompt: list[int], answer: pipeline.Generation
    ) -> dict[str, Any]:
        """Return the columns of a row with an answer."""
        columns = {"answer": answer.text, REGENERATED_FROM: row.origin, "left_out": ""}
        if not row.is_chat:
            record = self._writer.text_record(prompt, answer)
            text = record.pop("text")
            return columns | record | {"text": text}  # in the order of the columns of `_left_out`
        messages = [*row.prompt, self._writer.message(prompt, answer, self._stop)]
        return (
            columns
            | self._writer.tokens_record([(prompt, answer.tokens)], is_chat=True)
            | {"messages": messages}
        )

    def _left_out(self, row: "_PromptRow", why: str) -> dict[str, Any]:
        """Return the columns of a row without an answer."""
        columns = {
            "answer": "",
            REGENERATED_FROM: row.origin,
            "left_out": why,
            **self._writer.empty_record(is_chat=row.is_chat),
        }
        return columns | ({"messages": list(row.prompt)} if row.is_chat else {"text": ""})


class _PromptRow:
    """A prompt in any of the forms that a column may have.

    Attributes:
        prompt: a text, messages or token ids.
        is_chat: whether the prompt is messages.
        answers: the number of assistant messages among them.
        identity: the hash of the prompt's content.
        origin: the identity of the prompt from which this prompt was itself regenerated, if known.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.is_chat, self.answers = False, 0
        if isinstance(value, str):
            document = Document(where, text=value)
            self.prompt, self.identity, self.origin = (
                value,
                identities([document])[0],
                find_origin(document),
            )
            return
        if not isinstance(value, Sequence | np.ndarray) or len(value) == 0:
            raise InputError(f"{where}: is {value!r:.80}: give a text, messages or token ids")
        if all(isinstance(message, Mapping) for message in value):
            document = parse_record({"messages": list(value)}, where)
            self.is_chat, self.prompt = True, list(document.messages or ())
            self.answers = sum(
                message["role"] == "assistant" for message in document.messages or ()
            )
            self.identity, self.origin = identities([document])[0], find_origin(document)
            return
        try:
            self.prompt = np.asarray(value).astype(np.int32, casting="same_kind").tolist()
        except (TypeError, ValueError):
            raise InputError(f"{where}: must be a text, messages or token ids") from None
        self.identity = self.origin = hash_of(f"tokens {self.prompt}")


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Convert rows to columns.

    Lists stay lists of any length: Arrow has a type for them, but would make tensors of arrays.
    """
    columns = {}
    for name in rows[0] if rows else ():
        column = np.empty(len(rows), object)
        column[:] = [row[name] for row in rows]
        columns[name] = column
    return columns
