"""Readers of quantized matrices in checkpoints: one class for each layout.

Each reader has two views: the matrix in floats, as if the checkpoint were not quantized; and the
parts of a `QuantizedMatrix`, values, scales, zeros and order, in their shapes.
"""

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any

import numpy as np

from specjax.models.quantization.packing import AWQ_NIBBLES, unpacked
from specjax.models.quantization.weights import BLOCK, Form, quantize_matrix

ROLES = ("values", "scales", "zeros", "order")
_STORED_TYPES = {"int8": "I8", "int4": "I8", "fp8": "F8_E4M3"}


class Parts(ABC):
    """A source of the parts of a `QuantizedMatrix`.

    Attributes:
        form: the form of the matrix.
    """

    form: Form

    @abstractmethod
    def shape_of(self, role: str) -> list[int]:
        """Return the shape of a part."""

    @abstractmethod
    def read(self, role: str, part: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of a part."""

    def role(self, role: str) -> "Role":
        """Return a view of one part."""
        return Role(self, role)


class Role:
    """One part of a `QuantizedMatrix`, whose slices are read from a checkpoint."""

    def __init__(self, parts: Parts, role: str) -> None:
        self._parts, self._role = parts, role

    def get_shape(self) -> list[int]:
        """Return the shape."""
        return self._parts.shape_of(self._role)

    def get_dtype(self) -> str:
        """Return the type as a header names it."""
        kinds = {
            "values": _STORED_TYPES[self._parts.form.kind],
            "scales": "F32",
            "zeros": "I8",
            "order": "I32",
        }
        return kinds[self._role]

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        return self._parts.read(self._role, part)


class StoredMatrix(Parts):
    """A matrix, or a stack of them, that is quantized in a checkpoint.

    Like any tensor it has a shape, a type and slices: those of the matrix in floats.

    Attributes:
        is_kept: whether it can stay quantized as it is; otherwise it is read as floats.
        layout: the name of the layout in the file, if it is said when a model is loaded.
    """

    is_kept = True
    layout = ""

    @abstractmethod
    def get_shape(self) -> list[int]:
        """Return the shape of the matrix in floats, in the layout of the checkpoint."""

    def get_dtype(self) -> str:
        """Return the type as a header names it."""
        return "F32"

    @abstractmethod
    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of the matrix in floats."""

    def gives(self, form: Form) -> bool:
        """Return True if its parts are also those of a matrix of ``form``.

        That form may add zeros and an order.
        """
        stored = self.form
        has_more = form.has_zeros >= stored.has_zeros and form.is_ordered >= stored.is_ordered
        return self.is_kept and has_more and (stored.kind, stored.group) == (form.kind, form.group)


class OneMatrix(StoredMatrix):
    """A matrix of numbers ``[out, in]``, in any layout.

    Args:
        form: the form of the matrix.
        shape: ``(out, in)``.
        of_input: the group of each input, if the inputs of a group are not contiguous; None: they
            are.
    """

    def __init__(self, form: Form, shape: tuple[int, int], of_input: Any = None) -> None:
        self.form, self.shape, self._of_input = form, shape, of_input
        self.size = form.group or shape[1]
        self.groups = shape[1] // self.size

    @abstractmethod
    def numbers(self, outputs: slice, inputs: slice) -> np.ndarray:
        """Return the values ``[outputs, inputs]``, int8 or float8_e4m3fn, in the inputs' order."""

    @abstractmethod
    def scales(self, outputs: slice) -> np.ndarray:
        """Return the scales ``[outputs, groups]`` float32."""

    def zeros(self, outputs: slice) -> np.ndarray:
        """Return the zero points ``[outputs, groups]`` int8."""
        return np.zeros((len(range(self.shape[0])[outputs]), self.groups), np.int8)

    def order(self) -> np.ndarray:
        """Return the order ``[in]``, as in `QuantizedMatrix`."""
        if self._of_input is None:
            return np.arange(self.shape[1], dtype=np.int32)
        return np.argsort(self._group_of_inputs(), kind="stable").astype(np.int32)

    def _group_of_inputs(self) -> np.ndarray:
        if self._of_input is None:
            return np.arange(self.shape[1]) // self.size
        return np.asarray(self._of_input[(slice(None),)])

    def get_shape(self) -> list[int]:
        """Return ``[out, in]``."""
        return list(self.shape)

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        outputs, inputs = part
        weights = self.numbers(outputs, inputs).astype(np.float32)
        places = slice(None) if self.groups == 1 else self._group_of_inputs()[inputs]
        if self.form.has_zeros:
            weights -= self.zeros(outputs).astype(np.float32)[:, places]
        weights *= self.scales(outputs)[:, places]
        return weights

    def shape_of(self, role: str) -> list[int]:
        """Return the shape of a part."""
        outputs, inputs = self.shape
        of_group = [self.groups, outputs]
        return {
            "values": [*of_group, self.size],
            "scales": of_group,
            "zeros": of_group,
            "order": [inputs],
        }[role]

    def read(self, role: str, part: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of a part."""
        if role == "order":
            return self.order()[part[0]]
        groups, outputs = part[:2]
        if role == "values":
            return self._values(groups, outputs, part[2])
        return (self.scales if role == "scales" else self.zeros)(outputs)[:, groups].T

    def _values(self, groups: slice, outputs: slice, places: slice) -> np.ndarray:
        if self.groups == 1 and self._of_input is None:
            return self.numbers(outputs, places)[None][groups]
        if self._of_input is None:
            # The inputs of these groups are contiguous, and no others are read from the file.
            first, last, _ = groups.indices(self.groups)
            inputs, within = slice(first * self.size, last * self.size), slice(None)
            rows = self.numbers(outputs, inputs)
        else:
            rows, within = self.numbers(outputs, slice(None))[:, self.order()], groups
        grouped = np.moveaxis(rows.reshape(len(rows), rows.shape[1] // self.size, self.size), 1, 0)
        return grouped[within][..., places]


class PlainMatrix(OneMatrix):
    """Values of 8 bits that are not packed, ``[out, in]``.

    Args:
        values: int8 or float8_e4m3fn.
        scales: one scale for the matrix, for each output, for each group of each output, or for
            blocks of several outputs.
        form: the form of the matrix.
        block: the number of outputs that share a scale.
    """

    def __init__(self, values: Any, scales: Any, form: Form, block: int = 1) -> None:
        super().__init__(form, tuple(values.get_shape()))
        self._stored, self._scales, self._block = values, scales, block

    def numbers(self, outputs: slice, inputs: slice) -> np.ndarray:
        return self._stored[outputs, inputs]

    def scales(self, outputs: slice) -> np.ndarray:
        stored = np.asarray(
            self._scales[(slice(None),) * len(self._scales.get_shape())], np.float32
        )
        rows = np.arange(self.shape[0])[outputs] // self._block
        if stored.size == 1:  # one scale for the whole matrix
            return np.full((len(rows), self.groups), stored.item(), np.float32)
        return stored.reshape(len(stored), -1)[rows]


class Ragged(PlainMatrix):
    """FP8 with blocks that do not fill the matrix: it is read as floats only.

    Args:
        values: float8_e4m3fn ``[out, in]``.
        scales: one scale for each block.
    """

    is_kept = False

    def __init__(self, values: Any, scales: Any) -> None:
        super().__init__(values, scales, Form("fp8"), BLOCK)

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        outputs, inputs = part
        columns = np.arange(self.shape[1])[inputs] // BLOCK
        return self.numbers(outputs, inputs).astype(np.float32) * self.scales(outputs)[:, columns]


class PlainExperts(StoredMatrix):
    """FP8 matrices of all experts, one tensor ``[experts, in, out]``, as ModelOpt writes them.

    Args:
        values: float8_e4m3fn.
        scales: one scale for all, for each expert, or for each output of each expert.
    """

    def __init__(self, values: Any, scales: Any) -> None:
        self._stored, self._scales = values, scales
        self.form = Form("fp8")

    def get_shape(self) -> list[int]:
        """Return the shape, ``[experts, in, out]``."""
        return list(self._stored.get_shape())

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        experts, _, outputs = part
        return self._stored[part].astype(np.float32) * self._scales_of(experts, outputs)[:, None]

    def shape_of(self, role: str) -> list[int]:
        """Return the shape of a part."""
        experts, inputs, outputs = self.get_shape()
        return [experts, 1, outputs, *[inputs] * (role == "values")]

    def read(self, role: str, part: tuple[slice, ...]) -> np.ndarray:
        """Return a slice of a part."""
        experts, groups, outputs = part[:3]
        if role == "scales":
            return self._scales_of(experts, outputs)[:, None][:, groups]
        return self._stored[experts, part[3], outputs].swapaxes(1, 2)[:, None][:, groups]

    def _scales_of(self, experts: slice, outputs: slice) -> np.ndarray:
        """Return the scales, float32 ``[experts, outputs]``."""
        count, _, size = self.get_shape()
        scales = np.asarray(
            self._scales[(slice(None),) * len(self._scales.get_shape())], np.float32
        )
        by_output = scales.reshape(count if scales.size >= count else 1, -1)
        return np.broadcast_to(by_output, (count, size))[experts, outputs]


class _PackedFormat(OneMatrix):
    """A matrix of integers that are packed in int32 along the inputs."""

    def _words(self, inputs: slice) -> tuple[slice, slice]:
        """Return the int32 that hold some inputs, and the position of the inputs in them."""
        indices, count = range(self.shape[1])[inputs], 32 // self.form.bits
        first = indices.start // count
        within = slice(
            indices.start - first * count,
            max(indices.stop, indices.start) - first * count,
            indices.step,
        )
        return slice(first, max(-(-indices.stop // count), first)), within


class PackedMatrix(_PackedFormat):
    """compressed-tensors' ``pack-quantized``: numbers of 4 or 8 bits in int32, along the inputs.

    The smallest number is stored as 0.

    Args:
        packed: ``[out, in bits / 32]``.
        scales: ``[out, groups]``.
        zeros: ``[out bits / 32, groups]``, packed along the outputs; None: there are none.
        of_input: the group of each input, if the inputs of a group are not contiguous; None: they
            are.
        form: the form of the matrix.
        inputs: the number of inputs; the last int32 may be padded.
    """

    def __init__(
        self, packed: Any, scales: Any, zeros: Any, of_input: Any, form: Form, inputs: int
    ) -> None:
        super().__init__(form, (packed.get_shape()[0], inputs), of_input)
        self._stored, self._scales, self._zeros = packed, scales, zeros

    def numbers(self, outputs: slice, inputs: slice) -> np.ndarray:
        words, within = self._words(inputs)
        numbers = unpacked(self._stored[outputs, words], self.form.bits)
        return _signed(numbers[:, within], self.form.bits)

    def scales(self, outputs: slice) -> np.ndarray:
        return np.asarray(self._scales[outputs, slice(None)], np.float32)

    def zeros(self, outputs: slice) -> np.ndarray:
        if self._zeros is None:
            return super().zeros(outputs)
        stored = self._zeros[slice(None), slice(None)].T
        numbers = unpacked(stored, self.form.bits)[:, : self.shape[0]]
        return _signed(numbers.T[outputs], self.form.bits)


class Gptq(_PackedFormat):
    """GPTQ's layout (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel write it.

    It has numbers from 0, in int32, along the inputs.

    Args:
        packed: ``[in bits / 32, out]``.
        scales: ``[groups, out]``.
        zeros: ``[groups, out bits / 32]``, packed along the outputs; ``add`` is to be added to
            them.
        of_input: the group of each input; None: the inputs of a group are contiguous.
        form: the form of the matrix, with zeros; they are dropped if all of them are 0.
        add: 1 in the first version of the layout, 0 in the second.
        is_symmetric: whether the checkpoint says that zeros are 0; None if it does not say.
    """

    def __init__(
        self,
        packed: Any,
        scales: Any,
        zeros: Any,
        of_input: Any,
        form: Form,
        add: int,
        is_symmetric: bool | None = None,
    ) -> None:
        rows, outputs = packed.get_shape()
        super().__init__(form, (outputs, rows * 32 // form.bits), of_input)
        self._stored, self._scales, self._zeros, self._add = packed, scales, zeros, add
        if is_symmetric is False:
            return
        zero_points = self.zeros(slice(None))
        # Some files of the second version claim to be of the first.
        if is_symmetric and add and (zero_points == 1).all():
            zero_points, self._add = zero_points - 1, 0
        if not zero_points.any():
            self.form = replace(self.form, has_zeros=False)

    def numbers(self, outputs: slice, inputs: slice) -> np.ndarray:
        words, within = self._words(inputs)
        numbers = unpacked(self._stored[words, outputs].T, self.form.bits)
        return _signed(numbers[:, within], self.form.bits)

    def scales(self, outputs: slice) -> np.ndarray:
        return np.asarray(self._scales[slice(None), outputs], np.float32).T

    def zeros(self, outputs: slice) -> np.ndarray:
        bits = self.form.bits
        stored = unpacked(self._zeros[slice(None), slice(None)], bits)[:, : self.shape[0]]
        numbers = stored + np.uint8(self._add)
        numbers &= np.uint8((1 << bits) - 1)  # GPTQ's own kernels wrap around, too
        return _signed(numbers[:, outputs].T, bits)


class Awq(OneMatrix):
    """AWQ's layout (Lin et al. 2023, arXiv 2306.00978).

    It has 4-bit numbers from 0, in int32, along the outputs. The eight numbers of an int32 have an
    order of their own, `AWQ_NIBBLES`.

    Args:
        packed: ``[in, out / 8]``.
        scales: ``[groups, out]``.
        zeros: ``[groups, out / 8]``.
        form: the form of the matrix.
    """

    def __init__(self, packed: Any, scales: Any, zeros: Any, form: Form) -> None:
        super().__init__(form, (packed.get_shape()[1] * 8, packed.get_shape()[0]))
        self._stored, self._scales, self._zeros = packed, scales, zeros

    def numbers(self, outputs: slice, inputs: slice) -> np.ndarray:
        return self._unpacked(self._stored, inputs, outputs)

    def scales(self, outputs: slice) -> np.ndarray:
        return np.asarray(self._scales[slice(None), outputs], np.float32).T

    def zeros(self, outputs: slice) -> np.ndarray:
        return self._unpacked(self._zeros, slice(None), outputs)

    @staticmethod
    def _unpacked(stored: Any, rows: slice, outputs: slice) -> np.ndarray:
        indices = range(stored.get_shape()[1] * 8)[outputs]
        words = slice(indices.start // 8, max(-(-indices.stop // 8), indices.start // 8))
        numbers = unpacked(stored[rows, words], 4)
        by_word = numbers.reshape(len(numbers), numbers.shape[1] // 8, 8)
        numbers = by_word[..., AWQ_NIBBLES].reshape(numbers.shape)
        within = slice(
            indices.start - words.start * 8,
            max(indices.stop, indices.start) - words.start * 8,
            indices.step,
        )
        return _signed(numbers[:, within].T, 4)


def _signed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Convert unsigned numbers from 0 to signed int8, half of them below 0."""
    return (numbers - np.uint8(1 << (bits - 1))).view(np.int8)


class Rounded(Parts):
    """A matrix of floats that is quantized when it is read, by `quantize_matrix`.

    Args:
        floats: ``[..., out, in]``, or ``[..., in, out]`` if ``turned``.
        form: the form of the matrix.
        turned: whether the inputs are the axis before the last.
    """

    def __init__(self, floats: Any, form: Form, turned: bool) -> None:
        self._floats, self._turned, self.form = floats, turned, form
        self._scales: dict[str, np.ndarray] = {}  # the scales of parts whose values were read
        shape = tuple(floats.get_shape())
        *self._lead, self._outputs, self._inputs = (
            (*shape[:-2], shape[-1], shape[-2]) if turned else shape
        )

    def shape_of(self, role: str) -> list[int]:
        size = self.form.group or self._inputs
        return [*self._lead, self._inputs // size, self._outputs, *[size] * (role == "values")]

    def read(self, role: str, part: tuple[slice, ...]) -> np.ndarray:
        *lead, groups, outputs = part[: len(self._lead) + 2]
        key = repr((lead, outputs))
        scales = self._scales.pop(key, None) if role == "scales" else None
        if scales is None:
            place = (*lead, slice(None), outputs) if self._turned else (*lead, outputs, slice(None))
            floats = (
                self._floats[place] if self._turned else np.swapaxes(self._floats[place], -1, -2)
            )
            quantized = quantize_matrix(floats, self.form)
            if role == "values":  # the scales are read next; the values are large, and not kept
                self._scales[key] = quantized.scales
                return quantized.values[..., groups, :, part[-1]]
            scales = quantized.scales
        return scales[..., groups, :]


def is_neighbourly(of_input: np.ndarray, size: int) -> bool:
    """Return True if the inputs of each group are contiguous, ``size`` in each."""
    return bool((of_input == np.arange(len(of_input)) // size).all())
