"""Quantized weights: file formats, canonical weights, and quantization at load time."""
