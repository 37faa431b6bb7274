"""Makes quantized Hugging Face checkpoints: GPTQ, AWQ and the other formats of `octavo.quantization.checkpoints`."""
