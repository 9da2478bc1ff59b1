"""Accelerators at their vendors' figures, and how fast the one of this machine is."""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specjax.errors import InputError


@dataclass(frozen=True)
class Chip:
    """An accelerator at its vendor's figures.

    Attributes:
        name: as people say it.
        flops: bfloat16 operations a second on dense matrices, without sparsity.
        bandwidth: of its own memory, bytes a second.
        memory: bytes.
        source: the vendor's page that gives the figures.
        links: of its links to other chips, all together and in both directions, bytes a second.
        clock: of its matrix units, cycles a second; 0 where no compiler counts in them.

    Examples:
        >>> from specjax.chips import find_chip
        >>> chip = find_chip("h100")
        >>> round(chip.flops / chip.bandwidth)  # operations a byte at which both take as long
        295
    """

    name: str
    flops: float
    bandwidth: float
    memory: float
    source: str
    links: float = 0.0
    clock: float = 0.0


_NVIDIA = "https://www.nvidia.com/en-us/data-center/"
_GOOGLE = "https://cloud.google.com/tpu/docs/"
# The clocks follow from the peaks: a v5e has four units of 128 x 128, which multiply and add once a cycle.
CHIPS: dict[str, Chip] = {
    "h100": Chip(
        "H100 SXM5 80 GB", 989.4e12, 3.35e12, 80e9, _NVIDIA + "h100/", 900e9
    ),  # its page gives twice that, with sparsity
    "a100": Chip("A100 SXM4 80 GB", 312e12, 2.039e12, 80e9, _NVIDIA + "a100/", 600e9),
    "tpu-v4": Chip("TPU v4", 275e12, 1.2e12, 32 * 2**30, _GOOGLE + "v4", 600e9, 1.05e9),
    "tpu-v5e": Chip("TPU v5e", 197e12, 819e9, 16e9, _GOOGLE + "v5e", 400e9, 1.5e9),
    "tpu-v5p": Chip("TPU v5p", 459e12, 2.765e12, 95e9, _GOOGLE + "v5p", 1200e9, 1.75e9),
    "tpu-v6e": Chip("TPU v6e", 918e12, 1.638e12, 32e9, _GOOGLE + "v6e", 800e9, 1.75e9),
}
"""The chips by the name that `find_chip` takes."""


def find_chip(name: str) -> Chip:
    """The chip of that name, in whatever case. Raises `InputError`, which lists the names, when there is none.

    Examples:
        >>> from specjax.chips import find_chip
        >>> find_chip("tpu-v5e").name
        'TPU v5e'
    """
    try:
        return CHIPS[name.lower()]
    except KeyError:
        raise InputError(f"chip={name!r}: not a chip known here; known are {', '.join(CHIPS)}") from None


_KINDS = {  # how JAX names a device -> the chip
    "NVIDIA H100": "h100",
    "NVIDIA A100": "a100",
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5p": "tpu-v5p",
    "TPU v5": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
}


def peak_flops(device: jax.Device) -> float:
    """Operations a second of ``device`` at its best: its vendor's figure, or of an unknown one that of a large product here."""
    for kind, chip in _KINDS.items():
        if device.device_kind.startswith(kind):
            return CHIPS[chip].flops
    size = 1024
    square = jax.device_put(jnp.ones((size, size), jnp.float32), device)
    product = jax.jit(jnp.matmul)
    product(square, square).block_until_ready()
    fastest = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        product(square, square).block_until_ready()
        fastest = min(fastest, time.perf_counter() - begin)
    return 2 * size**3 / fastest
