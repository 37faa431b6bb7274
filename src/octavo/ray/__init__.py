"""Octavo on Ray: a deployment for Ray Serve, and batches through Ray Data. Needs the extra `ray`."""
