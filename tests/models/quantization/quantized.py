"""Models with quantized matrices: their forms, and what their numbers mean."""

from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.models.quantization import Form, is_quantized
from specjax.models.quantization.weights import dequantize_matrix
from specjax.models.transformer import Target


def read(directory: Path, **options: Any) -> Target:
    """Return the target of a checkpoint, in float32 except for its quantized matrices."""
    return Target.from_pretrained(directory, dtype=np.float32, **options)


def forms_in(params: Any) -> Any:
    """Return params with the form of each matrix, or None."""
    return jax.tree.map(
        lambda leaf: leaf.form if is_quantized(leaf) else None, params, is_leaf=is_quantized
    )


def forms_of(target: Target, layer: int = -1) -> dict[str, Form]:
    """Return the forms of the quantized matrices of a layer, by default the last one."""
    return {name: form for name, form in forms_in(target.params["layers"][layer]).items() if form}


def as_floats(target: Target) -> Any:
    """Return the params of a target with all matrices in floats."""
    floats = jax.tree.map(
        lambda leaf: dequantize_matrix(leaf) if is_quantized(leaf) else leaf,
        target.params,
        is_leaf=is_quantized,
    )
    if is_quantized(target.params["embed"]):  # its rows are looked up
        floats["embed"] = floats["embed"].T
    return floats


def in_floats(target: Target) -> Target:
    """Return a target with all matrices in floats."""
    return target.replace(params=as_floats(target))


def bits(array: Any) -> np.ndarray:
    """Return the bits of float32 numbers; zeros have the same, whatever their sign."""
    assert array.dtype == np.float32
    return (np.asarray(array) + np.float32(0)).view(np.uint32)
