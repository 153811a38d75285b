"""Mixtures of experts and other methods, and the weights of their gates."""
