"""The command ``specjax client``: draft on this machine, and let a server verify."""

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.console import Console
from rich.live import Live
from rich.text import Text

from specjax.cli.grammars import read_grammar
from specjax.cli.option_files import read_lines
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
    """Generate text with a drafter on this machine and a target on a server.

    Start the server with specjax serve --drafts.

    Attributes:
        server: address of the server, ws://HOST:PORT, or wss://HOST:PORT if it has a certificate.
        drafter: the drafter as METHOD:WHERE, such as moa:DIRECTORY or eagle3:DIRECTORY; the server
            must have the same one.
        corpus: text files that the drafter suffix drafts from, of at most 16 MiB together. They
            stay on this machine; the server sees what is drafted from them.
        target_parts: directory that "specjax convert --client-parts" has written, with the parts of
            the target that the drafter needs.
        prompt: text to continue.
        chat: apply the model's chat template to the prompt.
        chat_template: file with a Jinja chat template that replaces the tokenizer's own.
        chat_template_kwargs: variables for the chat template, as JSON: '{"enable_thinking":
            false}'.
        private: file with strings of the prompt that the server must not see, one per line. The
            whole text is then provisional.
        max_new_tokens: maximum number of tokens to generate.
        temperature: sampling temperature; 0 is greedy.
        top_k: sample from this many most likely tokens; 0 is no limit.
        top_p: sample from the most likely tokens with this total probability, in (0, 1].
        min_p: minimum probability of a token relative to the most likely one, in [0, 1].
        seed: random seed.
        ignore_eos: continue after an end-of-sequence token.
        stop: stop strings; the text ends before the first of them.
        json_schema: file with a JSON schema; the text is JSON that the schema accepts. The server
            must allow grammars.
        regex: regular expression that the whole text matches.
        choice: the text is one of these.
        draft: shape of the drafts, as for generate; their depth adapts to the network. The default
            is the drafter's own shape.
        told: what the server sends for each token with Mixture of Attentions, summaries or entries;
            must match the server.
        sent_as: number format of the hidden states that the server sends, float32, float16 or int8.
        offline: do not contact the server; the drafter writes the whole text, provisionally.
        journal: file that stores the committed text; the same command continues from it.
        json: print one JSON object with the text and statistics.
        api_key_file: file with the server's API key.
        certificate: file with the certificates to trust, instead of the system's.
        provisional_after: seconds without an answer after which the drafter continues alone,
            provisionally.
        wait_seconds: seconds without an answer after which the text ends as it is.
        dtype: data type of the params, float32, bfloat16 or float16; the default is float32 on CPUs
            and bfloat16 elsewhere.
        capacity: maximum number of tokens of a text, prompt and output; 0 is what the models
            support, at most 4096.
    """

    server: str = "ws://127.0.0.1:8000"
    drafter: str = ""
    corpus: tuple[str, ...] = ()
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
    json_schema: str = ""
    regex: str = ""
    choice: tuple[str, ...] = ()
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
    """Run ``specjax client`` and return 0 if the text is complete, 3 if the server was away."""
    from specjax import client

    for name, what in (
        ("drafter", "METHOD:DIRECTORY"),
        ("target_parts", "a directory"),
        ("prompt", "a text"),
    ):
        if not getattr(config, name):
            raise InputError(f"{name}='': give {what}")
    for name in ("provisional_after", "wait_seconds"):
        if not getattr(config, name) > 0:
            raise InputError(f"{name}={getattr(config, name)}: must be more than 0")
    check_is_chat(config.chat, config.chat_template, config.chat_template_kwargs)
    grammar = read_grammar(config.json_schema, config.regex, config.choice)
    private = read_lines("private", config.private)
    key = read_lines("api_key_file", config.api_key_file)
    connection = client.connect(
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
        corpus=config.corpus,
        chat_template=config.chat_template,
        chat_template_kwargs=config.chat_template_kwargs,
        patience=Patience(provisional=config.provisional_after, server=config.wait_seconds),
    )
    connection.device.warm_up()
    prompt: Any = [{"role": "user", "content": config.prompt}] if config.chat else config.prompt
    writer = connection.stream(
        prompt,
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        min_p=config.min_p,
        seed=config.seed,
        eos_token_ids=() if config.ignore_eos else None,
        stop=config.stop,
        grammar=grammar,
        private=private,
        journal=config.journal or None,
        is_offline=config.offline,
    )
    try:
        tell(writer, as_object=config.json, is_all_provisional=config.offline or bool(private))
    # A retry would give the same error.
    except (LinkRefusedError, ServerRefusedError, FrameError) as error:
        raise InputError(str(error)) from None
    is_whole = writer.report.finish_reason != "offline" or config.offline or bool(private)
    return 0 if is_whole else 3


def tell(writer: Writer | PrivateWriter, *, as_object: bool, is_all_provisional: bool) -> None:
    """Print a text while it is generated, then a summary; or print one JSON object at the end.

    Provisional text is printed only to a terminal, unless the whole text is provisional.
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
            if isinstance(event, CommittedEvent) or (
                is_all_provisional and isinstance(event, ProvisionalEvent)
            ):
                print(event.text, end="", flush=True)
        print()
    print(summary(writer.report), file=sys.stderr)


def as_json(report: TextReport) -> dict[str, Any]:
    """Return what ``--json`` prints, the committed text first."""
    fields = asdict(report)
    if report.grammar_completed is None:
        del fields["grammar_completed"]
    fields["tokens_a_round"] = round(report.tokens_a_round, 3)
    fields["round_trips"] = [round(seconds, 4) for seconds in report.round_trips]
    fields["seconds"] = round(report.seconds, 3)
    return fields


def summary(report: TextReport) -> str:
    """Return the statistics of a text in one line."""
    if not report.rounds:
        line = (
            f"no token was verified; {len(report.provisional_tokens)} provisional tokens in"
            f" {report.seconds:.1f} s"
        )
        return f"{len(report.tokens)} tokens were in the journal; {line}" if report.tokens else line
    trips = sorted(report.round_trips) or [0.0]
    parts = [
        f"{len(report.tokens)} tokens in {report.seconds:.1f} s",
        (
            f"{report.rounds} rounds of {report.tokens_a_round:.1f} tokens,"
            f" {1000 * trips[len(trips) // 2]:.0f} ms each"
        ),
        f"{report.bytes_up / 1000:.1f} kB up, {report.bytes_down / 1000:.1f} kB down",
        f"resumed {report.resumes} times, {report.retracted} provisional tokens retracted",
    ]
    if report.provisional_tokens:
        parts.append(f"{len(report.provisional_tokens)} tokens are not verified")
    return "; ".join(parts)


def show(events: Iterable[TextEvent], console: Console) -> None:
    """Show a text while it grows: committed text, then provisional text in grey italics."""
    committed_text, provisional = "", []
    with Live(console=console, refresh_per_second=20, vertical_overflow="visible") as live:
        for event in events:
            if isinstance(event, ProvisionalEvent):
                provisional.append(event.text)
            elif isinstance(event, CommittedEvent):
                del provisional[: event.confirmed]
                committed_text += event.text
            else:
                del provisional[len(provisional) - len(event.tokens) :]
            live.update(
                Text.assemble(committed_text, ("".join(provisional), "italic bright_black"))
            )
