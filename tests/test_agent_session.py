"""Check the benchmark of an agent's session: its texts, and decoding that is forced to them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.agent_session.answers import Answer, answers_of, earlier_texts, repeated
from benchmarks.agent_session.forced import RecordedTarget, accepted_of, run_answers
from benchmarks.agent_session.live import Session, Written, facts_of, hold, rows_of, table_of
from benchmarks.agent_session.recorded import (
    RecordedConfig,
    choose_commits,
    load_turns,
    main,
    read_turn,
    run_test,
)
from benchmarks.agent_session.script import FILES, TURNS, VISITS, ScriptTurn, make_script
from benchmarks.agent_session.tables import rows_of as forced_rows
from benchmarks.agent_session.tables import table_by_category
from benchmarks.tools_model.encoding import make_tokenizer
from specjax import Chain, DynamicTree, PromptLookup, Suffix, Together
from specjax.drafters.suffix_index import SuffixIndex
from specjax.drafts.draft import Draft
from specjax.errors import InputError
from specjax.models.config import ModelConfig
from specjax.models.transformer import Target

VOCAB = 12
TOKENIZER = make_tokenizer()


def git(directory: Path, *arguments: str) -> str:
    names = "-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"
    command = ["git", "-C", str(directory), *names, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a repository: an added file, an edit, a text file, a merge, and an edit with a test."""
    path = tmp_path_factory.mktemp("repository")
    git(path, "init", "-q", "-b", "main")
    lines = [f"x{line} = {line}" for line in range(300)]

    def commit(subject: str, files: dict[str, str]) -> None:
        for name, text in files.items():
            (path / name).write_text(text)
        git(path, "add", ".")
        git(path, "commit", "-q", "-m", subject)

    commit("Add", {"code.py": "\n".join(lines) + "\n"})
    for place in (10, 100, 200, 290):
        lines[place] = f"x{place} = 'new'"
    commit("Edit four places", {"code.py": "\n".join(lines) + "\n"})
    git(path, "checkout", "-q", "-b", "other")
    commit("Note", {"notes.txt": "a\n"})
    git(path, "checkout", "-q", "main")
    test = "import code as _\n\ndef test_it():\n    assert 1 + 1 == {}\n"
    commit("Add a test", {"test_code.py": test.format(2)})
    git(path, "merge", "-q", "--no-ff", "-m", "Merge", "other")
    lines[5] = "x5 = 'newest'"
    commit("Edit again", {"code.py": "\n".join(lines) + "\n", "test_code.py": test.format(3)})
    return path


def test_commits_are_the_newest_that_edit_python(repository: Path) -> None:
    chosen = choose_commits(repository, "main", 2)
    subjects = [git(repository, "show", "-s", "--format=%s", commit) for commit, _ in chosen]
    assert subjects == ["Edit four places", "Edit again"]
    assert [path for _, path in chosen] == ["code.py", "code.py"]
    with pytest.raises(InputError, match="turns=2"):
        choose_commits(repository, "main", 3)
    with pytest.raises(InputError, match="nothing"):
        choose_commits(repository, "nothing", 1)


def test_a_turn_has_the_texts_before_and_after_the_first_three_edits(repository: Path) -> None:
    (commit, path), _ = choose_commits(repository, "main", 2)
    turn = read_turn(repository, commit, path)
    assert "x10 = 10\n" in turn.read and "x200 = 200\n" in turn.read and "'new'" not in turn.read
    assert turn.edits.count("@@\n") == 3 and "-x10 = 10\n+x10 = 'new'\n" in turn.edits
    assert "x290" not in turn.edits  # the fourth place
    parts = turn.shown.split("...\n")
    whole = git(repository, "show", f"{commit}:{path}") + "\n"
    assert len(parts) == 3 and all(part in whole for part in parts)
    assert parts[1].splitlines() == whole.splitlines()[88:113]  # 12 lines on each side


@pytest.mark.full
def test_logs_are_those_of_the_commit(repository: Path, tmp_path: Path) -> None:
    output = tmp_path / "turns.json"
    config = RecordedConfig(str(repository), "main", str(output), 2, sys.executable)
    main(config)
    first, last = load_turns(output)
    assert (first.log_kind, first.log) == ("none", "")  # the commit has no test
    assert last.log_kind == "whole" and "1 failed" in last.log and "assert (1 + 1) == 3" in last.log
    assert str(tmp_path) not in last.log and "/tmp" not in last.log


def test_a_slow_test_is_stopped(repository: Path) -> None:
    log, kind = run_test(repository, "main", "test_code.py", sys.executable, ".", 0.001)
    assert kind in ("none", "stopped") and "failed" not in log


def test_repeated_ngrams_equal_a_search() -> None:
    tokens = np.random.default_rng(0).integers(0, 3, 200).tolist()
    expected = [
        end >= 4 and any(tokens[at - 4 : at] == tokens[end - 4 : end] for at in range(4, end))
        for end in range(1, 201)
    ]
    assert repeated(tokens, 4).tolist() == expected and 0 < sum(expected) < 200


def test_answers_hold_all_texts_before_them(repository: Path) -> None:
    turns = [read_turn(repository, *it) for it in choose_commits(repository, "main", 2)]
    answers = answers_of(turns, lambda text: [ord(character) for character in text])
    assert [(answer.turn, answer.kind) for answer in answers] == [
        (0, "edits"),
        (0, "shown"),
        (1, "edits"),
        (1, "shown"),
    ]
    edits, shown = answers[:2]
    assert shown.prompt[: len(edits.prompt)] == edits.prompt
    assert shown.prompt[len(edits.prompt) :][: len(edits.output)] == edits.output
    assert earlier_texts(answers, 0) == []
    assert earlier_texts(answers, 1) == [shown.prompt + shown.output]


# --- forced decoding ---


def slow_accepted(draft: Draft, row: int, slots: int, text: np.ndarray, position: int) -> int:
    """Follow the recorded text down a draft, node by node."""
    parents = np.broadcast_to(draft.parents, draft.tokens.shape)[row]
    tokens, drafted = np.asarray(draft.tokens)[row], np.asarray(draft.drafted)[row]
    usable = [node for node in range(1, len(tokens)) if drafted[node - 1]][:slots]
    node, depth = 0, 0
    while True:
        below = [
            child
            for child in usable
            if parents[child] == node and tokens[child] == text[position + depth + 1]
        ]
        if not below:
            return depth
        node, depth = below[0], depth + 1


@pytest.mark.full
@pytest.mark.thorough_except("0", "1")
@pytest.mark.parametrize("seed", range(5))
def test_accepted_tokens_equal_a_walk(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, nodes, length = 6, 12, 40
    texts = rng.integers(0, 2, (batch, length))
    positions = rng.integers(0, 10, batch)
    tokens = rng.integers(0, 2, (batch, nodes))
    tokens[:, 0] = texts[np.arange(batch), positions]
    parents = np.array([[-1, *(rng.integers(0, node) for node in range(1, nodes))]] * batch)
    # Siblings differ, as in a drafter's tree.
    for row in range(batch):
        used: set[tuple[int, int]] = set()
        for node in range(1, nodes):
            while (parents[row, node], tokens[row, node]) in used:
                parents[row, node] = rng.integers(0, node)
                tokens[row, node] = rng.integers(0, 2)
            used.add((parents[row, node], tokens[row, node]))
    valid = rng.random((batch, nodes)) < 0.8
    valid[:, 0] = True
    draft = Draft.of_tree(
        jnp.asarray(tokens), jnp.asarray(parents), valid=jnp.asarray(valid), levels=nodes - 1
    )
    for slots in (2, 6, nodes):
        counts = accepted_of(
            draft, slots, jnp.asarray(texts), jnp.asarray(positions), jnp.full(batch, length)
        )
        expected = [
            slow_accepted(draft, row, slots, texts[row], positions[row]) for row in range(batch)
        ]
        assert counts.tolist() == expected
    assert max(expected) > 1


def recorded_target() -> RecordedTarget:
    config = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
    )
    return RecordedTarget(Target.init(config, jax.random.key(0)).params, config)


def random_answers() -> list[Answer]:
    rng = np.random.default_rng(1)
    answers = []
    for turn in range(3):
        words = [rng.integers(0, VOCAB, 5).tolist() for _ in range(3)]
        text = [token for word in rng.integers(0, 3, 12) for token in words[word]]
        answers.append(Answer(turn, "edits", tuple(text[:25]), tuple(text[25 : 50 + turn])))
    return answers


def lookup_steps(answer: Answer, depth: int) -> int:
    """Count the steps of prompt lookup with bigrams, in a loop over tokens."""
    text, end, steps = list(answer.prompt + answer.output), len(answer.prompt), 0
    while end < len(text):
        copied: list[int] = []
        for size in (2, 1):
            starts = [
                at for at in range(size, end) if text[at - size : at] == text[end - size : end]
            ]
            if starts:
                copied = [text[starts[-1] + place % (end - starts[-1])] for place in range(depth)]
                break
        count = 0
        while (
            count < len(copied) and end + count < len(text) and copied[count] == text[end + count]
        ):
            count += 1
        end, steps = end + count + 1, steps + 1
    return steps


@pytest.mark.full
def test_forced_decoding_has_the_steps_of_a_loop() -> None:
    answers = random_answers()
    indices = {answer.turn: SuffixIndex.on_host([], 8) for answer in answers}
    drafter = PromptLookup(max_ngram=2, draft=Chain(4))
    results = run_answers(recorded_target(), drafter, answers, indices, capacity=64)
    assert [result.tokens for result in results] == [len(answer.output) for answer in answers]
    steps = [result.steps for result in results]
    assert steps == [lookup_steps(answer, 4) for answer in answers]
    assert steps != [result.tokens for result in results]  # something is accepted


@pytest.mark.full
def test_a_union_accepts_what_its_parts_accept_alone() -> None:
    answers = random_answers()
    texts = {answer.turn: earlier_texts(answers, answer.turn) for answer in answers}
    indices = {turn: SuffixIndex.on_host(texts[turn], 256) for turn in texts}
    suffix = Suffix(answers=SuffixIndex.empty(1, 8), draft=DynamicTree(2, 3, 5))
    drafter = Together((PromptLookup(max_ngram=1, draft=Chain(3)), suffix))
    results = run_answers(recorded_target(), drafter, answers, indices, capacity=64)
    for result in results:
        assert result.worse_steps == 0
        assert result.by_part == result.alone
    assert sum(sum(result.only_by_part) for result in results) > 0


def test_tables_compare_with_the_best_single_drafter() -> None:
    def drafter(steps: int, parts: list[str]) -> dict:
        answer = {"turn": 0, "kind": "edits", "tokens": 12, "steps": steps, "worse_steps": 0}
        counts = {"by_part": [3] * len(parts), "only_by_part": [2] * len(parts)}
        return {"parts": parts, "answers": [answer | counts | {"alone": [3] * len(parts)}]}

    drafters = {"a": drafter(6, []), "b": drafter(4, []), "a + b": drafter(3, ["A", "B"])}
    rows = forced_rows({"facts": {}, "drafters": drafters})
    assert [row["per_step"] for row in rows] == [2, 3, 4]
    assert rows[-1]["against_best"] == pytest.approx(4 / 3)
    assert (rows[-1]["better"], rows[-1]["worse"], rows[-1]["best"]) == (1, 0, "b")


def test_the_parts_of_a_union_have_shares_by_category() -> None:
    def answer(kind: str, steps: int, by_part: list[int], only_by_part: list[int]) -> dict:
        return {
            **{"kind": kind, "tokens": 10, "steps": steps, "worse_steps": 0},
            **{"by_part": by_part, "only_by_part": only_by_part},
        }

    answers = [
        answer("edits", 6, [3, 2], [2, 1]),
        answer("shown", 2, [8, 0], [8, 0]),
        answer("edits", 6, [4, 1], [3, 0]),
    ]
    union = {"parts": ["A", "B"], "answers": answers}
    single = {"parts": [], "answers": [answer("edits", 6, [], [])] * 3}
    session = {"facts": {}, "drafters": {"a": single, "a + b": union}}
    assert table_by_category({"first": session, "second": {"drafters": {"a": single}}}) == (
        "| session | union | part | edits: offered by, only by | shown: offered by, only by |\n"
        "|---|---|---|---:|---:|\n"
        "| first | a + b | A | 87.5%, 62.5% | 100.0%, 100.0% |\n"
        "| first | a + b | B | 37.5%, 12.5% | 0.0%, 0.0% |"
    )
    (row,) = (row for row in forced_rows(session) if row["parts"])
    assert row["parts"]["A"] == {"offered": 15 / 16, "only": 13 / 16}  # of all answers


def test_the_script_has_40_turns_whose_requests_have_their_calls() -> None:
    turns = make_script()
    assert len(turns) == TURNS == 40
    assert [turn.kind for turn in turns[:7]] == ["read", *["edit"] * 3, "show", "test", "log"]
    assert turns == make_script()
    for turn in turns:
        assert f"`{turn.tool}`" in turn.request
        assert json.loads(turn.request.partition(" with ")[2]) == turn.arguments


def test_the_script_shows_the_files_with_their_edits() -> None:
    for path in {visit.path for visit in VISITS}:
        text = (FILES / f"{Path(path).stem}.txt").read_text().rstrip("\n")
        of_file = [turn for turn in make_script() if turn.arguments.get("path") == path]
        assert [turn.kind for turn in of_file] == ["read", "edit", "edit", "edit", "show"] * 2
        for turn in of_file:
            if turn.kind == "edit":
                before, after, rest = *text.partition(turn.arguments["old"])[::2], turn.arguments
                assert rest["old"] in text
                assert rest["old"] not in after
                text = before + rest["new"] + after
                assert rest["new"] in turn.result
                assert turn.result in text
            else:
                assert turn.result == text


def test_results_are_short_enough_to_be_copied() -> None:
    assert all(len(TOKENIZER(turn.result)["input_ids"]) < 480 for turn in make_script())


def live_writers(texts: list[str], end: str = "<|im_end|>") -> Any:
    """Return two writers of fixed texts. One takes a step for each token, and one half as many."""

    def writer(per_step: int, seconds: float) -> Any:
        remaining = iter(texts)

        def write(prompt: list[int]) -> Written:
            tokens = tuple(TOKENIZER(next(remaining) + end, add_special_tokens=False)["input_ids"])
            return Written(
                tokens=tokens,
                steps=-(-len(tokens) // per_step),
                offered=(),
                only=(),
                timed_tokens=len(tokens) - per_step,
                seconds=seconds * (len(tokens) - per_step),
            )

        return write

    return {"plain": writer(1, 0.5), "fast": writer(2, 0.1)}


def test_a_live_session_compares_drafters_and_leaves_out_what_loops() -> None:
    turns = [
        ScriptTurn(
            "log", 'Call `read_log` with {"log": "a"}', "read_log", {"log": name}, "All good"
        )
        for name in ("a", "b")
    ]
    call = '<tool_call>\n{"name": "read_log", "arguments": {"log": "a"}}\n</tool_call>'
    session = Session(TOKENIZER)
    writers = live_writers([call, "All good", call, "again " * 60])
    records = [*hold(writers, session, turns)]
    assert [message["role"] for message in session.messages] == [
        *("user", "assistant", "tool", "assistant") * 2
    ]
    assert [record["is_right"] for record in records] == [True, True, False, False]
    assert [record["prompt"] for record in records] == sorted(
        record["prompt"] for record in records
    )
    facts = facts_of(records)
    assert (facts["answers"], facts["looping"], facts["texts_that_differ"]) == (4, 1, 0)
    assert (facts["right_calls"], facts["right_answers"]) == (1, 1)
    assert 0.3 < facts["repeated_16_grams"] < 1
    plain, fast = rows_of([records, records])
    assert plain["per_step"] == 1
    assert 1.8 < fast["per_step"] <= 2
    assert plain["speed"] == pytest.approx(2)
    assert fast["against_plain"] == fast["least"] == fast["most"] == pytest.approx(5)
    assert "| fast | 1.9" in table_of([plain, fast]) or "| fast | 2.0" in table_of([plain, fast])


def test_a_text_that_differs_from_plain_decoding_is_counted() -> None:
    turns = [ScriptTurn("log", "Call `read_log`", "read_log", {}, "All good")]
    writers = live_writers(["A call", "All good"])
    writers["fast"] = live_writers(["A call", "All bad"])["fast"]
    records = [*hold(writers, Session(TOKENIZER), turns)]
    assert facts_of(records)["texts_that_differ"] == 1
