"""Attention: plain JAX, and one kernel each for TPUs and GPUs, behind one function."""

from specjax.models.attention.by_device import attend
from specjax.models.attention.kernels import KernelStatus, kernels_status
from specjax.models.attention.pieces import BLOCK, LOOP, Filled, Piece, Shared, block_width
from specjax.models.attention.plain import attention_paid

__all__ = [
    "BLOCK",
    "LOOP",
    "Filled",
    "KernelStatus",
    "Piece",
    "Shared",
    "attend",
    "attention_paid",
    "block_width",
    "kernels_status",
]
