"""The memory of a layer: entries of its tokens, a state of the text, both, or nothing.

This decides how a draft is verified, so every kind of memory answers the same questions. Layers,
and families that read and write config.json, know the kinds. All else asks `ModelConfig.memory`,
`ModelConfig.layers_with_entries` and `ModelConfig.layers_with_states`, and never for a class.

- *What it stores.* `LayerMemory.parts` describes arrays with a slot for each token, which
  `specjax.models.cache` holds, in pages too. `LayerMemory.state` has the sizes of a state for the
  whole text, which `specjax.models.states` holds. A layer that stores nothing has neither.
- *How a tree below it is read in one pass.* Attention reads slots and masks. A layer with a state
  has a function of its parameters, its normed input and a
  `specjax.models.linear_attention.Context`; `specjax.models.layers.WITH_STATE` has these functions
  by the class of the sizes. It reads the state and the entries on each token's path, and writes
  nothing.
- *How an accepted path is written.* Entries go into slots. `State.append` writes a path into a
  state. Every state here has the newest inputs of a short convolution. Most have a table for each
  head as well (`TableSizes`), which decays and to which a token adds a product of two vectors.
- *How it is sharded.* By ``key_heads``: everything that belongs to one of these is on one device.
- *What it costs.* ``state_size``, ``state_bytes`` and ``node_bytes``, for `specjax.planning.work`.
- *How checkpoints name it.* `StateSizes.declare` declares the parameters of such a layer.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from specjax.errors import InputError, check_minimum
from specjax.models.param import Init, Param, matrix, norm

Parts = Sequence[tuple[int, int]]
"""The ``(heads, dim)`` of each part of a layer's entry of a token."""


Side = tuple[int, str | None]
"""The size and the logical axis of one side of a matrix."""


class NodePart(NamedTuple):
    """An array of the entry of a drafted token.

    Attributes:
        heads: the number of heads.
        shape: the shape of the numbers of a head; ``()`` for one number.
        in_float32: whether its numbers are in float32; otherwise in the type of the activations.

    Examples:
        >>> from specjax.models.memory import LinearAttention
        >>> LinearAttention(key_heads=1, value_heads=2, key_dim=4, value_dim=3).node[1]
        NodePart(heads=2, shape=(3,), in_float32=True)
    """

    heads: int
    shape: tuple[int, ...]
    in_float32: bool


class StateSizes(ABC):
    """The sizes of a layer's state, and of the entries of its drafted tokens.

    The state has the inputs of a convolution over the newest tokens, and may have a table for each
    head, in float32. A subclass is a frozen dataclass for each kind of layer.

    Attributes:
        key_heads: the number of parts into which a mesh may divide the layer.
        kernel: the kernel size of the convolution, in tokens, the newest included.
        beside_attention: whether the layers have attention as well, with entries of their own. Both
            read the same input, and their outputs are summed.

    Examples:
        A state of two tokens' inputs, and nothing else:

        >>> from specjax.models.memory import ShortConvolution
        >>> sizes = ShortConvolution(channels=16)
        >>> sizes.state_size, sizes.state_bytes(number_bytes=2), sizes.node_bytes(number_bytes=2)
        (0, 64, 32)
    """

    key_heads: int
    kernel: int
    beside_attention: bool = False

    @property
    @abstractmethod
    def convolved(self) -> tuple[tuple[int, int], ...]:
        """The ``(heads, dim)`` of each of the convolution's inputs."""

    @abstractmethod
    def declare(self, prefix: str, hidden: int, stddev: float) -> dict[str, Param]:
        """Declare the parameters of the layer, without its norms.

        Args:
            prefix: the prefix of the names of the decoder layer's tensors.
            hidden: the size of the hidden states.
            stddev: the standard deviation of the output projection of a new model.
        """

    @property
    def table(self) -> tuple[int, int, int] | None:
        """The ``(heads, rows, columns)`` of the tables; None if there are none."""
        return None

    @property
    def node(self) -> tuple[NodePart, ...]:
        """The parts of a drafted token's entry before the inputs of the convolution."""
        return ()

    @property
    def state_size(self) -> int:
        """The size of a row's state, without the convolution's newest tokens."""
        return 0 if self.table is None else math.prod(self.table)

    def state_bytes(self, number_bytes: float) -> float:
        """Return the bytes of a row's state, with the convolution's newest tokens.

        ``number_bytes`` are the bytes of a number of the activations; everything else is float32.
        """
        return 4 * self.state_size + (self.kernel - 1) * self._convolved_size * number_bytes

    def node_bytes(self, number_bytes: float) -> float:
        """Return the bytes of the entry of a drafted token; see `state_bytes`."""
        parts = (
            part.heads * math.prod(part.shape) * (4 if part.in_float32 else number_bytes)
            for part in self.node
        )
        return sum(parts) + self._convolved_size * number_bytes

    @property
    def _convolved_size(self) -> int:
        return sum(heads * dim for heads, dim in self.convolved)

    def _check_kernel(self) -> None:
        """Raise InputError if the convolution reads no earlier token."""
        if self.kernel < 2:
            raise InputError(f"kernel={self.kernel}: must be at least 2 tokens")


class TableSizes(StateSizes):
    """The sizes of a state with a table ``[value_heads, key_dim, value_dim]`` in float32.

    Attributes:
        key_heads: the number of heads of the vectors that select rows of the table.
        value_heads: the number of heads of the vectors that are written, each with a table; a
            multiple of ``key_heads``.
        key_dim: the number of rows of a table.
        value_dim: the number of columns of a table.
        kernel: as in `StateSizes`, like ``beside_attention``.
        has_steps: whether a drafted token's update is a vector times a step. Its entry then has the
            vectors in the type of the activations, and the step; otherwise all is in float32.

    Examples:
        Two value heads for each key head, each with a table of 8 rows and 6 columns:

        >>> from specjax.models.memory import LinearAttention
        >>> sizes = LinearAttention(key_heads=2, value_heads=4, key_dim=8, value_dim=6)
        >>> sizes.group, sizes.state_size, sizes.state_bytes(number_bytes=4)
        (2, 192, 1440)
    """

    value_heads: int
    key_dim: int
    value_dim: int
    has_steps: ClassVar[bool] = False

    @property
    def group(self) -> int:
        """The number of value heads for each key head."""
        return self.value_heads // self.key_heads

    @property
    def table(self) -> tuple[int, int, int]:
        """The ``(heads, rows, columns)`` of the tables."""
        return (self.value_heads, self.key_dim, self.value_dim)

    @property
    def node(self) -> tuple[NodePart, ...]:
        """The parts of an entry: two vectors, the decay, and the step if there is one."""
        vectors = (
            NodePart(self.key_heads, (self.key_dim,), not self.has_steps),
            NodePart(self.value_heads, (self.value_dim,), not self.has_steps),
        )
        number = NodePart(self.value_heads, (), in_float32=True)
        return (*vectors, number, *(number,) * self.has_steps)

    def _check(self) -> None:
        """Raise InputError if a size is too small, or heads cannot be divided into groups."""
        check_minimum(1, self, ("key_heads", "value_heads", "key_dim", "value_dim"))
        self._check_kernel()
        if self.value_heads % self.key_heads:
            raise InputError(
                f"value_heads={self.value_heads} is not a multiple of key_heads={self.key_heads}:"
                " each key head serves an equal group of value heads"
            )


@dataclass(frozen=True)
class _DividedParams:
    """Declares the parameters of a layer that are divided into ``units`` between devices.

    ``prefix`` is the prefix of the names of its tensors.
    """

    prefix: str
    units: int

    def product(self, name: str, inputs: Side, outputs: Side, is_product: bool = True) -> Param:
        """Declare a matrix from size and logical axis of each side."""
        return matrix(
            f"{self.prefix}{name}", inputs, outputs, units=self.units, is_product=is_product
        )

    def split(self, name: str, shape: tuple[int, ...], **options: Any) -> Param:
        """Declare an array whose first axis is divided; ``options`` are those of `Param`."""
        axes = ("kv_heads", *(None,) * (len(shape) - 1))
        return Param(shape, axes, f"{self.prefix}{name}", units=self.units, **options)


@dataclass(frozen=True)
class LayerMemory:
    """The arrays that a layer stores, by their sizes.

    Attributes:
        parts: the parts of the entry of each token. It is empty for a layer that stores no entries,
            or reads those of another layer.
        state: the sizes of its state; None if it has none.

    Examples:
        >>> from dataclasses import replace
        >>> from specjax.models.config import LinearAttention
        >>> sizes = LinearAttention(key_heads=1, value_heads=2, key_dim=4, value_dim=4)
        >>> hybrid = replace(config, linear=sizes, linear_layers=(0,))
        >>> hybrid.memory(0).state == sizes, hybrid.memory(1).parts
        (True, ((2, 8), (2, 8)))
    """

    parts: tuple[tuple[int, int], ...] = ()
    state: StateSizes | None = None

    @classmethod
    def of(cls, memory: "LayerMemory | Parts") -> "LayerMemory":
        """Return a memory, also for the parts of entries alone."""
        return memory if isinstance(memory, LayerMemory) else cls(tuple(memory))

    def nodes_of(self, entry: Sequence[Any]) -> Sequence[Any]:
        """Return the parts of a drafted token's ``entry`` that concern the state."""
        return entry[len(self.parts) :]


@dataclass(frozen=True)
class LinearAttention(TableSizes):
    """Layers that keep a state of fixed size: the gated delta rule (arXiv 2412.06464).

    Qwen3-Next and Qwen3.5 have it (Yang et al. 2024). See `specjax.models.linear_attention`.

    Attributes:
        key_heads: the number of heads of queries and keys.
        value_heads: the number of heads of values, each with a state; a multiple of ``key_heads``.
        key_dim: the size of a head's query and key.
        value_dim: the size of a head's value.
        kernel: the kernel size of the short convolution before the rule, in tokens, the newest
            included.
        by_key_head: the layout of the projections. True: one matrix makes queries, keys, values and
            output gates, and another the two gates of the rule; in both the outputs of a key head
            are contiguous (Qwen3-Next). False: one matrix makes queries, keys and values, one after
            the other, and each gate has a matrix (Qwen3.5).
        largest_share: the factor of the sigmoid that gives the share of a value that is written.
            With 2 the table may also be reflected along a key (Grazzi et al. 2024, arXiv
            2411.12537; OLMo Hybrid).
        norm_eps: the epsilon of the norm of the rule's output; None: that of the model's norms.

    Examples:
        The numbers of a row's state, and the bytes of a drafted token in bfloat16:

        >>> from specjax.models.memory import LinearAttention
        >>> linear = LinearAttention(key_heads=16, value_heads=32, key_dim=128, value_dim=128)
        >>> linear.state_size, linear.node_bytes(2)
        (524288, 41088)
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    by_key_head: bool = False
    largest_share: float = 1.0
    norm_eps: float | None = None

    def __post_init__(self) -> None:
        self._check()

    @property
    def convolved(self) -> tuple[tuple[int, int], ...]:
        """The ``(heads, dim)`` of the convolution's inputs: queries, keys and values."""
        return (
            (self.key_heads, self.key_dim),
            (self.key_heads, self.key_dim),
            (self.value_heads, self.value_dim),
        )

    def declare(self, prefix: str, hidden: int, stddev: float) -> dict[str, Param]:
        """Declare Gated DeltaNet's matrices, and the decay of each value head.

        Everything is sharded by key heads, together with the value heads that belong to them.
        """
        inputs, units = (hidden, None), self.key_heads
        prefix += "linear_attn."
        keys, values = self.key_heads * self.key_dim, self.value_heads * self.value_dim

        divided = _DividedParams(prefix, units)

        def projection(name: str, size: int, is_product: bool = True) -> Param:
            return divided.product(name, inputs, (size, "kv_heads"), is_product)

        # Decays are products of many factors near 1: kept in float32.
        def per_head(name: str, init: Init) -> Param:
            return divided.split(name, (self.value_heads,), init=init, dtype="float32")

        def kernel(name: str, size: int) -> Param:
            return divided.split(f"conv_{name}.weight", (size, 1, self.kernel), stddev=0.3)

        if self.by_key_head:
            projections = {
                "qkvz": projection("in_proj_qkvz", 2 * (keys + values)),
                "gates": projection("in_proj_ba", 2 * self.value_heads, is_product=False),
            }
        else:
            projections = {
                "q": projection("q_proj", keys),
                "k": projection("k_proj", keys),
                "v": projection("v_proj", values),
                "z": projection("in_proj_z", values),
                "beta": projection("in_proj_b", self.value_heads, is_product=False),
                "alpha": projection("in_proj_a", self.value_heads, is_product=False),
            }
        return projections | {
            "conv_q": kernel("q", keys),
            "conv_k": kernel("k", keys),
            "conv_v": kernel("v", values),
            "log_rate": per_head("A_log", "log_rates"),
            "rate_bias": per_head("dt_bias", "ones"),
            "norm": norm(f"{prefix}norm", self.value_dim),
            "o": matrix(f"{prefix}out_proj", (values, "kv_heads"), inputs, stddev, units=units),
        }


@dataclass(frozen=True)
class Mamba2(TableSizes):
    """Layers of Mamba-2 (Dao and Gu 2024, arXiv 2405.21060). See `specjax.models.mamba2`.

    Attributes:
        key_heads: the number of groups of heads that share the vectors B and C.
        value_heads: the number of heads, each with a state; a multiple of ``key_heads``.
        key_dim: the size of B and C, which is the state size of Mamba-2.
        value_dim: the size of a head.
        kernel: the kernel size of the short convolution, in tokens, the newest included.
        convolution_bias: whether the convolution has a bias.
        projection_bias: whether the input projections have biases.
        output_bias: whether the output projection has a bias.
        norm: whether the output is normed after it is gated, before, or not at all.
        beside_attention: as in `StateSizes` (Falcon-H1).

    Examples:
        The numbers of a row's state of one layer of Nemotron-3-Nano, and the bytes of a drafted
        token in bfloat16:

        >>> from specjax.models.memory import Mamba2
        >>> sizes = Mamba2(key_heads=8, value_heads=64, key_dim=128, value_dim=64)
        >>> sizes.state_size, sizes.node_bytes(2)
        (524288, 23040)
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int = 4
    convolution_bias: bool = True
    projection_bias: bool = False
    output_bias: bool = False
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"
    beside_attention: bool = False
    has_steps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check()

    @property
    def convolved(self) -> tuple[tuple[int, int], ...]:
        """The ``(heads, dim)`` of the convolution's inputs: x, B and C."""
        vectors = (self.key_heads, self.key_dim)
        return ((self.value_heads, self.value_dim), vectors, vectors)

    def declare(self, prefix: str, hidden: int, stddev: float) -> dict[str, Param]:
        """Declare Mamba-2's matrices, and the numbers of each head.

        Everything is sharded by groups of heads.
        """
        inputs, units = (hidden, None), self.key_heads
        prefix += "mamba."
        values, vectors = self.value_heads * self.value_dim, self.key_heads * self.key_dim

        divided = _DividedParams(prefix, units)
        sizes = {"z": values, "x": values, "b": vectors, "c": vectors, "step": self.value_heads}
        heads, float32 = (self.value_heads,), {"dtype": "float32"}
        # The steps are quantized as the rest is, because files have all of these in one matrix.
        layer = {
            name: divided.product(f"{name}_proj", inputs, (size, "kv_heads"))
            for name, size in sizes.items()
        }
        layer |= {
            f"conv_{name}": divided.split(
                f"conv_{name}.weight", (sizes[name], 1, self.kernel), stddev=0.3
            )
            for name in "xbc"
        }
        # Decays are products of many factors near 1: kept in float32.
        layer |= {
            "log_rate": divided.split("A_log", heads, init="log_rates", **float32),
            "rate_bias": divided.split("dt_bias", heads, init="ones", **float32),
            "skip": divided.split("D", heads, init="ones", **float32),
            "o": matrix(f"{prefix}out_proj", (values, "kv_heads"), inputs, stddev, units=units),
        }
        if self.norm != "none":
            layer["norm"] = divided.split("norm.weight", (values,), init="ones")
        if self.output_bias:
            layer["o_bias"] = Param((hidden,), (None,), f"{prefix}out_proj.bias", "zeros")
        if self.convolution_bias:
            layer |= {
                f"conv_{name}_bias": divided.split(
                    f"conv_{name}.bias", (sizes[name],), init="zeros"
                )
                for name in "xbc"
            }
        if self.projection_bias:
            layer |= {
                f"{name}_bias": divided.split(f"{name}_proj.bias", (size,), init="zeros")
                for name, size in sizes.items()
            }
        return layer


@dataclass(frozen=True)
class KimiDeltaAttention(TableSizes):
    """Layers of Kimi Delta Attention (Kimi Linear, arXiv 2510.26692).

    It is the gated delta rule whose table has a decay for each row. See
    `specjax.models.kimi_delta_attention`.

    Attributes:
        key_heads: the number of heads.
        key_dim: the size of a head's query, key and value.
        kernel: as in `StateSizes`.
        value_heads: the number of heads.
        value_dim: the size of a head's value.

    Examples:
        A layer of Kimi Linear 48B-A3B: the numbers of a row's state, and the bytes of a drafted
        token in bfloat16:

        >>> from specjax.models.memory import KimiDeltaAttention
        >>> sizes = KimiDeltaAttention(key_heads=32, key_dim=128)
        >>> sizes.state_size, sizes.node_bytes(2)
        (524288, 73728)
    """

    key_heads: int
    key_dim: int
    kernel: int = 4
    value_heads: int = field(init=False)
    value_dim: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "value_heads", self.key_heads)
        object.__setattr__(self, "value_dim", self.key_dim)
        self._check()

    @property
    def convolved(self) -> tuple[tuple[int, int], ...]:
        """The ``(heads, dim)`` of the convolution's inputs: queries, keys and values."""
        return ((self.key_heads, self.key_dim),) * 3

    @property
    def node(self) -> tuple[NodePart, ...]:
        """The parts of an entry: two vectors, and the decay of each row."""
        return (NodePart(self.key_heads, (self.key_dim,), in_float32=True),) * 3

    def declare(self, prefix: str, hidden: int, stddev: float) -> dict[str, Param]:
        """Declare the matrices, and the decays; everything is sharded by heads."""
        inputs, rank, units = (hidden, None), (self.key_dim, None), self.key_heads
        prefix += "self_attn."
        size, heads = (self.key_heads * self.key_dim, "kv_heads"), (self.key_heads, "kv_heads")

        divided = _DividedParams(prefix, units)
        layer = {name: divided.product(f"{name}_proj", inputs, size) for name in "qkv"}
        layer |= {
            "beta": divided.product("b_proj", inputs, heads, is_product=False),
            "decay_in": divided.product("f_a_proj", inputs, rank),
            "decay": divided.product("f_b_proj", rank, size),
            "output_gate_in": divided.product("g_a_proj", inputs, rank),
            "output_gate": divided.product("g_b_proj", rank, size),
        }
        layer |= {
            f"conv_{name}": divided.split(
                f"conv_{name}.weight", (size[0], 1, self.kernel), stddev=0.3
            )
            for name in "qkv"
        }
        # Decays are products of many factors near 1: kept in float32.
        rates = divided.split("A_log", (self.key_heads, 1), init="log_rates", dtype="float32")
        return layer | {
            "log_rate": rates,
            "rate_bias": divided.split("dt_bias", (size[0],), init="ones", dtype="float32"),
            "norm": norm(f"{prefix}o_norm", self.key_dim),
            "o": matrix(f"{prefix}o_proj", size, inputs, stddev, units=units),
        }


@dataclass(frozen=True)
class ShortConvolution(StateSizes):
    """Layers of a gated convolution over a few tokens (LFM2, Liquid AI 2025).

    The state has the newest inputs alone. See `specjax.models.short_convolution`.

    Attributes:
        channels: the number of channels of the convolution. It is the size of the hidden states.
        kernel: as in `StateSizes`.
        bias: whether the projections and the convolution have biases.
        key_heads: the number of parts into which a mesh may divide the channels. It follows from
            their number.

    Examples:
        A layer of LFM2-1.2B. The entry of a drafted token is half as large as the state:

        >>> from specjax.models.memory import ShortConvolution
        >>> sizes = ShortConvolution(channels=2048)
        >>> sizes.convolved, sizes.state_bytes(2), sizes.node_bytes(2)
        (((8, 256),), 8192, 4096)
    """

    channels: int
    kernel: int = 3
    bias: bool = False
    key_heads: int = field(init=False)

    def __post_init__(self) -> None:
        check_minimum(1, self, ("channels",))
        self._check_kernel()
        # Channels are independent, so any number of parts would do. Parts of many channels suit the
        # layouts of accelerators.
        object.__setattr__(self, "key_heads", math.gcd(self.channels, 8))

    @property
    def convolved(self) -> tuple[tuple[int, int], ...]:
        """The ``(heads, dim)`` of the convolution's input: parts of the channels."""
        return ((self.key_heads, self.channels // self.key_heads),)

    def declare(self, prefix: str, hidden: int, stddev: float) -> dict[str, Param]:
        """Declare the projections and the convolution, sharded by channels."""
        size, inputs, units = (self.channels, "kv_heads"), (hidden, None), self.key_heads
        prefix += "conv."
        divided = _DividedParams(prefix, units)
        layer = {
            name: divided.product(f"{name}_proj", inputs, size)
            for name in ("gate_in", "gate_out", "value")
        }
        shape = (self.channels, 1, self.kernel)
        layer["conv_value"] = divided.split("conv.weight", shape, stddev=0.3)
        layer["o"] = matrix(f"{prefix}out_proj", size, inputs, stddev, units=units)
        if self.bias:
            layer |= {
                f"{name}_bias": Param(
                    param.shape[1:] if len(param.shape) == 2 else param.shape[:1],
                    param.axes[1:] if len(param.shape) == 2 else param.axes[:1],
                    param.name.removesuffix("weight") + "bias",
                    "zeros",
                    units=units,
                )
                for name, param in layer.items()
            }
        return layer
