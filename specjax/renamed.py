"""Let old names of a module still work, with a warning."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any


def old_names(module: str, names: Mapping[str, Any]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a module in which classes have new names.

    Args:
        module: the module's name.
        names: by old name, the class that has a new one.

    Returns:
        a function that returns the class for its old name, with a ``DeprecationWarning`` at the place that asks for it.

    Examples:
        >>> import warnings
        >>> from specjax.renamed import old_names
        >>> find = old_names("shapes", {"Length": int})
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     find("Length")
        <class 'int'>
        >>> str(caught[0].message)
        'shapes.Length has a new name: int'
    """

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        found = names[name]
        warnings.warn(f"{module}.{name} has a new name: {found.__name__}", DeprecationWarning, stacklevel=2)
        return found

    return find
