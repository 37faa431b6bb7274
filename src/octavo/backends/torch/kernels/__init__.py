"""Triton kernels, one family per file. Each has a plain function that takes torch tensors and launches it."""
