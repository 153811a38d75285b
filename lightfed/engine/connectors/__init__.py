"""Connectors of Lightning that a federation replaces, and how its ranks meet."""
