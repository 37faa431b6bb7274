"""One file for each format of reasoning; each has a `FORMAT`."""
