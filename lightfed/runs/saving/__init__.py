"""How checkpoints are written: their files, and the thread that writes while a run trains."""
