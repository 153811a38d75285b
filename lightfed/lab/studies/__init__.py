"""The evaluations of single papers: their figures, tables and names of experiments."""
