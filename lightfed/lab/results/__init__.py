"""The files of runs as pandas tables, and metrics over several runs."""
