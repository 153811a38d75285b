"""Rows and offsets: kernels for the aggregation of heterogeneous models.

Depends on torch and Triton, not on lightfed.
"""

from lightfed_kernels.groups import Groups
from lightfed_kernels.layout import ALIGNMENT, Entry, Layout
from lightfed_kernels.masked_mean import masked_mean, masked_mean_expression
from lightfed_kernels.masks import apply_mask_, compress, expand, pack_mask, popcount, unpack_mask
from lightfed_kernels.means import grouped_mean_, grouped_spread_, grouped_sum
from lightfed_kernels.merge import slice_finish_, slice_merge_, slice_sum, slice_take_
from lightfed_kernels.neighbours import Neighbours
from lightfed_kernels.segments import Segments, count_per_tensor
from lightfed_kernels.select import prune_counts, prune_regrow, select_by_magnitude, select_random
from lightfed_kernels.slices import Members, SliceTable
from lightfed_kernels.steps import aspg_step_

__all__ = [
    "ALIGNMENT",
    "Entry",
    "Groups",
    "Layout",
    "Members",
    "Neighbours",
    "Segments",
    "SliceTable",
    "apply_mask_",
    "aspg_step_",
    "compress",
    "count_per_tensor",
    "expand",
    "grouped_mean_",
    "grouped_spread_",
    "grouped_sum",
    "masked_mean",
    "masked_mean_expression",
    "pack_mask",
    "popcount",
    "prune_counts",
    "prune_regrow",
    "select_by_magnitude",
    "select_random",
    "slice_finish_",
    "slice_merge_",
    "slice_sum",
    "slice_take_",
    "unpack_mask",
]
