"""The HTTP server: an OpenAI-compatible front to one engine or several."""
