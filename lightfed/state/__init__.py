"""The state of clients and servers as flat rows, and what it costs to send it.

Imports `utils`.
"""
