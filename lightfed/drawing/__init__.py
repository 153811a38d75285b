"""Charts, tables and pages for any content.

Imports `results` and `utils`.
"""
