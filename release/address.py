"""Write the public address of the repository wherever it belongs: badges, URLs of the package, citation, installing.

    python release/address.py            # write
    python release/address.py --check    # exit with 1 if a file does not say what the address asks for
    python release/address.py --links    # before a build: README.md's links as addresses, as a package index needs them

The address stands in pyproject.toml, under [tool.specjax]. While it is empty no badge and no URL of the repository is anywhere.
Every line that this script writes ends in a comment that says so; it replaces these lines and leaves all others alone.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

MARK = "made by release/address.py"
"""What a line that the script has written says at its end."""

HASH, HTML, NOTEBOOK = f"{{}}  # {MARK}", f"{{}} <!-- {MARK} -->", f'    "{{}} <!-- {MARK} -->\\n",'
"""How a line is marked: in TOML and YAML, in Markdown, and in a Markdown cell of a notebook, which is JSON."""


@dataclass(frozen=True)
class Place:
    """Lines of one file that depend on the address.

    path: of the file, from the root of the repository.
    after: a regular expression; the lines stand below the first line that it matches as a whole.
    mark: how the lines are marked as made by this script.
    lines: what stands there once there is an address, with {address}, {owner}, {name} and {path} to be filled in.
    without: what stands there while there is none.
    """

    path: str
    after: str
    mark: str
    lines: tuple[str, ...]
    without: tuple[str, ...] = ()


COLAB = (
    "[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
    "(https://colab.research.google.com/github/{owner}/{name}/blob/main/"
)
CHECKS = "[![Checks]({address}/actions/workflows/checks.yml/badge.svg)]({address}/actions/workflows/checks.yml)"

PLACES = (
    Place(
        "pyproject.toml",
        r"dynamic = .*",
        HASH,
        (
            'urls.Repository = "{address}"',
            'urls.Documentation = "{address}/tree/main/docs"',
            'urls.Changelog = "{address}/blob/main/CHANGELOG.md"',
            'urls.Issues = "{address}/issues"',
        ),
    ),
    Place("README.md", "# specjax", HTML, (f"{CHECKS} {COLAB}notebooks/quickstart.ipynb)",)),
    Place("CITATION.cff", "license: .*", HASH, ('repository-code: "{address}"',)),
    Place(
        "mkdocs.yml",
        "site_description: .*",
        HASH,
        (
            "# With repo_url the reader's browser asks GitHub for the numbers beside the name.",
            "repo_url: {address}",
            "repo_name: {owner}/{name}",
            "edit_uri: edit/main/docs/",
        ),
    ),
    Place(
        ".github/ISSUE_TEMPLATE/config.yml",
        "blank_issues_enabled: .*",
        HASH,
        (
            "contact_links:",
            "  - name: A vulnerability",
            "    url: {address}/security/advisories/new",
            "    about: Report it here, where only the maintainers read it.",
        ),
    ),
    Place(
        "SECURITY.md",
        "Report it in private.*",
        HTML,
        ("Use the form for private reports: <{address}/security/advisories/new>.",),
        (
            (
                "The repository has no public address yet, so there is no form for reports: write to"
                " the people who gave you this copy."
            ),
        ),
    ),
)


def places(root: Path) -> list[Place]:
    """Return every place: those above, and one badge in every notebook under ``root``."""
    notebooks = sorted(
        path.relative_to(root).as_posix() for path in (root / "notebooks").glob("*.ipynb")
    )
    return [
        *PLACES,
        *(Place(path, r'\s*"# .*\\n",', NOTEBOOK, (COLAB + "{path})",)) for path in notebooks),
    ]


def read_address(root: Path) -> str:
    """Return the address in pyproject.toml; empty if there is none yet. Exits if it is not one of GitHub."""
    address = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["specjax"]["address"]
    if address and (
        not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", address)
        or address.endswith(".git")
    ):
        sys.exit(
            f"pyproject.toml, [tool.specjax]: address is {address!r}: write"
            " https://github.com/OWNER/NAME, or nothing"
        )
    return address


def render(text: str, place: Place, address: str) -> str:
    """Return the ``text`` of a file with the lines that belong to the ``address`` in place of those of another one."""
    lines = [line for line in text.splitlines(keepends=True) if MARK not in line]
    below = next(
        (at for at, line in enumerate(lines, 1) if re.fullmatch(place.after, line.rstrip("\n"))),
        None,
    )
    if below is None:
        sys.exit(
            f"{place.path} has no line {place.after!r}, below which release/address.py writes: mend"
            " one or the other"
        )
    owner, _, name = address.removeprefix("https://github.com/").partition("/")
    values = {"address": address, "owner": owner, "name": name, "path": place.path}
    content = place.lines if address else place.without
    lines[below:below] = [place.mark.format(line.format(**values)) + "\n" for line in content]
    return "".join(lines)


def absolute_links(text: str, address: str) -> str:
    """Return a Markdown ``text`` whose links and pictures in the repository are addresses; as it is if there is none."""
    raw = address.replace("https://github.com", "https://raw.githubusercontent.com")

    def absolute(match: re.Match[str]) -> str:
        return match[0] + (f"{raw}/main/" if match["picture"] else f"{address}/blob/main/")

    return (
        re.sub(r"""(?:(?P<picture>\bsrc(?:set)?="|!\[[^]]*\]\()|\]\()(?!\w+:|#)""", absolute, text)
        if address
        else text
    )


def main() -> int:
    """Write the lines, or with --check say which files differ. Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a file differs"
    )
    mode.add_argument(
        "--links",
        action="store_true",
        help="write README.md with addresses for links; do not commit it",
    )
    options = parser.parse_args()
    address = read_address(ROOT)
    if options.links:
        readme = ROOT / "README.md"
        readme.write_text(absolute_links(readme.read_text(), address))
        return 0
    differs = write(address, options.check)
    # The cell of the notebooks that installs has the address as its source.
    cells = [
        sys.executable,
        str(ROOT / "release" / "write_install_cell.py"),
        *["--check"] * options.check,
    ]
    return subprocess.run(cells, check=False).returncode or differs


def write(address: str, check: bool) -> int:
    """Write the lines of the ``address``, or with ``check`` say which files differ. Returns the exit status."""
    differs = False
    for place in places(ROOT):
        path = ROOT / place.path
        text = path.read_text()
        expected = render(text, place, address)
        if expected == text:
            continue
        differs = True
        print(
            f"{place.path} differs: run python release/address.py"
            if check
            else f"{place.path} is written"
        )
        if not check:
            path.write_text(expected)
    return int(check and differs)


if __name__ == "__main__":
    sys.exit(main())
