"""Parts of a target: its embedding, final norm and head, and some neighbouring layers. Drafting at a client needs no more."""

from specjax.errors import InputError

Layers = tuple[int, int]
"""Some neighbouring layers: from the first number up to, and without, the second."""


def check_layers(layers: Layers, held: Layers, num_layers: int) -> Layers:
    """``layers``, if a part can be cut out with them; none at all are ``(num_layers, num_layers)``.

    Args:
        layers: the ones that are asked for.
        held: the ones that are there.
        num_layers: of the whole target.

    Raises:
        InputError: they are no layers of it, or are not there.
    """
    first, last = layers
    if not 0 <= first <= last <= num_layers:
        raise InputError(
            f"layers=({first}, {last}): give the first one and the one after the last, both from 0 to {num_layers}, the number "
            "of the target's layers"
        )
    if first == last:
        return num_layers, num_layers
    if first < held[0] or last > held[1]:
        raise InputError(f"layers=({first}, {last}): this is {describe(held, num_layers)}: cut it out of the whole target")
    return first, last


def describe(held: Layers, num_layers: int) -> str:
    """What a part holds, for messages."""
    first, last = held
    count = last - first
    layers = f"none of the {num_layers} layers" if not count else f"layer {first} of {num_layers}"
    layers = f"layers {first} to {last - 1} of {num_layers}" if count > 1 else layers
    return f"a part of a target (embedding, final norm, head, and {layers})"


def refusal(what: str, held: Layers, num_layers: int) -> InputError:
    """The error where a whole target is needed, and ``what`` was given."""
    return InputError(
        f"{what}: is {describe(held, num_layers)}, with which a client drafts: give the whole target that it was cut from"
    )
