"""The tokens that a target read and generated, as ``specjax regenerate`` stores them in a record.

A text that is tokenized again may get other tokens than those that the target generated. So
training uses the stored tokens of a record if they are of its own tokenizer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.errors import InputError
from specjax.templates import Settings, read_settings, shown_settings
from specjax.training.unusable import UnusableRecordError

TOKENIZER = "tokenizer_fingerprint"
"""The field that marks the other fields as those of this module.

Other data sets may have a field ``tokens`` as well.
"""

_TOKENS, _SPANS, _STARTS = "tokens", "loss_spans", "starts"
_VARIABLES = "chat_template_kwargs"

BEGUN = ".part"
"""The end of the name of an unfinished file."""

NOTE = "# written by the target of the fingerprint "
"""The beginning of the note beside an output, a file with the options that it was made with."""


@dataclass(frozen=True)
class WrittenTokens:
    """The tokens of one document that a target has read and generated.

    Every answer follows the exact tokens that it was generated from. A conversation usually is one
    sequence, in which each prompt continues the answer before it. A prompt does not continue it if
    the chat template leaves parts of earlier answers out, such as reasoning, or if the text of an
    answer is tokenized differently for the next prompt. Then another sequence begins, with the
    whole prompt, in which only the answers after that prompt count as labels.

    Attributes:
        tokens: ``[T]`` int32 token ids of all sequences, one after the other.
        loss_spans: ``[n, 2]`` begin and end of each generated answer in ``tokens``. The end token
            belongs to the answer. An answer that was cut has none.
        starts: the index in ``tokens`` at which each sequence begins.
        tokenizer: the hash of the tokenizer, `specjax.training.fingerprint.of_tokenizer`.
        chat_template_kwargs: the variables that the chat template had; None for a text, or if they
            are not recorded.
        where: the place of the record, for messages.
    """

    tokens: np.ndarray
    loss_spans: np.ndarray
    starts: tuple[int, ...]
    tokenizer: str
    chat_template_kwargs: Settings | None = None
    where: str = ""

    @classmethod
    def of_turns(
        cls,
        turns: Sequence[tuple[Sequence[int], Sequence[int]]],
        tokenizer: str,
        chat_template_kwargs: Settings | None = None,
    ) -> "WrittenTokens":
        """Build the sequences from the prompt and the answer of each turn, in order."""
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        starts = [0]
        for prompt, answer in turns:
            sequence = tokens[starts[-1] :]
            if list(prompt[: len(sequence)]) != sequence:
                starts.append(len(tokens))
                sequence = []
            tokens += prompt[len(sequence) :]
            spans.append((len(tokens), len(tokens) + len(answer)))
            tokens += answer
        arrays = np.array(tokens, np.int32), np.array(spans, np.int32)
        return cls(*arrays, tuple(starts), tokenizer, chat_template_kwargs)

    def record(self) -> dict[str, Any]:
        """Return the fields for a record, without ``starts`` if there is a single sequence."""
        starts = {_STARTS: list(self.starts)} if len(self.starts) > 1 else {}
        return {
            TOKENIZER: self.tokenizer,
            **variables_record(self.chat_template_kwargs),
            _TOKENS: self.tokens.tolist(),
            _SPANS: self.loss_spans.tolist(),
            **starts,
        }

    def sequences(self, responses_only: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the tokens ``[t]`` of each sequence, and ``[t]`` bool which of them are labels.

        The answers count. Without ``responses_only``, all tokens of the first sequence count as
        well. Later sequences repeat tokens of the first, so their prompts never count.
        """
        ends = (*self.starts[1:], len(self.tokens))
        counts = np.zeros(len(self.tokens), bool)
        counts[: 0 if responses_only else ends[0]] = True
        for begin, end in self.loss_spans:
            counts[begin:end] = True
        counts[list(self.starts)] = False  # nothing precedes the first token of a sequence
        for begin, end in zip(self.starts, ends, strict=True):
            yield self.tokens[begin:end], counts[begin:end]

    def check_vocabulary(self, vocab: int) -> None:
        """Raise UnusableRecordError if a token id is not below ``vocab``."""
        if (largest := int(self.tokens.max())) >= vocab:
            raise UnusableRecordError(
                self.where,
                f"{_TOKENS}: it has the id {largest}, but the vocabulary has only {vocab} tokens",
            )


def variables_record(chat_template_kwargs: Settings | None) -> dict[str, str]:
    """Return the field of a record for the variables of a chat template, if they are not None.

    They are JSON text, because tables such as Parquet have no empty objects.
    """
    if chat_template_kwargs is None:
        return {}
    return {_VARIABLES: shown_settings(chat_template_kwargs)}


def parse(record: Mapping[str, Any], where: str) -> WrittenTokens | None:
    """Parse the tokens of a record; return None if it has none.

    Args:
        record: the record.
        where: the place of the record, for messages.

    Raises:
        UnusableRecordError: The tokens are damaged.
    """
    tokenizer = record.get(TOKENIZER)
    if not isinstance(tokenizer, str) or record.get(_TOKENS) is None:
        return None

    def refuse(field: str, what: str) -> UnusableRecordError:
        return UnusableRecordError(
            where,
            f"{field}: {what}; remove the field {TOKENIZER} from the record, or generate it again",
        )

    tokens, spans = _whole_numbers(record[_TOKENS]), _whole_numbers(record.get(_SPANS))
    starts = _whole_numbers(record.get(_STARTS) or [0])
    if tokens is None or tokens.ndim != 1:
        raise refuse(_TOKENS, "must be a list of token ids")
    if spans is None or spans.ndim != 2 or spans.shape[1] != 2:
        raise refuse(_SPANS, "must be a list of pairs of begin and end")
    edges = spans.ravel()
    if (np.diff(edges) < 0).any() or edges[-1] > len(tokens):
        raise refuse(_SPANS, f"must be in order, and within the {len(tokens)} tokens")
    if (
        starts is None
        or starts.ndim != 1
        or starts[0]
        or (np.diff(starts) < 1).any()
        or starts[-1] >= len(tokens)
    ):
        raise refuse(
            _STARTS, f"must begin with 0, increase, and be within the {len(tokens)} tokens"
        )
    variables = record.get(_VARIABLES)
    if variables is not None:
        try:
            variables = read_settings(variables)
        except InputError:
            raise refuse(_VARIABLES, "must be the JSON text of an object") from None
    return WrittenTokens(tokens, spans, tuple(starts.tolist()), tokenizer, variables, where)


def is_beside(file: Path) -> bool:
    """Return whether a file is not data, but an unfinished output or a note with its options."""
    if file.name.endswith((f".jsonl{BEGUN}", ".yaml.tmp")):
        return True
    if file.suffix != ".yaml":
        return False
    with file.open(encoding="utf-8", errors="replace") as content:
        return content.read(len(NOTE)) == NOTE


def _whole_numbers(value: Any) -> np.ndarray | None:
    """Return a value as an int32 array; None if it is empty, or not made of integers from 0 on."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of unequal lengths
        return None
    if array.dtype.kind not in "iu" or not array.size or array.min() < 0 or array.max() >= 2**31:
        return None
    return array.astype(np.int32)
