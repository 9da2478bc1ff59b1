"""Parts of a target: embedding, final norm, head, and some layers, as a drafting client needs."""

from specjax.errors import InputError

Layers = tuple[int, int]
"""A range of layers: the first index, and the index after the last."""


def check_layers(layers: Layers, available: Layers, num_layers: int) -> Layers:
    """Return ``layers`` if a part with them can be cut out; ``(num_layers, num_layers)`` for none.

    Args:
        layers: the requested layers.
        available: the layers that are present.
        num_layers: the number of layers of the whole target.

    Raises:
        InputError: The target has no such layers, or they are not present.
    """
    first, last = layers
    if not 0 <= first <= last <= num_layers:
        raise InputError(
            f"layers=({first}, {last}): give the first layer and the one after the last, both from"
            f" 0 to num_layers={num_layers}"
        )
    if first == last:
        return num_layers, num_layers
    if first < available[0] or last > available[1]:
        raise InputError(
            f"layers=({first}, {last}): this is {describe(available, num_layers)}: cut it out of"
            " the whole target"
        )
    return first, last


def describe(available: Layers, num_layers: int) -> str:
    """Return a description of a part, for messages."""
    first, last = available
    count = last - first
    layers = f"none of the {num_layers} layers" if not count else f"layer {first} of {num_layers}"
    layers = f"layers {first} to {last - 1} of {num_layers}" if count > 1 else layers
    return f"a part of a target (embedding, final norm, head, and {layers})"


def refusal(what: str, available: Layers, num_layers: int) -> InputError:
    """Return the error for ``what``, which is a part where a whole target is required."""
    return InputError(
        f"{what}: this is {describe(available, num_layers)}, for a drafting client: give the whole"
        " target that it was cut from"
    )
