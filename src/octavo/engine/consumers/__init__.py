"""Row consumers: the different uses of a step's output rows."""
