"""The programs of an engine, and the thread that compiles them while requests run.

JAX caches the result of ``lower(...).compile()``, with or without a persistent cache. A later call
of the same function with arguments of the same shapes finds it there. So a program that was
compiled here is not compiled again on the engine's thread.
"""

import atexit
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from specjax.progress import waiting
from specjax.serving.threads import lower_priority


@dataclass(frozen=True)
class EngineProgram:
    """One program of a `specjax.serving.device.EngineDevice`.

    Attributes:
        kind: what the program does, such as "decode".
        key: the arguments that distinguish it from others of its kind.
        stage: its place in the order of compilation. The programs of stage 0 are those that a plain
            request in one row needs.
        lower: traces the program, and returns an object with the method ``compile()``.
    """

    kind: str
    key: tuple[Any, ...]
    stage: int
    lower: Callable[[], Any]


class Programs:
    """The list of an engine's programs. It compiles the first ones at once, the rest in a thread.

    Attributes:
        compiled: the number of programs that are compiled.
        total: the number of all programs.
        error: the error that ended the thread; None: there was none.

    Examples:
        >>> import jax.numpy as jnp, threading
        >>> from specjax.serving.programs import EngineProgram, Programs
        >>> double = jax.jit(lambda x: 2 * x)
        >>> lower = lambda width: lambda: double.lower(jnp.zeros(width))
        >>> listed = [
        ...     EngineProgram("double", (width,), stage, lower(width))
        ...     for stage, width in enumerate((1, 8))
        ... ]
        >>> programs = Programs(listed, threading.Condition())
        >>> programs.compile_stage(0, "compiling")
        >>> programs.is_ready("double", 1), programs.is_ready("double", 8)
        (True, False)
        >>> programs.compiled, programs.total
        (1, 2)
        >>> programs.start(when_ready=lambda: None)
        >>> programs.wait_for("double", 8)
        True
        >>> programs.stop()
    """

    def __init__(self, programs: Sequence[EngineProgram], wake: threading.Condition) -> None:
        """List the programs, without compiling any.

        Args:
            programs: all programs.
            wake: the engine's lock. It is notified whenever another program is compiled.
        """
        self._uncompiled = sorted(programs, key=lambda program: program.stage)
        self._ready: set[tuple[Any, ...]] = set()
        self._wake = wake
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self.total, self.error = len(programs), None

    @property
    def compiled(self) -> int:
        """The number of programs that are compiled."""
        return len(self._ready)

    @property
    def are_all_ready(self) -> bool:
        """True if all programs are compiled."""
        return len(self._ready) == self.total

    def is_ready(self, kind: str, *key: Any) -> bool:
        """Return whether a program is compiled."""
        return (kind, *key) in self._ready

    def are_ready(self, *kinds: str) -> bool:
        """Return whether all programs of these kinds are compiled."""
        return not any(program.kind in kinds for program in self._uncompiled)

    def wait_for(self, kind: str, *key: Any) -> bool:
        """Wait until a program is compiled, and return False if it never will be."""
        with self._wake:
            self._wake.wait_for(
                lambda: self.is_ready(kind, *key) or self._is_stopped or self.error is not None
            )
            return self.is_ready(kind, *key)

    def compile_stage(self, last: int | None, message: str) -> None:
        """Compile several programs at a time, and wait for all of them.

        Args:
            last: the last stage to compile; None: all stages.
            message: the text of the progress display.
        """
        programs = [
            program for program in self._uncompiled if last is None or program.stage <= last
        ]
        if not programs:
            return
        threads = min(os.cpu_count() or 1, len(programs))
        with waiting(message, len(programs)) as wait, ThreadPoolExecutor(threads) as pool:
            # Tracing holds Python's global lock, and compiling releases it. So this thread traces
            # while others compile.
            jobs = [(program, pool.submit(program.lower().compile)) for program in programs]
            for count, (program, job) in enumerate(jobs, 1):
                job.result()
                self._add(program)
                wait.update(done=count)

    def start(self, when_ready: Callable[[], None]) -> None:
        """Compile the remaining programs in a thread of lower priority.

        Args:
            when_ready: a function that is called after each program, with the lock.
        """
        self._thread = threading.Thread(
            target=self._run, args=(when_ready,), name="specjax-compiler", daemon=True
        )
        # The interpreter would crash if it exited while a compiler runs.
        atexit.register(self._thread.join)
        self._thread.start()

    @property
    def is_compiling(self) -> bool:
        """True while the thread compiles a program. That cannot be interrupted."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """End the thread after its current program. Only the interpreter's exit waits for that."""
        with self._wake:
            self._is_stopped = True
            self._wake.notify_all()

    def _run(self, when_ready: Callable[[], None]) -> None:
        lower_priority()
        try:
            while self._uncompiled and not self._is_stopped:
                self.compile_next()
                with self._wake:
                    when_ready()
        except BaseException as error:  # the engine's thread raises it
            with self._wake:
                self.error = error
                self._wake.notify_all()
        finally:
            atexit.unregister(threading.current_thread().join)

    def compile_next(self) -> None:
        """Compile the next program.

        Raises:
            RuntimeError: The program cannot be compiled. The message names it.
        """
        program = self._uncompiled[0]
        try:
            program.lower().compile()
        except Exception as error:
            raise RuntimeError(
                f"the program {program.kind}{program.key} cannot be compiled ({error}); start with"
                " fewer rows, pages or drafts, or without predictions or log-probabilities"
            ) from error
        self._add(program)

    def _add(self, program: EngineProgram) -> None:
        with self._wake:
            self._uncompiled.remove(program)
            self._ready.add((program.kind, *program.key))
            self._wake.notify_all()
