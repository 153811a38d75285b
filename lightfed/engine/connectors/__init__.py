"""Connectors of Lightning that a federation replaces."""
