"""Adapters: low-rank products added to the weights of a model, read from PEFT folders and GGUF files."""
