"""Mixtures of experts and other methods, and the weights of their gates.

Imports `drawing`, `results` and `utils`.
"""
