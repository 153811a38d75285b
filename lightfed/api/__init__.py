"""The API for writing algorithms: `Algorithm` and the `Fleet` of clients."""
