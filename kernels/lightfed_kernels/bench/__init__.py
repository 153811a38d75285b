"""`python -m lightfed_kernels.bench`: what the operations take, against what they replace."""
