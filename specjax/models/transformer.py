"""The decoder behind every target and every draft model: one class for the dense families."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh

from specjax import sharding
from specjax.models import huggingface
from specjax.models import params as declarations
from specjax.models.cache import KVCache
from specjax.models.config import ModelConfig
from specjax.models.layers import Slots, decoder_layer, rms_norm
from specjax.models.params import Params
from specjax.models.rope import rotations

PREFILL_CHUNK = 512
"""Prompt tokens read in one forward pass: attention scores take memory of this times the capacity, not its square."""


@struct.dataclass
class Output:
    """What one forward pass gives.

    Attributes:
        logits: ``[B, T, V]`` float32, or None when they were not asked for.
        hidden: ``[B, T, H]`` the residual stream after the final norm: what the head reads.
        taps: ``[B, T, n, H]`` the residual stream *entering* each of the n asked layers, before any norm.
    """

    logits: jax.Array | None
    hidden: jax.Array
    taps: jax.Array


@struct.dataclass
class Target:
    """A decoder-only language model as one pytree: its params are leaves, its config is static.

    Attributes:
        params: nested dicts of arrays, declared in `specjax.models.params`.
        config: the model's shape.
        mesh: where its params live; None is the default device.
    """

    params: Params
    config: ModelConfig = struct.field(pytree_node=False)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)

    @classmethod
    def from_pretrained(cls, path: str | Path, dtype: Any = None, mesh: Mesh | None = None) -> "Target":
        """Load a Hugging Face checkpoint (a directory or a hub id) of the Llama, Mistral, Qwen2 or Qwen3 family.

        Args:
            path: directory with config.json and safetensors, or a hub id.
            dtype: of the params; by default float32 on CPU (bfloat16 products are several times slower there) and
                bfloat16 elsewhere.
            mesh: shards the params (see `specjax.sharding`); each device reads only its own part of each file.

        Raises:
            huggingface.CheckpointError: something about the checkpoint is not as it must be; says what, and what to do.
        """
        directory = huggingface.locate(path)
        config = huggingface.read_config(directory)
        params = huggingface.load_params(directory, config, dtype or default_dtype(), mesh)
        return cls(params=params, config=config, mesh=mesh)

    @classmethod
    def init(cls, config: ModelConfig, key: jax.Array, dtype: Any = jnp.float32, mesh: Mesh | None = None) -> "Target":
        """A model with random weights; consumes ``key``."""
        params = declarations.init(config, key, dtype)
        if mesh is not None:
            params = jax.device_put(params, declarations.shardings(config, mesh))
        return cls(params=params, config=config, mesh=mesh)

    def save_pretrained(self, path: str | Path, dtype: Any = None) -> None:
        """Write the model as a Hugging Face checkpoint, in ``dtype`` (by default its own). All of it or nothing."""
        huggingface.save(Path(path), self.config, self.params, dtype)

    @property
    def dtype(self) -> Any:
        """Data type of the params, and so of the activations and the cache."""
        return self.params["embed"].dtype

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of ``capacity`` slots for each of ``batch`` rows."""
        return KVCache.create(
            layers=self.config.num_layers,
            batch=batch,
            capacity=capacity,
            kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_dim,
            dtype=self.dtype,
            mesh=self.mesh,
        )

    def forward(self, tokens: jax.Array, cache: KVCache | None = None, **options: Any) -> tuple[Output, KVCache | None]:
        """Run the model over T tokens a row, and write them into the cache.

        Args:
            tokens: ``[B, T]`` token ids.
            cache: what came before; the call's keys and values are written at slots ``length … length+T`` of each row and
                ``length`` stays as it is. None: the call stands alone (training).
            options: as in `score`.

        Returns:
            `Output`, and the cache with the call written into it.
        """
        output, new = self.score(tokens, cache, **options)
        return output, None if cache is None else cache.write(new, after=output.hidden)

    def score(
        self,
        tokens: jax.Array,
        cache: KVCache | None = None,
        *,
        positions: jax.Array | None = None,
        mask: jax.Array | np.ndarray | None = None,
        visible: jax.Array | None = None,
        taps: Sequence[int] = (),
        layers: int | None = None,
        with_logits: bool = True,
    ) -> tuple[Output, tuple[Slots, ...]]:
        """`forward` that leaves the cache as it is, and returns what is to be written.

        Args:
            tokens: ``[B, T]`` token ids.
            cache: what came before, or None.
            positions: ``[B, T]``; by default ``length + 0, 1, 2, …``.
            mask: ``[B|1, T, T]`` bool, which tokens of the call see each other; None is causal.
            visible: ``[B, T, S]`` bool, which slots of the cache each token sees; None: all see those below ``length``.
            taps: layers whose input to record in ``Output.taps``, in ascending order; ``num_layers`` is the
                input of the final norm.
            layers: run only the first so many layers, then the final norm and head (early exit).
            with_logits: False spares the product with the vocabulary (prefill).

        Returns:
            `Output`, and each layer's keys and values of the call, for `KVCache.write`.
        """
        batch, count = tokens.shape
        depth = self.config.num_layers if layers is None else layers
        if positions is None:
            offset = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
            positions = offset[:, None] + jnp.arange(count)[None]
        if mask is None:
            mask = np.tril(np.ones((1, count, count), bool))

        # Out-of-range ids cannot raise here; the edge (`engine.generate`) checks them.
        x = self._constrain(self.params["embed"][tokens], None)
        turn = rotations(self.config.rope, self.config.head_dim, positions)
        if visible is None and cache is not None:
            visible = cache.committed[:, None]
        tapped, new = [], []
        for i, layer in enumerate(self.params["layers"][:depth]):
            if i in taps:
                tapped.append(x)
            past = None if cache is None or visible is None else (cache.layers[i], visible)
            x, slots = decoder_layer(layer, self.config, x, turn, jnp.asarray(mask), past)
            x = self._constrain(x, None)
            new.append(slots)
        if depth in taps:
            tapped.append(x)

        hidden = rms_norm(x, self.params["norm"], self.config.norm_eps)
        output = Output(
            logits=self.head(hidden) if with_logits else None,
            hidden=hidden,
            taps=jnp.stack(tapped, axis=2) if tapped else jnp.zeros((batch, count, 0, x.shape[-1]), x.dtype),
        )
        return output, tuple(new)

    def prefill(self, tokens: jax.Array, lengths: jax.Array, capacity: int, taps: Sequence[int] = ()) -> tuple[Output, KVCache]:
        """Read the prompts into a new cache, `PREFILL_CHUNK` tokens at a time.

        Args:
            tokens: ``[B, P]``, right-padded.
            lengths: ``[B]``, at least 1.
            capacity: slots of the new cache, at least P.
            taps: as in `forward`.

        Returns:
            `Output` over the prompts, without logits, and the cache with ``lengths - 1`` committed slots: the last token of
            a prompt is the first root, which the first step reads.
        """
        batch, count = tokens.shape
        cache = self.new_cache(batch, capacity)
        if count <= PREFILL_CHUNK:
            output, new = self.score(tokens, taps=taps, with_logits=False)
            cache = cache.write(new, after=output.hidden)
        else:
            chunks = -(-count // PREFILL_CHUNK)
            padded = jnp.pad(tokens, ((0, 0), (0, chunks * PREFILL_CHUNK - count)))
            parts = jnp.moveaxis(padded.reshape(batch, chunks, PREFILL_CHUNK), 1, 0)

            def read(cache: KVCache, part: jax.Array) -> tuple[KVCache, Output]:
                output, written = self.forward(part, cache, taps=taps, with_logits=False)
                assert written is not None
                return written.keep(None, jnp.full_like(written.length, PREFILL_CHUNK)), output

            cache, outputs = jax.lax.scan(read, cache, parts)

            def join(x: jax.Array) -> jax.Array:  # [chunks, B, C, …] -> [B, P, …]
                return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * PREFILL_CHUNK, *x.shape[3:])[:, :count]

            output = jax.tree.map(join, outputs)
        return output, replace(cache, length=lengths - 1)

    def head(self, hidden: jax.Array) -> jax.Array:
        """Logits ``[..., V]`` in float32 of states that have passed the final norm."""
        if "lm_head" in self.params:
            logits = jnp.matmul(hidden, self.params["lm_head"], preferred_element_type=jnp.float32)
        else:
            logits = jnp.einsum("...h,vh->...v", hidden, self.params["embed"], preferred_element_type=jnp.float32)
        return self._constrain(logits, "vocab")

    def _constrain(self, x: jax.Array, last: str | None) -> jax.Array:
        axes = ("batch", *(None,) * (x.ndim - 2), last)
        return sharding.constrain(x, axes, self.config.axis_units, self.mesh)


def default_dtype() -> Any:
    """float32 on CPU, bfloat16 elsewhere."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
