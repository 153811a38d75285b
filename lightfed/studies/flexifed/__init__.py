"""Strategies by version, and accuracy before and after aggregation."""
