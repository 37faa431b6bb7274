"""The engine: accepts requests, schedules steps, manages the KV cache and returns outputs."""
