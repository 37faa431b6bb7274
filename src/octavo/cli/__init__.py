"""The command `octavo`."""
