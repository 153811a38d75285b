"""Clients that hold the first layers of a deep model: DepthFL and its networks."""
