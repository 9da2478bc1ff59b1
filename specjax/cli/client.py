"""``specjax client``: draft on this machine, and have a server verify it."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text

from specjax.client import CommittedEvent, Patience, ProvisionalEvent, TextEvent, TextReport
from specjax.client.exchange import ServerRefusedError
from specjax.client.link import LinkRefusedError
from specjax.client.private import PrivateWriter
from specjax.client.writer import Writer
from specjax.errors import InputError
from specjax.templates import check_is_chat
from specjax.wire import FrameError


@dataclass(frozen=True)
class ClientConfig:
    """Write a text with a drafter that runs here and a target that runs on a server (specjax serve --drafts).

    Attributes:
        server: ws://HOST:PORT, or wss://HOST:PORT where the server has a certificate.
        drafter: METHOD:WHERE, such as moa:DIRECTORY or eagle3:DIRECTORY; the server has the same.
        target_parts: directory that "specjax convert --client-parts" has written: what the drafter needs of the target.
        prompt: the text to continue.
        chat: put the prompt into the model's chat template.
        chat_template: a file with a Jinja chat template, in place of the tokenizer's own.
        chat_template_kwargs: what the template is given beside the messages, as JSON: '{"enable_thinking": false}'.
        private: file with strings of the prompt that the server must not see, one a line. All of the text is then provisional.
        max_new_tokens: most tokens to generate.
        temperature: 0 is greedy.
        top_k: 0 is no limit.
        top_p: in (0, 1].
        min_p: in [0, 1].
        seed: of the random draws.
        ignore_eos: generate on after an end-of-sequence token.
        stop: strings before the first of which the text ends.
        draft: shape of a draft, as for generate; its depth follows the network. By default the drafter's own.
        told: of Mixture of Attentions, what comes down, as the server was started: summaries or entries.
        sent_as: how the numbers are written that come down: float32, float16 or int8.
        offline: do not ask the server: the drafter writes all of the text, provisionally.
        journal: file that keeps the text as far as it is committed; the same command goes on from it.
        json: print one JSON object with the text and what it took.
        api_key_file: file with the server's key.
        certificate: file with the certificates to trust, in place of the system's.
        provisional_after: seconds without an answer after which the drafter goes on alone, provisionally.
        wait_seconds: without an answer, after which the text ends as it is.
        dtype: of the params; by default float32 on CPU, bfloat16 elsewhere.
        capacity: most tokens of a text; 0: what the models have positions for, at most 4096.
    """

    server: str = "ws://127.0.0.1:8000"
    drafter: str = ""
    target_parts: str = ""
    prompt: str = ""
    chat: bool = False
    chat_template: str = ""
    chat_template_kwargs: str = ""
    private: str = ""
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    ignore_eos: bool = False
    stop: tuple[str, ...] = ()
    draft: str = ""
    told: Literal["", "summaries", "entries"] = ""
    sent_as: Literal["float32", "float16", "int8"] = "float16"
    offline: bool = False
    journal: str = ""
    json: bool = False
    api_key_file: str = ""
    certificate: str = ""
    provisional_after: float = 1.5
    wait_seconds: float = 60.0
    dtype: str = ""
    capacity: int = 0


def run_client(config: ClientConfig) -> int:
    """``specjax client``. 0: the text is whole; 3: the server stayed away, and it is not."""
    from specjax import client

    for name, what in (("drafter", "METHOD:DIRECTORY"), ("target_parts", "a directory"), ("prompt", "a text")):
        if not getattr(config, name):
            raise InputError(f"{name}='': give {what}")
    for name in ("provisional_after", "wait_seconds"):
        if not getattr(config, name) > 0:
            raise InputError(f"{name}={getattr(config, name)}: must be more than 0")
    check_is_chat(config.chat, config.chat_template, config.chat_template_kwargs)
    private = read_lines("private", config.private)
    key = read_lines("api_key_file", config.api_key_file)
    connected = client.connect(
        config.server,
        config.drafter,
        config.target_parts,
        api_key=key[0] if key else None,
        certificate=config.certificate or None,
        draft=config.draft or None,
        told=config.told or None,
        precision=config.sent_as,
        capacity=config.capacity or None,
        dtype=config.dtype or None,
        chat_template=config.chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
        patience=Patience(provisional=config.provisional_after, server=config.wait_seconds),
    )
    connected.device.warm_up()
    prompt: Any = [{"role": "user", "content": config.prompt}] if config.chat else config.prompt
    writer = connected.stream(
        prompt,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        seed=config.seed,
        eos_token_ids=() if config.ignore_eos else None,
        stop=config.stop,
        private=private,
        journal=config.journal or None,
        is_offline=config.offline,
    )
    try:
        tell(writer, as_object=config.json, is_all_provisional=config.offline or bool(private))
    except (LinkRefusedError, ServerRefusedError, FrameError) as error:  # it would be no other the next time
        raise InputError(str(error)) from None
    is_whole = writer.report.finish_reason != "offline" or config.offline or bool(private)
    return 0 if is_whole else 3


def tell(writer: Writer | PrivateWriter, *, as_object: bool, is_all_provisional: bool) -> None:
    """Print a text while it is written, and what it took; or all of it at the end, as one JSON object.

    Provisional text goes to a terminal alone, unless there is to be no other.
    """
    if as_object:
        for _ in writer:
            pass
        print(json.dumps(as_json(writer.report)))
        return
    if sys.stdout.isatty():
        show(writer, Console())
    else:
        for event in writer:
            if isinstance(event, CommittedEvent) or (is_all_provisional and isinstance(event, ProvisionalEvent)):
                print(event.text, end="", flush=True)
        print()
    print(summary(writer.report), file=sys.stderr)


def read_lines(name: str, path: str) -> tuple[str, ...]:
    """The lines of a file that are not empty; none where no file is named."""
    if not path:
        return ()
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{name}={path!r}: cannot be read ({error})") from None
    if not (found := tuple(line for line in lines if line.strip())):
        raise InputError(f"{name}={path!r}: is empty; write a line, or leave the option out")
    return found


def as_json(report: TextReport) -> dict[str, Any]:
    """What ``--json`` prints: the committed text first."""
    fields = asdict(report)
    fields["tokens_a_round"] = round(report.tokens_a_round, 3)
    fields["round_trips"] = [round(seconds, 4) for seconds in report.round_trips]
    fields["seconds"] = round(report.seconds, 3)
    return fields


def summary(report: TextReport) -> str:
    """What it took, in a line."""
    if not report.rounds:
        said = f"nothing was verified; {len(report.provisional_tokens)} provisional tokens in {report.seconds:.1f} s"
        return f"{len(report.tokens)} tokens were in the journal; {said}" if report.tokens else said
    trips = sorted(report.round_trips) or [0.0]
    said = [
        f"{len(report.tokens)} tokens in {report.seconds:.1f} s",
        f"{report.rounds} rounds of {report.tokens_a_round:.1f} tokens, {1000 * trips[len(trips) // 2]:.0f} ms each",
        f"{report.bytes_up / 1000:.1f} kB up, {report.bytes_down / 1000:.1f} kB down",
        f"resumed {report.resumes} times, {report.retracted} provisional tokens retracted",
    ]
    if report.provisional_tokens:
        said.append(f"{len(report.provisional_tokens)} tokens are not verified")
    return "; ".join(said)


def show(events: Iterable[TextEvent], console: Console) -> None:
    """The text while it grows: what is committed plainly, and what is provisional in grey italics behind it."""
    committed, provisional = "", []
    with Live(console=console, refresh_per_second=20, vertical_overflow="visible") as live:
        for event in events:
            if isinstance(event, ProvisionalEvent):
                provisional.append(event.text)
            elif isinstance(event, CommittedEvent):
                del provisional[: event.confirmed]
                committed += event.text
            else:
                del provisional[len(provisional) - len(event.tokens) :]
            live.update(Text.assemble(committed, ("".join(provisional), "italic bright_black")))
