"""Check the documentation: its code runs, its command lines parse, and its links lead somewhere.

Every public name is in it.
"""

import ast
import doctest
import inspect
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

import specjax
from specjax.planning import contexts
from tests import documents
from tests.documents import PAGES, ROOT
from tests.test_docstrings import MODULES

API = ROOT / "docs" / "api"
NAMES = {str(page.relative_to(ROOT / "docs")): page for page in PAGES}
every_page = pytest.mark.parametrize("page", NAMES.values(), ids=NAMES)


# --- pages ----------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if any(block.run for block in documents.blocks(page, "python"))],
    ids=lambda page: page.stem,
)
@pytest.mark.usefixtures("either_assets")
def test_the_python_of_a_page_runs(page: Path, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    documents.run_python(page)


@every_page
def test_every_command_line_of_a_page_is_taken(page: Path) -> None:
    for words in documents.command_lines(page):
        documents.check_command_line(words)


@every_page
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    documents.check_links(page)


def test_every_page_is_in_the_navigation_once() -> None:
    listed = list(_leaves(_site()["nav"]))
    assert sorted(listed) == sorted(NAMES)


def _site() -> dict[str, Any]:
    """Return the content of mkdocs.yml without the tags that name Python functions."""

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_multi_constructor("tag:yaml.org,2002:python/name:", lambda *_: None)
    return yaml.load((ROOT / "mkdocs.yml").read_text(), Loader)


def _leaves(tree: Any) -> Iterator[str]:
    if isinstance(tree, str):
        yield tree
    else:
        for branch in tree.values() if isinstance(tree, dict) else tree:
            yield from _leaves(branch)


# --- docstrings -----------------------------------------------------------------------------------

SHOWN = {name: page.name for page in sorted(API.glob("*.md")) for name in documents.shown(page)}
"""The names that the pages of the API show, and the page of each."""


def find(name: str) -> Any:
    """Return the object of a dotted name."""
    module, attributes = name, []
    while module not in sys.modules:  # `MODULES` has imported them all
        module, _, last = module.rpartition(".")
        attributes.insert(0, last)
    value: Any = sys.modules[module]
    for attribute in attributes:
        value = getattr(value, attribute)
    return value


def public() -> Iterator[tuple[str, Any]]:
    """Yield every name that needs an explanation, and its value.

    These are the names that the packages export, the names that pages of the API show one by one,
    and the classes and functions of each module that they show.
    """
    for package in (specjax, specjax.decoding, specjax.drafters):
        for name in package.__all__:
            yield f"{package.__name__}.{name}", getattr(package, name)
    for name in SHOWN:
        shown = find(name)
        yield name, shown
        if isinstance(shown, ModuleType):
            for member, value in vars(shown).items():
                if not member.startswith("_") and getattr(value, "__module__", None) == name:
                    yield f"{name}.{member}", value


def constants(module: ModuleType) -> dict[str, str]:
    """Return the docstrings of a module's constants, which stand below them."""
    body = ast.parse(inspect.getsource(module)).body
    texts = {}
    for constant, below in pairwise(body):
        names = (
            constant.targets
            if isinstance(constant, ast.Assign)
            else [getattr(constant, "target", None)]
        )
        if (
            isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
            and isinstance(below.value.value, str)
        ):
            texts |= {name.id: below.value.value for name in names if isinstance(name, ast.Name)}
    return texts


CONSTANTS = {
    id(getattr(module, name)): text
    for module in MODULES
    for name, text in constants(module).items()
}


def docstring(value: Any) -> str:
    """Return the docstring of a value that has a public name."""
    return CONSTANTS.get(id(value)) or inspect.getdoc(value) or ""


def test_every_public_name_is_explained_with_an_example_on_a_page_of_the_api() -> None:
    shown = {id(find(name)) for name in SHOWN}
    shown |= {
        id(member)
        for name in SHOWN
        if isinstance(module := find(name), ModuleType)
        for member in vars(module).values()
    }
    missing = []
    for name, value in public():
        text = docstring(value)
        needs_example = not isinstance(value, ModuleType) and not name.startswith("specjax.cli.")
        if id(value) not in shown:
            missing.append(f"{name}: is on no page under docs/api")
        if not text:
            missing.append(f"{name}: has no docstring")
        elif needs_example and ">>> " not in text:
            missing.append(f"{name}: its docstring has no example")
    assert not missing, "\n".join(missing)


SLOW = {
    *("check", "check_contract", "check_one_trace", "check_greedy", "check_rows", "check_coupled"),
    *("check_grammar", "check_insert", "check_rows_that_come_and_go"),
    *("check_distribution", "p_values"),
    *("Text", "admit", "read_chunk", "decode_rows", "verify_rows"),
    *("Engine", "EngineStatistics", "Handle", "Answer", "ClientRow", "ClientStatistics"),
    *("compare_drafts", "fastest_drafter", "measure_acceptance", "measure_contexts"),
    *("measure_costs", "trial_speedup", "chain_survival", "insert", "Generation", "Run"),
    *("calibrate", "Generate"),
}
"""Names whose examples compile several programs each, and run in the thorough tier.

Other tests run the functions every time."""


def examples() -> Iterator[tuple[str, doctest.DocTest]]:
    """Yield the examples of every docstring, with the name that the docstring belongs to.

    The docstrings of constants are included.
    """
    for module in MODULES:
        for node in ast.walk(ast.parse(Path(module.__file__).read_text())):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield from example(module, node.name, node.body[0])
            elif isinstance(node, ast.Module):
                for constant, below in pairwise(node.body):
                    if isinstance(constant, ast.Assign | ast.AnnAssign):
                        yield from example(module, ast.unparse(constant).split()[0], below)


def example(
    module: ModuleType, name: str, statement: ast.stmt
) -> Iterator[tuple[str, doctest.DocTest]]:
    """Yield the examples in a ``statement``, if it is a docstring that has any."""
    text = (
        statement.value.value
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        else ""
    )
    if ">>> " in str(text):
        where = f"{module.__name__}.{name}, the docstring"
        parser = doctest.DocTestParser()
        yield name, parser.get_doctest(str(text), {}, where, module.__file__, statement.lineno - 1)


@pytest.mark.full
@pytest.mark.parametrize(
    "slow", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["fast", "slow"]
)
def test_every_example_of_a_docstring_does_what_it_shows(slow, tmp_path, monkeypatch) -> None:
    """Run all examples in one process from one target, so that they share compiled programs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(contexts, "forget_programs", lambda: None)
    names = documents.run_python(API / "index.md")
    failures: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    tests = [test for name, test in examples() if (name in SLOW) == slow]
    assert len(tests) >= (len(SLOW) if slow else 100)
    for test in tests:
        test.globs = dict(names)
        runner.run(test, out=failures.append)
    assert not runner.failures, "".join(failures)


@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("Quantization", "guides/quantization.md"),
        ("Quantization", "results/quantization.md"),
        ("Colab", "guides/devices.md"),
    ],
)
def test_headings_have_the_word_that_readers_search_for(word, page) -> None:
    headings = [
        line for line in (ROOT / "docs" / page).read_text().splitlines() if line.startswith("#")
    ]
    assert any(word in heading for heading in headings)
    assert (
        word in (ROOT / "mkdocs.yml").read_text()
        or word in (ROOT / "docs" / "index.md").read_text()
    )
