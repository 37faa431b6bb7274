"""The served models: finding, loading and unloading them within a memory limit."""
