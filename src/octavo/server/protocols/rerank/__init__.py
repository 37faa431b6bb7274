"""Scores of texts: `/v1/rerank` in Jina's and Cohere's format, and `/v1/score` in vLLM's format."""
