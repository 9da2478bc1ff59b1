"""The grammars that are being compiled, one job for all requests that wait for the same one."""

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from specjax.errors import InputError
from specjax.grammars import CheckerBusyError, CompiledGrammar, Grammar, GrammarChecker
from specjax.grammars.checker import CONCURRENT
from specjax.serving.engine import Engine
from specjax.serving.http.errors import RequestError
from specjax.serving.scheduler import QueueFullError

MAX_JOBS = 32
"""The number of grammars that are compiled or wait. It is more than the checker takes.

Each has a thread. Grammars that are compiled already need none, and all requests that wait for one
grammar share one.
"""

_LOG = logging.getLogger(__name__)


class GrammarJobs:
    """The grammars that are being compiled.

    Grammars that take long to compile do not keep other requests from being tokenized. The checker
    bounds how many are compiled at a time, and how many wait.
    """

    def __init__(self, engine: Engine, checker: GrammarChecker | None = None) -> None:
        """Start without jobs.

        Args:
            engine: compiles grammars.
            checker: the checker of grammars; None: they are compiled at once.
        """
        self._engine, self._checker = engine, checker
        self._threads = ThreadPoolExecutor(MAX_JOBS, "specjax-grammars")
        self._running: dict[Grammar, Future[CompiledGrammar]] = {}
        self._lock = threading.Lock()
        # One that was checked before is compiled here at once, which takes as much as the check.
        self._slots = threading.Semaphore(CONCURRENT)

    async def compile(self, grammar: Grammar, name: str) -> CompiledGrammar:
        """Return a compiled grammar.

        Args:
            grammar: the grammar.
            name: the parameter to name in the error if too many grammars wait.

        Raises:
            InputError: the grammar is wrong, or exceeds a bound.
            RequestError: too many grammars wait.
        """
        try:
            return await asyncio.wrap_future(self.start(grammar))
        except CheckerBusyError as error:
            message, headers = f"{name}: {error}", {"Retry-After": "1"}
            raise RequestError(429, message, code="queue_full", headers=headers) from None

    def compile_for_client(
        self, grammar: Grammar, go_on: Callable[[CompiledGrammar | InputError], None]
    ) -> None:
        """Compile a grammar as `specjax.serving.sessions.CompileGrammar` describes."""

        def pass_on(future: "Future[CompiledGrammar]") -> None:
            try:
                go_on(future.result())
            except CheckerBusyError as busy:
                go_on(QueueFullError(f"grammar: {busy}"))
            except InputError as refusal:
                go_on(refusal)
            except Exception:
                _LOG.exception("a client's grammar failed; the others continue")
                go_on(InputError("grammar: it failed in the server; see its log"))

        self.start(grammar).add_done_callback(pass_on)

    def start(self, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Return the future in which a grammar is compiled, the same for all that wait for it.

        Its errors are an InputError if the grammar is wrong or exceeds a bound, and a
        CheckerBusyError if too many grammars wait.
        """
        with self._lock:
            if (running := self._running.get(grammar)) is not None:
                return running
            future: Future[CompiledGrammar] = Future()
            future.set_running_or_notify_cancel()  # nobody can cancel it for the others
            if (compiled := self._engine.compiled_grammar(grammar)) is not None:
                future.set_result(compiled)
                return future
            if len(self._running) >= MAX_JOBS:
                busy = f"{len(self._running)} grammars are being compiled; try again later"
                future.set_exception(CheckerBusyError(busy))
                return future
            self._running[grammar] = future
        try:
            self._threads.submit(self._compile, grammar, future)
        except RuntimeError as error:  # there is no thread for it
            with self._lock:
                del self._running[grammar]
            future.set_exception(error)
        return future

    def _compile(self, grammar: Grammar, future: "Future[CompiledGrammar]") -> None:
        """Check and compile a grammar. It blocks its thread."""
        compiled, refusal = None, None
        try:
            megabytes = 0.0 if self._checker is None else self._checker.check(grammar)
            with self._slots:
                compiled = self._engine.compile_grammar(grammar, megabytes=megabytes)
        except BaseException as error:
            refusal = error
        with self._lock:
            del self._running[grammar]
        if compiled is not None:
            future.set_result(compiled)
        else:
            future.set_exception(refusal)
