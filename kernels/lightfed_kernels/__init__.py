"""Rows and offsets: kernels for the aggregation of heterogeneous models.

Knows torch and Triton, nothing of lightfed.
"""

from lightfed_kernels.layout import ALIGNMENT, Entry, Layout
from lightfed_kernels.members import FIXED_LIMIT, FIXED_SCALE, Members
from lightfed_kernels.merge import slice_finish_, slice_merge_, slice_sum, slice_take_
from lightfed_kernels.slices import SliceTable

__all__ = [
    "ALIGNMENT",
    "FIXED_LIMIT",
    "FIXED_SCALE",
    "Entry",
    "Layout",
    "Members",
    "SliceTable",
    "slice_finish_",
    "slice_merge_",
    "slice_sum",
    "slice_take_",
]
