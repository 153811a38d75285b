"""The data sets, their files and what makes samples of them.

A file a family of data sets; add one here. Imports `utils`.
"""
