"""Local training of a client: its group, module, optimizer, session, and the algorithm's hooks."""
