"""Averaging over clients that hold different parts of a model.

Imports `state` and the rooms above it.
"""
