"""Images as models see them: decoded, resized and cut, without an engine."""
