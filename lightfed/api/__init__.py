"""What an algorithm is written in: the words are in `fleet.py`, hooks in `local/hooks.py`."""
