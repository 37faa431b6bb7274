"""Finds, downloads, opens and writes model files."""
