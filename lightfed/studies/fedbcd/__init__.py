"""Clouds of servers: accuracy over virtual time, and the analysis of latency."""
