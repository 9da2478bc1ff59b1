"""The programs of an engine: which there are, which are compiled, and the thread that compiles the rest while requests run.

JAX keeps what ``lower(...).compile()`` makes, and finds it when the same function is called with arguments of the same shapes,
with or without a persistent cache. So a program that was compiled here is not compiled again on the engine's thread.
"""

import atexit
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from specjax.progress import waiting

_LOWER_PRIORITY = 10  # as nice has it


@dataclass(frozen=True)
class EngineProgram:
    """One program of a `specjax.serving.device.EngineDevice`.

    Attributes:
        kind: what it does, such as "decode".
        key: which of that kind: the arguments that tell it from others.
        stage: stage 0 answers a plain request in one row; each later one is compiled after those before it.
        lower: traces it, and returns what ``compile()`` can be called on.
    """

    kind: str
    key: tuple[Any, ...]
    stage: int
    lower: Callable[[], Any]


class Programs:
    """Counts the programs that are compiled, and compiles them: the first ones at once, the rest in a thread.

    Attributes:
        compiled: how many are compiled.
        total: of how many.
        error: what the thread failed with; None: it has not.

    Examples:
        >>> import jax.numpy as jnp, threading
        >>> from specjax.serving.programs import EngineProgram, Programs
        >>> double = jax.jit(lambda x: 2 * x)
        >>> lower = lambda width: lambda: double.lower(jnp.zeros(width))
        >>> listed = [EngineProgram("double", (width,), stage, lower(width)) for stage, width in enumerate((1, 8))]
        >>> programs = Programs(listed, threading.Condition())
        >>> programs.compile_stage(0, "compiling")
        >>> programs.is_ready("double", 1), programs.is_ready("double", 8), programs.compiled, programs.total
        (True, False, 1, 2)
        >>> programs.start(when_ready=lambda: None)
        >>> programs.wait_for("double", 8)
        True
        >>> programs.stop()
    """

    def __init__(self, programs: Sequence[EngineProgram], wake: threading.Condition) -> None:
        """None is compiled yet. ``wake`` is notified whenever one more is."""
        self._left = sorted(programs, key=lambda program: program.stage)
        self._ready: set[tuple[Any, ...]] = set()
        self._wake = wake
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self.total, self.error = len(programs), None

    @property
    def compiled(self) -> int:
        """How many are compiled."""
        return len(self._ready)

    @property
    def are_all_ready(self) -> bool:
        """Whether nothing is left to compile."""
        return len(self._ready) == self.total

    def is_ready(self, kind: str, *key: Any) -> bool:
        """Whether a program is compiled."""
        return (kind, *key) in self._ready

    def wait_for(self, kind: str, *key: Any) -> bool:
        """Wait until a program is compiled. False where it never will be."""
        with self._wake:
            self._wake.wait_for(lambda: self.is_ready(kind, *key) or self._is_stopped or self.error is not None)
            return self.is_ready(kind, *key)

    def compile_stage(self, last: int | None, message: str) -> None:
        """Compile the programs of all stages up to ``last``, of all where it is None, several at a time, and wait for them."""
        programs = [program for program in self._left if last is None or program.stage <= last]
        if not programs:
            return
        threads = min(os.cpu_count() or 1, len(programs))
        with waiting(message, len(programs)) as wait, ThreadPoolExecutor(threads) as pool:
            # Tracing holds Python's lock, compiling does not: so one thread traces, while others compile.
            jobs = [(program, pool.submit(program.lower().compile)) for program in programs]
            for number, (program, job) in enumerate(jobs, 1):
                job.result()
                self._add(program)
                wait.update(done=number)

    def start(self, when_ready: Callable[[], None]) -> None:
        """Compile the rest in a thread of lower priority. ``when_ready`` is called under the lock after each program."""
        self._thread = threading.Thread(target=self._run, args=(when_ready,), name="specjax-compiler", daemon=True)
        atexit.register(self._thread.join)  # a compiler that still runs would bring the interpreter down as it ends
        self._thread.start()

    @property
    def is_compiling(self) -> bool:
        """Whether the thread is at a program. It cannot be interrupted."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Let the thread end after the program that it is at. Nobody waits for that but the interpreter's exit."""
        with self._wake:
            self._is_stopped = True
            self._wake.notify_all()

    def _run(self, when_ready: Callable[[], None]) -> None:
        if sys.platform == "linux":  # where a thread has a priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWER_PRIORITY)
        try:
            while self._left and not self._is_stopped:
                self.compile_next()
                with self._wake:
                    when_ready()
        except BaseException as error:  # the engine raises it
            with self._wake:
                self.error = error
                self._wake.notify_all()
        finally:
            atexit.unregister(threading.current_thread().join)

    def compile_next(self) -> None:
        """Compile one program more, the first of those that are left.

        Raises:
            RuntimeError: it cannot be compiled; names it.
        """
        program = self._left[0]
        try:
            program.lower().compile()
        except Exception as error:
            raise RuntimeError(
                f"the program {program.kind}{program.key} cannot be compiled ({error}); start with less: fewer rows, pages or "
                "drafts, no predictions or log-probabilities"
            ) from error
        self._add(program)

    def _add(self, program: EngineProgram) -> None:
        with self._wake:
            self._left.remove(program)
            self._ready.add((program.kind, *program.key))
            self._wake.notify_all()
