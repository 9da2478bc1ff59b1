"""Short hashes of what a run's result depends on, so that a run which is continued can tell whether it is still the same.

Where `specjax.models.fingerprint` looks at some rows of a target, rounded, every bit counts here.
"""

import hashlib
import json
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tokenizers

from specjax import sharding
from specjax.models.fingerprint import stated
from specjax.models.transformer import Target
from specjax.templates import settings_of


def of_windows(*packed: dict[str, np.ndarray]) -> str:
    """Two runs of which these `pack`ed windows are the same train on the same tokens in the same order."""
    digest = hashlib.sha256()
    for windows in packed:
        for name in sorted(windows):
            digest.update(np.ascontiguousarray(windows[name]).tobytes())
    return digest.hexdigest()[:32]


def of_target(target: Target | None) -> str | None:
    """What its configuration states, and the names, shapes, types and every bit of its params; where they lie does not matter.

    The bits are summed up where they lie, so that nothing of the size of a weight comes to the host. On a mesh over several
    processes every one of them must call this.
    """
    if target is None:
        return None
    sums = sharding.to_host(_checksums(target.params), target.mesh)
    digest = hashlib.sha256(json.dumps(stated(target.config), sort_keys=True).encode())
    leaves = jax.tree_util.tree_leaves_with_path(target.params)
    for (path, leaf), checksum in zip(leaves, jax.tree.leaves(sums), strict=True):
        digest.update(f"{jax.tree_util.keystr(path)} {leaf.shape} {leaf.dtype} {int(checksum)}\n".encode())
    return digest.hexdigest()[:32]


def of_tokenizer(tokenizer: Any, chats: bool = True) -> str:
    """What decides the tokens of a prompt and the text of an answer: a tokenizer of transformers, for chats with its template
    and what that is given beside the messages.

    How texts are padded and cut is no part of it: here they are neither.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and (backend.padding or backend.truncation):
        backend = tokenizers.Tokenizer.from_str(backend.to_str())
        backend.no_padding()
        backend.no_truncation()
    rules = tokenizer.get_vocab() if backend is None else backend.to_str()
    template = tokenizer.chat_template if chats else None
    given = settings_of(tokenizer) if chats else {}
    parts = [rules, tokenizer.special_tokens_map, template, *([given] if given else [])]
    content = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()[:32]


@jax.jit
def _checksums(params: Any) -> Any:
    return jax.tree.map(_checksum, params)


def _checksum(leaf: jax.Array) -> jax.Array:
    """uint32, the sum modulo 2**32 of each element's bits mixed with its place: exact, and so the same in any order."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        leaf = jax.lax.bitcast_convert_type(leaf, jnp.dtype(f"uint{8 * min(leaf.dtype.itemsize, 4)}"))  # of 8 bytes, 2 words
    place = jnp.zeros(leaf.shape, jnp.uint32)
    for axis in range(leaf.ndim):
        stride = jnp.uint32(math.prod(leaf.shape[axis + 1 :]) % 2**32)
        place += jax.lax.broadcasted_iota(jnp.uint32, leaf.shape, axis) * stride
    return jnp.sum(_mixed(leaf.astype(jnp.uint32) + _mixed(place)), dtype=jnp.uint32)


def _mixed(x: jax.Array) -> jax.Array:
    """``x`` uint32 with each bit depending on many (MurmurHash3's finaliser, a bijection)."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)
