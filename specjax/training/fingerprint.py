"""Hashes of the inputs of a run, so that a run that is continued can check that they are the same.

Every bit counts here, whereas `specjax.models.fingerprint` rounds some rows of a target.
"""

import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers
from jax.experimental import multihost_utils

from specjax import sharding
from specjax.config import ConfigError
from specjax.models.fingerprint import stated
from specjax.models.transformer import Target
from specjax.templates import settings_of

_ROWS = 4096
"""The number of windows that are read at once."""


def of_windows(*packed: dict[str, np.ndarray]) -> str:
    """Return a hash of packed windows. Equal hashes mean the same tokens in the same order."""
    digest = hashlib.sha256()
    for windows in packed:
        for name in sorted(windows):
            array = windows[name]
            for begin in range(0, len(array), _ROWS):  # the windows may be memory maps
                digest.update(np.ascontiguousarray(array[begin : begin + _ROWS]).tobytes())
    return digest.hexdigest()[:32]


def check_agreement(name: str, digest: str) -> None:
    """Compare a hash between all processes of a run. Every process must call this function.

    Args:
        name: the argument that the hash is of, and its value, for the message.
        digest: the hash of this process, in hexadecimal digits.

    Raises:
        ConfigError: The hashes differ.
    """
    if jax.process_count() == 1:
        return
    here = np.frombuffer(bytes.fromhex(digest), np.uint8)
    hashes = [row.tobytes().hex() for row in multihost_utils.process_allgather(here)]
    different = [str(process) for process, hash_ in enumerate(hashes) if hash_ != hashes[0]]
    if different:
        raise ConfigError(
            f"{name}: process {', '.join(different)} reads other data than process 0, whose hash is"
            f" {hashes[0]}, and that of this process {digest}; give all hosts the same files and"
            " versions"
        )


def of_target(target: Target | None) -> str | None:
    """Return a hash of a target's config and of the names, shapes, types and bits of its params.

    The sharding does not matter. The bits are summed on the devices, so that no weight is copied to
    the host. On a mesh over several processes, every process must call this function.
    """
    if target is None:
        return None
    digest = hashlib.sha256(json.dumps(stated(target.config), sort_keys=True).encode())
    leaves = jax.tree_util.tree_leaves_with_path(target.params)
    for path, leaf in leaves:
        # One leaf after the other: a CPU copies what it checks.
        checksum = int(sharding.to_host(_checksum(leaf), target.mesh))
        digest.update(
            f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {checksum}\n".encode()
        )
    return digest.hexdigest()[:32]


def of_tokenizer(tokenizer: Any, chats: bool = True) -> str:
    """Return a hash of all that decides the tokens of a prompt and the text of an answer.

    For chats it includes the chat template and its arguments. Padding and truncation do not count,
    because they are never used.

    Args:
        tokenizer: a tokenizer of transformers.
        chats: whether it encodes conversations.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and (backend.padding or backend.truncation):
        backend = tokenizers.Tokenizer.from_str(backend.to_str())
        backend.no_padding()
        backend.no_truncation()
    rules = tokenizer.get_vocab() if backend is None else backend.to_str()
    template = tokenizer.chat_template if chats else None
    settings = settings_of(tokenizer) if chats else {}
    parts = [rules, tokenizer.special_tokens_map, template, *([settings] if settings else [])]
    content = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@jax.jit
def _checksum(leaf: jax.Array) -> jax.Array:
    """Return a uint32 checksum of a leaf.

    It is the sum modulo 2**32 of each element's bits, mixed with the element's index. Integer sums
    are exact, so the order of summation, and with it the sharding, does not matter.
    """
    if jnp.issubdtype(leaf.dtype, jnp.floating):  # a number of 8 bytes becomes 2 words
        leaf = jax.lax.bitcast_convert_type(
            leaf, jnp.dtype(f"uint{8 * min(leaf.dtype.itemsize, 4)}")
        )
    index = jnp.zeros(leaf.shape, jnp.uint32)
    for axis in range(leaf.ndim):
        stride = jnp.uint32(math.prod(leaf.shape[axis + 1 :]) % 2**32)
        index += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * stride
    return jnp.sum(_mixed(leaf.astype(jnp.uint32) + _mixed(index)), dtype=jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """Mix the bits of uint32 numbers with the finalizer of MurmurHash3, a bijection."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
