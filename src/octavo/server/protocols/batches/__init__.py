"""Files and batches in OpenAI's format."""
