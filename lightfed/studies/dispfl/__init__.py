"""Masks of clients: their distances, compared with those of the clients' labels."""
