"""The ranks of one engine: how they are numbered and connected, and the executor that leads them."""
