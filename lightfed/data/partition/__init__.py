"""Partitions: how samples are split among clients."""
