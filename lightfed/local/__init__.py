"""A client's local training: its group, module, optimiser, session, and hooks of the algorithm.

Imports `aggregation` and the rooms above it.
"""
