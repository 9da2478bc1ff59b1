"""The class of an object as a static field, so that ``jit`` never mixes up two classes."""

from flax import struct


@struct.dataclass
class KeyedByClass:
    """Base class of pytrees that users extend: its static fields include the object's class.

    JAX compares the tree definitions of ``flax.struct`` dataclasses by their static fields and not
    by their classes (JAX 0.10 to 0.12). Without this field, two classes with equal fields would
    compare equal, and ``jit`` would run the program of one for the other whenever their hashes fall
    together: of a class that is defined again in a notebook, or of a target with another head.

    A subclass that defines ``__post_init__`` calls this one.

    Examples:
        >>> from flax import struct
        >>> from specjax.pytree_class import KeyedByClass
        >>> @struct.dataclass
        ... class Double(KeyedByClass):
        ...     x: jax.Array
        >>> @struct.dataclass
        ... class Square(KeyedByClass):
        ...     x: jax.Array
        >>> jax.tree.structure(Double(jnp.ones(3))) == jax.tree.structure(Square(jnp.ones(3)))
        False
    """

    pytree_class: type | None = struct.field(
        pytree_node=False, default=None, kw_only=True, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        # Set here and not by a default: `Subclass(**vars(other))` copies the other's class.
        object.__setattr__(self, "pytree_class", type(self))
