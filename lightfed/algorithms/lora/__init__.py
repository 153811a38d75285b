"""Low-rank adapters of unlike rank: eight rules and the client that has them."""
