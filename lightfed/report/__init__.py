"""What a run folder says: pictures, a self-contained page, tables in the terminal, comparisons.

Reads the files of a run and nothing else of lightfed, so it works wherever a run folder is copied
to.
"""

from typing import TYPE_CHECKING, Any

from lightfed.drawing.summary import print_summary
from lightfed.report.page import build

if TYPE_CHECKING:
    from lightfed.report.comparison import compare

__all__ = ["build", "compare", "print_summary"]


def __getattr__(name: str) -> Any:
    """The page of one run does without what a comparison imports."""
    if name != "compare":
        raise AttributeError(f"module {__name__} has no attribute {name}")
    from lightfed.report.comparison import compare

    return compare
