"""Force decoding to recorded sessions, with each drafter alone and several together.

python -m benchmarks.agent_session --turns runs/turns/*.json --output results.json

All drafters have the same number of nodes below the root. The texts are those of
`benchmarks.agent_session.recorded`, and the tokenizer is that of the embedded models. The draft
model is the embedded one, which has learnt Python's standard library. `TokenRecycling` reads the
likely tokens of the same model, below the recorded one. The model sees the last `WINDOW` tokens,
because it was trained on short texts.
"""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from benchmarks.agent_session.answers import LARGEST_SHARE, NGRAM, Answer, answers_of, repeated
from benchmarks.agent_session.forced import (
    ForcedResult,
    RecordedTarget,
    indices_of,
    run_answers,
)
from benchmarks.agent_session.recorded import Turn, load_turns
from specjax import (
    Chain,
    DraftModel,
    DynamicTree,
    PromptLookup,
    Streaming,
    Suffix,
    Together,
    TokenRecycling,
    UnionTree,
)
from specjax.assets import embedded
from specjax.drafters import Drafter
from specjax.drafters.suffix_index import SuffixIndex
from specjax.errors import InputError
from specjax.files import write_text
from specjax.models.transformer import Target
from specjax.plain_text import PlainText
from specjax.text import load_tokenizer

SLOTS = 16
WINDOW = 512


@dataclass(frozen=True)
class ForcedConfig:
    """Run the sessions.

    Attributes:
        turns: the files of turns; a session has the name of its file.
        output: the file of results, in JSON. Drafters whose results it has are not run again.
        drafters: the names of the drafters to run; empty: all.
        answers: the largest number of answers of a session.
    """

    turns: tuple[str, ...]
    output: str
    drafters: tuple[str, ...] = ()
    answers: int = 1000


def windowed(model: Target) -> Target:
    """Return a model whose tokens see the last `WINDOW` tokens, in texts of any length."""
    config = replace(
        model.config,
        sliding_window=WINDOW,
        windowed_layers=tuple(range(model.config.num_layers)),
        max_positions=1 << 20,
    )
    return replace(model, config=config)


def learned(model: Target, draft: Any) -> DraftModel:
    """Return a draft model that reads the last `WINDOW` tokens."""
    return DraftModel(model, draft=draft, cache=Streaming(sinks=0), budget=WINDOW)


def tree(top_k: int, depth: int, below_root: int) -> DynamicTree:
    """Return a dynamic tree with so many nodes below its root."""
    return DynamicTree(top_k, depth, below_root + 1)


def drafters_of(model: Target) -> dict[str, Drafter]:
    """Return all drafters by name. All but one were chosen before any union had run.

    Those named "suffix" search the text of the turn; "session", the earlier turns as well.
    """
    session = SuffixIndex.empty(1, 8)  # the texts are set for each turn

    def suffix(draft: Any) -> Suffix:
        return Suffix(answers=session, draft=draft)

    return {
        "lookup": PromptLookup(draft=Chain(16)),
        "suffix": Suffix(draft=tree(3, 16, 16)),
        "session": suffix(tree(3, 16, 16)),
        "recycling": TokenRecycling(draft=tree(8, 6, 16)),
        "model": learned(model, tree(4, 6, 16)),
        "session + model, 12 + 4": Together((suffix(tree(3, 12, 12)), learned(model, Chain(4)))),
        "session + model + recycling, 8 + 4 + 4": Together(
            (
                suffix(tree(3, 8, 8)),
                learned(model, tree(4, 3, 4)),
                TokenRecycling(draft=tree(8, 3, 4)),
            )
        ),
        # Added after the results of the first union.
        "model + session, 4 + the rest": Together(
            (learned(model, Chain(4)), suffix(tree(3, 16, 16))),
            draft=UnionTree((Chain(4), tree(3, 16, 16)), most=16),
        ),
        "lookup + recycling, 8 + 8": Together(
            (PromptLookup(draft=Chain(8)), TokenRecycling(draft=tree(8, 4, 8)))
        ),
    }


def uses_likely(drafter: Drafter) -> bool:
    """Return whether a drafter reads the target's likely tokens, so that a real model is needed."""
    parts = drafter.parts if isinstance(drafter, Together) else (drafter,)
    return any(isinstance(part, TokenRecycling) for part in parts)


def targets_of(model: Target) -> dict[bool, RecordedTarget]:
    """Return the target for drafters that read its likely tokens, and a tiny one for the others."""
    tiny = replace(
        model.config,
        num_layers=1,
        hidden_size=8,
        intermediate_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        windowed_layers=(0,),
    )
    return {
        True: RecordedTarget(model.params, model.config),
        False: RecordedTarget(Target.init(tiny, jax.random.key(0)).params, tiny),
    }


def describe(turns: list[Turn], answers: list[Answer]) -> dict[str, Any]:
    """Return the sizes of a session and its shares of repeated n-grams."""
    whole = [token for answer in answers for token in answer.output]
    return {
        "commits": [turn.commit for turn in turns],
        "logs": {
            kind: sum(turn.log_kind == kind for turn in turns)
            for kind in ("whole", "stopped", "none")
        },
        "answers": len(answers),
        "output_tokens": len(whole),
        "prompt_tokens": sum(len(answer.prompt) for answer in answers),
        "looping_answers": sum(answer.repeated > LARGEST_SHARE for answer in answers),
        f"repeated_{NGRAM}_grams_within_answers": float(
            np.concatenate([repeated(answer.output) for answer in answers]).mean()
        ),
        f"repeated_{NGRAM}_grams_within_session": float(repeated(whole).mean()),
    }


def main(config: ForcedConfig) -> None:
    """Run all drafters on all sessions, and write the results after each drafter."""
    model = windowed(Target.from_pretrained(embedded("draft"), dtype=jnp.float32))
    encode = PlainText(load_tokenizer(embedded("target"))).encode
    output = Path(config.output)
    results: dict[str, Any] = {"slots": SLOTS, "sessions": {}}
    if output.exists():
        results = json.loads(output.read_text())
    sessions = {}
    for path in config.turns:
        turns = load_turns(path)
        answers = answers_of(turns, encode)
        answers = answers[: config.answers]
        of_session = results["sessions"].setdefault(Path(path).stem, {"drafters": {}})
        of_session["facts"] = describe(turns, answers)
        answers = [answer for answer in answers if answer.repeated <= LARGEST_SHARE]
        sessions[Path(path).stem] = answers, indices_of(answers)
    targets = targets_of(model)
    print(f"load {os.getloadavg()[0]:.1f}", flush=True)
    for name, drafter in drafters_of(model).items():
        if config.drafters and name not in config.drafters:
            continue
        for session, (answers, indices) in sessions.items():
            of_session = results["sessions"][session]["drafters"]
            if name in of_session:
                continue
            started = time.monotonic()
            rows = run_answers(targets[uses_likely(drafter)], drafter, answers, indices)
            of_session[name] = {
                "parts": list(drafter.part_names),
                "answers": [
                    {"turn": answer.turn, "kind": answer.kind, **asdict(row)}
                    for answer, row in zip(answers, rows, strict=True)
                ],
            }
            print(
                f"{session}, {name}: {per_step(rows):.3f} tokens a step, "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
            output.parent.mkdir(parents=True, exist_ok=True)
            write_text(output, json.dumps(results, separators=(",", ":")) + "\n")


def per_step(rows: list[ForcedResult]) -> float:
    """Return the mean number of tokens of all steps."""
    return sum(row.tokens for row in rows) / sum(row.steps for row in rows)


if __name__ == "__main__":
    try:
        main(tyro.cli(ForcedConfig))
    except InputError as error:
        sys.exit(f"benchmark: error: {error}")
