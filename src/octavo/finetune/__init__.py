"""LoRA training: data, modules, resumable runs, and the adapter's folder."""
