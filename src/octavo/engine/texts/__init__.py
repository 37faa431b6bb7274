"""Texts and vectors before and after the engine: prompts, grammars, scores."""
