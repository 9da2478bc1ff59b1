"""The attention kernels that can run; the only module that imports Pallas Triton.

JAX 0.11 deprecated Pallas Triton, JAX 0.12 warns whenever it lowers a kernel with it, and a later
version will drop it. Without it, and on GPUs that it does not compile for, attention is plain JAX.
docs/concepts/gpu-kernels.md says what may replace it.
"""

import functools
import importlib
import logging
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh

from specjax.errors import InputError

OLDEST_GPU = (8, 0)
"""The lowest compute capability that Triton in XLA compiles for: Ampere's.

A T4 has 7.5, and XLA refuses such a program.
"""

_LOGGER = logging.getLogger(__name__)


def _import_triton() -> tuple[Any, str]:
    """Return Pallas Triton and "", or None and the reason why there is none."""
    try:
        module = importlib.import_module("jax.experimental.pallas.triton")
        absent = [name for name in ("CompilerParams", "load", "store") if not hasattr(module, name)]
    except ImportError as error:
        return None, f"JAX {jax.__version__} has no Pallas Triton ({error})"
    if absent:
        return None, f"Pallas Triton of JAX {jax.__version__} has no {', '.join(absent)}"
    return module, ""


triton, WHY_NO_TRITON = _import_triton()
"""The module Pallas Triton, or None if JAX has none; and the reason, which is then not empty."""


@dataclass(frozen=True)
class KernelStatus:
    """The answer whether attention to a cache is a Pallas kernel on a platform.

    Attributes:
        platform: ``cuda``, ``rocm``, ``tpu`` or ``cpu``.
        is_used: whether the kernel is used. If not, attention is plain JAX: the same result, but
            slower on an accelerator.
        reason: the name of the kernel, or the reason why none is used.
    """

    platform: str
    is_used: bool
    reason: str


_ONLY_NVIDIA = "the GPU kernel supports NVIDIA GPUs only"


def kernels_status(
    platform: str | None = None, capability: tuple[int, int] | None = None
) -> KernelStatus:
    """Return whether attention to a cache is a Pallas kernel on a platform, and why.

    Args:
        platform: ``cuda``, ``rocm``, ``tpu`` or ``cpu``. None: the platform of this process's first
            device, which starts JAX's backend.
        capability: the compute capability of a ``cuda`` device as (major, minor). None: the lowest
            of this process's GPUs if ``platform`` is None, or else one that is new enough.

    Raises:
        InputError: The platform is unknown, or has no compute capability.

    Examples:
        >>> from specjax.models.attention import kernels_status
        >>> kernels_status("tpu").is_used, kernels_status("cpu").is_used
        (True, False)
        >>> kernels_status("cuda", capability=(7, 5)).is_used
        False
    """
    if capability is not None and platform != "cuda":
        raise InputError(
            f"capability={capability}: it belongs to an NVIDIA GPU; give platform='cuda' with it,"
            " or leave it out"
        )
    if platform is None:
        platform = _platform_of(jax.devices()[0])
        capability = lowest_capability(jax.devices())
    if platform == "cuda":
        reason = _why_not_on_cuda(capability)
        return KernelStatus(
            platform,
            not reason,
            reason or "Pallas Triton, which JAX has deprecated and will remove",
        )
    if platform == "tpu":
        return KernelStatus(platform, True, "Pallas for TPUs")
    if platform == "rocm":
        return KernelStatus(platform, False, _ONLY_NVIDIA)
    if platform == "cpu":
        return KernelStatus(platform, False, "Pallas compiles for TPUs and GPUs only")
    raise InputError(
        f"platform={platform!r}: give cuda, rocm, tpu or cpu, or None for this process's platform"
    )


def takes_triton(mesh: Mesh | None) -> bool:
    """Return whether attention to a cache on ``mesh`` is the Triton kernel on NVIDIA GPUs.

    If it is not, and the program is for GPUs, a warning is logged once. Call this while the
    attention is traced.
    """
    devices = _gpus_of(mesh)
    is_for_gpus = bool(devices) or _is_traced_for_gpus()
    reason = _why_not_on_cuda(lowest_capability(devices))
    if any(_platform_of(device) == "rocm" for device in devices):
        reason = _ONLY_NVIDIA
    if is_for_gpus and reason:
        _log_once(reason)
    elif is_for_gpus:
        # JAX warns of Pallas Triton's end whenever it is lowered, which happens after this and
        # outside of our code. We chose the kernel in full knowledge of it, so users who turn
        # warnings into errors should not fail on one that only we can fix. The filter is set here,
        # not at import: pytest resets filters that were set before a test.
        warnings.filterwarnings(
            "ignore", "The Pallas Triton backend is deprecated", DeprecationWarning
        )
    return not reason


def lowest_capability(devices: Iterable[Any]) -> tuple[int, int] | None:
    """Return the lowest compute capability of the NVIDIA GPUs among ``devices``, or None."""
    versions = [
        str(getattr(device, "compute_capability", "")).split(".")
        for device in devices
        if device.platform == "gpu"
    ]
    # On AMD GPUs the attribute is the name of an architecture, such as gfx942.
    return min(
        ((int(major), int(*minor or "0")) for major, *minor in versions if major.isdigit()),
        default=None,
    )


def _why_not_on_cuda(capability: tuple[int, int] | None) -> str:
    if triton is None:
        return WHY_NO_TRITON
    if capability is not None and capability < OLDEST_GPU:
        has, needs = (".".join(map(str, version)) for version in (capability, OLDEST_GPU))
        return (
            f"Triton compiles for GPUs of compute capability {needs} and newer, and this one has"
            f" {has}"
        )
    return ""


def _gpus_of(mesh: Mesh | None) -> list[jax.Device]:
    """Return the GPUs that a program on ``mesh`` runs on; without a mesh, this process's."""
    devices = mesh.devices.flat if isinstance(mesh, Mesh) else _local_gpus()
    return [device for device in devices if device.platform == "gpu"]


@functools.cache
def _local_gpus() -> tuple[jax.Device, ...]:
    try:
        return tuple(jax.local_devices(backend="gpu"))
    except RuntimeError:  # JAX raises it if there are no GPUs
        return ()


def _is_traced_for_gpus() -> bool:
    """Return True if the program is traced for GPUs that this machine need not have.

    See `jax.sharding.use_abstract_mesh`.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "gpu"


def _platform_of(device: jax.Device) -> str:
    """Return the platform of a device. JAX calls GPUs of both makers ``gpu``."""
    if device.platform != "gpu":
        return device.platform
    return "cuda" if lowest_capability([device]) else "rocm"


@functools.cache
def _log_once(reason: str) -> None:
    _LOGGER.warning("attention uses plain JAX on GPUs, without a kernel: %s", reason)
