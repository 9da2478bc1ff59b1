"""Check that an address of the repository is written everywhere, and that without one none is."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from release.address import MARK, PLACES, places
from release.write_install_cell import find_cell
from tests.documents import ROOT

ADDRESS = "https://github.com/someone/specjax"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
POINTS_HERE = re.compile(
    r"colab\.research\.google\.com|badge\.svg|repository-code|repo_url"
    r"|specjax\.readthedocs\.io|github\.com/(?!thoughtworks/)[\w.-]+/specjax"
)
"""Text that needs an address. (The other SpecJAX, which a page names, belongs to thoughtworks.)"""
ABOUT = {"release/address.py", "tests/test_address.py"}
"""Files that are about these words."""


def text_files(root: Path) -> dict[str, str]:
    """Return every text of the repository by its path, without generated and installed files."""
    folders = [
        *(".ci", ".github", "benchmarks", "configs", "deploy", "docs", "notebooks", "release"),
        *("specjax", "tests"),
    ]
    paths = [path for path in root.iterdir() if path.is_file() and path.name != ".git"]
    paths += [path for folder in folders for path in (root / folder).rglob("*") if path.is_file()]
    texts = {}
    for path in paths:
        if path.suffix not in {".pyc", ".png", ".safetensors"}:
            texts[path.relative_to(root).as_posix()] = path.read_text(encoding="utf-8")
    return texts


def set_address(root: Path, address: str) -> None:
    project = root / "pyproject.toml"
    project.write_text(
        re.sub(r'(?m)^address = ".*"$', f'address = "{address}"', project.read_text())
    )


def run(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(root / "release" / "address.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path) -> Path:
    """Copy the script and the files that an address is written to, and clear the address."""
    scripts = [f"release/{name}.py" for name in ("address", "install_cell", "write_install_cell")]
    for path in [*scripts, *(place.path for place in places(ROOT))]:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    set_address(tmp_path, "")
    run(tmp_path)
    return tmp_path


@pytest.fixture
def addressed(copy) -> Path:
    """Return the same copy with an address."""
    set_address(copy, ADDRESS)
    assert run(copy).returncode == 0
    return copy


def test_the_repository_says_what_its_address_asks_for() -> None:
    checked = run(ROOT, "--check")
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.skipif(
    tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["specjax"]["address"] != "",
    reason="there is an address",
)
def test_without_an_address_nothing_points_to_one() -> None:
    texts = text_files(ROOT)
    assert len(texts) > 300
    pointing = {
        path: match.group()
        for path, text in texts.items()
        if path not in ABOUT and (match := POINTS_HERE.search(text))
    }
    assert not pointing
    assert "urls" not in tomllib.loads(texts["pyproject.toml"])["project"]
    assert "contact_links" not in yaml.safe_load(texts[".github/ISSUE_TEMPLATE/config.yml"])


def test_with_an_address_the_urls_of_the_package_lead_there(addressed) -> None:
    urls = tomllib.loads((addressed / "pyproject.toml").read_text())["project"]["urls"]
    assert urls == {
        "Repository": ADDRESS,
        "Documentation": f"{ADDRESS}/tree/main/docs",
        "Changelog": f"{ADDRESS}/blob/main/CHANGELOG.md",
        "Issues": f"{ADDRESS}/issues",
    }


def test_with_an_address_citation_site_and_issues_name_it(addressed) -> None:
    assert yaml.safe_load((addressed / "CITATION.cff").read_text())["repository-code"] == ADDRESS
    site = (addressed / "mkdocs.yml").read_text()
    assert f"\nrepo_url: {ADDRESS}  # {MARK}\nrepo_name: someone/specjax  # {MARK}\n" in site
    (link,) = yaml.safe_load((addressed / ".github" / "ISSUE_TEMPLATE" / "config.yml").read_text())[
        "contact_links"
    ]
    assert link["url"] == f"{ADDRESS}/security/advisories/new"
    security = (addressed / "SECURITY.md").read_text()
    assert f"<{ADDRESS}/security/advisories/new>" in security
    assert "no public address" not in security


def test_with_an_address_the_readme_has_its_badges_below_the_title(addressed) -> None:
    title, badges = (addressed / "README.md").read_text().splitlines()[:2]
    assert title == "# specjax"
    assert f"]({ADDRESS}/actions/workflows/checks.yml)" in badges
    assert (
        "https://colab.research.google.com/github/someone/specjax/blob/main/notebooks/quickstart.ipynb"
        in badges
    )


@pytest.mark.full
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_with_an_address_a_notebook_has_one_badge_in_its_first_cell(path, addressed) -> None:
    before = json.loads((ROOT / "notebooks" / path.name).read_text())
    after = json.loads((addressed / "notebooks" / path.name).read_text())
    badge = after["cells"][0]["source"].pop(1)
    link = (
        f"https://colab.research.google.com/github/someone/specjax/blob/main/notebooks/{path.name}"
    )
    assert badge.startswith(
        "[![Open In Colab](https://colab.research.google.com/assets/colab-badge.svg)]" + f"({link})"
    )
    assert badge.endswith("\n")
    before["cells"][0]["source"] = [
        line for line in before["cells"][0]["source"] if MARK not in line
    ]
    installs = find_cell(after) or pytest.fail("no cell installs")
    assert f'SOURCE = "git+{ADDRESS}"' in "".join(installs["source"])
    installs["source"] = (find_cell(before) or pytest.fail("no cell installs"))["source"]
    assert after == before


def test_the_workflow_of_the_badge_exists() -> None:
    assert (ROOT / ".github" / "workflows" / "checks.yml").is_file()


def test_an_address_that_goes_again_leaves_nothing_behind(addressed) -> None:
    set_address(addressed, "")
    run(addressed)
    for place in places(ROOT):
        text = (addressed / place.path).read_text()
        assert not POINTS_HERE.search(text), place.path
        assert text.count(MARK) == len(place.without) * (place in PLACES), place.path


def test_the_check_names_a_file_whose_address_has_drifted_and_writes_nothing(addressed) -> None:
    citation = addressed / "CITATION.cff"
    citation.write_text(citation.read_text().replace("someone", "nobody"))
    drifted = citation.read_text()
    checked = run(addressed, "--check")
    assert checked.returncode == 1
    assert checked.stdout == "CITATION.cff differs: run python release/address.py\n"
    assert citation.read_text() == drifted


def test_the_check_names_every_file_when_the_address_has_changed(addressed) -> None:
    set_address(addressed, "https://github.com/another/specjax")
    checked = run(addressed, "--check")
    assert checked.returncode == 1
    named = {line.partition(" ")[0] for line in checked.stdout.splitlines()}
    assert named == {place.path for place in places(ROOT)}


def test_for_a_package_index_every_link_of_the_readme_is_the_address_of_a_file_that_exists(
    addressed,
) -> None:
    assert run(addressed, "--links").returncode == 0
    text = re.sub(r"```.*?```", "", (addressed / "README.md").read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\((.*?)\)", text) + re.findall(r'(?:src|srcset)="(.*?)"', text)
    assert not [link for link in links if not link.startswith(("https://", "#"))]
    raw = ADDRESS.replace("github.com", "raw.githubusercontent.com")
    pages = {
        link.removeprefix(f"{ADDRESS}/blob/main/").partition("#")[0]
        for link in links
        if f"{ADDRESS}/blob" in link
    }
    pictures = {link.removeprefix(f"{raw}/main/") for link in links if link.startswith(raw)}
    assert "docs/guides/serve.md" in pages
    assert "docs/images/demo.svg" in pictures
    assert all((ROOT / path).exists() for path in pages | pictures)


def test_without_an_address_links_stay_as_they_are(copy) -> None:
    before = (copy / "README.md").read_text()
    assert run(copy, "--links").returncode == 0
    assert (copy / "README.md").read_text() == before


@pytest.mark.full
@pytest.mark.thorough_except("github.com/a/b", "https://github.com/someone/specjax.git")
@pytest.mark.parametrize(
    "address", ["github.com/a/b", f"{ADDRESS}.git", f"{ADDRESS}/", "https://github.com/specjax"]
)
def test_an_address_that_is_none_is_refused(copy, address) -> None:
    set_address(copy, address)
    refused = run(copy)
    assert refused.returncode == 1
    assert repr(address) in refused.stderr
    assert "https://github.com/OWNER/NAME" in refused.stderr


def test_a_file_without_the_line_to_write_below_is_named(copy) -> None:
    readme = copy / "README.md"
    readme.write_text(readme.read_text().replace("# specjax\n", "# Other\n"))
    failed = run(copy)
    assert failed.returncode == 1
    assert "README.md has no line '# specjax'" in failed.stderr
