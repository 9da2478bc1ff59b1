"""Schemes: which matrices of a model are quantized, and how."""

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from specjax import sharding
from specjax.errors import InputError
from specjax.models.params import Param
from specjax.models.quantization.gptq import Watched, gptq
from specjax.models.quantization.weights import Form, QuantizedMatrix, is_quantized, quantize_matrix


@dataclass(frozen=True)
class Scheme:
    """The forms in which the matrices of a model are quantized.

    Attributes:
        layers: the form of the matrices of the layers.
        vocabulary: the form of the embedding and the head; None: they stay floats.

    Examples:
        >>> from specjax.models.quantization import Form
        >>> from specjax.models.quantization.schemes import Scheme
        >>> quantized = target.quantize(Scheme(layers=Form("int4", group=16), vocabulary=None))
        >>> quantized.params["layers"][0]["down"].form.kind, quantized.params["embed"].dtype
        ('int4', dtype('float32'))
    """

    layers: Form
    vocabulary: Form | None

    def form_of(self, param: Param) -> Form | None:
        """Return the form of a parameter; None if it stays in floats.

        Only matrices that nothing but products use are quantized (`Param.is_product`). Norms,
        biases, convolutions, decays, routers, and gates with a number for each head stay in floats.
        The rows of Mamba-2's steps are quantized, because files have them in the matrix of its
        inputs.
        """
        if not param.is_product:
            return None
        form = self.vocabulary if {"vocab", "draft_vocab"} & set(param.axes) else self.layers
        return None if form is None else form.fitting(param.shape[-1 if param.is_rows else -2])


SCHEMES: dict[str, Scheme] = {
    "int8": Scheme(Form("int8"), Form("int8")),
    "w8a8": Scheme(Form("int8", activations=8), Form("int8", activations=8)),
    "int4": Scheme(Form("int4", group=128), Form("int8")),
    "fp8": Scheme(Form("fp8"), None),
}
"""The schemes by name.

They are 8-bit weights; 8-bit weights and activations; 4-bit weights in groups of 128; FP8.
"""

AS_STORED, FLOATS = "stored", "float"
"""Further options: matrices are quantized as in the checkpoint, or not at all."""

Weights = str | Scheme
"""`AS_STORED`, `FLOATS`, a name in `SCHEMES`, or a custom scheme."""


def scheme_of(weights: Weights) -> Scheme:
    """Return the scheme of a name.

    Raises:
        InputError: There is no such scheme.
    """
    check_weights(weights, ())
    return weights if isinstance(weights, Scheme) else SCHEMES[weights]


def check_weights(
    weights: Weights, options: Sequence[str] = (AS_STORED, FLOATS), name: str = "weights"
) -> None:
    """Refuse, with an InputError, a name that is neither a scheme nor in ``options``.

    ``name`` is the name of the argument.
    """
    choices = (*options, *SCHEMES)
    if not isinstance(weights, Scheme) and weights not in choices:
        raise InputError(f"{name}={weights!r}: must be one of {', '.join(map(repr, choices))}")


FormOf = Callable[[Param], Form | None]
"""Returns the form of a parameter; None if it stays in floats."""


def of_model(form_of: FormOf, tied: bool) -> FormOf:
    """Return ``form_of`` for a whole model.

    An embedding that is not ``tied`` to the head is never multiplied, so no activations are rounded
    for it.
    """

    def adapted(param: Param) -> Form | None:
        form = form_of(param)
        return form if form is None or tied or not param.is_rows else replace(form, activations=16)

    return adapted


def common(forms: Iterable[Form | None]) -> Form | None:
    """Return the form that can hold all of several stored matrices as they are.

    It is None if there is no such form, or one matrix is in floats.
    """
    forms = list(forms)
    first = forms[0]
    if first is None or any(form is None or _essence(form) != _essence(first) for form in forms):
        return None
    has_zeros, is_ordered = (
        any(getattr(form, name) for form in forms) for name in ("has_zeros", "is_ordered")
    )
    return replace(first, has_zeros=has_zeros, is_ordered=is_ordered)


def _essence(form: Form) -> tuple[str, int, int]:
    """Return the properties that cannot be changed without changing the matrix."""
    return form.kind, form.group, form.activations


def declare(declared: Any, form_of: FormOf, mesh: Mesh | None = None) -> Any:
    """Replace the declarations of matrices that have a form with those of a `QuantizedMatrix`.

    ``declared`` is any pytree of `Param`. A CPU has no 4-bit type: there, values of 4 bits are
    stored in int8.
    """
    on_cpu = sharding.is_on_cpu(mesh)

    def quantized(param: Param) -> Any:
        if (form := form_of(param)) is None:
            return param
        return form.declare(param, jnp.int8 if on_cpu and form.kind == "int4" else None)

    return jax.tree.map(quantized, declared)


def quantize_params(
    declared: Any, params: Any, form_of: FormOf, mesh: Mesh | None, units: Mapping[str, int]
) -> Any:
    """Return ``params`` with every matrix that ``form_of`` gives a form quantized, one by one.

    A `Watched` matrix is quantized with its recorded moments. ``declared`` must not have a
    quantized matrix yet; ``units`` are as in `specjax.sharding.partition`.
    """
    targets = declare(declared, form_of, mesh)

    def quantize(param: Param, target: Any, value: Any) -> Any:
        if isinstance(value, QuantizedMatrix):
            raise InputError(
                "weights: they are quantized already: load them in floats, with weights='float'"
            )
        if not isinstance(target, QuantizedMatrix):
            return value
        if isinstance(value, Watched):
            matrix = gptq(value.weight, value.moments, target.form)
        else:
            floats = np.asarray(sharding.to_host(value, mesh))
            matrix = quantize_matrix(floats.T if param.is_rows else floats, target.form)

        def put(part: Param, numbers: np.ndarray) -> jax.Array:
            numbers = np.asarray(numbers, jnp.dtype(part.dtype))
            if mesh is None:
                return jnp.asarray(numbers)
            return sharding.put(numbers, part.place(mesh, units))

        return jax.tree.map(put, target, matrix)

    return jax.tree.map(quantize, declared, targets, params)


def declare_like(declared: Any, params: Any) -> Any:
    """Declare a `QuantizedMatrix` wherever ``params`` have one."""

    def declare_one(value: Any, param: Param) -> Any:
        if isinstance(value, QuantizedMatrix):
            return value.form.declare(param, value.values.dtype)
        return param

    return jax.tree.map(declare_one, params, declared, is_leaf=is_quantized)


def narrow(model: Any, weights: Weights) -> Any:
    """Quantize the weights of a target or drafter: the old name of the method, which warns."""
    warnings.warn(
        f"{type(model).__name__}.narrow has a new name: call it quantize",
        DeprecationWarning,
        stacklevel=2,
    )
    return model.quantize(weights)
