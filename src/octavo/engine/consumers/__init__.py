"""The kinds of row consumers: what is made of the rows of a step."""
