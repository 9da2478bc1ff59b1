"""Shape annotations on public array functions, checked at run time only while testing.

``@shape_checked`` costs nothing in use. With ``SPECJAX_TYPECHECK=1`` in the environment at import (the test suite sets it),
every call checks its arrays against their jaxtyping annotations, so that ``Float[Array, "B N V"]`` is a statement and not a
comment. It is never applied to containers: JAX rebuilds those with placeholder leaves.
"""

import os
from collections.abc import Callable
from typing import TypeVar, cast

_Function = TypeVar("_Function", bound=Callable)


def shape_checked(function: _Function) -> _Function:
    """Check ``function``'s array arguments and result against its annotations when SPECJAX_TYPECHECK=1."""
    if os.environ.get("SPECJAX_TYPECHECK") != "1":
        return function
    from beartype import beartype
    from jaxtyping import jaxtyped

    return cast(_Function, jaxtyped(function, typechecker=beartype))
