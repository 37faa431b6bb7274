"""Loading a model in one process: its device, memory and weights."""
