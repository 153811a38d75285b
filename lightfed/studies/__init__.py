"""What belongs to one paper's evaluation: its figures, tables and names of experiments."""
