"""A model in one process: its device, its memory, its weights."""
