"""What surrounds the steps of a session, and what is left of it when its round stops."""
