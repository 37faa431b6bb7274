"""One file for each format of tool calls, which defines `FORMAT`. They are found by their file names."""
