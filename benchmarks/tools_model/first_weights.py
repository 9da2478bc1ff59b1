"""The first weights: heads that begin as what a search for earlier text needs.

From random weights, a model of this size finds only after many millions of tokens that it can copy.
These begin with heads that look at the tokens before, heads that fetch a tool's name for its
description, heads that search for equal text, and a head that gathers what the search has brought
for the words of a request. Training adjusts all of them, and learns the rest: the form of a call,
the arguments, answers, and when to stop.

The residual stream begins as parts: a token's code, those of the four tokens before it, the name
of the tool that is being described, the name that a search has brought, the name
that a request's words have brought together, the role of the message,
and a constant.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.tools_model import network
from benchmarks.tools_model.conversations import Writer
from benchmarks.tools_model.encoding import encode
from specjax import text
from specjax.models.config import ModelConfig
from specjax.models.layers import normed
from specjax.models.params import Params
from specjax.models.rope import inverse_frequencies
from specjax.models.transformer import Target

PARTS = {
    "code": 92,
    "before1": 28,
    "before2": 20,
    "before3": 14,
    "before4": 14,
    "name": 24,
    "vote": 24,
    "told": 24,
    "role": 8,
    "free": 7,
    "constant": 1,
}
"""The sizes of the parts of the residual stream."""
SAMPLE = 1024


@dataclass
class Heads:
    """The heads of a layer.

    Attributes:
        q: ``[heads, H, d]`` the matrices of queries.
        k: those of keys.
        v: those of values.
        o: ``[heads, d, H]`` the matrices of outputs.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray

    @classmethod
    def small(cls, config: ModelConfig, rng: np.random.Generator) -> "Heads":
        """Return heads with small random numbers, which attend to all tokens alike."""
        into = (config.num_heads, config.hidden_size, config.head_dim)
        scale = config.hidden_size**-0.5
        q, k, v, o = (rng.normal(size=into) * scale for _ in range(4))
        return cls(q * 0.5, k * 0.5, v, o.transpose(0, 2, 1) * 0.05)

    def clear(self, head: int) -> None:
        """Set a head's numbers to 0."""
        for matrix in (self.q, self.k, self.v, self.o):
            matrix[head] = 0

    def store(self, params: Params) -> None:
        """Put the matrices into a layer's parameters, whose products are ``x @ W``."""
        for name, value in (("q", self.q), ("k", self.k), ("v", self.v)):
            joined = value.transpose(1, 0, 2).reshape(value.shape[1], -1)
            params[name] = jnp.asarray(joined, params[name].dtype)
        params["o"] = jnp.asarray(self.o.reshape(-1, self.o.shape[-1]), params["o"].dtype)


class Builder:
    """A builder of layers, one after the other.

    It measures on a sample of text how large the parts are where a layer reads them, so that a
    match has the score that it should have.
    """

    def __init__(self, tokenizer: Any, config: ModelConfig, seed: int) -> None:
        """Draw the codes of tokens."""
        self.config, self.rng = config, np.random.default_rng(seed)
        ends = np.cumsum([*PARTS.values()])
        self.parts = {
            name: slice(end - size, end)
            for (name, size), end in zip(PARTS.items(), ends, strict=True)
        }
        codes = self.rng.normal(size=(config.vocab_size, PARTS["code"]))
        self.codes = codes / np.linalg.norm(codes, axis=1, keepdims=True)
        # What the other parts hold of a code.
        self.short = np.linalg.qr(self.rng.normal(size=(PARTS["code"], 32)))[0]
        tokens = encode(tokenizer, Writer(f"sample {seed}").conversation(1500, turns=8))
        self.tokens = jnp.asarray(tokens[:SAMPLE])[None]
        self.quote, self.key = (
            text.encode_continuation(tokenizer, piece)[-1] for piece in ('{"name": "', '{"name')
        )
        self.mark = tokenizer.convert_tokens_to_ids("<|im_start|>")
        self.user, self.assistant = (
            text.encode_continuation(tokenizer, role)[0] for role in ("user", "assistant")
        )
        self.x = np.zeros((SAMPLE, config.hidden_size))

    def embed(self) -> np.ndarray:
        """Return the embedding ``[V, H]``: the code and the constant."""
        table = np.zeros((self.config.vocab_size, self.config.hidden_size))
        table[:, self.parts["code"]] = self.codes
        table[:, self.parts["constant"]] = 0.5
        return table

    def take(self, part: str, size: int) -> np.ndarray:
        """Return a matrix ``[H, size]`` that reads a part; of the code, the short one."""
        result = np.zeros((self.config.hidden_size, size))
        result[self.parts[part]] = (
            self.short[:, :size] if part == "code" else np.eye(PARTS[part])[:, :size]
        )
        return result

    def scaled(self, matrix: np.ndarray, size: float) -> np.ndarray:
        """Return the matrix times what makes its outputs that large, on the sample."""
        return matrix * size / np.linalg.norm(self.x @ matrix, axis=-1).mean()

    def match(
        self, heads: Heads, head: int, start: int, query: np.ndarray, key: np.ndarray, score: float
    ) -> int:
        """Add to a head's score that of equal outputs of two matrices; return the next column."""
        columns = slice(start, start + query.shape[1])
        size = (score * self.config.head_dim**0.5) ** 0.5
        heads.q[head, :, columns] = self.scaled(query, size)
        heads.k[head, :, columns] = self.scaled(key, size)
        return columns.stop

    def write(
        self, heads: Heads, head: int, value: np.ndarray, to: str, size: float, start: int = 0
    ) -> None:
        """Let a head write the outputs of a matrix ``[H, n]`` into a part."""
        columns = slice(start, start + value.shape[1])
        heads.v[head, :, columns] = self.scaled(value, 1.0)
        heads.o[head, columns] = self.take(to, value.shape[1]).T * size

    def looks_back(self, heads: Heads, head: int, distance: int) -> None:
        """Let a head attend to the token so many places before, and write its short code."""
        heads.clear(head)
        size, pairs = self.config.head_dim, 14
        angles = inverse_frequencies(self.config.rope, size)[0][:pairs] * distance
        constant, half = self.parts["constant"], size // 2
        amount = 6.5 / self.x[:, constant].mean()
        heads.q[head, constant, :pairs] = amount
        heads.k[head, constant, :pairs] = amount * np.cos(angles)
        heads.k[head, constant, half : half + pairs] = amount * np.sin(angles)
        to = f"before{distance}"
        self.write(heads, head, self.take("code", PARTS[to]), to, 0.8)

    def newest(
        self,
        heads: Heads,
        head: int,
        keys: list[tuple[np.ndarray, float]],
        recency: float = 23.0,
    ) -> None:
        """Let a head attend to the newest token whose products with vectors ``[H]`` are large.

        Each vector comes with the score of its product with a token like it. ``recency`` is how
        much a token's score falls in the first third of a faster pair's turn.
        """
        half = self.config.head_dim // 2
        constant = self.parts["constant"]
        amount = 8.0 / self.x[:, constant].mean()
        # A slow pair has the same angle in the whole window; a faster one prefers what is newer.
        slow, faster = half - 1, half // 2
        heads.q[head, constant, slow] = amount
        for vector, score in keys:
            heads.k[head, :, slow] += vector * score * self.config.head_dim**0.5 / 8.0
        size = (recency * self.config.head_dim**0.5) ** 0.5 / self.x[:, constant].mean()
        heads.q[head, constant, faster] = size
        heads.k[head, constant, faster] = size

    def pattern(self, part: str, token: int) -> np.ndarray:
        """Return the vector ``[H]`` whose product with a token that has this part is 1."""
        size = PARTS[part]
        code = (self.codes @ self.short)[token, : min(size, 32)]
        result = np.zeros(self.config.hidden_size)
        amount = np.linalg.norm(self.x[:, self.parts[part]], axis=-1).mean()
        if part == "code":
            code = self.codes[token]
        result[self.parts[part]] = code / np.linalg.norm(code) / amount
        return result

    def fetches_name(self, heads: Heads, head: int, place: int) -> None:
        """Let a head write the short code of the newest name's token at a place."""
        heads.clear(head)
        quote = self.pattern(f"before{place + 1}", self.quote)
        key = self.pattern(f"before{place + 3}", self.key)
        self.newest(heads, head, [(quote, 7.0), (key, 15.0)])
        value = self.take("code", PARTS["name"])
        # The first token of all, which is a mark, has no name.
        mark = np.zeros(self.config.hidden_size)
        mark[self.parts["code"]] = self.codes[self.mark]
        value -= np.outer(mark, mark @ value)
        self.write(heads, head, value, "name", 0.7 if place else 1.0)

    def fetches_role(self, heads: Heads, head: int) -> None:
        """Let a head write the code of the newest message's role."""
        heads.clear(head)
        self.newest(heads, head, [(self.pattern("before1", self.mark), 14.0)])
        self.write(heads, head, self.take("code", PARTS["role"]), "role", 0.7)

    def roles(self, *tokens: int) -> np.ndarray:
        """Return a vector ``[H]`` whose product with a token of these roles' messages is 1."""
        return np.sum([self.pattern("role", token) for token in tokens], axis=0)

    def searches(self, heads: Heads, head: int, score: float) -> int:
        """Let a head attend to the tokens after text like the query's last three tokens."""
        heads.clear(head)
        start = 0
        for query, key, size in (
            ("code", "before1", 20),
            ("before1", "before2", 16),
            ("before2", "before3", 12),
        ):
            start = self.match(
                heads, head, start, self.take(query, size), self.take(key, size), score
            )
        return start

    def brings_name(self, heads: Heads, head: int) -> None:
        """Let a head search for equal text in the list, and write the tool's name.

        The first token takes the attention of words that match nothing. The first free number says
        whether a word has matched.
        """
        column = self.searches(heads, head, 8.0)
        constant = self.parts["constant"].start
        average = self.x[:, constant].mean()
        first = self.pattern("before1", self.mark) + self.pattern("before2", self.mark)
        heads.q[head, constant, column] = 8.0 / average
        heads.k[head, :, column] = 13.5 * first - 8.0 * self.roles(self.user, self.assistant)
        size = PARTS["vote"]
        self.write(heads, head, self.take("name", size), "vote", 1.0)
        heads.v[head, :, size] = -first / 2
        heads.v[head, constant, size] += 1 / average
        heads.o[head, size, self.parts["free"].start] = 1.0

    def gathers(self, heads: Heads, head: int) -> None:
        """Let a head write the names that the newest request's words have brought."""
        heads.clear(head)
        matched = np.zeros(self.config.hidden_size)
        number = self.parts["free"].start
        matched[number] = 1 / np.abs(self.x[:, number]).mean()
        keys = [(self.roles(self.user), 6.0), (self.roles(self.assistant), -4.0), (matched, 14.0)]
        self.newest(heads, head, keys, recency=16.0)
        self.write(heads, head, self.take("vote", PARTS["told"]), "told", 1.0)

    def chooses(self, heads: Heads, head: int) -> None:
        """Let a head attend to the tokens after equal text, of the name that was voted for."""
        heads.clear(head)
        start = 0
        for query, key, size, score in (
            ("code", "before1", 14, 4.0),
            ("before1", "before2", 10, 4.0),
            ("before2", "before3", 12, 6.0),
            ("told", "code", PARTS["told"], 20.0),
        ):
            start = self.match(
                heads, head, start, self.take(query, size), self.take(key, size), score
            )

    def copies(self, heads: Heads, head: int, half: int, size: float) -> None:
        """Let a head write half of the code of what it attends to."""
        count = PARTS["code"] // 2
        part = self.parts["code"]
        columns = slice(part.start + half * count, part.start + (half + 1) * count)
        heads.v[head] = heads.o[head] = 0
        basis = np.zeros((self.config.hidden_size, count))
        basis[columns] = np.eye(count)
        heads.v[head, :, :count] = self.scaled(basis, 1.0)
        heads.o[head, :count] = basis.T * size

    def heads(self, index: int) -> Heads:
        """Return the heads of a layer."""
        heads = Heads.small(self.config, self.rng)
        if index == 0:
            for distance in (1, 2, 3, 4):
                self.looks_back(heads, distance - 1, distance)
        elif index == 1:
            self.fetches_name(heads, 0, 0)
            self.fetches_name(heads, 1, 1)
            self.fetches_role(heads, 2)
        elif index == 2:
            self.brings_name(heads, 0)
            for half in (0, 1):
                self.searches(heads, 1 + half, 5.0)
                self.copies(heads, 1 + half, half, 0.4)
        elif index == 3:
            self.gathers(heads, 0)
        elif index == 4:
            for half in (0, 1):
                self.chooses(heads, half)
                self.copies(heads, half, half, 1.0)
                self.searches(heads, 2 + half, 5.0)
                self.copies(heads, 2 + half, half, 0.5)
        return heads

    def build(self, params: Params) -> None:
        """Set the parameters of a model."""
        params["embed"] = jnp.asarray(self.embed(), params["embed"].dtype)
        states = params["embed"][self.tokens]
        for index, layer in enumerate(params["layers"]):
            self.x = np.asarray(normed(layer, "input_norm", self.config, states)[0], np.float64)
            self.heads(index).store(layer)
            layer["down"] = layer["down"] * 0.2
            states = network.layer_states(layer, states, self.config, index)


def first_target(tokenizer: Any, seed: int, **sizes: int) -> Target:
    """Return the model before training."""
    config = network.make_config(tokenizer, **sizes)
    target = Target.init(config, jax.random.key(seed))
    Builder(tokenizer, config, seed).build(target.params)
    return target
