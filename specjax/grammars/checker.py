"""Checks of grammars that strangers send, in a process that can be killed."""

import hashlib
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from specjax.errors import InputError
from specjax.grammars import check_process
from specjax.grammars.compiler import GrammarCompiler
from specjax.grammars.grammar import Grammar, check_grammar
from specjax.grammars.structure import grammar_parts

CONCURRENT = 2
"""The number of grammars that are compiled at a time, so that a slow one does not stop others."""

MAX_WAITING = 16
"""The number of further grammars that wait. More are refused until there is room."""

MAX_REMEMBERED = 4096
"""The number of grammars whose verdict is remembered: those that were checked last."""

_START_SECONDS = 120.0
"""The time in which the process must have built the tokenizer."""


@dataclass(frozen=True)
class GrammarLimits:
    """The bounds of a grammar that is checked before it is compiled.

    Attributes:
        characters: the largest number of characters of its text.
        depth: the largest depth of nested brackets.
        megabytes: the memory that compiling it may take, in megabytes of 10**6 bytes.
        seconds: the CPU time that compiling it may take.

    Raises:
        InputError: a bound is not positive.

    Examples:
        >>> from specjax.grammars import GrammarLimits
        >>> GrammarLimits(seconds=2).megabytes
        512
    """

    characters: int = 256_000
    depth: int = 64
    megabytes: float = 512
    seconds: float = 5.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 < value < math.inf:
                raise InputError(f"{name}={value}: must be more than 0, and finite")


class CheckerBusyError(RuntimeError):
    """A grammar cannot be checked now: too many others wait, or the process is not available.

    Examples:
        >>> from specjax.grammars import CheckerBusyError
        >>> str(CheckerBusyError("3 grammars are being checked; try again later"))
        '3 grammars are being checked; try again later'
    """


class GrammarChecker:
    """Compiles grammars in another process first, and refuses those that exceed bounds.

    A grammar can take minutes and gigabytes to compile, or crash the compiler, and a call of the
    compiler cannot be interrupted. So a process that is started here forks a process for each new
    grammar, which compiles it, makes its first mask, and is ended by the system at its bounds.
    Verdicts are remembered. At most `CONCURRENT` grammars are compiled at a time. Any thread may
    call `check`.

    Args:
        compiler: the compiler whose tokenizer is used.
        limits: the bounds.

    Raises:
        InputError: the compiler was made by `GrammarCompiler.of_tokens`.

    Examples:
        >>> import specjax
        >>> from specjax.grammars import GrammarChecker, GrammarLimits
        >>> compiler = specjax.load("embedded").grammar_compiler
        >>> with GrammarChecker(compiler, GrammarLimits(seconds=1)) as checker:
        ...     megabytes = checker.check(specjax.Regex("[0-9]+"))
        ...     checker.check(specjax.Regex("(" * 100 + ")" * 100))
        Traceback (most recent call last):
        specjax.errors.InputError: grammar=Regex(...: its brackets are nested 100 deep; ...
    """

    def __init__(self, compiler: GrammarCompiler, limits: GrammarLimits = GrammarLimits()) -> None:
        """Start the process. It builds the tokenizer meanwhile."""
        recipe = compiler.recipe
        if recipe is None:
            raise InputError("compiler: it has no tokenizer that another process can read")
        self._compiler, self.limits = compiler, limits
        settings = recipe | {
            "limits": dict(check_process.ROW_LIMITS),
            "megabytes": limits.megabytes,
            "seconds": limits.seconds,
            "stack": check_process.default_stack(),
        }
        self._settings = json.dumps(settings).encode() + b"\n"
        self._lock = threading.Lock()
        self._slots = threading.Semaphore(CONCURRENT)
        self._verdicts: dict[bytes, _Verdict] = {}  # by hash of the source
        self._running: dict[bytes, Future[_Verdict]] = {}
        self._is_closed = False
        self._process = _Process(self._settings)

    def check(self, grammar: Grammar) -> float:
        """Return if a grammar can be compiled within the bounds. Wait for the verdict.

        Returns:
            The memory that the compiled grammar takes, in megabytes of 10**6 bytes.

        Raises:
            InputError: the grammar exceeds a bound, is wrong, or is not supported. The message
                says which bound.
            CheckerBusyError: too many grammars wait, or the process is not available.
        """
        check_grammar(grammar)
        self._check_text(grammar)
        source = self._compiler.source(grammar)
        key = hashlib.sha256(source.encode()).digest()
        with self._lock:
            verdict = self._verdicts.get(key)
            if verdict is not None:
                self._remember(key, verdict)
            running = self._running.get(key)
            is_first = verdict is None and running is None
            if is_first:
                if len(self._running) >= CONCURRENT + MAX_WAITING:
                    raise CheckerBusyError(
                        f"{len(self._running)} grammars are being checked; try again later"
                    )
                running = self._running[key] = Future()
        if running is not None and is_first:
            self._find_verdict(key, source, running)
        if running is not None and verdict is None:
            verdict = running.result()
        assert verdict is not None
        if verdict.reason:
            raise InputError(f"grammar={grammar!r}: {verdict.reason}")
        return verdict.megabytes

    def close(self) -> None:
        """End the process. Checks that run or wait are refused."""
        with self._lock:
            self._is_closed = True
            process = self._process
        process.end()

    def __enter__(self) -> "GrammarChecker":
        """Return itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def _check_text(self, grammar: Grammar) -> None:
        """Refuse a grammar by its text alone."""
        limits, text = self.limits, grammar_text(grammar)
        if len(text) > limits.characters:
            raise InputError(
                f"grammar={grammar!r}: it has {len(text)} characters; at most"
                f" {limits.characters} are allowed; give a shorter one"
            )
        if (depth := nesting(text)) > limits.depth:
            raise InputError(
                f"grammar={grammar!r}: its brackets are nested {depth} deep; at most"
                f" {limits.depth} are allowed; use fewer levels, or references"
            )

    def _find_verdict(self, key: bytes, source: str, running: "Future[_Verdict]") -> None:
        """Let the process compile a grammar, and set the verdict that all callers wait for."""
        try:
            with self._slots:
                verdict, is_final = self._ask(source)
        except BaseException as error:
            with self._lock:
                del self._running[key]
            running.set_exception(error)
            return
        with self._lock:
            del self._running[key]
            if is_final:
                self._remember(key, verdict)
        running.set_result(verdict)

    def _remember(self, key: bytes, verdict: "_Verdict") -> None:
        """Remember a verdict as the newest. Needs the lock."""
        self._verdicts.pop(key, None)
        self._verdicts[key] = verdict
        while len(self._verdicts) > MAX_REMEMBERED:
            del self._verdicts[next(iter(self._verdicts))]

    def _ask(self, source: str) -> tuple["_Verdict", bool]:
        """Return a verdict of the process, and whether it would be the same again.

        Somebody may end the process in the middle. Then a new one is asked, once.
        """
        for _ in range(2):
            with suppress(_EndedError):
                answer = self._running_process().ask(source, self._patience)
                reason = self._reason(answer["signal"]) if answer["signal"] else answer["error"]
                verdict = _Verdict(reason, answer["megabytes"])
                return verdict, answer["signal"] != signal.SIGKILL
        raise CheckerBusyError("the process that checks grammars has ended; try again later")

    @property
    def _patience(self) -> float:
        """The seconds after which an answer does not come any more."""
        return self.limits.seconds * check_process.WALL_FACTOR + 30

    def _running_process(self) -> "_Process":
        """Return the process, or a new one if it has ended."""
        with self._lock:
            if self._is_closed:
                raise CheckerBusyError("the server is closing; grammars are not checked any more")
            if self._process.has_ended:
                self._process = _Process(self._settings)
            return self._process

    def _reason(self, signal_number: int) -> str:
        """Return why the system ended the process of a grammar."""
        limits = self.limits
        if signal_number in (signal.SIGPROF, signal.SIGALRM):
            return f"it takes more than {limits.seconds:g} s to compile; simplify it"
        if signal_number == signal.SIGABRT:
            return f"it takes more than {limits.megabytes:g} MB to compile; simplify it"
        if signal_number in (signal.SIGSEGV, signal.SIGBUS):
            return "its rules are nested too deeply to be compiled; use fewer levels"
        return "the process that compiled it was ended; simplify it"


@dataclass(frozen=True)
class _Verdict:
    """The verdict on a grammar.

    Attributes:
        reason: why it is refused; empty: it is not.
        megabytes: the memory that it takes once it is compiled.
    """

    reason: str
    megabytes: float


class _EndedError(RuntimeError):
    """The process has ended, or does not answer."""


class _Process:
    """The process that runs `check_process`, and the checks that it has not answered yet."""

    def __init__(self, settings: bytes) -> None:
        """Start it. A thread sends the settings and receives the answers."""
        # Without -P, the modules beside the file could be imported in place of others.
        command = [sys.executable, "-P", check_process.__file__]
        # Threads would not survive a fork, and each of malloc's arenas counts as memory.
        threads = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | threads | {"MALLOC_ARENA_MAX": "1"},
                start_new_session=True,  # a keyboard's interrupt is the server's alone
            )
        except OSError as error:
            raise InputError(
                f"the process that checks grammars cannot be started: {error}"
            ) from None
        self._ready: Future[None] = Future()
        self._answers: dict[int, Future[Mapping[str, Any]]] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self.has_ended = False
        name = "specjax-grammar-checker"
        threading.Thread(target=self._receive, args=[settings], name=name, daemon=True).start()

    def ask(self, source: str, seconds: float) -> Mapping[str, Any]:
        """Return the answer to a grammar.

        Raises:
            _EndedError: there is none after so many seconds, or the process has ended.
        """
        try:
            self._ready.result(_START_SECONDS)
            future: Future[Mapping[str, Any]] = Future()
            with self._lock:
                if self.has_ended:
                    raise _EndedError
                number = next(self._numbers)
                self._answers[number] = future
                self._send(json.dumps({"check": number, "source": source}).encode() + b"\n")
            return future.result(seconds)
        except (OSError, TimeoutError):
            self.end()
            raise _EndedError from None

    def end(self) -> None:
        """Kill the process."""
        self.has_ended = True
        self._process.kill()

    def _send(self, line: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def _receive(self, settings: bytes) -> None:
        """Receive answers until the process ends. This is the body of the thread."""
        assert self._process.stdout is not None
        with suppress(OSError, ValueError):
            self._send(settings)
            error = json.loads(self._process.stdout.readline())["error"]
            if not error:
                self._ready.set_result(None)
                for line in self._process.stdout:
                    answer = json.loads(line)
                    with self._lock:
                        future = self._answers.pop(answer["check"])
                    future.set_result(answer)
        self._process.kill()
        self._process.wait()
        with self._lock:
            self.has_ended = True
            unanswered = [*self._answers.values()]
        if not self._ready.done():
            self._ready.set_exception(_EndedError())
        for future in unanswered:
            future.set_exception(_EndedError())


def grammar_text(grammar: Grammar) -> str:
    """Return the text of a grammar as its author wrote it, or close to it.

    Examples:
        >>> import specjax
        >>> from specjax.grammars.checker import grammar_text
        >>> grammar_text(specjax.Regex("a|ä"))
        'start: /a|ä/'
    """
    texts = [
        part["lark_grammar"] if "lark_grammar" in part else json.dumps(part, ensure_ascii=False)
        for part in grammar_parts(grammar.source)
    ]
    return "\n".join(texts)


def nesting(text: str) -> int:
    """Return the largest depth of nested brackets, those in quotes and classes left out.

    Examples:
        >>> from specjax.grammars.checker import nesting
        >>> nesting('{"a": ["((("]}'), nesting(r"/((a[(((]b)\\()/")
        (2, 2)
    """
    depth = deepest = 0
    is_quoted = is_class = is_regex = is_escaped = False
    for character in text:
        if is_escaped:
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif is_quoted:
            is_quoted = character != '"'
        elif is_class:
            is_class = character != "]"
        elif is_regex and character == "[":
            is_class = True
        elif character == "/":
            is_regex = not is_regex
        elif character == '"' and not is_regex:
            is_quoted = True
        elif character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth -= 1
    return deepest
