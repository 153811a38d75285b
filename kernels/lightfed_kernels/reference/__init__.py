"""The operations in float64 and the simplest possible torch, for tests and benchmarks."""
