"""Graphs of peers and clouds, and their mixing matrices."""
