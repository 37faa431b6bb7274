"""The engine as a service, in its own process or in this one."""
