"""Random generators, errors, signals, files: every room may import them.

Imports no other room.
"""
