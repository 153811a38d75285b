"""Clients of one group trained side by side: which, how, and what becomes of those that fail."""
