"""The engine as a service: in a process of its own, or in this one."""
