"""How deep to draft: as deep as brings the most tokens a second, by what was measured.

A round is a draft on its way up, its verification, and the verdict on its way down. A draft of depth D brings::

    E(D) = 1 + s(1) + ... + s(D)      tokens, s(d) being the share of drafts whose d-th token is accepted
    S(D) = T_D(D) + R + b * w + T_V   seconds: drafting, the round trip, so many bytes, and the server's own

On a slow network R is most of S, whatever the depth, and deep drafts pay; on a fast one the seconds of drafting count.
"""

from collections.abc import Sequence

import numpy as np

MEMORY = 30
"""Rounds after which what was measured counts 1/e of what is measured now."""

_EXPECTED = 0.75
"""The chance that a drafted token is accepted, as long as nothing is known."""
_WEIGHT = 2.0
"""So many rounds that expectation counts."""


class Pace:
    """Chooses depths, and is told what came of them.

    Attributes:
        round_trip: seconds, without the server's own: the moving mean. None: nothing is known.
        server: seconds of verification, likewise.

    Examples:
        >>> from specjax.client.pace import Pace
        >>> pace = Pace([2, 4, 8])
        >>> for depth in (2, 4, 8, 2, 4, 8):
        ...     pace.drafted(depth, seconds=0.01 * depth)
        >>> pace.round(seconds=0.005, server=0.001, up=400, down=4000, drafted=4, accepted=2)
        >>> quick = pace.choose()
        >>> for _ in range(50):
        ...     pace.round(seconds=0.5, server=0.001, up=400, down=4000, drafted=8, accepted=7)
        >>> quick, pace.choose()  # deeper when the network is slow
        (2, 8)
    """

    def __init__(self, depths: Sequence[int]) -> None:
        """Of the ``depths`` that can be drafted, ascending."""
        self.depths = tuple(depths)
        self.round_trip: float | None = None
        self.server = 0.0
        self._begun: set[int] = set()
        self._drafting: dict[int, float] = {}
        # By depth, how many drafts were so deep, and how many were accepted as far; of drafts that were made when they were
        # wanted, and of those that were made before the token above them was known.
        expected = _EXPECTED ** np.arange(1, max(self.depths) + 1)
        self._tried, self._survived = np.zeros((2, len(expected))), np.zeros((2, len(expected)))
        self._tried[0], self._survived[0] = _WEIGHT, _WEIGHT * expected
        self._bytes = np.zeros(5)  # sums of 1, bytes, bytes squared, seconds, bytes times seconds

    def drafted(self, depth: int, seconds: float) -> None:
        """A draft of ``depth`` took ``seconds``. The first of each depth is not counted: it may have been compiled."""
        if depth not in self._begun:
            self._begun.add(depth)
            return
        before = self._drafting.get(depth)
        self._drafting[depth] = seconds if before is None else before + (min(seconds, 4 * before) - before) / 8

    def round(
        self, *, seconds: float, server: float, up: int, down: int, drafted: int, accepted: int, is_kept: bool = False
    ) -> None:
        """A round is over.

        Args:
            seconds: that it took.
            server: of those, on the server.
            up: bytes.
            down: bytes.
            drafted: tokens on the longest path.
            accepted: of those.
            is_kept: the draft was there before the verdict above it.
        """
        travel = max(seconds - server, 0.0)
        kept = np.exp(-1 / MEMORY)
        size = float(up + down)
        self._bytes = self._bytes * kept + np.array([1.0, size, size * size, travel, size * travel])
        self.round_trip = travel if self.round_trip is None else self.round_trip + (travel - self.round_trip) / 6
        self.server = server if not self.server else self.server + (server - self.server) / 6
        if drafted:
            tried, survived = self._tried[int(is_kept)], self._survived[int(is_kept)]
            known = min(drafted, len(tried))
            tried[:known] = tried[:known] * kept + 1
            survived[:known] = survived[:known] * kept + (np.arange(known) < accepted)

    def tokens(self, depth: int, *, is_kept: bool = False) -> float:
        """E(D), the tokens that a draft of ``depth`` brings."""
        survival = self._survived[0] / self._tried[0]
        if is_kept:  # as good as the others, until it is known better
            survival = (self._survived[1] + _WEIGHT * survival) / (self._tried[1] + _WEIGHT)
        return 1.0 + float(np.minimum.accumulate(survival)[:depth].sum())

    def seconds(self, depth: int, *, is_drafted: bool = False) -> float:
        """S(D); of a draft that is there already, without those of drafting."""
        return (0.0 if is_drafted else self.drafting(depth)) + self.travel(depth) + self.server

    def drafting(self, depth: int) -> float:
        """T_D(D); where it was never measured, by the nearest depth that was."""
        if not self._drafting:
            return 0.0
        nearest = min(self._drafting, key=lambda known: abs(known - depth))
        return self._drafting[nearest] * depth / nearest

    def travel(self, depth: int) -> float:
        """R + b w: the round trip, with the bytes of a verdict on so many tokens."""
        count, size, squared, travel, product = self._bytes
        if self.round_trip is None or count < 2:
            return self.round_trip or 0.0
        spread = squared - size * size / count
        a_byte = max((product - size * travel / count) / spread, 0.0) if spread > count else 0.0
        usual, each = size / count, a_byte * size / count / max(self.tokens(self.depths[-1]), 1.0)
        return max(self.round_trip - a_byte * usual, 0.0) + each * self.tokens(depth)

    def choose(self) -> int:
        """The depth that brings the most tokens a second."""
        return max(self.depths, key=lambda depth: self.tokens(depth) / max(self.seconds(depth), 1e-9))

    def is_worth_keeping(self, depth: int) -> bool:
        """Whether a draft of ``depth`` that is there brings more, at once, than the best one that would have to be drafted."""
        best = self.choose()
        now = self.tokens(min(depth, self.depths[-1]), is_kept=True) / max(self.seconds(depth, is_drafted=True), 1e-9)
        return now >= self.tokens(best) / max(self.seconds(best), 1e-9)
