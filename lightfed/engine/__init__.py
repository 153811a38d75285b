"""Lightning: the Trainer, its loop of rounds, the root module, evaluation and launching ranks.

Imports all rooms above it.
"""
