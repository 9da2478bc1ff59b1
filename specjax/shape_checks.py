"""Shape annotations on public array functions, checked at run time only in tests.

``@shape_checked`` costs nothing in production. With ``SPECJAX_TYPECHECK=1`` in the environment at
import (the test suite sets it), every call checks its arrays against their jaxtyping annotations.
So ``Float[Array, "B N V"]`` is checked, and is not merely a comment. The decorator is never applied
to containers, because JAX rebuilds them with placeholder leaves.
"""

import os
from collections.abc import Callable
from typing import TypeVar, cast

_Function = TypeVar("_Function", bound=Callable)


def shape_checked(function: _Function) -> _Function:
    """Check a function's array arguments and result against its annotations in tests."""
    if os.environ.get("SPECJAX_TYPECHECK") != "1":
        return function
    from beartype import beartype
    from jaxtyping import jaxtyped

    return cast(_Function, jaxtyped(function, typechecker=beartype))
