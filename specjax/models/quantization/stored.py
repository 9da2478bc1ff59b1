"""Matrices as checkpoints have them quantized, of which parts are read: one class for each way in which they are laid out.

Each shows itself in two ways: as the matrix in floats, as if the checkpoint were not quantized; and as the parts of a
`QuantizedMatrix`, values, scales, zeros and order, in their shapes.
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
    """What the parts of a `QuantizedMatrix` are read from.

    Attributes:
        form: how it is quantized.
    """

    form: Form

    @abstractmethod
    def shape_of(self, role: str) -> list[int]:
        """That of a part."""

    @abstractmethod
    def read(self, role: str, part: tuple[slice, ...]) -> np.ndarray:
        """A slice of a part."""

    def role(self, role: str) -> "Role":
        """One of the parts."""
        return Role(self, role)


class Role:
    """One of the parts of a `QuantizedMatrix`, of which slices are read from a checkpoint."""

    def __init__(self, parts: Parts, role: str) -> None:
        self._parts, self._role = parts, role

    def get_shape(self) -> list[int]:
        """The shape."""
        return self._parts.shape_of(self._role)

    def get_dtype(self) -> str:
        """The type as a header names it."""
        kinds = {"values": _STORED_TYPES[self._parts.form.kind], "scales": "F32", "zeros": "I8", "order": "I32"}
        return kinds[self._role]

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        return self._parts.read(self._role, part)


class StoredMatrix(Parts):
    """A matrix, or a stack of them, that a checkpoint has quantized. Like any tensor, it has a shape, a type and slices: those
    of the matrix in floats.

    Attributes:
        is_kept: whether it can be held as it is; otherwise it is read as floats.
    """

    is_kept = True

    @abstractmethod
    def get_shape(self) -> list[int]:
        """The shape of the matrix in floats, as the checkpoint would have it."""

    def get_dtype(self) -> str:
        """The type as a header names it."""
        return "F32"

    @abstractmethod
    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        """A slice of the matrix in floats."""

    def gives(self, form: Form) -> bool:
        """Whether its parts are also those of a matrix of that ``form``, which may have zeros and an order beside its own."""
        own = self.form
        has_more = form.has_zeros >= own.has_zeros and form.is_ordered >= own.is_ordered
        return self.is_kept and has_more and (own.kind, own.group) == (form.kind, form.group)


class OneMatrix(StoredMatrix):
    """A matrix of numbers ``[out, in]``, by whatever they are read.

    Args:
        form: how it is quantized.
        shape: ``(out, in)``.
        of_input: the group of each input, where those of a group are no neighbours; None: they are.
    """

    def __init__(self, form: Form, shape: tuple[int, int], of_input: Any = None) -> None:
        self.form, self.shape, self._of_input = form, shape, of_input
        self.size = form.group or shape[1]
        self.groups = shape[1] // self.size

    @abstractmethod
    def numbers(self, outputs: slice, inputs: slice) -> np.ndarray:
        """``[outputs, inputs]`` values, int8 or float8_e4m3fn, each where its input is."""

    @abstractmethod
    def scales(self, outputs: slice) -> np.ndarray:
        """``[outputs, groups]`` float32."""

    def zeros(self, outputs: slice) -> np.ndarray:
        """``[outputs, groups]`` int8."""
        return np.zeros((len(range(self.shape[0])[outputs]), self.groups), np.int8)

    def order(self) -> np.ndarray:
        """``[in]``, as in `QuantizedMatrix`."""
        if self._of_input is None:
            return np.arange(self.shape[1], dtype=np.int32)
        return np.argsort(self._group_of_inputs(), kind="stable").astype(np.int32)

    def _group_of_inputs(self) -> np.ndarray:
        if self._of_input is None:
            return np.arange(self.shape[1]) // self.size
        return np.asarray(self._of_input[(slice(None),)])

    def get_shape(self) -> list[int]:
        """``[out, in]``."""
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
        """That of a part."""
        outputs, inputs = self.shape
        of_group = [self.groups, outputs]
        return {"values": [*of_group, self.size], "scales": of_group, "zeros": of_group, "order": [inputs]}[role]

    def read(self, role: str, part: tuple[slice, ...]) -> np.ndarray:
        """A slice of a part."""
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
            first, last, _ = groups.indices(self.groups)
            rows, within = self.numbers(outputs, slice(first * self.size, last * self.size)), slice(None)
        else:
            rows, within = self.numbers(outputs, slice(None))[:, self.order()], groups
        grouped = np.moveaxis(rows.reshape(len(rows), rows.shape[1] // self.size, self.size), 1, 0)
        return grouped[within][..., places]


class PlainMatrix(OneMatrix):
    """Values of 8 bits as they are, ``[out, in]``.

    Args:
        values: int8 or float8_e4m3fn.
        scales: of all of it, of each output, of each group of each output, or of blocks of several outputs.
        form: how it is quantized.
        block: outputs that share a scale.
    """

    def __init__(self, values: Any, scales: Any, form: Form, block: int = 1) -> None:
        super().__init__(form, tuple(values.get_shape()))
        self._stored, self._scales, self._block = values, scales, block

    def numbers(self, outputs: slice, inputs: slice) -> np.ndarray:
        return self._stored[outputs, inputs]

    def scales(self, outputs: slice) -> np.ndarray:
        stored = np.asarray(self._scales[(slice(None),) * len(self._scales.get_shape())], np.float32)
        rows = np.arange(self.shape[0])[outputs] // self._block
        if stored.size == 1:  # of the whole matrix
            return np.full((len(rows), self.groups), stored.item(), np.float32)
        return stored.reshape(len(stored), -1)[rows]


class Ragged(PlainMatrix):
    """FP8 in blocks that do not fill the matrix: it is read as floats only.

    Args:
        values: float8_e4m3fn ``[out, in]``.
        scales: of each block.
    """

    is_kept = False

    def __init__(self, values: Any, scales: Any) -> None:
        super().__init__(values, scales, Form("fp8"), BLOCK)

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        outputs, inputs = part
        columns = np.arange(self.shape[1])[inputs] // BLOCK
        return self.numbers(outputs, inputs).astype(np.float32) * self.scales(outputs)[:, columns]


class _PackedFormat(OneMatrix):
    """A matrix of whole numbers that lie in int32 along the inputs."""

    def _words(self, inputs: slice) -> tuple[slice, slice]:
        """The int32 that hold those ``inputs``, and where the inputs are among the numbers of these."""
        columns, count = range(self.shape[1])[inputs], 32 // self.form.bits
        first = columns.start // count
        own = slice(columns.start - first * count, max(columns.stop, columns.start) - first * count, columns.step)
        return slice(first, max(-(-columns.stop // count), first)), own


class PackedMatrix(_PackedFormat):
    """compressed-tensors' ``pack-quantized``: numbers of 4 or 8 bits, less their smallest, in int32, along the inputs.

    Args:
        packed: ``[out, in bits / 32]``.
        scales: ``[out, groups]``.
        zeros: ``[out bits / 32, groups]``, packed along the outputs; None: there are none.
        of_input: the group of each input, where they are no neighbours; None: they are.
        form: how it is quantized.
        inputs: how many there are: the last number may be filled up.
    """

    def __init__(self, packed: Any, scales: Any, zeros: Any, of_input: Any, form: Form, inputs: int) -> None:
        super().__init__(form, (packed.get_shape()[0], inputs), of_input)
        self._stored, self._scales, self._zeros = packed, scales, zeros

    def numbers(self, outputs: slice, inputs: slice) -> np.ndarray:
        words, own = self._words(inputs)
        return _signed(unpacked(self._stored[outputs, words], self.form.bits)[:, own], self.form.bits)

    def scales(self, outputs: slice) -> np.ndarray:
        return np.asarray(self._scales[outputs, slice(None)], np.float32)

    def zeros(self, outputs: slice) -> np.ndarray:
        if self._zeros is None:
            return super().zeros(outputs)
        numbers = unpacked(self._zeros[slice(None), slice(None)].T, self.form.bits)[:, : self.shape[0]]
        return _signed(numbers.T[outputs], self.form.bits)


class Gptq(_PackedFormat):
    """GPTQ's (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel write it: numbers from 0, in int32, along the
    inputs.

    Args:
        packed: ``[in bits / 32, out]``.
        scales: ``[groups, out]``.
        zeros: ``[groups, out bits / 32]``, packed along the outputs; ``add`` is to be added to them.
        of_input: the group of each input; None: they are neighbours.
        form: how it is quantized, with zeros; it has none where all of them turn out to be 0.
        add: 1 in the first version of the layout, 0 in the second.
        is_symmetric: whether the checkpoint says that zeros are 0; None: it does not say.
    """

    def __init__(
        self, packed: Any, scales: Any, zeros: Any, of_input: Any, form: Form, add: int, is_symmetric: bool | None = None
    ) -> None:
        rows, outputs = packed.get_shape()
        super().__init__(form, (outputs, rows * 32 // form.bits), of_input)
        self._stored, self._scales, self._zeros, self._add = packed, scales, zeros, add
        if is_symmetric is False:
            return
        found = self.zeros(slice(None))
        if is_symmetric and add and (found == 1).all():  # files of the second version that call it the first are about
            found, self._add = found - 1, 0
        if not found.any():
            self.form = replace(self.form, has_zeros=False)

    def numbers(self, outputs: slice, inputs: slice) -> np.ndarray:
        words, own = self._words(inputs)
        return _signed(unpacked(self._stored[words, outputs].T, self.form.bits)[:, own], self.form.bits)

    def scales(self, outputs: slice) -> np.ndarray:
        return np.asarray(self._scales[slice(None), outputs], np.float32).T

    def zeros(self, outputs: slice) -> np.ndarray:
        bits = self.form.bits
        numbers = unpacked(self._zeros[slice(None), slice(None)], bits)[:, : self.shape[0]] + np.uint8(self._add)
        numbers &= np.uint8((1 << bits) - 1)  # as they wrap around in the kernels that it was written for
        return _signed(numbers[:, outputs].T, bits)


class Awq(OneMatrix):
    """AWQ's (Lin et al. 2023, arXiv 2306.00978): numbers of 4 bits from 0, in int32, along the outputs, eight in an order of
    their own.

    Args:
        packed: ``[in, out / 8]``.
        scales: ``[groups, out]``.
        zeros: ``[groups, out / 8]``.
        form: how it is quantized.
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
        columns = range(stored.get_shape()[1] * 8)[outputs]
        words = slice(columns.start // 8, max(-(-columns.stop // 8), columns.start // 8))
        numbers = unpacked(stored[rows, words], 4)
        numbers = numbers.reshape(len(numbers), numbers.shape[1] // 8, 8)[..., AWQ_NIBBLES].reshape(numbers.shape)
        own = slice(columns.start - words.start * 8, max(columns.stop, columns.start) - words.start * 8, columns.step)
        return _signed(numbers[:, own].T, 4)


def _signed(numbers: np.ndarray, bits: int) -> np.ndarray:
    """Of uint8 from 0 int8, half of them below 0."""
    return (numbers - np.uint8(1 << (bits - 1))).view(np.int8)


class Rounded(Parts):
    """A matrix of floats that is quantized as it is read: `quantize_matrix`.

    Args:
        floats: ``[..., out, in]``, or ``[..., in, out]`` where it is ``turned``.
        form: how it is quantized.
        turned: see ``floats``.
    """

    def __init__(self, floats: Any, form: Form, turned: bool) -> None:
        self._floats, self._turned, self.form = floats, turned, form
        self._scales: dict[str, np.ndarray] = {}  # of parts whose values were read
        shape = tuple(floats.get_shape())
        *self._lead, self._outputs, self._inputs = (*shape[:-2], shape[-1], shape[-2]) if turned else shape

    def shape_of(self, role: str) -> list[int]:
        size = self.form.group or self._inputs
        return [*self._lead, self._inputs // size, self._outputs, *[size] * (role == "values")]

    def read(self, role: str, part: tuple[slice, ...]) -> np.ndarray:
        *lead, groups, outputs = part[: len(self._lead) + 2]
        asked = repr((lead, outputs))
        scales = self._scales.pop(asked, None) if role == "scales" else None
        if scales is None:
            place = (*lead, slice(None), outputs) if self._turned else (*lead, outputs, slice(None))
            floats = self._floats[place] if self._turned else np.swapaxes(self._floats[place], -1, -2)
            quantized = quantize_matrix(floats, self.form)
            if role == "values":  # which are large: only what is asked for next is kept
                self._scales[asked] = quantized.scales
                return quantized.values[..., groups, :, part[-1]]
            scales = quantized.scales
        return scales[..., groups, :]


def is_neighbourly(of_input: np.ndarray, size: int) -> bool:
    """Whether each input's group is that of its neighbours, ``size`` in all."""
    return bool((of_input == np.arange(len(of_input)) // size).all())
