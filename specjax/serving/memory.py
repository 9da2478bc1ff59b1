"""How much memory the pages and the rows of an engine's caches take, before there is an engine."""

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
"""Tokens of the longest text, unless asked for otherwise, where the models have room for more. `specjax serve` goes by what
memory holds: see `capacity_in`."""


def usual_page() -> int:
    """Tokens of a page, unless asked for otherwise.

    Examples:
        >>> from specjax.serving.memory import usual_page
        >>> usual_page()  # on a TPU 256
        64
    """
    return 256 if jax.default_backend() == "tpu" else 64


def usual_chunk(page: int, *, on_cpu: bool) -> int:
    """Tokens of a prompt that are read at a time, unless asked for otherwise.

    Examples:
        >>> from specjax.serving.memory import usual_chunk
        >>> usual_chunk(16, on_cpu=True), usual_chunk(256, on_cpu=False)
        (64, 512)
    """
    return max(page, 64 if on_cpu else 512)


def page_bytes(target: Target, drafter: Drafter | None, page: int) -> int:
    """Bytes of a page of ``page`` tokens, in the target's cache and the drafter's together; on a mesh, of a page of each group.

    Nothing is computed: it follows from the shapes.

    Examples:
        >>> from specjax.serving.memory import page_bytes
        >>> alone = page_bytes(target, None, page=16)
        >>> alone == 2 * page_bytes(target, None, page=8)
        True
        >>> page_bytes(target, specjax.PromptLookup(draft=2), page=16) == alone  # it has no cache
        True
    """
    one, two = (_cache_bytes(target, drafter, page, 2 * page, pages=pages) for pages in (1, 2))
    return two - one


def row_bytes(target: Target, drafter: Drafter | None, page: int, capacity: int) -> int:
    """Bytes that a row takes beside its pages: its states (`specjax.models.states`), what the drafter keeps of it outside of
    pages, and the numbers of its pages. Nothing is computed.

    Args:
        target: the target.
        drafter: its drafter; None: there is none.
        page: tokens of a page.
        capacity: most tokens of a text.

    Examples:
        >>> from specjax.serving.memory import row_bytes
        >>> row_bytes(target, None, page=16, capacity=64)  # four numbers of pages, and one of tokens
        20
    """
    groups = groups_of(target.mesh)
    one, two = (_cache_bytes(target, drafter, page, capacity, rows=times * groups) for times in (1, 2))
    return (two - one) // groups


def prefix_states_kept(prefix_state: int, pool: int, *, chunk: int, rows: int) -> int | None:
    """From the ends of how many chunks of prompts other texts may go on, in each group of rows; None: of all.

    The prefix state of such an end usually takes little memory beside the chunk before it. The
    states of a target with linear attention take much, and so does a draft model's small cache (`specjax.drafters.Streaming`):
    then as many are kept as fill a quarter of what the pages take, and at least one for each row.

    Args:
        prefix_state: bytes of a prefix state. It has a row for each group, of which one is read.
        pool: bytes of all pages of a group.
        chunk: bytes of a chunk's pages.
        rows: of a group.

    Examples:
        >>> from specjax.serving.memory import prefix_states_kept
        >>> prefix_states_kept(10, pool=8000, chunk=200, rows=4), prefix_states_kept(500, pool=8000, chunk=200, rows=4)
        (None, 4)
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
) -> int:
    """How many pages there are in so much memory, beside what the rows take and what prefixes keep at their ends: for each
    group of rows, as `Engine` takes them.

    Args:
        gigabytes: of 10**9 bytes, on all devices together.
        target: the target.
        drafter: its drafter; None: there is none.
        rows: most texts that are generated at a time.
        page: tokens of a page.
        chunk: tokens of a prompt that are read at a time; None: as `Engine` has it.
        capacity: most tokens of a text; None: as `Engine` has it.

    Raises:
        InputError: one text would not fit.

    Examples:
        >>> from specjax.serving.memory import page_bytes, pages_in, row_bytes
        >>> rows = 2 * row_bytes(target, None, page=8, capacity=64)
        >>> memory = (rows + 10 * page_bytes(target, None, page=8)) / 1e9
        >>> pages_in(memory, target, None, rows=2, page=8, capacity=64)
        10
    """
    capacity = capacity or min(decoding.most_positions(target, drafter or NoDraft()), USUAL_CAPACITY)
    sizes, least = _Sizes.of(target, drafter, rows, page, chunk, capacity), -(-capacity // page)
    pages = sizes.pages_in(gigabytes * 1e9)
    if pages < least:
        of_rows, needed = sizes.rows + sizes.prefix_states, sizes.bytes_of(least)
        beside = f", {of_rows:,} bytes for {rows} rows beside their pages" if 20 * sizes.rows > needed else ""
        raise InputError(
            f"cache_gb={gigabytes:g}: {max(pages, 0) * page} tokens{beside}, and a text may have {capacity}; give at least "
            f"{_rounded_up(needed / 1e9):.3g}, or a smaller capacity{' or fewer rows' if beside else ''}"
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
) -> int:
    """Return how many tokens a text may have in so much memory: at most what the models have positions for, at least a page.

    Args:
        memory: bytes, on all devices together.
        target: the target.
        drafter: its drafter; None: there is none.
        rows: most texts that are generated at a time.
        page: tokens of a page.
        chunk: tokens of a prompt that are read at a time; None: as `Engine` has it.

    Examples:
        >>> from specjax.serving.memory import capacity_in, page_bytes, row_bytes
        >>> capacity_in(1e12, target, None, rows=2, page=8)  # the target's positions
        2048
        >>> of_rows = 2 * row_bytes(target, None, page=8, capacity=2048)
        >>> capacity_in(of_rows + 10 * page_bytes(target, None, page=8), target, None, rows=2, page=8) >= 80
        True
    """
    positions = decoding.most_positions(target, drafter or NoDraft())
    of_pages = _of_pages(target, drafter, page)

    def holds(capacity: int) -> bool:  # what rows take depends on the capacity, too
        return _Sizes.of(target, drafter, rows, page, chunk, capacity, of_pages).pages_in(memory) * page >= capacity

    if holds(positions):
        return positions
    least, beyond = 1, -(-positions // page)  # pages of a text: as many fit perhaps, and so many do not
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if holds(middle * page) else (least, middle)
    return min(positions, least * page)


def free_bytes(mesh: Mesh | None) -> int | None:
    """Return how much memory is free now: of the devices of a mesh, on CPUs of this machine; None: nobody says.

    A device counts as the one that has the least.

    Examples:
        >>> from specjax.serving.memory import free_bytes
        >>> free = free_bytes(None)
        >>> free is None or free > 0  # Linux says, and so do GPUs and TPUs
        True
    """
    devices = jax.local_devices()[:1] if mesh is None else list(mesh.local_devices)
    if is_on_cpu(mesh):
        return _free_on_host()
    known = [device.memory_stats() or {} for device in devices]
    if not all("bytes_limit" in each and "bytes_in_use" in each for each in known):
        return None
    return len(devices) * max(0, min(each["bytes_limit"] - each["bytes_in_use"] for each in known))


def _free_on_host(root: Path = Path("/")) -> int | None:
    """Return what Linux says is available, and no more than what a container's limit leaves."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, ValueError, StopIteration):
        return None
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        lines = (group / "memory.stat").read_text().splitlines()
        files = next(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))  # can be taken back
    except (OSError, ValueError, StopIteration):  # there is no limit
        return free
    return max(0, min(free, limit - used + files))


@dataclass(frozen=True)
class _Sizes:
    """What the caches of an engine take, in bytes.

    Attributes:
        page: a page, of each group of rows.
        rows: all rows, beside their pages.
        prefix_states: what is kept at the ends of prefixes at least.
        share: with what is kept there a page takes so many times its own bytes.
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
        of_pages: tuple[int, int] | None = None,
    ) -> "_Sizes":
        """Return them for texts of ``capacity`` tokens; with `_of_pages`, where that is known."""
        chunk = chunk or usual_chunk(page, on_cpu=is_on_cpu(target.mesh))
        each, in_target = of_pages or _of_pages(target, drafter, page)
        of_rows = rows * row_bytes(target, drafter, page, capacity)
        # Prefix states take so many bytes in all groups, or so much more than the pages: whichever is more.
        groups = groups_of(target.mesh)
        prefix_state, of_chunk = _prefix_state_bytes(target, drafter, page, capacity), chunk // page
        if prefix_states_kept(prefix_state, 0, chunk=in_target // groups * of_chunk, rows=rows) is None:
            return cls(each, of_rows, 0, 1 + groups * prefix_state / (of_chunk * each))
        return cls(each, of_rows, rows * prefix_state, 1 + in_target / 4 / each)

    def pages_in(self, memory: float) -> int:
        """Return how many pages fit."""
        room = memory - self.rows
        return int(min((room - self.prefix_states) / self.page, room / (self.share * self.page)) + 1e-6)

    def bytes_of(self, pages: int) -> float:
        """Return what so many pages take, with all the rest."""
        return self.rows + max(pages * self.page + self.prefix_states, self.share * pages * self.page)


def _of_pages(target: Target, drafter: Drafter | None, page: int) -> tuple[int, int]:
    """Return the bytes of a page with the drafter's cache, and those in the target's alone."""
    return page_bytes(target, drafter, page), page_bytes(target, None, page)


def _rounded_up(value: float) -> float:
    """To three digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 2)
    return math.ceil(value / unit) * unit


def _cache_bytes(
    target: Target, drafter: Drafter | None, page: int, capacity: int, *, pages: int = 1, rows: int | None = None
) -> int:
    """Of the target's cache and of what the drafter keeps."""

    def empty(target: Target, drafter: Drafter) -> Any:
        sizes = {"rows": rows or groups_of(target.mesh), "capacity": capacity, "pages": pages, "page": page}
        return device_rows.empty(target, drafter, **sizes)

    state = jax.eval_shape(empty, target, drafter or NoDraft())
    return _bytes((state.cache, state.drafter))


def _prefix_state_bytes(target: Target, drafter: Drafter | None, page: int, capacity: int) -> int:
    """Of a prefix state of each group."""

    def fresh(target: Target, drafter: Drafter) -> Any:
        return device_rows.empty_prefix_state(target, drafter, capacity=capacity, pages=1, page=page)

    return _bytes(jax.eval_shape(fresh, target, drafter or NoDraft()))


def _bytes(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
