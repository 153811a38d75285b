"""A client trains as Lightning would train it alone."""
