"""Read compiled programs.

Small ones are compiled here, and others are texts as other compilers print them.
"""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from specjax.lowering import hlo
from specjax.lowering.hlo import HloProgram
from specjax.sharding import make_mesh

ROW = 4 * 1024  # bytes


def compiled(function, *shapes, **options) -> HloProgram:
    shapes = [
        jax.ShapeDtypeStruct(shape, jnp.float32) if isinstance(shape, tuple) else shape
        for shape in shapes
    ]
    return HloProgram(jax.jit(function, **options).lower(*shapes).compile().as_text())


def step(program: HloProgram, unknown: int = 1) -> list[hlo.Turn]:
    return program.turns(program.main_loop, lambda origin: unknown)


def test_what_goes_in_and_comes_out_is_moved() -> None:
    program = compiled(lambda x, y: jnp.sin(x) + y, (1024,), (1024,))
    (turn,) = step(program)
    assert turn.turns == 1
    assert program.bytes_moved(turn.operations) == 3 * ROW


def test_a_row_that_is_looked_up_is_all_that_is_read_of_a_table() -> None:
    program = compiled(
        lambda table, i: jnp.sin(table[i]), (5000, 1024), jax.ShapeDtypeStruct((), jnp.int32)
    )
    (turn,) = step(program)
    assert 2 * ROW <= program.bytes_moved(turn.operations) < 5 * ROW


STACK = """
%taken (param_0.1: bf16[4,64,64], param_1.1: s32[]) -> bf16[64,64] {
  %param_0.1 = bf16[4,64,64]{2,1,0} parameter(0)
  %param_1.1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice.1 = bf16[1,64,64]{2,1,0} dynamic-slice(%param_0.1, %param_1.1, %zero, %zero), \
dynamic_slice_sizes={1,64,64}
  ROOT %bitcast.1 = bf16[64,64]{1,0} bitcast(%slice.1)
}

%handed_on (param_0.2: bf16[64,64]) -> bf16[64,64] {
  %param_0.2 = bf16[64,64]{1,0} parameter(0)
  ROOT %bitcast.2 = bf16[64,64]{1,0} bitcast(%param_0.2)
}

%product (param_0.3: bf16[4,64,64], param_1.3: s32[], param_2.3: bf16[64,64], param_3.3: \
bf16[8,64]) -> bf16[8,64] {
  %param_0.3 = bf16[4,64,64]{2,1,0} parameter(0)
  %param_1.3 = s32[] parameter(1)
  %param_2.3 = bf16[64,64]{1,0} parameter(2)
  %param_3.3 = bf16[8,64]{1,0} parameter(3)
  %one = bf16[64,64]{1,0} fusion(%param_0.3, %param_1.3), kind=kLoop, calls=%taken
  %all = bf16[64,64]{1,0} fusion(%param_2.3), kind=kLoop, calls=%handed_on
  %first = bf16[8,64]{1,0} convolution(%param_3.3, %one), dim_labels=bf_io->bf
  ROOT %second = bf16[8,64]{1,0} convolution(%first, %all), dim_labels=bf_io->bf
}

ENTRY %main (stack: bf16[4,64,64], number: s32[], weight: bf16[64,64], x: bf16[8,64]) -> \
bf16[8,64] {
  %stack = bf16[4,64,64]{2,1,0} parameter(0)
  %number = s32[] parameter(1)
  %weight = bf16[64,64]{1,0} parameter(2)
  %x = bf16[8,64]{1,0} parameter(3)
  ROOT %fusion.1 = bf16[8,64]{1,0} fusion(%stack, %number, %weight, %x), kind=kOutput, \
calls=%product
}
"""


def test_of_a_stack_of_experts_one_is_read_where_a_fusion_inside_a_fusion_takes_it() -> None:
    (turn,) = step(HloProgram(STACK))
    matrix, rows = 2 * 64 * 64, 2 * 8 * 64
    # The expert, its number, a matrix that is read whole, the rows of the input and of the output.
    assert HloProgram(STACK).bytes_moved(turn.operations) == matrix + 4 + matrix + rows + rows


UPDATE = """
%raised (param_0.1: f32[512,1024], param_1.1: s32[], param_2.1: s32[], param_3.1: f32[1,1024]) -> \
f32[512,1024] {
  %param_0.1 = f32[512,1024]{1,0} parameter(0)
  %param_1.1 = s32[] parameter(1)
  %param_2.1 = s32[] parameter(2)
  %param_3.1 = f32[1,1024]{1,0} parameter(3)
  %zero = s32[] constant(0)
  %row.1 = f32[SIZE,1024]{1,0} dynamic-slice(%param_0.1, READ, %zero), \\
dynamic_slice_sizes={SIZE,1024}
  %highest.1 = f32[1,1024]{1,0} reduce(%row.1), dimensions={0}
  %higher.1 = f32[1,1024]{1,0} maximum(%highest.1, %param_3.1)
  ROOT %updated.1 = f32[512,1024]{1,0} dynamic-update-slice(%param_0.1, %higher.1, %param_1.1, \
%zero)
}

ENTRY %main (table: f32[512,1024], number: s32[], other: s32[], row: f32[1,1024]) -> \
f32[512,1024] {
  %table = f32[512,1024]{1,0} parameter(0)
  %number = s32[] parameter(1)
  %other = s32[] parameter(2)
  %row = f32[1,1024]{1,0} parameter(3)
  ROOT %fusion.1 = f32[512,1024]{1,0} fusion(%table, %number, %other, %row), kind=kLoop, \
calls=%raised
}
"""


@pytest.mark.parametrize(
    ("read", "rows", "moved"),
    [
        pytest.param("%param_1.1", 1, 3 * ROW + 4, id="the row that is written"),
        pytest.param("%param_2.1", 1, 2 * 512 * ROW + ROW + 2 * 4, id="another row"),
        pytest.param("%param_1.1", 2, 2 * 512 * ROW + ROW + 4, id="the next row, too"),
    ],
)
def test_a_row_that_is_read_and_written_is_updated_in_place(read, rows, moved) -> None:
    """A kernel that reads another row than it writes needs a copy of the table.

    The bytes are those of rows, and four for the number of each row.
    """
    program = HloProgram(UPDATE.replace("READ", read).replace("SIZE", str(rows)))
    (turn,) = step(program)
    assert program.bytes_moved(turn.operations) == moved


def test_of_what_is_updated_in_place_the_update_is_moved() -> None:
    def fill(table, row):
        return jax.lax.fori_loop(
            0,
            7,
            lambda i, table: jax.lax.dynamic_update_slice(table, (row + i)[None], (i, 0)),
            table,
        )

    program = compiled(fill, (5000, 1024), (1024,), donate_argnums=0)
    # Newer compilers for CPUs wrap the loop, so that it is not the only one.
    turn = step(program)[-1]
    assert ROW <= program.bytes_moved(turn.operations) < 8 * ROW
    assert not program.copies(turn.operations, [(ROW, ())])


def test_turns_of_loops_inside_a_step() -> None:
    def two(x, enough):
        def body(x):
            x = jax.lax.fori_loop(0, 7, lambda i, x: jnp.sin(x) @ jnp.eye(64), x)
            return jax.lax.while_loop(
                lambda x: jnp.sum(x) < enough, lambda x: jnp.exp(x) @ jnp.eye(64), x
            )

        return jax.lax.while_loop(lambda x: x[0, 0] < 1.0, body, x)

    program = compiled(two, (64, 64), ())
    # A loop that only counts has a known number of turns. A loop whose end depends on data has the
    # number that ``step`` passes.
    assert sorted(turn.turns for turn in step(program, unknown=5)) == [1, 5, 7]


def test_exchanges_between_devices() -> None:
    mesh = make_mesh(1, 4)
    rows, columns = (
        NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("model",), (None, "model"))
    )
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32, sharding=columns)
    weight = jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=rows)
    everywhere = NamedSharding(mesh, PartitionSpec())
    program = compiled(lambda x, weight: x @ weight, x, weight, out_shardings=everywhere)
    (turn,) = step(program)
    (exchange,) = [operation for operation in turn.operations if operation.collective]
    assert exchange.collective == "all-reduce"
    assert hlo.collective_bytes(exchange) == 4 * 8 * 32


TPU = """HloModule step, is_scheduled=true

%fused (p0: bf16[8,64], p1: bf16[64,64]) -> bf16[8,64] {
  %p0 = bf16[8,64]{1,0} parameter(0)
  %p1 = bf16[64,64]{1,0} parameter(1)
  ROOT %c = bf16[8,64]{1,0} convolution(%p0, %p1), dim_labels=bf_io->bf
}

ENTRY %main (x: bf16[8,64], w: bf16[64,64], k: bf16[8,512,64]) -> bf16[8,64] {
  %x = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %w = bf16[64,64]{1,0:T(8,128)(2,1)} parameter(1)
  %k = bf16[8,512,64]{2,1,0:T(8,128)(2,1)} parameter(2)
  %slice-start = ((bf16[64,64]{1,0:T(8,128)(2,1)}), bf16[32,64]{1,0:T(8,128)(2,1)S(1)}, \
u32[]{:S(2)}) slice-start(%w)
  %slice-done = bf16[32,64]{1,0:T(8,128)(2,1)S(1)} slice-done(%slice-start)
  %copy-start = (bf16[64,64]{1,0:T(8,128)(2,1)S(1)}, bf16[64,64]{1,0:T(8,128)(2,1)}, \
u32[]{:S(2)}) copy-start(%w)
  %copy-done = bf16[64,64]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %again = bf16[8,512,64]{1,2,0:T(8,128)(2,1)} copy(%k), metadata={op_name="jit(step)/copy"}
  ROOT %f = bf16[8,64]{1,0:T(8,128)(2,1)} fusion(%x, %copy-done), kind=kOutput, calls=%fused, \
metadata={op_name="jit(step)/dot"}, backend_config={"estimated_cycles":"1234"}
}
"""


def test_what_lies_in_fast_memory_is_not_moved_and_prefetches_are() -> None:
    program = HloProgram(TPU)
    (turn,) = step(program)
    moved = {
        operation.name: read_bytes + write_bytes
        for operation, read_bytes, write_bytes in program.moved(turn.operations)
    }
    weight, cache = 2 * 64 * 64, 2 * 8 * 512 * 64
    assert moved == {
        "%slice-start": weight // 2,
        "%copy-start": weight,
        "%again": 2 * cache,
        "%f": 2 * 8 * 64,
    }
    assert [operation.cycles for operation in turn.operations if operation.cycles] == [1234]
    assert hlo.kernels(turn.operations) == 2


JOINED = """HloModule step, is_scheduled=true

%join (p0: bf16[8,512,64], p1: bf16[8,3,64]) -> bf16[8,515,64] {
  %p0 = bf16[8,512,64]{2,1,0} parameter(0)
  %p1 = bf16[8,3,64]{2,1,0} parameter(1)
  ROOT %c = bf16[8,515,64]{2,1,0} concatenate(%p0, %p1), dimensions={1}
}

ENTRY %main (k: bf16[8,512,64], own: bf16[8,3,64]) -> bf16[8,515,64] {
  %k = bf16[8,512,64]{2,1,0} parameter(0)
  %own = bf16[8,3,64]{2,1,0} parameter(1)
  ROOT %f = bf16[8,515,64]{2,1,0} fusion(%k, %own), kind=kLoop, calls=%join
}
"""


def test_a_cache_that_is_joined_with_a_draft_is_copied() -> None:
    program = HloProgram(JOINED)
    (turn,) = step(program)
    assert program.copies(turn.operations, [(2 * 8 * 512 * 64, (512,))]) == ["bf16[8,515,64]"]
    assert not program.copies(turn.operations, [(2 * 8 * 512 * 64, (400,))])
    assert program.copies(turn.operations, [(1, (400,)), (1, (512, 64))])


@pytest.mark.parametrize(
    ("large", "lengths", "copies"),
    [
        (2 * 8 * 512 * 64, (), ["bf16[8,512,64]"]),
        (2 * 8 * 512 * 64 + 1, (), []),
        (2 * 8 * 512 * 64, (512,), ["bf16[8,512,64]"]),
        (2 * 8 * 512 * 64, (513,), []),
        (2 * 8 * 512 * 64, (400,), []),
        (2 * 8 * 512 * 64, (64, 512), ["bf16[8,512,64]"]),
        (2 * 8 * 512 * 64, (512, 512), []),
    ],
)
def test_copies_within_main_memory_are_named(large, lengths, copies) -> None:
    """Leave out the weights that are fetched into fast memory."""
    program = HloProgram(TPU)
    assert program.copies(step(program)[0].operations, [(large, lengths)]) == copies


KERNEL = """HloModule step, is_scheduled=true

ENTRY %main (t: s32[64], q: bf16[8,64], k: bf16[128,16,64]) -> bf16[8,64] {
  %t = s32[64]{0} parameter(0)
  %q = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} parameter(1)
  %k = bf16[128,16,64]{2,1,0:T(8,128)(2,1)} parameter(2)
  ROOT %f = bf16[8,64]{1,0} custom-call(%t, %q, %k, %k, /*index=4*/%k), \
custom_call_target="tpu_custom_call"CONFIG
}
"""


def cost_estimate(bytes_accessed: int) -> str:
    estimate = f'{{"flops":"1","bytes_accessed":"{bytes_accessed}"}}'
    return f', backend_config={{"custom_call_config":{{"cost_estimate":{estimate}}}}}'


@pytest.mark.parametrize(
    ("config", "of_pool"),
    [
        ("", 2 * 128 * 16 * 64),
        (
            cost_estimate(bytes_accessed=5_000_000),
            2 * 128 * 16 * 64,
        ),
        (
            cost_estimate(bytes_accessed=70_000),
            70_000 - 4 * 64,
        ),
    ],
)
def test_a_pool_that_a_kernel_is_given_several_times_is_read_once(config, of_pool) -> None:
    """Count a pool once, and less if the kernel says that it accesses fewer bytes."""
    program = HloProgram(KERNEL.replace("CONFIG", config))
    assert program.bytes_moved(step(program)[0].operations) == 4 * 64 + of_pool + 2 * 8 * 64


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("%a = f32[8,32]{1,0} all-reduce(%x), to_apply=%add", 4 * 8 * 32),
        ("%a = (f32[1024]{0}, f32[4]{0}) all-reduce-start(%x, %y), to_apply=%add", 4 * 1028),
        ("%a = (f32[64]{0}, f32[512]{0}) all-gather-start(%x), dimensions={0}", 4 * 512),
        (
            (
                "%a = ((f32[64]{0}, s8[8]{0}), (f32[512]{0}, s8[64]{0})) all-gather-start(%x, %y),"
                " dimensions={0}"
            ),
            4 * 512 + 64,
        ),
        (
            (
                "%a = (f32[256]{0}, f32[256]{0}, u32[]{:S(2)}, u32[]{:S(2)})"
                " collective-permute-start(%x)"
            ),
            4 * 256,
        ),
        ("%a = f8e4m3fn[100]{0} all-to-all(%x), dimensions={0}", 100),
    ],
)
def test_the_bytes_of_an_exchange(line, size) -> None:
    operation = hlo._operation(line)
    assert operation.collective
    assert hlo.collective_bytes(operation) == size


BETWEEN_SLICES = """
ENTRY %main (x: bf16[32,4096]) -> bf16[32,4096] {
  %x = bf16[32,4096]{1,0} parameter(0)
  %token = token[] after-all(), frontend_attributes={MegascaleRendezvousKeyName="all-reduce.1_0"}
  %sum = bf16[32,4096]{1,0} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%add
  %send = (bf16[32,4096]{1,0:T(8,128)(2,1)}, u32[], token[]) send(%sum, %token), channel_id=2, \
is_host_transfer=true,\
 frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime",\
_xla_megascale_transfer_type="ALL_REDUCE"}
  %own = (bf16[32,4096]{1,0}, u32[], token[]) send(%sum, %token), channel_id=3, \
is_host_transfer=true
  %recv = (bf16[32,4096]{1,0}, u32[], token[]) recv(%token), channel_id=4, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %send-done = token[] send-done(%send), channel_id=2, is_host_transfer=true, \
frontend_attributes={_xla_host_transfer_handler_name="xla_megascale_runtime"}
  %recv-done = (bf16[32,4096]{1,0}, token[]) recv-done(%recv), channel_id=4, is_host_transfer=true
  ROOT %result = bf16[32,4096]{1,0} get-tuple-element(%recv-done), index=0
}
"""


def test_what_goes_to_another_slice_is_told_from_what_goes_to_another_chip() -> None:
    """Count the bytes of sends through the runtime between slices, once, where they begin.

    No other send is counted.
    """
    (turn,) = step(HloProgram(BETWEEN_SLICES))
    assert hlo.sent_between_slices(turn.operations) == 2 * 32 * 4096
    (exchange,) = [operation for operation in turn.operations if operation.collective]
    assert hlo.collective_bytes(exchange) == 2 * 32 * 4096
