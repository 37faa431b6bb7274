"""Batches: files of requests that are answered completely, even after interruptions."""
