"""The ranks of a model that runs in several processes."""
