"""Reports on runs: a self-contained page, figures, tables in the terminal, comparisons.

They need only the files of a run folder, so they work on a copy of it.
"""
