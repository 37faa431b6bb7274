"""Encoders: rows of images for spans of prompts, and the positions of tokens around them."""
