"""Data sets, partitions, and the batches of each client."""
