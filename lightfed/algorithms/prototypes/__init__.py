"""Clients that exchange class means: FD, FedProto, FedTGP, FedGH."""
