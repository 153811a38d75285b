"""Folders with a model to share: weights, configuration and a model card."""
