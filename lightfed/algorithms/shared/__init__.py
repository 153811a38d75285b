"""What several papers have in common.

Imports `runs` and the rooms above it.
"""
