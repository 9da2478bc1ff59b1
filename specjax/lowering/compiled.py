"""Programs compiled for accelerators that need not be there, and what each costs: memory, traffic, exchange, time at best."""

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
from specjax.models.attention import BLOCK, LOOP, block_width
from specjax.models.transformer import Target
from specjax.planning.work import attention_work, product_work
from specjax.progress import waiting
from specjax.sampling import Sampling


@dataclass(frozen=True)
class Memory:
    """Bytes on one chip.

    Attributes:
        arguments: weights, caches and whatever else the program is given.
        temporaries: what it needs beside them.
        results: what it returns and was not given.
    """

    arguments: int
    temporaries: int
    results: int

    @property
    def together(self) -> int:
        """All of it."""
        return self.arguments + self.temporaries + self.results


@dataclass(frozen=True)
class TurnCosts:
    """What one turn of a loop costs on one chip: the program's step itself, or a loop inside it.

    Attributes:
        turns: how often it runs in a step.
        bytes: read from and written to main memory.
        collectives: exchanges between chips, by kind.
        collective_bytes: of their results.
        sent: bytes of which each of many chips sends as many: a sum over chips goes round twice.
        slice_bytes: that a chip sends to other slices of TPUs, over the network of the data centre (DCN). What is exchanged
            above goes over the links between chips (ICI).
        kernels: operations that are launched on their own.
        cycles: the compiler's estimate; 0 where it makes none. Custom kernels are not in it.
        cycles_by_kind: likewise, of the operations that take most, by kind and shape.
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
        name: what it does.
        seconds: of compilation, on this machine.
        memory: on one chip.
        turns: the step's, and its inner loops'.
        cache_copies: copies, in a step, of arrays as large as the smallest part of a layer's cache, with as many slots or pages
            or a few more; and of a layer's state.
        largest: bytes of the largest array that an operation of a step writes to main memory.
        text: as the compiler prints it.
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
        """Of a step, with all turns of its loops."""
        return sum(turn.turns * turn.bytes for turn in self.turns)

    @property
    def collectives(self) -> Mapping[str, int]:
        """Of a step, likewise."""
        total: Counter[str] = Counter()
        for turn in self.turns:
            total.update({kind: turn.turns * count for kind, count in turn.collectives.items()})
        return dict(total)

    @property
    def collective_bytes(self) -> int:
        """Of a step, likewise."""
        return sum(turn.turns * turn.collective_bytes for turn in self.turns)

    @property
    def slice_bytes(self) -> int:
        """Of a step, likewise."""
        return sum(turn.turns * turn.slice_bytes for turn in self.turns)

    @property
    def kernels(self) -> int:
        """Of a step, likewise."""
        return sum(turn.turns * turn.kernels for turn in self.turns)

    @property
    def cycles(self) -> int:
        """Of a step, likewise."""
        return sum(turn.turns * turn.cycles for turn in self.turns)


@dataclass(frozen=True)
class Setup:
    """What is generated where.

    Attributes:
        target: abstract.
        mesh: its mesh.
        chip: what each device is.
        batch: rows.
        context: tokens of the prompts.
        new_tokens: most that are generated after them.
        sampling: of all rows; drafts are verified by the rule that `specjax.generate` takes where none is asked for.
        page: tokens of a page, of caches in pages while decoding; None: a row's tokens lie side by side. There are as many
            pages as all rows together can fill.
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
            raise InputError(f"batch={self.batch}: the mesh splits it in {self.mesh.shape['data']}; give a multiple")
        config, model = self.target.config, self.mesh.shape["model"]
        if whole := [axis for axis in ("mlp", "vocab", "heads") if config.axis_units[axis] % model]:
            axis = whole[0]
            raise InputError(f"mesh: model={model} does not divide the target's {config.axis_units[axis]} units of {axis!r}")
        if self.context + self.new_tokens > config.max_positions:
            raise InputError(
                f"context={self.context}: with {self.new_tokens} new tokens too long for the target's {config.max_positions} "
                "positions"
            )


@dataclass(frozen=True)
class Step:
    """A step of decoding with one drafter, and the least that it can take.

    Attributes:
        drafter: its name.
        prefill: reads the prompts.
        decode: the step.
        floor: bytes that one chip must read in a step: weights, caches and states, once for each pass over them.
        cache: bytes that one chip holds of the target's cache, without states.
        states: bytes that one chip holds of the target's states.
        drafted: bytes of the drafted tokens' entries on one chip, until they are accepted or not; of a target with states,
            what takes the place of a copy of them for each token.
        flops: operations of one chip in a step.
        depth: tokens that a draft is deep.
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
        """The longest of what memory, arithmetic and links allow."""
        return max(self.limits(chip, chips).values())

    def limits(self, chip: Chip, chips: int) -> dict[str, float]:
        """Seconds of a step by what holds it up."""
        exchanged = (chips - 1) / chips * sum(turn.turns * turn.sent for turn in self.decode.turns)
        return {
            "memory": self.decode.bytes / chip.bandwidth,
            "arithmetic": self.flops / chip.flops,
            "links": exchanged / (chip.links / 2),
        }


def compile_step(setup: Setup, drafter: Drafter, name: str) -> Step:
    """Compile prefill and the decoding loop with ``drafter``, whose params are shapes."""
    given = _arguments(setup, drafter)
    capacity, depth = setup.context + setup.new_tokens, drafter.draft_shape.depth
    lowered = decoding.prefill.lower(*given, capacity=capacity)
    prefill, executable = compile_program(f"prefill, {name}", lowered, setup.mesh)
    state = jax.eval_shape(partial(decoding.prefill, capacity=capacity), *given)
    state = abstract.with_shardings(state, executable.output_shardings)
    steps = abstract.everywhere(setup.mesh, jax.ShapeDtypeStruct((), jnp.int32))
    cache, states = state.cache.layers, state.cache.states
    floor = abstract.bytes_of_pass(setup.target, (cache, states))
    by_layer = [entry if held is None else held for entry, held in zip(cache, states or (None,) * len(cache), strict=True)]
    floor += abstract.bytes_of_draft(drafter, setup.target, state.drafter, by_layer)
    # Scales of entries in 8 bits have three axes, and are small: a copy of them is none of a cache.
    parts = [part for part in jax.tree.leaves((cache, state.drafter)) if capacity in part.shape[2:] and part.ndim > 3]
    tables = [held.table for held in abstract.states_in((states, state.drafter))]
    axis_length = capacity
    if setup.page is not None:
        state = abstract.in_pages(state, setup.page, setup.mesh)
        axis_length = state.cache.pages
    kept = [(min(map(abstract.bytes_of_one, parts)), (axis_length,))] if parts else []
    kept += [(abstract.bytes_of_one(table), table.shape[2:]) for table in tables]
    blocks = -(-capacity // block_width(capacity, BLOCK))
    lowered = decoding.decode.lower(setup.target, drafter, state, steps)
    decode, _ = compile_program(
        f"decode, {name}",
        lowered,
        setup.mesh,
        kept=kept,
        turns=lambda origin: blocks if LOOP in origin else max(1, depth - 1),
        is_loop=True,
    )
    held = abstract.bytes_of_one
    return Step(
        name, prefill, decode, floor, held(cache), held(states), _drafted_bytes(setup, drafter), _flops(setup, drafter), depth
    )


def _arguments(setup: Setup, drafter: Drafter) -> tuple[Any, ...]:
    """What `decoding.prefill` is given, as shapes."""
    batch, mesh = setup.batch, setup.mesh
    row = partial(abstract.rows, mesh, batch)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), batch))
    settings = setup.sampling.rows(batch, default_rule(drafter.draft_shape))
    sampling = jax.tree.map(lambda leaf: row(leaf.shape, leaf.dtype), settings)
    lengths = row((batch,), jnp.int32)
    tokens, stop_token_ids = row((batch, setup.context), jnp.int32), row((batch, 1), jnp.int32)
    return setup.target, drafter, tokens, lengths, lengths, row(keys.shape, keys.dtype), stop_token_ids, sampling


def _drafted_bytes(setup: Setup, drafter: Drafter) -> int:
    """Of the entries of a draft's tokens in the target, on one chip."""
    make = jax.jit(lambda target: target.new_scratch(setup.batch, drafter.draft_shape.nodes))
    entries = jax.eval_shape(make, setup.target)
    places = make.lower(setup.target).compile(compiler_options=dict(compiler_options(setup.mesh))).output_shardings
    return abstract.bytes_of_one(abstract.with_shardings(entries, places))


def _flops(setup: Setup, drafter: Drafter) -> float:
    """Of one chip in a step: the target's pass over the draft, and two for each weight that a node of a level is made by."""
    config, batch, draft = setup.target.config, setup.batch, drafter.draft_shape
    attention = attention_work(config, batch, draft.nodes, setup.context + setup.new_tokens).flops
    of_target = (product_work(config, batch * draft.nodes).flops + attention) / setup.mesh.size
    reads = drafter.drafting_reads(setup.target)
    weights = draft.depth * abstract.numbers_of_one(reads.level) + abstract.numbers_of_one(reads.step)
    return of_target + 2.0 * weights * batch * draft.width


def compile_program(
    name: str,
    lowered: jax.stages.Lowered,
    mesh: Mesh,
    kept: Sequence[tuple[int, Sequence[int]]] = (),
    turns: Callable[[str], int] = lambda origin: 1,
    is_loop: bool = False,
) -> tuple[Compiled, jax.stages.Compiled]:
    """Compile a program for the devices of ``mesh``.

    Args:
        name: what it does.
        lowered: the program.
        mesh: of its arguments.
        kept: what no step should copy: the bytes of each on one device, and the lengths of some of its axes. A copy that is as
            large, and has axes as long or a little longer, is named.
        turns: how often an inner loop is taken to turn whose end depends on data, by its origin.
        is_loop: whether a step is a turn of the program's largest loop, and not the program itself.

    Returns:
        What it costs, and the executable.

    Raises:
        InputError: it does not compile, for lack of memory perhaps, or the compiler does not go with this version of JAX.
    """
    started = time.perf_counter()
    try:
        with warnings.catch_warnings(), waiting(f"compiling {name}"):
            # What was compiled for a device that is not there cannot be read back from JAX's cache on disk: it says so.
            warnings.filterwarnings("ignore", message="Error reading persistent compilation cache")
            executable = lowered.compile(compiler_options=dict(compiler_options(mesh)))
        seconds = time.perf_counter() - started
        text = executable.as_text()
    except jax.errors.JaxRuntimeError as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        raise InputError(
            f"{name}: cannot be compiled for these chips by the compiler that is installed ({reason[:300]})"
        ) from error
    analysis = executable.memory_analysis()
    assert text is not None and analysis is not None  # all of XLA's compilers give both
    program = hlo.HloProgram(text)
    of_step = program.turns(program.main_loop if is_loop else program.entry, turns)
    operations = [operation for turn in of_step for operation in turn.operations]
    copies = program.copies(operations, kept)
    memory = Memory(
        arguments=analysis.argument_size_in_bytes,
        temporaries=analysis.temp_size_in_bytes,
        results=analysis.output_size_in_bytes - analysis.alias_size_in_bytes,
    )
    made = (found for turn in of_step for found in program.moved(turn.operations) if not found[0].kind.startswith("copy"))
    largest = max((written for _, _, written in made), default=0)
    costs = tuple(_costs(program, turn) for turn in of_step)
    return Compiled(name, seconds, memory, costs, tuple(copies), largest, text), executable


def _costs(program: hlo.HloProgram, turn: hlo.Turn) -> TurnCosts:
    collectives = [operation for operation in turn.operations if operation.collective]
    by_kind: Counter[str] = Counter()
    for operation in turn.operations:
        if operation.cycles:
            by_kind[f"{operation.kind} {hlo.without_layout(operation.shape)[:60]}"] += operation.cycles
    return TurnCosts(
        turns=turn.turns,
        bytes=program.bytes_moved(turn.operations),
        collectives=dict(Counter(operation.collective for operation in collectives)),
        collective_bytes=sum(hlo.array_bytes(operation) for operation in collectives),
        sent=sum(hlo.array_bytes(operation) * (1 + (operation.collective == "all-reduce")) for operation in collectives),
        slice_bytes=hlo.sent_between_slices(turn.operations),
        kernels=hlo.kernels(turn.operations),
        cycles=sum(operation.cycles for operation in turn.operations),
        cycles_by_kind=dict(by_kind.most_common(12)),
    )
