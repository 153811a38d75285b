"""Masks of clients: their distances, compared with those of the clients' labels.

Imports `drawing`, `results` and `utils`.
"""
