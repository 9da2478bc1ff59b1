"""What the demonstration and the measurements need beside the library: a small model at the cost of a large one, and methods
side by side."""

from specjax.demo.comparison import Measured, MethodComparison, compiling
from specjax.demo.inflation import inflate
from specjax.demo.on_inflated import OnInflated

__all__ = ["Measured", "MethodComparison", "OnInflated", "compiling", "inflate"]
