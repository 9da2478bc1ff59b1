"""Write quantized checkpoints in compressed-tensors' layout, which other programs read too."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specjax.models.fields import CheckpointError, JsonObject
from specjax.models.params import Param
from specjax.models.quantization.packing import packed
from specjax.models.quantization.weights import BLOCK, EMBEDDINGS, Form, is_quantized, matrices_in


def compressed(arrays: Mapping[str, np.ndarray], declared: Any) -> dict[str, np.ndarray]:
    """Return ``arrays`` with the parts of quantized matrices in compressed-tensors' layout.

    Args:
        arrays: the arrays by name; a part of a quantized matrix has the name of its declaration.
        declared: the declarations, any pytree.

    Raises:
        CheckpointError: A quantized matrix has no name in compressed-tensors.
    """
    tensors = dict(arrays)
    for quantized in matrices_in(declared):
        for stored in quantized.values.stored_names:
            name = stored.removesuffix(":values")
            if f"{name}:values" not in tensors:
                continue  # several parameters share this tensor, and the first one has moved it
            if not name.endswith(".weight"):
                raise CheckpointError(
                    f"{name} is quantized, and compressed-tensors has no names for its parts: load"
                    " the model with weights='float' to save it"
                )
            parts = {
                role: tensors.pop(f"{name}:{role}", None)
                for role in ("values", "scales", "zeros", "order")
            }
            tensors |= _compressed(name, parts, quantized.form)
    return tensors


def _compressed(
    name: str, parts: Mapping[str, np.ndarray | None], form: Form
) -> dict[str, np.ndarray]:
    values, scales, zeros, order = (parts[role] for role in ("values", "scales", "zeros", "order"))
    assert values is not None and scales is not None
    groups, outputs, size = values.shape
    rows = np.ascontiguousarray(np.moveaxis(values, 0, 1).reshape(outputs, groups * size))
    if form.kind == "fp8":
        return {
            name: rows,
            f"{name}_scale": (
                _of_blocks(name, scales) if form.group else np.ascontiguousarray(scales.T)
            ),
        }
    tensors = {f"{name}_scale": np.ascontiguousarray(scales.T)}
    if _is_plain(form):
        return {name: rows, **tensors}
    half = 1 << (form.bits - 1)
    rows = rows.astype(np.int32) + half
    if order is not None:
        places = np.argsort(order)
        rows = rows[:, places]
        tensors[f"{name}_g_idx"] = (places // size).astype(np.int32)
    if zeros is not None:
        tensors[f"{name}_zero_point"] = np.ascontiguousarray(
            packed(zeros.astype(np.int32) + half, form.bits).T
        )
    tensors[f"{name}_packed"] = packed(rows, form.bits)
    tensors[f"{name}_shape"] = np.array([outputs, groups * size], np.int64)
    return tensors


def _is_plain(form: Form) -> bool:
    """Return True if the values are written as they are, not packed.

    Other programs expect 8-bit weights in this layout if activations have 8 bits too.
    """
    return form.bits == 8 and not form.has_zeros and not form.is_ordered and form.activations == 8


def _of_blocks(name: str, scales: np.ndarray) -> np.ndarray:
    """Return the scales of blocks ``[out / BLOCK, groups]`` from FP8 scales ``[groups, out]``."""
    blocks = scales[:, ::BLOCK]
    if (np.repeat(blocks, BLOCK, axis=1)[:, : scales.shape[1]] != scales).any():
        raise CheckpointError(
            f"{name} is in FP8 with scales that differ within a block: load the model with"
            " weights='float' to save it"
        )
    return np.ascontiguousarray(blocks.T)


def format_config(declared: Any) -> JsonObject | None:
    """Return the ``quantization_config`` of a checkpoint with these declarations.

    It is None if nothing is quantized.
    """
    # Several parameters may be parts of one tensor: it counts once.
    modules: dict[Form, dict[str, None]] = {}
    floats: set[str] = set()
    for leaf in jax.tree.leaves(declared, is_leaf=is_quantized):
        if is_quantized(leaf):
            names = [name.removesuffix(".weight:values") for name in leaf.values.stored_names]
            modules.setdefault(leaf.form, {}).update(dict.fromkeys(names))
        elif isinstance(leaf, Param) and len(leaf.shape) > 1 and not leaf.is_rows:
            floats |= {
                name.removesuffix(".weight")
                for name in leaf.stored_names
                if name.endswith(".weight")
            }
    if not modules:
        return None
    if not any(name.endswith("lm_head") for names in (floats, *modules.values()) for name in names):
        # Tied to the embedding here, but a module of its own in other programs.
        floats.add("lm_head")
    usual = max(modules, key=lambda form: len(modules[form]))
    groups = {}
    for index, (form, names) in enumerate(
        sorted(modules.items(), key=lambda item: item[0] != usual)
    ):
        embeddings = [name for name in names if name.endswith(EMBEDDINGS)]
        inputs = {
            "num_bits": 8,
            "type": "int",
            "symmetric": True,
            "strategy": "token",
            "dynamic": True,
        }
        groups[f"group_{index}"] = {
            "targets": ["Linear", *embeddings] if form == usual else list(names),
            "weights": _weights(form),
            "input_activations": inputs if form.activations == 8 else None,
            "output_activations": None,
            "format": (
                "float-quantized"
                if form.kind == "fp8"
                else "int-quantized"
                if _is_plain(form)
                else "pack-quantized"
            ),
        }
    layouts = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(floats),
        "kv_cache_scheme": None,
    }


def _weights(form: Form) -> JsonObject:
    """Return compressed-tensors' arguments for weights of a form."""
    is_float = form.kind == "fp8"
    strategy = ("block" if is_float else "group") if form.group else "channel"
    weights = {
        "num_bits": form.bits,
        "type": "float" if is_float else "int",
        "symmetric": not form.has_zeros,
        "strategy": strategy,
        "dynamic": False,
    }
    weights |= {"group_size": form.group} if strategy == "group" else {}
    weights |= {"block_structure": [BLOCK, BLOCK]} if strategy == "block" else {}
    return weights | ({"actorder": "group"} if form.is_ordered else {})
