"""Connections, and the steps of every request before and after its endpoint."""
