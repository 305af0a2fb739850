"""From ATen graphs to one HLO module in normal form."""

from aot_compiler.lowering.lower import LoweredEntry, lower

__all__ = ["LoweredEntry", "lower"]
