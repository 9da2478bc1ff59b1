"""What the demonstration and the measurements need beside the library: a small model at the cost of a large one."""

from specjax.demo.inflation import inflate
from specjax.demo.on_inflated import OnInflated

__all__ = ["OnInflated", "inflate"]
