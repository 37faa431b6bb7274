"""Engines to measure, one module each: `python -m peers.NAME`, run by that engine's own Python."""
