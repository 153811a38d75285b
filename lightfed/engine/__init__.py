"""Lightning: the Trainer, its loop of rounds, the root module, evaluation and the start of ranks.

Imports all rooms above it.
"""
