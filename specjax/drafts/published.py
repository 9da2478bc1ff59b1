"""Static trees that were published with their methods."""

from specjax.drafts.shapes import Choices

EAGLE_TREE: Choices = (
    *((0,), (1,), (2,), (3,)),
    *((0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0)),
    *((0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0)),
    *((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2)),
    *((0, 0, 0, 0, 0), (0, 0, 0, 0, 1)),
)
"""EAGLE-1's tree of 25 nodes and the root (SafeAILab/EAGLE, ``mc_sim_7b_63``).

Examples:
    >>> print(specjax.StaticTree(specjax.EAGLE_TREE))
    static tree, 26 nodes, 5 deep
"""

_MEDUSA = """
0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 8 9 100 020 12 003 40 21
004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 31 22 80 050 15 101 021 90 060 0001
16 070
"""
MEDUSA_TREE: Choices = tuple(tuple(map(int, path)) for path in _MEDUSA.split())
"""Medusa's tree of 63 nodes and the root (FasterDecoding/Medusa, ``mc_sim_7b_63``), in its order.

Examples:
    >>> print(specjax.StaticTree(specjax.MEDUSA_TREE))
    static tree, 64 nodes, 4 deep
"""
