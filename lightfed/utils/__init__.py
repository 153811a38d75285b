"""Random generators, errors, signals, files: every room may import them."""
