"""Published quantized checkpoints: the supported formats, and where their matrices are.

Supported are FP8 with a scale for each block (DeepSeek, Qwen) or for each matrix;
compressed-tensors with 8-bit integers (``int-quantized``), FP8 (``float-quantized``) and packed
integers (``pack-quantized``); AWQ; GPTQ; NVIDIA's ModelOpt with FP8 and NVFP4; and NVFP4 of
compressed-tensors (``nvfp4-pack-quantized``). `mxfp4` reads gpt-oss's format. All others are
refused by name: a model whose layout is misread generates nonsense.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np

from specjax.models.fields import CheckpointError, Fields, JsonObject, show
from specjax.models.quantization import nvfp4
from specjax.models.quantization.float8 import KIND
from specjax.models.quantization.nvfp4 import Nvfp4Experts, Nvfp4Matrix, Scales
from specjax.models.quantization.stored import (
    Awq,
    Gptq,
    PackedMatrix,
    PlainExperts,
    PlainMatrix,
    Ragged,
    StoredMatrix,
    is_neighbourly,
)
from specjax.models.quantization.weights import BLOCK, EMBEDDINGS, Form, matrices_in

ADVICE = "use the checkpoint without quantization, and weights='int8' or 'int4'"
"""The remedy for a quantized checkpoint that cannot be read."""
_FLOATS = ("F64", "F32", "F16", "BF16")
_READ = ("fp8", "mxfp4", "compressed-tensors", "awq", "gptq", "modelopt")
_NVFP4 = "nvfp4-pack-quantized"
_FORMATS = ("int-quantized", "float-quantized", "naive-quantized", "pack-quantized", _NVFP4)
MODELOPT_FILE = "hf_quant_config.json"
"""The file in which ModelOpt describes the quantization, often beside the same in config.json."""
_MIXED = "MIXED_PRECISION"
_ALGORITHMS = {
    "NVFP4": "NVFP4",
    "W4A16_NVFP4": "NVFP4",
    "FP8": "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN": "FP8",
}
"""ModelOpt's algorithms that are read, and the formats of their weights.

Algorithms of other names have other layouts, or scale the inputs of a matrix too.
"""
MXFP4_GROUP = 32
"""The inputs that share a scale in MXFP4, see `mxfp4`."""
_MEASURED = re.compile(
    r"\.((input|output|activation|q|k|v)_scale|(input|output)_zero_point|input_global_scale"
    r"|[kv]_proj\.[kv]_bias)$"
)
"""The names of activation scales that were measured beforehand.

They are not used: each row has its own scale here, and caches are not quantized by them.
"""

# --- config.json ----------------------------------------------------------------------------------


class _Need:
    """Checks fields of a ``quantization_config``; invalid ones raise a `CheckpointError`.

    ``source`` is the file that it is in, and ``root`` its name there.
    """

    def __init__(self, source: str, root: str = "quantization_config") -> None:
        self._source, self._root = source, root

    def __call__(self, condition: bool, field: str, value: Any, expected: str) -> None:
        if not condition:
            name = f"{self._root}.{field}" if field else self._root
            raise CheckpointError(
                f"{self._source}: {name}={show(value)}: must be {expected}: {ADVICE}"
            )

    def one_of(self, field: str, value: Any, *choices: Any) -> None:
        """Check that ``value`` is one of ``choices``, of the same type: 8.0 is not 8."""
        fits = any(type(value) is type(choice) and value == choice for choice in choices)
        self(fits, field, value, " or ".join(str(choice) for choice in choices))


def check_config(raw: Any, source: str) -> None:
    """Refuse, with a `CheckpointError`, a ``quantization_config`` that is not supported.

    ``source`` is its file.
    """
    if raw is None:
        return
    need = _Need(source)
    need(isinstance(raw, dict), "", raw, "an object, or left out")
    method = method_of(raw)
    need(method in _READ, "quant_method", method, f"one of {', '.join(_READ)}")
    if method == "fp8":
        need.one_of("fmt", raw.get("fmt", "e4m3"), "e4m3")
        block = raw.get("weight_block_size")
        need(
            block in (None, [BLOCK, BLOCK]),
            "weight_block_size",
            block,
            f"[{BLOCK}, {BLOCK}], or left out",
        )
    if method in ("awq", "gptq"):
        size = raw.get("group_size", 128)
        need(
            type(size) is int and (size == -1 or size >= 1),
            "group_size",
            size,
            "a whole number from 1, or -1",
        )
        need.one_of(
            "bits",
            raw.get("bits", 4 if method == "awq" else None),
            *((4,) if method == "awq" else (4, 8)),
        )
    if method == "awq":
        version = raw.get("version") or raw.get("format") or "gemm"
        need(str(version).lower() == "gemm", "version", version, "gemm")
        need(raw.get("backend") != "llm-awq", "backend", raw.get("backend"), "another than llm-awq")
        need.one_of("zero_point", raw.get("zero_point", True), True)
    if method == "gptq":
        need.one_of("checkpoint_format", _gptq_format(raw), "gptq", "gptq_v2")
        need.one_of("pack_dtype", raw.get("pack_dtype", "int32"), "int32")
        # Exceptions: a name with "-" is a matrix that stays in floats.
        special = raw.get("dynamic") or {}
        is_alike = isinstance(special, dict) and all(str(name).startswith("-") for name in special)
        need(is_alike, "dynamic", special, "left out, or say only which matrices stay floats")
    if method == "compressed-tensors":
        _check_compressed(raw, need)
    if method == "modelopt":
        _check_modelopt(raw, need)


def of_modelopt_file(content: JsonObject, source: str, beside: Any = None) -> JsonObject:
    """Return what an hf_quant_config.json says, as a ``quantization_config``.

    Its ``quant_algo`` is None if only the KV cache is quantized, or nothing.

    Args:
        content: the object in the file.
        source: the path of the file, for errors.
        beside: the ``quantization_config`` of config.json, which has been checked, or None. If it
            is ModelOpt's too, the two must name the same algorithm; if not, the file must name
            none.

    Raises:
        CheckpointError: The file asks for something that is not supported, or contradicts
            ``beside``.

    Examples:
        >>> from specjax.models.quantization.published import of_modelopt_file
        >>> of_modelopt_file({"quantization": {"quant_algo": "FP8"}}, "hf_quant_config.json")
        {'quant_algo': 'FP8', 'quant_method': 'modelopt'}
    """
    need, raw = _Need(source, "quantization"), content.get("quantization")
    need(isinstance(raw, dict), "", raw, "an object")
    assert isinstance(raw, dict)
    raw = {"quant_algo": None, **raw, "quant_method": "modelopt"}
    if "exclude_modules" in raw:
        raw["ignore"] = raw.pop("exclude_modules")
    algorithm = raw["quant_algo"]
    if beside is not None and method_of(beside) != "modelopt":
        method = show(method_of(beside))
        expected = f"left out: config.json beside it says quant_method={method}"
        need(algorithm is None, "quant_algo", algorithm, expected)
    _check_modelopt(raw, need, ignored="exclude_modules")
    if beside is not None and method_of(beside) == "modelopt":
        expected = beside.get("quant_algo")
        need(
            algorithm == expected,
            "quant_algo",
            algorithm,
            f"{expected or 'left out'}, as in config.json beside it",
        )
    return raw


def method_of(raw: Fields) -> Any:
    """Return the name of the quantization method in a ``quantization_config``."""
    return raw.get("quant_method", raw.get("method"))  # GPTQModel writes "method"


def stated_forms(raw: Fields) -> Callable[[str], Form | None]:
    """Return the function from a matrix's name to the form that a ``quantization_config`` says.

    The tensors themselves say it exactly: they may have an order, or stay in floats although the
    config does not say so. The form of a matrix that stays in floats is None.

    Args:
        raw: the ``quantization_config``, which has been checked; empty if there is none.

    Examples:
        >>> from specjax.models.quantization.published import stated_forms
        >>> stated = stated_forms({"quant_method": "awq", "bits": 4, "group_size": 128})
        >>> stated("model.layers.0.mlp.up_proj.weight")
        Form(kind='int4', group=128, has_zeros=True, is_ordered=False, activations=16)
        >>> stated("lm_head.weight") is None
        True
    """
    if not raw:
        return lambda name: None
    method = method_of(raw)
    # ModelOpt's names may have "language_model." where those of the tensors do not, and vice versa.
    adapted = _without_images if method == "modelopt" else str
    left_out = raw.get("ignore") or raw.get("modules_to_not_convert") or []
    ignored = ByModule((adapted(pattern), True) for pattern in left_out)
    form_of = {
        "modelopt": _stated_by_modelopt,
        "compressed-tensors": _stated_in_groups,
        "mxfp4": _stated_by_mxfp4,
    }.get(method, _stated_alike)(raw)

    def stated(name: str) -> Form | None:
        module = adapted(name.removesuffix(".weight"))
        return None if ignored.get(module) else form_of(module)

    return stated


class ByModule:
    """Values for the modules that names and patterns of a ``quantization_config`` are for.

    A name is for the module and all modules in it. Checkpoints name tens of thousands of modules,
    so they are looked up by name; only patterns are tried one by one. If several are for a module,
    the longest name comes first, and patterns come last.
    """

    def __init__(self, values: Iterable[tuple[str, Any]]) -> None:
        self.names: dict[str, Any] = {}
        self.patterns: dict[str, Any] = {}
        for name, value in values:
            is_pattern = name.startswith("re:") or "*" in name
            (self.patterns if is_pattern else self.names).setdefault(name, value)

    def get(self, module: str) -> Any:
        """Return the value for a module; None if there is none."""
        name = module
        while name:
            if name in self.names:
                return self.names[name]
            name = name.rpartition(".")[0]
        matching = (value for name, value in self.patterns.items() if _matches(name, module))
        return next(matching, None)


def _matches(pattern: str, module: str) -> bool:
    """Return whether a pattern of a ``quantization_config`` is for a module."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    return fnmatchcase(module, pattern)  # ModelOpt's patterns


def _stated_by_mxfp4(raw: Fields) -> Callable[[str], Form | None]:
    return lambda module: Form("int8", MXFP4_GROUP) if ".experts." in module else None


def _stated_alike(raw: Fields) -> Callable[[str], Form | None]:
    """Return the forms of a method with the same form for all matrices of the layers."""
    if method_of(raw) == "fp8":
        form = Form("fp8", BLOCK if raw.get("weight_block_size") else 0)
    else:
        has_zeros = method_of(raw) == "awq" or raw.get("sym", True) is not True
        kind = "int4" if raw.get("bits", 4) == 4 else "int8"
        form = Form(kind, max(raw.get("group_size", 128), 0), has_zeros)
    return lambda module: None if module.endswith((*EMBEDDINGS, "lm_head")) else form


def _class_of(module: str) -> str:
    """Return the class of PyTorch by which compressed-tensors may target a module."""
    return "Embedding" if module.endswith(EMBEDDINGS) else "Linear"


class _Groups:
    """The groups of compressed-tensors' ``config_groups``, looked up by module.

    As in compressed-tensors, a name takes precedence over a pattern, and a pattern over a class of
    layers; the first group that is for a module counts.
    """

    def __init__(self, raw: Fields) -> None:
        self.groups: list[Fields] = list((raw.get("config_groups") or {}).values())
        self.by_target: dict[str, Fields] = {}
        for group in self.groups:
            for target in group["targets"]:
                self.by_target.setdefault(target, group)
        self.patterns = [target for target in self.by_target if target.startswith("re:")]

    def group_of(self, module: str) -> Fields | None:
        """Return the group that names a module; None if none does."""
        pattern = next((pattern for pattern in self.patterns if _matches(pattern, module)), None)
        for target in (module, pattern, _class_of(module)):
            if target in self.by_target:
                return self.by_target[target]
        return None


def _stated_in_groups(raw: Fields) -> Callable[[str], Form | None]:
    groups = _Groups(raw)

    def stated(module: str) -> Form | None:
        group = groups.group_of(module)
        return None if group is None else _form_of_group(group)

    return stated


def _form_of_group(group: Fields) -> Form:
    """Return the form of a group of compressed-tensors."""
    weights = group["weights"]
    if weights.get("type") == "float" and weights.get("num_bits", 8) == 4:
        return Form("int8", nvfp4.BLOCK)
    if weights.get("type") == "float":
        return Form("fp8", BLOCK if _strategy(weights) == "block" else 0)
    return Form(
        "int4" if weights.get("num_bits", 8) == 4 else "int8",
        _size_of_groups(weights),
        weights.get("symmetric", True) is not True,
        activations=_activations(group),
    )


def _check_modelopt(raw: Fields, need: _Need, ignored: str = "ignore") -> None:
    """Check ModelOpt's fields; ``ignored`` is the name of those that stay floats.

    Without an algorithm no weights are quantized, at most the KV cache.
    """
    algorithm = raw.get("quant_algo")
    if algorithm is not None:
        need.one_of("quant_algo", algorithm, *_ALGORITHMS, _MIXED)
    _check_size(raw, algorithm, need, "group_size")
    patterns = raw.get("ignore") or []
    need(
        isinstance(patterns, list) and all(type(pattern) is str for pattern in patterns),
        ignored,
        patterns,
        "a list of names and patterns, or left out",
    )
    layers = raw.get("quantized_layers")
    need(
        isinstance(layers, dict) and bool(layers) if algorithm == _MIXED else not layers,
        "quantized_layers",
        layers,
        "an object with a layer or more" if algorithm == _MIXED else "left out",
    )
    for name, layer in (layers or {}).items():
        of = f"quantized_layers[{show(name)}]"
        need(isinstance(layer, dict), of, layer, "an object")
        need.one_of(f"{of}.quant_algo", layer.get("quant_algo"), *_ALGORITHMS)
        _check_size(layer, layer["quant_algo"], need, f"{of}.group_size")


def _check_size(raw: Fields, algorithm: Any, need: _Need, field: str) -> None:
    """Check the size of NVFP4's groups, which may be left out."""
    if _ALGORITHMS.get(algorithm) == "NVFP4" and raw.get("group_size") is not None:
        need.one_of(field, raw["group_size"], nvfp4.BLOCK)


def _stated_by_modelopt(raw: Fields) -> Callable[[str], Form | None]:
    """Return the forms of modules' matrices, under any of the names of models with images."""
    algorithm = raw.get("quant_algo")  # None: no weights are quantized
    layers = raw["quantized_layers"] if algorithm == _MIXED else {}
    algorithms = ByModule(
        (_without_images(name), layer["quant_algo"]) for name, layer in layers.items()
    )

    def stated(module: str) -> Form | None:
        if algorithm == _MIXED:
            applied = algorithms.get(module)
        else:
            applied = None if module.endswith(EMBEDDINGS) else algorithm
        if applied is None:
            return None
        return Form("int8", nvfp4.BLOCK) if _ALGORITHMS[applied] == "NVFP4" else Form("fp8")

    return stated


def _without_images(name: str) -> str:
    """Return a name or pattern of a model with images as one of its text model."""
    return name.replace("language_model.", "")


def _gptq_format(raw: Fields) -> Any:
    return raw.get("checkpoint_format", raw.get("format", "gptq"))


def _check_compressed(raw: Fields, need: _Need) -> None:
    sparsity, transform = raw.get("sparsity_config") or {}, raw.get("transform_config") or {}
    is_dense = isinstance(sparsity, dict) and sparsity.get("format", "dense") == "dense"
    need(is_dense, "sparsity_config", sparsity, "dense, or left out")
    need(
        isinstance(transform, dict) and not transform.get("config_groups"),
        "transform_config",
        transform,
        "left out",
    )
    groups = raw.get("config_groups")
    need(
        isinstance(groups, dict) and bool(groups),
        "config_groups",
        groups,
        "an object with a group or more",
    )
    assert isinstance(groups, dict)
    for name, group in groups.items():
        of = f"config_groups.{name}" if str(name).isidentifier() else "config_groups[...]"
        need(isinstance(group, dict), of, group, "an object")
        layout = group.get("format") or raw.get("format")
        need(layout in _FORMATS, f"{of}.format", layout, f"one of {', '.join(_FORMATS)}")
        targets = group.get("targets")
        need(
            isinstance(targets, list) and all(map(_is_target, targets)),
            f"{of}.targets",
            targets,
            "a list of names and patterns",
        )
        if layout == _NVFP4:
            _check_nvfp4(group, need, of)
        else:
            _check_group(group, need, of, layout == "pack-quantized")


def _check_group(group: Fields, need: _Need, of: str, is_packed: bool) -> None:
    weights, inputs = group.get("weights"), group.get("input_activations") or {}
    need(isinstance(weights, dict), f"{of}.weights", weights, "an object")
    assert isinstance(weights, dict)
    need.one_of(
        f"{of}.weights.type",
        weights.get("type", "int"),
        *(("int",) if is_packed else ("int", "float")),
    )
    need.one_of(
        f"{of}.weights.num_bits", weights.get("num_bits", 8), *((4, 8) if is_packed else (8,))
    )
    size = weights.get("group_size")
    need(
        size is None or (type(size) is int and (size == -1 or size >= 1)),
        f"{of}.weights.group_size",
        size,
        "a number from 1",
    )
    strategy = _strategy(weights)
    is_float = weights.get("type") == "float"
    if is_packed:
        strategies = ("channel", "group")
    else:
        strategies = ("tensor", "channel", "block" if is_float else "group")
    need.one_of(f"{of}.weights.strategy", strategy, *strategies)
    need(
        strategy != "group" or type(size) is int,
        f"{of}.weights.group_size",
        size,
        "a number from 1",
    )
    if strategy == "block":
        block = weights.get("block_structure")
        need(
            block in ([BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"),
            f"{of}.weights.block_structure",
            block,
            f"[{BLOCK}, {BLOCK}]",
        )
    need(isinstance(inputs, dict), f"{of}.input_activations", inputs, "an object, or left out")
    need.one_of(f"{of}.input_activations.num_bits", inputs.get("num_bits", 8), 8)


def _check_nvfp4(group: Fields, need: _Need, of: str) -> None:
    weights = group.get("weights")
    need(isinstance(weights, dict), f"{of}.weights", weights, "an object")
    assert isinstance(weights, dict)
    for field, value in (
        ("type", "float"),
        ("num_bits", 4),
        ("group_size", nvfp4.BLOCK),
        ("strategy", "tensor_group"),
        ("symmetric", True),
    ):
        need.one_of(f"{of}.weights.{field}", weights.get(field, value), value)


def _is_target(target: Any) -> bool:
    try:
        return isinstance(target, str) and bool(
            re.compile(target.removeprefix("re:")) if target.startswith("re:") else target
        )
    except (re.error, OverflowError, RecursionError):
        return False


def _strategy(weights: Fields) -> Any:
    """Return what shares a scale.

    If the field is absent, compressed-tensors derives it from the group size.
    """
    size = weights.get("group_size")
    return weights.get("strategy") or (
        "tensor" if size is None else "channel" if size == -1 else "group"
    )


# --- tensors --------------------------------------------------------------------------------------


def matrices(
    tensors: Mapping[str, Any], raw: Fields, directory: Path
) -> tuple[dict[str, StoredMatrix], set[str]]:
    """Return the quantized matrices of a checkpoint, except those of MXFP4.

    Args:
        tensors: all tensors of the checkpoint, by name.
        raw: the ``quantization_config``, which has been checked; empty if there is none.
        directory: the checkpoint's directory, for errors.

    Returns:
        The matrices by name; and the names of the tensors that they consist of, and of activation
        scales, which are ignored.

    Raises:
        CheckpointError: A part of a matrix is missing, or does not fit the others in shape or type.
    """
    matrix_by_name: dict[str, StoredMatrix] = {}
    used = {name for name in tensors if raw and _MEASURED.search(name)}
    parts = _Parts(tensors, raw, directory)
    is_compressed = method_of(raw) == "compressed-tensors"
    for name, tensor in tensors.items():
        kind, is_matrix = tensor.get_dtype(), len(tensor.get_shape()) == 2
        if name.endswith(".weight_packed") and kind == "U8":
            base, matrix, names = _of_packed_nvfp4(parts, name)
        elif name.endswith(".weight_packed"):
            base, matrix, names = _of_packed(parts, name)
        elif name.endswith(".qweight"):
            base, matrix, names = _of_qweight(parts, name)
        elif kind == "U8" and name.endswith(".weight") and parts.is_modelopt:
            base, matrix, names = _of_nvfp4(parts, name, name, "_scale_2")
        elif kind in ("U8", "F8_E4M3") and f"{name}_weight_scale" in tensors and parts.is_modelopt:
            base, matrix, names = _of_experts(parts, name)
        elif kind == "F8_E4M3" and is_matrix and not name.endswith("_scale"):
            base, matrix, names = _of_float8(parts, name)
        elif kind == "I8" and is_matrix and is_compressed and name.endswith(".weight"):
            base, matrix, names = _of_int8(parts, name)
        else:
            continue
        if base in tensors and base not in names:
            raise CheckpointError(
                f"{directory}: it holds both {show(base)} and {show(name)}: download the checkpoint"
                " again"
            )
        if parts.is_modelopt and matrix.form.kind == "fp8":
            matrix.layout = "FP8"
        matrix_by_name[base] = matrix
        used |= names
    return matrix_by_name, used


def conversions(
    tensors: Mapping[str, Any], declared: Any, dtype: np.dtype, source: str
) -> str | None:
    """Return the line that says what NVFP4 and ModelOpt's FP8 become; None without them.

    Args:
        tensors: the tensors of a checkpoint, with its `matrices`.
        declared: the declarations of the parameters that are read.
        dtype: the type of the parameters that are not quantized.
        source: the file that the line is about.
    """
    form_by_name = {
        name.removesuffix(":values"): matrix.form
        for matrix in matrices_in(declared)
        for name in matrix.values.stored_names
    }
    names = {name for param in jax.tree.leaves(declared) for name in param.stored_names}
    counts: Counter[tuple[str, str]] = Counter()
    for name in names.intersection(tensors) | form_by_name.keys():
        layout = getattr(tensors.get(name), "layout", "")
        form = form_by_name.get(name)
        counts[layout, dtype.name if form is None else _in_words(form)] += bool(layout)
    parts = [
        f"{layout} as {result} ({count:,} {'tensor' if count == 1 else 'tensors'})"
        for (layout, result), count in sorted(counts.items())
        if count
    ]
    if not parts:
        return None
    return (
        f"{source}: it is read with {', '.join(parts)}; activations are not quantized, and stored"
        " scales for them and for the KV cache are not used"
    )


def _in_words(form: Form) -> str:
    """Return what a form is: "int8 in groups of 16"."""
    return f"{form.kind} in groups of {form.group}" if form.group else form.kind


Found = tuple[str, StoredMatrix, set[str]]
"""The name of a matrix, its reader, and the names of the tensors that it consists of."""


class _Parts:
    """The tensors of a checkpoint, which are checked when they are looked up."""

    def __init__(self, tensors: Mapping[str, Any], raw: Fields, directory: Path) -> None:
        self.tensors, self.raw, self.directory = tensors, raw, directory
        self.is_modelopt = method_of(raw) == "modelopt" and raw.get("quant_algo") is not None
        self.groups = _Groups(raw)

    def place(self, *names: str) -> Path:
        """Return the file of the first of ``names`` that is there; the directory if unknown."""
        for name in names:
            if (path := getattr(self.tensors.get(name), "path", None)) is not None:
                return path
        return self.directory

    def get(
        self, name: str, whole: str, *shapes: tuple[int, ...], kinds: tuple[str, ...] = _FLOATS
    ) -> Any:
        """Return the tensor ``name`` of the matrix ``whole``, which must have one of ``shapes``."""
        tensor = self.tensors.get(name)
        if tensor is None:
            place = self.place(whole, f"{whole}_packed")
            raise CheckpointError(
                f"{place}: {show(whole)} is quantized, and {show(name)}, which goes with it, is"
                " missing: download the checkpoint again"
            )
        shape, kind = tuple(tensor.get_shape()), tensor.get_dtype()
        if shape not in shapes or kind not in kinds:
            expected = " or ".join(map(str, dict.fromkeys(shapes)))
            raise CheckpointError(
                f"{self.place(name)}: {show(name)} is {kind} of shape {shape}: to go with"
                f" {show(whole)} it must be {' or '.join(kinds)} of shape {expected}: download the"
                " checkpoint again"
            )
        return tensor

    def matrix(self, name: str, whole: str, kind: str) -> tuple[int, int]:
        """Return the shape of the tensor ``name``, which must have two axes."""
        shape = tuple(self.tensors[name].get_shape())
        if len(shape) != 2 or 0 in shape:
            self.refuse(
                f"{show(name)} has shape {shape}: {show(whole)} is quantized, and must be a matrix"
            )
        self.get(name, whole, shape, kinds=(kind,))
        return shape[0], shape[1]

    def whole(self, name: str) -> np.ndarray:
        """Return all of a tensor."""
        tensor = self.tensors[name]
        return np.asarray(tensor[(slice(None),) * len(tensor.get_shape())])

    def scales(self, name: str, whole: str, *shapes: tuple[int, ...], **options: Any) -> Scales:
        """Return the scales ``name`` of the matrix ``whole``: finite and above 0 when read.

        A single scale is read at once.
        """
        scales = Scales(self.get(name, whole, *shapes, **options), name, self.place(name))
        if np.prod(scales.get_shape()) == 1:
            scales.whole()
        return scales

    def group_count(self, size: int, inputs: int, whole: str) -> int:
        """Return the number of groups of ``size`` among the inputs."""
        if inputs % size:
            self.refuse(
                f"quantization_config says groups of {size}, which do not divide the {inputs}"
                f" inputs of {show(whole)}"
            )
        return inputs // size

    def refuse(self, what: str) -> NoReturn:
        """Raise a `CheckpointError`."""
        raise CheckpointError(f"{self.directory}: {what}: {ADVICE}")

    def group_of(self, matrix: str) -> Fields:
        """Return the group of compressed-tensors' ``config_groups`` that a matrix belongs to.

        A single group is for every matrix that is stored quantized.
        """
        group = self.groups.group_of(matrix.removesuffix(".weight"))
        if group is None and len(self.groups.groups) == 1:
            return self.groups.groups[0]
        if group is None:
            self.refuse(
                f"{show(matrix)} is quantized, and config.json does not say how: none of its"
                " config_groups is for it"
            )
        return group


def _activations(group: Fields) -> int:
    """Return to how many bits the inputs of an integer matrix are rounded."""
    inputs = group.get("input_activations")
    return 8 if inputs and inputs.get("type", "int") == "int" else 16


def _size_of_groups(weights: Fields) -> int:
    """Return the group size; 0 means one group of all inputs."""
    return weights["group_size"] if _strategy(weights) == "group" else 0


def _scale_shapes(
    strategy: str, outputs: int, groups: int, blocks: tuple[int, int]
) -> tuple[tuple[int, ...], ...]:
    return {
        "tensor": ((1,), (), (1, 1)),
        "channel": ((outputs, 1), (outputs,)),
        "group": ((outputs, groups),),
        "block": (blocks,),
    }[strategy]


def _of_float8(parts: _Parts, name: str) -> Found:
    outputs, inputs = parts.matrix(name, name, "F8_E4M3")
    blocks = (-(-outputs // BLOCK), -(-inputs // BLOCK))
    if method_of(parts.raw) == "compressed-tensors":
        strategies, scale = (_strategy(parts.group_of(name)["weights"]),), f"{name}_scale"
    else:
        scale = f"{name}_scale" if f"{name}_scale" in parts.tensors else f"{name}_scale_inv"
        block = parts.raw.get("weight_block_size")
        if block:
            strategies = ("block",)
        elif parts.raw:
            strategies = ("tensor", "channel")
        else:
            strategies = ("block", "tensor", "channel")
    shapes = {
        shape: strategy
        for strategy in strategies
        for shape in _scale_shapes(strategy, outputs, 1, blocks)
    }
    scales = (parts.scales if parts.is_modelopt else parts.get)(scale, name, *shapes)
    if shapes[tuple(scales.get_shape())] != "block":
        return name, PlainMatrix(parts.tensors[name], scales, Form("fp8")), {name, scale}
    if blocks[1] > 1 and inputs % BLOCK:
        return name, Ragged(parts.tensors[name], scales), {name, scale}
    return (
        name,
        PlainMatrix(parts.tensors[name], scales, Form("fp8", BLOCK if blocks[1] > 1 else 0), BLOCK),
        {name, scale},
    )


def _of_nvfp4(parts: _Parts, name: str, base: str, second: str, divides: bool = False) -> Found:
    """Return the matrix ``base``, whose bytes are ``name``; ``second`` ends its scale's name."""
    outputs, size = parts.matrix(name, base, "U8")
    groups = parts.group_count(nvfp4.BLOCK, 2 * size, base)
    scales = parts.scales(f"{base}_scale", base, (outputs, groups), kinds=(KIND,))
    factor = parts.scales(f"{base}{second}", base, (), (1,)).whole().item()
    matrix = Nvfp4Matrix(parts.tensors[name], scales, factor, divides)
    return base, matrix, {name, f"{base}_scale", f"{base}{second}"}


def _of_packed_nvfp4(parts: _Parts, name: str) -> Found:
    """Return a matrix of compressed-tensors in NVFP4."""
    base = name.removesuffix("_packed")
    is_stated = (
        method_of(parts.raw) == "compressed-tensors"
        and (parts.group_of(base).get("format") or parts.raw.get("format")) == _NVFP4
    )
    if not is_stated:
        parts.refuse(f"{show(name)} is in bytes, and config.json does not say format {_NVFP4}")
    return _of_nvfp4(parts, name, base, "_global_scale", divides=True)


def _of_experts(parts: _Parts, name: str) -> Found:
    """Return a tensor ``[experts, in, out]`` of ModelOpt, in NVFP4 or FP8."""
    tensor = parts.tensors[name]
    shape = tuple(tensor.get_shape())
    if len(shape) != 3 or 0 in shape:
        parts.refuse(f"{show(name)} has shape {shape}: it must be of experts, with three axes")
    experts, size, outputs = shape
    scale, second = f"{name}_weight_scale", f"{name}_weight_scale_2"
    of_each = ((experts,), (), (1,), (experts, 1, 1))
    names = {name, scale, second, f"{name}_input_scale"} & parts.tensors.keys()
    if tensor.get_dtype() == KIND:
        scales = parts.scales(scale, name, *of_each, (experts, outputs))
        return name, PlainExperts(tensor, scales), names - {second}
    groups = parts.group_count(nvfp4.BLOCK, 2 * size, name)
    scales = parts.scales(scale, name, (experts, groups, outputs), kinds=(KIND,))
    factors = parts.scales(second, name, *of_each).whole().reshape(-1)
    return name, Nvfp4Experts(tensor, scales, factors), names


def _of_int8(parts: _Parts, name: str) -> Found:
    outputs, inputs = parts.matrix(name, name, "I8")
    group = parts.group_of(name)
    size = _size_of_groups(group["weights"])
    groups = parts.group_count(size or inputs, inputs, name)
    scale, zero = f"{name}_scale", f"{name}_zero_point"
    scales = parts.get(
        scale, name, *_scale_shapes(_strategy(group["weights"]), outputs, groups, (0, 0))
    )
    if zero in parts.tensors or group["weights"].get("symmetric", True) is not True:
        parts.refuse(
            f"{show(zero)}: 8-bit numbers that are not packed must be symmetric, without zero"
            " points"
        )
    form = Form("int8", 0 if groups == 1 else size, activations=_activations(group))
    return name, PlainMatrix(parts.tensors[name], scales, form), {name, scale}


def _of_packed(parts: _Parts, name: str) -> Found:
    base = name.removesuffix("_packed")
    outputs, words = parts.matrix(name, base, "I32")
    if method_of(parts.raw) != "compressed-tensors":
        parts.refuse(
            f"{show(name)} is packed, and config.json does not say how: quant_method must be"
            " compressed-tensors"
        )
    group = parts.group_of(base)
    weights = group["weights"]
    bits = weights.get("num_bits", 8)
    parts.get(f"{base}_shape", base, (2,), kinds=("I64", "I32"))
    stored_shape = [int(size) for size in parts.whole(f"{base}_shape")]
    inputs = stored_shape[1]
    if stored_shape[0] != outputs or inputs < 1 or -(-inputs * bits // 32) != words:
        raise CheckpointError(
            f"{parts.directory}: {show(f'{base}_shape')} is {stored_shape}, but {show(name)}, of"
            f" shape {(outputs, words)}, is no matrix of that shape in numbers of {bits} bits:"
            " download the checkpoint again"
        )
    groups = parts.group_count(_size_of_groups(weights) or inputs, inputs, base)
    scales = parts.get(f"{base}_scale", base, (outputs, groups))
    zeros = order = None
    if f"{base}_zero_point" in parts.tensors or weights.get("symmetric", True) is not True:
        zeros = parts.get(
            f"{base}_zero_point", base, (-(-outputs * bits // 32), groups), kinds=("I32",)
        )
    if f"{base}_g_idx" in parts.tensors:
        order = _order(parts, f"{base}_g_idx", base, inputs, groups)
    size = 0 if groups == 1 else inputs // groups
    form = Form(
        "int4" if bits == 4 else "int8",
        size,
        zeros is not None,
        order is not None,
        _activations(group),
    )
    names = {name, *(f"{base}_{part}" for part in ("shape", "scale", "zero_point", "g_idx"))}
    return (
        base,
        PackedMatrix(parts.tensors[name], scales, zeros, order, form, inputs),
        names & parts.tensors.keys(),
    )


def _order(parts: _Parts, name: str, whole: str, inputs: int, groups: int) -> Any:
    """Return the tensor with the group of each input; None if groups are of contiguous inputs."""
    tensor = parts.get(name, whole, (inputs,), kinds=("I32", "I64"))
    of_input = parts.whole(name)
    if (of_input == -1).all():  # not set: inputs were not reordered
        return None
    in_range = of_input.min() >= 0 and of_input.max() < groups
    if not in_range or (np.bincount(of_input, minlength=groups) != inputs // groups).any():
        raise CheckpointError(
            f"{parts.directory}: {show(name)}: its {groups} groups must have {inputs // groups}"
            " inputs each: download the checkpoint again"
        )
    return None if is_neighbourly(of_input, inputs // groups) else tensor


def _of_qweight(parts: _Parts, name: str) -> Found:
    stem, raw = name.removesuffix("qweight"), parts.raw
    base, method = f"{stem}weight", method_of(raw)
    if method not in ("awq", "gptq"):
        parts.refuse(
            f"{show(name)} is packed, and config.json does not say how: quant_method must be awq or"
            " gptq"
        )
    bits, size = raw.get("bits", 4), raw.get("group_size", 128)
    rows, columns = parts.matrix(name, base, "I32")
    inputs, outputs = (rows, columns * 8) if method == "awq" else (rows * 32 // bits, columns)
    groups = parts.group_count(inputs if size == -1 else size, inputs, base)
    scales = parts.get(f"{stem}scales", base, (groups, outputs))
    zeros = parts.get(f"{stem}qzeros", base, (groups, -(-outputs * bits // 32)), kinds=("I32",))
    names = {
        name,
        *(f"{stem}{part}" for part in ("scales", "qzeros", "g_idx")),
    } & parts.tensors.keys()
    form = Form("int4" if bits == 4 else "int8", 0 if groups == 1 else size, has_zeros=True)
    if method == "awq":
        return base, Awq(parts.tensors[name], scales, zeros, form), names - {f"{stem}g_idx"}
    if f"{stem}g_idx" in parts.tensors:
        order = _order(parts, f"{stem}g_idx", base, inputs, groups)
    else:
        order = None
    add, form = 1 if _gptq_format(raw) == "gptq" else 0, replace(form, is_ordered=order is not None)
    return base, Gptq(parts.tensors[name], scales, zeros, order, form, add, raw.get("sym")), names


def idle_biases(tensors: Mapping[str, Any], declared: Collection[str]) -> list[str]:
    """Return the names of zero biases beside GPTQ's matrices that are not declared.

    AutoGPTQ wrote a bias for every matrix.

    Args:
        tensors: the tensors of a checkpoint, with its `matrices`.
        declared: the names of the model's tensors.
    """
    beside = {
        f"{name.removesuffix('weight')}bias"
        for name, tensor in tensors.items()
        if isinstance(tensor, Gptq)
    }
    names = [name for name in beside - set(declared) if name in tensors]
    return [
        name
        for name in names
        if not np.any(tensors[name][(slice(None),) * len(tensors[name].get_shape())])
    ]
