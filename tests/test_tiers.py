"""Check the tools of the tests themselves: tiers, costs, and the end of tests that never end."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from tests import costs
from tests.conftest import own_programs

ROOT = Path(__file__).parents[1]
CASES = """
import pytest

@pytest.mark.full_except({names})
@pytest.mark.parametrize("shape", ["chain", "static", "dynamic"])
def test_of_shapes(shape):
    pass

def test_plain():
    pass

@pytest.mark.full
def test_slow():
    pass
"""


@pytest.fixture
def run(pytester: pytest.Pytester):
    """Run a file of tests, with options, in this process and with the plugins of this folder."""
    pytester.makeini(
        "[pytest]\nmarkers =\n  full\n  full_except\n  thorough_except\n  thorough\n  browser\n"
        "  kills_alone\n  represents\n"
    )

    def run(source: str, *options: str) -> pytest.RunResult:
        pytester.makepyfile(source)
        return pytester.runpytest_inprocess(
            *("-p", "tests.tiers", "-p", "tests.costs", "-p", "tests.time_limit"),
            *("-p", "no:xdist", *options),
        )

    return run


def test_cases_that_are_not_named_belong_to_the_full_tier(run) -> None:
    source = CASES.format(names="'chain', 'dynamic'")
    run(source, "-m", "not full").assert_outcomes(passed=3, deselected=2)
    run(source, "-m", "full").assert_outcomes(passed=2, deselected=3)


def slow_cases(names: str) -> str:
    return CASES.format(names=names).replace(
        "@pytest.mark.full_except", "@pytest.mark.full\n@pytest.mark.thorough_except"
    )


def test_cases_of_a_slow_test_that_are_not_named_are_thorough(run) -> None:
    source = slow_cases("'chain'")
    run(source, "-m", "thorough").assert_outcomes(passed=2, deselected=3)
    run(source, "-m", "not thorough").assert_outcomes(passed=3, deselected=2)


def test_the_cases_of_a_test_may_belong_to_three_tiers(run) -> None:
    source = CASES.format(names="'chain'").replace(
        "@pytest.mark.full_except",
        "@pytest.mark.thorough_except('static')\n@pytest.mark.full_except",
    )
    run(source, "-m", "not full").assert_outcomes(passed=2, deselected=3)
    run(source, "-m", "full and not thorough").assert_outcomes(passed=2, deselected=3)
    run(source, "-m", "thorough").assert_outcomes(passed=1, deselected=4)


def test_a_test_with_thorough_cases_must_be_slow(run) -> None:
    source = CASES.format(names="'chain'").replace("full_except", "thorough_except")
    result = run(source)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert "thorough_except is for tests that are marked full" in result.stderr.str()


@pytest.mark.parametrize("marker", ["full_except", "thorough_except"])
def test_a_named_case_must_exist(run, marker) -> None:
    names = "'chain', 'tree'"
    result = run(CASES.format(names=names) if marker == "full_except" else slow_cases(names))
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert (
        f"test_of_shapes: {marker} names ['tree']; the cases are ['chain', 'dynamic', 'static']"
        in result.stderr.str()
    )


@pytest.mark.parametrize(
    ("limit", "tests"),
    [
        ("MOST_CPU_SECONDS", ["test_of_shapes[chain]", "test_plain"]),
        (
            "MOST_OF_FULL_TIER",
            ["test_of_shapes[dynamic]", "test_of_shapes[static]", "test_slow"],
        ),
    ],
)
def test_tests_that_are_too_slow_for_their_tier_are_named_at_the_end(
    run, monkeypatch, limit, tests
) -> None:
    monkeypatch.setattr(costs, limit, -1)
    output = run(CASES.format(names="'chain'")).stdout.str()
    named = [
        line.split()[-1].partition("::")[2]
        for line in output.splitlines()
        if " test_" in line and ".py::" in line
    ]
    assert sorted(named) == tests


def test_no_test_is_too_slow_for_what_it_shares(run, monkeypatch) -> None:
    monkeypatch.setattr(costs, "MOST_CPU_SECONDS", 0.05)
    source = """
import time, pytest

def work():
    until = time.process_time() + 0.1
    while time.process_time() < until: pass

@pytest.fixture(scope="module")
def shared(): work()

@pytest.fixture
def own(): work()

def test_shares(shared): pass
def test_has_its_own(own): pass
"""
    output = run(source).stdout.str()
    assert "test_has_its_own" in output
    assert "test_shares" not in output


def test_a_run_ends_in_time_and_says_what_it_left_out(run) -> None:
    source = CASES.format(names="'chain'")
    run(source, "--most-seconds", "1e6").assert_outcomes(passed=5)
    result = run(source, "--most-seconds", "0")
    result.assert_outcomes(skipped=5)
    assert "5 TESTS WERE NOT RUN" in result.stdout.str()


def test_files_are_run_in_turns_from_another_first_one(run, pytester) -> None:
    for number in range(3):
        pytester.makepyfile(**{f"test_{number}": "def test_a(): pass\ndef test_b(): pass"})

    def order(text: str) -> list[str]:
        output = run("", "--collect-only", "-q", "--begin-at", text).stdout.str()
        return re.findall(r"test_(\d)\.py::test_([ab])", output)

    orders = {"".join(map("".join, order(text))) for text in map(str, range(8))}
    assert orders == {"0a0b1a1b2a2b", "1a1b2a2b0a0b", "2a2b0a0b1a1b"}


def test_costs_are_written_and_summed_by_folder(run, pytester) -> None:
    output = run(CASES.format(names="'chain'"), "--costs", "costs.json").stdout.str()
    assert "test_plain" in (pytester.path / "costs.json").read_text()
    assert [line.split()[:2] for line in output.splitlines() if line.startswith("all ")] == [
        ["all", "5"]
    ]


def test_the_promise_in_readme_is_found() -> None:
    """Check that a README without the number of minutes is an error.

    A run of `make test` prints both times.
    """
    line = costs.beside_readme(90.0, (ROOT / "README.md").read_text())
    assert re.fullmatch(r"make test took 1\.5 minutes; README says \d+ on two idle cores", line)
    with pytest.raises(ValueError, match="README"):
        costs.beside_readme(90.0, "make test: some minutes")


def test_every_test_has_a_time_out() -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert options["timeout"] > 0
    assert options["timeout_method"] == "thread"


def test_a_loop_that_never_ends_fails_and_the_others_go_on(tmp_path) -> None:
    (tmp_path / "test_loops.py").write_text(
        "def test_endless():\n    while True: pass\n\ndef test_short(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "pytest_timeout"]
    command += ["-n", "1", "test_loops.py", "--timeout", "0.3", "--timeout-method", "thread"]
    # Other plugins take seconds to import.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    result = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 1
    assert "1 failed, 1 passed" in result.stdout


def test_patched_programs_are_used_by_no_other_test() -> None:
    @jax.jit
    def doubled(x: jax.Array) -> jax.Array:
        return jnp.add(x, x)

    with pytest.MonkeyPatch.context() as patch:
        assert doubled(jnp.int32(3)) == 6
        with own_programs():
            patch.setattr(jnp, "add", jnp.multiply)
            assert doubled(jnp.int32(3)) == 9
            assert doubled(jnp.int32(5)) == 25
    with own_programs():
        assert doubled(jnp.int32(3)) == 6
    assert doubled(jnp.int32(5)) == 10


@pytest.mark.full
@pytest.mark.thorough
def test_the_order_of_tests_does_not_depend_on_the_process() -> None:
    """Compare two processes: pytest's workers refuse to run tests that they list otherwise."""
    command = [sys.executable, "-m", "pytest", "-vv", "--collect-only", "-n", "0", "-o", "addopts="]
    command += ["-p", "no:cacheprovider", "tests"]
    listed = []
    for seed in ("1", "2"):  # of the order of sets
        environment = os.environ | {"PYTHONHASHSEED": seed}
        result = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        listed.append([line for line in result.stdout.splitlines() if "<Function" in line])
    assert len(listed[0]) > 10_000
    assert listed[0] == listed[1]
