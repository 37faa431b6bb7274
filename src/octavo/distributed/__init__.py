"""The ranks of one engine: their numbering, their connection, and the executor that leads them."""
