"""Charts, tables and pages, of whatever is in them.

Imports `results` and `utils`.
"""
