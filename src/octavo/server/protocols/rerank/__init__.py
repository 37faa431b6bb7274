"""Scores of texts: rerank in Jina's and Cohere's format, score in vLLM's."""
