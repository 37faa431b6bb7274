"""Request bodies and answers, one set of files for each protocol."""
