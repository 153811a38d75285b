"""A paper a file; add one here.

Imports everything that an algorithm is written in, and `shared`, but not the engine.
"""
