"""Text Generation Inference's interface."""
