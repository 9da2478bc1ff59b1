"""The code blocks, links and anchors of the README and of the pages under docs/."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from specjax.cli.main import Command, find_command, parse_options

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))

_FENCE = re.compile(r"^( *)(`{3,}|~{3,}) *([\w+-]*)[^\n]*\n(.*?)^\1\2 *$", re.DOTALL | re.MULTILINE)
_NOT_RUN = re.compile(r"<!-- not run: \S.*-->\s*\Z")
_LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)|(?:src|href|srcset)=\"([^\"]+)\"")


class Block(NamedTuple):
    """A block of code in a page.

    Attributes:
        page: the file.
        line: number of its first line of code.
        language: as the fence names it.
        code: without the indentation of the fence.
        run: whether it is meant to be run, which a comment ``<!-- not run: reason -->`` before it
            denies.
    """

    page: Path
    line: int
    language: str
    code: str
    run: bool


def blocks(page: Path, *languages: str) -> list[Block]:
    """Return the code blocks of a page in these languages, in order."""
    text = page.read_text()
    blocks_of_page = []
    for fence in _FENCE.finditer(text):
        indent, _, language, code = fence.groups()
        if language not in languages:
            continue
        line = text.count("\n", 0, fence.start(4)) + 1
        code = re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
        is_run = not _NOT_RUN.search(text[: fence.start()])
        blocks_of_page.append(Block(page, line, language, code, is_run))
    return blocks_of_page


def run_python(page: Path) -> dict[str, Any]:
    """Run the Python blocks of a page from top to bottom in one namespace, and return it.

    The traceback of an error names the page, and the line in it.
    """
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        if block.run:
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)
    return names


def command_lines(page: Path) -> list[list[str]]:
    """Return the words after ``python -m specjax`` of each such line in a page's shell blocks."""
    command_lines_of_page = []
    for block in blocks(page, "bash", "sh", "shell", "console"):
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.match(r"[A-Z_]+=", words[0]):  # a variable of the environment
                words.pop(0)
            if words[:3] == ["python", "-m", "specjax"]:
                command_lines_of_page.append(words[3:])
    return command_lines_of_page


def check_command_line(words: list[str]) -> None:
    """Parse a command line as the command does, and fail if it refuses an option."""
    name, command, options = find_command(words)
    assert isinstance(command, Command), f"{' '.join(words)}: names no command"
    if "--help" in options:
        return
    try:
        parse_options(command.config, options, prog=name)
    except SystemExit:
        raise AssertionError(f"{' '.join(words)}: its options are not taken") from None


def links(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the file and the anchor of every link and picture of a page.

    Addresses are left out, and so are links inside code.
    """
    text = _FENCE.sub("", page.read_text())
    text = re.sub(r"`[^`\n]*`", "", text)
    for match in _LINK.finditer(text):
        address = match[1] or match[2]
        if not re.match(r"[a-z]+:", address):
            file, _, anchor = address.partition("#")
            yield file, anchor


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page: its headings, its ids, and the names that its API shows.

    A heading has two anchors: as GitHub writes it and as MkDocs writes it.
    """
    text = _FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ +(.*?) *#*$", text, re.MULTILINE)
    github, mkdocs = r"\s", r"[\s-]+"
    slugs = {slug(heading, spaces) for heading in headings for spaces in (github, mkdocs)}
    ids = re.findall(r"(?:id|name)=\"([^\"]+)\"", text)
    ids += re.findall(r"\{[^}\n]*#([\w.-]+)[^}\n]*\}", text)
    return slugs | set(ids) | set(shown(page))


def slug(heading: str, spaces: str) -> str:
    """Return the anchor of a heading, with a dash for each match of ``spaces``."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\s-]", "", re.sub(r"\s*\{[^}]*\}\s*$", "", text)).strip().lower()
    return re.sub(spaces, "-", text)


def shown(page: Path) -> list[str]:
    """Return the names whose docstrings an API page shows, by lines ``::: name``."""
    return re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE)


def check_links(page: Path) -> None:
    """Check that every file that a page links to exists, and every heading."""
    broken = []
    for file, anchor in links(page):
        target = page if not file else (page.parent / file).resolve()
        if not target.exists():
            broken.append(f"{file}: there is no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{file}#{anchor}: there is no such heading")
    assert not broken, f"{page.relative_to(ROOT)}:\n" + "\n".join(broken)
