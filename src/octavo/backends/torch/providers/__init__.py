"""Providers: libraries that replace our own kernels, each with `can(problem)` and its functions."""
