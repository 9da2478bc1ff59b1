"""Old names that users may have, for what has a new one."""

import ast
import importlib
from collections import Counter
from pathlib import Path

import pytest

import specjax
from specjax.training.contract import StudentInputs


@pytest.mark.parametrize(("module", "name", "renamed"), [("specjax.training.contract", "Given", StudentInputs)])
def test_an_old_name_works_and_warns(module, name, renamed) -> None:
    with pytest.warns(DeprecationWarning, match=f"{module}.{name} has a new name: {renamed.__name__}") as caught:
        assert getattr(importlib.import_module(module), name) is renamed
    assert caught[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'Gives'"):
        importlib.import_module(module).Gives  # noqa: B018 - it is asked for


def test_each_class_name_stands_for_one_class() -> None:
    """A reader who finds a name in the code finds one class of it."""
    trees = (ast.parse(path.read_text()) for path in Path(specjax.__file__).parent.rglob("*.py"))
    names = Counter(node.name for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    assert [name for name, count in names.items() if count > 1] == []
