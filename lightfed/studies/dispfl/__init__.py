"""Masks: how near those of clients are, and their labels.

Imports `drawing`, `results` and `utils`.
"""
