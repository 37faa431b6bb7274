"""Triton kernels, one family a file; each has a plain function that takes torch tensors and launches it."""
