"""The memory of sequences: blocks, block tables, slots for states."""
