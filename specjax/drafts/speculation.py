"""The limit of what is drafted for one text: nothing, a largest depth, or a draft by its name."""

from collections.abc import Sequence
from dataclasses import dataclass

from specjax.arguments import is_whole
from specjax.drafts.names import as_shape, shape_name
from specjax.drafts.shapes import DraftShape
from specjax.errors import InputError

NO_LIMIT = 2**31 - 1
"""The limit of a row that may draft as deep as the drafter does."""

Stated = str | int | DraftShape | None
"""What a user may state: "auto" or None, "off", the largest depth, or a draft."""


@dataclass(frozen=True)
class DraftLimit:
    """The limit of what is drafted for one text, on which its distribution does not depend.

    Attributes:
        depth: the largest depth of a draft; 0 if nothing is drafted.
        draft: the index of the draft that was named; None if none was.

    Examples:
        >>> from specjax.drafts.speculation import DraftLimit
        >>> DraftLimit.of("off", drafts=[specjax.Chain(4)])
        DraftLimit(depth=0, draft=None)
        >>> DraftLimit.of("chain:4", drafts=[None, specjax.Chain(4)])
        DraftLimit(depth=4, draft=1)
    """

    depth: int = NO_LIMIT
    draft: int | None = None

    @classmethod
    def of(cls, stated: Stated, drafts: Sequence[DraftShape | None]) -> "DraftLimit":
        """Return the speculation that ``stated`` stands for, where ``drafts`` can be named.

        Args:
            stated: "auto" or None for no limit; "off" for no drafts; a whole number for the largest
                depth of a draft; or one of the drafts, as a shape or by its name.
            drafts: the drafts to choose from; None is plain decoding.

        Raises:
            InputError: It is something else, or a draft that is not among ``drafts``.
        """
        if stated is None or stated == "auto":
            return cls()
        if stated == "off":
            return cls(depth=0)
        if is_whole(stated):
            if not 0 <= stated <= NO_LIMIT:  # pyright: ignore[reportOperatorIssue]
                raise InputError(
                    f"speculation={stated}: a depth is at least 0 and below 2**31; 0 is off"
                )
            return cls(depth=int(stated))  # pyright: ignore[reportArgumentType]
        names = [shape_name(draft) for draft in drafts if draft is not None]
        names = [name for name in names if " " not in name]  # a tree of one's own has no name
        expected = f"give {', '.join(['auto', 'off', 'a largest depth such as 2', *names])}"
        if not isinstance(stated, str | DraftShape):
            raise InputError(f"speculation={stated!r}: {expected}")
        try:
            shape = as_shape(stated)
        except InputError:
            shape = None
        if shape is None or shape not in drafts:
            raise InputError(f"speculation={stated!r}: {expected}")
        return cls(depth=shape.depth, draft=list(drafts).index(shape))
