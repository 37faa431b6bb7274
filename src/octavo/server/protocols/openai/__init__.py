"""OpenAI's chat and text completions and embeddings, with vLLM's additions."""
