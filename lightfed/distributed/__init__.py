"""Ranks: collectives, placement of clients, liveness, SLURM."""
