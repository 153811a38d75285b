"""The API for writing algorithms: `Algorithm` and the `Fleet` of clients.

Imports `local` and the rooms above it.
"""
