"""The choice of the draft depth that gives the most tokens per second, by measured times.

A round is a draft on its way up, its verification, and the verdict on its way down. A round with a
draft of depth D gives E(D) tokens in S(D) seconds::

    E(D) = 1 + s(1) + ... + s(D)      s(d): the share of drafts whose d-th token is accepted
    S(D) = T_D(D) + R + b * w + T_V   T_D: drafting, R: round trip, b: bytes, w: seconds per byte,
                                      T_V: verification

On a slow network, R is most of S at any depth, so deep drafts pay off. On a fast network, the time
of drafting counts.
"""

from collections.abc import Sequence

import numpy as np

MEMORY = 30
"""The number of rounds after which the weight of a measurement has decayed to 1/e."""

_EXPECTED = 0.75
"""The prior probability that a drafted token is accepted."""
_WEIGHT = 2.0
"""The number of rounds that the prior counts for."""


class Pace:
    """The chooser of draft depths. It learns from the times and acceptances of each round.

    Attributes:
        round_trip: the moving mean of a round's seconds without the verification. None before the
            first round.
        server: the moving mean of the seconds of a verification.

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
        """Start without measurements. ``depths`` are the depths to choose from, ascending."""
        self.depths = tuple(depths)
        self.round_trip: float | None = None
        self.server = 0.0
        self._compiled: set[int] = set()
        self._drafting: dict[int, float] = {}
        # By depth, how many drafts were at least so deep, and how many were accepted so far down.
        # Index 0: drafts made when they were due. Index 1: drafts made before the token above them
        # was known, which are accepted less often.
        expected = _EXPECTED ** np.arange(1, max(self.depths) + 1)
        self._tried, self._survived = np.zeros((2, len(expected))), np.zeros((2, len(expected)))
        self._tried[0], self._survived[0] = _WEIGHT, _WEIGHT * expected
        self._bytes = np.zeros(5)  # sums of 1, bytes, bytes squared, seconds, bytes times seconds

    def drafted(self, depth: int, seconds: float) -> None:
        """Record that a draft of ``depth`` took ``seconds``.

        The first draft of each depth is ignored, because its time may include compilation.
        """
        if depth not in self._compiled:
            self._compiled.add(depth)
            return
        before = self._drafting.get(depth)
        self._drafting[depth] = (
            seconds if before is None else before + (min(seconds, 4 * before) - before) / 8
        )

    def round(
        self,
        *,
        seconds: float,
        server: float,
        up: int,
        down: int,
        drafted: int,
        accepted: int,
        is_kept: bool = False,
    ) -> None:
        """Record a round.

        Args:
            seconds: the duration of the round.
            server: the seconds of the verification, which are part of it.
            up: the bytes sent.
            down: the bytes received.
            drafted: the number of tokens on the longest path of the draft.
            accepted: the number of accepted tokens.
            is_kept: whether the draft was made before the verdict on the draft above it.
        """
        travel = max(seconds - server, 0.0)
        decay = np.exp(-1 / MEMORY)
        size = float(up + down)
        self._bytes = self._bytes * decay + np.array(
            [1.0, size, size * size, travel, size * travel]
        )
        self.round_trip = (
            travel if self.round_trip is None else self.round_trip + (travel - self.round_trip) / 6
        )
        self.server = server if not self.server else self.server + (server - self.server) / 6
        if drafted:
            tried, survived = self._tried[int(is_kept)], self._survived[int(is_kept)]
            depth = min(drafted, len(tried))
            tried[:depth] = tried[:depth] * decay + 1
            survived[:depth] = survived[:depth] * decay + (np.arange(depth) < accepted)

    def tokens(self, depth: int, *, is_kept: bool = False) -> float:
        """Return E(D), the expected tokens of a round with a draft of ``depth``."""
        survival = self._survived[0] / self._tried[0]
        if is_kept:  # drafts made when due are the prior for drafts made early
            survival = (self._survived[1] + _WEIGHT * survival) / (self._tried[1] + _WEIGHT)
        return 1.0 + float(np.minimum.accumulate(survival)[:depth].sum())

    def seconds(self, depth: int, *, is_drafted: bool = False) -> float:
        """Return S(D), the expected seconds of a round; without drafting if the draft exists."""
        return (0.0 if is_drafted else self.drafting(depth)) + self.travel(depth) + self.server

    def drafting(self, depth: int) -> float:
        """Return T_D(D), the seconds of drafting, scaled from the nearest measured depth."""
        if not self._drafting:
            return 0.0
        nearest = min(self._drafting, key=lambda measured: abs(measured - depth))
        return self._drafting[nearest] * depth / nearest

    def travel(self, depth: int) -> float:
        """Return R + b w, the round trip with the bytes of a verdict on E(D) tokens."""
        count, size, squared, travel, product = self._bytes
        if self.round_trip is None or count < 2:
            return self.round_trip or 0.0
        # A linear fit of seconds against bytes. If all sizes are about the same, the slope is 0.
        variance = squared - size * size / count
        per_byte = (
            max((product - size * travel / count) / variance, 0.0) if variance > count else 0.0
        )
        mean_size = size / count
        per_token = per_byte * mean_size / max(self.tokens(self.depths[-1]), 1.0)
        return max(self.round_trip - per_byte * mean_size, 0.0) + per_token * self.tokens(depth)

    def choose(self) -> int:
        """Return the depth that gives the most tokens per second."""
        return max(
            self.depths, key=lambda depth: self.tokens(depth) / max(self.seconds(depth), 1e-9)
        )

    def is_worth_keeping(self, depth: int) -> bool:
        """Return whether to send an existing draft of ``depth`` instead of a new draft.

        The existing draft needs no time for drafting; the new one has the best depth.
        """
        best = self.choose()
        rate = self.tokens(min(depth, self.depths[-1]), is_kept=True) / max(
            self.seconds(depth, is_drafted=True), 1e-9
        )
        return rate >= self.tokens(best) / max(self.seconds(best), 1e-9)
