"""Texts and vectors around the engine: prompts, grammars, scores."""
