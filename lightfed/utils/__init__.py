"""Random generators, errors, signals, files: what every room may import.

Imports no other room.
"""
