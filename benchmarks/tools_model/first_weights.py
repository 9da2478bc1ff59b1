"""The first weights: attention that is made by hand, so that only the readout must be learned.

From random weights, a model of this size finds only after many millions of tokens that it can copy.
Here all heads are made:

- Layer 0 looks at the four tokens before.
- Layer 1 fetches for each token the newest mark of a tool, the newest mark of a turn, the role of
  the message and the newest key of an object. So every token knows its tool, its turn and its role.
- Layer 2, with full attention, lets each token of a request attend to equal text in the list of
  tools, and brings the code of the tool where it is. Equal text in many tools brings the mean of
  their codes, which is small: frequent words count little.
- Layer 3 gathers what the request's tokens have brought.
- Layer 4, with full attention, copies the next token of the name of the tool that was gathered.
- Layer 5 copies the next token of the request or the result, after equal text.

The residual stream consists of parts. Its constant is so large that the norms divide all tokens by
nearly the same number. The MLPs begin as nothing.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.tools_model import network
from benchmarks.tools_model.encoding import TOOL_MARKS, TURN_MARKS
from specjax import text
from specjax.models.config import ModelConfig
from specjax.models.params import Params
from specjax.models.rope import inverse_frequencies
from specjax.models.transformer import Target

PARTS = {
    "constant": 1,
    "kind": 12,
    "code": 64,
    "stem": 32,
    "before1": 32,
    "before2": 32,
    "before3": 32,
    "before4": 24,
    "kind1": 12,
    "after_mark": 2,
    "before_argument": 1,
    "listed": 1,
    "matched": 3,
    "tool": 40,
    "vote": 40,
    "turn": 12,
    "role": 12,
    "key": 24,
    "in_object": 1,
    "first": 48,
    "asker": 12,
    "told": 40,
    "has_arguments": 1,
    "next": 64,
}
"""The sizes of the parts of the residual stream."""
_ENDS = np.cumsum([*PARTS.values()])
PLACES = {
    name: slice(int(end) - size, int(end))
    for (name, size), end in zip(PARTS.items(), _ENDS, strict=True)
}
"""Where the parts are."""
# Tokens of answers have neither tool nor vote, so what is written out has the same place.
PLACES["out"] = slice(PLACES["tool"].start, PLACES["tool"].start + PARTS["code"])
KINDS = (
    *("tool", "turn", "start", "end", "colon", "quote", "brace", "with"),
    *("user", "assistant", "result", "system"),
)
"""What a token is, if it is special for the heads."""
CONSTANT = 100.0
"""The constant of the residual stream; 1 after each norm."""


def spread_codes(count: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return ``count`` vectors of length 1 with small products between them."""
    codes = rng.normal(size=(count, size))
    codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    for _ in range(300 if count < 1000 else 0):
        products = codes @ codes.T - np.eye(count)
        codes -= 0.5 * (products**3) @ codes
        codes /= np.linalg.norm(codes, axis=1, keepdims=True)
    return codes


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
    def empty(cls, config: ModelConfig) -> "Heads":
        """Return heads that do nothing."""
        into = (config.num_heads, config.hidden_size, config.head_dim)
        q, k, v = (np.zeros(into) for _ in range(3))
        return cls(q, k, v, np.zeros((into[0], into[2], into[1])))

    def store(self, params: Params) -> None:
        """Put the matrices into a layer's parameters, whose products are ``x @ W``."""
        for name, value in (("q", self.q), ("k", self.k), ("v", self.v)):
            joined = value.transpose(1, 0, 2).reshape(value.shape[1], -1)
            params[name] = jnp.asarray(joined, params[name].dtype)
        params["o"] = jnp.asarray(self.o.reshape(-1, self.o.shape[-1]), params["o"].dtype)


class Head:
    """A head under construction: terms of its score, then what it writes."""

    def __init__(self, builder: "Builder", heads: Heads, index: int) -> None:
        """Begin with no terms."""
        self.builder, self.size = builder, builder.config.head_dim
        self.q, self.k = heads.q[index], heads.k[index]
        self.v, self.o = heads.v[index], heads.o[index]
        self.column = self.columns_of_values = 0

    def match(self, query: np.ndarray, key: np.ndarray, score: float) -> None:
        """Add ``score`` times the product of ``x @ query`` and ``x @ key`` to the score."""
        columns = slice(self.column, self.column + query.shape[1])
        assert columns.stop <= self.size, "the terms of a score need more columns than a head has"
        amount = (score * self.size**0.5) ** 0.5
        self.q[:, columns] = query * amount
        self.k[:, columns] = key * amount
        self.column = columns.stop

    def prefer(self, key: np.ndarray) -> None:
        """Add ``x @ key`` of the key, for a vector ``[H]``, to the score of every query."""
        self.match(self.builder.read("constant"), key[:, None], 1.0)

    def write(self, source: np.ndarray, to: str, start: int = 0) -> None:
        """Write ``x @ source`` of what the head attends to into a part, from a number on."""
        count = source.shape[1]
        columns = slice(self.columns_of_values, self.columns_of_values + count)
        assert columns.stop <= self.size, "the head writes more numbers than it has"
        begin = self.builder.parts[to].start + start
        self.v[:, columns] = source
        self.o[columns, begin : begin + count] = np.eye(count)
        self.columns_of_values = columns.stop


class Builder:
    """A builder of the layers."""

    def __init__(self, tokenizer: Any, config: ModelConfig, seed: int) -> None:
        """Draw the codes of tokens."""
        self.config, rng = config, np.random.default_rng(seed)
        self.tokenizer = tokenizer
        self.parts = PLACES
        self.codes = spread_codes(config.vocab_size, PARTS["code"], rng)
        # Words are the same with and without a space, and with a capital.
        names = [
            piece.strip().lower() if any(map(str.isalnum, piece)) else f"{piece} {token}"
            for token in range(config.vocab_size)
            for piece in [tokenizer.decode([token])]
        ]
        places = {name: place for place, name in enumerate(dict.fromkeys(names))}
        self.stems = spread_codes(len(places), PARTS["stem"], rng)[[places[name] for name in names]]
        self.tools = spread_codes(len(TOOL_MARKS), PARTS["tool"], rng)
        self.turns = np.eye(len(TURN_MARKS), PARTS["turn"])
        self.rng = rng

    def token(self, piece: str) -> int:
        """Return the first token of a text."""
        return text.encode_continuation(self.tokenizer, piece)[0]

    def kinds(self) -> dict[str, list[int]]:
        """Return the tokens of each kind."""
        of = self.tokenizer.convert_tokens_to_ids
        return {
            "tool": of([*TOOL_MARKS]),
            "turn": of([*TURN_MARKS]),
            "start": [of("<|im_start|>")],
            "end": [of("<|im_end|>")],
            "colon": [self.token('":')],
            "quote": [self.token(' "')],
            "brace": [self.token("{"), self.token(" {")],
            "with": [self.token(" with")],
            "user": [self.token("user")],
            "assistant": [self.token("assistant")],
            "result": [self.token("tool")],
            "system": [self.token("system")],
        }

    def embed(self) -> np.ndarray:
        """Return the embedding ``[V, H]``."""
        table = np.zeros((self.config.vocab_size, self.config.hidden_size))
        table[:, self.parts["constant"]] = CONSTANT
        table[:, self.parts["code"]] = self.codes
        table[:, self.parts["stem"]] = self.stems
        kinds = self.kinds()
        for index, kind in enumerate(KINDS):
            table[kinds[kind], self.parts["kind"].start + index] = 1
        table[kinds["tool"], self.parts["tool"]] = self.tools
        table[kinds["tool"], self.parts["listed"]] = 1
        table[kinds["turn"], self.parts["turn"]] = self.turns
        return table

    def read(self, part: str, size: int | None = None) -> np.ndarray:
        """Return a matrix ``[H, size]`` that reads the first numbers of a part."""
        size = PARTS[part] if size is None else size
        result = np.zeros((self.config.hidden_size, size))
        result[self.parts[part]] = np.eye(PARTS[part])[:, :size]
        return result

    def projected(self, part: str, size: int, seed: int) -> np.ndarray:
        """Return a matrix ``[H, size]`` that reads a projection of a stem in a part.

        It keeps a stem's length in the mean. The same seed gives the same projection.
        """
        rng = np.random.default_rng(seed)
        whole = np.linalg.qr(rng.normal(size=(PARTS["stem"], PARTS["stem"])))[0][: PARTS[part]]
        result = np.zeros((self.config.hidden_size, size))
        result[self.parts[part]] = whole[:, :size] * (PARTS["stem"] / size) ** 0.5
        return result

    def flag(self, part: str, kind: str | int) -> np.ndarray:
        """Return the vector ``[H]`` that reads one number of a part."""
        result = np.zeros(self.config.hidden_size)
        index = KINDS.index(kind) if isinstance(kind, str) else kind
        result[self.parts[part].start + index] = 1
        return result

    # --- layer 0 ---

    def looks_back(self, head: Head, distance: int) -> None:
        """Attend to the token so many places before, and write its stem."""
        half, pairs = self.config.head_dim // 2, 14
        angles = inverse_frequencies(self.config.rope, self.config.head_dim)[0][:pairs] * distance
        constant, amount = self.parts["constant"], 13.0
        head.q[constant, :pairs] = amount
        head.k[constant, :pairs] = amount * np.cos(angles)
        head.k[constant, half : half + pairs] = amount * np.sin(angles)
        to = f"before{distance}"
        head.write(self.read("stem", PARTS[to]), to)
        if distance == 1:
            head.write(self.read("kind"), "kind1")
        if distance in (1, 2):
            head.write(self.flag("kind", "turn")[:, None], "after_mark", distance - 1)
        if distance == 2:
            first = self.flag("kind", "with") + self.flag("kind", "brace")
            head.write(first[:, None], "before_argument")

    # --- layer 1 ---

    def newest(self, head: Head, keys: np.ndarray) -> None:
        """Attend to the newest token for which ``x @ keys`` is 1, for a vector ``[H]``."""
        constant, half = self.parts["constant"], self.config.head_dim // 2
        frequencies = np.asarray(inverse_frequencies(self.config.rope, self.config.head_dim)[0])
        # The sine of the distance falls from 0 to the end of the window.
        pair = int(np.abs(frequencies - np.pi / 2 / network.WINDOW).argmin())
        amount = (800 * self.config.head_dim**0.5) ** 0.5
        head.q[constant, half + pair] = amount
        head.k[constant, pair] = amount
        # The slowest pair has nearly the same angle in the whole window.
        amount = (1200 * self.config.head_dim**0.5) ** 0.5
        head.q[constant, half - 1] = amount
        head.k[:, half - 1] = keys * amount

    def layer1(self, heads: Heads) -> None:
        """Fetch the tool, the turn, the role and the key of an object."""
        tool, turn, role, key = (Head(self, heads, index) for index in range(4))
        ends = self.flag("kind", "end") + self.flag("kind", "start")
        self.newest(tool, self.flag("kind", "tool") + ends)
        tool.write(self.read("tool"), "tool")
        tool.write(self.read("listed"), "listed")
        self.newest(turn, self.flag("kind", "turn"))
        turn.write(self.read("turn"), "turn")
        self.newest(role, self.flag("kind1", "start"))
        role.write(self.read("kind"), "role")
        self.newest(key, self.flag("kind", "colon") + ends)
        key.write(self.read("before1", PARTS["key"]), "key")
        key.write(self.flag("kind", "colon")[:, None], "in_object")

    # --- layer 2 ---

    def brings_tool(self, head: Head, sizes: tuple[int, ...], number: int) -> None:
        """Let a request's tokens attend to equal texts in the list, and bring their tools."""
        sharp = 25.0
        for distance, size in enumerate(sizes):
            part = f"before{distance}" if distance else "stem"
            matrix = self.projected(part, size, seed=100 * number + distance)
            head.match(matrix, matrix, sharp)
        # What matches nothing attends to the beginnings of messages, as do all other tokens.
        far = sharp * 12
        start = self.flag("kind", "start")
        head.prefer(
            far * self.flag("listed", 0)
            - 2 * far * self.flag("kind", "tool")
            + (far + sharp * (len(sizes) - 0.5)) * start
        )
        not_user = self.flag("constant", 0) - self.flag("role", "user")
        head.match(not_user[:, None], start[:, None], 3 * far)
        head.write(self.read("tool") * (0.5, 1.0, 1.5)[number], "vote")
        head.write(self.read("listed"), "matched", number)

    # --- layer 3 ---

    def in_turn(self, head: Head, score: float) -> None:
        """Prefer messages of the query's turn that are not answers."""
        turn = self.read("turn")
        head.match(turn, turn, score)
        head.prefer(
            -60 * self.flag("role", "assistant")
            - 60 * self.flag("role", "system")
            - 6 * score * self.flag("kind", "turn")
        )

    def gathers(self, head: Head) -> None:
        """Write what the tokens of the request have brought."""
        self.in_turn(head, 80.0)
        matched = sum(self.flag("matched", index) for index in range(3))
        # Values of arguments are words of chance.
        head.prefer(2.0 * matched - 12.0 * self.flag("in_object", 0))
        head.write(self.read("vote"), "told")

    def finds_first(self, head: Head) -> None:
        """Write the first two tokens of the message."""
        self.in_turn(head, 80.0)
        head.prefer(40.0 * self.flag("after_mark", 1))
        head.write(self.read("before1", 24), "first")
        head.write(self.read("stem", 24), "first", 24)
        head.write(self.read("role"), "asker")

    def finds_arguments(self, head: Head) -> None:
        """Write whether the message has an object."""
        self.in_turn(head, 80.0)
        head.prefer(40.0 * self.flag("in_object", 0))
        head.write(self.read("in_object"), "has_arguments")

    # --- layer 4 ---

    def copies_name(self, head: Head) -> None:
        """Write the next token of the name of the tool that was gathered."""
        head.match(self.read("told"), self.read("tool"), 30.0)
        # Keys of the list's objects: what is told is a name.
        name = self.stems[self.token("name")][: PARTS["key"]]
        is_name = np.zeros(self.config.hidden_size)
        is_name[self.parts["key"]] = name / (name @ name)
        head.prefer(
            60.0 * is_name + 60 * self.flag("listed", 0) - 200.0 * self.flag("kind", "tool")
        )
        for distance, size, score in ((0, 24, 30.0), (1, 15, 12.0)):
            part = f"before{distance}" if distance else "stem"
            seed = 1000 + distance
            head.match(
                self.projected(part, size, seed),
                self.projected(f"before{distance + 1}", size, seed),
                score,
            )
        head.write(self.read("code"), "out")

    # --- layer 5 ---

    def copies_next(self, head: Head) -> None:
        """Write the token after text of the request, or of the result, like the newest text."""
        self.in_turn(head, 60.0)
        for distance, size, score in (
            *((0, 18, 30.0), (1, 14, 15.0)),
            *((2, 12, 8.0), (3, 10, 6.0)),
        ):
            part = f"before{distance}" if distance else "stem"
            seed = 2000 + distance
            head.match(
                self.projected(part, size, seed),
                self.projected(f"before{distance + 1}", size, seed),
                score,
            )
        key = self.read("key", 12) * (PARTS["stem"] / 12) ** 0.5
        head.match(key, key, 8.0)
        # The first argument follows a brace and a quote, or the word "with" and a quote.
        first = self.flag("before_argument", 0) + 0.5 * self.flag("kind1", "quote")
        first -= self.flag("kind1", "brace")
        head.match(self.flag("kind1", "brace")[:, None], first[:, None], 40.0)
        head.write(self.read("code"), "next")

    def heads(self, index: int) -> Heads:
        """Return the heads of a layer."""
        heads = Heads.empty(self.config)
        if index == 0:
            for distance in (1, 2, 3, 4):
                self.looks_back(Head(self, heads, distance - 1), distance)
        elif index == 1:
            self.layer1(heads)
        elif index == 2:
            for number, sizes in enumerate(((32, 32), (26, 26, 26), (20, 20, 19, 19))):
                self.brings_tool(Head(self, heads, number), sizes, number)
        elif index == 3:
            self.gathers(Head(self, heads, 0))
            self.finds_first(Head(self, heads, 1))
            self.finds_arguments(Head(self, heads, 2))
        elif index == 4:
            self.copies_name(Head(self, heads, 0))
        elif index == 5:
            self.copies_next(Head(self, heads, 0))
        return heads

    def build(self, params: Params) -> None:
        """Set the parameters of a model."""
        size = self.config.hidden_size
        # After a norm, the constant is 1 and all else has the size that it had before.
        norm = np.full(size, CONSTANT / size**0.5)
        norm[self.parts["constant"]] /= CONSTANT
        params["embed"] = jnp.asarray(self.embed(), params["embed"].dtype)
        for index, layer in enumerate(params["layers"]):
            self.heads(index).store(layer)
            layer["input_norm"] = jnp.asarray(norm, layer["input_norm"].dtype)
            layer["post_norm"] = jnp.asarray(norm, layer["post_norm"].dtype)
            layer["down"] = layer["down"] * 0
        params["norm"] = jnp.asarray(norm, params["norm"].dtype)
        head = np.zeros((size, self.config.vocab_size))
        head[self.parts["out"]] = 20 * self.codes.T
        params["lm_head"] = jnp.asarray(head, params["lm_head"].dtype)


def first_target(tokenizer: Any, seed: int, **sizes: int) -> Target:
    """Return the model before training."""
    config = network.make_config(tokenizer, **sizes)
    target = Target.init(config, jax.random.key(seed))
    Builder(tokenizer, config, seed).build(target.params)
    return target
