"""Clients of several networks: mixtures of experts, mutual learning, prototypes, body and head."""
