"""Low-rank adapters of unlike rank: rules of merging them, and the client that has them."""
