"""Images as models see them: decoded, resized and split into tiles, without an engine."""
