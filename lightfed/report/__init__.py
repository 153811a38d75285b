"""What a run folder says: pictures, a self-contained page, tables in the terminal, comparisons.

Reads the files of a run and nothing else of lightfed, so it works wherever a run folder is copied
to.
"""

from lightfed.drawing.summary import print_summary
from lightfed.report.compare import compare
from lightfed.report.page import build

__all__ = ["build", "compare", "print_summary"]
