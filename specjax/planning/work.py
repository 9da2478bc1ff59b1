"""The arithmetic and the memory traffic of a forward pass, for `specjax.planning.roofline`.

A pass has two kinds of work: products with the weights, and attention over the cache. Layers with
a state (such as linear attention) add a third: writing accepted tokens into their states.
"""

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import jax

from specjax.chips import Chip
from specjax.errors import InputError
from specjax.models import sparse_attention
from specjax.models.config import ModelConfig
from specjax.models.memory import StateSizes
from specjax.models.params import declare


@dataclass(frozen=True)
class Work:
    """The arithmetic operations of some work, and the bytes it reads from the chip's memory.

    Examples:
        >>> from specjax.chips import find_chip
        >>> from specjax.planning.work import Work
        >>> Work(flops=1e9, bytes=3.35e9).seconds(find_chip("h100"))  # limited by its bytes
        0.001
    """

    flops: float
    bytes: float

    def seconds(self, chip: Chip) -> float:
        """Return the time of the arithmetic or of the memory traffic, whichever is longer."""
        return max(self.flops / chip.flops, self.bytes / chip.bandwidth)


def product_work(config: ModelConfig, rows: int, weight_bytes: float = 2.0) -> Work:
    """Return the work of the layers' and the head's matrix products for ``rows`` = B T tokens.

    There are 2 operations per weight and token, and each weight is read once. A token is multiplied
    with its own experts, and an expert is read if any token selects it. Tokens are assumed to
    select experts uniformly and independently. This is an upper bound of the reads, because tokens
    of one text select similar experts.

    Examples:
        >>> from specjax.models.published import published
        >>> from specjax.planning.work import product_work
        >>> round(product_work(published("llama-3.1-8b"), rows=1).bytes / 1e9, 1)  # gigabytes
        15.0
    """
    weights, experts = _product_weights(config), _expert_weights(config)
    if config.moe is None:
        return Work(2.0 * weights * rows, weights * weight_bytes)
    share = config.moe.experts_per_token / config.moe.num_experts
    weights_read = weights + experts * (1 - (1 - share) ** rows)
    return Work(2.0 * (weights + experts * share) * rows, weights_read * weight_bytes)


def attention_work(
    config: ModelConfig,
    batch: int,
    tokens: int,
    context: int,
    kv_bytes: float = 2.0,
    devices: int = 1,
) -> Work:
    """Return the work of attention of B rows of T tokens over S cached tokens.

    There are 4 B T S heads head_dim L operations, and each key and value is read once. Latent
    attention reads latents and rotated keys; a head multiplies with all of these, and twice with
    the latents. A layer with a sliding window reads at most the window. A layer that uses another
    layer's entries reads them again. The keys and values of the T tokens themselves are left out,
    because they are few compared to S. A layer with an indexer (sparse attention) reads its index
    keys and multiplies its own queries with them as well. Its latents and rotated keys are all read
    and masked, or those that are selected are copied, as `specjax.models.sparse_attention.reach`
    says for so many ``devices`` that share the heads; a copy moves their bytes three times. The
    selection itself is left out. The work is that of all devices together. A layer with a
    state reads that instead, or as well, whatever S is, and multiplies each token's key and query
    with it; for commits see `commit_work`.

    Examples:
        >>> from specjax.models.published import published
        >>> from specjax.planning.work import attention_work
        >>> work = attention_work(published("llama-3.1-8b"), batch=1, tokens=1, context=32_768)
        >>> round(work.bytes / 1e9, 1)  # gigabytes
        4.3
        >>> work = attention_work(published("qwen3.5-9b"), batch=1, tokens=1, context=32_768)
        >>> round(work.bytes / 1e9, 1)  # one layer of four has attention
        1.1
    """
    products, numbers = 0, 0
    for kind, layers in _kinds_of_attention(config):
        visible = min(context, kind.window or context)
        multiplied, moved = _entries_of_pass(config, tokens, visible, devices)
        products += layers * (multiplied * kind.products + visible * kind.index_products)
        numbers += layers * (moved * kind.numbers + visible * kind.index_numbers)
    states = sum(sizes.state_size for sizes in _states(config))
    flops = 2.0 * batch * tokens * (products + 2 * states)
    return Work(flops, batch * (numbers * kv_bytes + state_bytes(config)))


def commit_work(config: ModelConfig, batch: int, tokens: int) -> Work:
    """Return the work of writing T accepted tokens of B rows into the states of layers.

    Each state is read and written once, in addition to the pass, whatever the number of tokens. The
    entries of the tokens in these layers are written by the pass and read here. Writes of keys and
    values are left out, because they are few compared to those of the text.

    Examples:
        >>> from specjax.models.published import published
        >>> from specjax.planning.work import commit_work
        >>> round(commit_work(published("qwen3.5-9b"), batch=1, tokens=5).bytes / 1e6)  # megabytes
        113
        >>> commit_work(published("llama-3.1-8b"), batch=1, tokens=5)
        Work(flops=0.0, bytes=0.0)
    """
    states = sum(sizes.state_size for sizes in _states(config))
    moved = 2.0 * batch * (state_bytes(config) + tokens * _bytes_of_nodes(config))
    return Work(2.0 * batch * tokens * states, moved)


def root_work(config: ModelConfig, batch: int) -> Work:
    """Return the work that a pass over one token of B rows has in addition if it commits them.

    A draft model's pass over the root does. It has read the states, and now writes the new ones. No
    entry is stored.

    Examples:
        >>> from specjax.models.published import published
        >>> from specjax.planning.work import root_work
        >>> round(root_work(published("qwen3.5-9b"), batch=1).bytes / 1e6)  # megabytes
        52
    """
    states = sum(sizes.state_size for sizes in _states(config))
    return Work(2.0 * batch * states, batch * state_bytes(config))


def cache_bytes(config: ModelConfig, kv_bytes: float = 2.0) -> float:
    """Return the bytes of one token in the KV cache, over all layers that have their own entries.

    In an 8-bit cache (``cache_dtype="int8"``), a number takes 1 byte and its share of a scale of 4
    bytes.

    Examples:
        >>> from specjax.models.published import published
        >>> from specjax.planning.work import cache_bytes
        >>> model = published("llama-3.1-8b")
        >>> cache_bytes(model), cache_bytes(model, kv_bytes=1 + 4 / model.head_dim)
        (131072.0, 67584.0)
    """
    return _numbers_of_token(config) * kv_bytes


def state_bytes(config: ModelConfig, number_bytes: float = 2.0) -> float:
    """Return the bytes of a row's states in all layers that keep one.

    They do not depend on the length of the text. States are float32, except the inputs of the
    convolutions, whose numbers take ``number_bytes``.

    Examples:
        >>> from specjax.models.published import published
        >>> from specjax.planning.work import state_bytes
        >>> state_bytes(published("qwen3.5-9b")), state_bytes(published("llama-3.1-8b"))
        (51511296.0, 0.0)
    """
    return sum((sizes.state_bytes(number_bytes) for sizes in _states(config)), 0.0)


def node_bytes(config: ModelConfig, number_bytes: float = 2.0, kv_bytes: float = 2.0) -> float:
    """Return the bytes of one drafted token in the scratch of all layers, until it is verified.

    Examples:
        Compare copies of the states for each of 60 drafted tokens with the tokens' entries in the
        same layers:

        >>> from specjax.models.published import published
        >>> from specjax.planning.work import cache_bytes, node_bytes, state_bytes
        >>> model = published("qwen3.5-9b")
        >>> copies, entries = 60 * state_bytes(model), 60 * (node_bytes(model) - cache_bytes(model))
        >>> round(copies / 1e9, 2), f"{entries / copies:.2%}"
        (3.09, '1.91%')
    """
    return cache_bytes(config, kv_bytes) + _bytes_of_nodes(config, number_bytes)


def _bytes_of_nodes(config: ModelConfig, number_bytes: float = 2.0) -> float:
    """Return the bytes of a drafted token's entries in layers with states, without a cache."""
    return sum((sizes.node_bytes(number_bytes) for sizes in _states(config)), 0.0)


# A table of speeds asks for the work of one model thousands of times.
@lru_cache
def _states(config: ModelConfig) -> tuple[StateSizes, ...]:
    """Return the sizes of each layer's state."""
    states = (config.memory(layer).state for layer in range(config.num_layers))
    return tuple(sizes for sizes in states if sizes is not None)


@lru_cache
def _numbers_of_token(config: ModelConfig) -> int:
    """Count the numbers of one token in the caches of all layers."""
    return sum(map(config.entry_size, range(config.num_layers)))


class _Kind(NamedTuple):
    """A kind of layer that attends to entries.

    Attributes:
        window: the window of its attention, or None.
        products: the products of one query with one entry, in all heads.
        numbers: the numbers of an entry that attention reads.
        index_products: the products of one query with one index key.
        index_numbers: the numbers of an index key.
    """

    window: int | None
    products: int
    numbers: int
    index_products: int
    index_numbers: int


@lru_cache
def _kinds_of_attention(config: ModelConfig) -> tuple[tuple[_Kind, int], ...]:
    """Return each kind of layer that attends to entries, and how many layers are of that kind."""
    kinds: Counter[_Kind] = Counter()
    for layer in range(config.num_layers):
        source = config.entries_of(layer)
        if not (parts := config.memory(source).parts):
            continue
        (_, keys), (_, last), *_ = parts
        products = config.of_layer(layer).num_heads * (
            keys + last if config.mla is None else 2 * keys + last
        )
        index_products, index_numbers = 0, 0
        if config.indexer is not None and config.has_indexer(layer):
            index_numbers = config.indexer.head_dim
            index_products = config.indexer.heads * index_numbers
        numbers = config.entry_size(source) - index_numbers
        window = config.window_of(layer)
        kinds[_Kind(window, products, numbers, index_products, index_numbers)] += 1
    return tuple(kinds.items())


def _entries_of_pass(
    config: ModelConfig, tokens: int, visible: int, devices: int
) -> tuple[int, int]:
    """Return with how many entries a token of a row is multiplied, and how many the row moves."""
    if config.indexer is None or visible <= sparse_attention.reach(config, tokens, devices):
        return visible, visible
    return config.indexer.topk, sparse_attention.MOVES * tokens * config.indexer.topk


def forward_time(
    config: ModelConfig,
    chip: Chip,
    batch: int,
    tokens: int,
    context: int,
    weight_bytes: float = 2.0,
    kv_bytes: float = 2.0,
) -> float:
    """Return the seconds of a forward pass over T tokens in each of B rows with S cached tokens.

    Args:
        config: the config of the model.
        chip: the accelerator.
        batch: B, the number of rows.
        tokens: T, the number of tokens per row.
        context: S, the number of cached tokens per row.
        weight_bytes: the bytes of one weight.
        kv_bytes: the bytes of one number in the cache.

    Raises:
        InputError: A number is below 1.

    Examples:
        >>> from specjax.chips import find_chip
        >>> from specjax.models.published import published
        >>> from specjax.planning.work import forward_time
        >>> model, chip = published("llama-3.1-8b"), find_chip("h100")
        >>> seconds = [forward_time(model, chip, 1, tokens, context=1024) for tokens in (1, 5)]
        >>> [round(1e3 * time, 2) for time in seconds]  # milliseconds
        [4.52, 4.52]
    """
    for name, value in (("batch", batch), ("tokens", tokens), ("context", context)):
        if value < 1:
            raise InputError(f"{name}={value}: must be at least 1")
    products = product_work(config, batch * tokens, weight_bytes)
    attention = attention_work(config, batch, tokens, context, kv_bytes)
    return products.seconds(chip) + attention.seconds(chip)


@lru_cache
def _expert_weights(config: ModelConfig) -> int:
    """Count the weights of all experts of all layers, without shared experts."""
    return sum(
        math.prod(param.shape) for param in jax.tree.leaves(declare(config)) if param.stacked
    )


@lru_cache
def _product_weights(config: ModelConfig) -> int:
    """Count the weights that every token is multiplied with.

    They are all matrices without experts and without embeddings, which are only looked up.
    """
    params = jax.tree.leaves(declare(config))
    matrices = sum(
        math.prod(param.shape) for param in params if len(param.shape) == 2 and not param.stacked
    )
    per_layer_embeddings = config.per_layer_vocab_size * config.num_layers * config.per_layer_inputs
    return (
        matrices
        - per_layer_embeddings
        - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)
    )
