"""A model in several processes."""
