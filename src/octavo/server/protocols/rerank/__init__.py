"""The scores of texts: rerank in the shape of Jina and Cohere, score in vLLM's."""
