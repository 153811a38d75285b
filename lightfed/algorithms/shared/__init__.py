"""Code that several papers share.

Imports `runs` and the rooms above it.
"""
