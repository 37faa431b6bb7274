"""Batches: files of requests that are answered in full, whatever stops on the way."""
