"""Virtual time: delays, the clock, and servers with groups of clients.

Imports `api` and the rooms above it.
"""
