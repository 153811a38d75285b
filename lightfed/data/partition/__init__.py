"""Partitions: how samples are dealt to clients."""
