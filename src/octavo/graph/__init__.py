"""A model as a graph of operations on symbolic values, and what follows from it."""
