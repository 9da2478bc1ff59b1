"""The script of a live session: 40 requests of a user, the right calls, and fixed results.

The agent works on three files, twice on each. It reads the file, edits three places, shows the new
text, runs the tests and reads their log. The files are this library's own at commit 9fcb8953, and
stand beside this module. They are short, because the model copies at most some 480 tokens of a
result. The edits are applied to them. The logs are invented.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TURNS = 40
FILES = Path(__file__).parent / "files"
_LEADS = ("Call `{}`", "Please use `{}`", "Run `{}`", "Please call `{}`", "Use the tool `{}`")


@dataclass(frozen=True)
class ScriptTurn:
    """A request, and what belongs to it.

    Attributes:
        kind: the kind of turn: "read", "edit", "show", "test" or "log".
        request: the user's text. It names the tool, and has the arguments as JSON.
        tool: the name of the right tool.
        arguments: the right arguments.
        result: the tool's result, whatever the model has called.
    """

    kind: str
    request: str
    tool: str
    arguments: dict[str, str]
    result: str


@dataclass(frozen=True)
class Visit:
    """The work on a file.

    Attributes:
        path: the path of the file.
        edits: three pairs of old and new text.
        test: the path of its tests.
        summary: what running the tests prints.
        log: the log of the tests.
    """

    path: str
    edits: tuple[tuple[str, str], tuple[str, str], tuple[str, str]]
    test: str
    summary: str
    log: str


def _tool(name: str, description: str, **parameters: str) -> dict[str, Any]:
    properties = {
        parameter: {"type": "string", "description": meaning}
        for parameter, meaning in parameters.items()
    }
    schema = {"type": "object", "properties": properties, "required": [*properties]}
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


TOOLS = (
    _tool("read_file", "Read the whole text of a source file.", path="The path"),
    _tool(
        "edit_file",
        "Replace one passage by another and report its surroundings.",
        path="The path",
        old="The passage",
        new="The replacement",
    ),
    _tool("show_file", "Display how a module looks after all changes.", path="The path"),
    _tool("run_tests", "Execute every check of a suite with pytest.", path="The path"),
    _tool("read_log", "Fetch what the latest execution has printed.", log="The name"),
)

VISITS = (
    Visit(
        "specjax/shape_checks.py",
        (
            (
                '_Function = TypeVar("_Function", bound=Callable)',
                '_Checked = TypeVar("_Checked", bound=Callable)',
            ),
            (
                "def shape_checked(function: _Function) -> _Function:",
                "def shape_checked(function: _Checked) -> _Checked:",
            ),
            ("    return cast(_Function, jaxtyped(", "    return cast(_Checked, jaxtyped("),
        ),
        "tests/test_shape_checks.py",
        "1 failed, 2 passed in 3.41s; see shapes.log",
        """\
tests/test_shape_checks.py::test_equal_sizes_pass PASSED
tests/test_shape_checks.py::test_another_size_is_refused FAILED
    def test_another_size_is_refused():
        with pytest.raises(TypeError, match="parameter"):
>           product(jnp.ones((2, 3)), jnp.ones(4))
E           Failed: DID NOT RAISE
1 failed, 2 passed in 3.41s
""",
    ),
    Visit(
        "specjax/cli/option_files.py",
        (
            (
                '        lines = Path(path).read_text(encoding="utf-8").splitlines()',
                '        text = Path(path).read_text(encoding="utf-8")',
            ),
            (
                "    if not (texts := tuple(line for line in lines if line.strip())):",
                "    if not (lines := tuple(filter(str.strip, text.splitlines()))):",
            ),
            ("    return texts", "    return lines"),
        ),
        "tests/cli/test_option_files.py",
        "1 failed, 4 passed in 0.87s; see options.log",
        """\
tests/cli/test_option_files.py::test_blank_lines_are_dropped PASSED
tests/cli/test_option_files.py::test_an_empty_file_is_refused FAILED
    path.write_text("")
    with pytest.raises(InputError, match="write a line"):
>       read_lines("--texts", "")
E       Failed: DID NOT RAISE <class 'specjax.errors.InputError'>
1 failed, 4 passed in 0.87s
""",
    ),
    Visit(
        "specjax/__main__.py",
        (
            (
                "from specjax.cli.interrupts import end_at_signals",
                "from specjax.cli import interrupts",
            ),
            ("    end_at_signals()", "    interrupts.end_at_signals()"),
            (
                '    if sys.argv[1:2] == ["env"]:',
                '    command = sys.argv[1:2]\n    if command == ["env"]:',
            ),
        ),
        "tests/cli/test_main.py",
        "1 failed, 11 passed in 9.06s; see main.log",
        """\
tests/cli/test_main.py::test_signals_end_the_program FAILED
    monkeypatch.setattr("specjax.__main__.end_at_signals", calls.append)
E   AttributeError: <module 'specjax.__main__'> has no attribute 'end_at_signals'
1 failed, 11 passed in 9.06s
""",
    ),
    Visit(
        "specjax/shape_checks.py",
        (
            (
                '_Checked = TypeVar("_Checked", bound=Callable)',
                'VARIABLE = "SPECJAX_TYPECHECK"\n_Checked = TypeVar("_Checked", bound=Callable)',
            ),
            (
                '    if os.environ.get("SPECJAX_TYPECHECK") != "1":',
                '    if os.environ.get(VARIABLE) != "1":',
            ),
            ("against its annotations in tests.", "against its annotations if VARIABLE is 1."),
        ),
        "tests/test_shape_checks.py",
        "3 passed in 3.38s; see shapes.log",
        """\
tests/test_shape_checks.py::test_equal_sizes_pass PASSED
tests/test_shape_checks.py::test_another_size_is_refused PASSED
tests/test_shape_checks.py::test_production_checks_nothing PASSED
3 passed in 3.38s
""",
    ),
    Visit(
        "specjax/cli/option_files.py",
        (
            (
                "def read_lines(name: str, path: str) -> tuple[str, ...]:",
                'def read_lines(name: str, path: str, encoding: str = "utf-8") -> tuple[str, ...]:',
            ),
            (
                '        text = Path(path).read_text(encoding="utf-8")',
                "        text = Path(path).read_text(encoding=encoding)",
            ),
            ("cannot be read ({error})", "cannot be read as {encoding} ({error})"),
        ),
        "tests/cli/test_option_files.py",
        "5 passed in 0.85s; see options.log",
        """\
tests/cli/test_option_files.py::test_blank_lines_are_dropped PASSED
tests/cli/test_option_files.py::test_an_empty_file_is_refused PASSED
tests/cli/test_option_files.py::test_latin_letters_are_read PASSED
5 passed in 0.85s
""",
    ),
    Visit(
        "specjax/__main__.py",
        (
            ("def main() -> int:", "def main(arguments: list[str]) -> int:"),
            ("    command = sys.argv[1:2]", "    command = arguments[:1]"),
            ("    sys.exit(main())", "    sys.exit(main(sys.argv[1:]))"),
        ),
        "tests/cli/test_main.py",
        "12 passed in 8.97s; see main.log",
        """\
tests/cli/test_main.py::test_signals_end_the_program PASSED
tests/cli/test_main.py::test_env_works_without_jax PASSED
12 passed in 8.97s
""",
    ),
)


def first_texts() -> dict[str, str]:
    """Return the texts of all files before the session, by path."""
    paths = {visit.path for visit in VISITS}
    return {path: (FILES / f"{Path(path).stem}.txt").read_text(encoding="utf-8") for path in paths}


def surroundings(text: str, passage: str) -> str:
    """Return the lines of a passage, with a line before and after them.

    Examples:
        >>> from benchmarks.agent_session.script import surroundings
        >>> surroundings("a\\nb = 1\\nc\\nd\\n", "= 1")
        'a\\nb = 1\\nc\\n'
    """
    lines = text.splitlines(keepends=True)
    begin = text.count("\n", 0, text.index(passage))
    end = begin + passage.count("\n") + 1
    return "".join(lines[max(begin - 1, 0) : end + 1])


def _steps() -> Iterator[tuple[str, str, dict[str, str], str]]:
    texts = first_texts()
    for visit in VISITS:
        path = {"path": visit.path}
        yield "read", "read_file", path, texts[visit.path]
        for old, new in visit.edits:
            changed = texts[visit.path].replace(old, new, 1)
            texts[visit.path] = changed
            yield "edit", "edit_file", path | {"old": old, "new": new}, surroundings(changed, new)
        yield "show", "show_file", path, texts[visit.path]
        yield "test", "run_tests", {"path": visit.test}, visit.summary
        name = visit.summary.split()[-1]
        yield "log", "read_log", {"log": name}, visit.log


def make_script() -> list[ScriptTurn]:
    """Return the turns of the session. The last visit ends with the new text of its file."""
    turns = []
    for index, (kind, tool, arguments, result) in enumerate(_steps()):
        lead = _LEADS[index % len(_LEADS)].format(tool)
        request = f"{lead} with {json.dumps(arguments)}"
        turns.append(ScriptTurn(kind, request, tool, arguments, result.rstrip("\n")))
    return turns[:TURNS]
