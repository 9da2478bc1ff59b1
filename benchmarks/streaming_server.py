"""A server whose engine gives tokens at a fixed rate, to measure what streaming costs the host.

`benchmarks.streaming` starts this file with the specjax of one checkout in PYTHONPATH, and talks to
it in lines of JSON. So it imports nothing of the other benchmarks.

The engine computes nothing. Its texts are given, and each step delivers one token to every text by
the engine's own `specjax.serving.handle.Handle`, which detokenizes it and wakes the event loop.
"""

import asyncio
import json
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from types import SimpleNamespace
from typing import Any

import h11
import prometheus_client

import specjax
from specjax.chat import family_form
from specjax.sampling_params import SamplingParams
from specjax.serving import handle as delivery
from specjax.serving.handle import Handle, RowProgress
from specjax.serving.http import run, streaming
from specjax.serving.http.regions import AnswerRegions
from specjax.serving.http.service import AppOptions, Service
from specjax.serving.scheduler import Request
from specjax.text import GrowingText, encode_chat

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}assistant: "
)
PROSE = "The quick brown fox jumps over the lazy dog, and then it sleeps in the sun. "
CALL = '<tool_call>\n{"name": "look", "arguments": {"place": "here"}}\n</tool_call>'


_WAKING_ONCE = getattr(delivery, "waking_once", nullcontext)
"""As the engine does; a checkout before 28 November 2026 has no such function."""


class PacedEngine:
    """An engine that gives each text the same tokens, one in each step of a fixed time."""

    rows, capacity, max_logprobs, max_prediction = 64, 8192, 0, 0
    has_grammars = has_penalties = has_thoughts = False
    client_drafts = default_sampling = None
    state = "running"

    def __init__(self, tokenizer: Any, step_seconds: float) -> None:
        """Start without a text to give; see `tokens`.

        Args:
            tokenizer: the tokenizer.
            step_seconds: the seconds from one step to the next.
        """
        self.tokenizer, self._step_seconds = tokenizer, step_seconds
        config = SimpleNamespace(vocab_size=len(tokenizer), eos_token_ids=(0,))
        self.target = SimpleNamespace(config=config)
        self.tokens: list[int] = []
        self.seconds = 0.0
        self._growing: list[tuple[Handle, int]] = []
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def encode(self, prompt: Any, chat_template_kwargs: Any = None) -> list[int]:
        """Return the token ids of a prompt, which may be token ids already."""
        if isinstance(prompt[0], int):
            return list(prompt)
        return encode_chat(self.tokenizer, prompt, chat_template_kwargs)

    def submit(self, prompt: Sequence[int], params: SamplingParams, **options: Any) -> Handle:
        """Begin a text."""
        growing = GrowingText(
            self.tokenizer,
            prompt,
            options["stop"],
            is_chat=options["is_chat"],
            tags=options["special_texts"],
        )
        request = Request(0, list(prompt), len(prompt), len(self.tokens))
        handle = Handle(lambda _: None, request, {"stop_token_ids": ()}, growing)
        with self._changed:
            self._growing.append((handle, 0))
            self._changed.notify_all()
        return handle

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._growing)
                texts = self._growing
                self._growing = []
            begin = time.thread_time()
            more = []
            with _WAKING_ONCE():
                for handle, position in texts:
                    is_last = position + 1 == len(self.tokens)
                    handle.deliver(RowProgress([self.tokens[position]], [False], (), is_last))
                    more += [] if is_last else [(handle, position + 1)]
            self.seconds += time.thread_time() - begin
            with self._changed:
                self._growing += more
            time.sleep(self._step_seconds)


class Parts:
    """The processor time of parts of the host's work, each without the parts inside of it.

    To look at the clock takes a microsecond, which is measured first, and not counted.

    Attributes:
        calls: the number of calls of each part's functions.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._inner_calls: dict[str, int] = defaultdict(int)
        self._stacks = threading.local()
        self._replaced: list[tuple[Any, str, Any]] = []
        self._cost_inside, self._cost_outside = self._costs()

    def watch(self, owner: Any, name: str, part: str) -> None:
        """Count the time of a function of a class or module as that of a part."""
        original = getattr(owner, name)
        self._replaced.append((owner, name, original))
        setattr(owner, name, self._timed(original, part))

    def stop(self) -> None:
        """Put the functions back."""
        while self._replaced:
            setattr(*self._replaced.pop())

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each part."""
        return {
            part: spent
            - self.calls[part] * self._cost_inside
            - self._inner_calls[part] * self._cost_outside
            for part, spent in self._seconds.items()
        }

    def _costs(self) -> tuple[float, float]:
        """Return the seconds of a call that its part is charged with, and those of its caller."""
        count, timed = 20_000, self._timed(lambda: None, "none")
        begin = time.thread_time()
        for _ in range(count):
            timed()
        whole, inside = time.thread_time() - begin, self._seconds.pop("none")
        del self.calls["none"]
        return inside / count, (whole - inside) / count

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        @wraps(function)
        def timed(*arguments: Any, **options: Any) -> Any:
            stack: list[tuple[str, float]] = self._stacks.__dict__.setdefault("stack", [])
            begin = time.thread_time()
            stack.append((part, 0.0))
            try:
                return function(*arguments, **options)
            finally:
                spent = time.thread_time() - begin
                self._seconds[part] += spent - stack.pop()[1]
                self.calls[part] += 1
                if stack:
                    outer, inner = stack[-1]
                    stack[-1] = outer, inner + spent
                    self._inner_calls[outer] += 1

        return timed


def _watch_all(parts: Parts) -> None:
    parts.watch(GrowingText, "push", "detokenizing")
    parts.watch(Handle, "_notify", "waking the event loop")
    parts.watch(AnswerRegions, "push", "regions")
    parts.watch(AnswerRegions, "finish", "regions")
    parts.watch(streaming.ChunkWriter, "piece", "chunks and JSON")
    parts.watch(streaming.ChunkWriter, "last", "chunks and JSON")
    parts.watch(prometheus_client.Histogram, "observe", "metrics")
    parts.watch(prometheus_client.Counter, "inc", "metrics")
    parts.watch(h11.Connection, "send", "HTTP framing")
    transport: Any = asyncio.selector_events._SelectorSocketTransport  # pyright: ignore[reportAttributeAccessIssue]
    parts.watch(transport, "write", "writing to sockets")


def _tokens(tokenizer: Any, kind: str, count: int) -> list[int]:
    """Return the tokens of a text: plain, or with a thought and a call."""
    words = tokenizer.encode(PROSE, add_special_tokens=False)
    prose = (words * (count // len(words) + 1))[:count]
    if kind == "plain":
        return prose
    opening, middle, call = (
        tokenizer.encode(text, add_special_tokens=False)
        for text in ("<think>\n", "\n</think>\n\n", "\n" + CALL)
    )
    rest = count - len(opening) - len(middle) - len(call)
    return [*opening, *prose[: rest // 2], *middle, *prose[: rest - rest // 2], *call]


def _answer_commands(engine: PacedEngine, loop_thread: int) -> None:
    """Answer each line of the standard input with a line."""
    clock = time.pthread_getcpuclockid(loop_thread)
    parts = Parts()  # of the run before
    begin: dict[str, float] = {}
    for line in sys.stdin:
        command = json.loads(line)
        now = {"loop": time.clock_gettime(clock), "engine": engine.seconds}
        now["process"] = time.process_time()
        answer: dict[str, Any] = {}
        if command["do"] == "begin":
            engine.tokens = _tokens(engine.tokenizer, command["text"], command["tokens"])
            begin = now
            answer = {"text": engine.tokenizer.decode(engine.tokens)}
            if command["parts"]:
                parts = Parts()
                _watch_all(parts)
        else:
            parts.stop()
            answer = {name: now[name] - begin[name] for name in now}
            answer["parts"] = parts.seconds()
        print(json.dumps(answer), flush=True)


def main(step_seconds: float) -> int:
    """Serve until a signal comes."""
    tokenizer = specjax.load("embedded", generation_config=None).tokenizer
    tokenizer.chat_template = TEMPLATE
    engine: Any = PacedEngine(tokenizer, step_seconds)
    service = Service(engine, AppOptions(names=("paced",)))
    service.form = family_form("qwen3")
    with run.bind("127.0.0.1", 0) as bound:
        print(json.dumps({"port": bound.getsockname()[1]}), flush=True)
        arguments = (engine, threading.get_ident())
        threading.Thread(target=_answer_commands, args=arguments, daemon=True).start()
        return run.serve(service, bound)


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1])))
