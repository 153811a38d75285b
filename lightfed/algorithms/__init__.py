"""One file per paper; add new algorithms here."""
