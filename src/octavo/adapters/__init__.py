"""Adapters: low-rank products beside the weights of a model, read from PEFT folders and GGUF files."""
