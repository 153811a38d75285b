"""Random generators, errors, signals, files: every room may import them."""

__version__ = "0.2.0"
