"""The package of LoRA training: data, modules, runs that go on after any end, and the adapter's folder."""
