"""Check that docstrings name only what exists.

A name in single backticks is one that a reader can look up.
"""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import specjax

NAME = re.compile(r"(?<!`)`([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*)`(?!`)")
MODULE_NAMES = [module.name for module in pkgutil.walk_packages(specjax.__path__, "specjax.")]
MODULES = [
    specjax,
    *(importlib.import_module(name) for name in MODULE_NAMES if not name.endswith("__main__")),
]
NOT_OURS = {"transformers"}
"""Names of other packages that docstrings may give."""


def docstrings(body: list[ast.stmt], owner: str = "") -> Iterator[tuple[str, str]]:
    """Yield every docstring, those of constants included, with the name of its class."""
    for statement in body:
        if (
            isinstance(statement, ast.Expr)
            and isinstance(statement.value, ast.Constant)
            and isinstance(statement.value.value, str)
        ):
            yield statement.value.value, owner
        elif isinstance(statement, ast.ClassDef):
            yield from docstrings(statement.body, statement.name)
        elif isinstance(statement, ast.FunctionDef):
            yield from docstrings(statement.body, owner)


def has(holder: Any, name: str) -> bool:
    """Return whether a module or a class has an attribute, or a field without a default, of a name.

    A name that a module only imports from another of our modules does not count, except in a
    package: docstrings name it where it is defined.
    """
    if isinstance(holder, ModuleType):
        value = getattr(holder, name, None)
        home = getattr(value, "__module__", None) or ""
        return hasattr(holder, name) and (
            hasattr(holder, "__path__")
            or not home.startswith("specjax.")
            or home == holder.__name__
        )
    return hasattr(holder, name) or any(
        name in vars(kind).get("__annotations__", {}) for kind in getattr(holder, "__mro__", ())
    )


def leads_on(holder: Any, parts: list[str]) -> bool:
    """Return whether the parts of a dotted name can be followed from ``holder``."""
    if not parts:
        return True
    return has(holder, parts[0]) and leads_on(getattr(holder, parts[0], None), parts[1:])


def resolves(name: str, module: ModuleType, owner: str) -> bool:
    """Return whether the dotted ``name`` leads anywhere.

    It may start at the class of the docstring, its module, or any other of our modules.
    """
    first, *rest = parts = name.removeprefix("specjax.").split(".")
    if hasattr(module, first) and leads_on(getattr(module, first), rest):
        return True
    return any(leads_on(start, parts) for start in (getattr(module, owner, None), *MODULES))


def test_every_name_in_a_docstring_is_one_that_exists() -> None:
    stale = []
    for module in MODULES:
        named = docstrings(ast.parse(Path(module.__file__).read_text()).body)
        stale += [
            f"{module.__name__}: {name}"
            for text, owner in named
            for name in NAME.findall(text)
            if name not in NOT_OURS and not resolves(name, module, owner)
        ]
    assert not stale, "\n".join(stale)
