"""The decoder behind every target and every draft model: one class for all families."""

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
from specjax.models.cache import Cache, Entry, KVCache, Memory, RingCache, empty_entries, empty_states
from specjax.models.checkpoint_files import CheckpointFiles
from specjax.models.config import ModelConfig
from specjax.models.layers import decoder_layer, normed
from specjax.models.linear_attention import Ancestry, Context
from specjax.models.params import Params
from specjax.models.primitives import capped, embedding_logits, linear, vocabulary_logits
from specjax.models.quantization import QuantizedMatrix, schemes
from specjax.models.quantization.weights import dequantize_matrix, rows_of
from specjax.models.quantized_cache import CacheType, check_cache_type
from specjax.models.rope import rotations
from specjax.progress import waiting
from specjax.reprs import OneLine


@struct.dataclass
class States:
    """What one forward pass comes to before the head.

    Attributes:
        hidden: ``[B, T, H]`` the residual stream after the final norm: what the head reads.
        taps: ``[B, T, n, H]`` the residual stream *entering* each of the n asked layers, before any norm.

    Examples:
        >>> states, entries = target.read(prompts, taps=(0, 1))
        >>> states.hidden.shape, states.taps.shape
        ((2, 6, 16), (2, 6, 2, 16))
    """

    hidden: jax.Array
    taps: jax.Array


@struct.dataclass
class Output(States):
    """What one forward pass gives: its `States`, and what the head makes of them.

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
class Target(OneLine):
    """A decoder-only language model as one pytree: its params are leaves, its config is static.

    Attributes:
        params: nested dicts of arrays, declared in `specjax.models.params`.
        config: the model's configuration.
        mesh: where its params live; None is the default device.
        part_of: the fingerprint of the whole target, where this is a part of one (see `part`); "" where it is whole.
        cache_dtype: how it remembers tokens: "float", in the type of its activations; or "int8", in 8 bits, which take half
            the memory of bfloat16 (`specjax.models.quantized_cache`). It is then another model, nearly the same: its drafted
            text is that of plain decoding with such a cache.

    Examples:
        >>> target.save_pretrained("tiny")
        >>> read = specjax.Target.from_pretrained("tiny")
        >>> read.config == target.config
        True
        >>> output, _ = read.forward(prompts)
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
        check_cache_type(self.cache_dtype)

    def shown_fields(self) -> dict[str, Any]:
        """Return what the repr shows: the config's sizes, and what differs from the default."""
        sizes = {name: getattr(self.config, name, None) for name in ("model_type", "num_layers", "hidden_size", "vocab_size")}
        others = ((name, getattr(self, name)) for name in ("mesh", "part_of", "cache_dtype"))
        return {**sizes, "params": self.params, **{name: each for name, each in others if each != getattr(Target, name)}}

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
        """Load a Hugging Face checkpoint (a directory or a hub id) of one of the families in `specjax.models.families`.

        Weights may be quantized: numbers of 8 or 4 bits with scales, which a pass reads in less time. Drafted text is then that
        of the quantized model, exactly. Modules that predict further tokens (MTP) are no part of the target and are left out.

        Args:
            path: directory with config.json and safetensors, or a hub id; or the opened files of the checkpoint.
            dtype: of the params; by default float32 on CPU (bfloat16 products are several times slower there) and
                bfloat16 elsewhere.
            mesh: shards the params (see `specjax.sharding`); each device reads only its own part of each file.
            layers: of a part of the target, as in `part`: of the other layers nothing is read but what the fingerprint of the
                whole is taken of. None: all that the checkpoint has, which may itself be a part.
            weights: "stored": quantized where the checkpoint has them so and the device can multiply them (a CPU converts FP8);
                "float": all in ``dtype``; or how to quantize them, layer by layer as they are read: "int8", 8 bits; "w8a8",
                the same, and what they are multiplied with is rounded to 8 bits too; "int4", 4 bits in groups of 128 (the
                embedding and the head 8); "fp8", FP8 (but for the embedding and the head).
            cache_dtype: "float" or "int8", as the attribute says.

        Raises:
            InputError: there is no such name for ``weights`` or ``cache_dtype``.
            CheckpointError: something about the checkpoint is not as it must be; says what, and what to do.
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
    def init(cls, config: ModelConfig, key: jax.Array, dtype: DTypeLike = jnp.float32, mesh: Mesh | None = None) -> "Target":
        """A model with random weights; consumes ``key``."""
        params = declarations.initialise(declarations.declare(config), key, dtype, mesh, config.axis_units)
        return cls(params=params, config=config, mesh=mesh)

    def save_pretrained(self, path: str | Path, *, dtype: DTypeLike | None = None) -> None:
        """Write the model as a Hugging Face checkpoint, in ``dtype`` (by default its own). All of it or nothing."""
        layers = self.held if self.part_of else None
        huggingface.save(Path(path), self.config, self.params, dtype, layers=layers, part_of=self.part_of)

    def quantize(self, weights: schemes.Weights) -> "Target":
        """The same model with quantized weights; ``weights`` is the name of a scheme, as in `from_pretrained`.

        Raises:
            InputError: there is no scheme of that name, or the weights are quantized already.

        Examples:
            >>> quantized = target.quantize("int8")
            >>> quantized.params["layers"][0]["down"].values.dtype
            dtype('int8')
            >>> specjax.generate(quantized, None, prompts, max_new_tokens=8).tokens.shape
            (2, 14)
        """
        declared = declarations.declare(self.config, self.held if self.part_of else None)
        form_of = schemes.of_model(schemes.scheme_of(weights).form_of, self.config.tie_embeddings)
        params = schemes.quantize_params(declared, self.params, form_of, self.mesh, self.config.axis_units)
        return replace(self, params=params)

    narrow = schemes.narrow  # the old name

    # --- parts of a target ---

    def part(self, layers: parts.Layers) -> "Target":
        """A target with embedding, final norm and head, and of the layers those from the first number up to, and without, the
        second. They keep their numbers; of the others `run` refuses to run any.

        Raises:
            InputError: there are no such layers.

        Examples:
            >>> part = target.part(layers=(1, 2))
            >>> part.held, part.fingerprint() == target.fingerprint()
            ((1, 2), True)
            >>> specjax.generate(part, None, prompts)
            Traceback (most recent call last):
            specjax.errors.InputError: target: is a part of a target (embedding, final norm, head, and layer 1 of 2), ...
        """
        first, last = parts.check_layers(layers, self.held, self.config.num_layers)
        kept = [layer if first <= i < last else {} for i, layer in enumerate(self.params["layers"])]
        return replace(self, params={**self.params, "layers": kept}, part_of=self.fingerprint())

    @property
    def held(self) -> parts.Layers:
        """The layers that are there: from the first number up to, and without, the second."""
        there = [i for i, layer in enumerate(self.params["layers"]) if layer]
        return (there[0], there[-1] + 1) if there else (self.config.num_layers, self.config.num_layers)

    def fingerprint(self) -> str:
        """32 hexadecimal digits by which a server and a client tell whether they have the same target; of a part, those of the
        whole. See `specjax.models.fingerprint`."""
        return self.part_of or fingerprint.of_params(self.params, self.config, self.mesh)

    def check_whole(self) -> None:
        """Refuse, with an InputError, a part of a target."""
        if self.part_of:
            raise parts.refusal("target", self.held, self.config.num_layers)

    @property
    def dtype(self) -> np.dtype:
        """Data type of the activations: that of the params, but for those that are quantized. A cache of floats has it too."""
        return self.params["norm"].dtype

    @property
    def _entry_dtype(self) -> DTypeLike:
        return jnp.int8 if self.cache_dtype == "int8" else self.dtype

    def new_cache(self, batch: int, capacity: int) -> KVCache:
        """An empty cache of ``capacity`` slots for each of ``batch`` rows."""
        return KVCache.create(self._memories(None), batch=batch, capacity=capacity, **self._kept_as)

    def new_ring(self, batch: int, slots: int, kept: int) -> RingCache:
        """An empty `RingCache` of ``slots`` for each of ``batch`` rows, of which ``kept`` stay."""
        return RingCache.around(self.new_cache(batch, slots), kept)

    def new_scratch(self, batch: int, slots: int, layers: tuple[int, int] | None = None) -> tuple[Entry, ...]:
        """Empty entries for ``slots`` drafted tokens a row, of a slice of the layers as in `run`."""
        return empty_entries(self._memories(layers), batch=batch, slots=slots, **self._kept_as)

    @property
    def _kept_as(self) -> dict[str, Any]:
        """The types of what is remembered, and where it lies."""
        return {"dtype": self._entry_dtype, "activations": self.dtype, "mesh": self.mesh}

    def _memories(self, layers: tuple[int, int] | None) -> list[Memory]:
        start, stop = (0, self.config.num_layers) if layers is None else layers
        return [self.config.memory(layer) for layer in range(start, stop)]

    # --- slices of the model, for drafters that run a part of it ---

    def embed(self, tokens: Int[Array, "B T"]) -> jax.Array:
        """``[B, T, H]`` the embeddings of ``tokens``: the residual stream that enters layer 0."""
        # Out-of-range ids cannot raise here; the edge (`specjax.generate`) checks them.
        x = self._look_up(self.params["embed"], tokens)
        if self.config.embedding_scale != 1.0:
            x = x * jnp.asarray(self.config.embedding_scale, x.dtype)  # rounded first, as the models were trained
        return self._constrain(x, None)

    def _look_up(
        self, table: jax.Array | QuantizedMatrix, tokens: Int[Array, "B T"], columns: slice = slice(None)
    ) -> jax.Array:
        """``[B, T, n]`` those ``columns`` of the rows of ``table`` for ``tokens``.

        On a mesh a single one is looked up twice: XLA makes a slice of it otherwise, for which GPUs are sent the whole table.
        """

        def look_up(rows: jax.Array) -> jax.Array:
            return rows_of(table, rows, self.dtype) if isinstance(table, QuantizedMatrix) else table[rows, columns]

        if self.mesh is None or tokens.size > 1:
            return look_up(tokens)
        return look_up(jnp.repeat(tokens, 2, axis=0))[:1]

    def layer_inputs(self, tokens: Int[Array, "B T"], layers: tuple[int, int] | None = None) -> jax.Array:
        """``[B, T, n, P]`` what each of n layers, a slice as in `run`, is given of ``tokens`` beside the residual stream.

        It is the mean, but for a factor, of what is looked up and of what is made from a token's embedding (Gemma 4's E2B and
        E4B, after Gemma 3n).
        """
        config, size = self.config, self.config.per_layer_inputs
        start, stop = (0, config.num_layers) if layers is None else layers
        columns = slice(start * size, stop * size)
        found = self._look_up(self.params["per_layer_embed"], tokens, columns)
        found = found * jnp.asarray(size**0.5, found.dtype)
        own = {"weight": self.params["per_layer_projection"][:, columns]}
        made = linear(own, "weight", self.embed(tokens)) * config.hidden_size**-0.5
        both = (*tokens.shape, stop - start, size)
        made = normed(self.params, "per_layer_norm", config, made.reshape(both))
        return (made + found.reshape(both)) * 2**-0.5

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
        """Run a slice of the layers over T tokens a row. Only reads the cache.

        Args:
            x: ``[B, T, H]`` the residual stream that enters the slice.
            cache: what is committed, of the layers of the slice alone (`KVCache.of_layers`), or None. Of a `RingCache` layers
                with a window see all that it holds.
            tokens: whose states they are. Models that look up inputs of each layer need them; others do not read them.
            layers: the slice: from the first number up to, and without, the second; None is all layers.
            positions: ``[B, T]``; by default ``length + 0, 1, 2, …``.
            mask: ``[B|1, T, T]`` bool, which tokens of the call see each other; None is causal.
            documents: the numbers of the documents that the tokens belong to, which lie end to end and do not see each other.
                Without a ``mask``, a cache, scratch and ``commit``; layers with a state then give nothing for a token.
            scratch: entries of drafted tokens, R a row, of the layers of the slice; and ``[B, T, R]`` bool, which of them each
                token sees, or None: there is one for each token, and it sees no other. They are read as if they were in the
                cache, but that layers with a window see all of them that the mask shows.
            taps: layers whose input to record, in ascending order; the number after the slice's last is its output.
            commit: so many of each row's tokens are sure to be committed, and no others: layers with a state then give the
                state after them, and nothing for each token, which for a long prompt would take far more memory. The tokens
                must then be a chain, without a ``mask`` and scratch. None: which are committed is decided later.

        Returns:
            The residual stream ``[B, T, H]`` after the slice; the ``[B, T, n, H]`` recorded inputs of the n ``taps``; and each
            layer's entries of the call's own tokens, ``[B, heads, T, dim]`` each part; ``()`` of a layer that has none. With
            ``commit``, of a layer with a state its `State`.

        Raises:
            InputError: a layer of the slice reads the entries of one before it, or is not in this part of a target; or
                ``tokens`` are needed, and not given; or ``documents`` are given beside what they stand in place of; or layers
                with a state are to commit tokens that are no chain.
        """
        if documents is not None and not (mask is None and cache is None and commit is None and not scratch):
            raise InputError("documents: are read without mask, cache, scratch and commit: leave those out")
        batch, count = x.shape[:2]
        start, stop = (0, self.config.num_layers) if layers is None else layers
        if not all(self.params["layers"][start:stop]):
            raise InputError(
                f"layers=({start}, {stop}): this is {parts.describe(self.held, self.config.num_layers)}: give the whole target"
            )
        if positions is None:
            offset = jnp.zeros(batch, jnp.int32) if cache is None else cache.length
            positions = offset[:, None] + jnp.arange(count)[None]
        if mask is None:
            mask = np.tril(np.ones((1, count, count), bool))
        contexts = self._contexts(cache, (start, stop), batch, mask, documents, scratch, commit)
        mask = jnp.asarray(mask)
        if documents is not None:
            mask = mask & (documents[:, :, None] == documents[:, None])
        inputs = self._inputs(tokens, (start, stop))
        sizes = [self.config.of_layer(layer) for layer in range(start, stop)]
        turns = {kind: rotations(*kind, positions) for kind in dict.fromkeys((own.rope, own.head_dim) for own in sizes)}
        tapped, new = [], []
        for i, config in enumerate(sizes):
            if start + i in taps:
                tapped.append(x)
            source = self._source(start + i, start) - start
            past: list[Piece] = []
            window, has_state = self.config.window_of(start + i), contexts[i] is not None
            if cache is not None and not has_state:
                past.append(self.cache_piece(cache, source, positions, window))
            if not has_state:
                past += [(entries[source], visible) for entries, visible in scratch]
            visible = mask if window is None else mask & (positions[:, :, None] - positions[:, None] < window)
            if source < i:
                past.append((new[source], visible))
            turn, layer = turns[config.rope, config.head_dim], self.params["layers"][start + i]
            given = None if inputs is None else inputs[:, :, i]
            x, own = decoder_layer(layer, config, x, turn, visible, past, self.mesh, given, self.cache_dtype, contexts[i])
            x = self._constrain(x, None)
            new.append(own)
        if stop in taps:
            tapped.append(x)
        recorded = jnp.stack(tapped, axis=2) if tapped else jnp.zeros((batch, count, 0, x.shape[-1]), x.dtype)
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
        """What each layer with a state is given, of the arguments of `run`; None of the others."""
        if cache is not None:
            states = cache.states
        else:
            states = empty_states(self._memories(layers), batch=batch, dtype=self.dtype, mesh=self.mesh)
        if not any(states):
            return [None] * (layers[1] - layers[0])
        assert self.config.linear is not None
        ancestry = Ancestry.of(mask, [visible for _, visible in scratch], self.config.linear.kernel)
        if commit is not None and not ancestry.is_chain:
            raise InputError(
                "mask: layers with a state commit the tokens of a chain alone: leave mask and scratch out, or `read` the "
                "tokens and then `append` those that are accepted"
            )
        ancestry = replace(ancestry, documents=documents)
        return [
            None if state is None else Context(state, [entries[i] for entries, _ in scratch], ancestry, commit)
            for i, state in enumerate(states)
        ]

    def _inputs(self, tokens: jax.Array | None, layers: tuple[int, int]) -> jax.Array | None:
        """`layer_inputs`, where the model has such."""
        if not self.config.per_layer_inputs:
            return None
        if tokens is None:
            raise InputError(
                "tokens: layers of this model are given inputs of each token: say which tokens these states are of"
            )
        return self.layer_inputs(tokens, layers)

    def _source(self, layer: int, first: int) -> int:
        """The layer whose entries ``layer`` reads, in a slice that begins with the layer ``first``."""
        source = self.config.entries_of(layer)
        if source < first:
            raise InputError(
                f"layers: the slice begins with layer {first}, and its layer {layer} reads the entries of layer {source}: "
                "begin with that one"
            )
        return source

    def cache_piece(self, cache: Cache, layer: int, positions: jax.Array, window: int | None) -> Filled:
        """What queries at ``positions [B, T]`` see of a cache's layer. In a ring a ``window`` changes nothing."""
        since = None if window is None or isinstance(cache, RingCache) else positions - window + 1
        return Filled.of(cache, layer, since, self.mesh)

    def norm(self, x: jax.Array) -> jax.Array:
        """The final norm, which stands between the last layer and the head."""
        return normed(self.params, "norm", self.config, x)

    def head(self, hidden: jax.Array) -> jax.Array:
        """Logits ``[..., V]`` in float32 of states that have passed the final norm."""
        return self._constrain(self.finish_logits(self._head_products(hidden)), "vocab")

    def head_products(self, hidden: jax.Array) -> jax.Array:
        """Products ``[..., V]`` in float32 of states with the head's columns, neither divided nor capped."""
        return self._constrain(self._head_products(hidden), "vocab")

    def _head_products(self, hidden: jax.Array) -> jax.Array:
        if "lm_head" in self.params:
            return vocabulary_logits(hidden, self.params["lm_head"])
        return embedding_logits(hidden, self.params["embed"])

    def finish_logits(self, logits: jax.Array) -> jax.Array:
        """Logits of products with the head's columns, those of all tokens or of some: divided and capped, as the model says."""
        divisor = self.config.logit_divisor
        return capped(logits if divisor == 1.0 else logits / divisor, self.config.logit_cap)

    @property
    def embedding(self) -> jax.Array:
        """``[V, H]`` the embedding in floats, for drafters whose own begins as the target's."""
        stored = self.params["embed"]
        return dequantize_matrix(stored, self.dtype).T if isinstance(stored, QuantizedMatrix) else stored

    @property
    def head_weights(self) -> jax.Array:
        """``[H, V]`` the head's matrix in floats, for drafters whose own head begins as the target's."""
        stored = self.head_as_stored
        if isinstance(stored, QuantizedMatrix):
            return dequantize_matrix(stored, self.dtype)
        return stored if "lm_head" in self.params else stored.T

    @property
    def head_as_stored(self) -> Any:
        """The head's matrix as it lies in memory, for whoever counts what is read: the embedding ``[V, H]`` where the two are
        one."""
        return self.params["lm_head" if "lm_head" in self.params else "embed"]

    @property
    def weights_of_pass(self) -> Params:
        """The params that a pass reads: all of them, but for embeddings of which a few rows are looked up."""
        looked_up = {"per_layer_embed"} if self.config.tie_embeddings else {"embed", "per_layer_embed"}
        return {name: value for name, value in self.params.items() if name not in looked_up}

    # --- the whole model ---

    def read(self, tokens: Int[Array, "B T"], cache: Cache | None = None, **options: Any) -> tuple[States, tuple[Any, ...]]:
        """Read T tokens a row, and leave the cache as it is.

        Args:
            tokens: token ids.
            cache: what came before, or None.
            options: as in `run`; with ``layers=(0, k)`` the first k layers, then the final norm (early exit).

        Returns:
            The states, and each layer's entries of the call, which `KVCache.append` commits.
        """
        x, taps, new = self.run(self.embed(tokens), cache, tokens=tokens, **options)
        return States(hidden=self.norm(x), taps=taps), new

    def score(self, tokens: Int[Array, "B T"], cache: Cache | None = None, **options: Any) -> tuple[Output, tuple[Any, ...]]:
        """`read`, and what the head makes of it: the logits after each token."""
        states, new = self.read(tokens, cache, **options)
        return self._with_logits(states), new

    def commit(
        self, tokens: Int[Array, "B T"], cache: Cache, count: jax.Array | None = None, **options: Any
    ) -> tuple[States, Cache]:
        """`read`, and commit the first ``count [B]`` tokens of each row to the cache (None: all T)."""
        count = jnp.full_like(cache.length, tokens.shape[1]) if count is None else count
        states, new = self.read(tokens, cache, commit=count, **options)
        return states, cache.append(new, count, after=states.hidden)

    @overload
    def forward(
        self, tokens: Int[Array, "B T"], cache: None = None, count: None = None, **options: Any
    ) -> tuple[Output, None]: ...

    @overload
    def forward(
        self, tokens: Int[Array, "B T"], cache: Cache, count: jax.Array | None = None, **options: Any
    ) -> tuple[Output, Cache]: ...

    def forward(
        self, tokens: Int[Array, "B T"], cache: Cache | None = None, count: jax.Array | None = None, **options: Any
    ) -> tuple[Output, Any]:
        """`score`, and commit as in `commit`; without a cache nothing is committed."""
        if cache is None:
            return self.score(tokens, **options)[0], None
        states, cache = self.commit(tokens, cache, count, **options)
        return self._with_logits(states), cache

    def _with_logits(self, states: States) -> Output:
        return Output(hidden=states.hidden, taps=states.taps, logits=self.head(states.hidden))

    def _constrain(self, x: jax.Array, last: str | None) -> jax.Array:
        axes = ("batch", *(None,) * (x.ndim - 2), last)
        return sharding.constrain(x, axes, self.config.axis_units, self.mesh)


def default_dtype() -> DTypeLike:
    """float32 on CPU, bfloat16 elsewhere."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
