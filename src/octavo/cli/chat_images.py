"""Images, documents and videos in chat lines. When a file is dropped on a terminal, the terminal pastes its path."""

from __future__ import annotations

import re
from pathlib import Path

from octavo import env

_NAME = r"\.(?:jpe?g|png|webp|gif|bmp|pdf|mp4|m4v|mov|webm|mkv|avi)"
# Terminals paste paths in quotes, or with a backslash before each space.
_PATH = re.compile(
    rf"""(?:^|\s)(?:'(?P<single>[^'\n]+{_NAME})'|"(?P<double>[^"\n]+{_NAME})"|"""
    rf"""(?P<bare>(?:~|\.{{0,2}})/(?:\\.|[^\s\\])*{_NAME}))\s*$""",
    re.IGNORECASE,
)


def dropped_images(message: str) -> tuple[str, list[Path]]:
    """Remove the paths of existing media files from the end of a message. Return the rest of the message and the
    paths.
    """
    found: list[Path] = []
    while (match := _PATH.search(message)) is not None:
        name = match["single"] or match["double"] or re.sub(r"\\(.)", r"\1", match["bare"])
        path = env.user_path(name)
        if not path.is_file():
            break
        found.insert(0, path)
        message = message[: match.start()].rstrip()
    return message, found
