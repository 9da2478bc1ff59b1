"""What a compiler made of a program, read from its text: bytes moved, bytes exchanged, and the compiler's estimate of time.

XLA prints a compiled program as computations, lists of operations that run one after another. Loops and conditionals name the
computations that they run; a fusion names one, too, but is one operation: what happens inside it stays on the chip.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?")  # such as bf16[8,128]{1,0:T(8,128)S(1)}
_OPERATION = re.compile(r"\s*(ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
_NOTHING_MOVES = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "while", "conditional", "call", "after-all", "iota",
    "partition-id", "replica-id", "async-update", "opt-barrier", "optimization-barrier",
}  # fmt: skip
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""Operations by which chips exchange data."""
_SLICES, _UPDATES = ("dynamic-slice", "gather", "slice"), ("dynamic-update-slice", "scatter")
_LAID_ANEW = {"parameter", "copy", "transpose", "concatenate", "pad", "constant", "bitcast", "tuple"}
_KERNELS = {"fusion", "custom-call", "copy", "sort", "convolution", "dot", "scatter", "gather", "dynamic-update-slice"}


def main_memory_bytes(shape: str) -> int:
    """Bytes of an array, or a tuple of them, without those that lie in a chip's fast memory, which the text marks ``S(1)``."""
    return sum(_sizes(shape))


def _sizes(shape: str) -> list[int]:
    """As `main_memory_bytes`, of each array of a tuple."""

    def size(kind: str, bits: str, dims: str, at: str) -> int:
        count = math.prod(map(int, filter(None, dims.split(","))))
        return 0 if "S(" in at else count if kind == "pred" else -(-count * int(bits) // 8)

    return [size(*array) for array in _ARRAY.findall(shape)]


@dataclass(frozen=True)
class Operation:
    """One operation of a computation.

    Attributes:
        name: as other operations refer to it.
        kind: such as ``fusion`` or ``all-reduce``.
        shape: of its result, as printed.
        operands: names.
        origin: the name of the JAX operation that it comes from, with those of the scopes around it.
        cycles: the compiler's own estimate; 0 where it has none.
        text: the rest of its line.
        is_root: whether it is its computation's result.
    """

    name: str
    kind: str
    shape: str
    operands: tuple[str, ...]
    origin: str
    cycles: int
    text: str
    is_root: bool

    def computations(self, *roles: str) -> tuple[str, ...]:
        """The names of the computations that it runs in the given ``roles``, such as ``body``."""
        found: list[str] = []
        for role in roles:
            for one, several in re.findall(rf"\b{role}=(?:(%[\w.\-]+)|\{{([^}}]*)\}})", self.text):
                found += [one] if one else re.findall(r"%[\w.\-]+", several)
        return tuple(found)

    @property
    def collective(self) -> str:
        """Which of `COLLECTIVES` it is, or begins; empty where it is none."""
        kind = self.kind.removesuffix("-start")
        return kind if kind in COLLECTIVES else ""

    @property
    def is_sent_between_slices(self) -> bool:
        """Whether it hands its operand to the runtime that connects slices of TPUs, over the network of the data centre."""
        return self.kind == "send" and "xla_megascale_runtime" in self.text


@dataclass(frozen=True)
class Turn:
    """Operations that run together, once a turn of the loop whose body they are.

    Attributes:
        operations: of the loop's body; loops inside it are turns of their own.
        turns: how often they run in one step.
    """

    operations: tuple[Operation, ...]
    turns: int


class HloProgram:
    """A compiled program.

    Attributes:
        computations: by name, each a list of operations.
        entry: the name of the one where it begins.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Operation]] = {}
        self.entry = ""
        for part in re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ )", text):
            head = re.match(r"(ENTRY )?(%[\w.\-]+) ", part)
            if head:
                self.computations[head[2]] = {found.name: found for found in map(_operation, part.splitlines()[1:]) if found}
                self.entry = head[2] if head[1] else self.entry

    @cached_property
    def main_loop(self) -> str:
        """The body of the entry's loop with the most operations, or the entry itself where it has none."""
        loops = [operation for operation in self.computations[self.entry].values() if operation.kind == "while"]
        bodies = [name for loop in loops for name in loop.computations("body")]
        return max(bodies, key=lambda name: len(self.computations[name]), default=self.entry)

    def turns(self, start: str, unknown: Callable[[str], int]) -> list[Turn]:
        """What runs when the computation ``start`` runs once: its own operations, then those of the loops inside it.

        Args:
            start: its name.
            unknown: how often a loop is taken to turn whose end depends on data, by its origin.
        """
        found: list[Turn] = []

        def visit(name: str, turns: int) -> None:
            own: list[Operation] = []

            def collect(name: str) -> None:
                for operation in self.computations[name].values():
                    own.append(operation)
                    if operation.kind == "call":
                        for called in operation.computations("to_apply", "calls"):
                            collect(called)
                    elif operation.kind == "conditional":  # the longest branch
                        branches = operation.computations("branch_computations", "true_computation", "false_computation")
                        collect(max(branches, key=lambda branch: len(self.computations[branch])))

            collect(name)
            found.append(Turn(tuple(own), turns))
            for operation in own:
                if operation.kind == "while":
                    (body,), (condition,) = operation.computations("body"), operation.computations("condition")
                    visit(body, turns * self._length(operation, condition, unknown))

        visit(start, 1)
        return found

    def _length(self, loop: Operation, condition: str, unknown: Callable[[str], int]) -> int:
        """How often a loop turns: known where it only counts up to a number."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
            return int(known[1])
        compared = [operation for operation in self.computations[condition].values() if operation.is_root]
        constants = [o for o in self.computations[condition].values() if o.kind == "constant" and o.shape.startswith("s32[]")]
        if len(compared) == len(constants) == 1 and compared[0].kind in ("compare", "fusion"):
            inner = compared[0].computations("calls")
            plain = all(o.kind in ("compare", "parameter") for name in inner for o in self.computations[name].values())
            number = re.match(r"(\d+)\)", constants[0].text)
            if plain and number:
                return int(number[1])
        return unknown(loop.origin)

    # --- what a turn costs ---

    def bytes_moved(self, operations: Sequence[Operation]) -> int:
        """Bytes that the operations read from and write to a chip's main memory.

        What an operation only takes a slice of counts as that slice, and what it updates in place as the update. A kernel that
        was written by hand reads each of its operands whole, and once however often it is given it, but no more in all than it
        says that it accesses: of a pool of pages it reads those that its rows hold.
        """
        return sum(read + written for _, read, written in self.moved(operations))

    def moved(self, operations: Sequence[Operation]) -> Iterator[tuple[Operation, int, int]]:
        """The operations that move anything, and how many bytes each reads and writes."""
        for operation in operations:
            if operation.kind not in _NOTHING_MOVES and not operation.kind.endswith("-done"):
                read, written = self._moved_by(operation)
                if read or written:
                    yield operation, read, written

    def copies(self, operations: Sequence[Operation], kept: Sequence[tuple[int, Sequence[int]]]) -> list[str]:
        """The shapes of what is copied from main memory to main memory, by itself or joined with other arrays.

        Args:
            operations: of a turn.
            kept: what counts: the least bytes, and lengths that some of the axes must have, or be a little longer than.
        """

        def counts(operation: Operation, size: int) -> bool:
            axes = _dimensions(operation.shape)
            return any(size >= least and _has_axes(axes, lengths) for least, lengths in kept)

        return [
            without_layout(operation.shape)
            for operation, read, written in self.moved(operations)
            if self._is_copy(operation) and counts(operation, min(read, written))
        ]

    def _is_copy(self, operation: Operation) -> bool:
        """Whether it only rearranges what it is given; a prefetch is one, too."""
        if operation.kind == "fusion":
            (inside,) = operation.computations("calls")
            return {inner.kind for inner in self.computations[inside].values()} <= _LAID_ANEW
        return operation.kind in ("copy", "copy-start", "concatenate")

    def _moved_by(self, operation: Operation) -> tuple[int, int]:
        """Bytes read and written."""
        operands, result = [self._shape(name) for name in operation.operands], main_memory_bytes(operation.shape)
        if operation.kind.endswith("slice-start"):  # ((source, …), slice, …)
            part = _elements(operation.shape)[1]
            return main_memory_bytes(without_layout(part)), main_memory_bytes(part)
        if operation.kind == "copy-start":  # (copy, source, …)
            written, read = _sizes(operation.shape)[:2]
            return read, written
        if operation.kind in _SLICES:
            return result, result
        if operation.kind in _UPDATES:
            update = main_memory_bytes(operands[_update_of(operation)])
            return update, update
        if operation.kind == "fusion":
            return self._moved_by_fusion(operation, operands, result)
        if operation.kind == "custom-call":
            read = sum(main_memory_bytes(self._shape(name)) for name in dict.fromkeys(operation.operands))
            says = re.search(r'"bytes_accessed":"(\d+)"', operation.text)
            return min(read, int(says[1])) if says else read, result
        if operation.collective and operation.kind.endswith("-start"):
            result = main_memory_bytes(_exchanged(operation))
        return sum(map(main_memory_bytes, operands)), result

    def _moved_by_fusion(self, operation: Operation, operands: list[str], result: int) -> tuple[int, int]:
        inside = self.computations[operation.computations("calls")[0]]
        read, written = 0, result
        for parameter, operand in zip(_parameters(inside), operands, strict=False):
            size = main_memory_bytes(operand)
            names, users = _users(inside, parameter)
            kinds = {user.kind if user.operands[0] in names else "other" for user in users}
            if not size or not users:
                continue
            if kinds <= set(_UPDATES):
                # Updated in place: neither read nor written as a whole.
                update = sum(main_memory_bytes(without_layout(inside[user.operands[_update_of(user)]].shape)) for user in users)
                read, written = read + update, max(written - size, 0) + update
            else:
                read += min(size, self._read_of(inside, parameter, size))
        return read, written

    def _read_of(self, inside: Mapping[str, Operation], parameter: str, size: int) -> int:
        """Bytes that a fusion's computation reads of a ``parameter`` of so many: slices alone, or all of it. A fusion may have
        others inside: of a stack of experts one takes the matrix that another one multiplies with."""
        names, users = _users(inside, parameter)
        if any(inside[name].is_root for name in names):  # handed on as it is
            return size
        read = 0
        for user in users:
            if user.kind in _SLICES and user.operands[0] in names:
                read += main_memory_bytes(without_layout(user.shape))
            elif user.kind == "fusion":
                inner = self.computations[user.computations("calls")[0]]
                given = zip(_parameters(inner), user.operands, strict=False)
                read += sum(self._read_of(inner, name, size) for name, operand in given if operand in names)
            else:
                return size
        return read

    @cached_property
    def _shapes(self) -> dict[str, str]:
        return {name: o.shape for computation in self.computations.values() for name, o in computation.items()}

    def _shape(self, name: str) -> str:
        return self._shapes.get(name, "")


def _users(computation: Mapping[str, Operation], name: str) -> tuple[set[str], list[Operation]]:
    """All names that the value called ``name`` has, through bitcasts; and the operations that use it."""
    names, users = {name}, []
    for operation in computation.values():
        if names & set(operation.operands):
            if operation.kind == "bitcast":
                names.add(operation.name)
            else:
                users.append(operation)
    return names, users


def _update_of(operation: Operation) -> int:
    """Which operand holds what is written."""
    return 1 if operation.kind == "dynamic-update-slice" else -1


def _parameters(computation: Mapping[str, Operation]) -> list[str]:
    """The names of its parameters, in order."""
    found = [operation for operation in computation.values() if operation.kind == "parameter"]
    return [parameter.name for parameter in sorted(found, key=lambda one: int(one.text.partition(")")[0]))]


def without_layout(shape: str) -> str:
    """A shape without its layout, which says where it lies: inside a fusion no value lies anywhere."""
    return re.sub(r"\{[^}]*\}", "", shape)


def _operation(line: str) -> Operation | None:
    found = _OPERATION.match(line)
    if not found:
        return None
    root, name, shape, kind, rest = found.groups()
    origin, cycles = re.search(r'op_name="([^"]*)"', rest), re.search(r'"estimated_cycles":"(\d+)"', rest)
    return Operation(
        name=name,
        kind=kind,
        shape=shape,
        operands=tuple(re.findall(r"%[\w.\-]+", rest.split("), ")[0])),
        origin=origin[1] if origin else "",
        cycles=int(cycles[1]) if cycles else 0,
        text=rest,
        is_root=bool(root),
    )


def kernels(operations: tuple[Operation, ...]) -> int:
    """How many of the operations a GPU launches as kernels, or a TPU as programs of their own."""
    return sum(operation.kind in _KERNELS for operation in operations)


def array_bytes(operation: Operation) -> int:
    """Bytes of the result of an exchange, wherever it lies; of one that only begins, of what comes of it."""
    return sum(_sizes(without_layout(_exchanged(operation))))


def sent_between_slices(operations: Sequence[Operation]) -> int:
    """Bytes that one chip hands over for other slices; those of exchanges inside a slice are not among them."""
    sent = [operation for operation in operations if operation.is_sent_between_slices]
    return sum(sum(_sizes(without_layout(_elements(operation.shape)[0]))) for operation in sent)


def _exchanged(operation: Operation) -> str:
    """The part of the printed shape of an exchange that is its result."""
    if operation.kind.endswith("-start") and operation.collective != "all-reduce":  # (operand, result, …)
        return _elements(operation.shape)[1]
    return operation.shape


def _dimensions(shape: str) -> list[int]:
    """The lengths of all axes of the first array of a printed shape."""
    return [int(length) for length in _ARRAY.findall(shape)[0][2].split(",") if length]


def _has_axes(axes: Sequence[int], lengths: Sequence[int]) -> bool:
    """Whether each of ``lengths`` is that of another one of the axes, which may be a tenth longer."""
    left = sorted(axes)
    for length in sorted(lengths):
        found = next((axis for axis in left if length <= axis < 1.1 * length), None)
        if found is None:
            return False
        left.remove(found)
    return True


def _elements(shape: str) -> list[str]:
    """The elements of a printed tuple, which may be tuples themselves."""
    found, depth = [""], 0
    for letter in shape.removeprefix("(").removesuffix(")"):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and depth == 0:
            found.append("")
        else:
            found[-1] += letter
    return found
