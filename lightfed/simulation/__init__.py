"""Virtual time: delays, the clock, and servers with groups of clients."""
