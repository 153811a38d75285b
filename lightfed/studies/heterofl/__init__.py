"""Model size against accuracy, and control strings.

Imports `drawing`, `results` and `utils`.
"""
