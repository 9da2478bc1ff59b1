"""The names of draft shapes, as in command lines and configuration files."""

from specjax.drafts.published import EAGLE_TREE, MEDUSA_TREE
from specjax.drafts.shapes import (
    Chain,
    DraftShape,
    DynamicTree,
    SampledTree,
    StaticTree,
    UnionTree,
    complete_tree,
)
from specjax.errors import InputError, did_you_mean

SHAPE_NAMES = (
    "chain:LENGTH, chain:LENGTH,STOP_BELOW, eagle, medusa, complete:WIDTH,WIDTH,…,"
    " sampled:WIDTH,WIDTH,…, dynamic or dynamic:TOP_K,DEPTH,NODES; of several drafters"
    " SHAPE+SHAPE or SHAPE+SHAPE/NODES"
)

_KINDS = ("chain", "eagle", "medusa", "complete", "sampled", "dynamic")


def parse_shape(name: str) -> DraftShape:
    """Return the shape with this name, such as ``chain:4`` or ``dynamic:10,7,60``.

    ``chain:4+chain:8`` is a `UnionTree`, with a shape for each of several drafters;
    ``chain:4+chain:8/8`` is one of at most 8 nodes below the root.

    Raises:
        InputError: No shape has this name, or its numbers are invalid.

    Examples:
        >>> from specjax.drafts.names import parse_shape
        >>> parse_shape("dynamic:10,7,60")
        DynamicTree(top_k=10, depth=7, nodes=60)
        >>> parse_shape("sampled:3,2,1").nodes
        16
        >>> print(parse_shape("chain:4+chain:8"))
        union of (chain of 4; chain of 8), 13 nodes, 8 deep
        >>> parse_shape("chain:4+chain:8/8").nodes
        9
        >>> parse_shape("chain:0")
        Traceback (most recent call last):
        specjax.errors.InputError: draft=Chain(length=0): a draft has at least 1 token; ...
    """
    if "+" in name:
        shapes, slash, most = name.partition("/")
        if slash and not most.isdecimal():
            raise InputError(f"draft={name!r}: give a number of nodes after the slash")
        limit = int(most) if slash else None
        return UnionTree(tuple(map(parse_shape, shapes.split("+"))), most=limit)
    kind, _, rest = name.partition(":")
    words = rest.split(",") if rest else []
    try:
        match kind, len(words):
            case "chain", 1 | 2:
                return Chain(int(words[0]), *map(float, words[1:]))
            case "complete", count if count:
                return StaticTree(complete_tree(tuple(map(int, words))))
            case "sampled", count if count:
                return SampledTree(tuple(map(int, words)))
            case "dynamic", 0 | 3:
                return DynamicTree(*map(int, words))
            case "eagle", 0:
                return StaticTree(EAGLE_TREE)
            case "medusa", 0:
                return StaticTree(MEDUSA_TREE)
    except InputError:
        raise
    except ValueError:  # a word is not a number, so the name is wrong
        pass
    hint = "" if kind in _KINDS else did_you_mean(kind, _KINDS)
    raise InputError(f"draft={name!r}: must be {SHAPE_NAMES}{hint}")


def shape_name(shape: DraftShape) -> str:
    """Return the name of a shape, as `parse_shape` reads it.

    A static tree of one's own has no name; it is described.

    Examples:
        >>> from specjax.drafts.names import shape_name
        >>> shape_name(specjax.Chain(4)), shape_name(specjax.DynamicTree(4, 3, 16))
        ('chain:4', 'dynamic:4,3,16')
    """
    if isinstance(shape, Chain):
        return f"chain:{shape.length}" + (f",{shape.stop_below:g}" if shape.stop_below else "")
    if isinstance(shape, DynamicTree):
        return f"dynamic:{shape.top_k},{shape.depth},{shape.nodes}"
    if isinstance(shape, SampledTree):
        return f"sampled:{','.join(map(str, shape.widths))}"
    if isinstance(shape, UnionTree) and shape == UnionTree(shape.shapes, most=shape.most):
        limit = "" if shape.most is None else f"/{shape.most}"
        return "+".join(map(shape_name, shape.shapes)) + limit
    trees = {StaticTree(EAGLE_TREE): "eagle", StaticTree(MEDUSA_TREE): "medusa"}
    return trees.get(shape, str(shape))  # pyright: ignore[reportArgumentType, reportCallIssue]


def as_shape(draft: DraftShape | int | str) -> DraftShape:
    """Return the shape that an argument ``draft`` stands for.

    It is a shape, the length of a chain, or a name as for `parse_shape`.

    Raises:
        InputError: The argument is none of these.

    Examples:
        >>> from specjax.drafts.names import as_shape
        >>> as_shape(4) == as_shape("chain:4") == specjax.Chain(4)
        True
    """
    if isinstance(draft, DraftShape):
        return draft
    if isinstance(draft, str):
        return parse_shape(draft)
    if isinstance(draft, int) and not isinstance(draft, bool):
        return Chain(draft)
    raise InputError(
        f"draft={draft!r}: give a shape such as Chain(4), the length of a chain, or {SHAPE_NAMES}"
    )
