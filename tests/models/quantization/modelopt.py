"""Small checkpoints in ModelOpt's layouts, and what their numbers mean, number by number."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors
from safetensors.numpy import load_file, save_file

VALUES = (0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6)
NVFP4, FP8, EACH = "NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN"


_TYPES = {"F32": np.float32, "BF16": jnp.bfloat16, "F8_E4M3": jnp.float8_e4m3fn, "U8": np.uint8}


def load(file: Path) -> dict[str, np.ndarray]:
    """Return the tensors of a file, FP8 among them, which safetensors' own function cannot read."""
    return {
        name: np.frombuffer(part["data"], _TYPES[part["dtype"]]).reshape(part["shape"])
        for name, part in safetensors.deserialize(file.read_bytes())
    }


def reference(packed: np.ndarray, scales: np.ndarray, factor: float, divides=False) -> np.ndarray:
    """Return the weights ``[out, in]`` of NVFP4, computed number by number."""
    weights = np.empty((len(packed), 2 * packed.shape[1]), np.float32)
    factor = np.float32(factor)
    for row, column in np.ndindex(weights.shape):
        byte = int(packed[row, column // 2])
        code = byte // 16 if column % 2 else byte % 16
        scale = np.float32(scales[row, column // 16])
        scale = scale / factor if divides else scale * factor
        weights[row, column] = np.float32(VALUES[code]) * scale
    return weights


def random_blocks(
    rng: np.random.Generator, outputs: int, inputs: int
) -> tuple[np.ndarray, np.ndarray, float]:
    """Return random bytes, their FP8 scales, and a scale of the matrix: weights of some 0.1."""
    packed = rng.integers(0, 256, (outputs, inputs // 2), np.uint8)
    scales = rng.uniform(100, 400, (outputs, inputs // 16)).astype(jnp.float8_e4m3fn)
    return packed, scales, float(np.float32(1 / 3000))


def parts_of(
    name: str, shape: tuple[int, ...], algorithm: str, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the tensors of a random matrix ``[out, in]``, and its weights in floats."""
    measured = {f"{name.removesuffix('weight')}input_scale": np.full((), 0.02, np.float32)}
    if algorithm == NVFP4:
        packed, scales, factor = random_blocks(rng, *shape)
        parts = {name: packed, f"{name}_scale": scales}
        parts[f"{name}_scale_2"] = np.array(factor, np.float32)
        return parts | measured, reference(packed, scales, factor)
    values = rng.normal(size=shape).astype(jnp.float8_e4m3fn)
    size = () if algorithm == FP8 else shape[:1]
    factors = np.asarray(rng.uniform(0.05, 0.2, size), np.float32)
    weights = values.astype(np.float32) * factors.reshape(-1, 1)
    return {name: values, f"{name}_scale": factors} | measured, weights


def experts_of(
    name: str, shape: tuple[int, ...], algorithm: str, rng: np.random.Generator
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the tensors of random experts ``[experts, in, out]``, and their weights in floats."""
    experts, inputs, outputs = shape
    parts, weights = {}, np.empty(shape, np.float32)
    measured = {f"{name}_input_scale": np.full((), 0.02, np.float32)}
    if algorithm != NVFP4:
        values = rng.normal(size=shape).astype(jnp.float8_e4m3fn)
        size = () if algorithm == FP8 else (experts, outputs)
        factors = np.asarray(rng.uniform(0.05, 0.2, size), np.float32)
        parts = {name: values, f"{name}_weight_scale": factors}
        by_output = factors if algorithm == FP8 else factors[:, None]
        return parts | measured, values.astype(np.float32) * by_output
    packed = np.empty((experts, inputs // 2, outputs), np.uint8)
    scales = np.empty((experts, inputs // 16, outputs), jnp.float8_e4m3fn)
    for expert in range(experts):
        blocks, of_blocks, factor = random_blocks(rng, outputs, inputs)
        packed[expert], scales[expert] = blocks.T, of_blocks.T
        weights[expert] = reference(blocks, of_blocks, factor).T
    parts = {name: packed, f"{name}_weight_scale": scales}
    parts[f"{name}_weight_scale_2"] = np.array(factor, np.float32)
    return parts | measured, weights


def quantize(
    directory: Path,
    algorithm_of: Callable[[str], str | None],
    quantization: dict[str, Any] | None,
    beside: dict[str, Any] | None = None,
) -> None:
    """Replace matrices of a checkpoint by random ones of ModelOpt.

    The floats are written into its folder "floats". ``algorithm_of`` returns the algorithm of a
    tensor; ``quantization`` is written into config.json, and ``beside`` into a file of its own.
    """
    rng, file = np.random.default_rng(0), directory / "model.safetensors"
    floats = load_file(file)
    tensors = dict(floats)
    for name, weights in list(floats.items()):
        if (algorithm := algorithm_of(name)) is None:
            continue
        of = experts_of if weights.ndim == 3 else parts_of
        parts, floats[name] = of(name, weights.shape, algorithm, rng)
        tensors |= parts
    save_file(tensors, file)
    (directory / "floats").mkdir()
    save_file(floats, directory / "floats" / "model.safetensors")
    raw = json.loads((directory / "config.json").read_text())
    (directory / "floats" / "config.json").write_text(json.dumps(raw))
    if quantization is not None:
        raw["quantization_config"] = quantization
        (directory / "config.json").write_text(json.dumps(raw))
    if beside is not None:
        (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": beside}))
