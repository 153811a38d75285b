"""Triton kernels, one module an operation; imported at the first launch."""
