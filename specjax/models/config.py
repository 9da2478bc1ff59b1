"""The shape of a dense decoder: everything about a model that is not a parameter."""

from dataclasses import dataclass
from typing import Literal

from specjax.errors import InputError

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding: base frequency and how it is stretched to longer contexts.

    Attributes follow Hugging Face's ``rope_parameters``. Which of them are read depends on ``kind``:
    linear reads ``factor``; llama3 the two ``*_freq_factor`` and ``original_max_positions``; yarn all the others.
    """

    theta: float = 10000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_positions: int | None = None
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclass(frozen=True)
class ModelConfig:
    """A Llama-shaped decoder. The defaults are Llama's; the families differ only in the switches below.

    ``qkv_bias`` Qwen2 (and ``attention_bias`` elsewhere), ``output_bias`` the bias of the attention's output projection,
    ``qk_norm`` Qwen3's RMSNorm over each query and key head. ``max_positions`` is counted in tokens.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    model_type: str = "llama"
    max_positions: int = 2048
    norm_eps: float = 1e-5
    rope: Rope = Rope()
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise InputError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}: "
                "each key/value head serves an equal group of query heads"
            )
        if self.head_dim % 2:
            raise InputError(f"head_dim={self.head_dim}: rotary embeddings turn pairs, so it must be even")

    @property
    def entry_parts(self) -> tuple[tuple[int, int], ...]:
        """``(heads, dim)`` of each array that a layer remembers of a token: keys and values (see `specjax.models.cache`)."""
        return ((self.num_kv_heads, self.head_dim), (self.num_kv_heads, self.head_dim))

    @property
    def axis_units(self) -> dict[str, int]:
        """How many indivisible units each logical axis has: what a mesh axis must divide to shard it."""
        return {
            "vocab": self.vocab_size,
            "heads": self.num_heads,
            "kv_heads": self.num_kv_heads,
            "mlp": self.intermediate_size,
        }
