"""Tools for demonstrations and measurements: inflated models, and comparisons of methods."""

from specjax.demo.comparison import Measured, MethodComparison, compiling
from specjax.demo.inflation import inflate
from specjax.demo.on_inflated import OnInflated

__all__ = ["Measured", "MethodComparison", "OnInflated", "compiling", "inflate"]
