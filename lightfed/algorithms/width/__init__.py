"""Clients that hold slices of a wide model: HeteroFL, FedRolex, FjORD."""
