"""Ranks: collectives, placement of clients, watch over ranks, SLURM."""
