"""Virtual time: delays, the clock, servers over groups of clients.

Imports `api` and the rooms above it.
"""
