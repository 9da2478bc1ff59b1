"""Count the arithmetic and the memory traffic of one forward pass, for `specjax.planning.roofline`.

A pass has two kinds of work: products with the weights, and attention over the cache. Committing accepted tokens adds a third
where layers keep a state.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import jax

from specjax.chips import Chip
from specjax.errors import InputError
from specjax.models.config import LinearAttention, ModelConfig
from specjax.models.params import declare


@dataclass(frozen=True)
class Work:
    """Arithmetic operations, and bytes read from the chip's memory.

    Examples:
        >>> from specjax.chips import find_chip
        >>> from specjax.planning.work import Work
        >>> Work(flops=1e9, bytes=3.35e9).seconds(find_chip("h100"))  # held up by its bytes
        0.001
    """

    flops: float
    bytes: float

    def seconds(self, chip: Chip) -> float:
        """The slower of arithmetic and memory traffic."""
        return max(self.flops / chip.flops, self.bytes / chip.bandwidth)


def product_work(config: ModelConfig, rows: int, weight_bytes: float = 2.0) -> Work:
    """The layers' products and the head's for ``rows`` = B T tokens: 2 operations a weight and token, each weight read once.

    A token is multiplied with its own experts, and an expert is read if a token chooses it. They are taken to choose evenly and
    independently, which is the most that can be read: tokens of one text choose alike.

    Examples:
        >>> from specjax.models.published import published
        >>> from specjax.planning.work import product_work
        >>> round(product_work(published("llama-3.1-8b"), rows=1).bytes / 1e9, 1)  # gigabytes
        15.0
    """
    weights, experts = _product_weights(config), _expert_weights(config)
    if config.moe is None:
        return Work(2.0 * weights * rows, weights * weight_bytes)
    chosen = config.moe.experts_per_token / config.moe.num_experts
    read = weights + experts * (1 - (1 - chosen) ** rows)
    return Work(2.0 * (weights + experts * chosen) * rows, read * weight_bytes)


def attention_work(config: ModelConfig, batch: int, tokens: int, context: int, kv_bytes: float = 2.0) -> Work:
    """Attention of B rows of T tokens over S cached ones: 4 B T S heads head_dim L operations, each key and value read once.

    Latent attention reads latents and rotated keys, and a head multiplies with all of those, with the latents twice. A layer
    with a window reads no more of S than that. A layer that reads another one's entries reads them once more. The T tokens' own
    keys and values are left out: they are few beside S. A layer with linear attention reads its state instead, whatever S is,
    and multiplies each token's key and query with it; what committing takes is `commit_work`.

    Examples:
        >>> from specjax.models.published import published
        >>> from specjax.planning.work import attention_work
        >>> work = attention_work(published("llama-3.1-8b"), batch=1, tokens=1, context=32_768)
        >>> round(work.bytes / 1e9, 1)  # gigabytes
        4.3
        >>> work = attention_work(published("qwen3.5-9b"), batch=1, tokens=1, context=32_768)
        >>> round(work.bytes / 1e9, 1)  # a layer of four looks back
        1.1
    """
    products, numbers = 0, 0
    for layer in range(config.num_layers):
        if config.linear is not None and config.is_linear(layer):
            continue
        source = config.entries_of(layer)
        (_, keys), (_, last) = config.entry_parts(source)
        seen = min(context, config.window_of(layer) or context)
        products += seen * config.of_layer(layer).num_heads * (keys + last if config.mla is None else 2 * keys + last)
        numbers += seen * config.entry_size(source)
    states = sum(sizes.state_size for sizes in _linear_layers(config))
    flops = 2.0 * batch * tokens * (products + 2 * states)
    return Work(flops, batch * (numbers * kv_bytes + state_bytes(config)))


def commit_work(config: ModelConfig, batch: int, tokens: int) -> Work:
    """Writing T tokens of each of B rows into the states of layers with linear attention, once it is known which are accepted.

    A state is read and written once more than a pass reads it, whatever the number of tokens. Keys and values are written too:
    they are few, and left out.

    Examples:
        >>> from specjax.models.published import published
        >>> from specjax.planning.work import commit_work
        >>> round(commit_work(published("qwen3.5-9b"), batch=1, tokens=5).bytes / 1e6)  # megabytes
        103
        >>> commit_work(published("llama-3.1-8b"), batch=1, tokens=5)
        Work(flops=0.0, bytes=0.0)
    """
    states = sum(sizes.state_size for sizes in _linear_layers(config))
    return Work(2.0 * batch * tokens * states, 2.0 * batch * state_bytes(config))


def cache_bytes(config: ModelConfig, kv_bytes: float = 2.0) -> float:
    """Bytes that one token takes in the cache: its entry in every layer that has its own.

    In 8 bits (``cache_dtype="int8"``) a number takes 1 byte, and its share of a scale of 4.

    Examples:
        >>> from specjax.models.published import published
        >>> from specjax.planning.work import cache_bytes
        >>> model = published("llama-3.1-8b")
        >>> cache_bytes(model), cache_bytes(model, kv_bytes=1 + 4 / model.head_dim)
        (131072.0, 67584.0)
    """
    return sum(map(config.entry_size, range(config.num_layers))) * kv_bytes


def state_bytes(config: ModelConfig, number_bytes: float = 2.0) -> float:
    """Bytes of a row's states, in all layers with linear attention together: of a whole text, however long.

    They are float32, but for what the newest tokens gave to the convolutions, whose numbers take ``number_bytes``.

    Examples:
        >>> from specjax.models.published import published
        >>> from specjax.planning.work import state_bytes
        >>> state_bytes(published("qwen3.5-9b")), state_bytes(published("llama-3.1-8b"))
        (51511296.0, 0.0)
    """
    return sum((sizes.state_bytes(number_bytes) for sizes in _linear_layers(config)), 0.0)


def node_bytes(config: ModelConfig, number_bytes: float = 2.0, kv_bytes: float = 2.0) -> float:
    """Bytes that are remembered of one drafted token until it is accepted or not, in all layers: its entries.

    Examples:
        What a copy of the states for each of 60 drafted tokens would take, and what their entries in those layers take of it:

        >>> from specjax.models.published import published
        >>> from specjax.planning.work import cache_bytes, node_bytes, state_bytes
        >>> model = published("qwen3.5-9b")
        >>> copies, entries = 60 * state_bytes(model), 60 * (node_bytes(model) - cache_bytes(model))
        >>> round(copies / 1e9, 2), f"{entries / copies:.2%}"
        (3.09, '1.91%')
    """
    return cache_bytes(config, kv_bytes) + sum(sizes.node_bytes(number_bytes) for sizes in _linear_layers(config))


def _linear_layers(config: ModelConfig) -> list[LinearAttention]:
    """The sizes of each layer with linear attention."""
    return [config.linear for layer in range(config.num_layers) if config.linear is not None and config.is_linear(layer)]


def forward_time(
    config: ModelConfig,
    chip: Chip,
    batch: int,
    tokens: int,
    context: int,
    weight_bytes: float = 2.0,
    kv_bytes: float = 2.0,
) -> float:
    """Seconds of one forward pass over T ``tokens`` in each of B rows (``batch``) with S cached tokens (``context``).

    ``weight_bytes`` and ``kv_bytes`` are the bytes of one weight and of one number in the cache.

    Examples:
        >>> from specjax.chips import find_chip
        >>> from specjax.models.published import published
        >>> from specjax.planning.work import forward_time
        >>> model, chip = published("llama-3.1-8b"), find_chip("h100")
        >>> seconds = [forward_time(model, chip, 1, tokens, context=1024) for tokens in (1, 5)]
        >>> [round(1e3 * each, 2) for each in seconds]  # milliseconds
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
    """The weights of all experts of all layers, but for shared ones."""
    return sum(math.prod(param.shape) for param in jax.tree.leaves(declare(config)) if param.stacked)


@lru_cache
def _product_weights(config: ModelConfig) -> int:
    """Weights that every token is multiplied with: all matrices, but for experts and embeddings that are only looked up."""
    params = jax.tree.leaves(declare(config))
    matrices = sum(math.prod(param.shape) for param in params if len(param.shape) == 2 and not param.stacked)
    looked_up = config.per_layer_vocab_size * config.num_layers * config.per_layer_inputs
    return matrices - looked_up - (0 if config.tie_embeddings else config.vocab_size * config.hidden_size)
