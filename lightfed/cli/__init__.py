"""The command line: `lightfed fit` and the others, and its one-line errors."""
