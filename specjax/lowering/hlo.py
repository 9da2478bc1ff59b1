"""The costs of a compiled program, read from its text: memory traffic, communication and cycles.

XLA prints a compiled program as computations, which are lists of operations that run one after the
other. Loops and conditionals name the computations that they run. A fusion names one as well, but
it is a single operation: its intermediate values stay on the chip.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

# An array, such as bf16[8,128]{1,0:T(8,128)S(1)}.
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\](\{[^}]*\})?")
_OPERATION = re.compile(r"\s*(ROOT )?(%[\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)")
# Kinds of operations that move no data themselves.
_NOTHING_MOVES = {
    *("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "iota"),
    *("while", "conditional", "call", "after-all", "async-update"),
    *("partition-id", "replica-id", "opt-barrier", "optimization-barrier"),
}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
"""The collective operations, by which chips exchange data."""
_SLICES, _UPDATES = ("dynamic-slice", "gather", "slice"), ("dynamic-update-slice", "scatter")
# A fusion of these kinds alone only changes the layout of its operands.
_LAYOUT_ONLY = {
    "parameter",
    "copy",
    "transpose",
    "concatenate",
    "pad",
    "constant",
    "bitcast",
    "tuple",
}
# Kinds of operations that each run as a kernel of their own.
_KERNELS = {
    "fusion",
    "custom-call",
    "copy",
    "sort",
    "convolution",
    "dot",
    "scatter",
    "gather",
    "dynamic-update-slice",
}


def main_memory_bytes(shape: str) -> int:
    """Return the bytes in main memory of an array or a tuple of arrays.

    Arrays in other memory spaces, which the text marks ``S(n)``, do not count. ``S(1)`` is a chip's
    fast memory.
    """
    return sum(_sizes(shape))


def _sizes(shape: str) -> list[int]:
    """Return `main_memory_bytes` of each array of a tuple."""

    def size(kind: str, bits: str, dims: str, layout: str) -> int:
        count = math.prod(map(int, filter(None, dims.split(","))))
        return 0 if "S(" in layout else count if kind == "pred" else -(-count * int(bits) // 8)

    return [size(*array) for array in _ARRAY.findall(shape)]


@dataclass(frozen=True)
class Operation:
    """One operation of a computation.

    Attributes:
        name: the name of the operation.
        kind: the kind of the operation, such as ``fusion`` or ``all-reduce``.
        shape: the printed shape of its result.
        operands: the names of its operands.
        origin: the name of the JAX operation that it comes from, with the scopes around it.
        cycles: the compiler's estimate of its cycles; 0 if it has none.
        text: the rest of its line.
        is_root: whether it is the result of its computation.
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
        """Return the names of the computations that it runs in some roles, such as ``body``."""
        names: list[str] = []
        for role in roles:
            for single, several in re.findall(
                rf"\b{role}=(?:(%[\w.\-]+)|\{{([^}}]*)\}})", self.text
            ):
                names += [single] if single else re.findall(r"%[\w.\-]+", several)
        return tuple(names)

    @property
    def collective(self) -> str:
        """The kind among `COLLECTIVES` that it is or starts; empty if it is not a collective."""
        kind = self.kind.removesuffix("-start")
        return kind if kind in COLLECTIVES else ""

    @property
    def sends_between_slices(self) -> bool:
        """True if it sends its operand to other slices of TPUs over the data center network."""
        return self.kind == "send" and "xla_megascale_runtime" in self.text


@dataclass(frozen=True)
class Turn:
    """The operations of one iteration of a loop, or of the computation that contains the loops.

    Attributes:
        operations: the operations of the loop's body. A loop inside it has its own `Turn`.
        turns: how often the body runs in one run of the starting computation.
    """

    operations: tuple[Operation, ...]
    turns: int


class HloProgram:
    """A compiled program.

    Attributes:
        computations: the operations of each computation, by name.
        entry: the name of the computation that is the entry.
    """

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, Operation]] = {}
        self.entry = ""
        for part in re.split(r"\n(?=(?:ENTRY )?%[\w.\-]+ )", text):
            head = re.match(r"(ENTRY )?(%[\w.\-]+) ", part)
            if head:
                operations = filter(None, map(_operation, part.splitlines()[1:]))
                self.computations[head[2]] = {operation.name: operation for operation in operations}
                self.entry = head[2] if head[1] else self.entry

    @cached_property
    def main_loop(self) -> str:
        """The name of the body of the entry's largest loop, or of the entry if it has no loop."""
        loops = [
            operation
            for operation in self.computations[self.entry].values()
            if operation.kind == "while"
        ]
        bodies = [name for loop in loops for name in loop.computations("body")]
        return max(bodies, key=lambda name: len(self.computations[name]), default=self.entry)

    def turns(self, start: str, assumed_trip_count: Callable[[str], int]) -> list[Turn]:
        """Return the operations of one run of a computation, then those of the loops inside it.

        Args:
            start: the name of the computation.
            assumed_trip_count: returns the assumed number of iterations of a loop, from its origin.
                It is used for loops whose number of iterations is not in the text.
        """
        loop_turns: list[Turn] = []

        def visit(name: str, turns: int) -> None:
            operations: list[Operation] = []

            def collect(name: str) -> None:
                for operation in self.computations[name].values():
                    operations.append(operation)
                    if operation.kind == "call":
                        for called in operation.computations("to_apply", "calls"):
                            collect(called)
                    elif operation.kind == "conditional":  # the longest branch
                        branches = operation.computations(
                            "branch_computations", "true_computation", "false_computation"
                        )
                        collect(max(branches, key=lambda branch: len(self.computations[branch])))

            collect(name)
            loop_turns.append(Turn(tuple(operations), turns))
            for operation in operations:
                if operation.kind == "while":
                    (body,) = operation.computations("body")
                    (condition,) = operation.computations("condition")
                    visit(body, turns * self._trip_count(operation, condition, assumed_trip_count))

        visit(start, 1)
        return loop_turns

    def _trip_count(
        self, loop: Operation, condition: str, assumed_trip_count: Callable[[str], int]
    ) -> int:
        """Return the number of iterations of a loop, from its text or its condition if possible."""
        if trip_count := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
            return int(trip_count[1])
        # If the condition only compares a counter with one constant, the constant is the number of
        # iterations: JAX's loops count from 0 by 1.
        compared = [
            operation for operation in self.computations[condition].values() if operation.is_root
        ]
        constants = [
            o
            for o in self.computations[condition].values()
            if o.kind == "constant" and o.shape.startswith("s32[]")
        ]
        if len(compared) == len(constants) == 1 and compared[0].kind in ("compare", "fusion"):
            inner = compared[0].computations("calls")
            plain = all(
                o.kind in ("compare", "parameter")
                for name in inner
                for o in self.computations[name].values()
            )
            number = re.match(r"(\d+)\)", constants[0].text)
            if plain and number:
                return int(number[1])
        return assumed_trip_count(loop.origin)

    # --- what a turn costs ---

    def bytes_moved(self, operations: Sequence[Operation]) -> int:
        """Return the bytes that operations read from and write to a chip's main memory.

        An operand of which only a slice is read counts as that slice. An operand that is updated in
        place counts as the update. A custom kernel reads each distinct operand once and as a whole,
        but at most its declared ``bytes_accessed``. (A paged kernel declares less than the whole
        pool, because it reads only the pages of its rows.)
        """
        return sum(
            bytes_read + bytes_written for _, bytes_read, bytes_written in self.moved(operations)
        )

    def moved(self, operations: Sequence[Operation]) -> Iterator[tuple[Operation, int, int]]:
        """Yield each operation that moves data, and the bytes that it reads and writes."""
        for operation in operations:
            if operation.kind not in _NOTHING_MOVES and not operation.kind.endswith("-done"):
                bytes_read, bytes_written = self._moved_by(operation)
                if bytes_read or bytes_written:
                    yield operation, bytes_read, bytes_written

    def copies(
        self, operations: Sequence[Operation], watched_arrays: Sequence[tuple[int, Sequence[int]]]
    ) -> list[str]:
        """Return the shapes of operations that copy an array within main memory.

        An operation that joins the array with other ones counts as well.

        Args:
            operations: the operations of a turn.
            watched_arrays: the arrays that should not be copied, each as its bytes and the lengths
                of some of its axes. An operation counts if it moves at least these bytes, and its
                shape has these axes, each less than 10% longer.
        """

        def is_watched(operation: Operation, size: int) -> bool:
            axes = _dimensions(operation.shape)
            return any(
                size >= minimum and _has_axes(axes, lengths) for minimum, lengths in watched_arrays
            )

        return [
            without_layout(operation.shape)
            for operation, bytes_read, bytes_written in self.moved(operations)
            if self._is_copy(operation) and is_watched(operation, min(bytes_read, bytes_written))
        ]

    def _is_copy(self, operation: Operation) -> bool:
        """Return whether an operation only copies or rearranges its operands.

        It may be a fusion of such operations. A ``copy-start`` counts as well, which may be a
        prefetch into fast memory. A transpose or a pad counts only inside a fusion.
        """
        if operation.kind == "fusion":
            (fused_name,) = operation.computations("calls")
            return {inner.kind for inner in self.computations[fused_name].values()} <= _LAYOUT_ONLY
        return operation.kind in ("copy", "copy-start", "concatenate")

    def _moved_by(self, operation: Operation) -> tuple[int, int]:
        """Return the bytes that an operation reads and writes."""
        operands = [self._shape(name) for name in operation.operands]
        result = main_memory_bytes(operation.shape)
        if operation.kind.endswith("slice-start"):  # ((source, …), slice, …)
            part = _split_tuple(operation.shape)[1]
            return main_memory_bytes(without_layout(part)), main_memory_bytes(part)
        if operation.kind == "copy-start":  # (copy, source, …)
            bytes_written, bytes_read = _sizes(operation.shape)[:2]
            return bytes_read, bytes_written
        if operation.kind in _SLICES:
            return result, result
        if operation.kind in _UPDATES:
            update = main_memory_bytes(operands[_update_of(operation)])
            return update, update
        if operation.kind == "fusion":
            return self._moved_by_fusion(operation, operands, result)
        if operation.kind == "custom-call":
            bytes_read = sum(
                main_memory_bytes(self._shape(name)) for name in dict.fromkeys(operation.operands)
            )
            declared = re.search(r'"bytes_accessed":"(\d+)"', operation.text)
            return min(bytes_read, int(declared[1])) if declared else bytes_read, result
        if operation.collective and operation.kind.endswith("-start"):
            result = main_memory_bytes(_collective_result_shape(operation))
        return sum(map(main_memory_bytes, operands)), result

    def _moved_by_fusion(
        self, operation: Operation, operands: list[str], result: int
    ) -> tuple[int, int]:
        fused = self.computations[operation.computations("calls")[0]]
        bytes_read, bytes_written = 0, result
        for parameter, operand in zip(_parameters(fused), operands, strict=False):
            size = main_memory_bytes(operand)
            names, users = _users(fused, parameter)
            if not size or not users:
                continue
            if _is_in_place(names, users, lambda name: without_layout(fused[name].shape)):
                # The operand is neither read nor written as a whole.
                updates = [user for user in users if user.kind in _UPDATES]
                update = sum(
                    main_memory_bytes(without_layout(fused[user.operands[_update_of(user)]].shape))
                    for user in updates
                )
                bytes_read = bytes_read + update
                bytes_written = max(bytes_written - size, 0) + update
            else:
                bytes_read += min(size, self._read_of(fused, parameter, size))
        return bytes_read, bytes_written

    def _read_of(self, fused: Mapping[str, Operation], parameter: str, size: int) -> int:
        """Return how many of the ``size`` bytes of a parameter a fusion reads.

        It reads only slices of the parameter, if it uses nothing else of it. Fusions may be nested:
        for instance, an inner one slices the matrix of one expert out of a stack.
        """
        names, users = _users(fused, parameter)
        if any(fused[name].is_root for name in names):  # the parameter is returned as it is
            return size
        bytes_read = 0
        for user in users:
            if user.kind in _SLICES and user.operands[0] in names:
                bytes_read += main_memory_bytes(without_layout(user.shape))
            elif user.kind == "fusion":
                inner = self.computations[user.computations("calls")[0]]
                operands = zip(_parameters(inner), user.operands, strict=False)
                bytes_read += sum(
                    self._read_of(inner, name, size)
                    for name, operand in operands
                    if operand in names
                )
            else:
                return size
        return bytes_read

    @cached_property
    def _shapes(self) -> dict[str, str]:
        return {
            name: o.shape
            for computation in self.computations.values()
            for name, o in computation.items()
        }

    def _shape(self, name: str) -> str:
        return self._shapes.get(name, "")


def _users(computation: Mapping[str, Operation], name: str) -> tuple[set[str], list[Operation]]:
    """Return all names of a value, also those after bitcasts, and the operations that use it."""
    names, users = {name}, []
    for operation in computation.values():
        if names & set(operation.operands):
            if operation.kind == "bitcast":
                names.add(operation.name)
            else:
                users.append(operation)
    return names, users


def _is_in_place(
    names: set[str], users: Sequence[Operation], shape_of: Callable[[str], str]
) -> bool:
    """Return whether a fusion updates a parameter in place.

    It does if its operations only update the parameter, or read the very slice that they update.

    Args:
        names: all names of the parameter.
        users: the operations that use it.
        shape_of: returns the shape of an operand, without its layout.
    """
    updates = [user for user in users if user.kind in _UPDATES]
    updated = {(user.operands[2:], shape_of(user.operands[1])) for user in updates}
    return bool(updates) and all(
        user.operands[0] in names
        and (
            user in updates
            or (
                user.kind == "dynamic-slice"
                and updated == {(user.operands[1:], without_layout(user.shape))}
            )
        )
        for user in users
    )


def _update_of(operation: Operation) -> int:
    """Return the index of the operand that is the update."""
    return 1 if operation.kind == "dynamic-update-slice" else -1


def _parameters(computation: Mapping[str, Operation]) -> list[str]:
    """Return the names of a computation's parameters, in order."""
    parameters = [operation for operation in computation.values() if operation.kind == "parameter"]
    return [
        parameter.name
        for parameter in sorted(
            parameters, key=lambda operation: int(operation.text.partition(")")[0])
        )
    ]


def without_layout(shape: str) -> str:
    """Remove the layout from a printed shape, and with it the memory space.

    Use it for values inside a fusion, whose printed memory space means nothing.
    """
    return re.sub(r"\{[^}]*\}", "", shape)


def _operation(line: str) -> Operation | None:
    match = _OPERATION.match(line)
    if not match:
        return None
    root, name, shape, kind, rest = match.groups()
    origin = re.search(r'op_name="([^"]*)"', rest)
    cycles = re.search(r'"estimated_cycles":"(\d+)"', rest)
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
    """Count the operations that each run as a kernel: a rough measure of launch overhead."""
    return sum(operation.kind in _KERNELS for operation in operations)


def collective_bytes(operation: Operation) -> int:
    """Return the bytes of the result of a collective, in any memory.

    For an operation that starts a collective, it is the result of that collective.
    """
    return sum(_sizes(without_layout(_collective_result_shape(operation))))


def sent_between_slices(operations: Sequence[Operation]) -> int:
    """Return the bytes that one chip sends to other slices, without those sent inside a slice."""
    sent = [operation for operation in operations if operation.sends_between_slices]
    return sum(sum(_sizes(without_layout(_split_tuple(operation.shape)[0]))) for operation in sent)


def _collective_result_shape(operation: Operation) -> str:
    """Return the part of the printed shape of a collective that is its result."""
    # The shape of such a start is (operand, result, …).
    if operation.kind.endswith("-start") and operation.collective != "all-reduce":
        return _split_tuple(operation.shape)[1]
    return operation.shape


def _dimensions(shape: str) -> list[int]:
    """Return the lengths of all axes of the first array of a printed shape."""
    return [int(length) for length in _ARRAY.findall(shape)[0][2].split(",") if length]


def _has_axes(axes: Sequence[int], lengths: Sequence[int]) -> bool:
    """Return whether the lengths fit distinct axes, each of this length or less than 10% longer."""
    unmatched = sorted(axes)
    for length in sorted(lengths):
        axis = next((axis for axis in unmatched if length <= axis < 1.1 * length), None)
        if axis is None:
            return False
        unmatched.remove(axis)
    return True


def _split_tuple(shape: str) -> list[str]:
    """Return the elements of a printed tuple, which may be tuples themselves."""
    elements, depth = [""], 0
    for letter in shape.removeprefix("(").removesuffix(")"):
        depth += (letter in "({[") - (letter in ")}]")
        if letter == "," and depth == 0:
            elements.append("")
        else:
            elements[-1] += letter
    return elements
