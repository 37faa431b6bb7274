"""The kinds of row consumers: uses of the output rows of a step."""
