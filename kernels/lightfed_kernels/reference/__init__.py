"""What the operations compute, in float64 and the plainest torch: for tests and benchmarks."""
