"""Everything that differs between Linux, macOS and Windows; the rest of the package names no operating system.

Each function has one form per system, chosen by `sys.platform`, and a fallback for systems without the feature.
"""
