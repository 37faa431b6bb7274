"""HTTP server: OpenAI-compatible access to one or more engines."""
