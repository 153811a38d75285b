"""Local training of a client: its group, module, optimiser, session, and the algorithm's hooks."""
