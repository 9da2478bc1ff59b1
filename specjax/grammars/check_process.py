"""The process in which a server's grammars are compiled first, and the one way to compile them.

`specjax.grammars.checker` starts this file as a program. It imports neither JAX nor the rest of
specjax, so that it starts in a moment and stays small. It builds the tokenizer once. Each grammar
is compiled in a process that is forked from it, and that the system ends at its bounds of memory
and time. Messages are lines of JSON. Nothing in a grammar is executed.
"""

import ctypes
import json
import os
import random
import resource
import selectors
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROW_LIMITS: Mapping[str, Any] = {
    "max_items_in_row": 200,
    "step_max_items": 15_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
"""Limits of llguidance with which a mask takes at most some 10 ms.

An ambiguous grammar has more and more items, and each new one is compared with all others of its
row. A text whose grammar exceeds a limit ends with an error.
"""

_LIBC = ctypes.CDLL(None)

KEPT = 8
"""A compiled grammar may keep one part of so many of the memory: a server holds many of them."""

WALL_FACTOR = 4
"""A check may take this many times its CPU seconds, because other processes need the CPU, too."""

_PR_SET_PDEATHSIG = 1
"""The number of prctl with which a process asks for a signal at its parent's end."""

_WALK = 12
"""The tokens of a legal text that is tried. It finds what crashes a few tokens later."""


def build_tokenizer(tokenizer: Any, vocab_size: int, end_id: int | None) -> Any:
    """Return llguidance's tokenizer.

    Args:
        tokenizer: the text of tokenizer.json, or a wrapped tokenizer.
        vocab_size: the number of tokens of the target.
        end_id: the token that ends a text, if there is one.
    """
    from llguidance import LLTokenizer

    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=end_id)


def compile_source(tokenizer: Any, source: str, limits: Mapping[str, Any] | None) -> Any:
    """Return llguidance's matcher, with its first mask, or with an error.

    Args:
        tokenizer: llguidance's tokenizer.
        source: the grammar in the form that llguidance reads.
        limits: limits such as `ROW_LIMITS`; None: llguidance's own.
    """
    from llguidance import LLMatcher, LLParserLimits

    parser_limits = None if limits is None else LLParserLimits(**limits)
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=parser_limits)
    if not matcher.is_error():
        # Some errors, such as cycles of references, appear with the first mask only.
        mask = matcher.compute_bitmask()
        ends = set(tokenizer.eos_tokens)
        tokens = [] if matcher.is_error() else _some_legal_tokens(mask, random.Random(0))
        if tokens and tokens[0] not in ends:
            # Too many alternatives at the beginning are an error at the first token, whichever. A
            # grammar with max_tokens= or stop= cannot go back, which drafts need.
            trial = matcher.deep_copy()
            if trial.try_consume_tokens(tokens[:1]) == 1:
                trial.rollback(1)
            if trial.is_error():
                return trial
    return matcher


def first_line(error: str) -> str:
    """Return what an error of llguidance says, in one line."""
    lines = [line.strip() for line in error.splitlines() if line.strip()]
    if not lines:
        return "llguidance refuses it"
    # The errors of a regular expression say why further down.
    causes = [line for line in lines[1:] if line.startswith("error: ")]
    text = " ".join([lines[0], *causes[:1]])
    for theirs, ours in _PLAIN.items():
        text = text.replace(theirs, ours)
    return text


_PLAIN = {
    "NoExtensionBias": "no text satisfies it",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with"
    " anyOf": "oneOf is supported only where a type or a constant tells its parts apart; use anyOf",
}
"""Errors of llguidance, and what they mean for users."""


def default_stack() -> int:
    """Return the bytes of stack that a new thread has by default."""
    soft, _ = resource.getrlimit(resource.RLIMIT_STACK)
    return 2 * 2**20 if soft == resource.RLIM_INFINITY else soft


def main() -> None:
    """Build the tokenizer of the first line, and compile the grammar of each further line."""
    lines = _LineReader(0)
    settings = next(lines)
    try:
        tokenizer = build_tokenizer(
            settings["tokenizer"], settings["vocab_size"], settings["end_id"]
        )
    except ValueError as error:
        _answer(error=str(error))
        return
    del settings["tokenizer"]
    _answer(error="")
    workers: dict[int, tuple[int, Any]] = {}  # by pipe: the process and the number of its check
    with selectors.DefaultSelector() as selector:
        selector.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fd != 0:
                    selector.unregister(key.fd)
                    _collect(key.fd, *workers.pop(key.fd))
                    continue
                for request in lines.arrived():
                    fd, process = _fork(tokenizer, request["source"], settings)
                    workers[fd] = process, request["check"]
                    selector.register(fd, selectors.EVENT_READ)
                if lines.is_over:
                    for process, _ in workers.values():
                        os.kill(process, signal.SIGKILL)
                    return


def _fork(tokenizer: Any, source: str, settings: Mapping[str, Any]) -> tuple[int, int]:
    """Compile a grammar in a new process. Return the pipe of its answer, and its id."""
    reads, writes = os.pipe()
    process = os.fork()
    if process:
        os.close(writes)
        return reads, process
    try:
        # The server sees the end of this process's parent by its pipes, which only that one holds.
        for fd in (reads, 0, 1):
            os.close(fd)
        _limit_this_process(settings)
        before = _kilobytes("RssAnon")
        matcher = compile_source(tokenizer, source, settings["limits"])
        error = first_line(matcher.get_error()) if matcher.is_error() else ""
        kept_megabytes = settings["megabytes"] / KEPT
        megabytes = max(_kilobytes("RssAnon") - before, 0) / 1e3
        if not error and megabytes > kept_megabytes:
            error = f"it takes more than {kept_megabytes:g} MB once it is compiled; simplify it"
        if not error:
            _walk(tokenizer, matcher)
        answer = {"error": error[:1000], "megabytes": megabytes}
        os.write(writes, json.dumps(answer).encode())
    except MemoryError:
        os.kill(os.getpid(), signal.SIGABRT)  # as llguidance does without memory
    finally:
        os._exit(0)


def _limit_this_process(settings: Mapping[str, Any]) -> None:
    """Let the system end this process at its bounds, and with its parent."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    memory = 1024 * _kilobytes("VmSize") + int(settings["megabytes"] * 1e6)
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # The server compiles and reads in threads. What passes here has room to spare there.
    stack = settings["stack"] // 2
    resource.setrlimit(resource.RLIMIT_STACK, (stack, resource.getrlimit(resource.RLIMIT_STACK)[1]))
    signal.setitimer(signal.ITIMER_PROF, settings["seconds"])  # CPU time; its signal ends us
    signal.setitimer(signal.ITIMER_REAL, settings["seconds"] * WALL_FACTOR)


def _kilobytes(name: str) -> int:
    """Return a number that the system has of this process's memory, such as "VmSize"."""
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0])


def _walk(tokenizer: Any, matcher: Any) -> None:
    """Follow a random legal text. Errors are ignored: a real text may never come there."""
    rng, ends = random.Random(0), set(tokenizer.eos_tokens)
    for _ in range(_WALK):
        tokens = _some_legal_tokens(matcher.compute_bitmask(), rng)
        if matcher.is_error() or not tokens or tokens[0] in ends:
            return
        if matcher.try_consume_tokens(tokens[:1]) != 1 or matcher.is_stopped():
            return
        matcher.compute_ff_tokens()


def _some_legal_tokens(mask: bytes, rng: random.Random) -> list[int]:
    """Return some tokens of a mask in random order; none if the mask is empty."""
    indices = [index for index, byte in enumerate(mask) if byte]
    if not indices:
        return []
    index = rng.choice(indices)
    tokens = [8 * index + bit for bit in range(8) if mask[index] >> bit & 1]
    rng.shuffle(tokens)
    return tokens


def _collect(fd: int, process: int, check: Any) -> None:
    """Answer a check whose process has ended."""
    with os.fdopen(fd, "rb") as pipe:
        answer = pipe.read()
    _, status = os.waitpid(process, 0)
    signal_number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    try:
        result = json.loads(answer)
    except ValueError:
        signal_number, result = signal_number or int(signal.SIGKILL), {"error": "", "megabytes": 0}
    _answer(check=check, signal=signal_number, **result)


def _answer(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


class _LineReader:
    """The lines of JSON that arrive at a file descriptor.

    Attributes:
        is_over: whether the other end is closed.
    """

    def __init__(self, fd: int) -> None:
        self._fd, self._parts, self.is_over = fd, [b""], False

    def arrived(self) -> list[Any]:
        """Read once, and return the lines that are complete."""
        data = os.read(self._fd, 1 << 20)
        self.is_over = not data
        *complete, rest = data.split(b"\n")
        if not complete:
            self._parts.append(rest)
            return []
        complete[0] = b"".join([*self._parts, complete[0]])
        self._parts = [rest]
        return [json.loads(line) for line in complete]

    def __iter__(self) -> Iterator[Any]:
        """Return itself."""
        return self

    def __next__(self) -> Any:
        """Return the next line, which must be the only one so far."""
        while not self.is_over:
            for line in self.arrived():
                return line
        raise StopIteration


if __name__ == "__main__":
    main()
