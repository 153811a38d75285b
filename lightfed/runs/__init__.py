"""The run folder: its lock, tables, checkpoints, journal and exported models."""
