"""Attention: plain JAX, and one kernel each for TPUs and GPUs, behind one function."""

from specjax.models.attention.by_device import attend
from specjax.models.attention.kernels import KernelStatus, kernels_status
from specjax.models.attention.pieces import (
    BLOCK,
    GATHERED,
    LOOP,
    SHORT_ROWS,
    Filled,
    Piece,
    Shared,
    Sparse,
    block_width,
)
from specjax.models.attention.plain import attention_paid

__all__ = [
    "BLOCK",
    "GATHERED",
    "LOOP",
    "SHORT_ROWS",
    "Filled",
    "KernelStatus",
    "Piece",
    "Shared",
    "Sparse",
    "attend",
    "attention_paid",
    "block_width",
    "kernels_status",
]
