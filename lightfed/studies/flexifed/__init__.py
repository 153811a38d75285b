"""Strategies by version, and accuracy before and after aggregation.

Imports `drawing`, `results` and `utils`.
"""
