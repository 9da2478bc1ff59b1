"""Quantized checkpoints as they are written: in compressed-tensors' layout, which other programs read too."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from specjax.models.fields import CheckpointError
from specjax.models.params import Param
from specjax.models.quantization.packing import packed
from specjax.models.quantization.weights import BLOCK, Form, is_quantized, matrices_in


def compressed(arrays: Mapping[str, np.ndarray], declared: Any) -> dict[str, np.ndarray]:
    """``arrays`` with the parts of quantized matrices in compressed-tensors' layout.

    Args:
        arrays: by name; a part of a quantized matrix is called as its declaration is.
        declared: the declarations, any pytree.

    Raises:
        CheckpointError: a matrix that compressed-tensors has no name for is quantized.
    """
    found = dict(arrays)
    for quantized in matrices_in(declared):
        for stored in quantized.values.stored_names:
            name = stored.removesuffix(":values")
            if f"{name}:values" not in found:
                continue  # several parameters are one tensor there
            if not name.endswith(".weight"):
                raise CheckpointError(
                    f"{name} is quantized, and compressed-tensors has no names for the parts of such a tensor: load the model "
                    "with weights='float' to save it"
                )
            parts = {role: found.pop(f"{name}:{role}", None) for role in ("values", "scales", "zeros", "order")}
            found |= _compressed(name, parts, quantized.form)
    return found


def _compressed(name: str, parts: Mapping[str, np.ndarray | None], form: Form) -> dict[str, np.ndarray]:
    values, scales, zeros, order = (parts[role] for role in ("values", "scales", "zeros", "order"))
    assert values is not None and scales is not None
    groups, outputs, size = values.shape
    rows = np.ascontiguousarray(np.moveaxis(values, 0, 1).reshape(outputs, groups * size))
    if form.kind == "fp8":
        return {name: rows, f"{name}_scale": _of_blocks(name, scales) if form.group else np.ascontiguousarray(scales.T)}
    found = {f"{name}_scale": np.ascontiguousarray(scales.T)}
    if _is_plain(form):
        return {name: rows, **found}
    half = 1 << (form.bits - 1)
    rows = rows.astype(np.int32) + half
    if order is not None:
        places = np.argsort(order)
        rows = rows[:, places]
        found[f"{name}_g_idx"] = (places // size).astype(np.int32)
    if zeros is not None:
        found[f"{name}_zero_point"] = np.ascontiguousarray(packed(zeros.astype(np.int32) + half, form.bits).T)
    found[f"{name}_packed"] = packed(rows, form.bits)
    found[f"{name}_shape"] = np.array([outputs, groups * size], np.int64)
    return found


def _is_plain(form: Form) -> bool:
    """Whether its values are written as they are, and not packed. Others read weights of 8 bits so where activations have 8."""
    return form.bits == 8 and not form.has_zeros and not form.is_ordered and form.activations == 8


def _of_blocks(name: str, scales: np.ndarray) -> np.ndarray:
    """Of FP8's scales ``[groups, out]`` those of blocks, ``[out / BLOCK, groups]``."""
    blocks = scales[:, ::BLOCK]
    if (np.repeat(blocks, BLOCK, axis=1)[:, : scales.shape[1]] != scales).any():
        raise CheckpointError(
            f"{name} is in FP8 whose scales are not those of blocks: load the model with weights='float' to save it"
        )
    return np.ascontiguousarray(blocks.T)


def format_config(declared: Any) -> dict[str, Any] | None:
    """The ``quantization_config`` of a checkpoint that `compressed` makes of ``declared``; None: nothing in it is quantized."""
    modules: dict[Form, list[str]] = {}
    floats: list[str] = []
    for each in jax.tree.leaves(declared, is_leaf=is_quantized):
        if is_quantized(each):
            names = [name.removesuffix(".weight:values") for name in each.values.stored_names]
            modules.setdefault(each.form, []).extend(names)
        elif isinstance(each, Param) and len(each.shape) > 1 and not each.is_rows:
            floats += [name.removesuffix(".weight") for name in each.stored_names if name.endswith(".weight")]
    if not modules:
        return None
    if not any(name.endswith("lm_head") for names in (floats, *modules.values()) for name in names):
        floats.append("lm_head")  # of a tied model: others have such a module all the same
    usual = max(modules, key=lambda form: len(modules[form]))
    groups = {}
    for index, (form, names) in enumerate(sorted(modules.items(), key=lambda item: item[0] != usual)):
        embeddings = [name for name in names if name.endswith("embed_tokens")]
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        groups[f"group_{index}"] = {
            "targets": ["Linear", *embeddings] if form == usual else list(dict.fromkeys(names)),
            "weights": _weights(form),
            "input_activations": inputs if form.activations == 8 else None,
            "output_activations": None,
            "format": "float-quantized" if form.kind == "fp8" else "int-quantized" if _is_plain(form) else "pack-quantized",
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


def _weights(form: Form) -> dict[str, Any]:
    """compressed-tensors' arguments of weights of a ``form``."""
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
