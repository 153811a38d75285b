"""The run folder: its lock, tables, checkpoints, journal and exported models.

Imports `simulation` and the rooms above it.
"""
