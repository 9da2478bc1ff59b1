"""Check that the mutants fit the source, that a kill is recognised, and that all are killed."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants import cases
from tests.mutants.__main__ import TABLE
from tests.mutants.catalogue import CATALOGUE
from tests.mutants.mutant import Mutant
from tests.mutants.trial import NOT_IN_MAKE_TEST, ROOT, Copy, Outcome, table_of

# --- the list -------------------------------------------------------------------------------------

AREAS = {
    "verification": "specjax/decoding/verification.py",
    "sampling": "specjax/sampling.py",
    "trees": "specjax/drafts/tree.py",
    "caches": "specjax/models/cache.py",
    "rope": "specjax/models/rope.py",
    "experts": "specjax/models/moe.py",
    "delta rule": "specjax/models/delta_rule.py",
    "quantization": "specjax/models/quantization/weights.py",
    "pages": "specjax/serving/pages.py",
    "scheduler": "specjax/serving/scheduler.py",
    "losses": "specjax/training/losses.py",
}


def test_every_mutant_changes_one_line_of_the_source_as_it_is_today() -> None:
    problems = []
    for mutant in CATALOGUE:
        try:
            mutant.applied_to((ROOT / mutant.file).read_text())
        except (ValueError, OSError) as error:
            problems.append(str(error))
    assert problems == []


def functions_of(file: Path) -> dict[str, ast.FunctionDef]:
    return {
        node.name: node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }


def test_the_named_tests_are_there_and_run_every_time() -> None:
    """Check the tests by reading their source. Their cases are checked in each run (`cases`)."""
    files = {node.partition("::")[0] for mutant in CATALOGUE for node in mutant.tests}
    functions = {file: functions_of(ROOT / file) for file in files}
    for mutant in CATALOGUE:
        assert mutant.tests, mutant.name
        for node in mutant.tests:
            file, _, name = node.partition("::")
            test = functions[file].get(name.partition("[")[0])
            assert test is not None, f"{mutant.name}: there is no {node}"
            marks = [ast.unparse(decorator) for decorator in test.decorator_list]
            slower = [
                mark
                for mark in marks
                for slow in NOT_IN_MAKE_TEST
                if re.fullmatch(rf"pytest\.mark\.{slow}(\(.*\))?", mark)
            ]
            assert not slower, (
                f"{mutant.name}: {node} is not among the tests of make test: {slower}"
            )


def test_mutants_have_names_of_their_own_and_every_area_has_some() -> None:
    assert [
        name for name, count in Counter(mutant.name for mutant in CATALOGUE).items() if count > 1
    ] == []
    counts = Counter(mutant.file for mutant in CATALOGUE)
    assert len(CATALOGUE) >= 40 and [area for area, file in AREAS.items() if not counts[file]] == []


def test_the_table_is_of_these_mutants_and_has_no_survivor() -> None:
    lines = [line for line in TABLE.read_text().splitlines() if line.startswith("| ")]
    rows = [line.split(" | ") for line in lines[1:]]
    listed = {(row[0].removeprefix("| "), row[1]) for row in rows}
    assert listed == {(mutant.name, mutant.breaks) for mutant in CATALOGUE}, (
        "run python -m tests.mutants --write"
    )
    assert all(row[3].startswith("`tests/") for row in rows)


CASES = """
import pytest

@pytest.mark.parametrize("pair", ["early", pytest.param("late", marks=pytest.mark.full)])
def test_pairs(pair):
    pass
"""


def test_named_cases_must_exist_and_run_every_time(pytester) -> None:
    items = pytester.getitems(pytester.makepyfile(CASES).read_text())
    file = items[0].nodeid.partition("::")[0]
    names = ["early", "late", "other"]
    mutant = Mutant(
        name="pair",
        file="specjax/rule.py",
        old="a",
        new="b",
        tests=(*(f"{file}::test_pairs[{name}]" for name in names), "elsewhere.py::test[other]"),
        breaks="Pairs are wrong.",
    )
    assert cases.problems_of([mutant], items) == [
        f"mutant pair: {file}::test_pairs[late] is full",
        f"mutant pair: there is no case {file}::test_pairs[other]",
    ]


def test_a_run_is_refused_only_if_a_whole_file_lacks_a_case(pytester, monkeypatch) -> None:
    pytester.makeini("[pytest]\nmarkers = full")
    file = pytester.makepyfile(CASES).name
    mutant = replace(MUTANT, tests=(f"{file}::test_pairs[late]",))
    monkeypatch.setattr(cases, "CATALOGUE", [mutant])
    plugins = ("-p", "tests.tiers", "-p", "tests.mutants.cases", "-p", "no:xdist")
    refused = pytester.runpytest_inprocess(*plugins, "-k", "early")
    assert refused.ret == pytest.ExitCode.USAGE_ERROR
    assert f"mutant or-equal: {file}::test_pairs[late] is full" in refused.stderr.str()
    for options in (("--lf",), (f"{file}::test_pairs",)):
        pytester.runpytest_inprocess(*plugins, *options).assert_outcomes(passed=2)


# --- the runner -----------------------------------------------------------------------------------

RULE = "def smaller(a, b):\n    return a < b\n\n\ndef larger(a, b):\n    return a > b\n"
TESTS = """\
import pytest
from specjax.rule import larger, smaller


@pytest.fixture
def rule():
    assert smaller(1, 2)
    return smaller


@pytest.mark.parametrize("pair", [(3, 3)], ids=["no - pair"])
def test_equals_are_not_smaller(pair):
    assert not smaller(*pair)


def test_through_a_fixture(rule):
    assert rule
"""
SETTINGS = """\
[tool.pytest.ini_options]
markers = ["thorough: slow"]
# Without plugins that take most of the time to start.
addopts = [
    "--strict-markers", "-pno:jaxtyping", "-pno:anyio", "-pno:typeguard", "-pno:platformdirs",
    "-pno:xdist", "-pno:xdist.looponfail",
]
"""
MUTANT = Mutant(
    name="or-equal",
    file="specjax/rule.py",
    old="return a < b",
    new="return a <= b",
    tests=("tests/test_rule.py::test_equals_are_not_smaller",),
    breaks="Equals count as smaller.",
)


@pytest.fixture
def project(tmp_path) -> Iterator[Copy]:
    """Yield a copy of a library that consists of one file, with its tests."""
    source, path = tmp_path / "source", tmp_path / "copy"
    for folder in (source / "specjax", source / "tests", path):
        folder.mkdir(parents=True)
    (source / "pyproject.toml").write_text(SETTINGS)
    (source / "specjax" / "__init__.py").touch()
    (source / "specjax" / "rule.py").write_text(RULE)
    (source / "tests" / "test_rule.py").write_text(TESTS)
    yield Copy(path, source)
    assert (path / "specjax" / "rule.py").read_text() == RULE  # each trial restores the file


def test_a_mutant_is_killed_by_a_test_that_fails_and_survives_where_none_does(project) -> None:
    killed = project.try_mutant(MUTANT)
    assert killed.problem is None and killed.outcome.failed is not None
    assert killed.outcome.failed.startswith("tests/test_rule.py::test_equals_are_not_smaller[no")
    survivor = project.try_mutant(replace(MUTANT, new="return b > a"))
    assert survivor.problem == "survives" and "NOT KILLED" in str(survivor)
    table = table_of([killed, survivor], project.source)
    assert (
        "| or-equal | Equals count as smaller. | `specjax/rule.py:2` | `tests/test_rule.py::"
        in table
    )
    assert "| survives |" in table
    assert len(project.unchanged) == 1


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"tests": ("tests/test_rule.py::test_through_a_fixture",), "new": "return a > b"},
            "exit code 1, or with an error",
        ),
        (
            {"tests": ("tests/test_rule.py::test_of_another_name",)},
            "do not pass without it (exit code 4)",
        ),
        # The test module cannot be imported.
        ({"old": "def larger(a, b):", "new": "def other(a, b):"}, "no test fails"),
    ],
)
def test_an_error_is_no_kill(project, change, problem) -> None:
    trial = project.try_mutant(replace(MUTANT, **change))
    assert trial.problem is not None and problem in trial.problem


@pytest.mark.parametrize(
    ("code", "text", "failed"),
    [
        (1, "FAILED tests/a.py::test_b - assert 1 == 2\n1 failed", "tests/a.py::test_b"),
        (
            1,
            "FAILED tests/a.py::test_b[two words] - AssertionError: x - y\n",
            "tests/a.py::test_b[two words]",
        ),
        (1, "FAILED tests/a.py::test_b\n", "tests/a.py::test_b"),
        (1, "ERROR tests/a.py::test_b - AssertionError\n", None),  # in a fixture
        (1, "FAILED tests/a.py::test_b - x\nERROR tests/a.py::test_b - x\n", None),
        (2, "ERROR tests/a.py - ImportError\n", None),  # while collecting
        (0, "1 passed\n", None),
        (5, "no tests ran\n", None),
        (None, "FAILED tests/a.py::test_b - x\n", None),  # the time limit
        (1, "E   FAILED tests/a.py::test_b - x\n", None),
    ],
)
def test_a_kill_is_a_failed_test_and_no_error(code, text, failed) -> None:
    assert Outcome(code, text).failed == failed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"old": "return a == b"}, "no line of specjax/rule.py read 'return a == b'"),
        ({"old": "", "new": "pass"}, r"lines \[3, 4\]"),
        ({"new": "return a < b"}, "give lines that differ"),
        ({"new": " "}, "give lines that differ"),
        ({"new": "return a <=\nb"}, "is not valid Python with it"),
        ({"new": "return a <"}, "is not valid Python with it"),
    ],
)
def test_a_line_that_cannot_be_changed_is_refused(change, message) -> None:
    with pytest.raises(ValueError, match=message):
        replace(MUTANT, **change).applied_to(RULE)


# --- all of it ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Copy:
    return Copy(tmp_path_factory.mktemp("mutants"))


@pytest.mark.thorough
@pytest.mark.parametrize("mutant", CATALOGUE, ids=lambda mutant: mutant.name)
def test_the_mutant_is_killed(copy, mutant) -> None:
    trial = copy.try_mutant(mutant)
    assert trial.problem is None, f"{trial}\n{trial.outcome.text}"
