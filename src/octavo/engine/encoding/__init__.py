"""Encoders: image rows for spans of prompts, and the positions of the tokens around them."""
