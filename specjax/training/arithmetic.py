"""The arithmetic of a program: the floating-point operations of its products of matrices."""

import math
from collections.abc import Iterator
from typing import Any

import jax.extend.core


def count_flops(jaxpr: Any) -> float:
    """Return the floating-point operations of all products in a program, on all devices together.

    Loops count with the number of their turns: XLA's own analysis counts the body of a loop once,
    and losses, long windows and mixtures are computed in loops. Elementwise operations are left
    out. What is computed again for the gradient counts again. Of branches the largest counts. A
    loop whose number of turns depends on data counts once.

    Args:
        jaxpr: the program, such as `jax.make_jaxpr` returns it.

    Examples:
        >>> from specjax.training.arithmetic import count_flops
        >>> matrix = jnp.ones((4, 4))
        >>> def five_products(x):
        ...     return jax.lax.fori_loop(0, 5, lambda _, x: x @ matrix, x)
        >>> count_flops(jax.make_jaxpr(five_products)(matrix))  # 5 times 2 * 4 * 4 * 4
        640.0
    """
    return sum((_flops_of(equation) for equation in _open(jaxpr).eqns), 0.0)


def _flops_of(equation: Any) -> float:
    name, parameters = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = parameters["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2.0 * equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
    if name == "ragged_dot_general":
        return _flops_of_ragged(equation)
    if name == "conv_general_dilated":
        kernel, numbers = equation.invars[1].aval, parameters["dimension_numbers"]
        of_one_output = kernel.size / kernel.shape[numbers.rhs_spec[0]]
        return 2.0 * equation.outvars[0].aval.size * of_one_output
    if name == "cond":
        return max(count_flops(branch) for branch in parameters["branches"])
    turns = 1
    if name == "scan":
        turns = parameters["length"]
    elif name == "shard_map":  # the shapes inside are those of one device
        turns = parameters["mesh"].size
    elif name == "pallas_call":
        turns = math.prod(parameters["grid_mapping"].grid)
    return turns * sum(count_flops(inner) for inner in _inner(parameters.values()))


def _flops_of_ragged(equation: Any) -> float:
    """Return the operations of a product in which a row meets the matrix of its group alone."""
    numbers = equation.params["ragged_dot_dimension_numbers"]
    (contracted, _), _ = numbers.dot_dimension_numbers
    shape = equation.invars[0].aval.shape
    size = math.prod(shape[axis] for axis in contracted)
    outputs = equation.outvars[0].aval.size
    if set(numbers.lhs_ragged_dimensions) <= set(contracted):
        # Each row belongs to one group, and each group has an output of its own.
        outputs //= equation.invars[2].aval.size
    return 2.0 * outputs * size


def _inner(values: Any) -> Iterator[Any]:
    """Yield the programs among the parameters of an operation."""
    for value in values:
        if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
            yield value
        elif isinstance(value, list | tuple):
            yield from _inner(value)


def _open(jaxpr: Any) -> jax.extend.core.Jaxpr:
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr
