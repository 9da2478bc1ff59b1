"""Check that the names that specjax exports are imported at their first use."""

import ast
import importlib
from pathlib import Path

import pytest

import specjax


def test_every_exported_name_is_declared_imported_and_found() -> None:
    tree = ast.parse(Path(specjax.__file__).read_text())
    (block,) = (
        node
        for node in tree.body
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
    )
    declared = {
        alias.name: node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(declared) == sorted(specjax.__all__)
    modules = {"serving", "conformance"}
    assert declared == specjax._HOME_OF | {name: declared[name] for name in modules}
    for name, home in declared.items():
        expected = (
            importlib.import_module(f"{home}.{name}")
            if name in modules
            else getattr(importlib.import_module(home), name)
        )
        assert specjax.__getattr__(name) is getattr(specjax, name) is expected


def test_modules_are_found_without_an_import_of_their_own() -> None:
    assert specjax.__getattr__("processes") is importlib.import_module("specjax.processes")
    assert set(specjax.__all__) <= set(dir(specjax))


def test_a_name_that_is_nowhere_is_refused() -> None:
    with pytest.raises(AttributeError, match="module 'specjax' has no attribute 'generator'"):
        specjax.generator  # noqa: B018
