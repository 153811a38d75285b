"""The state of clients and servers as flat rows, and the cost of sending it."""
