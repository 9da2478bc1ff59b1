"""What can be trained, and how: one file a method, named as its paper names it.

A new method is one file here with a `Method` (`base` says what that is), and one more name in `AnyMethod`: the loop, the
configuration files and the command line know it from there.
"""

from specjax.training.methods.base import Method
from specjax.training.methods.distill import Distill
from specjax.training.methods.lm import Lm

AnyMethod = Lm | Distill
"""The table of methods: what the section ``method`` of a configuration can be, told apart by its ``name``."""

__all__ = ["AnyMethod", "Distill", "Lm", "Method"]
