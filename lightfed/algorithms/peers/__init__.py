"""Clients that exchange models with each other: D-PSGD, DisPFL, My-1, My-2."""
