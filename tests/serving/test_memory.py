"""Tests of the number of pages that a given memory holds, against an engine's real arrays."""

import re
from typing import Any

import jax
import pytest

from specjax import decoding
from specjax.decoding import rows as device_rows
from specjax.decoding.constrained_rows import copy_rows
from specjax.drafters import Drafter, NoDraft, PromptLookup, Streaming
from specjax.drafters.methods.draft_model import DraftModel
from specjax.drafts.shapes import DynamicTree
from specjax.errors import InputError
from specjax.models.transformer import Target
from specjax.serving import memory
from specjax.serving.config import EngineConfig
from specjax.serving.device import ClientDrafts, EngineDevice, Sizes
from specjax.sharding import make_mesh
from tests.conftest import HYBRID, tiny_config, tiny_target

PAGE, CHUNK, CAPACITY = 8, 16, 32


def drafter_of(kind: str):
    if kind == "lookup":
        return PromptLookup(draft=2)
    if kind == "none":
        return None
    ring = {"cache": Streaming(sinks=1), "budget": 16} if kind == "ring" else {}
    return DraftModel(tiny_target(**HYBRID if kind == "hybrid" else {}), draft=2, **ring)


def bytes_of(tree) -> int:
    return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


KINDS = [
    (kind, is_hybrid)
    for kind in ("none", "lookup", "model", "ring", "hybrid")
    for is_hybrid in (False, True)
]


@pytest.mark.full
@pytest.mark.parametrize(("kind", "is_hybrid"), KINDS)
def test_pages_and_rows_take_what_is_said(kind: str, is_hybrid: bool) -> None:
    target, drafter = tiny_target(**HYBRID if is_hybrid else {}), drafter_of(kind)

    def taken(pages: int, rows: int) -> int:
        sizes = {"rows": rows, "capacity": CAPACITY, "pages": pages, "page": PAGE}
        state = device_rows.empty(target, drafter or NoDraft(), **sizes)
        return bytes_of((state.cache, state.drafter))

    page = memory.page_bytes(target, drafter, PAGE)
    row = memory.row_bytes(target, drafter, PAGE, CAPACITY)
    assert taken(12, 2) - taken(4, 2) == 8 * page
    assert taken(4, 5) - taken(4, 2) == 3 * row
    assert (row > page) == (is_hybrid or kind in ("ring", "hybrid"))


@pytest.mark.full
@pytest.mark.parametrize(("kind", "is_hybrid"), KINDS)
@pytest.mark.parametrize("pages", [5, 2000])
def test_an_engine_takes_the_memory_that_it_is_given(
    kind: str, is_hybrid: bool, pages: int
) -> None:
    check_memory(tiny_target(**HYBRID if is_hybrid else {}), drafter_of(kind), pages)


@pytest.mark.parametrize("pages", [5, 2000])
def test_an_engine_on_a_mesh_takes_the_memory_that_it_is_given(pages: int) -> None:
    """Check it where a prefix state has a row for each group of rows."""
    target = Target.init(tiny_config(**HYBRID), jax.random.key(0), mesh=make_mesh(2, 1))
    check_memory(target, None, pages)


def check_memory(target: Target, drafter: Drafter | None, pages: int) -> None:
    """Check that an engine with the computed number of pages fits, with its prefix states.

    If the number of prefix states is limited, the limit is a quarter of the pages' memory, or one
    per row if that is more.
    """

    def device(pages: int) -> EngineDevice:
        sizes = Sizes(
            rows=2,
            widths=(2,),
            capacity=CAPACITY,
            pages=pages,
            page=PAGE,
            chunk=CHUNK,
            steps=8,
            max_logprobs=0,
        )
        return EngineDevice(target, [drafter or NoDraft()], sizes)

    def needed(device: EngineDevice) -> int:
        """Return the bytes of a device with the largest number of prefix states.

        If that number is not limited, every chunk has one.
        """
        limit, chunks = device.most_prefix_states(), device.sizes.pages / (CHUNK // PAGE)
        prefix_states = device.groups * (chunks if limit is None else limit)
        state_bytes = bytes_of((device.state.cache, device.state.drafter))
        return state_bytes + prefix_states * bytes_of(device._empty_prefix_state)

    first = device(pages)
    has_limit = bool(first.most_prefix_states())
    available, prefix_state = needed(first), bytes_of(first._empty_prefix_state) if has_limit else 0
    fitting = memory.pages_in(
        available / 1e9, target, drafter, rows=2, page=PAGE, chunk=CHUNK, capacity=CAPACITY
    )
    assert needed(device(fitting)) <= available
    chunk_bytes = memory.page_bytes(target, None, PAGE) // first.groups * (CHUNK // PAGE)
    assert not has_limit or 4 * prefix_state > chunk_bytes
    # A quarter of the pages' memory is not a whole number of prefix states, so some pages may be
    # lost, but no more than one prefix state takes.
    missing = (pages - fitting) * memory.page_bytes(target, drafter, PAGE)
    assert 0 <= missing <= prefix_state * first.groups


def test_memory_on_a_mesh_is_that_of_all_groups() -> None:
    config = tiny_config(**HYBRID)
    alone, split = (
        Target.init(config, jax.random.key(0), mesh=mesh) for mesh in (None, make_mesh(2, 1))
    )
    row = memory.row_bytes(alone, None, PAGE, CAPACITY)
    assert memory.row_bytes(split, None, PAGE, CAPACITY) == row
    assert memory.page_bytes(split, None, PAGE) == 2 * memory.page_bytes(alone, None, PAGE)


def test_memory_for_less_than_a_text_is_refused() -> None:
    target = tiny_target()
    page = memory.page_bytes(target, None, PAGE)
    rows = 2 * memory.row_bytes(target, None, PAGE, CAPACITY)
    sizes = {"rows": 2, "page": PAGE, "capacity": CAPACITY}
    assert memory.pages_in((rows + 4 * page) / 1e9, target, None, **sizes) == 4
    with pytest.raises(
        InputError, match=r"cache_gb=\S+ it holds 24 tokens, .* have 32; give at least .* capacity$"
    ) as error:
        memory.pages_in((rows + 3.9 * page) / 1e9, target, None, **sizes)
    (enough,) = re.findall(r"give at least (\S+),", str(error.value))
    assert 4 <= memory.pages_in(float(enough), target, None, **sizes) <= 5


def test_memory_of_grammars_is_that_of_a_copy_of_the_rows() -> None:
    target, sizes = tiny_target(**HYBRID), {"rows": 2, "page": PAGE, "capacity": CAPACITY}
    config = {"capacity": CAPACITY, "pages": 8, "page": PAGE}
    state = device_rows.empty(target, NoDraft(), rows=2, **config)
    copied = bytes_of(copy_rows(state).cache)
    assert copied == 2 * memory.row_bytes(target, None, PAGE, CAPACITY)
    for pages in (8, 40):
        without = memory.pages_in(pages / 1e3, target, None, **sizes)
        more = pages / 1e3 + copied / 1e9
        assert memory.pages_in(more, target, None, **sizes, grammars=True) == without


def test_memory_for_less_than_the_rows_is_refused() -> None:
    target = tiny_target(**HYBRID)
    with pytest.raises(
        InputError, match=r"0 tokens beside [\d,]+ bytes for 9 rows, .* or fewer rows"
    ):
        memory.pages_in(1e-6, target, None, rows=9, page=PAGE, capacity=CAPACITY)


@pytest.mark.full_except("none-False", "lookup-False")
@pytest.mark.parametrize(("kind", "is_hybrid"), KINDS)
def test_the_longest_text_that_memory_holds_has_its_pages_there(kind: str, is_hybrid: bool) -> None:
    target, drafter = tiny_target(**HYBRID if is_hybrid else {}), drafter_of(kind)
    sizes = {"rows": 2, "page": PAGE, "chunk": CHUNK}
    positions = decoding.most_positions(target, drafter or NoDraft())
    assert memory.capacity_in(1e15, target, drafter, **sizes) == positions

    rows = 2 * memory.row_bytes(target, drafter, PAGE, positions)
    available = 2 * rows + 30 * memory.page_bytes(target, drafter, PAGE)

    def holds(capacity: int) -> bool:
        try:
            pages = memory.pages_in(available / 1e9, target, drafter, **sizes, capacity=capacity)
        except InputError:
            return False
        return pages * PAGE >= capacity

    capacity = memory.capacity_in(available, target, drafter, **sizes)
    assert holds(capacity)
    assert capacity == positions or not holds(capacity + PAGE)


def test_memory_that_holds_nothing_is_left_to_who_refuses_it() -> None:
    target = tiny_target(max_positions=2 * PAGE)
    assert memory.capacity_in(1.0, target, None, rows=2, page=PAGE, chunk=CHUNK) == PAGE


def test_free_memory_is_what_linux_and_the_container_leave(tmp_path) -> None:
    assert memory._free_on_host(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text(
        "MemTotal: 64 kB\nMemFree: 3 kB\nMemAvailable:      10 kB\n"
    )
    assert memory._free_on_host(tmp_path) == 10_240
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5000\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 1000\n")
    assert memory._free_on_host(tmp_path) == 10_240
    for limit, free in ((9000, 5000), (10**12, 10_240), (1000, 0)):
        (group / "memory.max").write_text(f"{limit}\n")
        assert memory._free_on_host(tmp_path) == free
    on_this_machine = memory.free_bytes(None)
    assert on_this_machine is None or on_this_machine > 0


# --- masks ----------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_programs_of_masked_steps_need_little_more_memory_than_free_ones() -> None:
    """Check XLA's plans for 4 rows with 60 nodes: no mask of all nodes is stored unpacked."""
    target = tiny_target(vocab_size=20_000, num_layers=1)
    tree = DynamicTree(top_k=8, depth=6, nodes=60)
    drafter = DraftModel(target, draft=tree)
    clients = ClientDrafts(nodes=60, depth=6)
    config = EngineConfig.of(
        target,
        drafter,
        rows=4,
        drafts=(tree,),
        capacity=64,
        pages=None,
        page=8,
        chunk=8,
        steps=1,
        tokenizer=None,
        widths=(4,),
        max_logprobs=0,
        max_prediction=0,
        clients=clients,
    )
    device = EngineDevice(target, config.drafters, config.sizes, clients, grammars=True)
    programs = {
        (program.kind, *program.key): program
        for program in device.programs(config.placeholder_settings())
    }

    def needed(*key: Any) -> int:
        return programs[key].lower().compile().memory_analysis().temp_size_in_bytes

    # A mask as booleans takes a quarter of the logits.
    of_logits = 4 * 60 * 20_000 * 4
    free, masked = needed("decode", 4, 0, False), needed("advance", 4, False, False)
    assert free > of_logits / 2
    assert masked - free < of_logits / 16
    assert needed("verify_masked", 4) - needed("verify", 4) < of_logits / 16
