"""Averaging over clients that hold different parts of a model."""
