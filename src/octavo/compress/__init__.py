"""Makes models smaller: quantization to GGUF files, and what it needs to know of the model."""
