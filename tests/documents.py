"""What the README and the pages under docs/ are made of: code blocks, links and anchors."""

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
        run: whether it is meant to be run: no comment ``<!-- not run: reason -->`` stands before it.
    """

    page: Path
    line: int
    language: str
    code: str
    run: bool


def blocks(page: Path, *languages: str) -> list[Block]:
    """The code blocks of a page in these languages, in order."""
    text = page.read_text()
    found = []
    for fence in _FENCE.finditer(text):
        indent, _, language, code = fence.groups()
        if language not in languages:
            continue
        line = text.count("\n", 0, fence.start(4)) + 1
        code = re.sub(f"^{indent}", "", code, flags=re.MULTILINE)
        found.append(Block(page, line, language, code, not _NOT_RUN.search(text[: fence.start()])))
    return found


def run_python(page: Path) -> dict[str, Any]:
    """Run the Python blocks of a page from top to bottom in one namespace, which is returned.

    An error's traceback names the page, and the line in it.
    """
    names: dict[str, Any] = {"__name__": page.stem}
    for block in blocks(page, "python"):
        if block.run:
            exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)
    return names


def command_lines(page: Path) -> list[list[str]]:
    """The words of every line ``python -m specjax …`` of the shell blocks of a page, without those three."""
    found = []
    for block in blocks(page, "bash", "sh", "shell", "console"):
        for line in block.code.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            while words and re.match(
                r"[A-Z_]+=", words[0]
            ):  # a variable of the environment, for this command
                words.pop(0)
            if words[:3] == ["python", "-m", "specjax"]:
                found.append(words[3:])
    return found


def check_command_line(words: list[str]) -> None:
    """Parse a command line as the command does, which refuses what it does not know."""
    name, command, options = find_command(words)
    assert isinstance(command, Command), f"{' '.join(words)}: names no command"
    if "--help" in options:
        return
    try:
        parse_options(command.config, options, prog=name)
    except SystemExit:
        raise AssertionError(f"{' '.join(words)}: its options are not taken") from None


def links(page: Path) -> Iterator[tuple[str, str]]:
    """The file and the anchor of every link and picture of a page that is neither an address nor inside code."""
    text = _FENCE.sub("", page.read_text())
    text = re.sub(r"`[^`\n]*`", "", text)
    for found in _LINK.finditer(text):
        address = found[1] or found[2]
        if not re.match(r"[a-z]+:", address):
            file, _, anchor = address.partition("#")
            yield file, anchor


def anchors(page: Path) -> set[str]:
    """What links into a page may name: its headings, as GitHub and MkDocs number them, its own ids, and what its API shows."""
    text = _FENCE.sub("", page.read_text())
    headings = re.findall(r"^#+ +(.*?) *#*$", text, re.MULTILINE)
    found = {
        slug(heading, spaces) for heading in headings for spaces in (r"\s", r"[\s-]+")
    }  # GitHub's, MkDocs'
    found |= set(re.findall(r"(?:id|name)=\"([^\"]+)\"", text)) | set(
        re.findall(r"\{[^}\n]*#([\w.-]+)[^}\n]*\}", text)
    )
    return found | set(shown(page))


def slug(heading: str, spaces: str) -> str:
    """The anchor of a heading, in which a dash stands for each match of ``spaces``."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
    text = re.sub(r"[^\w\s-]", "", re.sub(r"\s*\{[^}]*\}\s*$", "", text)).strip().lower()
    return re.sub(spaces, "-", text)


def shown(page: Path) -> list[str]:
    """The names whose docstrings an API page shows, as ``::: name`` asks for them."""
    return re.findall(r"^::: ([\w.]+)", page.read_text(), re.MULTILINE)


def check_links(page: Path) -> None:
    """See that what a page links to exists: every file, and of a page the heading."""
    broken = []
    for file, anchor in links(page):
        target = page if not file else (page.parent / file).resolve()
        if not target.exists():
            broken.append(f"{file}: there is no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            broken.append(f"{file}#{anchor}: there is no such heading")
    assert not broken, f"{page.relative_to(ROOT)}:\n" + "\n".join(broken)
