"""The package of providers: libraries in place of kernels of ours, each with `can(problem)` and its functions."""
