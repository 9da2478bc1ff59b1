"""The decoder of every target and every draft model: one class for all families."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from specjax import sharding
from specjax.errors import InputError
from specjax.models import config_json, fingerprint, hub, huggingface, parts
from specjax.models import params as declarations
from specjax.models.attention import Filled, Piece
from specjax.models.cache import (
    Cache,
    Entries,
    Entry,
    KVCache,
    RingCache,
    empty_entries,
    empty_states,
)
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.layers import decoder_layer, normed
from specjax.models.linear_attention import Ancestry, Context
from specjax.models.memory import LayerMemory
from specjax.models.params import Params
from specjax.models.primitives import (
    capped,
    embedding_logits,
    linear,
    rms_norm,
    scaled,
    vocabulary_logits,
)
from specjax.models.quantization import QuantizedMatrix, schemes
from specjax.models.quantization.weights import dequantize_matrix, rows_of
from specjax.models.quantized_cache import CacheType, check_cache_type
from specjax.models.rope import rotations
from specjax.progress import waiting
from specjax.pytree_class import KeyedByClass
from specjax.reprs import OneLine


@struct.dataclass
class States:
    """The hidden states of one forward pass, before the head.

    Attributes:
        hidden: ``[B, T, H]`` the residual stream after the final norm: the input of the head.
        taps: ``[B, T, n, H]`` the residual stream *entering* each of the n requested layers, before
            any norm.

    Examples:
        >>> states, entries = target.read(prompts, taps=(0, 1))
        >>> states.hidden.shape, states.taps.shape
        ((2, 6, 16), (2, 6, 2, 16))
    """

    hidden: jax.Array
    taps: jax.Array


@struct.dataclass
class Output(States):
    """The `States` of one forward pass, and their logits.

    Attributes:
        logits: ``[B, T, V]`` float32.

    Examples:
        >>> output, _ = target.forward(prompts)
        >>> output.logits.shape, output.logits.dtype
        ((2, 6, 16), dtype('float32'))
    """

    logits: jax.Array

    @property
    def states(self) -> States:
        """The same without the logits."""
        return States(hidden=self.hidden, taps=self.taps)


@struct.dataclass
class Target(OneLine, KeyedByClass):
    """A decoder-only language model as one pytree: its params are leaves, its config is static.

    Attributes:
        params: nested dicts of arrays, declared in `specjax.models.params`.
        config: the model's configuration.
        mesh: the mesh of its params; None for the default device.
        part_of: the fingerprint of the whole target, if this is a part of one (see `part`); or "".
        cache_dtype: the format of its cache: "float" for the type of its activations, or "int8" for
            8 bits, which take half the memory of bfloat16 (`specjax.models.quantized_cache`). With
            "int8" it is another model, nearly the same: speculative decoding then gives the text of
            plain decoding with such a cache.

    Examples:
        >>> target.save_pretrained("tiny")
        >>> loaded = specjax.Target.from_pretrained("tiny")
        >>> loaded.config == target.config
        True
        >>> output, _ = loaded.forward(prompts)
        >>> output.logits.shape
        (2, 6, 16)
        >>> small = target.replace(cache_dtype="int8").new_cache(batch=2, capacity=16)
        >>> {part.dtype.name: part.shape for part in jax.tree.leaves(small.layers[0])}
        {'int8': (2, 2, 16, 8), 'float32': (2, 2, 16)}
    """

    params: Params
    config: ModelConfig = struct.field(pytree_node=False)
    mesh: Mesh | None = struct.field(pytree_node=False, default=None)
    part_of: str = struct.field(pytree_node=False, default="")
    cache_dtype: CacheType = struct.field(pytree_node=False, default="float")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_cache_type(self.cache_dtype)

    def shown_fields(self) -> dict[str, Any]:
        """Return the fields that the repr shows: the main sizes, and what is not default."""
        sizes = {
            name: getattr(self.config, name, None)
            for name in ("model_type", "num_layers", "hidden_size", "vocab_size")
        }
        options = {name: getattr(self, name) for name in ("mesh", "part_of", "cache_dtype")}
        changed = {name: value for name, value in options.items() if value != getattr(Target, name)}
        return {**sizes, "params": self.params, **changed}

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path | CheckpointFiles,
        *,
        dtype: DTypeLike | None = None,
        mesh: Mesh | None = None,
        layers: parts.Layers | None = None,
        weights: schemes.Weights = schemes.AS_STORED,
        cache_dtype: CacheType = "float",
    ) -> "Target":
        """Load a Hugging Face checkpoint of a family in `specjax.models.families`.

        Weights may be quantized to 8 or 4 bits, which a pass reads in less time. Speculative
        decoding then gives exactly the text of the quantized model. MTP modules are not part of the
        target and are not loaded.

        Args:
            path: a directory with config.json and safetensors, a hub id, or a folder in a bucket
                (``s3://``, ``gs://``); or the opened files of the checkpoint.
            dtype: the type of the params; by default float32 on CPU (bfloat16 products are several
                times slower there) and bfloat16 elsewhere.
            mesh: the mesh to shard the params over (see `specjax.sharding`); each device reads only
                its own part of each file.
            layers: the layers of a part of the target, as in `part`. Of the other layers only the
                samples for the fingerprint are read. None: all layers of the checkpoint, which may
                itself be a part.
            weights: "stored": quantized if the checkpoint is and the device can multiply them (a
                CPU converts FP8); "float": all in ``dtype``; or the scheme to quantize layers with
                as they are read: "int8", 8 bits; "w8a8", 8 bits for weights and activations;
                "int4", 4 bits in groups of 128 (8 bits for the embedding and the head); "fp8", FP8
                (except the embedding and the head).
            cache_dtype: "float" or "int8", see the attribute.

        Raises:
            InputError: ``weights`` or ``cache_dtype`` is not one of these names.
            CheckpointError: The checkpoint is invalid. The message names the problem and the
                remedy.
        """
        check_cache_type(cache_dtype)
        files = hub.open_checkpoint(path)
        config = config_json.read_config(files)
        saved_part, of = config_json.read_part(files) or (None, "")
        dtype = default_dtype() if dtype is None else dtype
        with waiting(f"loading {path}"):
            config = huggingface.with_stored_head(files, config)
            if layers is not None and saved_part is None:
                layers = parts.check_layers(layers, (0, config.num_layers), config.num_layers)
                params, of = huggingface.load_part(files, config, dtype, layers, mesh, weights)
            else:
                params = huggingface.load_params(files, config, dtype, mesh, weights, saved_part)
        target = cls(params=params, config=config, mesh=mesh, part_of=of, cache_dtype=cache_dtype)
        return target if layers is None or saved_part is None else target.part(layers)

    @classmethod
    def init(
        cls,
        config: ModelConfig,
        key: jax.Array,
        dtype: DTypeLike = jnp.float32,
        mesh: Mesh | None = None,
    ) -> "Target":
        """Return a model with random weights; consumes ``key``."""
        params = declarations.initialise(
            declarations.declare(config), key, dtype, mesh, config.axis_units
        )
        return cls(params=params, config=config, mesh=mesh)

    def save_pretrained(self, path: str | Path, *, dtype: DTypeLike | None = None) -> None:
        """Write the model as a Hugging Face checkpoint, all of it or nothing.

        ``dtype`` is the type of the file, by default the model's own.
        """
        layers = self.held if self.part_of else None
        huggingface.save(
            Path(path), self.config, self.params, dtype, layers=layers, part_of=self.part_of
        )

    def quantize(self, weights: schemes.Weights) -> "Target":
        """Return the model with quantized weights.

        ``weights`` is a scheme, or the name of one, as in `from_pretrained`.

        Raises:
            InputError: There is no scheme of that name, or the weights are quantized already.

        Examples:
            >>> quantized = target.quantize("int8")
            >>> quantized.params["layers"][0]["down"].values.dtype
            dtype('int8')
            >>> specjax.generate(quantized, None, prompts, max_new_tokens=8).tokens.shape
            (2, 14)
        """
        declared = declarations.declare(self.config, self.held if self.part_of else None)
        form_of = schemes.of_model(schemes.scheme_of(weights).form_of, self.config.tie_embeddings)
        params = schemes.quantize_params(
            declared, self.params, form_of, self.mesh, self.config.axis_units
        )
        return replace(self, params=params)

    narrow = schemes.narrow  # the old name of `quantize`

    # --- parts of a target ---

    def part(self, layers: parts.Layers) -> "Target":
        """Return a target with embedding, final norm and head, and a range of the layers.

        The range is from the first index to the one after the last. The layers keep their indices;
        `run` refuses to run others.

        Raises:
            InputError: There are no such layers.

        Examples:
            >>> part = target.part(layers=(1, 2))
            >>> part.held, part.fingerprint() == target.fingerprint()
            ((1, 2), True)
            >>> specjax.generate(part, None, prompts)
            Traceback (most recent call last):
            specjax.errors.InputError: target: this is a part of a target (embedding, ...
        """
        first, last = parts.check_layers(layers, self.held, self.config.num_layers)
        layers_of_part = [
            layer if first <= i < last else {} for i, layer in enumerate(self.params["layers"])
        ]
        return replace(
            self, params={**self.params, "layers": layers_of_part}, part_of=self.fingerprint()
        )

    @property
    def held(self) -> parts.Layers:
        """The layers of this target: from the first index to the one after the last."""
        present = [i for i, layer in enumerate(self.params["layers"]) if layer]
        if present:
            return (present[0], present[-1] + 1)
        return (self.config.num_layers, self.config.num_layers)

    def fingerprint(self) -> str:
        """Return 32 hexadecimal digits by which a server and a client compare their targets.

        A part has the fingerprint of the whole. See `specjax.models.fingerprint`.
        """
        return self.part_of or fingerprint.of_params(self.params, self.config, self.mesh)

    def check_whole(self) -> None:
        """Refuse, with an InputError, a part of a target."""
        if self.part_of:
            raise parts.refusal("target", self.held, self.config.num_layers)

    @property
    def dtype(self) -> np.dtype:
        """The type of the activations: that of the params that are not quantized.

        A float cache has it too.
        """
        return self.params["norm"].dtype

    @property
    def _entry_dtype(self) -> DTypeLike:
        return jnp.int8 if self.cache_dtype == "int8" else self.dtype

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """Return an empty cache of ``capacity`` slots for each of ``batch`` rows."""
        return KVCache.create(self._memories(None), batch=batch, capacity=capacity, **self._kept_as)

    def new_ring(self, batch: int, slots: int, num_kept: int) -> RingCache:
        """Return an empty `RingCache` for ``batch`` rows.

        Each row has ``slots`` slots, and ``num_kept`` of these are never overwritten.
        """
        return RingCache.around(self.new_cache(batch, slots), num_kept)

    def new_scratch(self, batch: int, slots: int, layers: tuple[int, int] | None = None) -> Entries:
        """Return empty entries for ``slots`` drafted tokens of each row.

        ``layers`` is a slice of the layers, as in `run`.
        """
        return empty_entries(self._memories(layers), batch=batch, slots=slots, **self._kept_as)

    @property
    def _kept_as(self) -> dict[str, Any]:
        """The types and the mesh of what is stored for tokens."""
        return {"dtype": self._entry_dtype, "activations": self.dtype, "mesh": self.mesh}

    def _memories(self, layers: tuple[int, int] | None) -> list[LayerMemory]:
        start, stop = (0, self.config.num_layers) if layers is None else layers
        return [self.config.memory(layer) for layer in range(start, stop)]

    # --- slices of the model, for drafters that run a part of it ---

    def embed(self, tokens: Int[Array, "B T"], normed: bool = True) -> jax.Array:
        """Return the embeddings ``[B, T, H]`` of tokens: the residual stream at layer 0.

        If the model norms its embeddings, ``normed`` False leaves the norm out.
        """
        x = self._look_up(self.params["embed"], tokens)
        if self.config.embedding_normed and normed:
            x = rms_norm(x, None, self.config.norm_eps)
        if self.config.embedding_scale != 1.0:
            scale = self.config.embedding_scale
            if self.config.embedding_scale_rounded:
                x = x * jnp.asarray(scale, x.dtype)
            else:
                x = scaled(x, scale)
        return self._constrain(x, None)

    def _look_up(
        self,
        table: jax.Array | QuantizedMatrix,
        tokens: Int[Array, "B T"],
        columns: slice = slice(None),
    ) -> jax.Array:
        """Return ``[B, T, n]``, some ``columns`` of the rows of ``table`` for ``tokens``.

        On a mesh a single token is looked up twice: XLA turns a single look-up into a slice, for
        which it sends GPUs the whole table.
        """

        def look_up(rows: jax.Array) -> jax.Array:
            if isinstance(table, QuantizedMatrix):
                return rows_of(table, rows, self.dtype)
            return table[rows, columns]

        if self.mesh is None or tokens.size > 1:
            return look_up(tokens)
        return look_up(jnp.repeat(tokens, 2, axis=0))[:1]

    def layer_inputs(
        self, tokens: Int[Array, "B T"], layers: tuple[int, int] | None = None
    ) -> jax.Array:
        """Return the input ``[B, T, n, P]`` of each of n layers besides the residual stream.

        ``layers`` is a slice, as in `run`. An input is the scaled mean of a look-up by token and a
        projection of its embedding (Gemma 4's E2B and E4B, after Gemma 3n).
        """
        config, size = self.config, self.config.per_layer_inputs
        start, stop = (0, config.num_layers) if layers is None else layers
        columns = slice(start * size, stop * size)
        looked_up = self._look_up(self.params["per_layer_embed"], tokens, columns)
        looked_up = looked_up * jnp.asarray(size**0.5, looked_up.dtype)
        projection = {"weight": self.params["per_layer_projection"][:, columns]}
        projected = linear(projection, "weight", self.embed(tokens)) * config.hidden_size**-0.5
        shape = (*tokens.shape, stop - start, size)
        projected = normed(self.params, "per_layer_norm", config, projected.reshape(shape))
        return (projected + looked_up.reshape(shape)) * 2**-0.5

    def run(
        self,
        x: jax.Array,
        cache: Cache | None = None,
        *,
        tokens: Int[Array, "B T"] | None = None,
        layers: tuple[int, int] | None = None,
        positions: jax.Array | None = None,
        mask: jax.Array | np.ndarray | None = None,
        documents: Int[Array, "B T"] | None = None,
        scratch: Sequence[tuple[Sequence[Entry], jax.Array | None]] = (),
        taps: Sequence[int] = (),
        commit: Int[Array, " B"] | None = None,
    ) -> tuple[jax.Array, jax.Array, tuple[Any, ...]]:
        """Run a slice of the layers over T tokens of each row. The cache is only read.

        Args:
            x: ``[B, T, H]`` the residual stream that enters the slice.
            cache: the committed tokens, for the layers of the slice alone (`KVCache.of_layers`), or
                None. In a `RingCache`, layers with a window see all slots.
            tokens: the token ids; only needed by models with inputs of each layer.
            layers: the slice: from the first index to the one after the last; None for all layers.
            positions: ``[B, T]``; by default ``length + 0, 1, 2, …``.
            mask: ``[B|1, T, T]`` bool, which tokens of the call see each other; None for causal.
            documents: ``[B, T]`` the index of each token's document. Documents are contiguous and
                do not see each other. It excludes ``mask``, ``cache``, ``scratch`` and ``commit``;
                layers with a state then return no entries.
            scratch: pairs of the entries of drafted tokens, R for each row, in the layers of the
                slice; and ``[B, T, R]`` bool, which of them each token sees, or None: there is one
                for each token, which sees no other. They are read as if they were in the cache, but
                layers with a window see all of them that the mask shows.
            taps: the layers whose input to record, in ascending order; the index after the last of
                the slice is its output.
            commit: ``[B]`` the number of tokens of each row that are certain to be committed, if it
                is known. Layers with a state then return the state after them, and no entries of
                tokens, which would take far more memory for a long prompt. The tokens must then be
                a chain, without ``mask`` and ``scratch``. None: it is decided later.

        Returns:
            The residual stream ``[B, T, H]`` after the slice; the ``[B, T, n, H]`` recorded inputs
            of the n ``taps``; and the entries of the call's own tokens by layer,
            ``[B, heads, T, dim]`` each part, or ``()`` for a layer that has none. With ``commit`` a
            layer with a state returns its `State`.

        Raises:
            InputError: A layer of the slice reads the entries, or takes the selected tokens, of one
                before the slice, or is not in this part of a target; ``tokens`` are missing;
                ``documents`` are given with an argument that they exclude; or layers with a state
                are to commit tokens that are not a chain.
        """
        if documents is not None and not (
            mask is None and cache is None and commit is None and not scratch
        ):
            raise InputError(
                "documents: cannot be combined with mask, cache, scratch and commit: leave"
                " those out"
            )
        batch, count = x.shape[:2]
        start, stop = (0, self.config.num_layers) if layers is None else layers
        if not all(self.params["layers"][start:stop]):
            raise InputError(
                f"layers=({start}, {stop}): this is"
                f" {parts.describe(self.held, self.config.num_layers)}: give the whole target"
            )
        if positions is None:
            positions = self._positions(batch, count, cache, documents)
        if mask is None:
            # In numpy: `Ancestry` must see while tracing that it is a chain.
            mask = np.tril(np.ones((1, count, count), bool))
        contexts = self._contexts(cache, (start, stop), batch, mask, documents, scratch, commit)
        mask = jnp.asarray(mask)
        if documents is not None:
            mask = mask & (documents[:, :, None] == documents[:, None])
        inputs = self._inputs(tokens, (start, stop))
        sizes = [self.config.of_layer(layer) for layer in range(start, stop)]
        # Computed once for all layers of a kind, not in every layer.
        kinds = dict.fromkeys((size.rope, size.head_dim) for size in sizes)
        turns = {kind: rotations(*kind, positions) for kind in kinds}
        self._check_selects(start, stop)
        tapped, new, selection = [], [], None
        for i, config in enumerate(sizes):
            if start + i in taps:
                tapped.append(x)
            source = self._source(start + i, start) - start
            past: list[Piece] = []
            window = self.config.window_of(start + i)
            if slots := self.config.memory(start + source).parts:
                if cache is not None:
                    past.append(self.cache_piece(cache, source, positions, window))
                past += [(entries[source][: len(slots)], visible) for entries, visible in scratch]
            visible = in_window(mask, positions, window, self.config.windows_aligned)
            if source < i:
                past.append((new[source], visible))
            turn, layer = turns[config.rope, config.head_dim], self.params["layers"][start + i]
            extra = None if inputs is None else inputs[:, :, i]
            x, entry, selection = decoder_layer(
                layer,
                config,
                x,
                turn,
                visible,
                past,
                self.mesh,
                extra,
                self.cache_dtype,
                contexts[i],
                selection,
            )
            x = self._constrain(x, None)
            new.append(entry)
        if stop in taps:
            tapped.append(x)
        recorded = jnp.zeros((batch, count, 0, x.shape[-1]), x.dtype)
        if tapped:
            recorded = jnp.stack(tapped, axis=2)
        return x, recorded, tuple(new)

    def _contexts(
        self,
        cache: Cache | None,
        layers: tuple[int, int],
        batch: int,
        mask: jax.Array | np.ndarray,
        documents: jax.Array | None,
        scratch: Sequence[tuple[Sequence[Entry], jax.Array | None]],
        commit: jax.Array | None,
    ) -> list[Context | None]:
        """Return the context of each layer with a state, and None for the others.

        The arguments are those of `run`.
        """
        memories = self._memories(layers)
        if cache is not None:
            states = cache.states
        else:
            states = empty_states(memories, batch=batch, dtype=self.dtype, mesh=self.mesh)
        if not any(states):
            return [None] * (layers[1] - layers[0])
        (kernel,) = {memory.state.kernel for memory in memories if memory.state is not None}
        ancestry = Ancestry.of(mask, [visible for _, visible in scratch], kernel)
        if commit is not None and not ancestry.is_chain:
            raise InputError(
                "mask: layers with a state can only commit a chain: leave mask and scratch out, or"
                " `read` the tokens and then `append` those that are accepted"
            )
        ancestry = replace(ancestry, documents=documents)
        contexts: list[Context | None] = []
        for i, (memory, state) in enumerate(zip(memories, states, strict=True)):
            drafted = [memory.nodes_of(entries[i]) for entries, _ in scratch]
            contexts.append(None if state is None else Context(state, drafted, ancestry, commit))
        return contexts

    def _positions(
        self, batch: int, count: int, cache: Cache | None, documents: jax.Array | None
    ) -> jax.Array:
        """Return the positions ``[B, T]`` of the tokens after those in ``cache``."""
        offset = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
        positions = offset[:, None] + jnp.arange(count)[None]
        # Other layers see distances alone.
        if documents is not None and self.config.windows_aligned:
            return positions - _first_of_document(documents)
        return positions

    def _inputs(self, tokens: jax.Array | None, layers: tuple[int, int]) -> jax.Array | None:
        """Return `layer_inputs`, or None if the model has none."""
        if not self.config.per_layer_inputs:
            return None
        if tokens is None:
            raise InputError(
                "tokens: the layers of this model have inputs for each token: give the token ids"
            )
        return self.layer_inputs(tokens, layers)

    def _check_selects(self, first: int, last: int) -> None:
        """Refuse a slice whose first layer takes the selected tokens of the layer before it."""
        if self.config.indexer is not None and first < last and not self.config.has_indexer(first):
            full = max(layer for layer in range(first) if self.config.has_indexer(layer))
            raise InputError(
                f"layers: the slice begins with layer {first}, which attends to the tokens that"
                f" layer {full} selects: begin with that one"
            )

    def _source(self, layer: int, first: int) -> int:
        """Return the layer whose entries ``layer`` reads, in a slice that begins with ``first``."""
        source = self.config.entries_of(layer)
        if source < first:
            raise InputError(
                f"layers: the slice begins with layer {first}, and its layer {layer} reads the"
                f" entries of layer {source}: begin with that one"
            )
        return source

    def cache_piece(
        self, cache: Cache, layer: int, positions: jax.Array, window: int | None
    ) -> Filled:
        """Return what queries at ``positions [B, T]`` see of a layer of a cache.

        A ``window`` does not apply to a ring.
        """
        if window is None or isinstance(cache, RingCache):
            since = None
        elif self.config.windows_aligned:
            since = positions // window * window
        else:
            since = positions - window + 1
        return Filled.of(cache, layer, since, self.mesh)

    def norm(self, x: jax.Array) -> jax.Array:
        """Apply the final norm, between the last layer and the head."""
        config = self.config
        return rms_norm(x, self.params["norm"], config.norm_eps, config.last_norm_offset)

    def head(self, hidden: jax.Array) -> jax.Array:
        """Return the logits ``[..., V]`` in float32 of states after the final norm."""
        return self._constrain(self.finish_logits(self._head_products(hidden)), "vocab")

    def head_products(self, hidden: jax.Array) -> jax.Array:
        """Return the products ``[..., V]`` in float32 of states with the head's columns.

        They are neither divided nor capped.
        """
        return self._constrain(self._head_products(hidden), "vocab")

    def _head_products(self, hidden: jax.Array) -> jax.Array:
        if "lm_head" in self.params:
            return vocabulary_logits(hidden, self.params["lm_head"])
        return embedding_logits(hidden, self.params["embed"])

    def finish_logits(self, logits: jax.Array) -> jax.Array:
        """Divide and cap products with the head's columns, as the model requires.

        The products may be of all tokens or of some.
        """
        divisor = self.config.logit_divisor
        return capped(logits if divisor == 1.0 else logits / divisor, self.config.logit_cap)

    @property
    def embedding(self) -> jax.Array:
        """The embedding ``[V, H]`` in floats, to initialize those of drafters."""
        stored = self.params["embed"]
        if isinstance(stored, QuantizedMatrix):
            return dequantize_matrix(stored, self.dtype).T
        return stored

    @property
    def head_weights(self) -> jax.Array:
        """The head's matrix ``[H, V]`` in floats, to initialize those of drafters."""
        stored = self.head_as_stored
        if isinstance(stored, QuantizedMatrix):
            return dequantize_matrix(stored, self.dtype)
        return stored if "lm_head" in self.params else stored.T

    @property
    def head_as_stored(self) -> Any:
        """The head's matrix as it is in memory, to count the bytes that are read.

        It is the embedding ``[V, H]`` if the two are tied.
        """
        return self.params["lm_head" if "lm_head" in self.params else "embed"]

    @property
    def weights_of_pass(self) -> Params:
        """The params that a pass reads: all, except embeddings whose rows are looked up."""
        looked_up = {"per_layer_embed"}
        if not self.config.tie_embeddings:
            looked_up.add("embed")
        return {name: value for name, value in self.params.items() if name not in looked_up}

    # --- the whole model ---

    def read(
        self, tokens: Int[Array, "B T"], cache: Cache | None = None, **options: Any
    ) -> tuple[States, tuple[Any, ...]]:
        """Read T tokens of each row, and leave the cache as it is.

        Args:
            tokens: the token ids.
            cache: the tokens before, or None.
            options: the options of `run`; with ``layers=(0, k)`` the first k layers, then the final
                norm (early exit).

        Returns:
            The states, and the entries of the call by layer, which `KVCache.append` commits.
        """
        x, taps, new = self.run(self.embed(tokens), cache, tokens=tokens, **options)
        return States(hidden=self.norm(x), taps=taps), new

    def score(
        self, tokens: Int[Array, "B T"], cache: Cache | None = None, **options: Any
    ) -> tuple[Output, tuple[Any, ...]]:
        """Return the output with logits after each token, and the entries; see `read`."""
        states, new = self.read(tokens, cache, **options)
        return self._with_logits(states), new

    def commit(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        count: jax.Array | None = None,
        **options: Any,
    ) -> tuple[States, Cache]:
        """Read tokens, and commit the first ``count [B]`` of each row to the cache; None for all T.

        See `read`.
        """
        count = jnp.full_like(cache.length, tokens.shape[1]) if count is None else count
        states, new = self.read(tokens, cache, commit=count, **options)
        return states, cache.append(new, count, after=states.hidden)

    @overload
    def forward(
        self, tokens: Int[Array, "B T"], cache: None = None, count: None = None, **options: Any
    ) -> tuple[Output, None]: ...

    @overload
    def forward(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache,
        count: jax.Array | None = None,
        **options: Any,
    ) -> tuple[Output, Cache]: ...

    def forward(
        self,
        tokens: Int[Array, "B T"],
        cache: Cache | None = None,
        count: jax.Array | None = None,
        **options: Any,
    ) -> tuple[Output, Any]:
        """Return the output with logits, and the cache after `commit`; without a cache None.

        See `score` and `commit`.
        """
        if cache is None:
            return self.score(tokens, **options)[0], None
        states, cache = self.commit(tokens, cache, count, **options)
        return self._with_logits(states), cache

    def _with_logits(self, states: States) -> Output:
        return Output(hidden=states.hidden, taps=states.taps, logits=self.head(states.hidden))

    def _constrain(self, x: jax.Array, last: str | None) -> jax.Array:
        axes = ("batch", *(None,) * (x.ndim - 2), last)
        return sharding.constrain(x, axes, self.config.axis_units, self.mesh)


def _first_of_document(documents: jax.Array) -> jax.Array:
    """Return ``[B, T]`` the index of the first token of each token's document."""
    begins = documents[:, 1:] != documents[:, :-1]
    indices = jnp.where(begins, jnp.arange(1, documents.shape[1]), 0)
    return jnp.pad(jax.lax.cummax(indices, axis=1), ((0, 0), (1, 0)))


def in_window(
    mask: jax.Array, positions: jax.Array, window: int | None, aligned: bool = False
) -> jax.Array:
    """Return which tokens of a call see each other in a layer with a ``window``, or without one.

    ``aligned`` is whether windows begin at multiples of their size.
    """
    if window is None:
        return mask
    if aligned:
        return mask & (positions[:, :, None] // window == positions[:, None] // window)
    return mask & (positions[:, :, None] - positions[:, None] < window)


def default_dtype() -> DTypeLike:
    """Return float32 on CPU, and bfloat16 elsewhere."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
