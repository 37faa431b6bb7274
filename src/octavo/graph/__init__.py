"""A model as a graph of operations on symbolic values, with graph passes, costs and memory plans."""
