"""For Ray: a data set of any size, written on by as many processes as a cluster has room for.

`Generate` is a class for ``ray.data.Dataset.map_batches``. It needs no Ray itself: a dictionary of columns is enough.
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
from specjax.training.documents import REGENERATED_FROM, Document, find_origin, hash_of, identities, parse_record


class Generate:
    """Writes what a target says after each prompt of a batch. Ray makes one in each actor, which loads the model once.

    A prompt is a text, a conversation (a list of messages) or token ids. What is written after it depends on its content, the
    settings and the seed alone, up to rounding: not on the number of actors, on the batches, or on what else is written
    meanwhile. An actor that dies is replaced by Ray, and its batches are written again: the same. So rows of equal content get
    equal texts; where several texts of one prompt are wanted, number the rows in a column of their own (``copy``).

    These columns are added, or put in place of columns of the same name. ``specjax train`` reads files that have them:

    - ``answer``: what the target said, as text.
    - ``text``: of a text and of token ids, the prompt and the answer. Of a conversation ``messages``, the answer at its end.
    - ``tokens``: the ids of the prompt and of the answer, an end token included.
    - ``loss_spans``: where in them the answer begins and ends.
    - ``tokenizer_fingerprint``: whose ids they are.
    - ``regenerated_from``: the prompt's, so that a training holds out all that is written after it, or none.
    - ``left_out``: why there is no answer, where a prompt cannot be encoded or leaves no room for one; else empty. Such a row
      has no tokens, and ``train`` refuses it: filter it out.

    Examples:
        >>> from specjax.ray import Generate
        >>> settings = {"rows": 2, "max_new_tokens": 8, "temperature": 0.0, "capacity": 64}
        >>> with Generate("embedded", **settings) as generate:
        ...     batch = generate({"prompt": np.array(["import os", "class Stack:"])})
        >>> sorted(set(batch) - {"prompt"})[:4]
        ['answer', 'left_out', 'loss_spans', 'regenerated_from']
        >>> [len(tokens) - spans[0][0] for tokens, spans in zip(batch["tokens"], batch["loss_spans"])]
        [8, 8]

        With Ray, where ``dataset`` is a ``ray.data.Dataset`` with a column ``prompt``, on four GPUs::

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
        """Load the model and compile everything.

        Args:
            target: directory or hub id of the model that writes. Every machine must reach it.
            drafter: makes it faster, and changes nothing in its distribution; "none" is plain decoding.
            draft: shape of its drafts; empty: its own.
            column: with the prompts.
            copy: a column with the number of each row among those of equal content; empty: all are number 0.
            rows: texts at a time. When one ends another begins, until the batch has no more: so let ``batch_size`` be several
                times as large.
            capacity: most tokens of a text, prompt and answer; None: what the models have positions for, at most
                `specjax.serving.memory.USUAL_CAPACITY`.
            max_new_tokens: of an answer.
            temperature: 0 is greedy.
            top_p: in (0, 1].
            seed: of the random draws.
            chat_template: a file with a Jinja chat template, in place of the tokenizer's own.
            chat_template_kwargs: what the template is given beside the messages, such as ``{"enable_thinking": False}``.
            stop: a string, or several, before the first of which an answer ends.
            mesh: devices by axis, data and model, where a model takes several.

        Raises:
            InputError: an argument cannot be used; names it, its value and what to give instead.
        """
        stop = check_stop(stop)
        if max_new_tokens < 1:
            raise InputError(f"max_new_tokens={max_new_tokens}: must be at least 1")
        self.column, self.copy, self._stop = column, copy, stop
        stated = {"temperature": temperature, "top_p": top_p, "seed": seed, "max_new_tokens": max_new_tokens}
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
        """``batch`` with the columns of what was written. Every column is an array ``[B]``.

        Raises:
            InputError: there is no such column, or a row of it is no prompt.
        """
        for name in (self.column, *([self.copy] if self.copy else [])):
            if name not in batch:
                raise InputError(f"column={name!r}: the batch has {', '.join(batch)}: name one of these")
        numbers = [int(number) for number in batch[self.copy]] if self.copy else [0] * len(batch[self.column])
        rows = [_PromptRow(value, f"{self.column} of row {row}") for row, value in enumerate(batch[self.column])]
        begun = [self._begin(row, number) for row, number in zip(rows, numbers, strict=True)]
        return {**batch, **_columns([end() for end in begun])}

    def close(self) -> None:
        """End the engine. At the end of a process it is ended in any case."""
        self._writer.close()

    def __enter__(self) -> "Generate":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def _begin(self, row: "_PromptRow", number: int) -> Callable[[], dict[str, Any]]:
        """Ask for the answer to a prompt. The function that is returned waits for it, and gives the new columns of the row."""
        prompt, why_not = self._writer.encode(row.prompt)
        if why_not:
            return lambda: self._left_out(row, why_not)
        key = self._writer.key(row.identity, number, row.answers if row.is_chat else None)
        handle = self._writer.submit(prompt, key, self._stop, is_chat=row.is_chat)
        return lambda: self._written(row, prompt, handle.result())

    def _written(self, row: "_PromptRow", prompt: list[int], answer: pipeline.Generation) -> dict[str, Any]:
        """Return the columns of a row that has an answer."""
        columns = {"answer": answer.text, REGENERATED_FROM: row.origin, "left_out": ""}
        if not row.is_chat:
            record = self._writer.text_record(prompt, answer)
            text = record.pop("text")
            return columns | record | {"text": text}  # where the column of those that are left out is
        messages = [*row.prompt, {"role": "assistant", "content": answer.text}]
        return columns | self._writer.tokens_record([(prompt, answer.tokens)], is_chat=True) | {"messages": messages}

    def _left_out(self, row: "_PromptRow", why: str) -> dict[str, Any]:
        """Return the columns of a row that has no answer."""
        columns = {
            "answer": "",
            REGENERATED_FROM: row.origin,
            "left_out": why,
            **self._writer.empty_record(is_chat=row.is_chat),
        }
        return columns | ({"messages": list(row.prompt)} if row.is_chat else {"text": ""})


class _PromptRow:
    """A prompt, in whatever form a column has it.

    Attributes:
        prompt: a text, messages, or token ids.
        is_chat: whether it is messages.
        answers: how many of them are the assistant's.
        identity: a hash of its content.
        origin: of what it was itself written after, if that is known.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.is_chat, self.answers = False, 0
        if isinstance(value, str):
            document = Document(where, text=value)
            self.prompt, self.identity, self.origin = value, identities([document])[0], find_origin(document)
            return
        if not isinstance(value, Sequence | np.ndarray) or len(value) == 0:
            raise InputError(f"{where}: is {value!r:.80}: give a text, messages or token ids")
        if all(isinstance(each, Mapping) for each in value):
            document = parse_record({"messages": list(value)}, where)
            self.is_chat, self.prompt = True, list(document.messages or ())
            self.answers = sum(message["role"] == "assistant" for message in document.messages or ())
            self.identity, self.origin = identities([document])[0], find_origin(document)
            return
        try:
            self.prompt = np.asarray(value).astype(np.int32, casting="same_kind").tolist()
        except (TypeError, ValueError):
            raise InputError(f"{where}: is neither a text, nor messages, nor token ids") from None
        self.identity = self.origin = hash_of(f"tokens {self.prompt}")


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Lists stay lists, of whatever length: Arrow has a type for them, and arrays would be tensors."""
    columns = {}
    for name in rows[0] if rows else ():
        column = np.empty(len(rows), object)
        column[:] = [row[name] for row in rows]
        columns[name] = column
    return columns
