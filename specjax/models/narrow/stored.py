"""Matrices as checkpoints have them narrow, of which parts are read: one class for each way in which they are laid out.

Each shows itself in two ways: as the matrix in floats ``[out, in]``, as if the checkpoint were not narrow; and as the parts of a
`Narrow`, values, scales, zeros and order, in their shapes.
"""

from abc import ABC, abstractmethod
from typing import Any

import numpy as np

from specjax.models.narrow.packing import AWQ_NIBBLES, unpacked
from specjax.models.narrow.weights import Form, narrowed

ROLES = ("values", "scales", "zeros", "order")
_STORED_TYPES = {"int8": "I8", "int4": "I8", "fp8": "F8_E4M3"}


class StoredMatrix(ABC):
    """A matrix of a checkpoint that is narrow, or is made so as it is read.

    Attributes:
        form: how it is narrow.
        shape: ``(out, in)``.
        is_kept: whether it can be held as it is; otherwise it is read as floats.
    """

    form: Form
    shape: tuple[int, int]
    is_kept = True

    @abstractmethod
    def values(self, groups: slice, outputs: slice) -> np.ndarray:
        """``[groups, outputs, size]``, as in `Narrow`."""

    @abstractmethod
    def scales(self, groups: slice, outputs: slice) -> np.ndarray:
        """``[groups, outputs]`` float32."""

    def zeros(self, groups: slice, outputs: slice) -> np.ndarray:
        """``[groups, outputs]`` int8."""
        raise NotImplementedError

    def order(self) -> np.ndarray:
        """``[in]``, as in `Narrow`."""
        raise NotImplementedError

    @property
    def size(self) -> int:
        """Inputs of a group."""
        return self.form.group or self.shape[1]

    @property
    def groups(self) -> int:
        """How many there are."""
        return self.shape[1] // self.size

    # --- as floats: what `specjax.models.checkpoint` asks of any tensor ---

    def get_shape(self) -> list[int]:
        """``[out, in]``."""
        return list(self.shape)

    def get_dtype(self) -> str:
        """The type as a header names it."""
        return "F32"

    def __getitem__(self, part: tuple[slice, slice]) -> np.ndarray:
        outputs, inputs = part
        first, last, step = inputs.indices(self.shape[1])
        wanted = np.arange(first, last, step)
        groups = slice(0, self.groups)
        if not self.form.is_ordered and len(wanted):
            groups = slice(int(wanted.min()) // self.size, int(wanted.max()) // self.size + 1)
        values = self.values(groups, outputs).astype(np.float32)
        if self.form.has_zeros:
            values -= self.zeros(groups, outputs).astype(np.float32)[..., None]
        values *= self.scales(groups, outputs)[..., None]
        rows = np.moveaxis(values, 0, 1).reshape(values.shape[1], -1)
        if self.form.is_ordered:
            rows = rows[:, np.argsort(self.order())]
        return rows[:, wanted - groups.start * self.size]

    # --- as narrow ---

    def role(self, role: str) -> "Role":
        """One of the parts of a `Narrow`."""
        return Role(self, role)

    def shape_of(self, role: str) -> list[int]:
        """That of a part."""
        outputs, inputs = self.shape
        of_group = [self.groups, outputs]
        return {"values": [*of_group, self.size], "scales": of_group, "zeros": of_group, "order": [inputs]}[role]

    def read(self, role: str, part: tuple[slice, ...]) -> np.ndarray:
        """A slice of a part."""
        if role == "order":
            return self.order()[part[0]]
        if role == "values":
            return self.values(*part[:2])[..., part[2]]
        return (self.scales if role == "scales" else self.zeros)(*part)


class Role:
    """One of the parts of a `Narrow`, of which slices are read from a checkpoint."""

    def __init__(self, matrix: StoredMatrix, role: str) -> None:
        self._matrix, self._role = matrix, role

    def get_shape(self) -> list[int]:
        """The shape."""
        return self._matrix.shape_of(self._role)

    def get_dtype(self) -> str:
        """The type as a header names it."""
        kinds = {"values": _STORED_TYPES[self._matrix.form.kind], "scales": "F32", "zeros": "I8", "order": "I32"}
        return kinds[self._role]

    def __getitem__(self, part: tuple[slice, ...]) -> np.ndarray:
        return self._matrix.read(self._role, part)


class Plain(StoredMatrix):
    """Values of 8 bits as they are, ``[out, in]``.

    Args:
        values: int8 or float8_e4m3fn.
        scales: of all of it, of each output, of each group of each output, or of blocks of several outputs.
        form: how it is narrow.
        block: outputs that share a scale.
    """

    def __init__(self, values: Any, scales: Any, form: Form, block: int = 1) -> None:
        self._values, self._scales, self._block = values, scales, block
        self.form, self.shape = form, tuple(values.get_shape())

    def values(self, groups: slice, outputs: slice) -> np.ndarray:
        first, last, _ = groups.indices(self.groups)
        found = self._values[outputs, slice(first * self.size, last * self.size)]
        return np.moveaxis(found.reshape(len(found), last - first, self.size), 1, 0)

    def scales(self, groups: slice, outputs: slice) -> np.ndarray:
        shape = self._scales.get_shape()
        stored = np.asarray(self._scales[(slice(None),) * len(shape)], np.float32)
        if stored.size == 1:  # of the whole matrix
            stored = np.broadcast_to(stored.reshape(1, 1), (self.shape[0], self.groups))
        stored = stored.reshape(len(stored), -1)
        if self._block > 1:
            stored = np.repeat(stored, self._block, axis=0)[: self.shape[0]]
        return stored[outputs, groups].T


class Packed(StoredMatrix):
    """compressed-tensors' ``pack-quantized``: numbers of 4 or 8 bits, less their smallest, in int32, along the inputs.

    Args:
        packed: ``[out, in bits / 32]``.
        scales: ``[out, groups]``.
        zeros: ``[out bits / 32, groups]``, packed along the outputs; None: there are none.
        order: the group of each input, where they are no neighbours; None: they are.
        form: how it is narrow.
        inputs: how many there are: the last number may be filled up.
    """

    def __init__(self, packed: Any, scales: Any, zeros: Any, order: Any, form: Form, inputs: int) -> None:
        self._packed, self._scales, self._zeros, self._of_input = packed, scales, zeros, order
        self.form, self.shape = form, (packed.get_shape()[0], inputs)

    def values(self, groups: slice, outputs: slice) -> np.ndarray:
        numbers = unpacked(self._packed[outputs, slice(None)], self.form.bits)[:, : self.shape[1]]
        numbers = (numbers - (1 << (self.form.bits - 1))).astype(np.int8)
        if self.form.is_ordered:
            numbers = numbers[:, self.order()]
        return np.moveaxis(numbers.reshape(len(numbers), self.groups, self.size)[:, groups], 1, 0)

    def scales(self, groups: slice, outputs: slice) -> np.ndarray:
        return np.asarray(self._scales[outputs, groups], np.float32).T

    def zeros(self, groups: slice, outputs: slice) -> np.ndarray:
        numbers = unpacked(self._zeros[slice(None), groups].T, self.form.bits)[:, : self.shape[0]]
        return (numbers - (1 << (self.form.bits - 1))).astype(np.int8)[:, outputs]

    def order(self) -> np.ndarray:
        return _places(self._of_input)


class Gptq(StoredMatrix):
    """GPTQ's (Frantar et al. 2022, arXiv 2210.17323), as AutoGPTQ and GPTQModel write it: numbers from 0, in int32, along the
    inputs.

    Args:
        packed: ``[in bits / 32, out]``.
        scales: ``[groups, out]``.
        zeros: ``[groups, out bits / 32]``, packed along the outputs; ``add`` is to be added to them.
        order: the group of each input; None: they are neighbours.
        form: how it is narrow.
        add: 1 in the first version of the layout, 0 in the second.
    """

    def __init__(self, packed: Any, scales: Any, zeros: Any, order: Any, form: Form, add: int) -> None:
        self._packed, self._scales, self._zeros, self._of_input, self._add = packed, scales, zeros, order, add
        self.form = form
        self.shape = (packed.get_shape()[1], packed.get_shape()[0] * 32 // form.bits)

    def values(self, groups: slice, outputs: slice) -> np.ndarray:
        numbers = unpacked(self._packed[slice(None), outputs].T, self.form.bits)
        numbers = (numbers - (1 << (self.form.bits - 1))).astype(np.int8)
        if self.form.is_ordered:
            numbers = numbers[:, self.order()]
        return np.moveaxis(numbers.reshape(len(numbers), self.groups, self.size)[:, groups], 1, 0)

    def scales(self, groups: slice, outputs: slice) -> np.ndarray:
        return np.asarray(self._scales[groups, outputs], np.float32)

    def zeros(self, groups: slice, outputs: slice) -> np.ndarray:
        numbers = unpacked(self._zeros[groups, slice(None)], self.form.bits) + self._add
        numbers &= (1 << self.form.bits) - 1  # as they wrap around in the kernels that it was written for
        return (numbers - (1 << (self.form.bits - 1))).astype(np.int8)[:, outputs]

    def order(self) -> np.ndarray:
        return _places(self._of_input)


class Awq(StoredMatrix):
    """AWQ's (Lin et al. 2023, arXiv 2306.00978): numbers of 4 bits from 0, in int32, along the outputs, eight in an order of
    their own.

    Args:
        packed: ``[in, out / 8]``.
        scales: ``[groups, out]``.
        zeros: ``[groups, out / 8]``.
        form: how it is narrow.
    """

    def __init__(self, packed: Any, scales: Any, zeros: Any, form: Form) -> None:
        self._packed, self._scales, self._zeros = packed, scales, zeros
        self.form, self.shape = form, (packed.get_shape()[1] * 8, packed.get_shape()[0])

    def values(self, groups: slice, outputs: slice) -> np.ndarray:
        first, last, _ = groups.indices(self.groups)
        numbers = self._numbers(self._packed, slice(first * self.size, last * self.size), outputs)
        return numbers.reshape(last - first, self.size, -1).swapaxes(1, 2)

    def scales(self, groups: slice, outputs: slice) -> np.ndarray:
        return np.asarray(self._scales[groups, outputs], np.float32)

    def zeros(self, groups: slice, outputs: slice) -> np.ndarray:
        return self._numbers(self._zeros, groups, outputs)

    @staticmethod
    def _numbers(stored: Any, rows: slice, outputs: slice) -> np.ndarray:
        numbers = unpacked(stored[rows, slice(None)], 4)
        numbers = numbers.reshape(len(numbers), -1, 8)[..., AWQ_NIBBLES].reshape(len(numbers), -1)
        return (numbers - 8).astype(np.int8)[:, outputs]


class Rounded(StoredMatrix):
    """A matrix of floats that becomes narrow as it is read: `narrowed`.

    Args:
        floats: ``[out, in]``, or ``[in, out]`` where it is ``turned``.
        form: how it becomes narrow.
        turned: see ``floats``.
    """

    def __init__(self, floats: Any, form: Form, turned: bool) -> None:
        self._floats, self._turned = floats, turned
        shape = tuple(floats.get_shape())
        *self._lead, outputs, inputs = (*shape[:-2], shape[-1], shape[-2]) if turned else shape
        self.form, self.shape = form, (outputs, inputs)
        self._last: tuple[Any, Any] = (None, None)

    def shape_of(self, role: str) -> list[int]:
        return [*self._lead, *super().shape_of(role)]

    def read(self, role: str, part: tuple[slice, ...]) -> np.ndarray:
        *lead, groups, outputs = part[: len(self._lead) + 2]
        asked = repr((lead, outputs))
        if self._last[0] != asked:  # values and scales of one part are asked for one after the other
            place = (*lead, slice(None), outputs) if self._turned else (*lead, outputs, slice(None))
            found = self._floats[place]
            self._last = asked, narrowed(found if self._turned else np.swapaxes(found, -1, -2), self.form)
        found = self._last[1].values if role == "values" else self._last[1].scales
        return found[..., groups, :, part[-1]] if role == "values" else found[..., groups, :]

    def values(self, groups: slice, outputs: slice) -> np.ndarray:
        return self.read("values", (groups, outputs, slice(None)))

    def scales(self, groups: slice, outputs: slice) -> np.ndarray:
        return self.read("scales", (groups, outputs))


def _places(of_input: Any) -> np.ndarray:
    """Of the group of each input: the input at each place, group by group."""
    return np.argsort(np.asarray(of_input[(slice(None),)]), kind="stable").astype(np.int32)


def is_neighbourly(of_input: np.ndarray, size: int) -> bool:
    """Whether each input's group is that of its neighbours, ``size`` in all."""
    return bool((of_input == np.arange(len(of_input)) // size).all())
