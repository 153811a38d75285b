"""`python kernels/bench`: what the operations take, against what they replace."""
