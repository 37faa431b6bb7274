"""Speculation: guesses at the next tokens, and how many of them a step computes."""
