"""A model as a graph of operations on symbolic values, with its passes, costs and memory plan."""
