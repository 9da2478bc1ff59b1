"""Which matrices of a model are quantized, and how."""

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
    """How the matrices of a model are quantized.

    Attributes:
        layers: those of its layers.
        vocabulary: its embedding and its head; None: they stay floats.

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
        """That of a parameter; None: it stays floats, as norms, biases and routers do."""
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
"""By name: 8-bit weights; the same, multiplied with activations of 8 bits; 4-bit weights in groups of 128; FP8."""

AS_STORED, FLOATS = "stored", "float"
"""What else may be asked for: matrices are quantized as a checkpoint has them, or not at all."""

Weights = str | Scheme
"""`AS_STORED`, `FLOATS`, a name in `SCHEMES`, or a scheme of one's own."""


def scheme_of(weights: Weights) -> Scheme:
    """The scheme of that name. Raises `InputError` where there is none."""
    check_weights(weights, ())
    return weights if isinstance(weights, Scheme) else SCHEMES[weights]


def check_weights(weights: Weights, others: Sequence[str] = (AS_STORED, FLOATS), name: str = "weights") -> None:
    """Refuse, with an InputError, what names no scheme and is none of the ``others``; ``name`` is that of the argument."""
    known = (*others, *SCHEMES)
    if not isinstance(weights, Scheme) and weights not in known:
        raise InputError(f"{name}={weights!r}: must be one of {', '.join(map(repr, known))}")


FormOf = Callable[[Param], Form | None]
"""How a parameter is quantized; None: not at all."""


def of_model(form_of: FormOf, tied: bool) -> FormOf:
    """``form_of`` for a whole model. An embedding that is not ``tied`` to the head is multiplied with nothing. So no
    activations are rounded for it."""

    def of_one(param: Param) -> Form | None:
        form = form_of(param)
        return form if form is None or tied or not param.is_rows else replace(form, activations=16)

    return of_one


def common(forms: Iterable[Form | None]) -> Form | None:
    """The form in which all of several stored matrices can be held as they are; None: there is none, or one is of floats."""
    forms = list(forms)
    first = forms[0]
    if first is None or any(form is None or _essence(form) != _essence(first) for form in forms):
        return None
    has_zeros, is_ordered = (any(getattr(form, name) for form in forms) for name in ("has_zeros", "is_ordered"))
    return replace(first, has_zeros=has_zeros, is_ordered=is_ordered)


def _essence(form: Form) -> tuple[str, int, int]:
    """What cannot be added to a matrix without changing it."""
    return form.kind, form.group, form.activations


def declare(declared: Any, form_of: FormOf, mesh: Mesh | None = None) -> Any:
    """``declared``, any pytree of `Param`, with declarations of a `QuantizedMatrix` in place of each matrix that has a form.

    A CPU has no 4-bit numbers: on one, values of 4 bits are held in int8.
    """
    on_cpu = sharding.is_on_cpu(mesh)

    def one(param: Param) -> Any:
        if (form := form_of(param)) is None:
            return param
        return form.declare(param, jnp.int8 if on_cpu and form.kind == "int4" else None)

    return jax.tree.map(one, declared)


def quantize_params(declared: Any, params: Any, form_of: FormOf, mesh: Mesh | None, units: Mapping[str, int]) -> Any:
    """Return ``params`` with a `QuantizedMatrix` in place of every matrix that ``form_of`` gives a form, one after the other.

    A `Watched` matrix is quantized by the moments that were seen. ``declared`` has no quantized matrix yet; ``units`` are as in
    `specjax.sharding.partition`.
    """
    targets = declare(declared, form_of, mesh)

    def one(param: Param, target: Any, value: Any) -> Any:
        if isinstance(value, QuantizedMatrix):
            raise InputError("weights: they are quantized already: load them in floats, with weights='float'")
        if not isinstance(target, QuantizedMatrix):
            return value
        if isinstance(value, Watched):
            made = gptq(value.weight, value.moments, target.form)
        else:
            floats = np.asarray(sharding.to_host(value, mesh))
            made = quantize_matrix(floats.T if param.is_rows else floats, target.form)

        def put(part: Param, numbers: np.ndarray) -> jax.Array:
            numbers = np.asarray(numbers, jnp.dtype(part.dtype))
            return jnp.asarray(numbers) if mesh is None else sharding.put(numbers, part.place(mesh, units))

        return jax.tree.map(put, target, made)

    return jax.tree.map(one, declared, targets, params)


def declare_like(declared: Any, params: Any) -> Any:
    """Return ``declared`` with the declarations of a `QuantizedMatrix` wherever ``params`` have a quantized matrix."""

    def one(value: Any, param: Param) -> Any:
        return value.form.declare(param, value.values.dtype) if isinstance(value, QuantizedMatrix) else param

    return jax.tree.map(one, params, declared, is_leaf=is_quantized)


def narrow(model: Any, weights: Weights) -> Any:
    """Quantize the weights of a target or drafter: its method under an old name, which warns."""
    warnings.warn(f"{type(model).__name__}.narrow has a new name: call it quantize", DeprecationWarning, stacklevel=2)
    return model.quantize(weights)
