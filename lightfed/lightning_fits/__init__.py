"""Sessions as Lightning fits: which hooks are called, the Trainer of a session, what it keeps."""
