"""What a target wrote, in its own tokens: the fields of a record beside its text, as ``specjax regenerate`` writes them.

A text that is tokenised again may have other tokens than it was written in. So training takes those that the target was given
and wrote, where they are there and are of its own tokenizer.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from specjax.config import ConfigError

TOKENIZER = "tokenizer_fingerprint"
"""The field that makes the others what they are here: other data sets have fields called ``tokens``, too."""

_TOKENS, _SPANS, _STARTS = "tokens", "loss_spans", "starts"

BEGUN = ".part"
"""What the name of a file ends with that is being written."""

NOTE = "# written by the target of the fingerprint "
"""How the file beside an output begins, in which the options are noted that it was written with."""


@dataclass(frozen=True)
class WrittenTokens:
    """The tokens that a target was given and wrote, of one document.

    Every answer follows the very tokens that it was written after. Those of a conversation mostly stand in one sequence: each
    prompt goes on from the answer before. It does not where the chat template leaves something of earlier answers out, such as
    what was thought, or where an answer's text, tokenised for the next prompt, has other tokens than the target wrote. There
    another sequence begins, with the prompt from its first token on, and of it only the answers after that prompt count.

    Attributes:
        tokens: ``[T]`` int32, all sequences one after another.
        loss_spans: ``[n, 2]`` begin and end in ``tokens`` of what the target wrote. An end token that it wrote is in it; where
            an answer was cut there is none.
        starts: where in ``tokens`` each sequence begins.
        tokenizer: its fingerprint, `specjax.training.fingerprint.of_tokenizer`.
        where: it was read from, for messages.
    """

    tokens: np.ndarray
    loss_spans: np.ndarray
    starts: tuple[int, ...]
    tokenizer: str
    where: str = ""

    @classmethod
    def of_turns(cls, turns: Sequence[tuple[Sequence[int], Sequence[int]]], tokenizer: str) -> "WrittenTokens":
        """From each prompt and its answer, the earliest first."""
        tokens: list[int] = []
        spans: list[tuple[int, int]] = []
        starts = [0]
        for prompt, answer in turns:
            known = tokens[starts[-1] :]
            if list(prompt[: len(known)]) != known:
                starts.append(len(tokens))
                known = []
            tokens += prompt[len(known) :]
            spans.append((len(tokens), len(tokens) + len(answer)))
            tokens += answer
        return cls(np.array(tokens, np.int32), np.array(spans, np.int32), tuple(starts), tokenizer)

    def record(self) -> dict[str, Any]:
        """The fields. That there is but one sequence is not written."""
        starts = {_STARTS: list(self.starts)} if len(self.starts) > 1 else {}
        return {
            TOKENIZER: self.tokenizer,
            _TOKENS: self.tokens.tolist(),
            _SPANS: self.loss_spans.tolist(),
            **starts,
        }

    def sequences(self, responses_only: bool) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """``[t]`` tokens of each sequence, and ``[t]`` bool which of them count as labels: what the target wrote; without
        ``responses_only`` all of the first sequence. Those after it repeat what stands there."""
        ends = (*self.starts[1:], len(self.tokens))
        counts = np.zeros(len(self.tokens), bool)
        counts[: 0 if responses_only else ends[0]] = True
        for begin, end in self.loss_spans:
            counts[begin:end] = True
        counts[list(self.starts)] = False  # they follow nothing
        for begin, end in zip(self.starts, ends, strict=True):
            yield self.tokens[begin:end], counts[begin:end]

    def check_vocabulary(self, vocab: int) -> None:
        """Raise a `ConfigError` where a token is none of ``vocab``."""
        if (most := int(self.tokens.max())) >= vocab:
            raise ConfigError(f"{self.where}: {_TOKENS}: holds the id {most}, and the vocabulary has {vocab} tokens")


def parse(record: Mapping[str, Any], where: str) -> WrittenTokens | None:
    """The tokens in a ``record``; None: it has none.

    Raises:
        ConfigError: they are damaged; ``where`` says which record it is.
    """
    tokenizer = record.get(TOKENIZER)
    if not isinstance(tokenizer, str) or record.get(_TOKENS) is None:
        return None

    def refuse(field: str, what: str) -> ConfigError:
        return ConfigError(f"{where}: {field}: {what}: take the field {TOKENIZER} out of the record, or write it again")

    tokens, spans = _whole_numbers(record[_TOKENS]), _whole_numbers(record.get(_SPANS))
    starts = _whole_numbers(record.get(_STARTS) or [0])
    if tokens is None or tokens.ndim != 1:
        raise refuse(_TOKENS, "must be a list of token ids")
    if spans is None or spans.ndim != 2 or spans.shape[1] != 2:
        raise refuse(_SPANS, "must be a list of pairs, begin and end")
    edges = spans.ravel()
    if (np.diff(edges) < 0).any() or edges[-1] > len(tokens):
        raise refuse(_SPANS, f"must be in order, and in the {len(tokens)} tokens")
    if starts is None or starts.ndim != 1 or starts[0] or (np.diff(starts) < 1).any() or starts[-1] >= len(tokens):
        raise refuse(_STARTS, f"must begin with 0, rise, and be in the {len(tokens)} tokens")
    return WrittenTokens(tokens, spans, tuple(starts.tolist()), tokenizer, where)


def is_beside(file: Path) -> bool:
    """Whether ``file`` is no data but stands beside some that is written: what is not whole yet, or the note of its options."""
    if file.name.endswith((f".jsonl{BEGUN}", ".yaml.tmp")):
        return True
    if file.suffix != ".yaml":
        return False
    with file.open(encoding="utf-8", errors="replace") as content:
        return content.read(len(NOTE)) == NOTE


def _whole_numbers(value: Any) -> np.ndarray | None:
    """int32; None where ``value`` is not made of whole numbers from 0 on, or is empty."""
    try:
        array = np.asarray(value)
    except ValueError:  # lists of unequal lengths
        return None
    if array.dtype.kind not in "iu" or not array.size or array.min() < 0 or array.max() >= 2**31:
        return None
    return array.astype(np.int32)
