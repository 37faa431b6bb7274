"""The reasoning formats, one file each. Each file defines a `FORMAT`."""
