"""Request bodies and answers, with one set of files for each protocol."""
