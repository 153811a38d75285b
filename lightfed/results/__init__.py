"""The files of a run folder, and figures over several runs.

Imports `utils`.
"""
