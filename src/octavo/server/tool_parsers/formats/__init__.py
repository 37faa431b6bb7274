"""The tool call formats, one file each. Each file defines `FORMAT`, and formats are found by file name."""
