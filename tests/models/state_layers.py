"""Checks that every kind of layer with a state passes, against a loop over one token after another.

A `StateLayer` has the layer and its oracle. The checks read texts in pieces, trees, and nodes below
drafted ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specjax.models import params as declarations
from specjax.models.config import ModelConfig
from specjax.models.linear_attention import Ancestry, Context
from specjax.models.memory import StateSizes
from specjax.models.params import Params
from specjax.models.states import State, empty_nodes
from tests.conftest import tiny_config
from tests.models.test_delta_rule import ancestors, mask_of, paths_of, random_tree

TOLERANCE = 2e-5


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def chain_of(count: int) -> np.ndarray:
    return np.tril(np.ones((1, count, count), bool))


def of_newest(inputs: np.ndarray, weight: np.ndarray, t: int) -> np.ndarray:
    """Return the convolution at token t of ``inputs [T, C]`` with a ``weight [C, 1, kernel]``."""
    total = np.zeros(inputs.shape[1])
    for back in range(min(t + 1, weight.shape[2])):
        total += inputs[t - back] * weight[:, 0, -1 - back]
    return total


@dataclass(frozen=True, eq=False)
class StateLayer:
    """A layer with a state.

    Attributes:
        sizes: the sizes of its state.
        layer: the layer, a function as in `specjax.models.layers.WITH_STATE`.
        prefix: a part of the names of its tensors.
        alone: returns the output for one text ``x [T, H]``, in float64, token by token, from the
            parameters, the sizes and the epsilon of norms.
    """

    sizes: StateSizes
    layer: Callable[..., tuple[jax.Array, Any]]
    prefix: str
    alone: Callable[[Params, Any, float, np.ndarray], np.ndarray]

    @property
    def config(self) -> ModelConfig:
        return tiny_config(num_layers=2, linear=self.sizes, linear_layers=(0,))

    def drawn(self, seed: int) -> Params:
        """Return random parameters, none of which is 0 or 1."""
        rng = np.random.default_rng(seed)

        def value(param: declarations.Param) -> np.ndarray:
            if param.init == "log_rates":  # some heads forget at once, others hardly anything
                rates = np.geomspace(1e-2, 8.0, int(np.prod(param.shape)))
                return np.log(rates).reshape(param.shape).astype(np.float32)
            spread = 0.2 if len(param.shape) == 2 else 0.4
            random = rng.normal(size=param.shape) * spread + (param.init == "ones")
            return random.astype(np.float32)

        declared = declarations.declare_layer(self.config, "").items()
        return {name: value(param) for name, param in declared if self.prefix in param.name}

    def run(self, params: Params, x, context: Context) -> tuple[jax.Array, Any]:
        return _run(self, params, x, context)

    def read_text(self, params: Params, x, count) -> State:
        """Return the state after the first ``count [B]`` tokens of each row."""
        ancestry = Ancestry.of(chain_of(x.shape[1]), [], self.sizes.kernel)
        empty = State.zeros(self.sizes, x.shape[0], jnp.float32)
        return self.run(params, x, Context(empty, [], ancestry, jnp.asarray(count)))[1]

    def texts(self, seed: int, rows: int, count: int) -> np.ndarray:
        shape = (rows, count, self.config.hidden_size)
        return np.random.default_rng(seed).normal(size=shape).astype(np.float32)

    def check_text(self) -> None:
        """Read a text in pieces of odd sizes, one of them longer than a chunk of 64 tokens."""
        params, x = self.drawn(0), self.texts(0, 2, 70)
        eps = self.config.norm_eps
        expected = np.stack([self.alone(params, self.sizes, eps, row) for row in x])
        assert np.abs(expected).max() > 0.3
        state, start = State.zeros(self.sizes, 2, jnp.float32), 0
        for size in (1, 2, 67):
            ancestry = Ancestry.of(chain_of(size), [], self.sizes.kernel)
            context = Context(state, [], ancestry, jnp.full(2, size))
            y, state = self.run(params, x[:, start : start + size], context)
            np.testing.assert_allclose(y, expected[:, start : start + size], atol=TOLERANCE)
            start += size
        whole = self.read_text(params, x, [70, 70])
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=TOLERANCE), state, whole)

    def tree(self) -> "TreeBelowTexts":
        """Return a tree of 14 nodes below texts of 9 and 1 tokens."""
        params, lengths = self.drawn(1), [9, 1]
        paths = paths_of(random_tree(np.random.default_rng(3), 14))
        texts, nodes = self.texts(3, 2, 9), self.texts(4, 2, 14)
        expected = np.zeros(nodes.shape)
        for row, number in np.ndindex(2, 14):
            text = np.concatenate([texts[row, : lengths[row]], nodes[row, paths[number]]])
            expected[row, number] = self.alone(params, self.sizes, self.config.norm_eps, text)[-1]
        state = self.read_text(params, texts, lengths)
        return TreeBelowTexts(params, texts, state, nodes, paths, expected)

    def check_tree(self) -> None:
        """Compare each node with its path, and write an accepted path into the state."""
        tree = self.tree()
        ancestry = Ancestry.of(mask_of(tree.paths)[None], [], self.sizes.kernel)
        y, entry = self.run(tree.params, tree.nodes, Context(tree.state, [], ancestry))
        np.testing.assert_allclose(y, tree.expected, atol=TOLERANCE)
        empty = empty_nodes(self.sizes, 2, 14, jnp.float32)
        assert [part.shape for part in entry] == [part.shape for part in empty]
        longest = max(tree.paths, key=len)
        accepted = [part[:, :, np.array(longest)] for part in entry]
        # Of the second row's path the first node alone is accepted.
        counts, lengths = [len(longest), 1], [9, 1]
        after = jax.jit(State.append)(tree.state, accepted, jnp.array(counts))
        for row, (count, length) in enumerate(zip(counts, lengths, strict=True)):
            nodes = tree.nodes[row, longest[:count]]
            read = np.concatenate([tree.texts[row, :length], nodes])[None]
            again = self.read_text(tree.params, read, [read.shape[1]])
            for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(again), strict=True):
                np.testing.assert_allclose(a[row], b[0], atol=TOLERANCE)

    def check_below_drafted(self) -> None:
        """Read a tree level by level.

        Of the tokens that a node's convolution reads, some are in the state and some in scratch.
        """
        tree = self.tree()
        above, depths = ancestors(tree.paths), np.array([len(path) for path in tree.paths])
        scratch = tuple(
            np.full(part.shape, 7.0, part.dtype)
            for part in empty_nodes(self.sizes, 2, 14, jnp.float32)
        )
        for depth in range(1, depths.max() + 1):
            level = np.flatnonzero(depths == depth)
            repeated = np.resize(level, 14)  # nodes are repeated, so that levels share a program
            visible = jnp.asarray(above[None, repeated])
            ancestry = Ancestry.of(np.eye(14, dtype=bool)[None], [visible], self.sizes.kernel)
            context = Context(tree.state, [scratch], ancestry)
            y, entry = self.run(tree.params, tree.nodes[:, repeated], context)
            expected = tree.expected[:, level]
            np.testing.assert_allclose(y[:, : len(level)], expected, atol=TOLERANCE)
            for slots, new in zip(scratch, entry, strict=True):
                slots[:, :, level] = new[:, :, : len(level)]

    def check_documents(self) -> None:
        """Read two documents at once, as in training: the second does not see the first."""
        params, x = self.drawn(2), self.texts(2, 1, 12)
        documents = jnp.array([[0] * 5 + [1] * 7])
        ancestry = replace(Ancestry.of(chain_of(12), [], self.sizes.kernel), documents=documents)
        empty = State.zeros(self.sizes, 1, jnp.float32)
        y, _ = self.run(params, x, Context(empty, [], ancestry))
        eps = self.config.norm_eps
        expected = [self.alone(params, self.sizes, eps, part) for part in (x[0, :5], x[0, 5:])]
        np.testing.assert_allclose(y[0], np.concatenate(expected), atol=TOLERANCE)


@dataclass(frozen=True)
class TreeBelowTexts:
    """A tree below two texts, and what is expected of it.

    Attributes:
        params: the parameters of the layer.
        texts: the texts, padded.
        state: the state after them.
        nodes: the inputs of the nodes.
        paths: the path of each node.
        expected: the output of each node: that of the text and the node's path, read alone.
    """

    params: Params
    texts: np.ndarray
    state: State
    nodes: np.ndarray
    paths: list[list[int]]
    expected: np.ndarray


def _layer_run(layer: StateLayer, params: Params, x, context: Context):
    return layer.layer(params, layer.config, x, context)


_run = jax.jit(_layer_run, static_argnums=0)
