"""The decoder behind every target and every draft model: one class for all families."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Int

from specjax import sharding
from specjax.models import huggingface
from specjax.models import params as declarations
from specjax.models.attention import Filled, Piece
from specjax.models.cache import Cache, Entry, KVCache, RingCache, empty_entries
from specjax.models.config import ModelConfig
from specjax.models.layers import decoder_layer, rms_norm
from specjax.models.params import Params
from specjax.models.primitives import vocabulary_logits
from specjax.models.rope import rotations


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
        """Load a Hugging Face checkpoint (a directory or a hub id) of a family that is known here.

        These are Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, DeepSeek-V3 (and R1), and MiMo. Weights in FP8 with a scale for each
        block, as DeepSeek publishes them, are converted to ``dtype``. Modules that predict further tokens (MTP) are no part of
        the target and are left out.

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
        params = declarations.initialise(declarations.declare(config), key, dtype, mesh, config.axis_units)
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
            self.config.entry_parts,
            layers=self.config.num_layers,
            batch=batch,
            capacity=capacity,
            dtype=self.dtype,
            mesh=self.mesh,
        )

    def new_ring(self, batch: int, slots: int, kept: int) -> RingCache:
        """An empty `RingCache` of ``slots`` for each of ``batch`` rows, of which ``kept`` stay."""
        return RingCache.around(self.new_scratch(batch, slots), kept)

    def new_scratch(self, batch: int, slots: int, layers: tuple[int, int] | None = None) -> tuple[Entry, ...]:
        """Empty entries for ``slots`` drafted tokens a row, of a slice of the layers as in `run`."""
        start, stop = (0, self.config.num_layers) if layers is None else layers
        parts = self.config.entry_parts
        return empty_entries(parts, layers=stop - start, batch=batch, slots=slots, dtype=self.dtype, mesh=self.mesh)

    # --- slices of the model, for drafters that run a part of it ---

    def embed(self, tokens: Int[Array, "B T"]) -> jax.Array:
        """``[B, T, H]`` the embeddings of ``tokens``: the residual stream that enters layer 0."""
        # Out-of-range ids cannot raise here; the edge (`specjax.generate`) checks them.
        return self._constrain(self.params["embed"][tokens], None)

    def run(
        self,
        x: jax.Array,
        cache: Cache | None = None,
        *,
        layers: tuple[int, int] | None = None,
        positions: jax.Array | None = None,
        mask: jax.Array | np.ndarray | None = None,
        scratch: Sequence[tuple[Sequence[Entry], jax.Array | None]] = (),
        taps: Sequence[int] = (),
    ) -> tuple[jax.Array, jax.Array, tuple[Entry, ...]]:
        """Run a slice of the layers over T tokens a row. Only reads the cache.

        Args:
            x: ``[B, T, H]`` the residual stream that enters the slice.
            cache: what is committed, of the layers of the slice alone (`KVCache.of_layers`), or None. Of a `RingCache` layers
                with a window see all that it holds.
            layers: the slice: from the first number up to, and without, the second; None is all layers.
            positions: ``[B, T]``; by default ``length + 0, 1, 2, …``.
            mask: ``[B|1, T, T]`` bool, which tokens of the call see each other; None is causal.
            scratch: entries of drafted tokens, R a row, of the layers of the slice; and ``[B, T, R]`` bool, which of them each
                token sees, or None: there is one for each token, and it sees no other. They are read as if they were in the
                cache, but that layers with a window see all of them that the mask shows.
            taps: layers whose input to record, in ascending order; the number after the slice's last is its output.

        Returns:
            The residual stream ``[B, T, H]`` after the slice; the ``[B, T, n, H]`` recorded inputs of the n ``taps``; and each
            layer's entries of the call's own tokens, ``[B, heads, T, dim]`` each part.
        """
        batch, count = x.shape[:2]
        start, stop = (0, self.config.num_layers) if layers is None else layers
        if positions is None:
            offset = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
            positions = offset[:, None] + jnp.arange(count)[None]
        if mask is None:
            mask = np.tril(np.ones((1, count, count), bool))
        mask = jnp.asarray(mask)
        turn = rotations(self.config.rope, self.config.head_dim, positions)
        tapped, new = [], []
        for i, layer in enumerate(self.params["layers"][start:stop]):
            if start + i in taps:
                tapped.append(x)
            past: list[Piece] = []
            window = self.config.window_of(start + i)
            if cache is not None:
                past.append(self.cache_piece(cache, i, positions, window))
            past += [(entries[i], visible) for entries, visible in scratch]
            seen = mask if window is None else mask & (positions[:, :, None] - positions[:, None] < window)
            x, own = decoder_layer(layer, self.config, x, turn, seen, past, self.mesh)
            x = self._constrain(x, None)
            new.append(own)
        if stop in taps:
            tapped.append(x)
        recorded = jnp.stack(tapped, axis=2) if tapped else jnp.zeros((batch, count, 0, x.shape[-1]), x.dtype)
        return x, recorded, tuple(new)

    def cache_piece(self, cache: Cache, layer: int, positions: jax.Array, window: int | None) -> Filled:
        """What queries at ``positions [B, T]`` see of a cache's layer. In a ring a ``window`` changes nothing."""
        since = None if window is None or isinstance(cache, RingCache) else positions - window + 1
        return Filled(cache.layers[layer], cache.filled, since, self.mesh)

    def norm(self, x: jax.Array) -> jax.Array:
        """The final norm, which stands between the last layer and the head."""
        return rms_norm(x, self.params["norm"], self.config.norm_eps)

    def head(self, hidden: jax.Array) -> jax.Array:
        """Logits ``[..., V]`` in float32 of states that have passed the final norm."""
        if "lm_head" in self.params:
            return self._constrain(vocabulary_logits(hidden, self.params["lm_head"]), "vocab")
        flat = hidden.reshape(-1, hidden.shape[-1])  # as in `vocabulary_logits`
        logits = jnp.einsum("th,vh->tv", flat, self.params["embed"], preferred_element_type=jnp.float32)
        return self._constrain(logits.reshape(*hidden.shape[:-1], -1), "vocab")

    @property
    def head_weights(self) -> jax.Array:
        """``[H, V]`` the head's matrix, for drafters whose own head begins as the target's."""
        return self.params["lm_head"] if "lm_head" in self.params else self.params["embed"].T

    # --- the whole model ---

    def score(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache | None = None,
        *,
        with_logits: bool = True,
        **options: Any,
    ) -> tuple[Output, tuple[Entry, ...]]:
        """Read T tokens a row and leave the cache as it is.

        Args:
            tokens: token ids.
            cache: what came before, or None.
            with_logits: False spares the product with the vocabulary.
            options: as in `run`; with ``layers=(0, k)`` the first k layers, then the final norm and head (early exit).

        Returns:
            `Output`, and each layer's entries of the call, which `KVCache.append` commits.
        """
        x, taps, new = self.run(self.embed(tokens), cache, **options)
        hidden = self.norm(x)
        return Output(logits=self.head(hidden) if with_logits else None, hidden=hidden, taps=taps), new

    def forward(
        self, tokens: Int[Array, "B T"], cache: Cache | None = None, count: jax.Array | None = None, **options: Any
    ) -> tuple[Output, Any]:
        """`score`, and commit the first ``count [B]`` tokens of each row to the cache (None: all T)."""
        output, new = self.score(tokens, cache, **options)
        if cache is None:
            return output, None
        count = jnp.full_like(cache.length, tokens.shape[1]) if count is None else count
        return output, cache.append(new, count, after=output.hidden)

    def _constrain(self, x: jax.Array, last: str | None) -> jax.Array:
        axes = ("batch", *(None,) * (x.ndim - 2), last)
        return sharding.constrain(x, axes, self.config.axis_units, self.mesh)


def default_dtype() -> Any:
    """float32 on CPU, bfloat16 elsewhere."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
