"""The memory of sequences: blocks, block tables and state slots."""
