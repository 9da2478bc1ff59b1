"""Hold an agent's session with a model that calls tools, with each drafter alone and several.

    python -m benchmarks.agent_session.live --model runs/tools_model/model --output live.json

The session is that of `benchmarks.agent_session.script`. The model gets each request and writes a
call. It gets the fixed result of the right call and writes an answer. What it has written stays in
the history, right or wrong. Each drafter has an engine, and the engines take turns: all answer a
prompt before the next one is asked. Texts are greedy and must be those of plain decoding.

The seconds of an answer are those from its first decode call to its end, one step a call. So they
have no prefill. An answer that loops is in no sum.
"""

import gc
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.agent_session.__main__ import SLOTS, learned, tree, windowed
from benchmarks.agent_session.answers import LARGEST_SHARE, NGRAM, repeated_share
from benchmarks.agent_session.script import TOOLS, TURNS, ScriptTurn, make_script
from specjax import (
    Chain,
    PromptLookup,
    Suffix,
    Together,
    TokenRecycling,
    text,
)
from specjax.assets import embedded
from specjax.chat import AnswerParser, ResponseForm, response_form
from specjax.demo import inflate
from specjax.drafters import Drafter
from specjax.errors import InputError
from specjax.files import write_text
from specjax.models.params import count
from specjax.models.transformer import Target
from specjax.serving import Engine

PLAIN = "plain"
MOST_TOKENS = 512
"""The largest number of tokens of an answer."""
EARLIER_ANSWERS = 2**14
"""The number of tokens of earlier answers that `Suffix` searches: more than a session has."""
GROWN = {"hidden_size": 800, "intermediate_size": 2720, "num_layers": 6}
"""The sizes that give the model 60M parameters."""


@dataclass(frozen=True)
class LiveConfig:
    """Hold the session.

    Attributes:
        model: the directory of the model that ``python -m benchmarks.tools_model`` has trained.
        output: the file of results, in JSON.
        limit: the number of turns.
        repeats: the number of times that the session is held.
        drafters: the names of the drafters to use beside plain decoding; empty: all.
        grow: whether the model is grown to 60M parameters. The tokens of a step are the same
            without, and the session takes less time.
        capacity: the number of tokens that the session has room for.
    """

    model: str
    output: str
    limit: int = TURNS
    repeats: int = 1
    drafters: tuple[str, ...] = ()
    grow: bool = True
    capacity: int = 32_768


@dataclass(frozen=True)
class Written:
    """The answer of an engine to a prompt.

    Attributes:
        tokens: the token ids.
        steps: the number of steps.
        offered: the accepted tokens that each part of a union offered; empty without parts.
        only: those that no other part offered.
        timed_tokens: the number of tokens after those of the first call.
        seconds: the seconds of these.
    """

    tokens: tuple[int, ...]
    steps: int
    offered: tuple[int, ...]
    only: tuple[int, ...]
    timed_tokens: int
    seconds: float


def drafters_of(model: Target) -> dict[str, Drafter | None]:
    """Return all drafters by name, each with `SLOTS` nodes below the root.

    The prompt has the whole session. So lookup and suffix drafters copy from all earlier turns.

    Args:
        model: the draft model.
    """

    return {
        PLAIN: None,
        "lookup": PromptLookup(draft=Chain(SLOTS)),
        "suffix": Suffix(draft=tree(3, 16, SLOTS)),
        "recycling": TokenRecycling(draft=tree(8, 6, SLOTS)),
        "model": learned(model, tree(4, 6, SLOTS)),
        "suffix + recycling, 12 + 4": Together(
            (Suffix(draft=tree(3, 12, 12)), TokenRecycling(draft=tree(8, 3, 4)))
        ),
        "suffix + model, 12 + 4": Together(
            (Suffix(draft=tree(3, 12, 12)), learned(model, Chain(4)))
        ),
    }


def make_engine(target: Target, drafter: Drafter | None, capacity: int) -> Engine:
    """Return an engine with one row, which decodes one step a call."""
    parts = drafter.parts if isinstance(drafter, Together) else (drafter,)
    return Engine(
        target,
        drafter,
        drafts=(None if drafter is None else drafter.draft_shape,),
        rows=1,
        widths=(1,),
        capacity=capacity,
        pages=capacity // 64 + 8,
        page=64,
        chunk=256,
        steps=1,
        # Reading again would take time from the other engines.
        reread=False,
        earlier_answers=EARLIER_ANSWERS if any(isinstance(part, Suffix) for part in parts) else 0,
    )


def write(engine: Engine, prompt: Sequence[int], end: int, tenant: str) -> Written:
    """Let an engine write the greedy answer to a prompt, up to the token ``end``."""
    handle = engine.submit(
        prompt, max_new_tokens=MOST_TOKENS, temperature=0.0, eos_token_ids=(end,), tenant=tenant
    )
    handle.result()
    acceptance = handle.acceptance
    assert acceptance is not None, "an answer has at least one step"
    pieces, _ = handle.news(0)
    return Written(
        tokens=handle.tokens,
        steps=acceptance.steps,
        offered=acceptance.accepted_by,
        only=acceptance.accepted_only_by,
        timed_tokens=sum(len(piece.tokens) for _, piece in pieces[1:]),
        seconds=pieces[-1][0] - pieces[0][0],
    )


class Session:
    """A session: its messages so far, and the parser of the model's answers."""

    def __init__(self, tokenizer: Any) -> None:
        """Begin with no messages."""
        form = response_form(tokenizer)
        if form is None:
            raise InputError("model: its chat template has no calls; give a model of tools_model")
        self.form: ResponseForm = form
        self.tokenizer, self.messages = tokenizer, []

    def prompt(self) -> list[int]:
        """Return the token ids of the history, up to where the answer begins."""
        return text.encode_chat(self.tokenizer, self.messages, tools=TOOLS)

    def ask(self, turn: ScriptTurn) -> None:
        """Add a request."""
        self.messages.append({"role": "user", "content": turn.request})

    def give(self, turn: ScriptTurn) -> None:
        """Add the result of the right call."""
        self.messages.append({"role": "tool", "tool_call_id": "call_0", "content": turn.result})

    def answer(self, tokens: Sequence[int], turn: ScriptTurn, role: str) -> bool:
        """Add what the model has written, and return whether it is right."""
        answer = AnswerParser(self.form, tools=TOOLS).parse(
            self.tokenizer.decode(tokens, skip_special_tokens=True)
        )
        calls = [(call.name, call.values()) for call in answer.tool_calls]
        functions = [{"name": name, "arguments": values} for name, values in calls]
        message: dict[str, Any] = {"role": "assistant", "content": answer.content or ""}
        if functions:
            message["tool_calls"] = [
                {"type": "function", "id": "call_0", "function": function} for function in functions
            ]
        self.messages.append(message)
        if role == "call":
            return calls == [(turn.tool, turn.arguments)]
        return not calls and answer.content == turn.result


def hold(
    engines: Mapping[str, Callable[[Sequence[int]], Written]],
    session: Session,
    turns: Sequence[ScriptTurn],
) -> Iterator[dict[str, Any]]:
    """Hold a session, and yield a record for each answer.

    Args:
        engines: what writes the answer to a prompt, for each drafter; `PLAIN` is among them.
        session: the session, without messages.
        turns: the turns.
    """
    answers = 0
    for index, turn in enumerate(turns):
        for role, add in (("call", session.ask), ("answer", session.give)):
            add(turn)
            prompt = session.prompt()
            # Another one begins each time, so that none always follows the same one.
            first = answers % len(engines)
            names = [*engines][first:] + [*engines][:first]
            results = {name: engines[name](prompt) for name in names}
            plain = results[PLAIN].tokens
            share = repeated_share(plain)
            answers += 1
            record = {
                "turn": index,
                "kind": turn.kind,
                "role": role,
                "prompt": len(prompt),
                "repeated": share,
                "is_right": session.answer(plain, turn, role),
                "drafters": {
                    name: {
                        "is_plain": results[name].tokens == plain,
                        **asdict(results[name]),
                        "tokens": len(results[name].tokens),
                    }
                    for name in engines
                },
            }
            print(
                f"turn {index} {turn.kind} {role}: {len(prompt)} + {len(plain)} tokens, right:"
                f" {record['is_right']}, repeated: {share:.0%}, steps:"
                f" {[results[name].steps for name in engines]}",
                flush=True,
            )
            yield record


def _counted(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [record for record in records if record["repeated"] <= LARGEST_SHARE]


def facts_of(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the sizes of a session, and what was left out of the sums."""
    tokens = [record["drafters"][PLAIN]["tokens"] for record in records]
    shares = [record["repeated"] * size for record, size in zip(records, tokens, strict=True)]
    return {
        "answers": len(records),
        "looping": len(records) - len(_counted(records)),
        "output_tokens": sum(tokens),
        "last_prompt": records[-1]["prompt"],
        f"repeated_{NGRAM}_grams": sum(shares) / sum(tokens),
        "right_calls": sum(it["is_right"] for it in records if it["role"] == "call"),
        "right_answers": sum(it["is_right"] for it in records if it["role"] == "answer"),
        "texts_that_differ": sum(
            not row["is_plain"] for record in records for row in record["drafters"].values()
        ),
    }


def rows_of(sessions: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return what the table states about each drafter.

    Tokens a step are those of the first session. Tokens per second are the median of all sessions,
    and so are their ratios to plain decoding of the same session.
    """
    rows = []
    counted = [_counted(records) for records in sessions]
    for name in sessions[0][0]["drafters"]:

        def of(records: Sequence[dict[str, Any]], *kinds: str, name: str = name) -> list[Any]:
            return [
                record["drafters"][name]
                for record in records
                if not kinds or record["kind"] in kinds or record["role"] in kinds
            ]

        speeds = [_speed(of(records)) for records in counted]
        plain = [_speed(of(records, name=PLAIN)) for records in counted]
        ratios = [mine / base for mine, base in zip(speeds, plain, strict=True)]
        answers = of(counted[0])
        rows.append(
            {
                "name": name,
                "per_step": _per_step(answers),
                "calls": _per_step(of(counted[0], "call")),
                "answers": _per_step(of(counted[0], "answer")),
                "speed": statistics.median(speeds),
                "against_plain": statistics.median(ratios),
                "least": min(ratios),
                "most": max(ratios),
                "offered": _shares(answers, "offered"),
                "only": _shares(answers, "only"),
            }
        )
    return rows


def _shares(answers: Sequence[dict[str, Any]], key: str) -> list[float]:
    """Return the share of each part in the accepted tokens."""
    accepted = sum(it["tokens"] - it["steps"] for it in answers)
    counts = np.array([it[key] for it in answers]).sum(axis=0)
    return (counts / max(1, accepted)).tolist()


def _per_step(answers: Sequence[dict[str, Any]]) -> float:
    return sum(it["tokens"] for it in answers) / max(1, sum(it["steps"] for it in answers))


def _speed(answers: Sequence[dict[str, Any]]) -> float:
    """Return tokens per second; NaN if all answers ended with their first call."""
    seconds = sum(it["seconds"] for it in answers)
    return sum(it["timed_tokens"] for it in answers) / seconds if seconds else float("nan")


def table_of(rows: Sequence[dict[str, Any]]) -> str:
    """Return the table in Markdown."""
    lines = [
        "| drafter | tokens a step | calls | answers | tokens/s | against plain | least, most |"
        " accepted: offered by, only by |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in rows:
        parts = "; ".join(
            f"{offered:.0%}, {only:.0%}"
            for offered, only in zip(row["offered"], row["only"], strict=True)
        )
        lines.append(
            f"| {row['name']} | {row['per_step']:.2f} | {row['calls']:.2f} | {row['answers']:.2f} |"
            f" {row['speed']:.0f} | {row['against_plain']:.2f} | {row['least']:.2f},"
            f" {row['most']:.2f} | {parts} |"
        )
    return "\n".join(lines)


def main(config: LiveConfig) -> None:
    """Hold the session with all drafters, write the records and print the table."""
    tokenizer = text.load_tokenizer(Path(config.model))
    target = Target.from_pretrained(config.model, dtype=jnp.float32)
    if config.grow:
        target = inflate(target, **GROWN)
    drafters = drafters_of(windowed(Target.from_pretrained(embedded("draft"), dtype=jnp.float32)))
    unknown = set(config.drafters) - {*drafters}
    if unknown:
        raise InputError(f"drafters={sorted(unknown)}: not among {', '.join(drafters)}")
    chosen = {PLAIN, *(config.drafters or drafters)}
    turns = make_script()[: config.limit]
    sessions = []
    with ExitStack() as stack:
        engines = {}
        for name, drafter in drafters.items():
            if name in chosen:
                begun_at = time.monotonic()
                engines[name] = stack.enter_context(make_engine(target, drafter, config.capacity))
                print(f"{name}: ready after {time.monotonic() - begun_at:.0f} s", flush=True)
        for repeat in range(config.repeats):
            gc.collect()
            print(f"session {repeat}, load {os.getloadavg()[0]:.1f}", flush=True)

            def writer(engine: Engine, tenant: str = f"session {repeat}") -> Any:
                return lambda prompt: write(engine, prompt, tokenizer.eos_token_id, tenant)

            writers = {name: writer(engine) for name, engine in engines.items()}
            sessions.append([])
            for record in hold(writers, Session(tokenizer), turns):
                sessions[-1].append(record)
                write_results(config.output, target, sessions)
    print(f"{facts_of(sessions[0])}\n\n{table_of(rows_of(sessions))}")


def write_results(path: str, target: Target, sessions: Sequence[list[dict[str, Any]]]) -> None:
    """Write the records of all sessions so far."""
    facts = {"parameters": count(target.params), **facts_of(sessions[0])}
    results = {"facts": facts, "slots": SLOTS, "sessions": sessions}
    output = Path(path)
    output.parent.mkdir(parents=True, exist_ok=True)
    write_text(output, json.dumps(results, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    try:
        main(tyro.cli(LiveConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
