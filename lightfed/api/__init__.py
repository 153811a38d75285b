"""What an algorithm is written in: `Algorithm`, and the `Fleet` of clients.

Imports `local` and the rooms above it.
"""
