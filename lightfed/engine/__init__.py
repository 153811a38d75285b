"""Lightning: the Trainer, its loop of rounds, the root module, evaluation and launching ranks."""
