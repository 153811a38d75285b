"""The files of a run folder, and metrics over several runs.

Imports `utils`.
"""
