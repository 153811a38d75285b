"""Rows and offsets: kernels for the aggregation of heterogeneous models.

Knows torch and Triton, nothing of lightfed.
"""

from lightfed_kernels.layout import ALIGNMENT, Entry, Layout

__all__ = ["ALIGNMENT", "Entry", "Layout"]
