"""The command ``python -m tests.grammars.pairs``: texts in which every pair of settings occurs.

Each text is generated under a random grammar, and compared token for token with the slow oracle. A
call of `specjax.generate`, or an engine, generates several texts with one target, drafter and rule.
Results go into a file as they come, one line for each call. The command leaves out what the file
has already, so it can be interrupted.
"""

import argparse
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import numpy as np

import specjax
from specjax.errors import GrammarError
from specjax.evaluation.same_texts import measure_rounding
from specjax.serving import Engine
from specjax.serving.handle import EngineError
from tests.conftest import free_programs_if_there_are_many
from tests.grammars import settings
from tests.grammars.covering import Pair, all_pairs, counted, covering_array, pairs_of, table
from tests.grammars.oracle import Reader, Text
from tests.grammars.published_tokenizers import UnavailableError
from tests.grammars.random_grammars import EACH, KINDS, random_grammars

Choice = dict[str, str]

CALLS = {
    "tokenizer": settings.TOKENIZERS,
    "target": tuple(settings.TARGETS),
    "drafter": tuple(settings.DRAFTERS),
    "draft": settings.SHAPE_NAMES,
    "rule": ("coupled", "independent", "block", "rejection"),
    "batch": ("mixed", "greedy", "without truncation"),
    "runs in": ("generate", "engine"),
}
"""The factors of a call. A batch of greedy rows, or without truncation, has other programs."""

EXECUTIONS = ("generate", "pages", "prefix sharing", "preemption")
"""Where a text is generated: in a static batch; or in an engine, in which it shared the pages of
another prompt, was preempted, or neither."""

TEXTS = {
    "temperature": tuple(map(str, settings.TEMPERATURES)),
    "truncation": tuple(settings.TRUNCATIONS),
    "grammar": tuple(KINDS),
    "ends": ("tokenizer's", "none", "others"),
}
"""The factors of one text of a call. The kinds of grammars have `EACH` grammars."""

FACTORS = {n: v for n, v in CALLS.items() if n != "runs in"} | {"execution": EXECUTIONS} | TEXTS

NEW = {True: 24, False: 12}
"""The largest number of new tokens with the embedded tokenizer, and with a larger one."""

PROMPT, SHARED = 8, 17
"""The longest prompt, and the tokens in front of it that prompts share."""

_WITHOUT_LAYERS = {
    "EAGLE with layer attention",
    "mixture of attentions",
    "streaming cache",
    "SnapKV",
}
_OF_EMBEDDED = {"embedded EAGLE-3", "embedded MTP"}


def is_allowed(a: str, x: str, b: str, y: str) -> bool:
    """Return whether two values of two factors go together. The others are refused by name."""
    match a, b:
        case "drafter", "draft":
            if (x, y) == ("token recycling", "sampled"):
                return False
            return y == "chain" or x not in ("none", "prompt lookup")
        case "drafter", "target":
            if x in _OF_EMBEDDED:
                return y == settings.TRAINED
            return not (
                (y in ("hybrid", "MLA and experts") and x in _WITHOUT_LAYERS)
                or (y == "MLA and experts" and x == "assistant")
            )
        case "target", "tokenizer":
            return x != settings.TRAINED or y == "embedded"
        case "rule", "draft":
            return x not in ("block", "rejection") or y in ("chain", "adaptive")
        case (("runs in" | "execution"), "rule"):
            return x == "generate" or y == "coupled"
        case (("runs in" | "execution"), "batch"):
            return x == "generate" or y == "mixed"
        case "batch", "temperature":
            return x != "greedy" or y == "0.0"
        case "batch", "truncation":
            return x != "without truncation" or y == "none"
    return True


@cache
def calls() -> tuple[Choice, ...]:
    """Return the calls, in which every pair of the factors of calls occurs."""
    return tuple(covering_array(CALLS, is_allowed)[0])


def texts_of_call(call: Choice) -> int:
    """Return the number of texts of a call: fewer where they cost more, or say less."""
    if call["tokenizer"] != "embedded":
        return 4
    return 28 if call["rule"] == "coupled" else 8


def planned(number: int, done: Counter[Pair], grammars: Counter[str]) -> list[Choice]:
    """Return the choices of the texts of a call: those with most pairs that occur seldom.

    Args:
        number: the index of the call.
        done: how often each pair occurred in the calls before; it is updated.
        grammars: how often each kind of grammar occurred; it is updated.
    """
    call, rng, texts = calls()[number], random.Random(number), []
    count = texts_of_call(call)
    for index in range(count):
        where = "generate"
        if call["runs in"] == "engine":
            where = EXECUTIONS[1 + 3 * index // count]
        best: Choice = {}
        for _ in range(40):
            values = {name: rng.choice(options) for name, options in TEXTS.items()}
            if call["batch"] == "greedy":
                values["temperature"] = "0.0"
            if call["batch"] == "without truncation":
                values["truncation"] = "none"
            merged = call | {"execution": where} | values
            choice = {name: merged[name] for name in FACTORS}
            if not best or _seldom(choice, done) > _seldom(best, done):
                best = choice
        done.update(pairs_of(best))
        kind = best["grammar"]
        texts.append(best | {"number": str(grammars[kind] % EACH)})
        grammars[kind] += 1
    return texts


def _seldom(choice: Choice, done: Counter[Pair]) -> float:
    return sum(4.0 ** -done[pair] for pair in pairs_of(choice))


# --- one call -------------------------------------------------------------------------------------


@cache
def _reader(target: str, tokenizer: str) -> Reader:
    model = settings.target(target, tokenizer)
    compiler = settings.vocabulary(tokenizer).compiler(model.config.vocab_size)
    return Reader(model, compiler, SHARED + PROMPT + NEW[tokenizer == "embedded"])


def run_call(number: int, choices: Sequence[Choice]) -> dict[str, Any]:
    """Generate the texts of a call, compare them with the oracle, and return what is found."""
    start, call = time.perf_counter(), calls()[number]
    model = settings.target(call["target"], call["tokenizer"])
    drafter = settings.drafter(call["drafter"], model, call["draft"], call["tokenizer"])
    texts = [_text(choice, number, row) for row, choice in enumerate(choices)]
    in_engine = call["runs in"] == "engine"
    run = _run_engine if in_engine else _run_generate
    outputs, completed, accepted, where = run(call, choices, model, drafter, texts)
    texts = [
        Text(**vars(text) | {"output": output}) for text, output in zip(texts, outputs, strict=True)
    ]
    generated = time.perf_counter()
    deviations = _reader(call["target"], call["tokenizer"]).deviations(texts)
    rounding, rows = 0.0, []
    if any(deviations):
        prompts = [(np.array([text.prompt]), np.array([len(text.prompt)])) for text in texts[:1]]
        widths = () if drafter is None else (2, drafter.draft_shape.depth + 1)
        rounding = measure_rounding(model, prompts, widths, texts[0].length) / 2
    for row, (choice, text) in enumerate(zip(choices, texts, strict=True)):
        rows.append(
            {
                "choice": choice | {"execution": where[row]},
                "tokens": len(text.output),
                "accepted": accepted[row],
                "compared": text.is_coupled,
                "deviations": [vars(it) for it in deviations[row]],
                "problem": _problem(choice, text, completed[row], call["tokenizer"]),
                "completed": bool(completed[row]),
            }
        )
    return {
        "number": number,
        "rows": rows,
        "rounding": rounding,
        "seconds": round(time.perf_counter() - start, 1),
        "oracle_seconds": round(time.perf_counter() - generated, 1),
    }


def _text(choice: Choice, number: int, row: int) -> Text:
    """Return a text without an output."""
    rng = np.random.default_rng((number, row))
    vocabulary = settings.vocabulary(choice["tokenizer"])
    prompt = rng.integers(0, vocabulary.size, int(rng.integers(2, PROMPT + 1))).tolist()
    if choice["execution"] == "prefix sharing":
        shared = np.random.default_rng(number).integers(0, vocabulary.size, SHARED)
        prompt = [*shared.tolist(), *prompt]
    several = [vocabulary.end_id, *rng.integers(0, vocabulary.size, 2).tolist()]
    ends = {"tokenizer's": [vocabulary.end_id], "none": [], "others": several}
    temperature = float(choice["temperature"])
    return Text(
        prompt=prompt,
        output=(),
        key=jax.random.fold_in(jax.random.key(number), row),
        grammar=_grammar(choice).grammar,
        stop_ids=ends[choice["ends"]],
        setting={"temperature": temperature} | settings.TRUNCATIONS[choice["truncation"]],
        length=NEW[choice["tokenizer"] == "embedded"],
        is_coupled=choice["rule"] == "coupled" or temperature == 0,
    )


def _grammar(choice: Choice) -> Any:
    return random_grammars(choice["grammar"])[int(choice["number"])]


def _run_generate(
    call: Choice, choices: Sequence[Choice], model: Any, drafter: Any, texts: Sequence[Text]
) -> tuple[list[list[int]], list[bool], list[int], list[str]]:
    """Return the outputs, whether they are complete, their accepted tokens, and where they ran."""
    longest = max(len(text.prompt) for text in texts)
    prompts = np.zeros((len(texts), longest), np.int32)
    for row, text in enumerate(texts):
        prompts[row, : len(text.prompt)] = text.prompt
    lengths = np.array([len(text.prompt) for text in texts])
    compiler = settings.vocabulary(call["tokenizer"]).compiler(model.config.vocab_size)
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    try:
        result = specjax.generate(
            model,
            drafter,
            prompts,
            lengths,
            max_new_tokens=texts[0].length,
            sampling=specjax.Sampling(
                **{name: [(defaults | text.setting)[name] for text in texts] for name in defaults}
            ),
            key=jax.numpy.stack([text.key for text in texts]),
            eos_token_ids=[tuple(text.stop_ids) for text in texts],
            rule=call["rule"],
            grammar=[compiler.compile(text.grammar) for text in texts],
        )
    except GrammarError as error:  # the oracle must find that nothing is legal there
        result = error.result
    outputs = [
        row[start:end].tolist()
        for row, start, end in zip(result.tokens, lengths, result.lengths, strict=True)
    ]
    accepted = np.asarray(result.stats.accepted).tolist()
    return outputs, result.grammar_completed.tolist(), accepted, ["generate"] * len(texts)


def _run_engine(
    call: Choice, choices: Sequence[Choice], model: Any, drafter: Any, texts: Sequence[Text]
) -> tuple[list[list[int]], list[bool], list[int], list[str]]:
    """Return what `_run_generate` does: first two texts at a time, then all at once."""
    engine = Engine(
        model,
        drafter,
        drafts=[None if drafter is None else drafter.draft_shape],
        rows=4,
        widths=[4],
        pages=10,
        capacity=SHARED + PROMPT + NEW[True],
        page=8,
        chunk=16,
        steps=2,
        tokenizer=settings.vocabulary(call["tokenizer"]).tokenizer,
        grammars=True,
        warm=False,
    )
    handles: list[Any] = []

    def submit(text: Text) -> Any:
        return engine.submit(
            list(text.prompt),
            max_new_tokens=text.length,
            eos_token_ids=tuple(text.stop_ids),
            key=text.key,
            grammar=text.grammar,
            **text.setting,
        )

    with engine:
        for choice, text in zip(choices, texts, strict=True):
            if choice["execution"] != "preemption":
                handles.append(submit(text))
                if len(handles) % 2 == 0 or choice["execution"] == "prefix sharing":
                    _wait(handles)
        handles += [
            submit(text)
            for choice, text in zip(choices, texts, strict=True)
            if choice["execution"] == "preemption"
        ]
        _wait(handles)
    where = [
        "preemption"
        if handle._before is not None
        else "prefix sharing"
        if handle.cached_tokens
        else "pages"
        for handle in handles
    ]
    accepted = [0 if it.acceptance is None else int(it.acceptance.accepted) for it in handles]
    outputs = [list(handle.tokens) for handle in handles]
    return outputs, [bool(handle.grammar_completed) for handle in handles], accepted, where


def _wait(handles: Sequence[Any]) -> None:
    for handle in handles:
        try:
            handle.result(timeout=1800)
        except EngineError as error:  # the oracle must find that nothing is legal there
            if "cannot go on" not in str(error):
                raise


def _problem(choice: Choice, text: Text, completed: bool, tokenizer: str) -> str | None:
    """Return what is wrong with the end of a text or with its language; None if it is right."""
    model = settings.target(choice["target"], tokenizer)
    compiler = settings.vocabulary(tokenizer).compiler(model.config.vocab_size)
    matcher = compiler.compile(text.grammar).matcher(tuple(text.stop_ids))
    try:
        matcher.append(text.output)
    except RuntimeError as error:
        return str(error)
    if matcher.is_complete != completed:
        return f"grammar_completed is {completed}"
    ended = [token for token in text.output if token not in text.stop_ids]
    if completed and len(text.output) < text.length:
        decoded = compiler._tokenizer.decode_bytes(ended).decode()
        if not _grammar(choice).accepts(decoded):
            return f"{decoded!r} does not satisfy {_grammar(choice).source}"
    return None


# --- the command ----------------------------------------------------------------------------------


def summary(results: Sequence[Mapping[str, Any]], with_table: bool = False) -> str:
    """Return what was found, in words, and how often each pair of settings occurred."""
    rows = [row for result in results for row in result["rows"]]
    choices = [{name: row["choice"][name] for name in FACTORS} for row in rows]
    counts = counted(choices)
    impossible = impossible_pairs()
    missing = [pair for pair in _possible_pairs(impossible) if not counts[pair]]
    compared = [row for row in rows if row["compared"]]
    deviations = [
        (row, it, it["slack"] <= result["rounding"])
        for result in results
        for row in result["rows"]
        for it in row["deviations"]
    ]
    lines = [
        f"{len(rows)} texts of {sum(row['tokens'] for row in rows)} tokens in {len(results)} calls;"
        f" {sum(row['accepted'] > 0 for row in rows)} texts have accepted drafts",
        f"{len(compared)} compared token for token; {len(rows) - len(compared)} of other rules,"
        " each token of which must be possible",
        f"{sum(row['completed'] for row in rows)} texts are complete",
        f"{len({(row['choice']['grammar'], row['choice']['number']) for row in rows})} grammars",
        f"{len(deviations)} deviations, of which rounding explains"
        f" {sum(is_explained for *_, is_explained in deviations)}",
        f"{sum(row['problem'] is not None for row in rows)} texts with another problem",
        f"{len(_possible_pairs(impossible)) - len(missing)} of {len(_possible_pairs(impossible))}"
        f" pairs of settings occur; {len(impossible)} are refused by name",
    ]
    lines += [f"  missing: {pair}" for pair in missing[:5]]
    lines += [
        f"  {'rounding' if is_explained else 'deviation'}: {row['choice']} {it}"
        for row, it, is_explained in deviations
    ]
    lines += [f"  problem: {row['choice']} {row['problem']}" for row in rows if row["problem"]]
    lines += [f"  error: {result['error']}" for result in results if result.get("error")]
    if with_table:
        lines.append(table(FACTORS, counts, impossible))
    return "\n".join(lines)


@cache
def impossible_pairs() -> tuple[Pair, ...]:
    """Return the pairs that are refused, or that need another pair that is refused."""
    return tuple(covering_array(FACTORS, is_allowed)[1])


def _possible_pairs(impossible: Sequence[Pair]) -> list[Pair]:
    excluded = set(impossible)
    return [pair for pair in all_pairs(FACTORS) if pair not in excluded]


@cache
def plan() -> list[list[Choice]]:
    """Return the choices of the texts of every call."""
    done: Counter[Pair] = Counter()
    grammars: Counter[str] = Counter()
    return [planned(number, done, grammars) for number in range(len(calls()))]


def order(texts: int) -> list[int]:
    """Return the calls to make for this many texts, in an order in which settings are mixed."""
    numbers = list(range(len(calls())))
    random.Random(0).shuffle(numbers)
    chosen, count = [], 0
    for number in numbers:
        if count >= texts:
            break
        chosen.append(number)
        count += texts_of_call(calls()[number])
    return chosen


def main() -> int:
    """Run the calls that the file has not, print what was found, and return 1 if it is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.grammars.pairs", description=__doc__)
    parser.add_argument(
        "--texts", type=int, default=10**9, help="at least this many (default: all)"
    )
    parser.add_argument("--file", type=Path, default=Path("pairs.jsonl"), help="the results")
    parser.add_argument("--table", action="store_true", help="print how often each pair occurs")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no call after these")
    arguments = parser.parse_args()
    choices, start = plan(), time.perf_counter()
    results = []
    if arguments.file.exists():
        results = [json.loads(line) for line in arguments.file.read_text().splitlines()]
    finished = {result["number"] for result in results}
    todo = [it for it in order(arguments.texts) if it not in finished and not arguments.report]
    for index, number in enumerate(todo):
        if time.perf_counter() - start > arguments.seconds:
            break
        try:
            result = run_call(number, choices[number])
        except UnavailableError as error:
            print(f"NOT TESTED: {error}", flush=True)
            continue
        except Exception as error:
            result = {"number": number, "rows": [], "seconds": 0.0}
            result["error"] = f"{calls()[number]}: {type(error).__name__}: {error}"
        results.append(result)
        free_programs_if_there_are_many()
        with arguments.file.open("a") as file:
            file.write(json.dumps(result) + "\n")
        wrong = sum(bool(it["deviations"] or it["problem"]) for it in result["rows"])
        print(
            f"{index + 1}/{len(todo)} call {number}: {len(result['rows'])} texts,"
            f" {wrong} wrong, {result['seconds']} s {result.get('error', '')}",
            flush=True,
        )
    report = summary(results, arguments.table)
    print(report)
    return int("deviation:" in report or "problem:" in report or "error:" in report)


if __name__ == "__main__":
    sys.exit(main())
