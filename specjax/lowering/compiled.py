"""Programs compiled for accelerators that need not exist, and their costs.

The costs are memory, memory traffic, communication, and a lower bound of the time.
"""

import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from specjax import decoding
from specjax.chips import Chip
from specjax.decoding.options import default_rule
from specjax.drafters.base import Drafter
from specjax.errors import InputError
from specjax.lowering import abstract, hlo
from specjax.lowering.topologies import compiler_options
from specjax.models.attention import BLOCK, LOOP, SHORT_ROWS, block_width
from specjax.models.sparse_attention import devices_of, entries_read
from specjax.models.transformer import Target
from specjax.planning.work import attention_work, product_work
from specjax.progress import waiting
from specjax.sampling import Sampling


@dataclass(frozen=True)
class Memory:
    """The memory of a program on one chip, in bytes.

    Attributes:
        arguments: the arguments, such as weights and caches.
        temporaries: the temporary memory.
        results: the results that do not reuse the memory of arguments.
    """

    arguments: int
    temporaries: int
    results: int

    @property
    def together(self) -> int:
        """The sum of all."""
        return self.arguments + self.temporaries + self.results


@dataclass(frozen=True)
class TurnCosts:
    """The costs on one chip of one iteration of a loop: the step itself, or a loop inside it.

    Attributes:
        turns: the number of iterations in a step.
        bytes: the bytes read from and written to main memory.
        collectives: the number of collective operations, by kind.
        collective_bytes: the bytes of their results.
        sent: the bytes that each chip sends, in the limit of many chips. A sum over chips is sent
            twice.
        slice_bytes: the bytes that a chip sends to other slices of TPUs over the data center
            network (DCN). The fields above are about the links between chips (ICI).
        kernels: the number of operations that are launched as kernels.
        cycles: the compiler's estimate without custom kernels; 0 if it makes none.
        cycles_by_kind: the estimated cycles of the most expensive operations, by kind and shape.
    """

    turns: int
    bytes: int
    collectives: Mapping[str, int]
    collective_bytes: int
    sent: int
    slice_bytes: int
    kernels: int
    cycles: int
    cycles_by_kind: Mapping[str, int]


@dataclass(frozen=True)
class Compiled:
    """A compiled program.

    Attributes:
        name: the name of the program.
        seconds: the seconds of compilation on this machine.
        memory: the memory on one chip.
        turns: the costs of the step and of its inner loops.
        cache_copies: the copies in a step of arrays that are at least as large as the smallest part
            of a layer's cache and have about as many slots or pages, and of a layer's state.
        largest: the bytes of the largest array that an operation of a step writes to main memory.
        text: the compiled program as text.
    """

    name: str
    seconds: float
    memory: Memory
    turns: tuple[TurnCosts, ...]
    cache_copies: tuple[str, ...]
    largest: int
    text: str

    @property
    def bytes(self) -> int:
        """The bytes moved in a step, with all iterations of its loops."""
        return sum(turn.turns * turn.bytes for turn in self.turns)

    @property
    def collectives(self) -> Mapping[str, int]:
        """The number of collective operations in a step, by kind."""
        total: Counter[str] = Counter()
        for turn in self.turns:
            total.update({kind: turn.turns * count for kind, count in turn.collectives.items()})
        return dict(total)

    @property
    def collective_bytes(self) -> int:
        """The bytes of the results of all collective operations in a step."""
        return sum(turn.turns * turn.collective_bytes for turn in self.turns)

    @property
    def slice_bytes(self) -> int:
        """The bytes that a chip sends to other slices in a step."""
        return sum(turn.turns * turn.slice_bytes for turn in self.turns)

    @property
    def kernels(self) -> int:
        """The number of kernels launched in a step."""
        return sum(turn.turns * turn.kernels for turn in self.turns)

    @property
    def cycles(self) -> int:
        """The compiler's estimate of the cycles of a step."""
        return sum(turn.turns * turn.cycles for turn in self.turns)


@dataclass(frozen=True)
class Setup:
    """The configuration of a generation to compile.

    Attributes:
        target: the target, whose params are shapes.
        mesh: the mesh of the target.
        chip: the chip of each device.
        batch: the number of rows.
        context: the number of tokens of the prompts.
        new_tokens: the maximum number of new tokens.
        sampling: the sampling parameters of all rows. The verification rule is the default of
            `specjax.generate`.
        page: the number of tokens of a page, for paged caches; None for contiguous caches. There
            are as many pages as all rows together can fill.
    """

    target: Target
    mesh: Mesh
    chip: Chip
    batch: int
    context: int
    new_tokens: int = 256
    sampling: Sampling = Sampling(temperature=0.0)
    page: int | None = None

    def __post_init__(self) -> None:
        for name in ("batch", "context", "new_tokens", "page"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise InputError(f"{name}={value}: must be at least 1")
        if self.batch % self.mesh.shape["data"]:
            raise InputError(
                f"batch={self.batch}: the mesh splits it in {self.mesh.shape['data']}; give a"
                " multiple of that"
            )
        config, model = self.target.config, self.mesh.shape["model"]
        if whole := [axis for axis in ("mlp", "vocab", "heads") if config.axis_units[axis] % model]:
            axis = whole[0]
            raise InputError(
                f"mesh: model={model} does not divide the target's {config.axis_units[axis]} units"
                f" of {axis!r}"
            )
        if self.context + self.new_tokens > config.max_positions:
            raise InputError(
                f"context={self.context}: with {self.new_tokens} new tokens too long for the"
                f" target's {config.max_positions} positions"
            )


@dataclass(frozen=True)
class Step:
    """A step of decoding with a drafter, and its lower bounds.

    Attributes:
        drafter: the name of the drafter.
        prefill: the prefill of the prompts.
        decode: the step.
        floor: the bytes that one chip must read in a step: weights, caches and states, once per
            pass over them; of a cache whose entries are selected and copied, those alone.
        cache: the bytes of the target's cache on one chip, without states.
        states: the bytes of the target's states on one chip.
        drafted: the bytes of the drafted tokens' entries on one chip, until they are verified. For
            layers with states, these entries replace a copy of the state for each token.
        flops: the operations of one chip in a step.
        depth: the depth of a draft.
    """

    drafter: str
    prefill: Compiled
    decode: Compiled
    floor: int
    cache: int
    states: int
    drafted: int
    flops: float
    depth: int

    def seconds(self, chip: Chip, chips: int) -> float:
        """Return the seconds of a step by its tightest limit: memory, arithmetic or links."""
        return max(self.limits(chip, chips).values())

    def limits(self, chip: Chip, chips: int) -> dict[str, float]:
        """Return the seconds of a step by each limit."""
        bytes_sent = (chips - 1) / chips * sum(turn.turns * turn.sent for turn in self.decode.turns)
        return {
            "memory": self.decode.bytes / chip.bandwidth,
            "arithmetic": self.flops / chip.flops,
            "links": bytes_sent / (chip.links / 2),
        }


def compile_step(setup: Setup, drafter: Drafter, name: str) -> Step:
    """Compile prefill and the decoding loop with a drafter whose params are shapes."""
    arguments = _arguments(setup, drafter)
    capacity, depth = setup.context + setup.new_tokens, drafter.draft_shape.depth
    lowered = decoding.prefill.lower(*arguments, capacity=capacity)
    prefill, executable = compile_program(f"prefill, {name}", lowered, setup.mesh)
    state = jax.eval_shape(partial(decoding.prefill, capacity=capacity), *arguments)
    state = abstract.with_shardings(state, executable.output_shardings)
    steps = abstract.everywhere(setup.mesh, jax.ShapeDtypeStruct((), jnp.int32))
    cache, states = state.cache.layers, state.cache.states
    verified = entries_read(setup.target.config, cache, setup.mesh, drafter.draft_shape.nodes)
    floor = abstract.bytes_of_pass(setup.target, (verified, states))
    by_layer = [
        entry if linear is None else linear
        for entry, linear in zip(cache, states or (None,) * len(cache), strict=True)
    ]
    floor += abstract.bytes_of_draft(drafter, setup.target, state.drafter, by_layer)
    # The scales of a quantized cache have three axes. They are small: copies of them do not count.
    parts = [
        part
        for part in jax.tree.leaves((cache, state.drafter))
        if capacity in part.shape[2:] and part.ndim > 3
    ]
    layer_states = abstract.states_in((states, state.drafter))
    tables = [layer_state.table for layer_state in layer_states if layer_state.table is not None]
    axis_length = capacity
    if setup.page is not None:
        state = abstract.in_pages(state, setup.page, setup.mesh)
        axis_length = state.cache.pages
    uncopied = [(min(map(abstract.bytes_of_one, parts)), (axis_length,))] if parts else []
    uncopied += [(abstract.bytes_of_one(table), table.shape[2:]) for table in tables]
    blocks = -(-capacity // block_width(capacity, BLOCK, setup.page))
    lowered = decoding.decode.lower(setup.target, drafter, state, steps)
    decode, _ = compile_program(
        f"decode, {name}",
        lowered,
        setup.mesh,
        uncopied=uncopied,
        turns=partial(_assumed_turns, blocks, depth),
        is_loop=True,
    )
    size = abstract.bytes_of_one
    return Step(
        name,
        prefill,
        decode,
        floor,
        size(cache),
        size(states),
        _drafted_bytes(setup, drafter),
        _flops(setup, drafter),
        depth,
    )


def _assumed_turns(blocks: int, depth: int, origin: str) -> int:
    """Return the iterations in a step of a loop whose end depends on data, by its origin.

    All rows are as long as their caches. So they are long, if a program has ways for both.
    """
    if LOOP not in origin:
        return max(1, depth - 1)
    return 0 if SHORT_ROWS in origin else blocks


def _arguments(setup: Setup, drafter: Drafter) -> tuple[Any, ...]:
    """Return the arguments of `decoding.prefill` as shapes."""
    batch, mesh = setup.batch, setup.mesh
    row = partial(abstract.rows, mesh, batch)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    settings = setup.sampling.rows(batch, default_rule(drafter.draft_shape))
    sampling = jax.tree.map(lambda leaf: row(leaf.shape, leaf.dtype), settings)
    lengths = row((batch,), jnp.int32)
    tokens, stop_token_ids = row((batch, setup.context), jnp.int32), row((batch, 1), jnp.int32)
    return (
        setup.target,
        drafter,
        tokens,
        lengths,
        lengths,
        row(keys.shape, keys.dtype),
        stop_token_ids,
        sampling,
    )


def _drafted_bytes(setup: Setup, drafter: Drafter) -> int:
    """Return the bytes of the entries of a draft's tokens in the target, on one chip."""
    make = jax.jit(lambda target: target.new_scratch(setup.batch, drafter.draft_shape.nodes))
    entries = jax.eval_shape(make, setup.target)
    places = (
        make.lower(setup.target)
        .compile(compiler_options=dict(compiler_options(setup.mesh)))
        .output_shardings
    )
    return abstract.bytes_of_one(abstract.with_shardings(entries, places))


def _flops(setup: Setup, drafter: Drafter) -> float:
    """Return the operations of one chip in a step.

    They are the target's pass over the draft, and two for each weight and node of a level.
    """
    config, batch, draft = setup.target.config, setup.batch, drafter.draft_shape
    attention = attention_work(
        config,
        batch,
        draft.nodes,
        setup.context + setup.new_tokens,
        devices=devices_of(setup.mesh),
    ).flops
    target_flops = (product_work(config, batch * draft.nodes).flops + attention) / setup.mesh.size
    reads = drafter.drafting_reads(setup.target)
    weights = draft.depth * abstract.numbers_of_one(reads.level) + abstract.numbers_of_one(
        reads.step
    )
    return target_flops + 2.0 * weights * batch * draft.width


def compile_program(
    name: str,
    lowered: jax.stages.Lowered,
    mesh: Mesh,
    uncopied: Sequence[tuple[int, Sequence[int]]] = (),
    turns: Callable[[str], int] = lambda origin: 1,
    is_loop: bool = False,
) -> tuple[Compiled, jax.stages.Compiled]:
    """Compile a program for the devices of a mesh.

    Args:
        name: the name of the program.
        lowered: the program.
        mesh: the mesh of its arguments.
        uncopied: the arrays that no step should copy: the bytes of each on one device, and the
            lengths of some of its axes. Copies of arrays that are at least as large, and have axes
            that are at least as long and at most a little longer, are reported.
        turns: the assumed number of iterations of an inner loop whose end depends on data, by its
            origin.
        is_loop: whether a step is an iteration of the program's largest loop. Otherwise it is the
            whole program.

    Returns:
        The costs, and the executable.

    Raises:
        InputError: The program cannot be compiled, for instance for lack of memory, or because the
            compiler does not support this version of JAX.
    """
    started = time.perf_counter()
    try:
        with warnings.catch_warnings(), waiting(f"compiling {name}"):
            # JAX warns that programs for missing devices cannot be read from its cache on disk.
            warnings.filterwarnings("ignore", message="Error reading persistent compilation cache")
            executable = lowered.compile(compiler_options=dict(compiler_options(mesh)))
        seconds = time.perf_counter() - started
        text = executable.as_text()
    except jax.errors.JaxRuntimeError as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise InputError(
            f"{name}: cannot be compiled for these chips by the compiler that is installed"
            f" ({reason[:300]})"
        ) from error
    analysis = executable.memory_analysis()
    assert text is not None and analysis is not None  # all of XLA's compilers return both
    program = hlo.HloProgram(text)
    step_turns = program.turns(program.main_loop if is_loop else program.entry, turns)
    operations = [operation for turn in step_turns for operation in turn.operations]
    copies = program.copies(operations, uncopied)
    memory = Memory(
        arguments=analysis.argument_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        results=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    )
    moves = (
        move
        for turn in step_turns
        for move in program.moved(turn.operations)
        if not move[0].kind.startswith("copy")
    )
    largest = max((bytes_written for _, _, bytes_written in moves), default=0)
    costs = tuple(_costs(program, turn) for turn in step_turns)
    return Compiled(name, seconds, memory, costs, tuple(copies), largest, text), executable


def _costs(program: hlo.HloProgram, turn: hlo.Turn) -> TurnCosts:
    collectives = [operation for operation in turn.operations if operation.collective]
    by_kind: Counter[str] = Counter()
    for operation in turn.operations:
        if operation.cycles:
            by_kind[f"{operation.kind} {hlo.without_layout(operation.shape)[:60]}"] += (
                operation.cycles
            )
    return TurnCosts(
        turns=turn.turns,
        bytes=program.bytes_moved(turn.operations),
        collectives=dict(Counter(operation.collective for operation in collectives)),
        collective_bytes=sum(hlo.collective_bytes(operation) for operation in collectives),
        sent=sum(
            hlo.collective_bytes(operation) * (1 + (operation.collective == "all-reduce"))
            for operation in collectives
        ),
        slice_bytes=hlo.sent_between_slices(turn.operations),
        kernels=hlo.kernels(turn.operations),
        cycles=sum(operation.cycles for operation in turn.operations),
        cycles_by_kind=dict(by_kind.most_common(12)),
    )
