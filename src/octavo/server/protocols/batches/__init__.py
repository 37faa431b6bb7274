"""Files and batches in OpenAI's shape."""
