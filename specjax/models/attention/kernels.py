"""Which kernels of attention can run: the one place that imports Pallas Triton, which JAX has deprecated.

JAX 0.11 deprecated it, JAX 0.12 warns whenever it lowers a kernel with it, and a later one will drop it. Without it, and on
GPUs that it does not compile for, attention is plain JAX. docs/concepts/gpu-kernels.md says what may take its place.
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
"""The lowest compute capability that Triton in XLA compiles for, that of Ampere. A T4 has 7.5: XLA refuses such a program."""

_LOGGER = logging.getLogger(__name__)


def _import_triton() -> tuple[Any, str]:
    """Return Pallas Triton, or None and why there is none."""
    try:
        module = importlib.import_module("jax.experimental.pallas.triton")
        absent = [name for name in ("CompilerParams", "load", "store") if not hasattr(module, name)]
    except ImportError as error:
        return None, f"JAX {jax.__version__} has no Pallas Triton ({error})"
    if absent:
        return None, f"Pallas Triton of JAX {jax.__version__} has no {', '.join(absent)}"
    return module, ""


triton, WHY_NO_TRITON = _import_triton()
"""Pallas Triton, None where JAX has none; and why, which is empty where it has."""


@dataclass(frozen=True)
class KernelStatus:
    """Whether attention to a cache is a Pallas kernel on a platform.

    Attributes:
        platform: ``cuda``, ``rocm``, ``tpu`` or ``cpu``.
        is_used: whether it is. Where it is not, attention is plain JAX: the same result, more slowly on an accelerator.
        reason: which kernel it is, or why it is none.
    """

    platform: str
    is_used: bool
    reason: str


_ONLY_NVIDIA = "the kernel for GPUs has been written for NVIDIA's"


def kernels_status(platform: str | None = None, capability: tuple[int, int] | None = None) -> KernelStatus:
    """Return whether attention to a cache is a Pallas kernel on a platform, and why.

    Args:
        platform: ``cuda``, ``rocm``, ``tpu`` or ``cpu``. None: that of this process's first device, which starts JAX's backend.
        capability: of a ``cuda`` device, its compute capability as (major, minor). None: with ``platform`` None the lowest of
            this process's GPUs, otherwise one that is new enough.

    Raises:
        InputError: the platform is another one, or has no compute capability.

    Examples:
        >>> from specjax.models.attention import kernels_status
        >>> kernels_status("tpu").is_used, kernels_status("cpu").is_used
        (True, False)
        >>> kernels_status("cuda", capability=(7, 5)).is_used
        False
    """
    if capability is not None and platform != "cuda":
        raise InputError(f"capability={capability}: is of a GPU of NVIDIA's; give platform='cuda' with it, or leave it out")
    if platform is None:
        platform = _platform_of(jax.devices()[0])
        capability = lowest_capability(jax.devices())
    if platform == "cuda":
        reason = _why_not_on_cuda(capability)
        return KernelStatus(platform, not reason, reason or "Pallas Triton, which JAX has deprecated and will remove")
    if platform == "tpu":
        return KernelStatus(platform, True, "Pallas for TPUs")
    if platform == "rocm":
        return KernelStatus(platform, False, _ONLY_NVIDIA)
    if platform == "cpu":
        return KernelStatus(platform, False, "Pallas compiles for TPUs and GPUs only")
    raise InputError(f"platform={platform!r}: give cuda, rocm, tpu or cpu, or None for this process's own")


def takes_triton(mesh: Mesh | None) -> bool:
    """Return whether attention to a cache on ``mesh`` is the Triton kernel, where the program is lowered for NVIDIA's GPUs.

    Says so once in the log if it is not, and the program is for GPUs. Call it while the attention is traced.
    """
    devices = _gpus_of(mesh)
    is_for_gpus = bool(devices) or _is_traced_for_gpus()
    reason = _why_not_on_cuda(lowest_capability(devices))
    if any(_platform_of(device) == "rocm" for device in devices):
        reason = _ONLY_NVIDIA
    if is_for_gpus and reason:
        _log_once(reason)
    elif is_for_gpus:
        # JAX warns of Pallas Triton's end wherever it is lowered, which is after this and outside of our code. Which kernel
        # runs is our choice, made knowing this: who turns warnings into errors should not get one that only we can mend. It is
        # hidden here, and not when this module is imported, since pytest forgets filters that were set before a test.
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
    return not reason


def lowest_capability(devices: Iterable[Any]) -> tuple[int, int] | None:
    """Return the lowest compute capability of NVIDIA's GPUs among ``devices``; None where there are none."""
    versions = [str(getattr(device, "compute_capability", "")).split(".") for device in devices if device.platform == "gpu"]
    # Of AMD's GPUs it is the name of an architecture, such as gfx942.
    return min(((int(major), int(*minor or "0")) for major, *minor in versions if major.isdigit()), default=None)


def _why_not_on_cuda(capability: tuple[int, int] | None) -> str:
    if triton is None:
        return WHY_NO_TRITON
    if capability is not None and capability < OLDEST_GPU:
        has, needs = (".".join(map(str, version)) for version in (capability, OLDEST_GPU))
        return f"Triton compiles for GPUs of compute capability {needs} and newer, and this one has {has}"
    return ""


def _gpus_of(mesh: Mesh | None) -> list[jax.Device]:
    """Return the GPUs that a program on ``mesh`` is for: those of the mesh, or this process's where it has none."""
    devices = mesh.devices.flat if isinstance(mesh, Mesh) else _local_gpus()
    return [device for device in devices if device.platform == "gpu"]


@functools.cache
def _local_gpus() -> tuple[jax.Device, ...]:
    try:
        return tuple(jax.local_devices(backend="gpu"))
    except RuntimeError:  # how JAX says that there are none
        return ()


def _is_traced_for_gpus() -> bool:
    """Whether the program is traced for GPUs that are not there: see `jax.sharding.use_abstract_mesh`."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.platform == "gpu"


def _platform_of(device: jax.Device) -> str:
    """``gpu`` is what JAX calls those of both makers."""
    if device.platform != "gpu":
        return device.platform
    return "cuda" if lowest_capability([device]) else "rocm"


@functools.cache
def _log_once(reason: str) -> None:
    _LOGGER.warning("attention is plain JAX on GPUs, without a kernel of its own: %s", reason)
