"""Model size against accuracy, and control strings."""
