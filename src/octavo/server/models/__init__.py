"""Models while they are served: found, loaded, kept within memory, unloaded."""
