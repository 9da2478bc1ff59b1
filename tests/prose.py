"""Count how plainly the code is written, and print one line for each package.

    python -m tests.prose [PATHS]

The columns are docstrings, the share of them that opens with a word of `OPENERS`, the share that
opens with a verb, local names (variables, parameters and private fields, each counted once in its
function), the share of them in `BANNED`, the share of lines that hold a comment, the share of lines
over 100 columns, and tokens per line of code.
"""

import argparse
import ast
import io
import re
import tokenize
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


OPENERS = _words("""
    above all and any as at before behind below beside but by each for from how if in it its
    likewise no none nothing of on or otherwise over so such than that their them there they
    this those to under what whatever when whenever where whether which who whoever whom whose
    why with
    """)
"""First words of docstrings that say a part of a sentence, and leave its subject to the reader."""

VERBS = _words("""
    abort accept accumulate acquire adapt add adjust admit advance align allocate answer append
    apply ask assemble assign assume attach attend average begin bind block bound break bring
    broadcast build cache call cancel cast change check choose claim clamp clear clip clone
    close collect combine commit compare compile complete compute concatenate configure confirm
    connect continue convert copy count create cut decide declare decode decrement define delay
    delete deliver derive describe detach disable discard divide do download draft drain draw
    drop embed emit enable encode end enter estimate evaluate evict expand explain export extend
    extract fail fall fetch fill filter find finish fit flatten flush fold follow forget format
    free fuse gather generate get give go group grow guard handle hash hold ignore import infer
    initialise initialize insert interpolate interpret interrupt invert issue iterate join
    justify keep kill label launch learn leave let limit list load log look lower make map mark
    mask match maximize mean measure merge minimize mirror mix modify move multiply name narrow
    normalize note notify observe obtain open order override pack pad pair parse partition pass
    permute persist pick place plan plot point pop position predict preempt prefill prepare
    print probe process produce promote propose protect publish pull push put quantize quote
    raise rank read rebuild receive recompute record recover redirect reduce refill refresh
    refuse register reject release reload remove rename render reorder repair repeat replace
    report request require reserve reset resolve restore restrict resume retain retract retry
    return reuse reverse rewrite roll rotate round run sample save say scale scan schedule score
    search see select send serve set shard shift shorten show shut sign simulate skip sleep
    solve sort spawn split spread start stop store stream submit subtract sum summarize suspend
    swap sweep switch take tell terminate test time trace train transform translate truncate try
    turn unload unlock unpack update upload use validate verify view visit vote wait walk warm
    warn watch weigh widen wrap write yield zero
    """)
"""Verbs that open a docstring. Another verb is no error: the list is for counting."""

BANNED = _words("""
    own found each given kept said known made asked wanted told one other others them those
    these gone left taken seen held meant drawn heard written put begun
    """)
"""Names of variables that do not say what they hold."""

FORMATS = {
    ("specjax/client/client.py", "told"),
    ("specjax/serving/engine.py", "known"),
    ("tests/serving/made_up_rows.py", "known"),  # a stand-in for the engine
}
"""Banned names that users write, as an option or a key, and that therefore stay: file and name."""

KEYWORDS = {
    *(("append_remote", "told"), ("from_prefix_state", "kept"), ("with_own", "own")),
    *(("with_told", "told"), ("check_vocabulary", "own")),
}
"""Banned names of parameters that users pass or define by keyword, and that therefore stay.

Each is a pair of function and name."""

_PRAGMA = re.compile(r"#\s*(noqa|pyright:|type:|fmt:)")
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass
class Counts:
    """The counts of some files."""

    openers: list[str] = field(default_factory=list)
    names: list[tuple[str, str]] = field(default_factory=list)
    lines: int = 0
    long: int = 0
    comments: int = 0
    code: int = 0
    tokens: int = 0

    def add(self, path: Path) -> None:
        """Count one file as well."""
        source = path.read_text()
        module = ast.parse(source)
        self.openers += [first_word(text) for _, text in docstrings(module)]
        self.names += local_names(module)
        self.lines += sum(bool(line.strip()) for line in source.splitlines())
        self.long += sum(len(line) > 100 for line in source.splitlines())
        self._add_tokens(source, _string_lines(module))

    def _add_tokens(self, source: str, string_lines: set[int]) -> None:
        comments, code = set(), set()
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                comments |= set() if _PRAGMA.match(token.string) else {token.start[0]}
            elif token.start[0] not in string_lines and token.string.strip():
                code |= set(range(token.start[0], token.end[0] + 1))
                self.tokens += 1
        self.comments += len(comments)
        self.code += len(code)

    def cells(self) -> list[str]:
        """Return the columns of the table."""
        return [
            str(len(self.openers)),
            _share(sum(word in OPENERS for word in self.openers), len(self.openers)),
            _share(sum(word in VERBS for word in self.openers), len(self.openers)),
            str(len(self.names)),
            _share(sum(name in BANNED for _, name in self.names), len(self.names)),
            _share(self.comments, self.lines),
            _share(self.long, self.lines),
            f"{self.tokens / max(self.code, 1):.1f}",
            str(self.code),
        ]


COLUMNS = (
    *("docstrings", "openers", "verbs", "local names", "banned"),
    *("comments", "over 100", "tokens a line", "lines of code"),
)


def docstrings(module: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield each module, class and function that has a docstring, with its docstring."""
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | _Function) and (
            text := ast.get_docstring(node)
        ):
            yield node, text


def first_word(text: str) -> str:
    """Return the first word of a text in lower case, without punctuation and backticks.

    Examples:
        >>> first_word("Of the arguments of `Engine`.")
        'of'
    """
    words = re.findall(r"[\w'-]+", text)
    return words[0].lower() if words else ""


def local_names(module: ast.Module) -> list[tuple[str, str]]:
    """Return (function, name) for each variable, parameter and private field.

    Leading underscores are cut off. A name that a function binds several times is returned once.
    Constants of modules and public fields are left out.
    """
    names = dict.fromkeys(_bound_names(module, "", is_function=False))
    return [(scope, name) for scope, name in names if name]


def _bound_names(node: ast.AST, scope: str, *, is_function: bool) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, _Function | ast.Lambda):
            name = getattr(child, "name", "lambda")
            yield from _bound_names(child, f"{scope}.{name}".strip("."), is_function=True)
            continue
        if isinstance(child, ast.ClassDef):
            yield from _bound_names(child, f"{scope}.{child.name}".strip("."), is_function=False)
            continue
        if isinstance(child, ast.arg):
            yield scope, child.arg.strip("_")
        elif isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store):
            if is_function or child.id.startswith("_"):
                yield scope, child.id.strip("_")
        elif (
            isinstance(child, ast.Attribute)
            and isinstance(child.ctx, ast.Store)
            and child.attr.startswith("_")
        ):
            yield scope, child.attr.strip("_")
        is_loop = isinstance(child, ast.comprehension)
        yield from _bound_names(child, scope, is_function=is_function or is_loop)


def _string_lines(module: ast.Module) -> set[int]:
    """Return the lines of all strings that stand alone as statements.

    These are docstrings, also those of constants.
    """
    statements = [node for node in ast.walk(module) if isinstance(node, ast.Expr)]
    strings = [
        node
        for node in statements
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return {
        line
        for node in strings
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }


def _share(part: int, whole: int) -> str:
    return f"{100 * part / max(whole, 1):.1f} %"


def files(paths: Sequence[Path]) -> list[Path]:
    """Return the Python files among the paths and in the folders among them."""
    return sorted(
        {file for path in paths for file in (path.rglob("*.py") if path.is_dir() else [path])}
    )


def package(path: Path) -> str:
    """Return the package that a file is counted under: its first two folders."""
    parts = path.resolve().relative_to(ROOT).parent.parts
    return "/".join(parts[:2])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.prose", description="Count how plainly the code is written."
    )
    parser.add_argument(
        "paths",
        nargs="*",
        type=Path,
        default=[ROOT / "specjax"],
        help="files or folders (default: specjax)",
    )
    packages: dict[str, Counts] = {}
    total = Counts()
    for file in files(parser.parse_args(arguments).paths):
        for counts in (packages.setdefault(package(file), Counts()), total):
            counts.add(file)
    rows = [
        ("", *COLUMNS),
        *((name, *counts.cells()) for name, counts in packages.items()),
        ("total", *total.cells()),
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for name, *cells in rows:
        print(
            name.ljust(widths[0]),
            *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)),
            sep="  ",
        )


if __name__ == "__main__":
    main()
