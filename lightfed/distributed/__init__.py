"""The ranks: collectives, who holds which client, whether a rank is alive, SLURM.

Imports `utils`.
"""
