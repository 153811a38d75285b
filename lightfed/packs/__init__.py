"""Clients that train side by side: which can, how they train, how they are tested."""
