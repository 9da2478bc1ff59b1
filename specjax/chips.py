"""Accelerators with their vendors' figures, and the peak FLOPs of a device of this machine."""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from specjax.errors import InputError


@dataclass(frozen=True)
class Chip:
    """An accelerator with its vendor's figures.

    Attributes:
        name: the usual name.
        flops: dense bfloat16 operations per second, without sparsity.
        bandwidth: memory bandwidth, bytes per second.
        memory: memory size, bytes.
        source: the vendor's page with these figures.
        links: bandwidth of all links to other chips together, both directions, bytes per second.
        clock: clock of the matrix units, cycles per second; 0 where no compiler counts in cycles.

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
# The clocks follow from the peak FLOPs: a v5e has four matrix units of 128 x 128, and each element
# multiplies and adds once per cycle.
CHIPS: dict[str, Chip] = {
    "h100": Chip(
        "H100 SXM5 80 GB", 989.4e12, 3.35e12, 80e9, _NVIDIA + "h100/", 900e9
    ),  # the vendor's page states twice these FLOPs, with sparsity
    "a100": Chip("A100 SXM4 80 GB", 312e12, 2.039e12, 80e9, _NVIDIA + "a100/", 600e9),
    "tpu-v4": Chip("TPU v4", 275e12, 1.2e12, 32 * 2**30, _GOOGLE + "v4", 600e9, 1.05e9),
    "tpu-v5e": Chip("TPU v5e", 197e12, 819e9, 16e9, _GOOGLE + "v5e", 400e9, 1.5e9),
    "tpu-v5p": Chip("TPU v5p", 459e12, 2.765e12, 95e9, _GOOGLE + "v5p", 1200e9, 1.75e9),
    "tpu-v6e": Chip("TPU v6e", 918e12, 1.638e12, 32e9, _GOOGLE + "v6e", 800e9, 1.75e9),
}
"""The chips, by the name that `find_chip` accepts."""


def find_chip(name: str) -> Chip:
    """Return the chip with this name, in upper or lower case.

    Raises:
        InputError: there is no such chip. The message lists the names.

    Examples:
        >>> from specjax.chips import find_chip
        >>> find_chip("tpu-v5e").name
        'TPU v5e'
    """
    try:
        return CHIPS[name.lower()]
    except KeyError:
        raise InputError(
            f"chip={name!r}: this chip is unknown; give one of {', '.join(CHIPS)}"
        ) from None


_KINDS = {  # device kind in JAX -> name in `CHIPS`
    "NVIDIA H100": "h100",
    "NVIDIA A100": "a100",
    "TPU v4": "tpu-v4",
    "TPU v5 lite": "tpu-v5e",
    "TPU v5p": "tpu-v5p",
    "TPU v5": "tpu-v5p",
    "TPU v6 lite": "tpu-v6e",
}


def peak_flops(device: jax.Device) -> float:
    """Return the peak operations per second of a device.

    For a known device this is the vendor's figure. For an unknown one it is the speed of a large
    matrix product, measured here.
    """
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
