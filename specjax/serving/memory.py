"""The memory that the pages and rows of an engine take, computed before the engine is made."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from specjax import decoding
from specjax.decoding import rows as device_rows
from specjax.drafters import Drafter, NoDraft
from specjax.errors import InputError
from specjax.models.cache import groups_of
from specjax.models.transformer import Target
from specjax.sharding import is_on_cpu

USUAL_CAPACITY = 4096
"""The default capacity of a text in tokens, for models with more positions.

`specjax serve` computes its default from the free memory instead: see `capacity_in`.
"""


def usual_page() -> int:
    """Return the default number of tokens per page.

    Examples:
        >>> from specjax.serving.memory import usual_page
        >>> usual_page()  # 256 on a TPU
        64
    """
    return 256 if jax.default_backend() == "tpu" else 64


def usual_chunk(page: int, *, on_cpu: bool) -> int:
    """Return the default number of tokens per chunk of prefill.

    Examples:
        >>> from specjax.serving.memory import usual_chunk
        >>> usual_chunk(16, on_cpu=True), usual_chunk(256, on_cpu=False)
        (64, 512)
    """
    return max(page, 64 if on_cpu else 512)


def page_bytes(target: Target, drafter: Drafter | None, page: int) -> int:
    """Return the bytes of a page of ``page`` tokens, in the caches of target and drafter together.

    On a mesh, it is a page of each group of rows. No array is allocated: the shapes are enough.

    Examples:
        >>> from specjax.serving.memory import page_bytes
        >>> alone = page_bytes(target, None, page=16)
        >>> alone == 2 * page_bytes(target, None, page=8)
        True
        >>> page_bytes(target, specjax.PromptLookup(draft=2), page=16) == alone  # it has no cache
        True
    """
    of_one, of_two = (
        _cache_bytes(target, drafter, page, 2 * page, pages=pages) for pages in (1, 2)
    )
    return of_two - of_one


def row_bytes(target: Target, drafter: Drafter | None, page: int, capacity: int) -> int:
    """Return the bytes of a row beside its pages.

    They are its recurrent states (`specjax.models.states`), the drafter's state outside of pages,
    and its block table. No array is allocated.

    Args:
        target: the target.
        drafter: the drafter; None: plain decoding.
        page: tokens per page.
        capacity: the maximal length of a text in tokens.

    Examples:
        >>> from specjax.serving.memory import row_bytes
        >>> row_bytes(target, None, page=16, capacity=64)  # four page numbers, and the length
        20
    """
    groups = groups_of(target.mesh)
    of_one, of_two = (
        _cache_bytes(target, drafter, page, capacity, rows=times * groups) for times in (1, 2)
    )
    return (of_two - of_one) // groups


def prefix_states_kept(prefix_state: int, pool: int, *, chunk: int, rows: int) -> int | None:
    """Return the largest number of prefix states in each group of rows; None: no limit.

    A prefix state is usually small compared with its chunk. It is large for a target with linear
    attention, and for a draft model with a small cache of its own (`specjax.drafters.Streaming`).
    Then the limit is a quarter of the memory of the pages, or one per row if that is more.

    Args:
        prefix_state: the bytes of a prefix state, which has one row for each group.
        pool: the bytes of all pages of a group.
        chunk: the bytes of the pages of a chunk.
        rows: the number of rows of a group.

    Examples:
        >>> from specjax.serving.memory import prefix_states_kept
        >>> prefix_states_kept(10, pool=8000, chunk=200, rows=4)  # small ones: no limit
        >>> prefix_states_kept(500, pool=8000, chunk=200, rows=4)
        4
        >>> prefix_states_kept(500, pool=80_000, chunk=200, rows=4)
        40
    """
    return None if 4 * prefix_state <= chunk else max(rows, pool // 4 // prefix_state)


def pages_in(
    gigabytes: float,
    target: Target,
    drafter: Drafter | None,
    *,
    rows: int,
    page: int,
    chunk: int | None = None,
    capacity: int | None = None,
    grammars: bool = False,
    penalties: bool = False,
) -> int:
    """Return the number of pages that fit into memory, beside the rows and the prefix states.

    On a mesh, it is the number of pages per group of rows, as for `Engine`.

    Args:
        gigabytes: the memory in units of 10**9 bytes, on all devices together.
        target: the target.
        drafter: the drafter; None: plain decoding.
        rows: the number of rows.
        page: tokens per page.
        chunk: tokens per chunk of prefill; None: the default of `Engine`.
        capacity: the maximal length of a text in tokens; None: the default of `Engine`.
        grammars: whether texts may have grammars. Then there may be two copies of the rows.
        penalties: whether texts may have penalties and biases, which are stored for each row.

    Raises:
        InputError: A text of ``capacity`` tokens does not fit. The message names the memory needed.

    Examples:
        >>> from specjax.serving.memory import page_bytes, pages_in, row_bytes
        >>> rows = 2 * row_bytes(target, None, page=8, capacity=64)
        >>> memory = (rows + 10 * page_bytes(target, None, page=8)) / 1e9
        >>> pages_in(memory, target, None, rows=2, page=8, capacity=64)
        10
    """
    capacity = capacity or min(
        decoding.most_positions(target, drafter or NoDraft()), USUAL_CAPACITY
    )
    sizes, least = (
        _Sizes.of(target, drafter, rows, page, chunk, capacity, grammars, penalties),
        -(-capacity // page),
    )
    pages = sizes.pages_in(gigabytes * 1e9)
    if pages < least:
        of_rows, needed = sizes.rows + sizes.prefix_states, sizes.bytes_of(least)
        beside = f" beside {of_rows:,} bytes for {rows} rows" if 20 * sizes.rows > needed else ""
        raise InputError(
            f"cache_gb={gigabytes:g}: it holds {max(pages, 0) * page} tokens{beside}, but a text"
            f" may have {capacity}; give at least {_rounded_up(needed / 1e9):.3g}, or a smaller"
            f" capacity{' or fewer rows' if beside else ''}"
        )
    return pages


def capacity_in(
    memory: float,
    target: Target,
    drafter: Drafter | None,
    *,
    rows: int,
    page: int,
    chunk: int | None = None,
    grammars: bool = False,
    penalties: bool = False,
) -> int:
    """Return the longest text in tokens that fits into memory.

    It is at most the number of positions of the models, and at least a page.

    Args:
        memory: the memory in bytes, on all devices together.
        target: the target.
        drafter: the drafter; None: plain decoding.
        rows: the number of rows.
        page: tokens per page.
        chunk: tokens per chunk of prefill; None: the default of `Engine`.
        grammars: whether texts may have grammars. Then there may be two copies of the rows.
        penalties: whether texts may have penalties and biases, which are stored for each row.

    Examples:
        >>> from specjax.serving.memory import capacity_in, page_bytes, row_bytes
        >>> capacity_in(1e12, target, None, rows=2, page=8)  # the target's positions
        2048
        >>> of_rows = 2 * row_bytes(target, None, page=8, capacity=2048)
        >>> memory = of_rows + 10 * page_bytes(target, None, page=8)
        >>> capacity_in(memory, target, None, rows=2, page=8) >= 80
        True
    """
    positions = decoding.most_positions(target, drafter or NoDraft())
    of_pages = _of_pages(target, drafter, page)

    # The memory of the rows depends on the capacity, so it cannot be computed directly.
    def holds(capacity: int) -> bool:
        return (
            _Sizes.of(
                target, drafter, rows, page, chunk, capacity, grammars, penalties, of_pages
            ).pages_in(memory)
            * page
            >= capacity
        )

    if holds(positions):
        return positions
    least, beyond = 1, -(-positions // page)  # bisection, in pages of a text; `beyond` does not fit
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if holds(middle * page) else (least, middle)
    return min(positions, least * page)


def free_bytes(mesh: Mesh | None) -> int | None:
    """Return the free memory in bytes: of a mesh's devices, or of this machine if they are CPUs.

    All devices count as the one with the least free memory. None: the free memory is unknown.

    Examples:
        >>> from specjax.serving.memory import free_bytes
        >>> free = free_bytes(None)
        >>> free is None or free > 0  # known on Linux, GPUs and TPUs
        True
    """
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)
    if is_on_cpu(mesh):
        return _free_on_host()
    memories = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in memory and "bytes_in_use" in memory for memory in memories):
        return None
    return len(devices) * max(
        0, min(memory["bytes_limit"] - memory["bytes_in_use"] for memory in memories)
    )


def _free_on_host(root: Path = Path("/")) -> int | None:
    """Return the available memory that Linux reports, within the limit of the container."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        available = next(line for line in lines if line.startswith("MemAvailable:"))
        free = 1024 * int(available.split()[1])
    except (OSError, ValueError, StopIteration):
        return None
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (group / "memory.stat").read_text().splitlines()
        # The page cache counts as used, but the kernel frees it when memory is needed.
        files = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError, StopIteration):  # there is no limit
        return free
    return max(0, min(free, limit - used + files))


@dataclass(frozen=True)
class _Sizes:
    """The memory of the caches of an engine, in bytes.

    Attributes:
        page: a page of each group of rows.
        rows: all rows, beside their pages.
        prefix_states: the smallest memory that is reserved for prefix states.
        share: the memory of a page with its share of the prefix states, divided by the page's.
    """

    page: int
    rows: int
    prefix_states: int
    share: float

    @classmethod
    def of(
        cls,
        target: Target,
        drafter: Drafter | None,
        rows: int,
        page: int,
        chunk: int | None,
        capacity: int,
        grammars: bool,
        penalties: bool,
        of_pages: tuple[int, int] | None = None,
    ) -> "_Sizes":
        """Return the sizes for texts of ``capacity`` tokens.

        ``of_pages`` is the result of `_of_pages`, if the caller has it already. With ``grammars``
        the rows are copied before a call without masks. With ``penalties`` each row has two
        numbers of four bytes for each token of the vocabulary.
        """
        chunk = chunk or usual_chunk(page, on_cpu=is_on_cpu(target.mesh))
        of_page, in_target = of_pages or _of_pages(target, drafter, page)
        of_rows = (2 if grammars else 1) * rows * row_bytes(target, drafter, page, capacity)
        of_rows += rows * 8 * target.config.vocab_size if penalties else 0
        # The limit of `prefix_states_kept` is a number per row or a share of the pages, whichever
        # is more.
        groups = groups_of(target.mesh)
        prefix_state, of_chunk = _prefix_state_bytes(target, drafter, page, capacity), chunk // page
        in_chunk = in_target // groups * of_chunk
        if prefix_states_kept(prefix_state, 0, chunk=in_chunk, rows=rows) is None:
            return cls(of_page, of_rows, 0, 1 + groups * prefix_state / (of_chunk * of_page))
        return cls(of_page, of_rows, rows * prefix_state, 1 + in_target / 4 / of_page)

    def pages_in(self, memory: float) -> int:
        """Return the number of pages that fit into ``memory``."""
        room = memory - self.rows
        pages = min((room - self.prefix_states) / self.page, room / (self.share * self.page))
        return int(pages + 1e-6)  # rounding must not cost a page

    def bytes_of(self, pages: int) -> float:
        """Return the memory of ``pages`` pages, all rows, and the prefix states."""
        return self.rows + max(
            pages * self.page + self.prefix_states, self.share * pages * self.page
        )


def _of_pages(target: Target, drafter: Drafter | None, page: int) -> tuple[int, int]:
    """Return the bytes of a page in both caches together, and in the target's alone."""
    return page_bytes(target, drafter, page), page_bytes(target, None, page)


def _rounded_up(value: float) -> float:
    """Round up to three digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit) * unit


def _cache_bytes(
    target: Target,
    drafter: Drafter | None,
    page: int,
    capacity: int,
    *,
    pages: int = 1,
    rows: int | None = None,
) -> int:
    """Return the bytes of the target's cache and the drafter's state."""

    def empty(target: Target, drafter: Drafter) -> Any:
        sizes = {
            "rows": rows or groups_of(target.mesh),
            "capacity": capacity,
            "pages": pages,
            "page": page,
        }
        return device_rows.empty(target, drafter, **sizes)

    state = jax.eval_shape(empty, target, drafter or NoDraft())
    return _bytes((state.cache, state.drafter))


def _prefix_state_bytes(target: Target, drafter: Drafter | None, page: int, capacity: int) -> int:
    """Return the bytes of a prefix state with a row for each group."""

    def fresh(target: Target, drafter: Drafter) -> Any:
        return device_rows.empty_prefix_state(
            target, drafter, capacity=capacity, pages=1, page=page
        )

    return _bytes(jax.eval_shape(fresh, target, drafter or NoDraft()))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
