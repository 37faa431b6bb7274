"""Connections, and what every request passes before and behind its endpoint."""
