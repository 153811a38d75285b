"""One file per paper; add new algorithms here.

Imports the rooms below the engine, and `shared`, but not the engine.
"""
