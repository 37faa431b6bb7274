"""Makes models smaller: quantization to GGUF files and the other steps around it."""
