"""Evaluates models: perplexity, divergence from a reference, tasks, and comparisons."""
