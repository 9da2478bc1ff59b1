"""Constrained decoding in the slowest and most obvious way: a full forward pass for each token.

Every token asks a fresh matcher of llguidance, and the law of `specjax.grammars` is written out
again in float64.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llguidance import LLMatcher

from specjax.grammars import Grammar, GrammarCompiler
from specjax.sampling import position_keys, position_noise

ROOM = 64
"""The length to which texts are padded, so that the forward pass is compiled once."""


# Compiled once for all oracles of targets of equal shapes.
all_logits = jax.jit(lambda target, tokens: target.forward(tokens)[0].logits)
noise_of = jax.jit(
    lambda key, position, vocab: position_noise(position_keys(key[None], position), vocab),
    static_argnames="vocab",
)


def truncated(logits: np.ndarray, setting: dict[str, Any]) -> np.ndarray:
    """Return p ``[V]`` after temperature, top-k, top-p and min-p. No two logits are equal."""
    setting = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | setting
    scaled = logits / setting["temperature"]
    p = np.exp(scaled - scaled.max())
    order = np.argsort(-p, kind="stable")
    if setting["top_k"]:
        p[order[setting["top_k"] :]] = 0
    p /= p.sum()
    if setting["top_p"] < 1:
        before = np.cumsum(p[order]) - p[order]
        p[order[before >= setting["top_p"]]] = 0
    p[p < setting["min_p"] * p.max()] = 0
    return p / p.sum()


def constrained(logits: np.ndarray, legal: np.ndarray, setting: dict[str, Any]) -> np.ndarray:
    """Return p ``[V]`` of the law: over kept legal tokens, or over truncated legal ones."""
    logits = logits.astype(np.float64)
    if setting.get("temperature") == 0:
        p = np.zeros(len(logits))
        p[np.argmax(np.where(legal, logits, -np.inf))] = 1
        return p
    truncated_p = truncated(logits, setting)
    if (truncated_p[legal] > 0).any():
        p = np.where(legal, truncated_p, 0)
        return p / p.sum()
    return truncated(np.where(legal, logits, -np.inf), setting)


class Oracle:
    """The target, a tokenizer's compiler, a grammar and sampling parameters, for one text.

    Args:
        target: the target.
        compiler: the compiler, of which llguidance's tokenizer and the grammar's source are used.
        grammar: the grammar.
        stop_ids: the tokens that end the text.
        setting: sampling parameters by name, as `specjax.Sampling` takes them.
    """

    def __init__(
        self,
        target: Any,
        compiler: GrammarCompiler,
        grammar: Grammar,
        stop_ids: Sequence[int],
        **setting: Any,
    ) -> None:
        self._target, self._vocab = target, target.config.vocab_size
        self._tokenizer = compiler._tokenizer
        self._start = LLMatcher(self._tokenizer, compiler.source(grammar))
        self._stop_ids, self._setting = list(stop_ids), setting

    def legal(self, output: Sequence[int]) -> np.ndarray:
        """Return ``[V]`` bool, what may follow an output."""
        matcher = self._start.deep_copy()
        assert not output or matcher.consume_tokens(list(output)), output
        words = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        legal = np.unpackbits(words, bitorder="little")[: self._vocab].astype(bool)
        legal[[*self._tokenizer.eos_tokens, *self._stop_ids]] = False
        legal[self._stop_ids] = matcher.is_accepting()
        return legal

    def probabilities(self, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
        """Return ``[V]`` the distribution of the next token."""
        text = [*prompt, *output]
        padded = np.zeros((1, ROOM), np.int32)
        padded[0, : len(text)] = text
        logits = np.array(all_logits(self._target, padded))[0, len(text) - 1]
        return constrained(logits, self.legal(output), self._setting)

    def text(self, prompt: Sequence[int], key: jax.Array, length: int) -> list[int]:
        """Return the output of coupled or greedy decoding, at most ``length`` tokens."""
        output: list[int] = []
        while len(output) < length and not (output and output[-1] in self._stop_ids):
            p = self.probabilities(prompt, output)
            position = np.array([[len(prompt) + len(output)]])
            noise = np.asarray(noise_of(key, position, self._vocab))
            with np.errstate(divide="ignore"):
                output.append(int(np.argmax(np.log(p) + noise[0, 0].astype(np.float64))))
        return output

    def language(
        self, prompt: Sequence[int], length: int, output: tuple[int, ...] = (), mass: float = 1.0
    ) -> Iterator[tuple[tuple[int, ...], float]]:
        """Yield every output of at most ``length`` tokens with its probability."""
        if len(output) == length or (output and output[-1] in self._stop_ids):
            yield output, mass
            return
        p = self.probabilities(prompt, output)
        for token in np.flatnonzero(p):
            yield from self.language(prompt, length, (*output, int(token)), mass * float(p[token]))


@dataclass(frozen=True)
class Text:
    """A text that some engine has generated, and what it was generated with.

    Attributes:
        prompt: the tokens of the prompt.
        output: the tokens that were generated.
        key: the random key of the text.
        grammar: the grammar.
        stop_ids: the tokens that end the text.
        setting: sampling parameters by name.
        length: the largest number of tokens.
        is_coupled: whether the text must be the oracle's. Otherwise each token must be possible.
    """

    prompt: Sequence[int]
    output: Sequence[int]
    key: jax.Array
    grammar: Grammar
    stop_ids: Sequence[int]
    setting: dict[str, Any]
    length: int
    is_coupled: bool = True


@dataclass(frozen=True)
class Deviation:
    """A position at which a text is not the oracle's.

    Attributes:
        position: the index of the token in the output.
        token: the token of the text; -1 if the text has ended.
        expected: the oracle's token; -1 if the text should have ended.
        slack: the smallest change of two logits against each other that explains the difference;
            infinite if none does.
    """

    position: int
    token: int
    expected: int
    slack: float


class Reader:
    """Compares whole texts with what the oracle writes.

    The oracle's next token depends on the tokens before it. So a text is the oracle's if, and only
    if, each of its tokens is the oracle's after the tokens before it. One forward pass without a
    cache gives the logits of all positions, and a fresh matcher reads the tokens before each.

    Args:
        target: the target.
        compiler: the compiler, of which only llguidance's tokenizer is used.
        room: the length to which texts are padded.
        rows: the number of texts that are read at a time, so that one program is compiled.
    """

    def __init__(self, target: Any, compiler: GrammarCompiler, room: int, rows: int = 4) -> None:
        self._target, self._compiler = target, compiler
        self._room, self._rows = room, rows
        self._vocab = target.config.vocab_size
        self._noise = jax.jit(
            lambda keys, positions: position_noise(
                position_keys(keys[:, None], positions), self._vocab
            )
        )

    def deviations(self, texts: Sequence[Text]) -> list[list[Deviation]]:
        """Return where each text is not the oracle's. After a deviation the text is followed."""
        by_text: list[list[Deviation]] = []
        for start in range(0, len(texts), self._rows):
            some = texts[start : start + self._rows]
            padded = [*some, *[some[0]] * (self._rows - len(some))]
            tokens = np.zeros((self._rows, self._room), np.int32)
            for row, text in enumerate(padded):
                whole = [*text.prompt, *text.output]
                tokens[row, : len(whole)] = whole
            positions = np.broadcast_to(np.arange(self._room)[None], tokens.shape)
            keys = jnp.stack([text.key for text in padded])
            logits, noise = map(
                np.asarray, (all_logits(self._target, tokens), self._noise(keys, positions))
            )
            by_text += [list(self._of_text(t, logits[i], noise[i])) for i, t in enumerate(some)]
        return by_text

    def _of_text(self, text: Text, logits: np.ndarray, noise: np.ndarray) -> Iterator[Deviation]:
        oracle = Oracle(self._target, self._compiler, text.grammar, text.stop_ids, **text.setting)
        start = len(text.prompt)
        for index, token in enumerate(text.output):
            legal = oracle.legal(text.output[:index])
            has_ended = index > 0 and text.output[index - 1] in text.stop_ids
            if has_ended or not legal.any():
                yield Deviation(index, token, -1, np.inf)
                return
            rows = logits[start + index - 1], legal, text.setting
            noise_here = noise[start + index].astype(np.float64)
            p = constrained(*rows)
            if text.is_coupled:
                with np.errstate(divide="ignore"):
                    expected = int(np.argmax(np.log(p) + noise_here))
                if expected != token:
                    yield Deviation(index, token, expected, _slack(token, *rows, noise_here))
            elif p[token] == 0:
                yield Deviation(index, token, int(np.argmax(p)), _slack(token, *rows, None))
        has_ended = len(text.output) == text.length or set(text.output[-1:]) & set(text.stop_ids)
        if not has_ended and oracle.legal(text.output).any():
            yield Deviation(len(text.output), -1, -1, np.inf)


def _slack(
    token: int,
    logits: np.ndarray,
    legal: np.ndarray,
    setting: dict[str, Any],
    noise: np.ndarray | None,
) -> float:
    """Return the smallest change of logits that makes a token the next one; infinite if none.

    Changes of the logits move the scores, and the tokens that truncation keeps.
    """
    for slack in 2.0 ** np.arange(-24, -3):
        if token in _possible(slack, logits, legal, setting, noise):
            return float(slack)
    return np.inf


def _possible(
    slack: float,
    logits: np.ndarray,
    legal: np.ndarray,
    setting: dict[str, Any],
    noise: np.ndarray | None,
) -> set[int]:
    """Return the tokens that may come next if each logit is changed by up to ``slack``."""
    temperature = setting.get("temperature", 1.0)
    relative = 2 * slack / (temperature or 1.0)
    possible: set[int] = set()
    for sign in (-1, 1):
        moved = dict(setting)
        if "top_p" in setting:
            moved["top_p"] = setting["top_p"] * (1 + sign * relative)
        if "min_p" in setting:
            moved["min_p"] = setting["min_p"] * (1 - sign * relative)
        for top_k in {setting.get("top_k", 0), *_near(setting, logits, legal, slack)}:
            p = constrained(logits, legal, moved | {"top_k": top_k})
            if noise is None:
                possible |= set(np.flatnonzero(p).tolist())
                continue
            with np.errstate(divide="ignore"):
                scores = np.log(p) + noise
            if temperature == 0:
                best = np.where(legal, logits, -np.inf)
                possible |= set(np.flatnonzero(best >= best.max() - 2 * slack).tolist())
            possible |= set(np.flatnonzero(scores >= scores.max() - relative).tolist())
    return possible


def _near(setting: dict[str, Any], logits: np.ndarray, legal: np.ndarray, slack: float) -> set[int]:
    """Return other values of top-k that keep tokens whose logits are that near to the last kept."""
    top_k, near = setting.get("top_k", 0), set[int]()
    for values in (logits, logits[legal]) if top_k else ():
        ordered = np.sort(values)[::-1]
        if len(ordered) > top_k and ordered[top_k - 1] - ordered[top_k] <= 2 * slack:
            near |= {top_k + 1, max(1, top_k - 1)}
    return near
