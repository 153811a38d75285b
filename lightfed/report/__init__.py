"""Reports on runs: pictures, a self-contained page, tables in the terminal, comparisons.

They need only the files of a run folder, so they work on a copy of it.
"""

from typing import TYPE_CHECKING, Any

from lightfed.drawing.summary import print_summary
from lightfed.report.page import build

if TYPE_CHECKING:
    from lightfed.report.comparison import compare

__all__ = ["build", "compare", "print_summary"]


def __getattr__(name: str) -> Any:
    """`compare`, imported on first use: the page of a single run does not need its imports."""
    if name != "compare":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from lightfed.report.comparison import compare

    return compare
