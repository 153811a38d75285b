"""Algorithms as their users write them: a file each, outside the package."""
