"""Constrained decoding in the slowest and most obvious way: a full forward pass for each token.

Every token asks a fresh matcher of llguidance, and the law of `specjax.grammars` is written out
again in float64.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from llguidance import LLMatcher

from specjax.grammars import Grammar, GrammarCompiler
from specjax.sampling import position_keys, position_noise

ROOM = 64
"""The length to which texts are padded, so that the forward pass is compiled once."""


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
        return np.eye(len(logits))[np.argmax(np.where(legal, logits, -np.inf))]
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
        self._forward, self._vocab = jax.jit(target.forward), target.config.vocab_size
        self._tokenizer, self._source = compiler._tokenizer, compiler.source(grammar)
        self._stop_ids, self._setting = list(stop_ids), setting

    def legal(self, output: Sequence[int]) -> np.ndarray:
        """Return ``[V]`` bool, what may follow an output."""
        matcher = LLMatcher(self._tokenizer, self._source)
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
        logits = np.array(self._forward(padded)[0].logits[0, len(text) - 1])
        return constrained(logits, self.legal(output), self._setting)

    def text(self, prompt: Sequence[int], key: jax.Array, length: int) -> list[int]:
        """Return the output of coupled or greedy decoding, at most ``length`` tokens."""
        output: list[int] = []
        while len(output) < length and not (output and output[-1] in self._stop_ids):
            p = self.probabilities(prompt, output)
            position = jnp.array([[len(prompt) + len(output)]])
            noise = np.asarray(position_noise(position_keys(key[None], position), self._vocab))
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
