"""Narrow checkpoints as they are published: which layouts are read, and how `save` writes one.

Read are FP8 with a scale for each block (DeepSeek, Qwen) or for each matrix; compressed-tensors of 8-bit whole numbers
(``int-quantized``), of FP8 (``float-quantized``), and packed (``pack-quantized``); AWQ; GPTQ. compressed-tensors is written.
Whatever else there is, is refused by name: a layout that is misread gives a model that talks nonsense.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specjax.models.fields import CheckpointError, show
from specjax.models.narrow.packing import packed
from specjax.models.narrow.stored import Awq, Gptq, Packed, Plain, StoredMatrix, is_neighbourly
from specjax.models.narrow.weights import Form, is_narrow
from specjax.models.params import Param

BLOCK = 128
"""Outputs and inputs of a block of FP8."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_READ = ("fp8", "mxfp4", "compressed-tensors", "awq", "gptq")
_ADVICE = "use the checkpoint without quantisation, and weights='int8' or 'int4'"

# --- config.json -----------------------------------------------------------------------------------------------------


def check_config(raw: Mapping[str, Any] | None, source: str) -> None:
    """Refuse, with a CheckpointError, a ``quantization_config`` that is not read here; ``source`` is its file."""
    if raw is None:
        return

    def need(condition: bool, field: str, value: Any, wanted: str) -> None:
        if not condition:
            raise CheckpointError(f"{source}: quantization_config.{field}={show(value)}: must be {wanted}: {_ADVICE}")

    method = raw.get("quant_method")
    need(method in _READ, "quant_method", method, f"one of {', '.join(_READ)}")
    if method == "fp8":
        block = raw.get("weight_block_size")
        need(raw.get("fmt", "e4m3") == "e4m3", "fmt", raw.get("fmt"), "e4m3")
        need(block in (None, [BLOCK, BLOCK]), "weight_block_size", block, f"[{BLOCK}, {BLOCK}], or left out")
    if method == "awq":
        need(raw.get("bits", 4) == 4, "bits", raw.get("bits"), "4")
        need(str(raw.get("version", "gemm")).lower() == "gemm", "version", raw.get("version"), "gemm")
    if method == "gptq":
        need(raw.get("bits") in (4, 8), "bits", raw.get("bits"), "4 or 8")
        kind = raw.get("checkpoint_format", "gptq")
        need(kind in ("gptq", "gptq_v2"), "checkpoint_format", kind, "gptq or gptq_v2")
    if method == "compressed-tensors":
        _check_compressed(raw, need)


def _check_compressed(raw: Mapping[str, Any], need: Any) -> None:
    formats = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", "mixed-precision")
    sparsity = raw.get("sparsity_config") or {}
    need(sparsity.get("format", "dense") == "dense", "sparsity_config.format", sparsity.get("format"), "dense, or left out")
    groups = raw.get("config_groups")
    need(isinstance(groups, dict) and bool(groups), "config_groups", groups, "an object with a group or more")
    assert isinstance(groups, dict)
    for name, group in groups.items():
        of = f"config_groups.{name}"
        weights = group.get("weights") if isinstance(group, dict) else None
        need(isinstance(weights, dict), f"{of}.weights", weights, "an object")
        own = group.get("format") or raw.get("format")
        need(own in formats, f"{of}.format", own, f"one of {', '.join(formats)}")
        kind = (weights.get("type", "int"), weights.get("num_bits", 8))
        need(kind in (("int", 4), ("int", 8), ("float", 8)), f"{of}.weights", kind, "int of 4 or 8 bits, or float of 8")
        strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
        strategies = ("tensor", "channel", "group", "block")
        need(strategy in strategies, f"{of}.weights.strategy", strategy, f"one of {', '.join(strategies)}")
        if strategy == "block":
            block = weights.get("block_structure")
            need(block == [BLOCK, BLOCK], f"{of}.weights.block_structure", block, f"[{BLOCK}, {BLOCK}]")
        inputs = group.get("input_activations") or {}
        need(inputs.get("num_bits", 8) == 8, f"{of}.input_activations.num_bits", inputs.get("num_bits"), "8, or left out")


def _activations(raw: Mapping[str, Any], bits: int) -> int:
    """To how many bits a checkpoint has the inputs of matrices of whole numbers of so many ``bits`` rounded."""
    for group in (raw.get("config_groups") or {}).values():
        weights, inputs = group["weights"], group.get("input_activations") or {}
        if weights.get("num_bits", 8) == bits and weights.get("type", "int") == inputs.get("type", "none"):
            return 8
    return 16


# --- tensors ---------------------------------------------------------------------------------------------------------


def matrices(tensors: Mapping[str, Any], raw: Mapping[str, Any], directory: Path) -> tuple[dict[str, StoredMatrix], set[str]]:
    """The narrow matrices of a checkpoint, but for those of MXFP4.

    Args:
        tensors: all of the checkpoint's, by name.
        raw: the ``quantization_config``, which has been checked; empty where there is none.
        directory: of the checkpoint, for errors.

    Returns:
        The matrices by name; and the names of the tensors that they are made of, and of those that only matter where
        activations are rounded with a scale that was measured beforehand: here a row's is its own.

    Raises:
        CheckpointError: a part of a matrix is missing, or of another shape or type than the others say.
    """
    found: dict[str, StoredMatrix] = {}
    used: set[str] = set()
    parts = _Parts(tensors, directory)
    for name, tensor in tensors.items():
        kind = tensor.get_dtype()
        if name.endswith(".weight_packed"):
            base, made, own = _of_packed(parts, name, raw)
        elif name.endswith(".qweight"):
            base, made, own = _of_qweight(parts, name, raw)
        elif kind == "F8_E4M3" or (kind == "I8" and f"{name}_scale" in tensors):
            base, made, own = _of_plain(parts, name, raw)
        else:
            continue
        if made is not None:
            found[base] = made
            used |= own
    measured = r"\.(input_scale|k_scale|v_scale|q_scale)$"
    return found, used | {name for name in tensors if raw and re.search(measured, name)}


class _Parts:
    """The tensors beside one, which are checked as they are looked up."""

    def __init__(self, tensors: Mapping[str, Any], directory: Path) -> None:
        self.tensors, self.directory = tensors, directory

    def get(self, name: str, whole: str, shapes: tuple[tuple[int, ...], ...], kinds: tuple[str, ...] = _FLOATS) -> Any:
        """The tensor ``name`` of the matrix ``whole``, which has one of ``shapes``."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"{self.directory}: {show(whole)} is narrow, and {show(name)}, which goes with it, is missing: "
                "download the checkpoint again"
            )
        shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
        if shape not in shapes or kind not in kinds:
            wanted = " or ".join(map(str, dict.fromkeys(shapes)))
            raise CheckpointError(
                f"{self.directory}: {show(name)} is {kind} of shape {shape}: to go with {show(whole)} it must be "
                f"{' or '.join(kinds)} of shape {wanted}: download the checkpoint again"
            )
        return tensor

    def whole(self, name: str) -> np.ndarray:
        """All of a tensor."""
        tensor = self.tensors[name]
        return np.asarray(tensor[(slice(None),) * len(tensor.get_shape())])


Found = tuple[str, StoredMatrix | None, set[str]]


def _of_plain(parts: _Parts, name: str, raw: Mapping[str, Any]) -> Found:
    tensor = parts.tensors[name]
    shape, is_float = tuple(tensor.get_shape()), tensor.get_dtype() == "F8_E4M3"
    if len(shape) != 2:
        return name, None, set()
    outputs, inputs = shape
    blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK))
    scale = f"{name}_scale_inv" if f"{name}_scale_inv" in parts.tensors or f"{name}_scale" not in parts.tensors else f"{name}_scale"
    shapes = ((), (1,), (1, 1), (outputs, 1), (outputs,), blocks) if is_float else ((1,), (outputs, 1), (outputs,))
    if not is_float and (group := _group_size(raw)) and inputs % group == 0:
        shapes = (*shapes, (outputs, inputs // group))
    scales = parts.get(scale, name, shapes)
    of_scales = tuple(scales.get_shape())
    has_blocks = is_float and of_scales == blocks and (raw.get("weight_block_size") or scale.endswith("_inv") or outputs != blocks[0])
    if is_float:
        form = Form("fp8", BLOCK if has_blocks and blocks[1] > 1 else 0)
        if has_blocks and inputs % BLOCK and blocks[1] > 1:
            return name, Ragged(tensor, scales), {name, scale}
        return name, Plain(tensor, scales, form, BLOCK if has_blocks else 1), {name, scale}
    if f"{name}_zero_point" in parts.tensors:
        raise CheckpointError(
            f"{parts.directory}: {show(f'{name}_zero_point')}: 8-bit numbers that are not packed must be symmetric, without zero "
            f"points: {_ADVICE}"
        )
    group = inputs // of_scales[1] if len(of_scales) == 2 and of_scales[1] > 1 else 0
    return name, Plain(tensor, scales, Form("int8", group, activations=_activations(raw, 8))), {name, scale}


def _group_size(raw: Mapping[str, Any]) -> int:
    """The size of groups that a compressed-tensors checkpoint of 8-bit numbers says; 0: none."""
    sizes = {group["weights"].get("group_size") or 0 for group in (raw.get("config_groups") or {}).values()}
    return max(sizes, default=0)


def _of_packed(parts: _Parts, name: str, raw: Mapping[str, Any]) -> Found:
    base = name.removesuffix("_packed")
    outputs, words = tuple(parts.tensors[name].get_shape())
    parts.get(name, base, ((outputs, words),), ("I32",))
    parts.get(f"{base}_shape", base, ((2,),), ("I64", "I32"))
    said = [int(size) for size in parts.whole(f"{base}_shape")]
    widths = {group["weights"].get("num_bits", 8) for group in (raw.get("config_groups") or {}).values()}
    fitting = [bits for bits in sorted(widths) if said == [outputs, said[1]] and -(-said[1] * bits // 32) == words]
    if not fitting:
        raise CheckpointError(
            f"{parts.directory}: {show(f'{base}_shape')} is {said}, but {show(name)}, of shape {(outputs, words)}, is no matrix of "
            f"that shape in numbers of {' or '.join(map(str, sorted(widths)))} bits: download the checkpoint again"
        )
    bits, inputs = fitting[0], said[1]
    counts = {inputs // size for size in _sizes(raw, inputs) if inputs % size == 0}
    scales = parts.get(f"{base}_scale", base, tuple((outputs, count) for count in sorted(counts)))
    groups = scales.get_shape()[1]
    zeros = order = None
    if f"{base}_zero_point" in parts.tensors:
        zeros = parts.get(f"{base}_zero_point", base, ((-(-outputs * bits // 32), groups),), ("I32",))
    if f"{base}_g_idx" in parts.tensors:
        order = _order(parts, f"{base}_g_idx", base, inputs, groups)
    form = Form(
        "int4" if bits == 4 else "int8",
        0 if groups == 1 else inputs // groups,
        zeros is not None,
        order is not None,
        _activations(raw, bits),
    )
    names = {name, *(f"{base}_{part}" for part in ("shape", "scale", "zero_point", "g_idx"))}
    return base, Packed(parts.tensors[name], scales, zeros, order, form, inputs), names & parts.tensors.keys()


def _sizes(raw: Mapping[str, Any], inputs: int) -> set[int]:
    """The sizes of groups that a compressed-tensors checkpoint has."""
    groups = (raw.get("config_groups") or {}).values()
    sizes = {group["weights"].get("group_size") or inputs for group in groups}
    return {inputs if size == -1 else size for size in sizes}


def _order(parts: _Parts, name: str, whole: str, inputs: int, groups: int) -> Any:
    """The group of each input; None: inputs of a group are neighbours."""
    tensor = parts.get(name, whole, ((inputs,),), ("I32", "I64"))
    of_input = parts.whole(name)
    if (of_input == -1).all():  # it has not been set
        return None
    counts = np.bincount(of_input.clip(0), minlength=groups)
    if of_input.min() < 0 or len(counts) != groups or (counts != inputs // groups).any():
        raise CheckpointError(
            f"{parts.directory}: {show(name)}: its {groups} groups must have {inputs // groups} inputs each: "
            "download the checkpoint again"
        )
    return None if is_neighbourly(of_input, inputs // groups) else tensor


def _of_qweight(parts: _Parts, name: str, raw: Mapping[str, Any]) -> Found:
    stem = name.removesuffix("qweight")
    base, method = f"{stem}weight", raw.get("quant_method")
    if method not in ("awq", "gptq"):
        raise CheckpointError(
            f"{parts.directory}: {show(name)} is packed, and config.json does not say how: its quantization_config must have "
            f"quant_method awq or gptq: {_ADVICE}"
        )
    bits = raw.get("bits", 4)
    rows, columns = tuple(parts.get(name, base, (tuple(parts.tensors[name].get_shape()),), ("I32",)).get_shape())
    inputs, outputs = (rows, columns * 8) if method == "awq" else (rows * 32 // bits, columns)
    size = raw.get("group_size", 128)
    size = inputs if size == -1 else size
    if type(size) is not int or size < 1 or inputs % size:
        raise CheckpointError(
            f"{parts.directory}: quantization_config.group_size={show(size)}: must divide the {inputs} inputs of {show(base)}: "
            f"{_ADVICE}"
        )
    groups = inputs // size
    scales = parts.get(f"{stem}scales", base, ((groups, outputs),))
    zeros = parts.get(f"{stem}qzeros", base, ((groups, -(-outputs * bits // 32)),), ("I32",))
    names = {name, f"{stem}scales", f"{stem}qzeros", f"{stem}g_idx"} & parts.tensors.keys()
    kind, group = "int4" if bits == 4 else "int8", 0 if groups == 1 else size
    if method == "awq":
        return base, Awq(parts.tensors[name], scales, zeros, Form(kind, group, has_zeros=True)), names
    order = _order(parts, f"{stem}g_idx", base, inputs, groups) if f"{stem}g_idx" in parts.tensors else None
    add = 1 if raw.get("checkpoint_format", "gptq") == "gptq" else 0
    form = Form(kind, group, has_zeros=True, is_ordered=order is not None)
    made = Gptq(parts.tensors[name], scales, zeros, order, form, add)
    if not made.zeros(slice(0, groups), slice(0, outputs)).any():
        made.form = Form(kind, group, is_ordered=order is not None)
    return base, made, names


class Ragged(StoredMatrix):
    """FP8 in blocks that do not fill the matrix: it is read as floats only."""

    is_kept = False

    def __init__(self, values: Any, scales: Any) -> None:
        self._values, self._scales = values, scales
        self.form, self.shape = Form("fp8"), tuple(values.get_shape())

    def __getitem__(self, part: tuple[slice, slice]) -> np.ndarray:
        scales = np.asarray(self._scales[:, :], np.float32).repeat(BLOCK, axis=0).repeat(BLOCK, axis=1)
        return self._values[part].astype(np.float32) * scales[part]

    def values(self, groups: slice, outputs: slice) -> np.ndarray:
        raise NotImplementedError

    def scales(self, groups: slice, outputs: slice) -> np.ndarray:
        raise NotImplementedError


# --- writing ---------------------------------------------------------------------------------------------------------


def compressed(arrays: Mapping[str, np.ndarray], declared: Any) -> dict[str, np.ndarray]:
    """``arrays`` with the parts of narrow matrices in compressed-tensors' layout.

    Args:
        arrays: by name; a part of a narrow matrix is called as its declaration is.
        declared: the declarations, any pytree.

    Raises:
        CheckpointError: a matrix that compressed-tensors has no name for is narrow.
    """
    found = dict(arrays)
    for narrow in filter(is_narrow, jax.tree.leaves(declared, is_leaf=is_narrow)):
        for stored in narrow.values.stored_names:
            name = stored.removesuffix(":values")
            if f"{name}:values" not in found:
                continue  # several parameters are one tensor there
            if not name.endswith(".weight"):
                raise CheckpointError(
                    f"{name} is narrow, and compressed-tensors has no name for the parts of such a tensor: save it with "
                    "weights='float'"
                )
            parts = {role: found.pop(f"{name}:{role}", None) for role in ("values", "scales", "zeros", "order")}
            found |= _compressed(name, parts, narrow.form)
    return found


def _compressed(name: str, parts: Mapping[str, np.ndarray | None], form: Form) -> dict[str, np.ndarray]:
    values, scales, zeros, order = (parts[role] for role in ("values", "scales", "zeros", "order"))
    assert values is not None and scales is not None
    groups, outputs, size = values.shape
    rows = np.ascontiguousarray(np.moveaxis(values, 0, 1).reshape(outputs, groups * size))
    found = {f"{name}_scale": np.ascontiguousarray(scales.T)}
    if form.kind == "fp8" and groups > 1 and (blocks := _as_blocks(scales)) is not None:
        return {name: rows, f"{name}_scale": blocks}
    if form.bits == 8 and zeros is None and order is None:
        return {name: rows, **found}
    half = 1 << (form.bits - 1)
    rows = rows.astype(np.int32) + half
    if order is not None:
        rows = rows[:, np.argsort(order)]
        of_place = np.arange(len(order), dtype=np.int32) // size
        found[f"{name}_g_idx"] = of_place[np.argsort(order)]
    if zeros is not None:
        found[f"{name}_zero_point"] = np.ascontiguousarray(packed(zeros.astype(np.int32) + half, form.bits).T)
    found[f"{name}_packed"] = packed(rows, form.bits)
    found[f"{name}_shape"] = np.array([outputs, groups * size], np.int64)
    return found


def _as_blocks(scales: np.ndarray) -> np.ndarray | None:
    """Of scales ``[groups, out]`` those of blocks, ``[out / BLOCK, groups]``; None: outputs of a block differ."""
    blocks = scales[:, ::BLOCK]
    same = (np.repeat(blocks, BLOCK, axis=1)[:, : scales.shape[1]] == scales).all()
    return np.ascontiguousarray(blocks.T) if same else None


def format_config(declared: Any) -> dict[str, Any] | None:
    """The ``quantization_config`` of a checkpoint that `compressed` makes of ``declared``; None: nothing in it is narrow."""
    modules: dict[tuple[Any, ...], list[str]] = {}
    floats: list[str] = []
    for each in jax.tree.leaves(declared, is_leaf=is_narrow):
        if is_narrow(each):
            names = [name.removesuffix(".weight:values") for name in each.values.stored_names]
            modules.setdefault(_scheme(each.form), []).extend(names)
        elif isinstance(each, Param) and len(each.shape) > 1 and not each.is_rows:
            floats += [name.removesuffix(".weight") for name in each.stored_names if name.endswith(".weight")]
    if not modules:
        return None
    usual = max(modules, key=lambda scheme: len(modules[scheme]))
    groups = {}
    for number, (scheme, names) in enumerate(sorted(modules.items(), key=lambda item: item[0] != usual)):
        kind, bits, group, symmetric, activations, has_blocks = scheme
        embeddings = [name for name in names if name.endswith("embed_tokens")]
        strategy = "block" if has_blocks else "group" if group else "channel"
        weights = {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "dynamic": False}
        weights |= {"group_size": group} if group and not has_blocks else {}
        weights |= {"block_structure": [BLOCK, BLOCK]} if has_blocks else {}
        inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
        layout = "float-quantized" if kind == "float" else "int-quantized" if bits == 8 and symmetric else "pack-quantized"
        groups[f"group_{number}"] = {
            "targets": ["Linear", *embeddings] if scheme == usual else names,
            "weights": weights,
            "input_activations": inputs if activations == 8 else None,
            "output_activations": None,
            "format": layout,
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


def _scheme(form: Form) -> tuple[Any, ...]:
    is_float = form.kind == "fp8"
    has_blocks = is_float and form.group == BLOCK
    symmetric = not form.has_zeros
    return ("float" if is_float else "int", form.bits, form.group, symmetric, form.activations, has_blocks)

