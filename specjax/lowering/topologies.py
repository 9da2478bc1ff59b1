"""Devices to compile for on a machine without accelerators.

XLA's compilers need no device. The compiler for TPUs comes with the wheel ``libtpu``. The compiler
for NVIDIA's GPUs comes with JAX's CUDA plugin, which gets a description of an H100.
"""

import importlib
import importlib.util
import math
import os
import re
from collections.abc import Mapping
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from specjax.chips import CHIPS, Chip
from specjax.errors import InputError
from specjax.sharding import make_mesh

_TPUS = {"v4": ("tpu-v4", 3), "v5e": ("tpu-v5e", 2), "v5p": ("tpu-v5p", 3), "v6e": ("tpu-v6e", 2)}
"""The kinds of TPUs by their names in topologies: the chip, and its number of link dimensions."""

_CUDA = {"jax_cuda13_plugin": "nvidia.cu13", "jax_cuda12_plugin": "nvidia.cuda_nvcc"}
"""JAX's plugins for NVIDIA's GPUs, and the package that has the assembler of each."""

_H100 = """
gpu_device_info {
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  device_memory_size: 84942979072 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 12 minor: 9 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
"""XLA's description of an H100 SXM5, with NVIDIA's published figures."""


def find_mesh(topology: str, data: int, model: int, slices: int = 1) -> tuple[Mesh, Chip]:
    """Return a ``data x model`` mesh of devices that need not exist, and their chip.

    Args:
        topology: ``h100``, or the kind and the arrangement of TPUs, such as ``v5e:2x4`` or
            ``v5p:2x2x2``.
        data: the number of devices that split the batch.
        model: the number of devices that split the weights.
        slices: the number of such topologies of TPUs, which are connected by the data center
            network. The first devices of the mesh are those of the first slice. If the ``data``
            axis has as many devices as there are slices, each slice has all weights.

    Raises:
        InputError: There is no such topology, it has fewer chips than the mesh, or its compiler is
            not installed.
    """
    if data < 1 or model < 1:
        raise InputError(f"mesh={data} {model}: each axis must be at least 1")
    if slices < 1 or (slices > 1 and topology == "h100"):
        raise InputError(
            f"slices={slices}: must be at least 1, and 1 for h100: networks of GPUs are not"
            " supported"
        )
    if topology == "h100":
        return make_mesh(data, model, _gpus(data * model)), CHIPS["h100"]
    kind, _, sides = topology.partition(":")
    directions = _TPUS.get(kind, ("", 0))[1]
    if not directions or not re.fullmatch(rf"\d{{1,2}}(x\d{{1,2}}){{{directions - 1}}}", sides):
        raise InputError(
            f"chips={topology!r}: give h100, or a kind of TPU ({', '.join(_TPUS)}) and how its"
            " chips lie, such as v5e:2x4 or v5p:2x2x2"
        )
    chips = math.prod(map(int, sides.split("x"))) * slices
    if data * model > chips or (slices > 1 and data * model < chips):
        if slices == 1:
            have = f"{topology} has"
        else:
            have = f"{slices} slices of {topology}, which are all used, have"
        raise InputError(f"mesh={data} {model}: needs {data * model} chips, and {have} {chips}")
    return make_mesh(data, model, _tpus(topology, slices)), CHIPS[_TPUS[kind][0]]


def compiler_options(mesh: Mesh) -> Mapping[str, Any]:
    """Return the compiler options for the devices of a mesh."""
    if mesh.devices.flat[0].platform != "gpu":
        return {}
    # Autotuning would time kernels, which is impossible without the device.
    return {"xla_gpu_autotune_level": 0, "xla_gpu_cuda_data_dir": cuda_directory()}


def _tpus(topology: str, slices: int) -> list[jax.Device]:
    if importlib.util.find_spec("libtpu") is None:
        raise InputError(
            f"chips={topology!r}: it needs libtpu, which compiles for TPUs: pip install"
            " 'specjax[compile]'"
        )
    libtpu = importlib.import_module("libtpu")
    # Without these variables, libtpu would search for a TPU on this machine, query a metadata
    # server, and refuse to be loaded by two processes at once.
    for name, value in {
        "TPU_LIBRARY_PATH": libtpu.get_library_path(),
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }.items():
        os.environ.setdefault(name, value)
    several: dict[str, Any] = {"num_slices": slices} if slices > 1 else {}
    # A host has 2 x 2 chips, unless there are fewer, as in a notebook with one chip.
    sides = [int(side) for side in topology.partition(":")[2].split("x")]
    host = (math.gcd(sides[0], 2), math.gcd(sides[1], 2), 1)
    if host != (2, 2, 1):
        several["chips_per_host_bounds"] = host
    return _devices(topology, platform="tpu", topology_name=topology, **several)


def _gpus(count: int) -> list[jax.Device]:
    if not cuda_directory():
        raise InputError(
            "chips='h100': it needs the compilers for NVIDIA's GPUs: pip install"
            " 'specjax[compile-cuda]'"
        )
    os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = (
        "1"  # it checks libraries that are needed only to run programs
    )
    return _devices("h100", platform="cuda", topology=f"1x1x{count}", target_config=_H100)


def cuda_directory() -> str:
    """Return the directory of NVIDIA's assembler for JAX's plugin; empty without one of them."""
    for plugin, assembler in _CUDA.items():
        try:
            spec = importlib.util.find_spec(plugin) and importlib.util.find_spec(assembler)
        except ModuleNotFoundError:
            continue
        if spec:
            return next(iter(spec.submodule_search_locations or ()), "")
    return ""


def _devices(chips: str, **description: Any) -> list[jax.Device]:
    try:
        return list(topologies.get_topology_desc(**description).devices)
    except Exception as error:  # the type depends on the version of JAX
        reason = next(iter(str(error).splitlines()), "")
        raise InputError(f"chips={chips!r}: the compiler does not support it: {reason}") from error
